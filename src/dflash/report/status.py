"""``dflash status``: one screen of a run in progress, from its folder alone and without disturbing it."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from dflash.checkpoint_folder import COMPLETE, complete
from dflash.config import ConfigError, load_config
from dflash.report import trend
from dflash.report.series import Floats, ReportError, Series, read_series
from dflash.report.text import accepted_lengths, wrap

REFRESH_S = 5.0
RECENT = 200
"""Entries that rates and figures are means of."""
_BAR = 40


def status(run_dir: Path, watch: bool = False) -> int:
    """Print the screen; with ``watch`` every :data:`REFRESH_S` seconds until Ctrl-C. Returns 0.

    Raises:
        ReportError: the folder holds no run, or its log cannot be read.
    """
    if not watch:
        print(screen(run_dir, time.time()))
        return 0
    try:
        while True:
            text = screen(run_dir, time.time())
            if sys.stdout.isatty():
                # Each line wipes what is left of the one before it: wiping the screen first would flicker.
                text = "\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[K\x1b[J"
            print(text, flush=True)
            time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        return 0


def screen(run_dir: Path, now: float) -> str:
    """The text of the screen at ``now`` (seconds since the epoch)."""
    running = is_held(run_dir)
    if not (run_dir / "metrics.jsonl").exists():
        if not running and not (run_dir / "config.yaml").exists():
            raise ReportError(f"{run_dir} holds no run: name the run_dir of one")
        state = "starting: data and target are being loaded" if running else "stopped before its first step"
        return f"{run_dir}: {state}"
    log = read_series(run_dir)
    start: dict[str, Any] = log.starts[-1] if log.starts else {}
    total = start.get("total_steps")
    step = int(log.step[-1]) if len(log) else int(start.get("step", 0))
    state = "running" if running else "finished" if step == total else "stopped"
    rows = [("", f"{run_dir}: {state}"), ("step", _where(log, step, total, start.get("epochs")))]
    if len(log):
        left = _left(log, start, step, total)
        rows += [("", _bar(step, total)), ("rates", _rates(log, start)), ("figures", _figures(log))]
        if left is not None and state != "finished":
            done = time.strftime("%a %d %b, %H:%M", time.localtime(now + left))
            rows.append(("left", duration(left) + (f", done {done}" if running else " once resumed")))
    rows += [("evaluation", _evaluation(log)), ("checkpoint", _checkpoint(run_dir, now))]
    rows.append(("verdict", trend.verdict(log, _window(run_dir)).sentence))
    if log.alerts:
        last = log.alerts[-1]
        rows.append(("alert", f"{len(log.alerts)}, the last at step {last['step']:,}: {last.get('sentence', '')}"))
    else:
        rows.append(("alert", "none"))
    if len(log) and np.isfinite(last_time := log.column("time")[-1]):
        rows.append(("last line", f"{duration(now - last_time)} ago"))
    return "\n".join(line for name, text in rows if text for line in _row(name, text))


def is_held(run_dir: Path) -> bool:
    """Whether a process works in the run's folder. Asks for a shared lock and lets go at once; a training that starts
    in that moment tries again (:func:`dflash.train.launch.locked`)."""
    try:
        with open(run_dir / ".lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


def duration(seconds: float) -> str:
    """In the two largest units that matter."""
    seconds = max(seconds, 0.0)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"


def _window(run_dir: Path) -> int:
    """The one that training itself uses."""
    try:
        return load_config(run_dir / "config.yaml", check_files=False).log.alert_window
    except ConfigError:  # no config, or another version's: the log can be judged all the same
        return trend.WINDOW


def _row(name: str, text: str) -> list[str]:
    return wrap(text, f"{name:<12}") if name else [text]


def _where(log: Series, step: int, total: int | None, epochs: int | None) -> str:
    text = f"{step:,}" + (f" of {total:,} ({step / total:.1%})" if total else "")
    if len(log) and np.isfinite(epoch := log.column("epoch")[-1]):
        text += f", epoch {epoch:.2f}" + (f" of {epochs}" if epochs else "")
    return text


def _bar(step: int, total: int | None) -> str:
    if not total:
        return ""
    done = min(int(_BAR * step / total), _BAR)
    return f"{'':<12}[{'#' * done}{'.' * (_BAR - done)}]"


def _recent(log: Series, start: dict[str, Any]) -> slice:
    """The last entries, none from before the present start: the time between would count as slow."""
    since = int(np.searchsorted(log.step, start.get("step", -1), side="right"))
    return slice(min(max(len(log) - RECENT, since), len(log) - 1), None)


def _mean(values: Floats) -> float:
    return float(values[np.isfinite(values)].mean()) if np.isfinite(values).any() else float("nan")


def _rates(log: Series, start: dict[str, Any]) -> str:
    at = _recent(log, start)
    spent, speed, wait = (log.column(key)[at] for key in ("step_s", "tokens_per_s", "feature_wait_s"))
    parts = []
    if np.isfinite(speed).any():
        weighted = _mean(speed * spent) / _mean(spent)
        parts.append(f"{weighted if np.isfinite(weighted) else _mean(speed):,.0f} tokens/s")
    if np.isfinite(spent).any():
        parts.append(f"{_mean(spent):.3g} s a step")
        if np.isfinite(wait).any():
            parts.append(f"{_mean(wait) / _mean(spent):.0%} of it waiting for features")
    return f"{', '.join(parts)} (last {len(spent):,} entries)" if parts else ""


def _figures(log: Series) -> str:
    parts = [
        f"{name} {mean:.3f}"
        for name, key in (("loss", "loss"), ("accuracy", "accuracy"), ("streak", "avg_streak"))
        if np.isfinite(mean := _mean(log.column(key)[-RECENT:]))
    ]
    if np.isfinite(lr := log.column("lr")[-1]):
        parts.append(f"learning rate {lr:.3g} ({trend.lr_phase(log)})")
    return ", ".join(parts)


def _left(log: Series, start: dict[str, Any], step: int, total: int | None) -> float | None:
    """Seconds to the last step at the recent pace, evaluations and saves in it."""
    if not total:
        return None
    at = _recent(log, start)
    steps, times = log.step[at], log.column("time")[at]
    if len(steps) > 1 and np.isfinite(times[[0, -1]]).all():
        pace = float(times[-1] - times[0]) / float(steps[-1] - steps[0])
    else:
        pace = _mean(log.column("step_s")[at])
    return pace * (total - step) if np.isfinite(pace) else None


def _evaluation(log: Series) -> str:
    known = accepted_lengths(log)
    if not known:
        return "none yet"
    best = max(known, key=lambda one: one[1])
    return f"accepted length {known[-1][1]:.3f} at step {known[-1][0]:,}; best {best[1]:.3f} at step {best[0]:,}"


def _checkpoint(run_dir: Path, now: float) -> str:
    found = complete(run_dir / "checkpoints")
    if not found:
        return "none yet"
    try:
        age = f", {duration(now - os.stat(found[-1] / COMPLETE).st_mtime)} ago"
    except OSError:  # deleted as too old since we looked
        age = ""
    return f"{found[-1].name}{age}"
