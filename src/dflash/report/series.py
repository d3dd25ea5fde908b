"""A ``metrics.jsonl`` as numpy columns: of a finished run, one in progress, or another tool with the same keys.

What is odd about a log is kept in :class:`Notes` and never stops the reading. Legend: n entries (lines of steps).
"""

from __future__ import annotations

import json
import warnings
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_CHUNK_BYTES = 1 << 21
_SHOWN = 5
_PER_SLOT = "acc_pos"
"""Columns left out: a third of a log's numbers, read by nothing here, and reading numbers is what takes the time."""
_LISTED = bytes.maketrans(b":{}\r\n", b"    ,")


class ReportError(ValueError):
    """A log that cannot be reported on, in one sentence."""


@dataclass
class Notes:
    """What a reader of the log should know about it. Counts are over entries that stand, unless said otherwise."""

    bad_lines: list[int] = field(default_factory=list)
    """Numbers (from 1) of lines that are no JSON object."""
    without_step: list[int] = field(default_factory=list)
    """Numbers of lines that have neither a whole ``step`` nor a ``kind``."""
    half_written: bool = False
    """The last line has no end: the writer is in the middle of it, or was killed there."""
    restarts: list[tuple[int, int]] = field(default_factory=list)
    """(step, entries replaced): from here on later lines replaced earlier ones of the same or a higher step."""
    repeated: int = 0
    """Lines replaced by the next one of the same step."""
    every: int = 1
    """Usual distance from one entry's step to the next."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """(last step before, first step after) wherever more than the usual distance is missing."""
    missing: dict[str, int] = field(default_factory=dict)
    """Per key that is there somewhere: entries without it (or with null, or with no number)."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """Per key: entries that say NaN or Infinity."""

    def sentences(self) -> list[str]:
        """The notes worth a line, in plain words."""
        out = []
        if self.restarts:
            where = _some(f"{step:,} (replacing {count:,} entries)" for step, count in self.restarts)
            out.append(f"steps go back {_times(len(self.restarts))}, as after a resume: at step {where}")
        if self.repeated:
            out.append(f"{self.repeated:,} lines repeat the step before them; the last of each step counts")
        if self.gaps:
            where = _some(f"{a:,} to {b:,}" for a, b in self.gaps)
            out.append(f"steps are missing {_times(len(self.gaps))} (usual distance {self.every}): {where}")
        if self.not_finite:
            out.append("NaN or infinite: " + _some(f"{key} in {n:,} entries" for key, n in self.not_finite.items()))
        if self.missing:
            out.append("missing keys: " + _some(f"{key} in {n:,} entries" for key, n in self.missing.items()))
        if self.bad_lines:
            out.append(f"{len(self.bad_lines):,} lines are no JSON object: line {_some(map(str, self.bad_lines))}")
        if self.without_step:
            out.append(f"{len(self.without_step):,} lines have no step: line {_some(map(str, self.without_step))}")
        if self.half_written:
            out.append("the last line is half written: a run in progress, or one that was killed")
        return out


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _some(items: Iterable[str]) -> str:
    items = list(items)
    return ", ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN:,} more" if len(items) > _SHOWN else "")


@dataclass
class Series:
    """The entries of a log in order of step, each step once."""

    path: str
    step: NDArray[np.int64]
    """int64 [n], strictly rising."""
    columns: dict[str, Floats]
    """float64 [n] per key; NaN where the entry lacks the key. Without ``step`` itself and the per-slot accuracies."""
    evals: list[dict[str, Any]] = field(default_factory=list)
    """Lines of kind ``eval``, those of replaced steps left out."""
    alerts: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Lines of kind ``start``: one per start or resume, where the tool writes them."""
    notes: Notes = field(default_factory=Notes)

    def __len__(self) -> int:
        return len(self.step)

    @property
    def name(self) -> str:
        """Short name of the run: its folder's, or the file's own where that says more than ``metrics``."""
        path = Path(self.path)
        return path.absolute().parent.name if path.stem == "metrics" else path.stem

    def column(self, key: str) -> Floats:
        """float64 [n]; all NaN for a key the log does not have."""
        return self.columns.get(key, np.full(len(self), np.nan))

    def until(self, step: int) -> Series:
        """The log as it stood after ``step`` (views, no copies). Notes stay the whole log's."""
        n = int(np.searchsorted(self.step, step, side="right"))
        cut = {key: values[:n] for key, values in self.columns.items()}
        evals, alerts = ([line for line in lines if line["step"] <= step] for lines in (self.evals, self.alerts))
        return replace(self, step=self.step[:n], columns=cut, evals=evals, alerts=alerts)

    @classmethod
    def of(cls, lines: Iterable[dict[str, Any]], path: str = "") -> Series:
        """From lines at hand instead of a file, as a training in progress has them."""
        return _Builder().add(list(lines), 1).series(path)


