"""What crosses from the target to the drafter: one packed batch of context features and labels.

Shape letters: T packed tokens (padding included), B sequences, L context layers, D hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

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
    """int32 [T]: argmax of the target's logits at each position, i.e. its choice for the next position."""
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
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return TargetFeatures(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in moved.items()})

    def sick(self, layer_width: int) -> Tensor:
        """bool scalar on the device: some real row of some context layer is not finite, all zero or constant.

        No host wait: the trainer reads it together with the step's gradient norm. ``layer_width`` is D; every layer is
        looked at by itself, since one dead layer among five is the common fault of a hidden-state service.
        """
        return (~self._healthy(layer_width)[0]).any()

    def _healthy(self, layer_width: int) -> tuple[Tensor, Tensor]:
        context_TLD = self.context.unflatten(-1, (-1, layer_width))
        highest, lowest = context_TLD.amax(dim=-1).float(), context_TLD.amin(dim=-1).float()  # both carry NaN on
        healthy_TL = torch.isfinite(highest - lowest) & (highest > lowest)
        return healthy_TL | (self.seq < 0)[:, None], highest

    def check(self, layer_width: int) -> None:
        """Refuse features that training would silently learn from.

        Raises:
            SickFeatures: naming the sample, token, layer and the fault.
        """
        rows, arrived = self.bounds[-1], int((self.seq >= 0).sum())
        if len(self.sample_ids) != len(self.bounds) - 1 or rows != arrived:
            raise SickFeatures(f"samples {self.sample_ids}: {rows} rows announced, {arrived} arrived")
        healthy_TL, highest_TL = self._healthy(layer_width)
        if bool(healthy_TL.all()):
            return
        row, layer = (int(i) for i in (~healthy_TL).nonzero()[0])
        value = float(highest_TL[row, layer])
        kind = "all zero" if value == 0 else "constant" if math.isfinite(value) else "not finite"
        raise SickFeatures(
            f"sample {self.sample_ids[int(self.seq[row])]}, token {int(self.pos[row])}: context layer number {layer} is {kind} "
            f"({int((~healthy_TL).sum())} such rows in the batch); nothing was trained on it"
        )
