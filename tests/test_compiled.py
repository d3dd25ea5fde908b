"""The target's parts that are compiled for capture: what stands in gives what it stands in for, and goes again."""

import numpy as np
import pytest
import torch
from tiny import VOCAB, tiny_gemma2, tiny_llama, tiny_qwen3, tiny_qwen35
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflash import fast
from dflash.target import compiled
from dflash.target.compiled import CompiledParts, choose_paths, short_convolution, trial_lengths
from dflash.target.model import Target

TARGETS = [tiny_llama, tiny_qwen3, tiny_gemma2, tiny_qwen35]


def rows(seed=0, lengths=(23, 9, 41)):
    rng = np.random.default_rng(seed)
    return [rng.integers(6, VOCAB, n) for n in lengths], [np.arange(n) > n // 3 for n in lengths], range(len(lengths))


@pytest.fixture
def eager(monkeypatch):
    """No compiler: what is tested is which parts stand in, with which tensors."""
    calls = []

    def compile(function, dynamic):
        def run(*args, **kwargs):
            calls.append(function)
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", compile)
    return calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_short_convolution_is_transformers(bias, activation):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 17, 24, generator=g).transpose(1, 2)  # as it comes: channels last in memory
    weight, offset = torch.randn(24, 4, generator=g), torch.randn(24, generator=g) if bias else None
    want = modeling_qwen3_5.causal_conv1d_fn(hidden, weight, offset, activation=activation)
    got = short_convolution(hidden, weight, offset, activation=activation, seq_idx=None)
    assert torch.allclose(got, want, atol=1e-5) and got.dtype == want.dtype
    shorter = short_convolution(hidden[..., :2], weight, offset, activation=activation)
    assert torch.allclose(shorter, want[..., :2], atol=1e-5)


@pytest.mark.parametrize("make", TARGETS)
def test_capture_with_the_parts_equals_capture_without(make, eager, monkeypatch):
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    module = make()
    target = Target(module, None, [0, 2])
    want = target.capture(*rows())
    target.compiled = CompiledParts(target.decoder)
    got = target.capture(*rows())
    assert torch.allclose(got.context, want.context, atol=2e-4, rtol=1e-4)  # the recurrence multiplies rounding
    assert torch.equal(got.labels, want.labels)
    used = {getattr(f, "__self__", f) for f in eager}
    norms = {m for m in module.get_decoder().modules() if "Norm" in type(m).__name__}
    mlps = {m for m in module.get_decoder().modules() if type(m).__name__.endswith("MLP")}
    assert len(norms) > 8 and len(mlps) == len(target.layers)
    assert used == norms | mlps | ({short_convolution} if make is tiny_qwen35 else set())


def test_nothing_stands_in_outside_a_capture(eager):
    module, plain = tiny_qwen35(), modeling_qwen3_5.causal_conv1d_fn
    target = Target(module, None, [0, 2])
    target.compiled = CompiledParts(target.decoder)
    target.capture(*rows())
    with pytest.raises(RuntimeError, match="mid-way"), target.compiled.in_place():
        raise RuntimeError("mid-way")
    assert modeling_qwen3_5.causal_conv1d_fn is plain
    assert not [m for m in module.modules() if "forward" in vars(m)]
    eager.clear()
    target.greedy([[7, 8, 9]], 4, 1)
    assert not eager


def test_a_kernel_that_is_installed_is_left_in_its_place(eager, monkeypatch):
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: object())
    assert CompiledParts(Target(tiny_qwen35(), None, [0]).decoder).homes == []


class ToldMore(torch.nn.Module):
    """As a gated norm without its gate, and as an MLP shared by layers that is told which of them calls."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(4.0))

    def forward(self, hidden, gate=None, layer_idx=0):
        out = hidden * self.weight + layer_idx
        return out if gate is None else out * gate


def test_what_is_no_tensor_reaches_a_part_as_it_is(eager):
    module = ToldMore()
    hidden, gate = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    calls = [((), {}), ((None,), {}), ((gate, 2), {}), ((), {"gate": None, "layer_idx": 5}), ((), {"gate": gate})]
    want = [module(hidden, *args, **named) for args, named in calls]
    with CompiledParts(module).in_place():
        got = [module(hidden, *args, **named) for args, named in calls]
    assert len(eager) == len(calls)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 15, 16, 17, 64])
def test_the_trial_has_no_row_longer_than_training_has(tokens):
    one, several = trial_lengths(tokens, 8)
    assert one == [min(tokens, 8)] and max(several) <= 8 and min(several) > 0
    assert len(several) > 1 or tokens == 1
    assert tokens - 8 < sum(several) <= tokens


def test_on_a_cpu_nothing_is_chosen(eager):
    target = Target(tiny_llama(), None, [0])
    choose_paths(target, 64, 64)
    assert target.compiled is None and not eager


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", TARGETS)
def test_compiled_capture_equals_plain_capture(make):
    """fp32: the same to rounding, at shapes the parts were not compiled for too."""
    target = Target(make().cuda(), None, [0, 2])
    batches = [rows(), rows(1, (64,)), rows(2, (5, 1)), rows(3, (40, 31, 8, 77))]
    want = [target.capture(*batch) for batch in batches]
    choose_paths(target, 128, 64)
    assert target.compiled is not None and fast.uses(fast.TARGET, target.device)
    for batch, plain in zip(batches, want, strict=True):
        got = target.capture(*batch)
        assert torch.allclose(got.context, plain.context, atol=1e-3, rtol=1e-3)
        assert (got.labels == plain.labels).float().mean() > 0.98
