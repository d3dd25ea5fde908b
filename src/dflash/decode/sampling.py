"""Rejection sampling of drafted tokens: the output distribution is the target's, whatever the drafter's is.

Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1, for all slots of a block at once. The slots of a block are drawn
independently of each other, so drawing all of them before the first is judged changes nothing.

Shape letters: B rows, J drafted slots, K = J + 1, S slots, V vocabulary. Probabilities are float64: in fp32 a running
sum over 248,320 of them is wrong in the fourth digit.
"""

from __future__ import annotations

import torch
from torch import Tensor


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """float64 softmax at a temperature."""
    wide = logits.double()
    # Largest first taken off: at a tiny temperature the quotients would be infinite, and their softmax no number.
    return ((wide - wide.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)


def sample(weight_BSV: Tensor, uniform_BS: Tensor) -> Tensor:
    """int64 [B, S]: by inversion, from weights that need not sum to 1; tokens of weight 0 never come."""
    cumulative = weight_BSV.cumsum(dim=-1)
    total = cumulative[..., -1]
    wanted = torch.minimum(uniform_BS * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted[..., None], right=True)[..., 0]


def judge(drafted_BJ: Tensor, q_BJV: Tensor | None, p_BKV: Tensor, uniform_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens, and draw the target's own token behind the accepted ones.

    Args:
        drafted_BJ: drawn from ``q_BJV``, the drafter's probabilities; None and [B, 0] without a drafter.
        p_BKV: the target's probabilities after the anchor and after each drafted token.
        uniform_BK: float64 in [0, 1): one for each drafted token, one for the last draw.

    Returns:
        hit_BJ: bool, which tokens pass on their own merit; the leading run is accepted.
        out_BK: int64, the accepted tokens and, right behind them, the target's own.
    """
    row_B, slots = torch.arange(len(p_BKV), device=p_BKV.device), drafted_BJ.shape[1]
    hit_BJ = torch.zeros_like(drafted_BJ, dtype=torch.bool)
    last_B, own_BV = torch.zeros_like(row_B), p_BKV[:, 0]
    if q_BJV is not None:
        p_BJ, q_BJ = (x.gather(2, drafted_BJ[..., None])[..., 0] for x in (p_BKV[:, :-1], q_BJV))
        hit_BJ = uniform_BK[:, :-1] * q_BJ < p_BJ  # with probability min(1, p / q)
        last_B = hit_BJ.long().cumprod(dim=1).sum(dim=1)
        own_BV = p_BKV[row_B, last_B]
        rejected_BV = q_BJV[row_B, last_B.clamp(max=slots - 1)] * (last_B < slots)[:, None]
        rest_BV = (own_BV - rejected_BV).clamp(min=0)
        # Nothing is left only where p equals q to the last bit and rounding rejected all the same.
        own_BV = torch.where(rest_BV.sum(dim=-1, keepdim=True) > 0, rest_BV, own_BV)
    own_B1 = sample(own_BV[:, None], uniform_BK[:, -1:])
    return hit_BJ, torch.cat([drafted_BJ, own_B1], dim=1).scatter(1, last_B[:, None], own_B1)
