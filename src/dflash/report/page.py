"""``dflash report --html``: the report as one page that needs nothing else, neither network nor script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from dflash.report import plot
from dflash.report.series import ReportError, Series
from dflash.report.text import (
    SIDE_BY_SIDE,
    TABLE,
    Run,
    accepted_lengths,
    beside,
    changes_rows,
    cliff_sentences,
    curve_rows,
    header,
    means_rows,
    milestones,
    number,
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
    out += [f"<p>{escape(sentence.capitalize())}</p>" for sentence in cliff_sentences(run)]
    if run.verdict.causes:
        causes = "".join(f"<li>{escape(cause)}</li>" for cause in run.verdict.causes)
        out.append(f"<p>What usually causes it, the likeliest first:</p><ol>{causes}</ol>")
    steps = milestones([log])
    keys = [key for key in TABLE if key in run.means]
    rolling = f"Rolling mean of {min(window, len(log))} entries"
    out += _table(rolling, ["step", *keys], means_rows(run, keys, steps, window))
    some, changed = changes_rows(log, steps, window)
    out += _table("Change from milestone to milestone, with its 95 % interval", ["steps", *some], changed)
    out += _table(
        "Slope per 1,000 steps", ["metric", "slope", "95 % interval", ""],
        (
            [key, f"{one.slope:+.4f}", f"{one.low:+.4f} to {one.high:+.4f}", one.state]
            for key, one in run.verdict.metrics.items()
        ),
    )  # fmt: skip
    measured = ([f"{step:,}", number(length)] for step, length in accepted_lengths(log))
    out += _table("Evaluations", ["step", "accepted length"], measured)
    alerts = ([f"{line['step']:,}", str(line.get("sentence", ""))] for line in log.alerts)
    return out + _table("Alerts", ["step", "what"], alerts)


def _side_by_side(runs: Sequence[Run], references: dict[str, Series], window: int) -> list[str]:
    steps = milestones([run.series for run in runs])
    out = ["<h2>Side by side</h2>", '<div class="row">']
    for key in SIDE_BY_SIDE:
        curves = beside(runs, references, key, steps, window)
        table = _table(key, ["step", *(name for name, _ in curves)], curve_rows(curves, steps))
        out += ["<div>", *table, "</div>"]
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
