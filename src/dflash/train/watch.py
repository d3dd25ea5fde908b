"""What a training says of itself while it runs: a line a person can read, and alerts when it stops improving."""

from __future__ import annotations

import time
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dflash.bench.shapes import H200_PEAK
from dflash.report.episode import CHECKS, Episode, is_plain
from dflash.report.series import Series, read_series
from dflash.report.status import duration
from dflash.report.trend import METRICS, Verdict, verdict
from dflash.train.log import log

LINE_EVERY_S = 30.0
RECENT = 50
"""Steps that the shown figures are means of."""
AVERAGED = ("loss", "accuracy", "avg_streak", "step_s", "feature_wait_s")
STREAMED = ("replica_wait_s", "moved_bytes")
"""Of runs of several processes only."""


class Alerts:
    """The verdict of ``dflash report`` over what has been logged, :data:`CHECKS` times a window.

    A regression or a plateau is told once (see :class:`dflash.report.episode.Episode`). All of it follows
    from the logged lines alone, so that a resumed run raises the alerts that an uninterrupted one would have.

    Args:
        path: the run's metrics.jsonl; what it holds already counts.
        window: entries over which, and over twice which, a trend is tested.
    """

    def __init__(self, path: Path, window: int) -> None:
        self.window, self.every = window, max(window // CHECKS, 1)
        so_far = read_series(path) if path.exists() else Series.of([])
        self._step = array("q", so_far.step.tolist())
        self._columns = {key: array("d", so_far.column(key).tolist()) for key in (*METRICS, "lr")}
        self._episode = Episode()
        # As it stood after the last check: nothing before the last plain improvement, which ends any episode, matters.
        verdicts: list[Verdict] = []
        for count in range(len(self._step) // self.every * self.every, 0, -self.every):
            verdicts.append(self._verdict(count))
            if verdicts[-1].state == "improving" and is_plain(verdicts[-1]):
                break
        for one in reversed(verdicts):
            self._episode.update(one)

    def _verdict(self, count: int) -> Verdict:
        # Views, which must be gone before the next append: a copy of a long log at each check would be seconds.
        columns = {key: np.frombuffer(values)[:count] for key, values in self._columns.items()}
        return verdict(Series("", np.frombuffer(self._step, np.int64)[:count], columns), self.window)

    def update(self, line: dict[str, Any]) -> dict[str, Any] | None:
        """Take note of a step's line; returns the ``alert`` line if one is due."""
        if "kind" in line:
            return None
        self._step.append(line["step"])
        for key, values in self._columns.items():
            values.append(line.get(key, np.nan))
        if len(self._step) % self.every:
            return None
        found = self._verdict(len(self._step))
        if not self._episode.update(found):
            return None
        cause = f"; what usually causes it: {found.causes[0]}" if found.causes else ""
        log.warning(f"alert at step {found.step:,}: {found.sentence}{cause} (`dflash report` shows more)")
        return {
            "kind": "alert", "step": found.step, "verdict": found.state,
            "slopes": {key: trend.slope for key, trend in found.metrics.items()}, "sentence": found.sentence,
            "time": time.time(),
        }  # fmt: skip


def known_peak(device: torch.device, dtype: str) -> float | None:
    """FLOP/s that this device reaches at best, where somebody measured it: the H200's, and the H100's in its SXM
    form, which is the same die."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return H200_PEAK if "H200" in name or "H100 80GB HBM3" in name else None


class ProgressLine:
    """A progress bar on a terminal; elsewhere a plain line in the log every :data:`LINE_EVERY_S` seconds.

    Loss, accuracy, streak, tokens/s, share of the time spent waiting for features and MFU (the drafter's model FLOPs,
    where the device's peak is known) are means of the last steps; the time left is at their pace. Where features come
    from other processes: how many replicas stood still on average because the drafter had no room, and bytes/s.

    Args:
        done: steps trained already.
        total: steps of the whole run.
        peak: FLOP/s that MFU is a share of.
    """

    def __init__(self, done: int, total: int, peak: float | None) -> None:
        self.total, self.peak = total, peak
        self._bar = tqdm(total=total, initial=done, desc="train", unit="step", disable=None)
        self._recent: deque[tuple[float, ...]] = deque(maxlen=RECENT)
        self._ends: deque[float] = deque([time.perf_counter()], maxlen=RECENT + 1)
        self._next_line = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def update(self, line: dict[str, Any], flops: float) -> None:
        """One more step, by its metrics line."""
        streamed = (line.get(key, np.nan) for key in STREAMED)
        self._recent.append((*(line[key] for key in AVERAGED), line["tokens_per_s"] * line["step_s"], flops, *streamed))
        self._ends.append(time.perf_counter())
        if not self._bar.disable:
            self._bar.set_postfix_str(self.figures(), refresh=False)
        elif self._ends[-1] >= self._next_line or line["step"] == self.total:
            self._next_line = self._ends[-1] + LINE_EVERY_S
            pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
            left = f", {duration(pace * (self.total - line['step']))} left" if line["step"] < self.total else ""
            log.info(f"step {line['step']:,}/{self.total:,}, epoch {line['epoch']:.2f}: {self.figures()}{left}")
        self._bar.update()

    def figures(self) -> str:
        """Means of the last steps, in words."""
        loss, accuracy, streak, spent, wait, tokens, flops, idle, moved = np.mean(self._recent, axis=0)
        text = f"loss {loss:.3f}, accuracy {accuracy:.3f}, streak {streak:.2f}"
        text += f", {tokens / spent:,.0f} tok/s, wait {wait / spent:.0%}"
        if not np.isnan(moved):
            text += f", {idle / spent:.1f} replicas idle, {moved / spent / 1e6:,.0f} MB/s"
        return text + (f", MFU {flops / spent / self.peak:.0%}" if self.peak else "")
