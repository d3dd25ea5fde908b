"""Verdicts on logs whose truth is known, and the numbers behind them against plain loops and simulation."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflash.report import trend
from dflash.report.episode import CHECKS, Episode
from dflash.report.series import Series, read_series
from dflash.report.trend import METRICS, Verdict, verdict

LEVEL = dict(
    loss=1.6, accuracy=0.26, top4_acc=0.45, top8_acc=0.54, avg_streak=1.25, ddtree_streak4=2.7, ddtree_streak8=3.7
)
"""Noise and slopes of every metric are the accuracy's, in proportion to these."""
REFERENCE = Path(__file__).parent.parent / "docs/reference/qwen3.6-27b-first-run.jsonl"


def ar1(rng: np.random.Generator, series: int, n: int, coefficient: float = 0.6, innovation: float = 0.02):
    """float64 [series, n]; the filter's response is cut where it has fallen below 1e-14."""
    length = 1 + math.ceil(math.log(1e-14) / math.log(coefficient))
    response = coefficient ** np.arange(length)
    noise = rng.standard_normal((series, n + length - 1)) * innovation
    return np.stack([np.convolve(row, response, mode="valid") for row in noise])


def simulated(
    seed: int,
    truth: Callable[[np.ndarray, np.random.Generator], np.ndarray],
    n: int = 5000,
    shared: float = 0.0,
    metrics: tuple[str, ...] = METRICS,
) -> Series:
    """A log whose accuracy is .26 plus the truth plus AR(1) noise, the share ``shared`` of whose variance is the same
    in every metric."""
    rng = np.random.default_rng(seed)
    step = np.arange(1, n + 1)
    moved = truth(step, rng)
    common = ar1(rng, 1, n)[0]
    own = ar1(rng, len(metrics), n)
    columns = {}
    for key, noise in zip(metrics, own, strict=True):
        both = math.sqrt(1 - shared) * noise + math.sqrt(shared) * common
        better = -1 if key == "loss" else 1
        columns[key] = LEVEL[key] * (1 + better * (moved + both) / LEVEL["accuracy"])
    return Series("", step, columns)


def slope(per_thousand: float):
    return lambda step, rng: per_thousand * step / 1000


