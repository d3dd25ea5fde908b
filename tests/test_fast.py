"""Fast paths: chosen once, said once, and the plain reference in their place."""

import logging

import pytest
import torch

from dflash import fast
from dflash.bench.shapes import SHAPES
from dflash.bench.step import build
from dflash.train import probe

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(fast, "_off", set())
    monkeypatch.setattr(fast, "has_triton", lambda: True)


def test_a_cpu_takes_none():
    assert not fast.uses(fast.KERNELS, CPU) and not fast.uses(fast.COMPILED, CPU)
    assert fast.uses(fast.KERNELS, GPU) and fast.uses(fast.COMPILED, GPU)


def test_without_triton_there_are_none(monkeypatch):
    monkeypatch.setattr(fast, "has_triton", lambda: False)
    assert not fast.uses(fast.KERNELS, GPU) and not fast.uses(fast.COMPILED, GPU)


@pytest.mark.parametrize("error", [ImportError("No module named 'triton'"), RuntimeError("no C compiler")])
def test_what_cannot_be_built_is_switched_off_with_one_line(error, caplog):
    def work():
        raise error

    with caplog.at_level(logging.WARNING, logger="dflash"):
        assert not fast.attempt(fast.COMPILED, "dense masks", work)
    assert [r.getMessage() for r in caplog.records] == [f"{fast.COMPILED} cannot run here ({error}): dense masks"]
    assert not fast.uses(fast.COMPILED, GPU) and fast.uses(fast.KERNELS, GPU)


def test_other_errors_and_a_full_device_are_not_swallowed():
    def bug():
        raise KeyError("a bug")

    def full():
        raise torch.OutOfMemoryError("no room")

    for work, kind in ((bug, KeyError), (full, torch.OutOfMemoryError)):
        with pytest.raises(kind):
            fast.attempt(fast.COMPILED, "dense masks", work)
        assert fast.uses(fast.COMPILED, GPU)


def test_a_rehearsal_runs_the_runs_shapes_and_leaves_no_trace():
    trainer = build(SHAPES["tiny"], 96, 8, CPU, torch.float32, 1)
    before = {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}
    seen = []
    trainer.drafter.register_forward_hook(
        lambda m, args, given, out: seen.append([given[k].shape[1] for k in ("context_hidden_states", "noise_embeds")]),
        with_kwargs=True,
    )  # fmt: skip
    probe.rehearse(trainer)
    assert seen == [[96, 8 * 16]]
    assert all(p.grad is not None for p in trainer.drafter.parameters())
    trainer.drafter.zero_grad(set_to_none=True)
    line = trainer.one_step(1)
    again = build(SHAPES["tiny"], 96, 8, CPU, torch.float32, 1)
    assert all(torch.equal(before[name], p) for name, p in again.drafter.named_parameters())
    assert again.one_step(1)["loss"] == line["loss"]
