"""Is a run improving? Trends with intervals that know about autocorrelation, cliffs, learning-rate phase, alerts.

Entries of a log are correlated: neighbouring batches see the same weights, buckets alternate, the optimizer has a
memory. Every interval here therefore uses the Newey-West (1987) long-run variance with Bartlett weights over a fixed
share of the sample, and the critical values that belong to that share (Kiefer and Vogelsang, Econometric Theory 21,
2005), simulated for the very statistics used. Correlation *between* metrics is handled by testing one pooled series,
the mean of all metrics each in units of its own noise, instead of pooling tests: where metrics share their noise, the
pooled series keeps it and the interval is as wide as it should be.

Legend: n entries; slopes are per 1,000 steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dflash.report.series import Floats, Series

State = Literal["improving", "flat", "regressing", "too short to say"]

ACCEPTANCE = ("accuracy", "top4_acc", "top8_acc", "avg_streak", "ddtree_streak4", "ddtree_streak8")
"""What decoding will see: more is better."""
METRICS = ("loss", *ACCEPTANCE)

WINDOW = 2500
"""Default of ``log.alert_window``. A slope is tested over this many entries and over twice as many."""

TREND_LAGS, TREND_95, TREND_99, TREND_999 = 0.04, 2.18, 2.63, 3.65
"""Lags of the variance as a share of n, and |t| of a slope that noise exceeds in 5, 2 (1 on either side) and 0.2 %."""
MEANS_LAGS, MEANS_95 = 0.2, 2.36
"""The same for the difference of two windows' means; more lags, since a window of 200 entries is short."""
CLIFF_SIGMAS = 5.0
CLIFF_SHARE = 0.02
"""A drop below a fiftieth of the level is no cliff, however quiet the log."""
END_OF_LR = 0.1
"""Below this share of its peak the learning rate counts as at its end, where standing still is no fault."""


@dataclass(frozen=True)
class Trend:
    """A slope per 1,000 steps with its 95 % interval, in the metric's own units and direction (a loss falls)."""

    key: str
    state: State
    slope: float
    low: float
    high: float
    t: float
    """Slope over its standard error; positive is better, for a loss too."""
    recent_t: float
    """The same over the last ``window`` entries alone; where these decided, they are what all the figures are of."""
    entries: int
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Cliff:
    """A sudden drop: the means of the entries before and after ``step``, per metric that took part."""

    step: int
    sigmas: float
    change: dict[str, tuple[float, float]]
    recovered: bool = False


@dataclass(frozen=True)
class Change:
    """Difference of a metric's means over the windows ending at two steps, with its 95 % interval."""

    key: str
    first_step: int
    last_step: int
    change: float
    low: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """Where a run stands at its last entry."""

    state: State
    step: int
    sentence: str
    pooled: Trend | None
    """Of all metrics together, in units of a metric's noise."""
    metrics: dict[str, Trend] = field(default_factory=dict)
    cliffs: tuple[Cliff, ...] = ()
    """Within the entries looked at (twice the window)."""
    lr_phase: str = ""
    causes: tuple[str, ...] = ()


# --- intervals --------------------------------------------------------------------------------------------------------


def long_run_variance(values: Floats, share: float) -> float:
    """Newey-West estimate of n times the variance of the mean of ``values`` (mean zero), over ``share * n`` lags.

    Bartlett-weighted autocovariances sum to the mean square of moving sums, which takes one pass.
    """
    n = len(values)
    lags = max(int(share * n), 1)
    sums = np.zeros(n + 2 * lags)
    np.cumsum(values, out=sums[lags : lags + n])
    sums[lags + n :] = sums[lags + n - 1]
    moving = sums[lags:] - sums[:-lags]
    return float(moving @ moving) / (n * lags)


def slope_and_error(step: NDArray[np.int64], values: Floats) -> tuple[float, float]:
    """Least-squares slope per step, and its standard error."""
    at = step - step.mean()
    spread = float(at @ at)
    level = values.mean()
    slope = float(at @ (values - level)) / spread
    scores = (values - level - slope * at) * at
    return slope, float(np.sqrt(len(at) * long_run_variance(scores, TREND_LAGS))) / spread


