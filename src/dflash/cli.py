"""The ``dflash`` command: one small function per subcommand, no logic; what each takes is in ``cli_arguments.py``.

Heavy imports happen inside the functions, so that ``--help`` and a wrong config answer at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from dflash import estimate
from dflash.cli_arguments import command_line
from dflash.config import ConfigError, load_config, missing_files, to_dict
from dflash.config_target import resolve
from dflash.strict_yaml import dump


def train(args: argparse.Namespace) -> int:
    """Train a drafter, or with --dry-run say what that would take."""
    config = load_config(args.config, args.overrides, check_files=not args.dry_run)
    target_config = estimate.find_target_config(config, weights_needed=not args.dry_run)
    config = resolve(config, target_config)
    # What null, a branch or a tag meant today: the run's own config names the commit.
    config.target.revision = getattr(target_config, "_commit_hash", None) or config.target.revision
    if args.dry_run:
        for problem in missing_files(config):
            print(f"dflash: warning: {problem}", file=sys.stderr)
        print(dump(to_dict(config)))
        print(estimate.describe(config, target_config))
        return 0
    from dflash.train import launch

    return launch.train(config, *_machines(args))


def resume(args: argparse.Namespace) -> int:
    """Continue a run."""
    from dflash.train import launch

    return launch.resume(args.run_dir, args.overrides, *_machines(args))


def eval_(args: argparse.Namespace) -> int:
    """Measure a drafter: accepted length, speed, losslessness."""
    _show_messages()
    from dflash.decode.evaluate import Settings, evaluate

    return evaluate(Settings(**{name: value for name, value in vars(args).items() if name != "command"}))


def generate(args: argparse.Namespace) -> int:
    """Answer one prompt, or chat."""
    _show_messages()
    from dflash.decode import chat
    from dflash.decode.drafters import load_both

    loaded = load_both(
        args.drafter, target=args.target, dtype=args.dtype, device=args.device, enable_thinking=args.enable_thinking,
        block_sizes=[args.block_size] if args.block_size else [],
    )  # fmt: skip
    return chat.generate(
        loaded.target, loaded.drafter, prompt=args.prompt, system=args.system,
        chat_template_kwargs=loaded.chat_template_kwargs, max_new_tokens=args.max_new_tokens,
        temperature=args.temperature, seed=args.seed, block_size=args.block_size, show_accepted=args.show_accepted,
        source=sys.stdin, out=sys.stdout, err=sys.stderr,
    )  # fmt: skip


def report(args: argparse.Namespace) -> int:
    """Say whether runs are learning."""
    from dflash.report import text

    return text.report(
        args.runs, window=args.window, reference=args.reference, json_out=args.json, plot_out=args.plot,
        html_out=args.html, trend_window=args.trend_window,
    )  # fmt: skip


def status(args: argparse.Namespace) -> int:
    """Show where a run stands."""
    from dflash.report.status import status as show

    return show(args.run_dir, args.watch)


def check(args: argparse.Namespace) -> int:
    """Say what training would see, before it runs."""
    from dflash.check import check as preflight

    return preflight(args.config, args.overrides)


def data(args: argparse.Namespace) -> int:
    """Prepare training data: answers, features."""
    _show_messages()
    given = {name: value for name, value in vars(args).items() if name not in ("command", "what")}
    if args.what == "regenerate":
        from dflash.data import regenerate

        return regenerate.run(regenerate.Settings(**given))
    from dflash.train import capture

    return capture.capture(args.config, args.overrides, args.out)


def export(args: argparse.Namespace) -> int:
    """Write a drafter for engines."""
    _show_messages()
    from dflash.export.folder import export_drafter

    export_drafter(args.drafter, args.format, args.out, args.target)
    return 0


def import_(args: argparse.Namespace) -> int:
    """Write a released drafter as a folder of our own layout."""
    _show_messages()
    from dflash.export.folder import import_drafter

    import_drafter(args.drafter, args.out)
    return 0


def bench(args: argparse.Namespace) -> int:
    """Measure speed."""
    if args.plot is not None and args.part != "sweep":
        raise ConfigError([f"--plot draws the curves of dflash bench sweep, and {args.part} has none; leave it out"])
    if args.peer and args.part not in ("step", "capture"):
        raise ConfigError([f"--peer has nobody to run beside {args.part}; leave it out, or bench step or capture"])
    if args.servers is not None and args.part != "pipeline":
        raise ConfigError([f"--servers is of dflash bench pipeline, and {args.part} has one process; leave it out"])
    if args.run_dir is not None and args.servers is None:
        raise ConfigError(["--run-dir is of a whole run: give --servers too, with dflash bench pipeline"])
    import torch

    from dflash.bench import capture, pipeline, step, sweep, whole
    from dflash.decode.drafters import pick_device
    from dflash.report.plot import require

    device = pick_device(args.device)
    dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    if args.part == "step":
        result = step.bench(
            args.shape, tokens=args.tokens, anchors=args.anchors, steps=args.repeats, accumulation=args.accumulation,
            device=device, dtype=dtype, peer=args.peer,
        )  # fmt: skip
        print(step.table(result))
    elif args.part == "sweep":
        if args.plot is not None:
            require(args.plot)
        result = sweep.bench(
            args.shape, tokens=args.tokens, anchors=args.anchors, steps=args.repeats, device=device, dtype=dtype,
            tell=partial(print, flush=True),
        )  # fmt: skip
        print(sweep.heading(result))
        if args.plot is not None:
            sweep.save(result, args.plot)
    elif args.part == "pipeline" and args.servers is not None:
        _show_messages()
        job = whole.Job(
            shape=args.shape, servers=args.servers, gpus_per_replica=args.gpus_per_replica, drafters=args.drafters,
            steps=args.steps, tokens=args.tokens, anchors=args.anchors, repeats=args.repeats, device=device,
            dtype=dtype, layers=args.layers,
        )  # fmt: skip
        result = whole.bench(job, args.run_dir)
        print(whole.table(result))
    elif args.part == "pipeline":
        result = pipeline.bench(
            args.shape, tokens=args.tokens, anchors=args.anchors, repeats=args.repeats, device=device, dtype=dtype,
            layers=args.layers,
        )  # fmt: skip
        print(pipeline.table(result))
    else:
        result = capture.bench(
            args.shape, rows=args.rows, length=args.length, repeats=args.repeats, device=device, dtype=dtype,
            layers=args.layers, peer=args.peer,
        )  # fmt: skip
        print(capture.table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _machines(args: argparse.Namespace) -> list[Any]:
    """What a run over several machines needs to know; nothing on one."""
    if args.nnodes == 1 and args.node_rank == 0 and args.rdzv_endpoint is None:
        return []
    if not 0 <= args.node_rank < args.nnodes or args.rdzv_endpoint is None:
        raise ConfigError([f"--node-rank must be 0 to {args.nnodes - 1} and --rdzv-endpoint HOST:PORT be given"])
    from dflash.train.launch import Machines

    return [Machines(args.nnodes, args.node_rank, args.rdzv_endpoint)]


def _show_messages() -> None:
    """What the package has to say, plain on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("dflash")
    log.handlers = [handler]
    log.setLevel(logging.INFO)


