"""One pass of the drafter over the blocks of a batch, scored against the target's choices.

The training step and the exact walk of evaluation both come through here, so a block means the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dflash import fast
from dflash.loss import frozen_head_loss
from dflash.metrics import by_slot, ranks_by_slot
from dflash.model import Blocks, DFlashDraftModel, attention_masks, make_blocks, slot_weights
from dflash.target.features import TargetFeatures, on_device


class Borrowed(Protocol):
    """What the drafter takes from the target: frozen, in the target's own dtype, on the drafter's device."""

    @property
    def embed(self) -> nn.Module: ...
    @property
    def head_weight(self) -> Tensor: ...
    @property
    def head_bias(self) -> Tensor | None: ...


def anchor_rows(rows: np.ndarray, budget: int, device: torch.device) -> Tensor:
    """int64 [N] anchors on the device: as many as given on a CPU, padded with unused blocks to the budget on a GPU.

    Compiled attention wants one shape; on a CPU nothing is compiled and padding would only be work.
    """
    fill = max(budget - len(rows), 0) if device.type == "cuda" else 0
    return on_device(np.concatenate([rows, np.full(fill, -1)]).astype(np.int64), device)


def padded_tokens(budget: int, device: torch.device) -> int | None:
    """The static number of packed tokens on a GPU; None (no padding) on a CPU, for the reason above."""
    return budget if device.type == "cuda" else None


@dataclass
class Scored:
    """A batch's blocks with their loss (unnormalised) and the rank of each label."""

    blocks: Blocks
    rank_NJ: Tensor
    weight_NJ: Tensor
    """fp32 [N, K-1]: :func:`dflash.model.slot_weights`."""
    weighted_sum: Tensor
    """fp32 scalar, ``sum(weight * ce)``; differentiable."""


def draft_blocks(
    drafter: DFlashDraftModel,
    borrowed: Borrowed,
    features: TargetFeatures,
    context_TF: Tensor,
    anchors_N: Tensor,
    block_size: int | None = None,
) -> tuple[Blocks, Tensor]:
    """The blocks at ``anchors_N`` and the drafter's final states of their drafted slots, [N, K-1, D].

    Args:
        context_TF: [T, L*D] what ``fc`` reads: ``features.context``, or a noisy copy. Labels come from ``features``
        alone. anchors_N: int64 rows of the batch, -1 for unused blocks.
        block_size: K; None: the drafter's own.
    """
    config = drafter.config
    size = block_size or config.block_size
    blocks = make_blocks(
        features.ids, features.labels, features.loss_mask, features.seq, features.pos, anchors_N,
        size, config.mask_token_id,
    )  # fmt: skip
    masks = attention_masks(
        config.layer_types, config.sliding_window, size, features.seq, features.pos, blocks.seq_N,
        blocks.anchor_pos_N, flex=fast.uses(fast.COMPILED, context_TF.device),
    )  # fmt: skip
    with torch.no_grad():
        embeds = borrowed.embed(blocks.input_ids_NK.flatten()[None])
    hidden = drafter(
        noise_embeds=embeds,
        context_hidden_states=context_TF[None],
        position_ids=torch.cat([features.pos, blocks.position_NK.flatten()])[None],
        attention_mask=masks,
    ).last_hidden_state
    return blocks, hidden[0].unflatten(0, (-1, size))[:, 1:]


def score_blocks(
    drafter: DFlashDraftModel,
    borrowed: Borrowed,
    features: TargetFeatures,
    context_TF: Tensor,
    anchors_N: Tensor,
    block_size: int | None = None,
    counted: int | None = None,
) -> Scored:
    """Draft every block and compare each counted slot with its label.

    Args:
        context_TF, anchors_N, block_size: as for :func:`draft_blocks`.
        counted: how many slots count in all, where the host knows: the device need not be waited for to find out.
    """
    blocks, slots_NJD = draft_blocks(drafter, borrowed, features, context_TF, anchors_N, block_size)
    # Only counted slots meet the head, the largest matrix of all; the others have no label.
    counted_NJ = blocks.counted_NJ
    flat = counted_NJ.flatten()
    at_M = (flat.nonzero() if counted is None else torch.nonzero_static(flat, size=counted)).squeeze(1)
    ce_M, rank_M = frozen_head_loss(
        slots_NJD.flatten(0, 1).index_select(0, at_M), borrowed.head_weight, blocks.labels_NJ.flatten()[at_M],
        borrowed.head_bias,
    )  # fmt: skip
    weight_NJ = slot_weights(by_slot(ce_M.detach(), counted_NJ, 0.0), blocks.on_path_NJ)
    weighted = (weight_NJ.flatten()[at_M] * ce_M).sum()
    return Scored(blocks, ranks_by_slot(rank_M, counted_NJ), weight_NJ, weighted)
