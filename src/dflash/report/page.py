"""``dflash report --html``: the report as one page that needs nothing else, neither network nor script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from dflash.report import plot, trend
from dflash.report.series import ReportError, Series
from dflash.report.text import (
    CHANGES,
    SIDE_BY_SIDE,
    TABLE,
    Run,
    at_milestones,
    header,
    milestones,
    number,
    reference_at,
)

CSS = """
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1d1d1f; background: #fff; max-width: 1200px;
       margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin-bottom: .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
h3 { font-size: .95rem; margin: 1.3rem 0 .3rem; color: #555; }
p { margin: .25rem 0; } ol { margin: .3rem 0; } .quiet { color: #666; }
svg { width: 100%; height: auto; }
.wide { overflow-x: auto; } .row { display: flex; flex-wrap: wrap; gap: 0 3rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem; }
th, td { text-align: right; padding: .16rem .8rem; border-bottom: 1px solid #ececec; white-space: nowrap; }
th { color: #555; font-weight: 600; border-bottom-color: #bbb; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.state { display: inline-block; padding: .02rem .55rem; border-radius: 1rem; font-size: .87rem; background: #e8e8ea; }
.improving { background: #d7f0df; color: #0b5a2a; } .flat { background: #fdf0c9; color: #6b5000; }
.regressing { background: #fbdad7; color: #8c1d12; }
"""


def save(runs: Sequence[Run], references: dict[str, Series], window: int, out: Path) -> None:
    """Write the page.

    Raises:
        ReportError: matplotlib is missing, or the file cannot be written.
    """
    text = page(runs, references, window)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{out} cannot be written: {error.strerror}") from None


def page(runs: Sequence[Run], references: dict[str, Series], window: int) -> str:
    """The whole page."""
    title = f"dflash report: {', '.join(run.label for run in runs)}"
    verdicts = "".join(f"<p>{_state(run.verdict.state)} {escape(run.label)}</p>\n" for run in runs)
    drawing = plot.svg(runs, references, window).replace("<svg", '<svg role="img" aria-label="curves of the runs"', 1)
    body = [f"<h1>{escape(title)}</h1>", verdicts, drawing]
    if len(runs) + len(references) > 1:
        body += _side_by_side(runs, references, window)
    for run in runs:
        body += _run(run, window)
    head = (
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>"
    )
    content = "\n".join(body)
    return f'<!DOCTYPE html>\n<html lang="en"><head>\n{head}</head>\n<body>\n{content}\n</body></html>\n'


def _run(run: Run, window: int) -> list[str]:
    log = run.series
    out = [f"<h2>{escape(run.label)} {_state(run.verdict.state)}</h2>", f'<p class="quiet">{escape(log.path)}</p>']
    out += [f"<p>{escape(line)}</p>" for line in header(log, window)]
    out += [f"<p>Note: {escape(line)}</p>" for line in log.notes.sentences()]
    if not len(log):
        return [*out, "<p>No steps yet.</p>"]
    out.append(f"<p><b>Verdict:</b> {escape(run.verdict.sentence)}</p>")
    for cliff in run.cliffs:
        lost = ", ".join(f"{key} {a:.3f} to {b:.3f}" for key, (a, b) in cliff.change.items())
        back = "recovered since" if cliff.recovered else "not recovered"
        out.append(f"<p>Cliff at step {cliff.step:,} ({cliff.sigmas:.0f} sigma, {back}): {escape(lost)}</p>")
    if run.verdict.causes:
        causes = "".join(f"<li>{escape(cause)}</li>" for cause in run.verdict.causes)
        out.append(f"<p>What usually causes it, the likeliest first:</p><ol>{causes}</ol>")
    steps = milestones([log])
    keys = [key for key in TABLE if key in run.means]
    rows = {key: at_milestones(run, key, steps, window) for key in keys}
    shown = [i for i, _ in enumerate(steps) if any(math.isfinite(rows[key][i]) for key in keys)]
    out += _table(
        f"Rolling mean of {min(window, len(log))} entries", ["step", *keys],
        ([f"{steps[i]:,}", *(number(rows[key][i]) for key in keys)] for i in shown),
    )  # fmt: skip
    changed: dict[tuple[int, int], dict[str, str]] = {}
    for key in CHANGES:
        for one in trend.changes(log, key, steps, window):
            cell = f"{one.change:+.4f} ± {(one.high - one.low) / 2:.4f}"
            changed.setdefault((one.first_step, one.last_step), {})[key] = cell
    some = [key for key in CHANGES if any(key in cells for cells in changed.values())]
    out += _table(
        "Change from milestone to milestone, with its 95 % interval", ["steps", *some],
        ([f"{a:,} to {b:,}", *(cells.get(key, "") for key in some)] for (a, b), cells in sorted(changed.items())),
    )  # fmt: skip
    out += _table(
        "Slope per 1,000 steps", ["metric", "slope", "95 % interval", ""],
        (
            [key, f"{one.slope:+.4f}", f"{one.low:+.4f} to {one.high:+.4f}", one.state]
            for key, one in run.verdict.metrics.items()
        ),
    )  # fmt: skip
    evals = [line for line in log.evals if isinstance(line.get("accepted_length"), int | float)]
    out += _table(
        "Evaluations", ["step", "accepted length", "rounds", "prompts"],
        ([f"{e['step']:,}", number(e["accepted_length"]), _count(e, "rounds"), _count(e, "prompts")] for e in evals),
    )  # fmt: skip
    alerts = ([f"{line['step']:,}", str(line.get("sentence", ""))] for line in log.alerts)
    return out + _table("Alerts", ["step", "what"], alerts)


def _side_by_side(runs: Sequence[Run], references: dict[str, Series], window: int) -> list[str]:
    steps = milestones([run.series for run in runs])
    out = ["<h2>Side by side</h2>", '<div class="row">']
    for key in SIDE_BY_SIDE:
        curves = [(run.label, at_milestones(run, key, steps, window)) for run in runs if key in run.means]
        curves += [(f"[{name}]", reference_at(log, key, steps)) for name, log in references.items()]
        curves = [(name, values) for name, values in curves if np.isfinite(values).any()]
        shown = [i for i, _ in enumerate(steps) if any(math.isfinite(values[i]) for _, values in curves)]
        rows = ([f"{steps[i]:,}", *(number(values[i]) for _, values in curves)] for i in shown)
        out += ["<div>", *_table(key, ["step", *(name for name, _ in curves)], rows), "</div>"]
    return [*out, "</div>"]


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Nothing at all where there are no rows."""
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    if not lines:
        return []
    top = "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"
    return [f"<h3>{escape(title)}</h3>", f'<div class="wide"><table>{top}', *lines, "</table></div>"]


def _state(state: str) -> str:
    return f'<span class="state {state.split()[0]}">{escape(state)}</span>'


def _count(line: dict[str, object], key: str) -> str:
    value = line.get(key)
    return f"{value:,}" if isinstance(value, int) else ""
