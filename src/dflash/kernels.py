"""Triton kernels, for where PyTorch's own pieces leave more than a tenth of the memory's speed on the table.

* :func:`read_logits`: one visit to a chunk of logits, which become their own gradient. PyTorch's compiler reads such a
  chunk five times: 12 ms of a step at 7,680 slots of 248,320 tokens, this 7. Plain reference: :mod:`dflash.loss`.
* :func:`adamw`: reads weight, gradient and both moments once and writes three of them, 28 bytes a parameter: 11.6 ms
  for the 1.73 billion of the 27B drafter on an H200. The library's fused kernel, which writes the scaled gradients
  back too, takes 16.5 ms. Plain reference: ``torch.optim.AdamW``.

Imported only where :mod:`dflash.fast` found that Triton works.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOGITS_BLOCK, ADAMW_BLOCK = 4096, 1024


@triton.jit  # type: ignore[untyped-decorator]
def _read_rows(logits, label, ce, rank, vocab, SLOPE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per row: pass one keeps a running maximum and sum in every lane, pass two (mostly out of the L2
    cache) overwrites the row with ``softmax - onehot``."""
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
        d = chosen - log_z
        near_one = d * (1 + d / 2 * (1 + d / 3 * (1 + d / 4)))  # exp(d) - 1 cancels where the label is all but sure
        own = tl.where(d > -0.05, near_one, tl.exp(d) - 1)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            score = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            slope = tl.where(token == target, own, tl.exp(score - log_z))
            tl.store(logits + token, slope.to(logits.dtype.element_ty), mask=token < vocab)


def read_logits(logits: Tensor, label: Tensor, *, slope: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`dflash.loss.read_logits`; the slope returned is ``logits`` itself, overwritten.

    Args:
        logits: [m, V], contiguous.
        label: int64 [m].
        slope: False leaves the logits as they are.
    """
    rows, vocab = logits.shape
    ce = torch.empty(rows, dtype=torch.float32, device=logits.device)
    rank = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _read_rows[(rows,)](logits, label, ce, rank, vocab, SLOPE=slope, BLOCK=LOGITS_BLOCK, num_warps=16)
    return ce, rank, logits


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(weight, grad, mean, square, scalars, count, beta1, beta2, eps, decay, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    if tl.load(scalars) > 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(grad + at, mask=inside) * tl.load(scalars + 1)
        m = beta1 * tl.load(mean + at, mask=inside) + (1 - beta1) * g
        v = beta2 * tl.load(square + at, mask=inside) + (1 - beta2) * g * g
        tl.store(mean + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
        kept = tl.load(weight + at, mask=inside) * decay
        change = tl.load(scalars + 2) * m / (tl.sqrt(v) * tl.load(scalars + 3) + eps)
        tl.store(weight + at, kept - change, mask=inside)


def adamw(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, scalars: Tensor, beta1: float, beta2: float, eps: float,
    decay: float,
) -> None:  # fmt: skip
    """One AdamW step of one parameter, in place.

    Args:
        weight, grad, mean, square: fp32, contiguous, of one shape.
        scalars: fp32 [4] on the device: 0 to leave everything as it is, 1 over the gradient's divisor,
            lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t).
        decay: 1 - lr * weight_decay.
    """
    count = weight.numel()
    _adamw[(triton.cdiv(count, ADAMW_BLOCK),)](
        weight, grad, mean, square, scalars, count, beta1, beta2, eps, decay, BLOCK=ADAMW_BLOCK
    )
