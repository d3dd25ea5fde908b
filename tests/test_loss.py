"""Chunked frozen-head loss against plain autograd over all logits: value, gradient, ranks; and pooled metrics against
loops."""

import pytest
import torch
import torch.nn.functional as F

import dflash.loss
from dflash.loss import frozen_head_loss
from dflash.metrics import add_sums, divide, pooled_sums, ranks_by_slot, streaks
from dflash.model.blocks import Blocks


def case(M=37, D=24, V=301, dtype=torch.float64, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(M, D, generator=g, dtype=dtype)
    head = torch.randn(V, D, generator=g, dtype=dtype)
    return hidden, head, torch.randn(V, generator=g, dtype=dtype) if bias else None, torch.randint(0, V, (M,), generator=g), torch.rand(M, generator=g)  # fmt: skip # noqa: E501


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 1000])
def test_value_gradient_and_rank_equal_the_plain_loss(bias, rows, monkeypatch):
    hidden, head, offset, labels, weight = case(dtype=torch.float32, bias=bias)
    monkeypatch.setitem(dflash.loss.CHUNK_BYTES, "cpu", rows * 4 * head.shape[0])
    plain = hidden.clone().requires_grad_()
    logits = plain @ head.T + (0 if offset is None else offset)
    ce = F.cross_entropy(logits, labels, reduction="none")
    (3.0 * (ce * weight).sum()).backward()

    chunked = hidden.clone().requires_grad_()
    got, rank = frozen_head_loss(chunked, head, labels, offset)
    (3.0 * (got * weight).sum()).backward()
    assert torch.allclose(got, ce, atol=1e-5, rtol=1e-5)
    assert torch.allclose(chunked.grad, plain.grad, atol=1e-5, rtol=1e-4)
    for m in range(len(labels)):
        row = logits[m].tolist()
        assert rank[m] == sorted(range(len(row)), key=lambda v: (-row[v], v)).index(int(labels[m]))


def test_rank_zero_is_argmax_also_among_equal_logits():
    hidden = torch.ones(4, 2)
    head = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.5, 0.5]])  # tokens 1 to 4 tie
    labels = torch.tensor([1, 2, 4, 0])
    assert frozen_head_loss(hidden, head, labels)[1].tolist() == [0, 1, 3, 4]
    assert int((hidden @ head.T)[0].argmax()) == 1


def test_bf16_head_keeps_an_fp32_softmax():
    hidden, head, _, labels, _ = case(M=64, D=128, V=4000, dtype=torch.float32, bias=False)
    half, _ = frozen_head_loss(hidden, head.bfloat16(), labels)
    logits = (hidden.bfloat16() @ head.bfloat16().T).float()
    assert torch.allclose(half, F.cross_entropy(logits, labels, reduction="none"), atol=1e-4)
    assert half.dtype == torch.float32


def test_no_slots_give_zero_and_no_nan():
    hidden = torch.zeros(0, 8, requires_grad=True)
    ce, _ = frozen_head_loss(hidden, torch.randn(20, 8), torch.zeros(0, dtype=torch.long))
    ce.sum().backward()
    assert ce.shape == (0,) and hidden.grad.shape == (0, 8)


def test_streaks_equal_a_loop():
    g = torch.Generator().manual_seed(1)
    hit = torch.rand(200, 7, generator=g) < 0.7
    path = (torch.rand(200, 7, generator=g) < 0.8).long().cumprod(1).bool()
    for n, got in enumerate(streaks(hit, path).tolist()):
        want = 0
        while want < 7 and hit[n, want] and path[n, want]:
            want += 1
        assert got == want


def blocks_of(counted, path):
    N, J = counted.shape
    zeros = torch.zeros(N, J + 1, dtype=torch.long)
    return Blocks(zeros, zeros, zeros[:, 0].int(), zeros[:, 1:], counted, path)


def random_blocks(seed, N=23, J=5):
    g = torch.Generator().manual_seed(seed)
    counted = (torch.rand(N, J, generator=g) < 0.8).long().cumprod(1).bool()
    path = counted & (torch.rand(N, J, generator=g) < 0.8).long().cumprod(1).bool()
    return blocks_of(counted, path), torch.randint(0, 12, (int(counted.sum()),), generator=g)


def test_metrics_equal_loops_and_pool_before_dividing():
    """Two micro-batches of very different size: every mean is over their slots or blocks together, never a mean of
    means."""
    sums, slots, runs = {}, [], []
    for seed, N in ((0, 3), (1, 60)):
        blocks, rank = random_blocks(seed, N)
        placed = ranks_by_slot(rank, blocks.counted_NJ)
        sums = add_sums(sums, pooled_sums(blocks, placed, torch.tensor(2.0 * N), torch.tensor(float(N)), 4 * N))
        i = 0
        for n in range(N):
            row = []
            for j in range(5):
                if blocks.counted_NJ[n, j]:
                    row.append((int(rank[i]), bool(blocks.on_path_NJ[n, j])))
                    slots.append((j, int(rank[i])))
                    i += 1
            if row:
                runs.append(row)
    got = divide(sums)

    def run(top):
        total = 0
        for row in runs:
            for rank, path in row:
                if rank >= top or not path:
                    break
                total += 1
        return total / len(runs)

    assert got["loss"] == pytest.approx(2.0)
    for key, top in (("accuracy", 1), ("top4_acc", 4), ("top8_acc", 8)):
        assert got[key] == pytest.approx(sum(r < top for _, r in slots) / len(slots))
    for key, top in (("avg_streak", 1), ("ddtree_streak4", 4), ("ddtree_streak8", 8)):
        assert got[key] == pytest.approx(run(top))
    assert got["streak_limit"] == pytest.approx(sum(p for row in runs for _, p in row) / len(runs))
    for j in range(5):
        here = [r for slot, r in slots if slot == j]
        assert got[f"acc_pos{j + 1}"] == pytest.approx(sum(r < 1 for r in here) / len(here))
    assert got["anchors"] == len(runs) and got["anchor_coverage"] == pytest.approx(len(runs) / (4 * 63))
