"""``metrics.jsonl``: one line per optimizer step, plus lines with a ``kind``.

``eval``   an evaluation's figures
``alert``  the run regresses or stands still; once per episode
``start``  written at each start and resume that trains: total steps, sizes, versions; its step is the last one trained
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dflash.train.trackers import Trackers
    from dflash.train.watch import Alerts

log = logging.getLogger("dflash")
TIMING_KEYS = frozenset({"tokens_per_s", "feature_wait_s", "replica_wait_s", "step_s", "eval_s", "time"})
"""The keys in which a resumed run may differ from an uninterrupted one."""


class Clock:
    """Seconds spent in ``with clock:`` blocks since the last :meth:`stop`, on the device's own time line.

    On a GPU the host only launches work, so the blocks are bracketed by events, which are read later.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *exc: object) -> None:
        self._spans.append((self._start, self._now()))

    def stop(self) -> Callable[[], float]:
        """Begin anew; what is returned tells the seconds up to here, and on a GPU waits for the end of the last one."""
        spans, self._spans = self._spans, []

        def seconds() -> float:
            if self._cuda and spans:
                spans[-1][1].synchronize()
            return float(sum(a.elapsed_time(b) / 1e3 if self._cuda else b - a for a, b in spans))

        return seconds


class MetricsLog:
    """Appends JSON lines; each is with the operating system once its step is read: ``kill -9`` loses none.

    Args:
        path: of the file.
        alerts: see every line and may add one of their own.
        trackers: see every line too.
    """

    def __init__(self, path: Path, alerts: Alerts | None = None, trackers: Trackers | None = None) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run
        self._alerts, self._trackers = alerts, trackers

    def write(self, line: dict[str, Any]) -> None:
        self._append(line)
        if self._trackers:
            self._trackers.log(line)
        if self._alerts and (alert := self._alerts.update(line)):
            self._append(alert)

    def _append(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk, mostly: say where
            raise OSError(error.errno, f"{error.strerror}; make room, then resume", self._file.name) from error

    def sync(self) -> None:
        """Down to the disk: called before a checkpoint claims that these steps happened."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._trackers:
            self._trackers.finish()


def drop_lines_after(path: Path, step: int, owes_eval: bool = False) -> int:
    """Remove lines of steps newer than ``step``, and a half-written last line; returns how many lines went.

    Atomic: a kill in the middle leaves the old file.

    Args:
        owes_eval: the evaluation of ``step`` comes again, so a line that a killed attempt wrote of it goes too.
    """
    if not path.exists():
        return 0
    kept, dropped = [], 0
    for line in path.read_bytes().split(b"\n"):
        if not line:
            continue
        try:
            read = json.loads(line)
            keep = read["step"] <= step and not (owes_eval and (read["step"], read.get("kind")) == (step, "eval"))
        except (ValueError, KeyError, TypeError):
            keep = False
        kept += [line] if keep else []
        dropped += not keep
    part = path.with_suffix(".tmp")
    part.write_bytes(b"".join(line + b"\n" for line in kept))
    os.replace(part, path)
    return dropped


def read_lines(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The step lines of a log (``kind=None``) or those of a kind; a half-written last line is passed over."""
    lines = []
    for raw in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        if isinstance(line, dict) and line.get("kind") == kind:
            lines.append(line)
    return lines


def start_logging(path: Path, to_terminal: bool = True) -> None:
    """Messages to the terminal (plain) and, with time stamps, to the rank's own file in the run's folder."""
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setFormatter(logging.Formatter("%(message)s"))
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if to_terminal:
        log.addHandler(terminal)
    log.addHandler(file)
