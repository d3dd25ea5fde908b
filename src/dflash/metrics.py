"""What a step reports: sums pooled over micro-batches and ranks, divided once at the end.

Definitions, all over valid blocks and counted slots only:

* ``loss``: cross-entropy in nats, a mean over slots on the target's own path with the weights of
  :func:`dflash.model.slot_weights`. They move with the drafter towards later, harder slots, so it falls less than the
  cross-entropy of any one slot does.
* ``accuracy``, ``top4_acc``, ``top8_acc``: share of counted slots whose label is the drafter's first choice, among its
  first 4, first 8. ``acc_pos{k}`` the same for slot k alone, k = 1 .. K-1.
* ``avg_streak``: mean over blocks of the leading run of first choices that are right. ``ddtree_streak4/8``: the same
  with "among the first 4/8", an upper bound for any draft tree with that many candidates per depth.
* ``streak_limit``: mean over blocks of the last slot a streak could have reached. Streaks end where the data leave the
  target's own path (:attr:`dflash.model.blocks.Blocks.on_path_NJ`) or the supervised span, and so does the loss;
  accuracies go on.

Means of per-slot accuracies multiplied together are no streak: misses within a block are correlated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash.model.blocks import Blocks

TOP = (1, 4, 8)
_UNRANKED = 1 << 30


def streaks(hit_NJ: Tensor, on_path_NJ: Tensor) -> Tensor:
    """int64 [N]: length of the leading run of hits, counting no slot off the path."""
    return (hit_NJ & on_path_NJ).long().cumprod(dim=1).sum(dim=1)


def by_slot(value_M: Tensor, counted_NJ: Tensor, fill: float) -> Tensor:
    """[N, K-1]: values of the counted slots (in row order) put back in place, ``fill`` at the others."""
    return torch.full_like(counted_NJ, fill, dtype=value_M.dtype).masked_scatter_(counted_NJ, value_M)


def ranks_by_slot(rank_M: Tensor, counted_NJ: Tensor) -> Tensor:
    """int64 [N, K-1]: :func:`by_slot`; slots not counted outrank nothing."""
    return by_slot(rank_M, counted_NJ, _UNRANKED)


def pooled_sums(
    blocks: Blocks, rank_NJ: Tensor, weighted_loss: Tensor, weight_sum: Tensor, eligible: int
) -> dict[str, Tensor]:
    """Numerators and denominators of one micro-batch in fp64, on its device."""
    counted, path = blocks.counted_NJ, blocks.on_path_NJ
    hits = {top: (rank_NJ < top) & counted for top in TOP}
    sums = {
        "loss": weighted_loss.detach(),
        "weight": weight_sum,
        "slots_at": counted.sum(dim=0),
        "hits_at": hits[1].sum(dim=0),
        "blocks": blocks.valid_N.sum(),
        "path": path.sum(),
        "eligible": torch.full((), eligible, device=counted.device),
    }
    for top, hit in hits.items():
        sums[f"hits{top}"] = hit.sum()
        sums[f"streak{top}"] = streaks(hit, path).sum()
    return {key: value.double() for key, value in sums.items()}


def add_sums(total: dict[str, Tensor], part: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum of two micro-batches' (or ranks') sums."""
    return {key: total[key] + value for key, value in part.items()} if total else part


class Told:
    """Numbers of a step on their way to the host, in one transfer that :meth:`read` waits for.

    Not for what the device was given afterwards: an event marks where they are done.
    """

    def __init__(self, sums: dict[str, Tensor]) -> None:
        self._shapes = {key: (value.numel(), value.ndim) for key, value in sums.items()}
        flat = torch.cat([value.double().flatten() for value in sums.values()])
        self._flat, self._done = flat, torch.cuda.Event() if flat.is_cuda else None
        if self._done:
            self._flat = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)
            self._done.record()

    def read(self) -> dict[str, Any]:
        """A number for each scalar, a list for each tensor with dimensions."""
        if self._done:
            self._done.synchronize()
        flat, host = self._flat.tolist(), dict[str, Any]()
        for key, (count, dimensions) in self._shapes.items():
            host[key] = flat[:count] if dimensions else flat[0]
            flat = flat[count:]
        return host


def divide(host: dict[str, Any]) -> dict[str, float]:
    """The step's metrics under their JSONL names, from sums on the host."""
    slots = max(sum(host["slots_at"]), 1.0)
    blocks = max(host["blocks"], 1.0)
    out = {
        "loss": host["loss"] / max(host["weight"], 1e-30),
        "accuracy": host["hits1"] / slots,
        "top4_acc": host["hits4"] / slots,
        "top8_acc": host["hits8"] / slots,
        "avg_streak": host["streak1"] / blocks,
        "ddtree_streak4": host["streak4"] / blocks,
        "ddtree_streak8": host["streak8"] / blocks,
        "streak_limit": host["path"] / blocks,
    }
    for slot, (hit, count) in enumerate(zip(host["hits_at"], host["slots_at"], strict=True), start=1):
        out[f"acc_pos{slot}"] = hit / max(count, 1.0)
    out["anchors"] = int(host["blocks"])
    out["anchor_coverage"] = host["blocks"] / max(host["eligible"], 1.0)
    return out
