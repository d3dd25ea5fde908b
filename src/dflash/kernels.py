"""Triton kernel of the frozen-head loss: one visit to a chunk of logits, which become their own gradient.

PyTorch's compiler reads such a chunk five times; at 7,680 slots of 248,320 tokens that is 12 ms of a step, this 3.
Imported only where Triton is installed and the device is a GPU; :mod:`dflash.loss` holds the plain reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _read_rows(logits, label, weight, ce, rank, vocab, SLOPE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per row: pass one keeps a running maximum and sum in every lane, pass two (mostly out of the L2
    cache) overwrites the row with ``weight * (softmax - onehot)``."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    target = tl.load(label + row)
    chosen = tl.load(logits + target).to(tl.float32)
    top = tl.full([BLOCK], -1e38, tl.float32)  # finite: -inf minus -inf is no number
    total = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, score)
        total = total * tl.exp(top - higher) + tl.exp(score - higher)
        top = higher
        above += ((score > chosen) | ((score == chosen) & (token < target))).to(tl.int32)
    peak = tl.max(top, axis=0)
    log_z = peak + tl.log(tl.sum(total * tl.exp(top - peak), axis=0))
    tl.store(ce + row, log_z - chosen)
    tl.store(rank + row, tl.sum(above, axis=0).to(tl.int64))
    if SLOPE:
        w = tl.load(weight + row)
        d = chosen - log_z
        near_one = d * (1 + d / 2 * (1 + d / 3 * (1 + d / 4)))  # exp(d) - 1 cancels where the label is all but sure
        own = tl.where(d > -0.05, near_one, tl.exp(d) - 1) * w
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            score = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            slope = tl.where(token == target, own, tl.exp(score - log_z) * w)
            tl.store(logits + token, slope.to(logits.dtype.element_ty), mask=token < vocab)


def read_logits(logits: Tensor, label: Tensor, weight: Tensor, *, slope: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`dflash.loss.read_logits`; the slope returned is ``logits`` itself, overwritten.

    Args:
        logits: [m, V], contiguous.
        label: int64 [m]. weight: fp32 [m].
        slope: False leaves the logits as they are.
    """
    rows, vocab = logits.shape
    ce = torch.empty(rows, dtype=torch.float32, device=logits.device)
    rank = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _read_rows[(rows,)](logits, label, weight, ce, rank, vocab, SLOPE=slope, BLOCK=BLOCK, num_warps=16)
    return ce, rank, logits