def _ratio(value: float, error: float) -> float:
    if value == 0.0:
        return 0.0
    return value / error if error > 0 else float(np.copysign(np.inf, value))


def changes(series: Series, key: str, milestones: Sequence[int], window: int = 200) -> list[Change]:
    """Change of a metric from each milestone to the next; milestones that no full window of finite values precedes, and
    pairs whose windows overlap, are passed over."""
    values = series.column(key)
    found: list[tuple[int, int, float, float]] = []
    for milestone in milestones:
        end = int(np.searchsorted(series.step, milestone, side="right"))
        part = values[max(end - window, 0) : end]
        if len(part) == window and np.isfinite(part).all():
            error = long_run_variance(part - part.mean(), MEANS_LAGS) / window
            found.append((milestone, end, float(part.mean()), error))
    out = []
    for (a, end_a, mean_a, var_a), (b, end_b, mean_b, var_b) in pairwise(found):
        if end_b - window >= end_a:
            half = MEANS_95 * float(np.sqrt(var_a + var_b))
            out.append(Change(key, a, b, mean_b - mean_a, mean_b - mean_a - half, mean_b - mean_a + half))
    return out


# --- the verdict ------------------------------------------------------------------------------------------------------


def verdict(series: Series, window: int = WINDOW) -> Verdict:
    """Judge the run at its last entry; reads no more than the last ``2 * window`` entries, so its cost is constant.

    The slope over the last ``2 * window`` entries decides at 1 % on either side, and the slope over the last ``window``
    at 0.1 %; where the two differ the recent one counts. A cliff that was not made up for is a regression. The run is
    judged on all metrics together; a falling loss does not make up for acceptance that falls.
    """
    phase = lr_phase(series)
    step = int(series.step[-1]) if len(series) else 0
    at, keys = slice(max(len(series) - 2 * window, 0), None), present(series, window)
    if len(series) < window or not keys:
        if len(series) and not any(key in series.columns for key in METRICS):
            have = f"none of {', '.join(METRICS)} is in the log"
        elif len(series) < window:
            have = f"{len(series):,} of {window:,} entries"
        else:
            have = "no metric has finite values throughout"
        return Verdict("too short to say", step, f"too short to say: {have}", None, lr_phase=phase)
    steps = series.step[at]
    columns = {key: series.column(key)[at] for key in keys}
    units = {key: _in_noise(key, column) for key, column in columns.items()}
    columns = {key: np.where(np.isfinite(units[key]), column, np.nan) for key, column in columns.items()}
    together = _pool([units[key] for key in keys])
    pooled = _judge("all", steps, together, window)
    if pooled is None:
        return Verdict("too short to say", step, "too short to say: too few finite values", None, lr_phase=phase)
    since = steps >= pooled.first_step
    judged = ((key, _judge(key, steps[since], columns[key][since], window)) for key in keys)
    metrics = {key: trend for key, trend in judged if trend is not None}
    accepted = [units[key] for key in keys if key in ACCEPTANCE]
    acceptance = _judge("acceptance", steps, _pool(accepted), window) if 0 < len(accepted) < len(keys) else None
    cliffs = find_cliffs(series.step[at], columns, together, max(window // 25, 5))
    state = pooled.state
    if acceptance is not None and acceptance.state == "regressing" and acceptance.t < -TREND_999:
        state = "regressing"
    if any(not cliff.recovered for cliff in cliffs):
        state = "regressing"
    sentence = _sentence(state, pooled, metrics, cliffs)
    return Verdict(state, step, sentence, pooled, metrics, tuple(cliffs), phase, causes(state, metrics, cliffs, phase))


def present(series: Series, window: int = WINDOW) -> list[str]:
    """The metrics with finite values in nine tenths of the last ``2 * window`` entries, and of the last tenth of them:
    one that has ended, or has only begun, would move the pooled series by coming and going."""
    span = min(2 * window, len(series))
    out = []
    for key in METRICS:
        finite = np.isfinite(series.column(key)[len(series) - span :])
        if span and finite.mean() >= 0.9 and finite[-(span // 10 + 1) :].mean() >= 0.9:
            out.append(key)
    return out


def _in_noise(key: str, column: Floats) -> Floats:
    """The metric about its median in units of its noise, better upwards. The noise is that of differences between
    neighbours: no trend, curve or cliff gets into it. One entry far off both neighbours (a loss of 1e9) is left out:
    it says nothing of the trend and would drown it."""
    finite = np.where(np.isfinite(column), column, np.nan)
    steps = np.diff(finite)
    noise = np.nanmedian(np.abs(steps))
    if noise > 0:
        is_far = np.abs(steps) > 30 * noise
        finite[1:-1][is_far[:-1] & is_far[1:] & (np.sign(steps[:-1]) != np.sign(steps[1:]))] = np.nan
    centred = finite - np.nanmedian(finite)
    noise = noise or np.nanstd(finite)
    return (-centred if key == "loss" else centred) / (noise or 1.0)


def _pool(units: list[Floats]) -> Floats:
    """Mean over metrics, [n]; NaN where any of them is: a mean over fewer would jump."""
    return np.asarray(np.mean(units, axis=0))


def _judge(key: str, steps: NDArray[np.int64], column: Floats, window: int) -> Trend | None:
    """The trend over the whole of the column, its state also from the last ``window`` entries."""
    sign = -1 if key == "loss" else 1
    finite = np.isfinite(column)
    if finite.sum() < window / 2:
        return None
    steps, column = steps[finite], column[finite]
    slope, error = slope_and_error(steps, column)
    t = sign * _ratio(slope, error)
    state: State = "flat"
    if abs(t) > TREND_99:
        state = "improving" if t > 0 else "regressing"
    recent_slope, recent_error = slope_and_error(steps[-window:], column[-window:])
    recent = sign * _ratio(recent_slope, recent_error)
    recent_state: State = "improving" if recent > 0 else "regressing"
    if abs(recent) > TREND_999 and recent_state != state:
        # The figures are of the entries that decide: after a turn the longer slope still points the other way.
        state, slope, error, t, steps = recent_state, recent_slope, recent_error, recent, steps[-window:]
    half = TREND_95 * error
    low, high = 1e3 * (slope - half), 1e3 * (slope + half)
    return Trend(key, state, 1e3 * slope, low, high, t, recent, len(steps), int(steps[0]), int(steps[-1]))


def find_cliffs(steps: NDArray[np.int64], columns: dict[str, Floats], together: Floats, reach: int) -> list[Cliff]:
    """Sudden drops of the pooled series: the mean of the next ``reach`` entries against that of the last ``reach``, in
    units of that difference's own robust spread (MAD) over the entries given.

    ``recovered``: the mean of the last ``reach`` entries is back above the middle of the drop.
    """
    finite = np.isfinite(together)
    steps, series = steps[finite], together[finite]
    n = len(series)
    if n < 4 * reach:
        return []
    sums = np.concatenate([[0.0], np.cumsum(series)])
    means = (sums[reach:] - sums[:-reach]) / reach  # [n - reach + 1]: of entries i .. i + reach - 1
    drop = means[:-reach] - means[reach:]  # [n - 2 reach + 1]: before entry i + reach, less from it on
    centre = np.median(drop)
    spread = 1.4826 * float(np.median(np.abs(drop - centre)))
    # Never less than independent entries would give: a log without noise has no spread at all.
    spread = max(spread, 1.4826 * float(np.median(np.abs(np.diff(series)))) / float(np.sqrt(reach)), 1e-12)
    score = drop / spread
    cliffs: list[Cliff] = []
    left = score.copy()
    while left.size and left.max() > CLIFF_SIGMAS:
        i = int(left.argmax())
        left[max(i - 2 * reach, 0) : i + 2 * reach] = 0.0
        change = {}
        for key, column in columns.items():
            values = column[finite]
            before, after = (
                float(np.nanmean(values[i : i + reach])),
                float(np.nanmean(values[i + reach : i + 2 * reach])),
            )
            worse = (after - before) if key == "loss" else (before - after)
            if worse > CLIFF_SHARE * abs(before):
                change[key] = (before, after)
        if change:
            middle = (means[i] + means[i + reach]) / 2
            cliffs.append(Cliff(int(steps[i + reach]), float(score[i]), change, bool(means[-1] > middle)))
    return sorted(cliffs, key=lambda cliff: cliff.step)


def cliffs_of(series: Series, reach: int = 100) -> list[Cliff]:
    """Every cliff of a whole log, by the metrics that are there in nine tenths of it."""
    if len(series) < 4 * reach:
        return []
    keys = [key for key in METRICS if np.isfinite(series.column(key)).mean() >= 0.9]
    if not keys:
        return []
    columns = {key: series.column(key) for key in keys}
    return find_cliffs(series.step, columns, _pool([_in_noise(key, columns[key]) for key in keys]), reach)


def lr_phase(series: Series) -> str:
    """``warm-up``, ``peak``, ``decay`` or ``end`` by the learning rate so far; empty without one."""
    lr = series.column("lr")
    lr = lr[np.isfinite(lr)]
    if not len(lr) or lr.max() <= 0:
        return ""
    peak, now = float(lr.max()), float(lr[-1])
    if now >= peak * (1 - 1e-9):
        return "warm-up" if len(lr) > 1 and lr[-2] < now else "peak"
    return "end" if now < END_OF_LR * peak else "decay"


# --- in words ---------------------------------------------------------------------------------------------------------

CAUSES = {
    "labels": "noise that reaches the labels: only the drafter's context features may be noised, never the target's "
    "last state, from which labels come",
    "leak": "the label layer among the context layers: training reads off what decoding will not have",
    "mixture": "the loss: soft targets or mixtures let the loss fall while the first choice gets worse; "
    "use plain cross-entropy",
    "rate": "a learning rate too high for this batch size: halve it and compare 2,000 steps",
    "data": "data: an order that drifts (lengths, topics), or answers the target would not give (off-policy); "
    "run dflash check",
    "features": "features from the target that changed under way (zeros, another revision, another precision)",
    "capacity": "the drafter has what these data can teach it: more or more varied data, more epochs, or more layers",
    "step": "one bad batch or an outlier gradient: look at grad_norm and at the rows of that step",
}


def causes(state: State, metrics: dict[str, Trend], cliffs: Sequence[Cliff] = (), phase: str = "") -> tuple[str, ...]:
    """What usually causes it, the likeliest first; empty while a run improves."""
    if state == "regressing" and any(not cliff.recovered for cliff in cliffs):
        order = ["step", "features", "rate", "data"]
    elif state == "regressing":
        order = ["labels", "leak", "mixture", "rate", "data"]
        loss = metrics.get("loss")
        if loss is not None and loss.state == "improving":
            order = ["mixture", "labels", "leak", "data", "rate"]
    elif state == "flat" and phase != "end":
        order = ["rate", "data", "labels", "leak", "capacity"]
    else:
        order = []
    return tuple(CAUSES[name] for name in order)


def _sentence(state: State, pooled: Trend, metrics: dict[str, Trend], cliffs: Sequence[Cliff]) -> str:
    shown = next((metrics[key] for key in ("accuracy", *METRICS) if key in metrics), pooled)
    where = f"steps {pooled.first_step:,} to {pooled.last_step:,}"
    pace = f"{shown.key} {shown.slope:+.4f} per 1,000 steps (95 %: {shown.low:+.4f} to {shown.high:+.4f})"
    text = f"{state} over {where}: {pace}"
    lost = [cliff for cliff in cliffs if not cliff.recovered]
    if lost:
        key, (before, after) = next(iter(sorted(lost[-1].change.items())))
        text += f"; {key} fell from {before:.3f} to {after:.3f} at step {lost[-1].step:,} and has not come back"
    loss = metrics.get("loss")
    if state == "regressing" and not lost and loss is not None and loss.state == "improving":
        text += "; the loss does not show it"
    return text
