"""Reading logs: odd ones as well as good ones, against one json.loads per line."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash.report.series import ReportError, Series, read_series, rolling_mean

KEYS = ("epoch", "loss", "accuracy", "top4_acc", "avg_streak", "acc_pos1", "acc_pos2", "lr", "tokens")


def rows(n: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, len(KEYS))) * 10.0 ** rng.integers(-9, 9, (n, len(KEYS)))
    return [{"step": s + 1, **dict(zip(KEYS, line, strict=True))} for s, line in enumerate(values.tolist())]


def write(path: Path, lines: list[Any]) -> Path:
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(line + "\n" for line in text), encoding="utf-8")
    return path


def test_a_run_folder_reads_exactly_what_was_written(tmp_path: Path) -> None:
    lines: list[Any] = rows(12_000)  # more than a piece of the file at a time
    for at in (9000, 4000, 0):
        lines.insert(at, {"kind": "eval", "step": at, "accepted_length": at / 7})
    lines.insert(500, {"kind": "alert", "step": 499, "text": 'said "flat"'})
    write(tmp_path / "metrics.jsonl", lines)
    series = read_series(tmp_path)
    steps = [line for line in lines if "kind" not in line]
    assert series.step.tolist() == [line["step"] for line in steps]
    for key in KEYS:
        if not key.startswith("acc_pos"):
            assert series.columns[key].tolist() == [line[key] for line in steps]
    assert not any(key.startswith("acc_pos") for key in series.columns)
    assert [line["step"] for line in series.evals] == [0, 4000, 9000]
    assert [line["text"] for line in series.alerts] == ['said "flat"']
    assert series.notes.sentences() == []
    assert series.name == tmp_path.name and read_series(tmp_path / "metrics.jsonl").name == tmp_path.name


def test_odd_values_and_keys_that_come_and_go(tmp_path: Path) -> None:
    lines: list[Any] = rows(6)
    del lines[1]["loss"]
    lines[2]["loss"] = None
    lines[3]["loss"] = math.nan
    lines[4]["loss"] = -math.inf
    lines[5]["loss"] = 10**400
    for line in lines:
        line["host"] = "a"
        line["list"] = [1, 2]
    lines[5]["late"] = 3
    series = read_series(write(tmp_path / "other.jsonl", lines))
    loss = series.columns["loss"]
    assert loss[0] == lines[0]["loss"] and np.isnan(loss[[1, 2, 3, 5]]).all() and loss[4] == -math.inf
    assert series.notes.missing == {"loss": 3, "late": 5}
    assert series.notes.not_finite == {"loss": 2}
    assert "host" not in series.columns and "list" not in series.columns
    assert series.columns["late"][5] == 3 and np.isnan(series.columns["late"][:5]).all()
    assert series.name == "other"
    assert np.isnan(series.column("never")).all() and len(series.column("never")) == 6


def test_not_a_number_in_lines_that_are_otherwise_alike(tmp_path: Path) -> None:
    lines: list[Any] = rows(50)
    lines[20]["accuracy"] = math.nan
    lines[30]["avg_streak"] = math.inf
    series = read_series(write(tmp_path / "a.jsonl", lines))
    assert series.notes.not_finite == {"accuracy": 1, "avg_streak": 1} and series.notes.missing == {}
    lines[21]["accuracy"] = "0.5"  # text is no number, even where it reads like one
    series = read_series(write(tmp_path / "a.jsonl", lines))
    assert series.columns["accuracy"][19] == lines[19]["accuracy"]
    assert np.isnan(series.columns["accuracy"][21]) and series.notes.missing == {"accuracy": 1}


def test_lines_that_are_no_entries_are_counted_and_passed_over(tmp_path: Path) -> None:
    good = rows(5)
    lines: list[Any] = [good[0], "{'step': 2}", good[1], "", "[1, 2]", {"loss": 1.0}, good[2], "\x00\x00\x00", good[3]]
    lines += [{"step": 4.5, "loss": 1.0}, {"step": "5"}, good[4]]
    series = read_series(write(tmp_path / "a.jsonl", lines))
    assert series.step.tolist() == [1, 2, 3, 4, 5]
    assert series.notes.bad_lines == [2, 5, 8]
    assert series.notes.without_step == [6, 10, 11]
    assert series.columns["loss"].tolist() == [line["loss"] for line in good]
    said = " ".join(series.notes.sentences())
    assert "3 lines are no JSON object: line 2, 5, 8" in said and "3 lines have no step: line 6, 10, 11" in said


def test_half_written_last_line_of_a_run_in_progress(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", rows(3))
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')
        file.flush()
        series = read_series(path)
        assert series.step.tolist() == [1, 2, 3] and series.notes.half_written and series.notes.bad_lines == []
        file.write('ss": 2.0}\n')
    series = read_series(path)
    assert series.step.tolist() == [1, 2, 3, 4] and not series.notes.half_written
    path.write_bytes(path.read_bytes()[:-1])  # whole, though no line end follows
    assert read_series(path).step.tolist() == [1, 2, 3, 4] and not read_series(path).notes.half_written


def test_steps_that_go_back_replace_what_a_resume_would_have_dropped(tmp_path: Path) -> None:
    first, second = rows(10), rows(8, seed=1)[5:]
    lines: list[Any] = [
        *first[:5],
        {"kind": "eval", "step": 5, "v": 1},
        *first[5:],
        {"kind": "eval", "step": 10, "v": 2},
    ]
    lines += [*second, {"kind": "eval", "step": 8, "v": 3}]
    series = read_series(write(tmp_path / "a.jsonl", lines))
    assert series.step.tolist() == list(range(1, 9))
    assert series.columns["loss"].tolist() == [line["loss"] for line in [*first[:5], *second]]
    assert series.notes.restarts == [(6, 5)] and series.notes.repeated == 0
    assert [line["v"] for line in series.evals] == [1, 3]
    twice = [line for line in first for _ in range(2)]
    series = read_series(write(tmp_path / "a.jsonl", twice))
    assert series.step.tolist() == list(range(1, 11)) and series.notes.repeated == 10 and not series.notes.restarts


def test_gaps_are_told_from_a_log_that_is_written_every_few_steps(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0} for step in [*range(10, 300, 10), *range(500, 700, 10), 693]]
    notes = read_series(write(tmp_path / "a.jsonl", lines)).notes
    assert notes.every == 10 and notes.gaps == [(290, 500)]


def test_files_that_cannot_be_reported_on(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"holds no metrics\.jsonl"):
        read_series(tmp_path)
    with pytest.raises(ReportError, match="does not exist"):
        read_series(tmp_path / "nowhere.jsonl")
    with pytest.raises(ReportError, match="no metrics log"):
        read_series(write(tmp_path / "a.jsonl", ["hello", {"loss": 1}]))
    (tmp_path / "empty.jsonl").touch()
    assert len(read_series(tmp_path / "empty.jsonl")) == 0


def test_lines_at_hand_and_the_log_as_it_once_stood() -> None:
    lines: list[Any] = rows(20)
    lines.insert(10, {"kind": "eval", "step": 10, "accepted_length": 2.0})
    series = Series.of(lines)
    then = series.until(9)
    assert len(series) == 20 and then.step.tolist() == list(range(1, 10)) and not then.evals
    assert series.until(10).evals and len(Series.of([])) == 0
    assert then.columns["loss"].tolist() == series.columns["loss"][:9].tolist()


@pytest.mark.parametrize("window", [1, 3, 200])
def test_rolling_mean_against_a_loop(window: int) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(1000)
    values[[5, 6, 7, 500]] = math.nan
    values[300] = math.inf
    values[700] = 1e300
    steps, means = rolling_mean(Series.of({"step": i, "x": v} for i, v in enumerate(values.tolist())), "x", window)
    for i in range(1000):
        part = [v for v in values[max(i - window + 1, 0) : i + 1] if math.isfinite(v)]
        assert steps[i] == i
        if part:
            assert means[i] == pytest.approx(math.fsum(part) / len(part), rel=1e-12, abs=1e-12)
        else:
            assert math.isnan(means[i])


@pytest.mark.slow
def test_half_a_million_lines_in_ten_seconds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    keys = [*KEYS, *(f"acc_pos{k}" for k in range(3, 16)), *(f"other{k}" for k in range(14))]
    bodies = [json.dumps(dict(zip(keys, rng.random(len(keys)).tolist(), strict=True)))[1:] for _ in range(997)]
    with open(tmp_path / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, 500_001):
            file.write(f'{{"step": {step}, {bodies[step % 997]}\n')
            if step % 2000 == 0:
                file.write(f'{{"kind": "eval", "step": {step}, "accepted_length": 2.5}}\n')
    started = time.process_time()
    series = read_series(tmp_path)
    assert len(series) == 500_000 and len(series.evals) == 250
    assert time.process_time() - started < 10
