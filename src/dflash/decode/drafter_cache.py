"""What the drafter has seen of running rows: keys and values of the context, never those of a block.

Since block keys are not stored, nothing is ever taken back. Full-attention layers keep the whole context, sliding ones
what a window can still reach. Rows are right-aligned: column c of C holds position ``length - C + c``.

Shape letters: B rows, C cached columns, S new context tokens (the most of any row), Q block slots, F = L*D features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from dflash.model import DFlashDraftModel
from dflash.target.cache import join_rows, right_aligned, take_columns
from dflash.target.model import SHAPE_FREE_ATTENTION

SLIDING = "sliding_attention"


class DrafterRows:
    """The drafter's cache of B sequences; ``update`` and ``get_seq_length`` are what the drafter's forward calls."""

    def __init__(self, drafter: DFlashDraftModel) -> None:
        self.drafter = drafter
        self.kinds: list[str] = list(drafter.config.layer_types)
        self.window = int(drafter.config.sliding_window or 0)
        self.lengths: list[int] = []
        """Context tokens that each row has seen."""
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots = 0  # of the pass in progress

    def get_seq_length(self) -> int:
        return max(self.lengths, default=0)

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Context kept, new context, block: [B, H, C + S + Q, d]. The first two stay."""
        if len(self._keys) > layer_idx:
            key = torch.cat([self._keys[layer_idx], key], dim=2)
            value = torch.cat([self._values[layer_idx], value], dim=2)
        else:
            self._keys.append(key)
            self._values.append(value)
        stays = key.shape[2] - self._slots
        self._keys[layer_idx], self._values[layer_idx] = key[:, :, :stays], value[:, :, :stays]
        return key, value

    def draft(self, embeds_BQD: Tensor, context_BSF: Tensor, counts: Sequence[int]) -> Tensor:
        """Take in new context and draft the blocks that start right behind it.

        Args:
            embeds_BQD: embeddings of anchor, mask, mask, ...
            context_BSF: features of the new tokens, flush left.
            counts: how many of the S each row has.

        Returns:
            final-normed hidden states [B, Q, D].
        """
        device = embeds_BQD.device
        lengths = self.lengths or [0] * len(counts)
        self._slots, new = embeds_BQD.shape[1], context_BSF.shape[1]
        length_B, count_B = torch.tensor([lengths, list(counts)], device=device)
        step_S, slot_Q = torch.arange(new, device=device), torch.arange(self._slots, device=device)
        context_pos_BS = length_B[:, None] + step_S
        slot_pos_BQ = (length_B + count_B)[:, None] + slot_Q
        fresh_BS = torch.where(step_S < count_B[:, None], context_pos_BS, -1)
        ragged = len({*lengths}) > 1 or {*counts} != {new}

        masks: dict[str, Tensor] = {}
        position: dict[str, Tensor] = {}
        for kind in sorted(set(self.kinds)):
            cached = self._keys[self.kinds.index(kind)].shape[2] if self._keys else 0
            kept_BC = (length_B - cached)[:, None] + torch.arange(cached, device=device)
            position[kind] = torch.cat([kept_BC, fresh_BS], dim=1)
            sees = (position[kind] >= 0)[:, None]
            if kind == SLIDING:
                sees = sees & (position[kind][:, None] > slot_pos_BQ[:, :, None] - self.window)
                own = (slot_Q <= slot_Q[:, None]).expand(len(counts), -1, -1)
            elif ragged:
                own = torch.ones_like(slot_pos_BQ, dtype=torch.bool)[:, None]
            else:
                continue  # everything is visible: no mask, so that the fastest kernel applies
            masks[kind] = torch.cat([sees, own], dim=2)[:, None]
        with sdpa_kernel(SHAPE_FREE_ATTENTION):
            hidden: Tensor = self.drafter(
                noise_embeds=embeds_BQD,
                context_hidden_states=context_BSF,
                position_ids=torch.cat([context_pos_BS, slot_pos_BQ], dim=1),
                attention_mask=masks,
                cache=self,
            ).last_hidden_state

        self.lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        index = {k: right_aligned(p >= 0, self._width(k)) for k, p in position.items()} if ragged else {}
        for layer, kind in enumerate(self.kinds):
            for held in (self._keys, self._values):
                if ragged:
                    held[layer] = take_columns(held[layer], index[kind])
                else:
                    held[layer] = _last(held[layer], self._width(kind))
        return hidden

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        if list(rows) == list(range(len(self.lengths))):
            return
        self.lengths = [self.lengths[row] for row in rows]
        for held in (self._keys, self._values):
            for layer, kind in enumerate(self.kinds):
                chosen = torch.tensor(list(rows), dtype=torch.long, device=held[layer].device)
                held[layer] = _last(held[layer][chosen], self._width(kind))

    def admit(self, other: DrafterRows) -> None:
        """Take in the rows of another cache, below one's own; the other one is used up."""
        if self.lengths:
            other._keys = [join_rows(a, b) for a, b in zip(self._keys, other._keys, strict=True)]
            other._values = [join_rows(a, b) for a, b in zip(self._values, other._values, strict=True)]
        self._keys, self._values, self.lengths = other._keys, other._values, self.lengths + other.lengths

    def _width(self, kind: str) -> int:
        longest = max(self.lengths, default=0)
        # The slot itself counts towards its window.
        return min(longest, self.window - 1) if kind == SLIDING else longest


def _last(x_BHCd: Tensor, width: int) -> Tensor:
    return x_BHCd.narrow(2, x_BHCd.shape[2] - width, width)
