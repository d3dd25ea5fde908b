"""``dflash report`` in the terminal and as JSON: tables, sparklines, intervals and verdicts, 100 columns wide."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash.report import trend
from dflash.report.series import Floats, ReportError, Series, read_series, rolling_mean

WIDTH = 100
TABLE = ("loss", "accuracy", "avg_streak", "top4_acc", "top8_acc", "ddtree_streak4", "ddtree_streak8")
"""With ``step`` the eight columns that tell most."""
CHANGES = ("loss", "accuracy", "avg_streak", "ddtree_streak8")
SIDE_BY_SIDE = ("accuracy", "avg_streak", "ddtree_streak8", "loss")
_ROWS = 12
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN = str.maketrans(_BARS + "±", "__..--==" + "~")


@dataclass
class Run:
    """One log with everything a report says about it."""

    label: str
    series: Series
    verdict: trend.Verdict
    cliffs: list[trend.Cliff]
    means: dict[str, Floats]
    """Rolling means [n] of the metrics that are there."""


def report(
    paths: Sequence[str],
    *,
    window: int = 200,
    reference: Sequence[str] = (),
    json_out: Path | None = None,
    plot_out: Path | None = None,
    html_out: Path | None = None,
    trend_window: int = trend.WINDOW,
) -> int:
    """Print the report of one or several runs; returns 0, whatever the verdicts.

    Args:
        paths: run folders or log files.
        window: entries of the rolling means.
        reference: logs or milestone files to set beside the runs.
        json_out: also write everything to this file.
        plot_out: also draw the curves into this .png or .svg file.
        html_out: also write a page with tables and curves to this file.
        trend_window: entries over which, and over twice which, the verdict's slopes are tested.

    Raises:
        ReportError: a log cannot be read, a file cannot be written, or drawing lacks matplotlib.
    """
    if plot_out is not None or html_out is not None:
        from dflash.report import page, plot

        plot.require(plot_out)  # before half a minute of reading
    runs = load(paths, window, trend_window)
    references = load_references(reference)
    _print(render(runs, references, window))
    if json_out is not None:
        try:
            json_out.write_text(json.dumps(as_json(runs, references, window), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ReportError(f"{json_out} cannot be written: {error.strerror}") from None
    if plot_out is not None:
        plot.save(runs, references, window, plot_out)
    if html_out is not None:
        page.save(runs, references, window, html_out)
    return 0


def load(paths: Sequence[str], window: int = 200, trend_window: int = trend.WINDOW) -> list[Run]:
    """Read and judge the logs; runs of the same name are told apart by their paths."""
    logs = [read_series(path) for path in paths]
    names = [log.name for log in logs]
    runs = []
    for path, log, name in zip(paths, logs, names, strict=True):
        means = {key: rolling_mean(log, key, window)[1] for key in TABLE if key in log.columns}
        verdict = trend.verdict(log, trend_window)
        label = name if names.count(name) == 1 else str(path)
        runs.append(Run(label, log, verdict, trend.cliffs_of(log, max(trend_window // 25, 5)), means))
    return runs


def load_references(paths: Sequence[str]) -> dict[str, Series]:
    """Reference curves by name."""
    logs = [read_series(path) for path in paths]
    return {log.name: log for log in logs}


# --- numbers at milestones --------------------------------------------------------------------------------------------


def milestones(series: Sequence[Series]) -> list[int]:
    """Regular round steps, a dozen at most, up to the longest log's end, and that end."""
    last = max((int(one.step[-1]) for one in series if len(one)), default=0)
    if last < 1:
        return [last] if any(len(one) for one in series) else []
    size = 10 ** int(math.log10(last))
    every = min(
        (int(e) for e in (size / 10, size / 5, size / 2, size, 2 * size) if e >= 1 and last / e < _ROWS + 1), default=1
    )
    return [*range(every, last, every), last]


