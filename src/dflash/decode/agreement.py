"""Where two greedy answers to one prompt part, and whether rounding explains it.

Two tokens whose logits are closer than rounding can change places when the same numbers are added in another order (a
block in place of one token, a batch in place of one row). Such a tie is no fault; a clear preference overturned is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash.target.model import Target

ROUNDINGS = 4
"""Roundings of the largest logit that a margin may have and still be a tie. In bf16 one was seen at most."""
THRESHOLD = f"{ROUNDINGS} x eps of the target's dtype x the largest logit there"


@dataclass(frozen=True)
class Difference:
    """The first token in which the speculative answer is not that of the target alone."""

    prompt: int
    position: int
    """In the answer; 0 is its first token."""
    alone: int | None
    """Token of the target alone; None: its answer had ended."""
    speculative: int | None
    margin: float
    """Best logit after the common prefix minus the smaller logit of the two tokens; infinite if one is None."""
    threshold: float
    """:data:`THRESHOLD`."""

    @property
    def tie(self) -> bool:
        return self.margin <= self.threshold


@torch.no_grad()
def differences(
    target: Target, prompts: Sequence[Sequence[int]], alone: Sequence[list[int]], speculative: Sequence[list[int]]
) -> list[Difference]:
    """One :class:`Difference` for each prompt whose two answers are not the same, in the order of the prompts.

    The margin comes from a pass over prompt and common prefix, in the target's dtype, its logits read in fp32.
    """
    found = []
    for i, (prompt, a, b) in enumerate(zip(prompts, alone, speculative, strict=True)):
        if a == b:
            continue
        position = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        ids = torch.tensor([[*prompt, *a[:position]]], device=target.device)
        # Of a long prompt the logits of every position would be gigabytes.
        last = {"logits_to_keep": 1} if target.module._supports_logits_to_keep() else {}
        logits = target.module(input_ids=ids, use_cache=False, **last).logits[0, -1].float()
        threshold = ROUNDINGS * torch.finfo(target.dtype).eps * float(logits.abs().max())
        if position < min(len(a), len(b)):
            tokens = (a[position], b[position])
            margin = float(logits.max() - logits[list(tokens)].min())
            found.append(Difference(i, position, *tokens, margin, threshold))
        else:  # one answer goes on where the other stops, which no rounding explains
            ends = [tokens[position] if position < len(tokens) else None for tokens in (a, b)]
            found.append(Difference(i, position, ends[0], ends[1], math.inf, threshold))
    return found
