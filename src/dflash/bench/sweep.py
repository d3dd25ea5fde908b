"""What a drafter step costs as one of its sizes grows: anchors, context, vocabulary or ranks, the others at rest."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dflash.bench import ranks
from dflash.bench.shapes import SHAPES, Shape
from dflash.bench.step import measured
from dflash.report import plot

SIZES = {
    "anchors": [64, 128, 256, 512, 1024],
    "tokens": [1024, 2048, 4096, 8192, 16_384],
    "vocab_size": [32_768, 65_536, 131_072, 248_320],
}
TINY = 16
"""By which the tiny shape's sizes are divided: a CPU should be done with them in a minute."""
LABELS = {
    "anchors": "anchors",
    "tokens": "tokens of context",
    "vocab_size": "vocabulary",
    "drafters": "drafter ranks, a batch each",
}


def bench(
    shape: str,
    *,
    tokens: int,
    anchors: int,
    steps: int,
    device: torch.device,
    dtype: torch.dtype,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Seconds of an optimizer step at every size of :data:`SIZES`, one document a step, and on 1, 2, 4 and 8 ranks,
    one document each, where the machine has several devices.

    Args:
        tokens, anchors: where they are not what varies.
        tell: given a line for each point as it is measured.
    """
    sizes = SHAPES[shape]
    known: dict[tuple[Shape, int, int], dict[str, float]] = {}
    points = []
    for vary, values in SIZES.items():
        for value in (v // TINY for v in values) if shape == "tiny" else values:
            at = {"anchors": anchors, "tokens": tokens, "vocab_size": sizes.vocab_size} | {vary: value}
            key = (replace(sizes, vocab_size=at["vocab_size"]), at["tokens"], at["anchors"])
            if key not in known:
                gc.collect()  # the last size's trainer is a cycle, and would count in this one's memory
                known[key] = measured(*key, steps, device, dtype)
                if device.type == "cuda":
                    torch.compiler.reset()  # each size is compiled anew, and the compiler gives up after eight
            points.append({"vary": vary, "value": value, **known[key]})
            tell(_row(points[-1]))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # rank 0 is another process on this GPU
    for drafters in ranks.counts(device):
        own = ranks.measured(sizes, tokens, anchors, steps, device, dtype, ranks=drafters)
        points.append({"vary": "drafters", "value": drafters, **own})
        tell(_row(points[-1]))
    out = {"shape": shape, "tokens": tokens, "anchors": anchors, "dtype": str(dtype).removeprefix("torch.")}
    device_name = {"device": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {**out, **device_name, "points": points}


def _row(point: dict[str, Any]) -> str:
    share = f", MFU {point['mfu']:.0%}" if "mfu" in point else ""
    memory = f", {point['peak_gib']:.1f} GiB" if "peak_gib" in point else ""
    name, seconds = LABELS[point["vary"]], point["s_per_step"]
    return f"  {name:27} {point['value']:>9,}  {seconds:.4f} s a step, {point['tflop']:.3g} TFLOP{share}{memory}"


def heading(result: dict[str, Any]) -> str:
    """What does not vary."""
    return (
        f"drafter step, shape {result['shape']}, {result['tokens']} tokens and {result['anchors']} anchors unless they "
        f"vary, {result['dtype']}, on {result.get('device', 'cpu')}"
    )


def save(result: dict[str, Any], out: Path) -> None:
    """The curves as an image, one panel for each size that varies; both axes from zero, so that a line is a line.

    Raises:
        ReportError: matplotlib is missing, or ``out`` is neither .png nor .svg.
    """
    plot.require(out)
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(12, 3.6), layout="constrained")
    drawn.suptitle(heading(result), fontsize=9)
    top = 1.05 * max(point["s_per_step"] for point in result["points"])
    panels = {vary: [p for p in result["points"] if p["vary"] == vary] for vary in LABELS}
    panels = {vary: points for vary, points in panels.items() if points}  # one device has no ranks to compare
    for axes, (vary, points) in zip(drawn.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        axes.plot([p["value"] for p in points], [p["s_per_step"] for p in points], marker="o", color="tab:blue")
        for point in points:
            if "mfu" in point:
                at = (point["value"], point["s_per_step"])
                axes.annotate(f"{point['mfu']:.0%}", at, (4, -10), textcoords="offset points", fontsize=7)
        axes.set(xlabel=LABELS[vary], xlim=(0, None), ylim=(0, top))
        axes.grid(alpha=0.3)
    drawn.axes[0].set_ylabel("seconds a step (MFU beside)")
    drawn.savefig(out, dpi=120)
