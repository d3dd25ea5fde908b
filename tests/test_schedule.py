"""Steps, learning rate and noise as functions of the step number."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash.data.conversations import DataError
from dflash.train.log import MetricsLog, drop_lines_after, read_lines
from dflash.train.schedule import StepPlan, add_noise, learning_rate, noise_seed, noise_std


class Epochs:
    """A plan whose epochs have given numbers of batches."""

    def __init__(self, counts):
        self.counts = counts

    def epoch(self, e):
        return [(e, i) for i in range(self.counts[e])]


def test_steps_never_mix_epochs_and_the_rest_is_counted():
    plan = StepPlan(Epochs([7, 8, 3]), 3, 2)
    assert [plan.batches(s) for s in range(1, plan.total + 1)] == [
        [(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4), (0, 5)],
        [(1, 0), (1, 1)], [(1, 2), (1, 3)], [(1, 4), (1, 5)], [(1, 6), (1, 7)], [(2, 0), (2, 1)],
    ]  # fmt: skip
    assert plan.dropped == 2
    assert [plan.epoch_of(s) for s in (1, 3, 4, 7, 8)] == [0.3333, 1.0, 1.25, 2.0, 3.0]


def test_no_whole_step_is_an_error_that_names_the_key():
    with pytest.raises(DataError, match=r"train.grad_accumulation is 4 but an epoch has only 3"):
        StepPlan(Epochs([3, 3]), 2, 4)


def test_learning_rate_of_the_reference_run():
    total, peak = 70_036, 6e-4
    rates = [learning_rate(s, total, peak, 0.04) for s in range(1, total + 1)]
    assert rates[2800] == peak and rates[2799] < peak and rates[2801] == peak  # 2,801 warm-up steps
    assert rates[0] == pytest.approx(peak / 2801) and 0 < rates[-1] < 1e-11
    assert rates[(2801 + total) // 2] == pytest.approx(peak / 2, rel=1e-3)
    assert all(a >= b for a, b in pairwise(rates[2801:]))
    assert learning_rate(1, 10, peak, 0.0) == peak


def test_noise_ramp_and_seeds():
    config = SimpleNamespace(noise=SimpleNamespace(start=0.1, end=0.3))
    assert [noise_std(s, 5, config) for s in (1, 3, 5)] == pytest.approx([0.1, 0.2, 0.3])
    assert noise_std(1, 1, config) == pytest.approx(0.1)
    seeds = {noise_seed(s, e, b) for s in range(3) for e in range(3) for b in range(50)}
    assert len(seeds) == 450 and all(0 <= s < 1 << 63 for s in seeds)


def test_noise_is_relative_to_each_layers_rms_and_zero_is_identity():
    context = torch.randn(4000, 2 * 16) * torch.tensor([1.0] * 16 + [50.0] * 16)
    state = torch.get_rng_state()
    assert add_noise(context, 16, 0.0, 1) is context
    noisy = add_noise(context, 16, 0.2, 1)
    assert torch.equal(torch.get_rng_state(), state)  # no other stream moves
    delta = (noisy - context).unflatten(-1, (2, 16))
    rms = context.unflatten(-1, (2, 16)).pow(2).mean(-1).sqrt()
    ratio = delta.pow(2).mean(-1).sqrt() / rms
    assert torch.allclose(ratio.mean(0), torch.tensor([0.2, 0.2]), atol=0.01)
    assert torch.equal(noisy, add_noise(context, 16, 0.2, 1)) and not torch.equal(noisy, add_noise(context, 16, 0.2, 2))
    assert add_noise(context.bfloat16(), 16, 0.2, 1).dtype == torch.bfloat16


def test_metrics_lines_newer_than_the_checkpoint_and_half_lines_go(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsLog(path)
    metrics.write({"kind": "eval", "step": 0, "accepted_length": 1.0})
    for step in range(1, 6):
        metrics.write({"step": step, "loss": math.pi})
    metrics.write({"kind": "eval", "step": 3, "accepted_length": 1.5})
    metrics.sync()
    metrics.close()
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')
    assert drop_lines_after(path, 3) == 3
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    assert [line["step"] for line in read_lines(path, "eval")] == [0, 3]
    assert read_lines(path)[0]["loss"] == math.pi
    assert drop_lines_after(path, -1) == 5 and path.read_bytes() == b""
    assert drop_lines_after(tmp_path / "absent", 3) == 0
    assert np.isfinite(path.stat().st_size)
