"""From sampled anchors to blocks: inputs, labels, which slots count, and their weights.

Shape letters: T packed tokens, N blocks, K block size. A block is the anchor's token followed by K - 1 mask tokens at
positions ``a .. a+K-1``; slot k predicts the token *at* ``a + k`` (no shift), so its label is the target's choice at
``a + k - 1``. Slot 0 is input only, hence the ``K - 1`` columns of everything that is scored (column j is slot j + 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.model.mask import UNUSED_BLOCK

SMOOTHING = 0.5
"""Of the drafter's own confidence in D-PACE weights: 0 trusts it, 1 gives every block the same weights."""


def slot_weights(ce_NJ: Tensor, on_path_NJ: Tensor) -> Tensor:
    """D-PACE weights of a block's slots: how much of its expected accepted length goes through each of them.

    With ``q_i = exp(-ce_i)``, the drafter's probability of slot i's label, and ``s_i = (1 - a) q_i + a``:
    ``w_j = sum over m >= j of the product of s_1 .. s_m``. A slot is worth what can still be accepted behind it,
    and the more so the surer those before it are; a fixed decay over the block says neither. Slots off the target's own
    path weigh nothing: their labels answer a prefix that the drafter cannot know of, and are learnt by heart if at all.

    Args:
        ce_NJ: fp32 [N, K-1] cross-entropy in nats; what stands off the path is not read.
        on_path_NJ: bool [N, K-1]: :attr:`Blocks.on_path_NJ`, the first slots of each block.

    Returns:
        fp32 [N, K-1], without gradient.
    """
    sure_NJ = (1.0 - SMOOTHING) * torch.exp(-ce_NJ.detach()) + SMOOTHING
    reached_NJ = torch.where(on_path_NJ, sure_NJ, 0.0).cumprod(dim=1)
    return reached_NJ.flip(1).cumsum(dim=1).flip(1)


@dataclass
class Blocks:
    """N blocks over one packed batch. Unused ones (no anchor) count nowhere and see only themselves."""

    input_ids_NK: Tensor
    """int64: anchor token, then mask tokens."""
    position_NK: Tensor
    """int64: positions in the own sequence, for RoPE."""
    seq_N: Tensor
    """int32: sequence in the batch, ``UNUSED_BLOCK`` without an anchor."""
    labels_NJ: Tensor
    """int64 [N, K-1]: the target's choice for each slot; 0 where the slot does not count."""
    counted_NJ: Tensor
    """bool [N, K-1]: positions ``a .. a+k`` are all supervised and inside the sequence."""
    on_path_NJ: Tensor
    """bool [N, K-1]: counted, and the data followed the target's choice at every earlier slot. A greedy verifier leaves
    the data at the first slot whose label differs from the data token; past it, the label answers another prefix."""

    @property
    def anchor_pos_N(self) -> Tensor:
        return self.position_NK[:, 0]

    @property
    def valid_N(self) -> Tensor:
        """bool: the block has at least one counted slot."""
        return self.counted_NJ[:, 0]


def make_blocks(
    ids_T: Tensor,
    labels_T: Tensor,
    loss_mask_T: Tensor,
    seq_T: Tensor,
    pos_T: Tensor,
    anchors_N: Tensor,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Blocks of a packed batch at the given anchors; tensors as in :class:`dflash.target.features.TargetFeatures`.

    Args:
        anchors_N: int64 rows of the packed batch, -1 for an unused block.
    """
    rows = ids_T.shape[0]
    used_N = anchors_N >= 0
    anchor_N = anchors_N.clamp(min=0)
    row_NK = anchor_N[:, None] + torch.arange(block_size, device=ids_T.device)
    inside_NK = row_NK < rows
    row_NK = row_NK.clamp(max=rows - 1)
    inside_NK = inside_NK & (seq_T[row_NK] == seq_T[anchor_N][:, None]) & used_N[:, None]

    counted_NK = (inside_NK & loss_mask_T[row_NK]).cumprod(dim=1).bool()
    counted_NJ = counted_NK[:, 1:]
    labels_NJ = labels_T[row_NK[:, :-1]].long()
    agrees_NJ = labels_NJ == ids_T[row_NK[:, 1:]]
    # Exclusive running product: slot k is on the path when slots 1 .. k-1 agreed.
    followed_NJ = torch.cat([torch.ones_like(agrees_NJ[:, :1]), agrees_NJ[:, :-1].cumprod(dim=1).bool()], dim=1)

    input_ids_NK = torch.full_like(row_NK, mask_token_id)
    input_ids_NK[:, 0] = torch.where(used_N, ids_T[anchor_N], mask_token_id)
    # Positions run on past the end of the sequence, as they would in decoding; the missing slots carry no loss.
    start_N = torch.where(used_N, pos_T[anchor_N], 0)
    return Blocks(
        input_ids_NK=input_ids_NK,
        position_NK=start_N[:, None] + torch.arange(block_size, device=ids_T.device),
        seq_N=torch.where(used_N, seq_T[anchor_N], UNUSED_BLOCK),
        labels_NJ=labels_NJ.where(counted_NJ, torch.zeros_like(labels_NJ)),
        counted_NJ=counted_NJ,
        on_path_NJ=counted_NJ & followed_NJ,
    )
