"""What crosses from the target to the drafter: one packed batch of context features and labels.

Shape letters: T packed tokens (padding included), B sequences, L context layers, D hidden size.
"""

from __future__ import annotations

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

    def check(self, layer_width: int) -> None:
        """Refuse features that training would silently learn from: wrong length, non-finite, all zero or constant rows.

        ``layer_width`` is D: every context layer of every sequence is looked at by itself, since one dead layer among
        five is the common fault of a hidden-state service.

        Raises:
            SickFeatures: naming the samples and the fault.
        """
        rows = self.bounds[-1]
        if len(self.sample_ids) != len(self.bounds) - 1 or rows > self.ids.shape[0] or rows != int((self.seq >= 0).sum()):
            raise SickFeatures(f"samples {self.sample_ids}: {rows} rows announced, {int((self.seq >= 0).sum())} arrived")
        context = self.context[:rows].unflatten(-1, (-1, layer_width))
        # One host read for the whole batch; per-sequence detail only once something is wrong.
        largest = context.abs().amax(dim=-1).float()
        spread = context.amax(dim=-1).float() - context.amin(dim=-1).float()
        healthy = torch.isfinite(largest) & (spread > 0)
        if bool(healthy.all()):
            return
        row, layer = (int(i) for i in (~healthy).nonzero()[0])
        sample = self.sample_ids[int(self.seq[row])]
        value = float(largest[row, layer])
        kind = "all zero" if value == 0 else "constant" if torch.isfinite(largest[row, layer]) else "not finite"
        raise SickFeatures(
            f"sample {sample}, token {int(self.pos[row])}: context layer number {layer} is {kind} "
            f"({int((~healthy).sum())} such rows in the batch); nothing was trained on it"
        )
