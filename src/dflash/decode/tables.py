"""The document of ``dflash eval`` as tables for a terminal of 100 columns, every number with its definition."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from dflash.decode import rounds
from dflash.decode.agreement import THRESHOLD

WIDTH = 100
SHOWN_DIFFERENCES = 10
DEFINITIONS = rounds.DEFINITIONS | {
    "tokens_per_s": "answer tokens per second of wall clock, prefill included, device waited for",
    "speedup": "tokens/s over tokens/s of the target alone: same prompts, batch size, loop and process",
    "identical": "share of prompts whose greedy output is that of the target alone, token for token",
    "tie": f"outputs part where the logits differ by less than rounding: at most {THRESHOLD}",
    "fault": "outputs part although one token was clearly preferred: decoding is not lossless there",
    "offline": "trees on the target's own answers, without a tree pass: how deep its path lies inside each tree",
    "agreement": "share of the answers' tokens that the target itself would choose; the walk is exact at 1",
}
_HEAD = ("accepted_length", "accepted_length_per_prompt", "rounds", "prompts")


def render(report: dict[str, Any]) -> str:
    """All tables of a document made by :mod:`dflash.decode.evaluate`."""
    used: list[str] = [*_HEAD]
    target = report["target"]
    arms = report["arms"]
    several = len(report["drafters"]) > 1
    lines = [f"target   {target['model']}, {target['dtype']}, on {target['device']}"]
    lines += [f"drafter {chr(65 + i) if several else ''} {d['line'].removeprefix('drafter ')}"
              for i, d in enumerate(report["drafters"])]  # fmt: skip
    names = _names(report)
    lines += ["", *_overview(report, names)]
    if report["alone"]:
        used += ["tokens_per_s", "speedup"]
    if report["agreement"] is not None:
        used.append("agreement")
        lines += ["", f"answers: {report['agreement']:.2%} of their tokens are the target's own choice"]
    if any(arm["tree_budget"] and not arm["decoded"] for arm in arms):
        used.append("offline")
        if target["hybrid"]:
            lines += ["", "trees: offline only, since a flat masked tree pass is wrong in this target's linear layers"]
    lines += _fastest(report, names) + _agreement(report, names, used)
    used.append("accepted_at")
    slots = max(len(arm["accepted_at"]) for arm in arms)
    for start in range(0, slots, 15):
        part = range(start, min(start + 15, slots))
        rows = [[name, *(_cell(arm["accepted_at"], k) for k in part)] for name, arm in zip(names, arms, strict=True)]
        lines += ["", *_table(["accepted at slot", *(str(k + 1) for k in part)], rows)]
    used.append("by_context")
    lines += ["", *_by(arms, names, "by_context", "context tokens", lambda r: f"{r['at_least']}-{r['below'] - 1}")]
    if any(arm["by_category"] for arm in arms):
        used.append("by_category")
        lines += ["", *_by(arms, names, "by_category", "category", lambda r: str(r["category"]))]
    if report["comparison"]:
        used += ["difference", "interval"]
        lines += ["", *_comparison(report, names)]
    lines += ["", "what the numbers are"]
    for key in dict.fromkeys(used):
        lines += textwrap.wrap(
            f"  {key:<26} {DEFINITIONS[key]}", WIDTH, subsequent_indent=" " * 29, break_on_hyphens=False
        )
    return "\n".join(lines)


def _names(report: dict[str, Any]) -> list[str]:
    """Of the arms: drafter (where there are two), block size, tree."""
    several, half = len(report["drafters"]) > 1, len(report["arms"]) // 2
    names = []
    for i, arm in enumerate(report["arms"]):
        name = f"block {arm['block_size']}" if arm["tree_budget"] is None else f"tree {arm['tree_budget']}"
        if arm["tree_budget"] is not None:
            name += "" if arm["decoded"] else " offline"
        names.append(f"{'A' if i < half else 'B'} {name}" if several else name)
    return names


def _overview(report: dict[str, Any], names: Sequence[str]) -> list[str]:
    head = ["", "accepted length", "per prompt", "rounds", "prompts"]
    rows = [
        [name, _number(arm["accepted_length"], 3), _number(arm["accepted_length_per_prompt"], 3), str(arm["rounds"]),
         str(arm["prompts"])]
        for name, arm in zip(names, report["arms"], strict=True)
    ]  # fmt: skip
    if alone := report["alone"]:
        head += ["tokens/s", "speed-up"]
        for row, arm in zip(rows, report["arms"], strict=True):
            row += [_number(arm.get("tokens_per_s"), 1), _number(arm.get("speedup"), 2)]
        rows.append(["target alone", "-", "-", "-", "-", _number(alone["tokens_per_s"], 1), "1.00"])
    return _table(head, rows)


def _fastest(report: dict[str, Any], names: Sequence[str]) -> list[str]:
    lines = []
    for d in range(len(report["drafters"])):
        half = len(names) // len(report["drafters"])
        timed = [
            (arm["tokens_per_s"], name)
            for arm, name in list(zip(report["arms"], names, strict=True))[d * half : (d + 1) * half]
            if "tokens_per_s" in arm
        ]
        if len(timed) > 1:
            slower = "; the target alone is faster" if max(timed)[0] < report["alone"]["tokens_per_s"] else ""
            lines.append(f"fastest: {max(timed)[1]}, {max(timed)[0]:.1f} tokens/s{slower}")
    return ["", *lines] if lines else []


def _agreement(report: dict[str, Any], names: Sequence[str], used: list[str]) -> list[str]:
    if not report["alone"]:
        return []
    if report["settings"]["temperature"] > 0:
        return ["", "outputs are drawn at random at this temperature, so they are not compared with the target alone"]
    used += ["identical", "tie", "fault"]
    lines = [""]
    for name, arm in zip(names, report["arms"], strict=True):
        if "differing" not in arm:
            continue
        faults = sum(d["verdict"] == "fault" for d in arm["differing"])
        ties = len(arm["differing"]) - faults
        lines.append(f"{name}: {arm['identical']:.1%} of outputs identical, {ties} part at a tie, {faults} by a fault")
        shown = sorted(arm["differing"], key=lambda d: d["verdict"])[:SHOWN_DIFFERENCES]
        for d in shown:
            margin = "one answer stops" if d["margin"] is None else f"margin {d['margin']:.3g}"
            lines.append(
                f"  {d['verdict']}: {d['origin']}, answer token {d['position']}: {d['alone']} alone, "
                f"{d['speculative']} here; {margin}, rounding {d['threshold']:.3g}"
            )
        if len(arm["differing"]) > len(shown):
            lines.append(f"  and {len(arm['differing']) - len(shown)} more; --json has all")
    return lines


def _by(arms: Sequence[dict[str, Any]], names: Sequence[str], key: str, what: str, label: Any) -> list[str]:
    rows = []
    found: dict[str, list[str]] = {}
    for k, arm in enumerate(arms):
        for row in arm[key]:
            cells = found.setdefault(label(row), ["-"] * len(arms))
            cells[k] = f"{_number(row['accepted_length'], 3)} ({row['rounds']})"
    rows = [[name, *cells] for name, cells in found.items()]
    if key == "by_context":
        rows.sort(key=lambda row: int(row[0].split("-")[0]))
    lines: list[str] = []
    for start in range(0, len(names), 4):
        if start:
            lines.append("")
        lines += _table([what, *names[start : start + 4]], [[r[0], *r[1 + start : 5 + start]] for r in rows])
    return [f"accepted length (rounds) by {what}", *lines]


def _comparison(report: dict[str, Any], names: Sequence[str]) -> list[str]:
    lines = [f"A {report['drafters'][0]['name']} against B {report['drafters'][1]['name']}"]
    half = len(names) // 2
    for one, a, b in zip(report["comparison"], names[:half], names[half:], strict=True):
        if one["interval"] is None:
            lines.append(f"  {a} - {b}: {_number(one['difference'], 3)}; too few prompts for an interval")
            continue
        low, high = one["interval"]
        verdict = "A is ahead" if low > 0 else "B is ahead" if high < 0 else "no clear difference"
        verdict = "no difference" if low == high == 0 else verdict
        lines.append(
            f"  {a} - {b}: {one['difference']:+.3f} [{low:+.3f}, {high:+.3f}] over {one['prompts']} prompts: {verdict}"
        )
    return lines


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """First column to the left, numbers to the right."""
    widths = [max(len(line[c]) for line in [head, *rows]) for c in range(len(head))]
    return [
        "  ".join(cell.rjust(w) if c else cell.ljust(w) for c, (cell, w) in enumerate(zip(line, widths, strict=True)))
        .rstrip()
        for line in [head, *rows]
    ]  # fmt: skip


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _cell(values: Sequence[float | None], k: int) -> str:
    return _number(values[k], 2) if k < len(values) else "-"
