"""What crosses from the target to the drafter: one packed batch of context features and labels.

Shape letters: T packed tokens (padding included), B sequences, L context layers, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


class SickFeatures(RuntimeError):
    """Features that must not be trained on; the message names the samples and what is wrong."""


@dataclass
class TargetFeatures:
    """One batch of sequences after the frozen target saw it, packed end to end.

    Sequence ``b`` occupies rows ``bounds[b] .. bounds[b+1]``; rows past ``bounds[-1]`` are padding (``seq`` -1,
    ``labels`` -1, zero context), so that a static ``T`` can be kept for the compiler.
    """

    ids: Tensor
    """int64 [T]: the tokens the target read."""
    context: Tensor
    """[T, L*D] in the target's dtype: outputs of the context layers, concatenated in the order of the config."""
    labels: Tensor
    """int32 [T]: argmax of the target's logits where supervised, i.e. its choice for the next position; else -1."""
    loss_mask: Tensor
    """bool [T]: position is supervised, i.e. its token is one the target itself would have generated."""
    seq: Tensor
    """int32 [T]: index of the sequence in the batch, -1 on padding."""
    pos: Tensor
    """int64 [T]: position in the own sequence, 0 on padding."""
    bounds: list[int]
    """B + 1 offsets into the rows, on the host."""
    sample_ids: list[int]
    """B indices into the tokenised data, for error messages and seeds."""

    def to(self, device: torch.device | str) -> TargetFeatures:
        """The same batch on another device."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def sick(self, layer_width: int) -> Tensor:
        """bool scalar on the device: some real row of some context layer is not finite, all zero or constant.

        No host wait: the trainer reads it together with the step's gradient norm. ``layer_width`` is D; every layer is
        looked at by itself, since one dead layer among five is the common fault of a hidden-state service.
        """
        return (~self._healthy(layer_width)[0]).any()

    def _healthy(self, layer_width: int) -> tuple[Tensor, Tensor, Tensor]:
        """bool [T, L], and the highest and lowest value of each row and layer."""
        context_TLD = self.context.unflatten(-1, (-1, layer_width))
        highest, lowest = context_TLD.amax(dim=-1).float(), context_TLD.amin(dim=-1).float()  # both carry NaN on
        healthy_TL = torch.isfinite(highest - lowest) & (highest > lowest)
        return healthy_TL | (self.seq < 0)[:, None], highest, lowest

    def check(self, layer_width: int) -> None:
        """Refuse features that training would silently learn from. Waits for the device once if all is well.

        Raises:
            SickFeatures: naming the sample, token, layer and the fault.
        """
        rows, announced = len(self.ids), self.bounds[-1]
        tensors = (self.context, self.labels, self.loss_mask, self.seq, self.pos)
        if len(self.sample_ids) != len(self.bounds) - 1 or announced > rows or any(len(t) != rows for t in tensors):
            raise SickFeatures(
                f"samples {self.sample_ids}: {announced} rows announced, {rows} tokens and {len(self.context)} features"
                " arrived; nothing was trained on them"
            )
        healthy_TL, highest_TL, lowest_TL = self._healthy(layer_width)
        arrived_B = (self.seq[:, None] == torch.arange(len(self.sample_ids), device=self.seq.device)).sum(dim=0)
        all_healthy, *arrived = torch.cat([healthy_TL.all().long()[None], arrived_B]).tolist()
        for sample, start, end, count in zip(self.sample_ids, self.bounds, self.bounds[1:], arrived, strict=False):
            if count != end - start:
                raise SickFeatures(
                    f"sample {sample}: {end - start} rows announced, {count} arrived; none was trained on"
                )
        if all_healthy:
            return
        row, layer = (~healthy_TL).nonzero()[0].tolist()
        highest, lowest = float(highest_TL[row, layer]), float(lowest_TL[row, layer])
        kind = "not finite" if not math.isfinite(highest - lowest) else "constant" if highest else "all zero"
        raise SickFeatures(
            f"sample {self.sample_ids[int(self.seq[row])]}, token {int(self.pos[row])}: context layer number {layer} is"
            f" {kind} ({int((~healthy_TL).sum())} such rows in the batch); nothing was trained on it"
        )


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy that the host does not wait for: one from pageable memory would wait for all the GPU has been given."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def assemble(
    rows: Sequence[Any], masks: Sequence[Any], sample_ids: Sequence[int], context: Tensor, labels: Tensor
) -> TargetFeatures:
    """A batch from the tokens that a process knows itself and the features that reached it.

    Args:
        rows, masks: B arrays of token ids and of what is supervised.
        context, labels: [T, L*D] and int32 [T] on the device, padding rows already blank; T says how much padding.
    """
    lengths = np.array([len(row) for row in rows])
    bounds, total = np.concatenate([[0], np.cumsum(lengths)]), len(context)

    def packed(parts: Sequence[Any], dtype: Any, fill: int) -> Tensor:
        whole = np.full(total, fill, dtype=dtype)
        whole[: bounds[-1]] = np.concatenate(parts)
        return on_device(whole, context.device)

    return TargetFeatures(
        ids=packed(rows, np.int64, 0),
        context=context,
        labels=labels,
        loss_mask=packed(masks, bool, 0),
        seq=packed([np.full(n, b) for b, n in enumerate(lengths)], np.int32, -1),
        pos=packed([np.arange(n) for n in lengths], np.int64, 0),
        bounds=bounds.tolist(),
        sample_ids=[int(i) for i in sample_ids],
    )
