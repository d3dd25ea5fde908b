"""Muon's step: an orthogonal update by an independent factorisation, torch's own Muon, and nothing where refused."""

import pytest
import torch

from dflash.train import muon
from dflash.train.adamw import AdamW
from dflash.train.muon import Muon, orthogonalised

SETTINGS = dict(lr=3e-2, betas=(0.9, 0.95), weight_decay=0.1)
SHAPES = [(6, 9), (9, 6), (6, 9), (5,), (6, 9), (7, 7), (3, 2), (4,)]


def drawn(*size, seed):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def parameters():
    return [torch.nn.Parameter(drawn(*shape, seed=i)) for i, shape in enumerate(SHAPES)]


def give(params, t, divisor=1.0):
    for i, p in enumerate(params):
        p.grad = drawn(*p.shape, seed=100 * t + i) * divisor


@pytest.mark.parametrize("shape", [(3, 12, 20), (2, 20, 12), (1, 9, 9)])
def test_orthogonalised_keeps_singular_vectors_and_evens_values(shape):
    given = drawn(*shape, seed=1) * 50
    got = orthogonalised(given)
    u, _, v = torch.linalg.svd(given.double(), full_matrices=False)
    values = u.mT @ got.double() @ v.mT
    along = values.diagonal(dim1=-2, dim2=-1)
    assert along.min() > 0.3 and along.max() < 1.3  # the smallest may start too near 0 to be lifted in five
    assert (values - torch.diag_embed(along)).abs().max() < 1e-3
    assert (orthogonalised(torch.zeros(1, 4, 6)) == 0).all()


def test_steps_as_torchs_own(monkeypatch):
    """Which knows matrices only and no divisor, and iterates in bf16."""
    monkeypatch.setattr(muon, "STACK", 2 * 54)  # two of the three equal matrices in one stack
    ours, theirs = parameters(), parameters()
    optimizer = Muon(ours, **SETTINGS)
    matrices = [p for p in theirs if p.ndim == 2]
    vectors = [p for p in theirs if p.ndim != 2]
    reference = [
        torch.optim.Muon(
            matrices, lr=SETTINGS["lr"], weight_decay=0.1, momentum=muon.MOMENTUM, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(vectors, **{**SETTINGS, "weight_decay": 0.0}),
    ]
    for t in range(1, 6):
        give(ours, t, divisor=37.0)
        give(theirs, t)
        optimizer.apply(torch.tensor(37.0), torch.tensor(False))
        for other in reference:
            other.step()
    for shape, got, want, start in zip(SHAPES, ours, theirs, parameters(), strict=True):
        moved = (want - start).norm()
        assert (got - want).norm() < (2e-2 if len(shape) == 2 else 1e-5) * moved and moved > 0.01


def test_a_refused_step_changes_nothing():
    params, plain = parameters(), parameters()
    optimizer, other = Muon(params, **SETTINGS), Muon(plain, **SETTINGS)
    for t in range(1, 4):
        for own, those in ((optimizer, params), (other, plain)):
            give(those, t)
            own.apply(torch.tensor(1.0), torch.tensor(False))
        before = [p.detach().clone() for p in params]
        give(params, 99)
        for p in params:
            p.grad.view(-1)[0] = float("nan")
        optimizer.apply(torch.tensor(1.0), torch.tensor(True))
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(params, plain, strict=True))  # nor is anything remembered


def test_the_learning_rate_is_the_groups_for_vectors_too():
    params, adam = parameters(), parameters()
    optimizer, reference = Muon(params, **SETTINGS), AdamW(adam, **{**SETTINGS, "weight_decay": 0.0})
    for own, those in ((optimizer, params), (reference, adam)):
        own.param_groups[0]["lr"] = 1e-4
        give(those, 1)
        own.apply(torch.tensor(1.0), torch.tensor(False))
    for p, q, start in zip(params, adam, parameters(), strict=True):
        if p.ndim == 1:
            assert torch.equal(p, q)
        else:
            assert (p - start).abs().max() < 1e-3


def test_moments_are_one_for_a_matrix_and_two_for_a_vector():
    params = parameters()
    optimizer = Muon(params, **SETTINGS)
    give(params, 1)
    optimizer.apply(torch.tensor(1.0), torch.tensor(False))
    for p in params:
        assert set(optimizer.state[p]) - {"step"} == set(optimizer.moments(p))
        assert len(optimizer.moments(p)) == (1 if p.ndim == 2 else 2)