def cliff(step: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(step >= rng.integers(500, 4500), -0.05, 0.0)


def states(truth, count: int = 200, **kw) -> Counter[str]:
    return Counter(verdict(simulated(seed, truth, **kw)).state for seed in range(count))


@pytest.mark.parametrize(
    ("truth", "right"),
    [
        (slope(0.004), "improving"),
        (slope(0.001), "improving"),
        (slope(0.0), "flat"),
        (slope(-0.001), "regressing"),
        (cliff, "regressing"),
    ],
    ids=["improving", "improving slowly", "flat", "regressing slowly", "cliff"],
)
def test_at_most_one_verdict_in_twenty_is_wrong(truth, right: str) -> None:
    assert states(truth)[right] >= 190


def test_noise_shared_by_all_metrics_costs_power_but_raises_no_false_alarm() -> None:
    """What one batch's metrics share cannot be averaged away: the slow slopes are then often taken for standing still,
    and never for their opposite."""
    assert states(slope(0.0), shared=0.9)["flat"] >= 190
    assert states(slope(0.004), shared=0.9)["improving"] >= 190
    assert states(cliff, shared=0.9)["regressing"] >= 190
    slow = states(slope(-0.001), shared=0.9)
    assert slow["improving"] == 0 and slow["flat"] > 20


def test_a_cliff_is_found_where_it_is_and_nowhere_else() -> None:
    for seed in range(100):
        log = simulated(seed, cliff)
        at = int(np.random.default_rng(seed).integers(500, 4500))
        (found,) = trend.cliffs_of(log)
        assert abs(found.step - at) <= 10 and not found.recovered
        assert found.change["accuracy"][1] - found.change["accuracy"][0] == pytest.approx(-0.05, abs=0.03)
        assert f"at step {found.step:,} and has not come back" in verdict(log).sentence
        assert not trend.cliffs_of(simulated(seed, slope(0.004)))


def test_a_cliff_made_up_for_is_noted_and_does_not_decide() -> None:
    log = simulated(0, lambda step, rng: np.where((step > 2000) & (step < 3000), -0.05, 0.001 * step / 100))
    judged = verdict(log)
    assert [cliff.recovered for cliff in judged.cliffs] == [True] and judged.state == "improving"


def first_run(seed: int | None) -> Series:
    """The reference run to 21,800 steps: straight lines between its milestones, AR(1) noise about them unless the seed
    is None, keys ending with their last milestone (after 21,000: the last line goes on)."""
    reference = read_series(REFERENCE)
    step = np.arange(1, 21_801)
    noise = np.zeros((7, len(step))) if seed is None else ar1(np.random.default_rng(seed), 7, len(step))
    columns = {}
    for key, own in zip(METRICS, noise, strict=True):
        known = np.isfinite(reference.columns[key])
        at = np.concatenate([[0], reference.step[known]])
        value = np.concatenate([[10.0 if key == "loss" else 0.0], reference.columns[key][known]])
        last = value[-1] + (step - at[-1]) * (value[-1] - value[-2]) / (at[-1] - at[-2])
        mean = np.where(step <= at[-1], np.interp(step, at, value), last if at[-1] == 21_000 else np.nan)
        columns[key] = mean + LEVEL[key] / LEVEL["accuracy"] * own
    return Series("", step, columns)


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3, 4])
def test_the_first_run_as_it_would_have_been_judged(seed: int | None) -> None:
    log = first_run(seed)
    for step in range(500, 2500, 500):
        assert verdict(log.until(step)).state == "too short to say"
    for step in range(2500, 12_001, 500):
        assert verdict(log.until(step)).state == "improving", step
    for step in range(12_500, 16_001, 500):
        assert verdict(log.until(step)).state != "regressing", step
    last = verdict(log.until(21_800))
    assert last.state == "regressing" and last.causes[0].startswith("noise that reaches the labels")
    assert not trend.cliffs_of(log)


def test_too_short_logs_get_no_verdict() -> None:
    long = simulated(0, slope(-1.0))
    for n in (0, 1, 2, 199, 2499):
        judged = verdict(long.until(n))
        assert judged.state == "too short to say" and not judged.metrics and not judged.causes
    assert verdict(simulated(0, slope(-1.0), n=2500)).state == "regressing"
    assert verdict(simulated(0, slope(-1.0), n=300), window=300).state == "regressing"
    nothing = Series("", np.arange(5000), {"epoch": np.zeros(5000)})
    assert verdict(nothing).state == "too short to say"
    broken = simulated(0, slope(0.0))
    for column in broken.columns.values():
        column[2000:] = np.nan
    assert verdict(broken).state == "too short to say"


def test_a_falling_loss_improves_but_does_not_excuse_falling_acceptance() -> None:
    only = simulated(0, slope(0.004), metrics=("loss",))
    assert verdict(only).state == "improving" and verdict(only).metrics["loss"].slope < 0
    log = simulated(0, slope(-0.004))
    log.columns["loss"] = 1.6 - 1e-3 * log.step + 1e-3 * ar1(np.random.default_rng(1), 1, len(log))[0]
    judged = verdict(log)
    assert judged.metrics["loss"].state == "improving" and judged.metrics["accuracy"].state == "regressing"
    assert judged.pooled is not None and judged.pooled.state == "improving"  # so steep is that loss
    assert judged.state == "regressing" and "the loss does not show it" in judged.sentence
    assert judged.causes[0].startswith("the loss")


