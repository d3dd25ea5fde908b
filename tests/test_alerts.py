"""Alerts follow from the logged lines alone: once per episode, and the same after a kill at any moment."""

import json
import logging

import numpy as np
import pytest

from dflash.report import trend
from dflash.train import watch
from dflash.train.log import MetricsLog, drop_lines_after, read_lines
from dflash.train.watch import Alerts

WINDOW = 200


def lines(seed=0):
    """Improves for 1,500 steps, stands still for 1,500, improves again for 1,500, falls for 1,500."""
    g = np.random.default_rng(seed)
    level = np.interp(np.arange(6000), [0, 1500, 3000, 4500, 6000], [0.1, 0.4, 0.4, 0.7, 0.4])
    noise = g.normal(0, 0.01, (6000, len(trend.METRICS)))
    for i in range(6000):
        values = {
            key: float((2 - level[i] if key == "loss" else level[i]) + noise[i, j])
            for j, key in enumerate(trend.METRICS)
        }
        yield {"step": i + 1, "lr": 6e-4 * (1 - i / 20000), **values}


def write(path, some):
    metrics = MetricsLog(path, Alerts(path, WINDOW))
    for line in some:
        metrics.write(line)
    metrics.close()


def alerts_of(path):
    return [{k: v for k, v in line.items() if k != "time"} for line in read_lines(path, "alert")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    logging.getLogger("dflash").setLevel(logging.ERROR)
    path = tmp_path_factory.mktemp("whole") / "metrics.jsonl"
    write(path, lines())
    return path


def test_one_alert_per_episode(whole):
    found = alerts_of(whole)
    print([(a["step"], a["verdict"]) for a in found])
    first_regression = next(a for a in found if a["verdict"] == "regressing" and a["step"] > 4500)
    assert 4500 < first_regression["step"] < 5200
    plateau = [a for a in found if 1500 < a["step"] <= 3100]
    assert len(plateau) == 1 and plateau[0]["verdict"] == "flat"
    assert not [a for a in found if a["step"] <= 1500]
    assert set(first_regression) == {"kind", "step", "verdict", "slopes", "sentence"}
    assert first_regression["slopes"]["accuracy"] < 0 < first_regression["slopes"]["loss"]


@pytest.mark.parametrize(
    "killed,checkpoint", [(1, 0), (199, 150), (1950, 1900), (2600, 2500), (4900, 4600), (5990, 5987)]
)
def test_a_resume_raises_the_alerts_of_a_run_never_killed(whole, tmp_path, killed, checkpoint):
    path, all_lines = tmp_path / "metrics.jsonl", list(lines())
    write(path, all_lines[:killed])
    drop_lines_after(path, checkpoint)
    write(path, all_lines[checkpoint:])
    assert alerts_of(path) == alerts_of(whole)
    assert read_lines(path) == read_lines(whole)


def test_the_verdict_runs_every_tenth_of_the_window_only(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        watch, "verdict", lambda series, window: calls.append(len(series)) or trend.verdict(series, window)
    )
    write(tmp_path / "metrics.jsonl", list(lines())[:400])
    assert calls == list(range(20, 401, 20))


def test_the_alert_is_json_and_other_kinds_do_not_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    alerts = Alerts(path, WINDOW)
    assert alerts.update({"kind": "eval", "step": 0, "accepted_length": 1.0}) is None
    found = [a for line in list(lines())[:2600] if (a := alerts.update(line))]
    assert len(found) == 1 and json.loads(json.dumps(found[0])) == found[0]
