"""The curves of one or several runs in one figure. matplotlib is an extra, imported where it is used.

A colour is a run; dashed lines are references; points are evaluations; dotted verticals are alerts.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash.report.series import Floats, ReportError, Series, rolling_mean
from dflash.report.text import Run, accepted_lengths, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 1500
"""Of a curve at most: more cannot be seen, and make an SVG of megabytes."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
"""Okabe and Ito's, which colour-blind people tell apart."""
REFERENCE_COLOURS = ("#444444", "#999999", "#777777", "#bbbbbb")
SUFFIXES = (".png", ".svg")


class Panel(NamedTuple):
    """One pair of axes: its title, and its metrics with the words that tell them apart, the strongest line first."""

    title: str
    metrics: tuple[tuple[str, str], ...]
    is_smooth: bool = True
    from_zero: bool = False
    """For rates, whose wobble would otherwise fill the axes."""
    along: str = "optimizer step"
    """What runs to the right: a key of :data:`COSTS`, along which evaluations are drawn, or the step."""


PANELS = (
    Panel("accuracy", (("accuracy", ""),)),
    Panel("accuracy among the first 4, 8", (("top8_acc", "8"), ("top4_acc", "4"))),
    Panel("loss", (("loss", ""),)),
    Panel("streak (points: evaluation's)", (("avg_streak", ""),)),
    Panel("streak of trees with 4, 8 a depth", (("ddtree_streak8", "8"), ("ddtree_streak4", "4"))),
    Panel("tokens/s", (("tokens_per_s", ""),), from_zero=True),
    Panel("learning rate", (("lr", ""),), is_smooth=False),
    Panel("noise, of the features' RMS", (("noise_std", ""),), is_smooth=False),
    Panel("share of time waiting for features", (("waiting", ""),), from_zero=True),
    Panel("accepted length, by samples", (("accepted_length", ""),), is_smooth=False, along="samples seen"),
    Panel("accepted length, by time", (("accepted_length", ""),), is_smooth=False, along="minutes of training"),
)
COSTS = {"samples seen": "samples", "minutes of training": "step_s"}
"""What an accepted length has cost, and the column that says it."""
COLUMNS = 3


