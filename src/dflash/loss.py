"""Hard cross-entropy under the target's frozen head, without ever holding all logits.

512 blocks of 15 slots over 248,320 tokens are 3.8 GB of bf16 logits, three times that with an fp32 softmax and its
gradient. Here a chunk of slots at a time goes through the head; its loss, the rank of its label and the gradient at its
hidden states are taken from the same logits, which are then dropped. Since the head is frozen, that is two matrix
products per chunk (logits and input gradient) where recomputing in backward costs three.

Shape letters: M scored slots, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash import fast

CHUNK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 29}
"""Of one chunk of logits. A CPU holds several such in fp32 at the peak; a GPU's kernel works in place."""
TILE = 256
"""Rows of a matrix product that a GPU works on at a time: 270 rows cost as much as 512."""


def read_logits(logits: Tensor, label: Tensor, *, slope: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of one chunk [m, V]: cross-entropy [m], label rank [m], and ``softmax - onehot`` in the logits' dtype.

    The reference of :func:`dflash.kernels.read_logits`, and what a CPU runs. ``slope`` False: no gradient is wanted.
    """
    token, label = torch.arange(logits.shape[1], device=logits.device), label[:, None]
    scores = logits.float()
    chosen = scores.gather(1, label)
    # argmax keeps the first of equal logits, and bf16 logits are often equal: ties before the label outrank it.
    rank = ((scores > chosen) | ((scores == chosen) & (token < label))).sum(dim=1)
    log_z = scores.logsumexp(dim=1, keepdim=True)
    ce = (log_z - chosen).squeeze(1)
    if not slope:
        return ce, rank, logits
    # In place, since every pass over a chunk costs a CPU as much as a tenth of its matrix products.
    gradient = scores.sub_(log_z).exp_().to(logits.dtype)
    gradient.scatter_(1, label, torch.expm1(-ce)[:, None].to(gradient.dtype))
    return ce, rank, gradient


def _reader(device: torch.device) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return cast(Any, fast.kernels().read_logits if fast.uses(fast.KERNELS, device) else read_logits)


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, head_bias: Tensor | None, labels: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        ce = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        rank = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        read = _reader(hidden.device)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = F.linear(hidden[part].to(head_weight.dtype), head_weight, head_bias)
            ce[part], rank[part], slope = read(logits, labels[part], slope=grad is not None)
            if grad is not None:
                grad[part] = (slope @ head_weight).to(hidden.dtype)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(rank)
        return ce, rank

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors  # of each slot's own cross-entropy: a weight on it scales the row
        return grad * upstream[0][:, None].to(grad.dtype), None, None, None, None


def chunk_rows(head_weight: Tensor) -> int:
    """Slots whose logits are made at once."""
    kind = head_weight.device.type
    width = head_weight.element_size() if kind == "cuda" else 4
    rows = CHUNK_BYTES.get(kind, CHUNK_BYTES["cpu"]) // (width * head_weight.shape[0])
    return max(1, rows - rows % TILE if rows > TILE else rows)


def frozen_head_loss(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, head_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Hard cross-entropy of M slots under the frozen head, and the ranks of their labels.

    Args:
        hidden: [M, D] final-normed drafter states.
        head_weight: [V, D] the target's head, frozen; products run in its dtype, softmax in fp32.
        labels: int64 [M], the target's own choices.
        head_bias: [V] or None.

    Returns:
        fp32 [M] cross-entropy in nats, differentiable once and only towards ``hidden``; int64 [M], how many tokens the
        drafter prefers to the label (0: the label is its argmax).
    """
    with torch.autocast(hidden.device.type, enabled=False):
        ce_M, rank_M = _FrozenHead.apply(hidden, head_weight, head_bias, labels, chunk_rows(head_weight))
    return ce_M, rank_M