def at_milestones(run: Run, key: str, steps: Sequence[int], window: int) -> list[float]:
    """Rolling means at the steps; NaN where the log has no entry since the milestone before, or no full window yet (in
    a log shorter than one window: the means so far)."""
    out = []
    log, full = run.series, min(window, len(run.series))
    for before, step in zip([-1, *steps], steps, strict=False):
        end = int(np.searchsorted(log.step, step, side="right"))
        there = end >= full and end > 0 and log.step[end - 1] > before and key in run.means
        out.append(float(run.means[key][end - 1]) if there else math.nan)
    return out


def reference_at(log: Series, key: str, steps: Sequence[int]) -> list[float]:
    """Between the reference's milestones a straight line; outside NaN."""
    values = log.column(key)
    known = np.isfinite(values)
    if not known.any():
        return [math.nan] * len(steps)
    return [float(v) for v in np.interp(steps, log.step[known], values[known], left=math.nan, right=math.nan)]


# --- text -------------------------------------------------------------------------------------------------------------


def render(runs: Sequence[Run], references: dict[str, Series], window: int) -> str:
    """The whole report."""
    blocks = [render_run(run, window) for run in runs]
    if len(runs) + len(references) > 1:
        blocks.append(render_side_by_side(runs, references, window))
    return "\n\n".join(blocks)


def render_run(run: Run, window: int) -> str:
    """One run: header, notes, table, sparklines, changes, verdicts."""
    log = run.series
    lines = [_rule(run.label), *wrap(log.path), *header(log, window)]
    for note in log.notes.sentences():
        lines += wrap(note, "note: ")
    if not len(log):
        return "\n".join([*lines, "no steps yet"])
    steps = milestones([log])
    keys = [key for key in TABLE if key in run.means]
    if keys:
        lines += ["", f"rolling mean of {min(window, len(log))} entries"]
        lines += _table(["step", *keys], means_rows(run, keys, steps, window))
        lines += ["", *(_curve(key, log, run.means[key], window) for key in keys)]
        names, rows = changes_rows(log, steps, window)
        if rows:
            lines += ["", "change from milestone to milestone, with its 95 % interval"]
            lines += _table(["steps", *names], rows)
    if run.verdict.metrics:
        lines += ["", "slope per 1,000 steps, 95 % interval"]
    for key, one in run.verdict.metrics.items():
        lines.append(f"  {key:<15} {one.state:<11} {one.slope:+.4f}  ({one.low:+.4f} to {one.high:+.4f})")
    lines += ["", *_verdict(run)]
    return "\n".join(lines)


def header(log: Series, window: int) -> list[str]:
    """What a log holds and how fast it went, one sentence each."""
    if not len(log):
        return []
    first = f"{len(log):,} entries, steps {log.step[0]:,} to {log.step[-1]:,}"
    if np.isfinite(epoch := log.column("epoch")[-1]):
        first += f", epoch {epoch:.2f}"
    restarts = max(len(log.notes.restarts), len(log.starts) - 1)
    first += f"; restarts {restarts}, gaps {len(log.notes.gaps)}, NaN {sum(log.notes.not_finite.values())}"
    out = [first]
    if phase := trend.lr_phase(log):
        lr = log.column("lr")
        best = int(np.nanargmax(lr))
        now = lr[np.isfinite(lr)][-1]
        out.append(f"learning rate {now:.3g}, {phase}; highest {lr[best]:.3g} at step {log.step[best]:,}")
    rates = []
    if np.isfinite(speed := rolling_mean(log, "tokens_per_s", window)[1][-1]):
        rates.append(f"{speed:,.0f} tokens/s")
    wait, spent = (rolling_mean(log, key, window)[1][-1] for key in ("feature_wait_s", "step_s"))
    if spent > 0:
        rates.append(f"{spent:.3g} s a step" + (f", {wait / spent:.0%} of it for features" if wait >= 0 else ""))
    if rates:
        out.append(f"last {min(window, len(log))} entries: {', '.join(rates)}")
    if accepted := accepted_lengths(log):
        best_step, best_value = max(accepted, key=lambda pair: pair[1])
        out.append(
            f"evaluations: {len(accepted)}, accepted length {accepted[-1][1]:.3f} at step {accepted[-1][0]:,}, "
            f"best {best_value:.3f} at step {best_step:,}"
        )
    if log.alerts:
        out.append(f"alerts: {len(log.alerts)}, the last at step {log.alerts[-1]['step']:,}")
    return out