def read_series(path: str | Path) -> Series:
    """Read the log of a run folder, or a log file. Safe while a training appends to it.

    Raises:
        ReportError: there is no such file, it cannot be read, or no line of it has a step.
    """
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    builder, number = _Builder(), 1
    try:
        with open(file, "rb") as stream:
            while lines := stream.readlines(_CHUNK_BYTES):
                if not lines[-1].endswith(b"\n"):
                    # Whole or not, more may follow; it counts if it can be read, as after a tool's last write.
                    builder.notes.half_written = _parse(lines[-1]) is None
                    if builder.notes.half_written:
                        lines.pop()
                for _, group in groupby(lines, key=lambda line: b'"kind"' in line):
                    alike = list(group)
                    if not builder.add_alike(alike):
                        builder.add(_parse_all(alike), number)
                    number += len(alike)
    except FileNotFoundError:
        raise ReportError(
            f"{path} holds no metrics.jsonl: name a run's folder or a log file"
            if path.is_dir()
            else f"{path} does not exist: name a run's folder or a log file"
        ) from None
    except OSError as error:
        raise ReportError(f"{file} cannot be read: {error.strerror}") from None
    series = builder.series(str(file))
    if not len(series) and (builder.notes.bad_lines or builder.notes.without_step):
        raise ReportError(f"{file} is no metrics log: none of its lines is a JSON object with a whole number as step")
    return series


def _parse(line: bytes) -> Any:
    """The line's value; None where it is no JSON."""
    try:
        return json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def _parse_all(lines: list[bytes]) -> list[Any]:
    """The values of the lines, in place. All at once, at the parser's own speed, unless one of them is faulty."""
    try:
        rows = json.loads("[" + b",".join(lines).decode("utf-8") + "]")
    except (ValueError, RecursionError):
        rows = []
    return rows if len(rows) == len(lines) else [_parse(line) if line.strip() else {} for line in lines]


