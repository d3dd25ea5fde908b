"""The ``dflash`` command: one small function per subcommand, no logic.

Heavy imports happen inside the functions, so that ``--help`` and a wrong config answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import dflash
from dflash import check
from dflash.config import ConfigError, load_config, missing_files, resolve, to_dict
from dflash.strict_yaml import dump


def train(args: argparse.Namespace) -> int:
    """Train a drafter, or with --dry-run say what that would take."""
    config = load_config(args.config, args.overrides, check_files=not args.dry_run)
    target_config = check.find_target_config(config, weights_needed=not args.dry_run)
    config = resolve(config, target_config)
    # What null, a branch or a tag meant today: the run's own config names the commit.
    config.target.revision = getattr(target_config, "_commit_hash", None) or config.target.revision
    if args.dry_run:
        for problem in missing_files(config):
            print(f"dflash: warning: {problem}", file=sys.stderr)
        print(dump(to_dict(config)))
        print(check.describe(config, target_config))
        return 0
    from dflash.train import launch

    return launch.train(config)


def resume(args: argparse.Namespace) -> int:
    """Continue a run."""
    from dflash.train import launch

    return launch.resume(args.run_dir, args.overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash", description=dflash.__doc__)
    parser.add_argument("--version", action="version", version=f"dflash {dflash.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], int], summary: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            run.__name__,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        return sub

    sub = command(
        train,
        "train a drafter as a config file says",
        "dflash train configs/qwen27b.yaml train.epochs=3 'data.train=[my/answers.jsonl]' --dry-run",
    )
    sub.add_argument(
        "config", type=Path, metavar="CONFIG", help="YAML file; its keys are explained in dflash/config.py"
    )
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a key of the file, value in YAML")
    sub.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved config, placement, memory and disk estimate, and stop",
    )
    sub = command(
        resume,
        "continue a run from its newest complete checkpoint, exactly",
        "dflash resume runs/qwen27b 'placement.drafter=[cuda:0]'",
    )
    sub.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")
    sub.add_argument(
        "overrides", nargs="*", metavar="key=value", help="replaces a key of placement, log, checkpoint or eval"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 only on success; 2 for a wrong config or command line, 1 for a later error, 130 for Ctrl-C."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse gives up on overrides that follow an option; they are overrides all the same.
    if odd := [text for text in rest if text.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(odd)}")
    args.overrides += rest
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns after every fork
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes of the run
    try:
        code: int = args.run(args)
        return code
    except ConfigError as error:
        return _complain(error.problems, 2)
    except KeyboardInterrupt:
        return _complain(["interrupted"], 130)
    except Exception as error:
        # Errors of our own and of the system are sentences for the user; the rest are bugs and keep their traceback.
        if not isinstance(error, OSError) and not type(error).__module__.startswith("dflash."):
            raise
        return _complain([str(error)], 1)


def _complain(problems: Sequence[str], code: int) -> int:
    for problem in problems:
        print(f"dflash: error: {' '.join(problem.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