def accepted_lengths(log: Series) -> list[tuple[int, float]]:
    """(step, accepted length) of the evaluations that measured one."""
    measured = ((line["step"], line.get("accepted_length")) for line in log.evals)
    return [(step, value) for step, value in measured if isinstance(value, int | float) and math.isfinite(value)]


def _curve(key: str, log: Series, means: Floats, window: int) -> str:
    at = np.flatnonzero(np.isfinite(means))
    at = at[at >= min(window, len(log)) - 1]
    if not len(at):
        return f"  {key:<15}"
    best = at[means[at].argmin() if key == "loss" else means[at].argmax()]
    bars = sparkline(means[min(window, len(log)) - 1 :], 44)  # all curves over the same steps
    ends = f"{number(means[at[0]]):>6} {bars} {number(means[at[-1]])}"
    return f"  {key:<15}{ends}  best {number(means[best])} at {log.step[best]:,}"


def sparkline(values: Floats, width: int) -> str:
    """Bars from the smallest to the largest of the values after the first fifth, whose steep start would flatten all
    the rest; blanks for NaN."""
    picked = values[np.linspace(0, len(values) - 1, min(width, len(values))).round().astype(int)]
    known = picked[len(picked) // 5 :]
    known = known[np.isfinite(known)]
    if not len(known):
        return " " * len(picked)
    low, spread = known.min(), float(np.ptp(known)) or 1.0
    scaled = np.nan_to_num((picked - low) / spread).clip(0, 1) * (len(_BARS) - 1)
    return "".join(_BARS[round(s)] if np.isfinite(p) else " " for s, p in zip(scaled, picked, strict=True))


def means_rows(run: Run, keys: Sequence[str], steps: Sequence[int], window: int) -> list[list[str]]:
    """Step and rolling means; steps at which there is none are left out."""
    return curve_rows([(key, at_milestones(run, key, steps, window)) for key in keys], steps)


def changes_rows(log: Series, steps: Sequence[int], window: int) -> tuple[list[str], list[list[str]]]:
    """The metrics of :data:`CHANGES` that are there, and their changes from milestone to milestone."""
    cells: dict[tuple[int, int], dict[str, str]] = {}
    for key in CHANGES:
        for one in trend.changes(log, key, steps, window):
            cell = f"{one.change:+.4f} ± {(one.high - one.low) / 2:.4f}"
            cells.setdefault((one.first_step, one.last_step), {})[key] = cell
    keys = [key for key in CHANGES if any(key in row for row in cells.values())]
    return keys, [[f"{a}-{b}", *(row.get(key, "") for key in keys)] for (a, b), row in sorted(cells.items())]


def cliff_sentences(run: Run) -> list[str]:
    """Every cliff of the log in words."""
    out = []
    for cliff in run.cliffs:
        lost = ", ".join(f"{key} {a:.3f} to {b:.3f}" for key, (a, b) in cliff.change.items())
        back = "recovered since" if cliff.recovered else "not recovered"
        out.append(f"cliff at step {cliff.step:,} ({cliff.sigmas:.0f} sigma, {back}): {lost}")
    return out


def _verdict(run: Run) -> list[str]:
    lines = wrap(run.verdict.sentence, "verdict: ")
    for sentence in cliff_sentences(run):
        lines += wrap(sentence)
    if run.verdict.causes:
        lines.append("what usually causes it, the likeliest first:")
    for number, cause in enumerate(run.verdict.causes, start=1):
        lines += wrap(cause, f"  {number}. ")
    return lines


def render_side_by_side(runs: Sequence[Run], references: dict[str, Series], window: int) -> str:
    """Each of the main metrics at the same steps for every run; references in brackets."""
    steps = milestones([run.series for run in runs])
    lines = [_rule("side by side")]
    for key in SIDE_BY_SIDE:
        curves = beside(runs, references, key, steps, window)
        for part in range(0, len(curves), 4):
            some = curves[part : part + 4]
            head = ["step", *(short(name, 20) for name, _ in some)]
            lines += ["", key, *_table(head, curve_rows(some, steps))]
    lines += ["", *(f"{run.label}: {run.verdict.state}" for run in runs)]
    return "\n".join(lines)


Curves = list[tuple[str, list[float]]]
"""Names and values at the same steps."""


def beside(runs: Sequence[Run], references: dict[str, Series], key: str, steps: Sequence[int], window: int) -> Curves:
    """One metric of every run and reference that has it."""
    curves = [(run.label, at_milestones(run, key, steps, window)) for run in runs if key in run.means]
    curves += [(f"[{name}]", reference_at(log, key, steps)) for name, log in references.items()]
    return [(name, values) for name, values in curves if np.isfinite(values).any()]


def curve_rows(curves: Curves, steps: Sequence[int]) -> list[list[str]]:
    """Step and values; steps at which there is none are left out."""
    rows = zip(steps, *(values for _, values in curves), strict=True)
    return [[f"{step}", *map(number, row)] for step, *row in rows if any(map(math.isfinite, row))]


def short(name: str, length: int) -> str:
    """The end of a long name tells runs apart more often than its beginning, so both are kept."""
    half = (length - 2) // 2
    return name if len(name) <= length else f"{name[:half]}..{name[-half:]}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return ["  " + "  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in [head, *rows]]