def test_missing_values_and_metrics_do_not_move_the_verdict() -> None:
    log = simulated(0, slope(-0.004))
    holes = np.random.default_rng(0).random((len(METRICS), len(log))) < 0.03
    for column, hole in zip(log.columns.values(), holes, strict=True):
        column[hole] = np.nan
    log.columns["avg_streak"][4000:] = np.nan
    log.columns["ddtree_streak8"][:3000] = np.nan
    log.columns["accuracy"][100] = np.inf
    judged = verdict(log)
    assert judged.state == "regressing" and set(judged.metrics) == set(METRICS) - {"avg_streak", "ddtree_streak8"}


def test_one_wild_entry_does_not_hide_the_trend() -> None:
    log = simulated(0, slope(-0.001))
    before = verdict(log)
    log.columns["loss"][3000] = 1e200
    log.columns["accuracy"][1000] = -50.0
    after = verdict(log)
    assert before.state == after.state == "regressing" and not after.cliffs
    assert after.metrics["loss"].slope == pytest.approx(before.metrics["loss"].slope, rel=0.1)


def test_logs_without_noise() -> None:
    still = Series("", np.arange(6000), {"accuracy": np.full(6000, 0.3), "loss": np.full(6000, 2.0)})
    assert verdict(still).state == "flat" and not verdict(still).cliffs
    rising = Series("", np.arange(6000), {"accuracy": np.linspace(0.1, 0.2, 6000)})
    assert verdict(rising).state == "improving"


def test_a_verdict_costs_milliseconds() -> None:
    log = simulated(0, slope(0.0), n=20_000)
    started = time.process_time()
    for _ in range(10):
        verdict(log)
    assert time.process_time() - started < 0.5


# --- the numbers --------------------------------------------------------------------------------------------------


def test_long_run_variance_is_the_bartlett_sum() -> None:
    values = ar1(np.random.default_rng(0), 1, 300)[0]
    for share in (0.04, 0.2):
        lags = int(share * 300)
        total = values @ values
        for lag in range(1, lags):
            total += 2 * (1 - lag / lags) * (values[lag:] @ values[:-lag])
        assert trend.long_run_variance(values, share) == pytest.approx(total / 300, rel=1e-10)


def test_slope_is_least_squares_on_uneven_steps() -> None:
    rng = np.random.default_rng(0)
    step = np.cumsum(rng.integers(1, 9, 500))
    values = 0.3 - 2e-4 * step + rng.standard_normal(500) * 1e-2
    assert trend.slope_and_error(step, values)[0] == pytest.approx(np.polyfit(step, values, 1)[0], rel=1e-8)


def test_critical_values_are_those_of_white_noise() -> None:
    rng = np.random.default_rng(0)
    step = np.arange(300)
    t = np.abs([np.divide(*trend.slope_and_error(step, rng.standard_normal(300))) for _ in range(20_000)])
    assert (t > trend.TREND_95).mean() == pytest.approx(0.05, abs=0.006)
    assert (t > trend.TREND_99).mean() == pytest.approx(0.02, abs=0.004)
    assert (t > trend.TREND_999).mean() == pytest.approx(0.002, abs=0.0015)


def test_intervals_between_milestones_cover_what_they_promise() -> None:
    covered = []
    for seed in range(200):
        log = simulated(seed, slope(0.0), n=4000, metrics=("accuracy",))
        found = trend.changes(log, "accuracy", range(500, 4001, 500))
        assert len(found) == 7
        covered += [one.low <= 0.0 <= one.high for one in found]
    assert 0.93 <= np.mean(covered) <= 0.97


def test_changes_are_differences_of_window_means_and_never_overlap() -> None:
    log = simulated(0, slope(0.004))
    log.columns["accuracy"][3990] = np.nan
    found = trend.changes(log, "accuracy", [100, 1000, 1100, 3000, 4000, 5000])
    assert [(one.first_step, one.last_step) for one in found] == [(1100, 3000), (3000, 5000)]
    column = log.columns["accuracy"]
    assert found[0].change == pytest.approx(column[2800:3000].mean() - column[900:1100].mean())