class _Builder:
    """Collects rows chunk by chunk; Python objects live for one chunk only."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.chunks: list[tuple[int, dict[str, Floats], dict[str, Bools]]] = []
        self.kinds: list[tuple[int, dict[str, Any]]] = []
        self.count = 0

    def add(self, rows: list[Any], first_line: int) -> _Builder:
        """Rows of consecutive lines; ``{}`` stands for an empty line."""
        layouts: dict[tuple[str, ...], list[int]] = {}
        for i, row in enumerate(rows):
            if type(row) is dict:
                layouts.setdefault(tuple(row), []).append(i)
            else:
                self.notes.bad_lines.append(first_line + i)
        layouts.pop((), None)
        columns: dict[str, Floats] = {}
        present: dict[str, Bools] = {}
        steps = np.full(len(rows), np.nan)
        special = []
        for keys, at in layouts.items():
            if "kind" in keys:
                special += at
                continue
            index = np.array(at)
            for key, (values, known) in _numbers(keys, [rows[i] for i in at]):
                if key.startswith(_PER_SLOT):
                    continue
                if key == "step":
                    steps[index] = np.where(values == np.floor(values), values, np.nan)
                    continue
                if key not in columns:
                    columns[key], present[key] = np.full(len(rows), np.nan), np.zeros(len(rows), bool)
                columns[key][index], present[key][index] = values, known
            self.notes.without_step += [first_line + i for i in at if not np.isfinite(steps[i])]
        good = np.isfinite(steps)
        for i in sorted(special):
            step = rows[i].get("step")
            if isinstance(step, int):
                self.kinds.append((self.count + int(good[:i].sum()), rows[i]))
        self._append(good, columns | {"step": steps}, present)
        return self

    def add_alike(self, lines: list[bytes]) -> bool:
        """Lines that all have the first one's keys in its order, and nothing but numbers: twice as fast as through
        objects. False, and nothing added, if they are not like that."""
        first = _parse(lines[0])
        if type(first) is not dict or "kind" in first or "step" not in first:
            return False
        keys, n = list(first), len(lines)
        pieces = b"".join(lines).split(b'"')
        if len(pieces) != 2 * len(keys) * n + 1 or pieces[1::2] != [key.encode() for key in keys] * n:
            return False
        columns: dict[str, Floats] = {}
        for j, key in enumerate(keys):
            if key.startswith(_PER_SLOT):
                continue
            text = b"".join(pieces[2 * j + 2 :: 2 * len(keys)]).translate(_LISTED).rstrip(b" ,")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns, and stops, where something is no number
                columns[key] = np.fromstring(text.decode("latin-1"), sep=",")
            if len(columns[key]) != n:
                return False
        if not (np.isfinite(columns["step"]) & (columns["step"] == np.floor(columns["step"]))).all():
            return False
        self._append(np.ones(n, bool), columns, {key: np.ones(n, bool) for key in columns})
        return True

    def _append(self, good: Bools, columns: dict[str, Floats], present: dict[str, Bools]) -> None:
        n = int(good.sum())
        columns = {key: values[good] for key, values in columns.items()}
        self.chunks.append((n, columns, {key: known[good] for key, known in present.items()}))
        self.count += n

    def series(self, path: str) -> Series:
        keys = list(dict.fromkeys(chain.from_iterable(columns for _, columns, _ in self.chunks)))
        whole: dict[str, Floats] = {}
        present: dict[str, Bools] = {}
        for key in keys:
            parts = [c[key] if key in c else np.full(n, np.nan) for n, c, _ in self.chunks]
            whole[key] = np.concatenate(parts) if parts else np.empty(0)
            present[key] = np.concatenate([p[key] if key in p else np.zeros(n, bool) for n, _, p in self.chunks])
        step = whole.pop("step", np.empty(0)).astype(np.int64)
        # The smallest step still to come after each entry: whoever is not below it was replaced.
        to_come = np.full(len(step) + 1, np.iinfo(np.int64).max)
        to_come[:-1] = np.minimum.accumulate(step[::-1])[::-1]
        stands = step < to_come[1:]
        notes = self.notes
        back = np.flatnonzero(np.diff(step) < 0) + 1
        for i in back:
            notes.restarts.append((int(step[i]), int((step[:i] >= step[i]).sum())))
        notes.repeated = int((np.diff(step) == 0).sum())
        step = step[stands]
        columns = {}
        for key, values in whole.items():
            known = present[key][stands]
            if not known.any():
                continue
            columns[key] = values[stands]
            if missing := int((~known).sum()):
                notes.missing[key] = missing
            if odd := int((known & ~np.isfinite(columns[key])).sum()):
                notes.not_finite[key] = odd
        if len(step) > 1:
            distance = np.diff(step)
            sizes, counts = np.unique(distance, return_counts=True)
            notes.every = int(sizes[counts.argmax()])
            notes.gaps = [(int(step[i]), int(step[i + 1])) for i in np.flatnonzero(distance > notes.every)]
        kinds: dict[str, list[dict[str, Any]]] = {}
        for at, line in self.kinds:
            if line["kind"] == "start" or line["step"] < to_come[at]:
                kinds.setdefault(str(line["kind"]), []).append(line)
        get = kinds.get
        return Series(path, step, columns, get("eval", []), get("alert", []), get("start", []), notes)


def _numbers(keys: tuple[str, ...], rows: list[dict[str, Any]]) -> Iterator[tuple[str, tuple[Floats, Bools]]]:
    """Per key: float64 [rows] and which of them are numbers. ``rows`` all have ``keys``, in this order."""
    try:
        flat = np.array(array("d", chain.from_iterable(map(dict.values, rows))))  # which refuses text, unlike numpy
        columns = flat.reshape(len(rows), len(keys)).T
        yield from ((key, (column, np.ones(len(rows), bool))) for key, column in zip(keys, columns, strict=True))
        return
    except (TypeError, ValueError, OverflowError):  # text, lists or nulls among them
        pass
    for key in keys:
        values = [row[key] for row in rows]
        try:
            yield key, (np.array(array("d", values)), np.ones(len(values), bool))
        except (TypeError, ValueError, OverflowError):
            known = np.array([isinstance(value, float) or _fits(value) for value in values])
            yield key, (np.array([v if k else np.nan for v, k in zip(values, known, strict=True)], np.float64), known)


def _fits(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 1023


def rolling_mean(series: Series, key: str, window: int = 200) -> tuple[NDArray[np.int64], Floats]:
    """Steps [n] and mean of the last ``window`` entries up to each; over fewer entries for the first ones.

    Entries that lack the key, NaN and Infinity are left out; NaN where a window holds nothing else. Each window is
    summed on its own, so one huge value spoils only the means it is part of.
    """
    values = series.column(key)
    finite = np.isfinite(values)
    count = _rolling_sum(finite.astype(np.float64), window)
    total = _rolling_sum(np.where(finite, values, 0.0), window)
    return series.step, np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def _rolling_sum(values: Floats, window: int) -> Floats:
    """[n] sums of the last ``window``: the end of one piece of that length plus the beginning of the next."""
    n = len(values)
    padded = np.zeros((1 + -(-n // window), window))
    padded.reshape(-1)[window : window + n] = values
    ahead = padded.cumsum(axis=1)
    behind = np.zeros_like(padded)
    behind[:, :-1] = padded[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
    ahead[1:] += behind[:-1]
    return ahead.reshape(-1)[window : window + n]
