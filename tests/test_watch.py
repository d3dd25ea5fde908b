"""The progress line: means, MFU and time left by arithmetic done here; the start line of a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from test_run import dflash, finish, write_run

from dflash.bench.shapes import H200_PEAK
from dflash.train import watch
from dflash.train.log import read_lines
from dflash.train.watch import ProgressLine, known_peak


def line(step: int, **over: float) -> dict[str, Any]:
    known = dict(loss=2.0, accuracy=0.25, avg_streak=1.5, step_s=2.0, feature_wait_s=0.5, tokens_per_s=1000.0)
    return known | over | {"step": step, "epoch": step / 100}


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(logging.getLogger("dflash"), "propagate", True)
    caplog.set_level(logging.INFO, logger="dflash")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(watch.time, "perf_counter", lambda: now[0])
    return now


def test_figures_are_means_and_rates_are_of_sums() -> None:
    bar = ProgressLine(0, 100, peak=1e12)
    with bar:
        bar.update(line(1), flops=1e12)
        bar.update(line(2, loss=3.0, step_s=6.0, feature_wait_s=5.5, tokens_per_s=500.0), flops=3e12)
        # 2,000 and 3,000 tokens in 8 s; 6 of 8 s waiting; 4e12 FLOP in 8 s of 1e12 a second.
        assert bar.figures() == "loss 2.500, accuracy 0.250, streak 1.50, 625 tok/s, wait 75%, MFU 50%"
        for step in range(3, 3 + watch.RECENT):
            bar.update(line(step), flops=0.5e12)
        assert bar.figures() == "loss 2.000, accuracy 0.250, streak 1.50, 1,000 tok/s, wait 25%, MFU 25%"


def test_of_several_processes_idle_replicas_and_bytes_are_shown_too() -> None:
    with ProgressLine(0, 100, peak=None) as bar:
        bar.update(line(1, replica_wait_s=5.0, moved_bytes=30e6), flops=0.0)
        bar.update(line(2, replica_wait_s=0.0, moved_bytes=10e6), flops=0.0)
        # 5 s of standing still and 40 MB in two steps of 2 s.
        assert bar.figures().endswith(", wait 25%, 1.2 replicas idle, 10 MB/s")


def test_lines_come_every_half_minute_and_at_the_end_with_the_time_left(messages: Any, clock: list[float]) -> None:
    with ProgressLine(40, 100, peak=None) as bar:
        for step in range(41, 101):
            clock[0] += 10.0
            bar.update(line(step), flops=0.0)
    told = messages()
    assert len(told) == 21  # one in three steps of 10 s, and the last
    assert told[0].startswith("step 41/100, epoch 0.41: loss 2.000") and told[0].endswith(", 10 min left")
    assert "MFU" not in told[0] and "left" not in told[-1] and told[-1].startswith("step 100/100")
    assert told[-2].endswith(", 20 s left")


def test_time_left_is_at_the_recent_pace_evaluations_included(messages: Any, clock: list[float]) -> None:
    with ProgressLine(0, 1000, peak=None) as bar:
        for step in range(1, 201):
            clock[0] += 100.0 if step <= 140 else 1.0  # slow at first, long ago
            if step == 190:
                clock[0] += 50.0  # an evaluation
            bar.update(line(step), flops=0.0)
    step, left = [(m.split("/")[0], m.split(", ")[-1]) for m in messages()][-1]
    assert step == "step 190" and left == "27 min left"  # 810 steps of (49 x 1 s + 51 s) / 50


def test_peaks_are_known_for_bf16_on_measured_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    for name, peak in (("NVIDIA H200", H200_PEAK), ("NVIDIA H100 80GB HBM3", H200_PEAK), ("NVIDIA A100", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert known_peak(gpu, "bfloat16") == peak
    assert known_peak(gpu, "float32") is None and known_peak(torch.device("cpu"), "bfloat16") is None


def test_a_run_says_what_starts_and_how_it_goes(tmp_path: Path) -> None:
    out = finish(dflash("train", write_run(tmp_path)))
    assert "drafter: " in out and "trainable" in out and "frozen" in out
    steps, (start,) = read_lines(tmp_path / "run/metrics.jsonl"), read_lines(tmp_path / "run/metrics.jsonl", "start")
    assert start["step"] == 0 and start["total_steps"] == len(steps) and start["epochs"] == 2
    header = json.loads((tmp_path / "run/checkpoints").glob("step_*").__next__().joinpath("config.json").read_text())
    width, inner = header["hidden_size"], header["intermediate_size"]
    heads, kv = header["num_attention_heads"] * header["head_dim"], header["num_key_value_heads"] * header["head_dim"]
    layer = width * (2 * heads + 2 * kv) + 2 * header["head_dim"] + 3 * width * inner + 2 * width
    assert start["trainable_parameters"] == 2 * width * width + 2 * width + layer and start["frozen_parameters"] == 0
    assert start["target_parameters"] > 0 and start["device"] == "cpu"
    assert {"dflash", "torch", "transformers", "python"} == set(start["versions"])
    last = [text for text in out.splitlines() if text.startswith(f"step {len(steps)}/{len(steps)}, epoch 2.00: loss ")]
    assert len(last) == 1 and "tok/s, wait" in last[0] and "left" not in last[0]