def require(out: Path | None) -> None:
    """Refuse what cannot be drawn, before anything is read.

    Raises:
        ReportError: matplotlib is missing, or ``out`` is neither .png nor .svg.
    """
    if out is not None and out.suffix.lower() not in SUFFIXES:
        raise ReportError(f"--plot {out}: name a file that ends in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ReportError("plots need matplotlib, which is not installed: pip install 'dflash-trainer[plot]'")


def save(runs: Sequence[Run], references: dict[str, Series], window: int, out: Path) -> None:
    """Draw into a .png or .svg file.

    Raises:
        ReportError: as :func:`require`, or the file cannot be written.
    """
    require(out)
    try:
        _write(figure(runs, references, window), out, out.suffix.lower()[1:])
    except OSError as error:
        raise ReportError(f"{out} cannot be written: {error.strerror}") from None


def svg(runs: Sequence[Run], references: dict[str, Series], window: int) -> str:
    """The figure as an ``<svg>`` element for a page."""
    require(None)
    text = io.StringIO()
    _write(figure(runs, references, window), text, "svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _write(drawn: Figure, out: Path | io.StringIO, kind: str) -> None:
    """The same log gives the same file: no date, and ids within an SVG that are not drawn at random. Nor an address."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "dflash"}):
        undated = dict.fromkeys(("Date", "Creator", "Format", "Type") if kind == "svg" else ("Software",))
        drawn.savefig(out, format=kind, dpi=150, metadata=undated)


def figure(runs: Sequence[Run], references: dict[str, Series], window: int) -> Figure:
    """All panels that have something to show."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = [p for p in PANELS if any(_fills(p, run.series) for run in runs)] or [PANELS[0]]
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    style: dict[Any, Any] = {
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": "#e6e6e6", "axes.edgecolor": "#888888", "axes.titlesize": 9.5, "axes.titlelocation": "left",
        "axes.formatter.limits": (-5, 6),
    }  # fmt: skip
    with matplotlib.rc_context(style):
        fig = Figure(figsize=(12, 2.7 * rows + 0.6), layout="constrained")
        grid = fig.subplots(rows, columns, squeeze=False)
        for i, axes in enumerate(grid.flat):
            if i < len(panels):
                _draw(axes, panels[i], runs, references, window)
            else:
                axes.set_visible(False)
        for i, panel in enumerate(panels):
            below = panels[i + columns].along if i + columns < len(panels) else None
            if panel.along != below:
                grid.flat[i].set_xlabel(panel.along)
        entries = _legend(runs, references, window)
        fig.legend(handles=entries, loc="outside upper left", ncols=min(len(entries), 4), frameon=False)
    return fig


def _legend(runs: Sequence[Run], references: dict[str, Series], window: int) -> list[Any]:
    from matplotlib.lines import Line2D

    out = []
    for i, run in enumerate(runs):
        width = _width(run.series, window)
        mean = f" (means of {width})" if width > 1 else ""
        out.append(Line2D([], [], color=_colour(i), label=f"{short(run.label, 32)}: {run.verdict.state}{mean}"))
    for i, name in enumerate(references):
        colour = REFERENCE_COLOURS[i % len(REFERENCE_COLOURS)]
        out.append(Line2D([], [], color=colour, linestyle="--", label=f"reference {short(name, 32)}"))
    if any(run.series.alerts for run in runs):
        out.append(Line2D([], [], color="#b00020", linestyle=":", label="alert"))
    return out


def _draw(axes: Axes, panel: Panel, runs: Sequence[Run], references: dict[str, Series], window: int) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_title(panel.title)
    if panel.along in COSTS:
        for i, run in enumerate(runs):
            if _fills(panel, run.series):
                axes.plot(*costs(run.series, panel.along), marker="o", markersize=4, color=_colour(i))
        return
    shown: list[Floats] = []
    last_step = max((int(run.series.step[-1]) for run in runs if len(run.series)), default=1)
    for rank, (key, name) in enumerate(panel.metrics):
        weight: dict[str, Any] = {"linewidth": 1.6 - 0.6 * rank, "alpha": 1.0 - 0.35 * rank}
        for i, run in enumerate(runs):
            step, values = curve(run.series, key, window if panel.is_smooth else 1)
            axes.plot(step, values, color=_colour(i), **weight)
            shown.append(values)
            if name and i == 0 and len(values):
                axes.annotate(
                    name, (float(step[-1]), float(values[-1])), (3, 0), textcoords="offset points", va="center",
                    color="#555555", annotation_clip=False,
                )  # fmt: skip
        for i, log in enumerate(references.values()):
            known = np.isfinite(log.column(key))
            inside = known & (log.step <= max(last_step, int(log.step[known][0]) if known.any() else 0))
            if inside.any():
                colour = REFERENCE_COLOURS[i % len(REFERENCE_COLOURS)]
                axes.plot(
                    log.step[inside], log.column(key)[inside], "--", marker="." if inside.sum() < 2 else None,
                    color=colour, zorder=3, **weight,
                )  # fmt: skip
                shown.append(log.column(key)[inside])
    for i, run in enumerate(runs):
        if panel.metrics[0][0] == "avg_streak":
            points = [(step, length - 1) for step, length in accepted_lengths(run.series)]
            if points:
                axes.plot(*zip(*points, strict=True), "o", markersize=5, color=_colour(i), markeredgecolor="white")
                shown.append(np.array([value for _, value in points]))
        for alert in run.series.alerts if panel.is_smooth else []:
            axes.axvline(alert["step"], color="#b00020", linestyle=":", linewidth=1.1)
    if panel.is_smooth:
        _limit(axes, shown)
    if panel.from_zero:
        axes.set_ylim(bottom=0.0)
    if panel.metrics[0][0] == "waiting":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def curve(log: Series, key: str, window: int) -> tuple[Floats, Floats]:
    """Steps and rolling means to draw, from the first full window on; for logs under two windows of a tenth of it."""
    if not _has(log, key):
        return np.empty(0), np.empty(0)
    if key == "waiting":
        # Of sums, not the mean of shares: one short step that waited all its time says little.
        step, wait = curve(log, "feature_wait_s", window)
        _, spent = curve(log, "step_s", window)
        return step, np.divide(wait, spent, out=np.full(len(wait), np.nan), where=spent > 0)
    width = _width(log, window)
    steps, means = rolling_mean(log, key, width)
    steps, means = steps[width - 1 :], means[width - 1 :]
    at = np.unique(np.linspace(0, len(steps) - 1, min(POINTS, len(steps))).round().astype(int))
    return steps[at].astype(np.float64), means[at]


def costs(log: Series, along: str) -> tuple[Floats, Floats]:
    """What the drafter of each evaluation had cost, and its accepted length.

    Samples are those it was trained on; minutes are of its steps, without evaluations, checkpoints and what a run does
    before its first step. Where a log leaves out steps, one stands for those before it.
    """
    evaluated = np.array(accepted_lengths(log), dtype=np.float64).reshape(-1, 2)
    spent = np.nan_to_num(log.column(COSTS[along]))
    if along == "minutes of training":
        spent = np.cumsum(spent * np.diff(log.step, prepend=0)) / 60
    before = np.searchsorted(log.step, evaluated[:, 0], side="right")
    return np.concatenate([[0.0], spent])[before], evaluated[:, 1]


def _fills(panel: Panel, log: Series) -> bool:
    """Whether the log has something for the panel."""
    if panel.along in COSTS:
        return bool(accepted_lengths(log)) and _has(log, COSTS[panel.along])
    return any(_has(log, key) for key, _ in panel.metrics)


def _width(log: Series, window: int) -> int:
    return window if len(log) >= 2 * window else min(window, max(len(log) // 10, 1))


def _has(log: Series, key: str) -> bool:
    keys = ("feature_wait_s", "step_s") if key == "waiting" else (key,)
    return all(np.isfinite(log.column(one)).any() for one in keys)


def _limit(axes: Axes, shown: Sequence[Floats]) -> None:
    """Room for every curve past its first tenth, whose steep start would flatten the rest; the start may leave the
    axes."""
    settled = [v[len(v) // 10 :][np.isfinite(v[len(v) // 10 :])] for v in shown]
    settled = [v for v in settled if len(v)]
    if not settled:
        return
    low, high = min(float(v.min()) for v in settled), max(float(v.max()) for v in settled)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    axes.set_ylim(low - room, high + room)


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]
