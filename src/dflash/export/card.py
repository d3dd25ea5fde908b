"""The model card of an exported drafter: what it is for, how it was made, what it reached, how to serve it."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import dflash
from dflash.checkpoint_folder import STATE
from dflash.config import Config
from dflash.decode.drafters import Source
from dflash.strict_yaml import dump
from dflash.train.log import read_lines

STEP_FIGURES = ("loss", "accuracy", "avg_streak", "ddtree_streak8")
WINDOW = 200
"""Steps over which the training figures are averaged: a single batch says little."""


def model_card(source: Source, target: str, form: str, name: str) -> str:
    """Markdown with the header that model hubs read.

    Args:
        source: the drafter; recipe, data and figures are of the run that it lies in, if it lies in one.
        target: the name by which it is served.
        form: the format, which decides how it is served.
        name: of the drafter, for the title and the commands.
    """
    tags = ["dflash", "speculative-decoding", *(["speculators"] if form == "speculators" else [])]
    header = ["---", *_base_model(target), "library_name: transformers", f"tags: [{', '.join(tags)}]", "---"]
    c = source.config
    kinds = c.layer_types
    sliding = kinds.count("sliding_attention")
    window = (
        f", {sliding} of them sliding with a window of {c.sliding_window} (causal inside the block)" if sliding else ""
    )
    lines = [
        *header, "", f"# {name}", "",
        f"A DFlash drafter for `{_shown(target)}`: it fills a block of {c.block_size} tokens, the last known one and "
        f"{c.block_size - 1} drafted ones, in one pass, and the target verifies them. The output is the target's own.",
        "",
        "| | |", "|---|---|",
        f"| layers | {c.num_hidden_layers}{window} |",
        f"| reads the outputs of target layers | {c.target_layer_ids} of {c.num_target_layers} (counted from 0) |",
        f"| mask token id | {c.mask_token_id} |",
        "| weights | bfloat16, without embedding and head: those are the target's |",
        "", "## Serving", "", *_serving(target, form, name, c.block_size),
    ]  # fmt: skip
    if source.run is not None:
        lines += [
            "", "## Figures", "", *_figures(source.folder), "", "## Recipe", "", *_recipe(source.run), "",
            "## Data", "", *_data(source.run),
        ]  # fmt: skip
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "transformers"))
    lines += ["", "## Versions", "", f"Exported with dflash {dflash.__version__}, {versions}."]
    if source.run is not None:
        lines.append(f"Trained with {_trained_with(source.folder)}.")
    return "\n".join([*lines, ""])


def _trained_with(folder: Path) -> str:
    """The comment that heads a run's config.yaml."""
    first = (folder.resolve().parent.parent / "config.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else "unknown versions"


def _shown(target: str) -> str:
    """A hub id whole, of anything else the last part: a path of the author's machine helps nobody."""
    return target if is_hub_id(target) else Path(target).name


def is_hub_id(target: str) -> bool:
    """By its looks, and not a folder of that name."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", target) is not None and not Path(target).exists()


def _base_model(target: str) -> list[str]:
    return [f"base_model: {target}"] if is_hub_id(target) else []


def _serving(target: str, form: str, name: str, block_size: int) -> list[str]:
    shown = _shown(target)
    if form == "speculators":
        return ["```bash", f"vllm serve ./{name}      # loads {shown} by the name in config.json", "```"]
    settings = json.dumps({"method": "dflash", "model": f"./{name}", "num_speculative_tokens": block_size - 1})
    return [
        "```bash",
        f"vllm serve {shown} --speculative-config '{settings}'",
        f"python -m sglang.launch_server --model-path {shown} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path ./{name}",
        "```",
    ]


def _figures(folder: Path) -> list[str]:
    """Of the checkpoint's own step, not of the run's last."""
    step = json.loads((folder / STATE).read_text(encoding="utf-8"))["step"]
    log = folder.resolve().parent.parent / "metrics.jsonl"
    steps, evals = ([line for line in read_lines(log, kind) if line["step"] <= step] for kind in (None, "eval"))
    out = ["| figure | value |", "|---|---|", f"| optimizer steps | {step:,} |"]
    if steps:
        out += [f"| {key} seen | {steps[-1][key]:,} |" for key in ("samples", "tokens") if key in steps[-1]]
        recent = steps[-WINDOW:]
        for key in STEP_FIGURES:
            values = [line[key] for line in recent if isinstance(line.get(key), int | float)]
            out += (
                [f"| {key}, mean of the last {len(values)} steps | {sum(values) / len(values):.3f} |"] if values else []
            )
    if evals:
        out.append(
            f"| accepted length on held-out prompts, step {evals[-1]['step']:,} | {evals[-1]['accepted_length']:.2f} |"
        )
    return [
        *out,
        "",
        "Accepted length is tokens per verification, the target's own next token included; 1.0 is plain decoding.",
    ]


def _recipe(run: Config) -> list[str]:
    parts: dict[str, Any] = {
        "seed": run.seed,
        "target": {key: getattr(run.target, key) for key in ("revision", "dtype", "context_layers", "label_layer")},
        "drafter": {key: value for key, value in vars(run.drafter).items() if key != "init_from"},
        "train": vars(run.train),
        "noise": vars(run.noise),
    }
    start = (
        f"Started from `{_shown(run.drafter.init_from)}`." if run.drafter.init_from else "Trained from random weights."
    )
    return [start, "", "```yaml", dump(parts).rstrip(), "```"]


def _data(run: Config) -> list[str]:
    d = run.data

    def names(sources: list[str]) -> str:
        return ", ".join(f"`{s if s.startswith('hub:') else Path(s).name}`" for s in sources) or "none"

    return [
        f"Trained on answers in {names(d.train)}, cut at {d.max_length:,} tokens; held-out prompts: {names(d.eval)}. "
        f"Chat template settings: `{json.dumps(d.chat_template_kwargs)}`, which must be the same in use.",
    ]
