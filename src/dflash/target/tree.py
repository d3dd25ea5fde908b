"""Attention masks for a pass over draft trees: a node sees the cached tokens, its ancestors and itself.

Shape letters: B rows, C cached columns, Q nodes (the anchor first).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash.target.cache import CachedTarget, TargetRows
from dflash.target.load import TargetError
from dflash.target.model import untouched

FULL, SLIDING = "full_attention", "sliding_attention"


class TreeMasks:
    """Builds the masks in the form that the target's forward takes ready-made.

    Construction checks that a tree which is a chain gives the chain's logits.

    Raises:
        TargetError: the target has layers whose mask is not known here, an attention kernel that takes no mask, or the
            check fails.
    """

    def __init__(self, owner: CachedTarget) -> None:
        target = owner.target
        self.owner, self.device, self.dtype = owner, owner.device, target.dtype
        self.window: int | None = getattr(target.config, "sliding_window", None)
        types = getattr(target.config, "layer_types", None) or [SLIDING if self.window else FULL]
        self.kinds = sorted(set(types))
        kernel = getattr(target.config, "_attn_implementation", None)
        if not {*self.kinds} <= {FULL, SLIDING} or kernel not in ("sdpa", "eager"):
            raise TargetError(
                f"{owner.name} has {', '.join(self.kinds)} layers on {kernel} kernels; trees are verified with "
                f"full and sliding layers on sdpa or eager, so decode without a tree budget"
            )
        self._self_test()

    def build(self, rows: TargetRows, position_BQ: Tensor, sees_BQQ: Tensor) -> Any:
        """One additive mask [B, 1, Q, C + Q], or one per layer type where the target has several.

        Args:
            position_BQ: of the nodes. sees_BQQ: bool, who sees whom inside the tree.
        """
        valid_BC = rows.valid()
        width = valid_BC.shape[1]
        empty_B = torch.tensor([width - length for length in rows.lengths], device=self.device)
        cached_BC = torch.arange(width, device=self.device) - empty_B[:, None]
        sees = torch.cat([valid_BC[:, None].expand(-1, position_BQ.shape[1], -1), sees_BQQ], dim=2)
        distance = position_BQ[:, :, None] - torch.cat([cached_BC, position_BQ], dim=1)[:, None]
        masks = {}
        for kind in self.kinds:
            own = sees & (distance < self.window) if kind == SLIDING and self.window else sees
            # Additive: the form that eager attention needs and sdpa takes too.
            bias = torch.zeros(own.shape, dtype=self.dtype, device=self.device)
            masks[kind] = bias.masked_fill(~own, torch.finfo(self.dtype).min)[:, None]
        return masks if len(masks) > 1 else masks[self.kinds[0]]

    @untouched
    def _self_test(self) -> None:
        # Long enough to reach past a short window; a longer one is the same code.
        ids = torch.linspace(0, self.owner.target.vocab_size - 1, 16, device=self.device).long()
        chain, _ = self.owner.prefill(ids[:10].tolist())
        tree, _ = self.owner.prefill(ids[:10].tolist())
        want = chain.step(ids[None, 10:]).logits_BQV.float()
        # Every node twice, its copy as a leaf, so that seeing a sibling shows.
        twice = torch.arange(6, device=self.device).repeat_interleave(2)
        copy = torch.arange(12, device=self.device) % 2 == 1
        sees = (twice[:, None] >= twice) & ~copy
        sees |= torch.eye(12, dtype=torch.bool, device=self.device)
        sees[copy] &= (twice[copy][:, None] > twice) | torch.eye(12, dtype=torch.bool, device=self.device)[copy]
        position = 10 + twice[None]
        got = tree.step(ids[10:][twice][None], position, self.build(tree, position, sees[None])).logits_BQV.float()
        error = float((got - want[:, twice]).square().mean().sqrt() / want.square().mean().sqrt())
        if not error <= torch.finfo(self.dtype).eps ** 0.5:
            raise TargetError(
                f"{self.owner.name} gives other logits for a tree than for its chains (relative error {error:.2g}); "
                f"decode without a tree budget"
            )