def number(value: float) -> str:
    if not math.isfinite(value):
        return ""
    return f"{value:.3f}" if abs(value) < 1e5 else f"{value:.3g}"


def _rule(title: str) -> str:
    return f"== {title} " + "=" * max(WIDTH - len(title) - 4, 0)


def wrap(text: str, lead: str = "") -> list[str]:
    """Lines of :data:`WIDTH` at most, the first after ``lead``, the others under it."""
    # Not at hyphens: paths that fit stay whole, so that they can be copied.
    return textwrap.wrap(
        text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False
    ) or [lead]


def _print(text: str) -> None:
    """Terminals that cannot show the bars get plain characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
    print(text)


# --- JSON -------------------------------------------------------------------------------------------------------------


def as_json(runs: Sequence[Run], references: dict[str, Series], window: int) -> dict[str, Any]:
    """Everything the text shows; null for what is not a number."""
    steps = milestones([run.series for run in runs])
    out: dict[str, Any] = {"window": window, "runs": [], "side_by_side": {"step": steps, "runs": {}, "references": {}}}
    for run in runs:
        log = run.series
        own = milestones([log])
        lr = log.column("lr")
        finite_lr = lr[np.isfinite(lr)]
        out["runs"].append(
            {
                "label": run.label,
                "path": log.path,
                "entries": len(log),
                "first_step": int(log.step[0]) if len(log) else None,
                "last_step": int(log.step[-1]) if len(log) else None,
                "epoch": float(log.column("epoch")[-1]) if len(log) else None,
                "lr": float(finite_lr[-1]) if len(finite_lr) else None,
                "lr_peak": float(finite_lr.max()) if len(finite_lr) else None,
                "notes": asdict(log.notes),
                "means": {"step": own} | {key: at_milestones(run, key, own, window) for key in run.means},
                "best": {key: _best(key, run, window) for key in run.means},
                "changes": [asdict(one) for key in CHANGES for one in trend.changes(log, key, own, window)],
                "verdict": asdict(run.verdict),
                "cliffs": [asdict(cliff) for cliff in run.cliffs],
                "evals": log.evals,
                "alerts": log.alerts,
            }
        )
        out["side_by_side"]["runs"][run.label] = {key: at_milestones(run, key, steps, window) for key in run.means}
    for name, log in references.items():
        curves = {key: reference_at(log, key, steps) for key in TABLE if key in log.columns}
        out["side_by_side"]["references"][name] = curves
    clean: dict[str, Any] = _clean(out)
    return clean


def _best(key: str, run: Run, window: int) -> dict[str, float] | None:
    means = run.means[key].copy()
    means[: min(window, len(means)) - 1] = np.nan
    if not np.isfinite(means).any():
        return None
    at = int(np.nanargmin(means) if key == "loss" else np.nanargmax(means))
    return {"step": int(run.series.step[at]), "value": float(means[at])}


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _clean(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