COMMANDS = {
    "train": train, "resume": resume, "eval": eval_, "generate": generate, "report": report, "status": status,
    "check": check, "data": data, "export": export, "import": import_, "bench": bench,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 only on success; 2 for a wrong config or command line, 1 for a later error, 130 for Ctrl-C, 141 where
    nobody reads the output any more (``| head``)."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # or what is left, of a help text say, would fail as the interpreter ends
    except BrokenPipeError as error:
        if not _is_unread():
            return _complain([str(error)], 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return 141


def _run(argv: Sequence[str] | None) -> int:
    parser = command_line()
    args, rest = parser.parse_known_args(argv)
    # argparse gives up on overrides that follow an option; they are overrides all the same.
    odd = [text for text in rest if text.startswith("-")] if "overrides" in args else rest
    if odd:
        parser.error(f"unrecognized arguments: {' '.join(odd)}")
    if rest:
        args.overrides += rest
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns after every fork
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes of the run
    try:
        return COMMANDS[args.command](args)
    except ConfigError as error:
        return _complain(error.problems, 2)
    except KeyboardInterrupt:
        return _complain(["interrupted"], 130)
    except BrokenPipeError:
        raise
    except Exception as error:
        # Errors of our own and of the system are sentences for the user; the rest are bugs and keep their traceback.
        if not isinstance(error, OSError) and not type(error).__module__.startswith("dflash."):
            raise
        return _complain([str(error)], 1)


def _is_unread() -> bool:
    """Whether standard output is a pipe without a reader; a broken pipe may also be some server's connection."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except OSError:  # a notebook's, which is no file
        return False
    return bool(poll.poll(0))


def _complain(problems: Sequence[str], code: int) -> int:
    for problem in problems:
        print(f"dflash: error: {' '.join(problem.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
