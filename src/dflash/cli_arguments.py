"""What the ``dflash`` command takes: names, metavars and help texts of every subcommand; no logic."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dflash


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    """A comma list, each once."""
    return list(dict.fromkeys(_count(part) for part in text.split(",")))


def _add_command(
    commands: Any, name: str, summary: str, example: str, description: str | None = None
) -> argparse.ArgumentParser:
    """``commands``: of argparse's subparsers. The description is the summary as a sentence, where none is given."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description or f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _pair(sub: argparse.ArgumentParser) -> None:
    """Which drafter, which target, and how both run: the same for every command that decodes."""
    sub.add_argument("drafter", metavar="DRAFTER", help="folder of a run, a checkpoint or a drafter, or a hub id")
    sub.add_argument("--target", metavar="MODEL", help="hub id, folder or package:NAME/FILE; default: the run's")
    sub.add_argument("--max-new-tokens", type=_count, metavar="N", help="longest answer, in tokens (%(default)s)")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    sub.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        help="passed to the chat template; default: as the run rendered its data",
    )
    sub.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda:0 if there is one, else cpu")
    sub.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="of both models; default: the run's, else bfloat16 on a GPU and float32 on a CPU",
    )
    sub.add_argument("--seed", type=int, default=0, help="of sampling (%(default)s)")


def _data_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    top = command(
        "data",
        "prepare training data: the target's own answers, or its features on disk",
        "dflash data regenerate --target Qwen/Qwen3.6-27B --prompts prompts.jsonl --out answers.jsonl "
        "--server http://localhost:8000",
    )
    kinds = top.add_subparsers(dest="what", required=True, metavar="regenerate|capture")
    sub = _add_command(
        kinds,
        "regenerate",
        "let the target answer prompts; may be killed and started again",
        "dflash data regenerate --target my/model --prompts prompts.jsonl --out answers.jsonl",
        "Let the target answer prompts, every user turn of a conversation in order.",
    )
    sub.add_argument("--target", required=True, metavar="MODEL", help="hub id, folder or package:NAME/FILE")
    sub.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help="conversations, as in data.train")
    sub.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSONL to write, or to go on with")
    sub.add_argument("--server", metavar="URL", help="OpenAI-compatible server that runs the target; default: here")
    sub.add_argument("--model", metavar="NAME", help="what the server calls it; default: the first it lists")
    sub.add_argument("--max-new-tokens", type=_count, default=1024, metavar="N", help="per answer (%(default)s)")
    sub.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (%(default)s)")
    sub.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus, on servers only (%(default)s)")
    sub.add_argument(
        "--enable-thinking", action=argparse.BooleanOptionalAction, help="passed to the chat template; as later in use"
    )
    sub.add_argument("--batch-size", type=_count, default=32, metavar="N", help="answers at once, here (%(default)s)")
    sub.add_argument("--concurrency", type=_count, default=64, metavar="N", help="requests at once (%(default)s)")
    sub.add_argument(
        "--timeout", type=float, default=600.0, dest="timeout_s", metavar="S",
        help="longest silence of the server within one request, in seconds (%(default)s)",
    )  # fmt: skip
    sub.add_argument("--samples", type=_count, metavar="N", help="the first N rows only")
    sub.add_argument("--seed", type=int, default=0, help="of sampling (%(default)s)")
    sub.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda:0 if there is one, else cpu")
    sub.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU, float32 on a CPU")
    sub = _add_command(
        kinds,
        "capture",
        "keep the target's features of a config's data on disk, to train without running it on them again",
        "dflash data capture configs/smollm2.yaml --out features/smollm2",
        "Capture the context features and labels that a config trains on. May be killed and started again.",
    )
    sub.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of the training")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a key of the file, value in YAML")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to fill; then data.features=DIR")


def _add_machines(sub: argparse.ArgumentParser) -> None:
    """As torchrun names them."""
    sub.add_argument("--nnodes", type=_count, default=1, metavar="N", help="machines of the run (%(default)s)")
    sub.add_argument("--node-rank", type=int, default=0, metavar="N", help="which of them this one is (%(default)s)")
    sub.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where they meet: machine 0, and a free port there")


