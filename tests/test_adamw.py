"""The optimizer's step: torch's own AdamW on divided gradients, nothing at all where refused."""

import pytest
import torch

from dflash.train.adamw import AdamW

SETTINGS = {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}


def drawn(*size, seed):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def parameters():
    return [torch.nn.Parameter(drawn(7, 5, seed=1)), torch.nn.Parameter(drawn(3, seed=2))]


def give(params, step, divisor=1.0):
    for i, p in enumerate(params):
        p.grad = drawn(*p.shape, seed=10 * step + i) * divisor


def reference(steps):
    """Loshchilov and Hutter's algorithm 2 by the letter, in fp64."""
    params = [p.detach().double().clone() for p in parameters()]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    b1, b2 = SETTINGS["betas"]
    for t in range(1, steps + 1):
        for i, (p, (m, v)) in enumerate(zip(params, moments, strict=True)):
            g = drawn(*p.shape, seed=10 * t + i).double()
            m.mul_(b1).add_((1 - b1) * g)
            v.mul_(b2).add_((1 - b2) * g * g)
            p.mul_(1 - SETTINGS["lr"] * SETTINGS["weight_decay"])
            p.sub_(SETTINGS["lr"] * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + 1e-8))
    return params


def test_divides_and_steps_as_the_paper_says():
    params = parameters()
    optimizer = AdamW(params, **SETTINGS)
    for t in range(1, 5):
        give(params, t, divisor=37.0)
        optimizer.apply(torch.tensor(37.0), torch.tensor(False))
    for got, want in zip(params, reference(4), strict=True):
        assert torch.allclose(got.double(), want, atol=1e-6)


def test_a_refused_step_changes_nothing_and_does_not_count():
    params = parameters()
    optimizer = AdamW(params, **SETTINGS)
    for t in range(1, 4):
        give(params, t)
        optimizer.apply(torch.tensor(1.0), torch.tensor(False))
        before = [p.detach().clone() for p in params]
        give(params, 99)
        params[0].grad[0, 0] = float("nan")
        optimizer.apply(torch.tensor(1.0), torch.tensor(True))
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    for got, want in zip(params, reference(3), strict=True):
        assert torch.allclose(got.double(), want, atol=1e-6)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_its_state_goes_on_in_torchs_own_optimizer():
    params = parameters()
    optimizer = AdamW(params, **SETTINGS)
    give(params, 1)
    optimizer.apply(torch.tensor(1.0), torch.tensor(False))
    other = torch.optim.AdamW(params, **SETTINGS)
    other.load_state_dict(optimizer.state_dict())
    give(params, 2)
    other.step()
    for got, want in zip(params, reference(2), strict=True):
        assert torch.allclose(got.double(), want, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_steps_as_the_paper_says():
    pytest.importorskip("triton")
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters()]
    optimizer = AdamW(params, **SETTINGS)
    for t in range(1, 5):
        for i, p in enumerate(params):
            p.grad = (drawn(*p.shape, seed=10 * t + i) * 37.0).cuda()
        optimizer.apply(torch.tensor(37.0).cuda(), torch.tensor(False).cuda())
        for p in params:
            p.grad = torch.full_like(p, float("nan"))
        optimizer.apply(torch.tensor(1.0).cuda(), torch.tensor(True).cuda())
    for got, want in zip(params, reference(4), strict=True):
        assert torch.allclose(got.detach().cpu().double(), want, atol=1e-6)