def test_learning_rate_phases() -> None:
    from dflash.train.schedule import learning_rate

    def phase(step: int) -> str:
        lr = np.array([learning_rate(s, 1000, 6e-4, 0.04) for s in range(1, step + 1)])
        return trend.lr_phase(Series("", np.arange(1, step + 1), {"lr": lr}))

    assert [phase(step) for step in (2, 40, 41, 500, 1000)] == ["warm-up", "warm-up", "peak", "decay", "end"]
    assert trend.lr_phase(Series("", np.arange(3), {"lr": np.full(3, 1e-3)})) == "peak"
    assert trend.lr_phase(Series("", np.arange(3), {})) == ""


def test_an_alert_once_per_episode() -> None:
    def alerts(*states: str, lr_phase: str = "decay") -> list[int]:
        """Each state holds for as many checks as it takes, one check a state in capitals; numbers are of states."""
        episode, due = Episode(), []
        for i, state in enumerate(states):
            for _ in range(1 if state.isupper() else CHECKS + 1):
                judged = Verdict(state.lower(), i, "", None, lr_phase=lr_phase)  # type: ignore[arg-type]
                due += [i] if episode.update(judged) else []
        return due

    assert alerts("too short to say", "improving", "flat", "flat", "improving", "flat") == [2, 5]
    assert alerts("improving", "regressing", "regressing", "improving", "regressing") == [1, 4]
    assert alerts("flat", "regressing", "flat", "regressing", "flat") == [0, 1]  # one episode, made worse once
    assert alerts("flat", "flat", lr_phase="end") == []
    assert alerts("flat", "regressing", "regressing", lr_phase="end") == [1]
    # What a single check says, and unsays, is no news; nor does it end an episode.
    assert alerts("improving", "FLAT", "improving", "REGRESSING", "improving", "TOO SHORT TO SAY") == []
    assert alerts("flat", "IMPROVING", "flat", "REGRESSING", "flat") == [0]


def test_a_plain_verdict_is_news_at_once() -> None:
    def first(log: Series) -> tuple[int, str]:
        episode = Episode()
        for step in range(250, len(log) + 1, 250):
            judged = verdict(log.until(step))
            if episode.update(judged):
                return step, judged.state
        return 0, ""

    step, state = first(simulated(0, lambda step, rng: np.where(step < 5000, 0.0, -0.05), n=8000))
    assert state == "flat" and step == 5000  # a plateau takes its time: 2,500 to be judged, 2,500 to hold
    step, state = first(simulated(0, lambda step, rng: 0.004 * step / 1000 - 0.05 * (step >= 5000), n=8000))
    assert state == "regressing" and 5000 < step <= 5500
    step, state = first(simulated(0, lambda step, rng: 0.004 * (5000 - np.abs(step - 5000)) / 1000, n=12_000))
    assert state == "regressing" and 5000 < step <= 9000


@pytest.mark.slow
def test_alerts_over_whole_runs() -> None:
    """Of runs of 20,000 steps, asked 80 times each, at most one in twenty raises an alert that is not true."""

    def alerts(truth: Callable[[np.ndarray, np.random.Generator], np.ndarray], seed: int) -> list[str]:
        log, episode, raised = simulated(1000 + seed, truth, n=20_000), Episode(), []
        for step in range(250, 20_001, 250):
            judged = verdict(log.until(step))
            raised += [judged.state] if episode.update(judged) else []
        return raised

    assert sum(alerts(slope(0.0), seed) != ["flat"] for seed in range(200)) <= 10
    for rate in (0.001, 0.004):
        assert sum(bool(alerts(slope(rate), seed)) for seed in range(100)) <= 5


def test_the_first_run_would_have_raised_few_alerts() -> None:
    log, episode, raised = first_run(0), Episode(), []
    for step in range(250, 21_801, 250):
        judged = verdict(log.until(step))
        raised += [(step, judged.state)] if episode.update(judged) else []
    assert raised and all(step > 16_000 for step, _ in raised) and len(raised) <= 4
    assert "regressing" in {state for _, state in raised}