def command_line() -> argparse.ArgumentParser:
    """The parser of the whole command line; what it parsed names the subcommand as ``command``."""
    parser = argparse.ArgumentParser(prog="dflash", description=dflash.__doc__)
    parser.add_argument("--version", action="version", version=f"dflash {dflash.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = partial(_add_command, commands)
    sub = command(
        "train",
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
    _add_machines(sub)
    sub = command(
        "resume",
        "continue a run from its newest complete checkpoint, exactly",
        "dflash resume runs/qwen27b 'placement.drafter=[cuda:0]'",
    )
    sub.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")
    sub.add_argument(
        "overrides", nargs="*", metavar="key=value", help="replaces a key of placement, log, checkpoint or eval"
    )
    _add_machines(sub)
    sub = command(
        "eval",
        "measure a drafter: accepted length, speed against the target alone, losslessness",
        "dflash eval runs/qwen27b --prompts gsm8k.jsonl --block-size 8,16 --ddtree 16,64 --json result.json\n"
        "  dflash eval runs/a --compare runs/b --answers answers.jsonl",
    )
    _pair(sub)
    sub.set_defaults(max_new_tokens=256)
    sub.add_argument(
        "--prompts", nargs="+", default=[], metavar="FILE", help="conversations to answer, as in data.eval"
    )
    sub.add_argument(
        "--answers",
        metavar="FILE|URL",
        help="score answers that exist already, without speed: a file of conversations, or an OpenAI-compatible server "
        "that answers --prompts",
    )
    sub.add_argument(
        "--block-size",
        type=_counts,
        default=[],
        dest="block_sizes",
        metavar="K[,K...]",
        help="tokens of a block, its anchor included: one or several to compare; default: the drafter's own",
    )
    sub.add_argument(
        "--ddtree",
        type=_counts,
        default=[],
        dest="budgets",
        metavar="N[,N...]",
        help="also draft trees of so many nodes; on hybrid targets as an offline figure only",
    )
    sub.add_argument(
        "--samples", type=_count, metavar="N", help="use N prompts or answers at most, the first of each file"
    )
    sub.add_argument("--batch-size", type=_count, default=1, metavar="N", help="prompts decoded together (%(default)s)")
    sub.add_argument("--compare", metavar="OTHER", help="a second drafter on the same set, with the paired difference")
    sub.add_argument("--json", type=Path, metavar="OUT", help="write all figures there, those of each prompt included")
    sub = command(
        "generate",
        "answer one prompt, or chat, losslessly and streamed",
        'dflash generate runs/qwen27b --prompt "Why is the sky blue?" --show-accepted',
    )
    _pair(sub)
    sub.set_defaults(max_new_tokens=512)
    sub.add_argument("--prompt", metavar="TEXT", help="default: a chat on a terminal, else all of standard input")
    sub.add_argument("--system", metavar="TEXT", help="system message")
    sub.add_argument(
        "--block-size",
        type=_count,
        metavar="K",
        help="tokens of a block, its anchor included; default: the drafter's own",
    )
    sub.add_argument(
        "--show-accepted",
        action="store_true",
        help="mark the accepted drafted tokens: underlined on a terminal, else in [brackets]",
    )
    sub = command(
        "report",
        "say whether runs are learning: rolling means, trends with intervals, verdict, cliffs",
        "dflash report runs/qwen27b --reference docs/reference/qwen3.6-27b-first-run.jsonl\n"
        "  dflash report runs/a runs/b --window 100 --json report.json",
    )
    sub.add_argument("runs", nargs="+", metavar="RUN_DIR", help="folder of a run, or a log with the same keys")
    sub.add_argument(
        "--window", type=_count, default=200, metavar="N", help="entries of the rolling means (%(default)s)"
    )
    sub.add_argument(
        "--trend-window", type=_count, default=2500, metavar="N",
        help="entries over which, and over twice which, a trend is tested (%(default)s)",
    )  # fmt: skip
    sub.add_argument(
        "--reference", nargs="+", default=[], metavar="FILE", help="logs or milestones to set beside the runs"
    )
    sub.add_argument("--json", type=Path, metavar="OUT", help="write all figures there too")
    sub.add_argument("--plot", type=Path, metavar="OUT", help="draw the curves: FILE.png or FILE.svg")
    sub.add_argument("--html", type=Path, metavar="OUT", help="write one page with tables and curves")
    sub = command(
        "status",
        "show one screen of a run in progress: step, rates, figures, verdict, time left",
        "dflash status runs/qwen27b --watch",
    )
    sub.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")
    sub.add_argument("--watch", action="store_true", help="again every 5 seconds, until Ctrl-C")
    sub = command(
        "check",
        "read data and target as training would, and say what is wrong before it starts",
        "dflash check configs/qwen27b.yaml 'data.train=[my/answers.jsonl]'",
    )
    sub.add_argument("config", type=Path, metavar="CONFIG", help="YAML file, as for train")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="as for train")
    _data_commands(command)
    sub = command(
        "export",
        "write a drafter for vLLM, SGLang and others: bf16 weights, config, model card",
        "dflash export runs/qwen27b --format published --out qwen27b-dflash",
    )
    sub.add_argument("drafter", metavar="DRAFTER", help="folder of a run, a checkpoint or a drafter, or a hub id")
    sub.add_argument(
        "--format",
        choices=["published", "speculators"],
        default="published",
        help="published: as the z-lab drafters, read by vLLM, SGLang and SpecForge; speculators: of vLLM's library of "
        "that name; default: %(default)s",
    )
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    sub.add_argument("--target", metavar="MODEL", help="hub id, folder or package:NAME/FILE; default: the run's")
    sub = command(
        "import",
        "copy a released drafter, of either format, into a folder of our own layout",
        "dflash import z-lab/Qwen3.6-27B-DFlash --out drafters/qwen27b",
    )
    sub.add_argument("drafter", metavar="FOLDER", help="folder or hub id of a drafter")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    sub = command(
        "bench",
        "measure the speed of a part, on synthetic data of a real shape",
        "dflash bench step --shape qwen27b --anchors 512 --peer",
    )
    sub.add_argument(
        "part", choices=["step", "sweep", "capture", "pipeline"],
        help="step: one optimizer step of the drafter as training runs it; sweep: that step as anchors, context, "
        "vocabulary and drafter ranks grow; capture: features and labels of the target; pipeline: target and "
        "drafter in turns on one device, and the stream between two processes; with --servers a whole run, as dflash "
        "train makes it",
    )  # fmt: skip
    sub.add_argument("--shape", choices=["qwen27b", "smollm2", "tiny"], default="qwen27b", help="default: %(default)s")
    sub.add_argument("--tokens", type=_count, default=3072, metavar="N", help="of the micro-batch (%(default)s)")
    sub.add_argument("--anchors", type=_count, default=512, metavar="N", help="of the micro-batch (%(default)s)")
    sub.add_argument("--accumulation", type=_count, default=1, metavar="N", help="step: micro-batches (%(default)s)")
    sub.add_argument("--rows", type=_count, default=4, metavar="N", help="capture: documents in a batch (%(default)s)")
    sub.add_argument("--length", type=_count, default=4096, metavar="N", help="capture: tokens in each (%(default)s)")
    sub.add_argument("--layers", type=_count, metavar="N", help="capture, pipeline: cut the target to so many layers")
    sub.add_argument("--servers", type=_count, metavar="N", help="pipeline: a whole run with N replicas of the target")
    sub.add_argument("--gpus-per-replica", type=_count, default=1, metavar="N", help="whole run (%(default)s)")
    sub.add_argument("--drafters", type=_count, default=1, metavar="N", help="whole run, a batch each (%(default)s)")
    sub.add_argument("--steps", type=_count, default=100, metavar="N", help="whole run, warm-up and all (%(default)s)")
    sub.add_argument("--run-dir", type=Path, metavar="DIR", help="whole run: folder to keep it in; default: none")
    sub.add_argument("--repeats", type=_count, default=10, metavar="N", help="timed after a warm-up (%(default)s)")
    sub.add_argument(
        "--peer", action="store_true",
        help="the same work in the same run by SpecForge, if installed (step), or by plain transformers (capture)",
    )  # fmt: skip
    sub.add_argument("--device", help="default: cuda:0 if there is one, else cpu")
    sub.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU, float32 on a CPU")
    sub.add_argument("--plot", type=Path, metavar="OUT", help="sweep: the curves, .png or .svg")
    sub.add_argument("--json", type=Path, metavar="OUT", help="write the figures there too")
    return parser
