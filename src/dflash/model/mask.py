"""Who sees whom (one rule for every backend).

A slot at offset ``k`` of a block anchored at position ``a`` of its sequence sees

* context ``t`` of its own sequence with ``t < a``, strictly: the anchor's own context feature would contain the
  target's hidden state from which the first label is read;
* slots of its own block: all of them in full-attention layers, those at ``k' <= k`` in sliding layers, which serving
  engines run causally;
* in sliding layers context only where ``t > a + k - window`` (the window counts the slot itself).

Nothing crosses sequences or blocks. One predicate, :func:`visibility`, is evaluated on broadcast indices for the dense
mask and handed to flex attention as its ``mask_mod``, so the two cannot drift apart.

Shape letters: T packed context tokens, N blocks, K block size. Queries are the N*K slots; keys are the T context tokens
followed by the N*K slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

Visibility = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
UNUSED_BLOCK = -2  # sequence id of a block slot without an anchor: equal to no context row, padding (-1) included


def visibility(
    context_seq_T: Tensor,
    context_pos_T: Tensor,
    block_seq_N: Tensor,
    anchor_pos_N: Tensor,
    block_size: int,
    window: int | None,
) -> Visibility:
    """Predicate ``(batch, head, query, key) -> may see``, on broadcastable index tensors (flex attention's
    ``mask_mod``).

    Args:
        context_seq_T: sequence of each context token, -1 on padding.
        context_pos_T: position of each context token in its sequence.
        block_seq_N: sequence of each block, ``UNUSED_BLOCK`` where the slot holds no anchor (such a block sees itself).
        anchor_pos_N: position of each anchor in its sequence.
        window: sliding window in tokens, or None for a full-attention layer.
    """
    tokens = context_seq_T.shape[0]

    def may_see(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_size, query % block_size
        is_context = key < tokens
        # Indices of the other half are clamped, not branched on: both halves are computed and one is chosen.
        token = key.clamp(max=tokens - 1)
        sees_context = (context_seq_T[token] == block_seq_N[block]) & (context_pos_T[token] < anchor_pos_N[block])
        key_slot = (key - tokens).clamp(min=0)
        sees_slot = key_slot // block_size == block
        if window is not None:
            sees_context = sees_context & (context_pos_T[token] > anchor_pos_N[block] + slot - window)
            sees_slot = sees_slot & (key_slot % block_size <= slot)
        return torch.where(is_context, sees_context, sees_slot)

    return may_see


def dense_mask(rule: Visibility, tokens: int, slots: int, device: torch.device | str) -> Tensor:
    """bool [1, 1, slots, tokens + slots], True where a query may look: for scaled_dot_product_attention."""
    query = torch.arange(slots, device=device)[:, None]
    key = torch.arange(tokens + slots, device=device)[None, :]
    zero = torch.zeros((), dtype=torch.long, device=device)
    return rule(zero, zero, query, key)[None, None]


def flex_mask(rule: Visibility, tokens: int, slots: int, device: torch.device | str) -> BlockMask:
    """The same rule as flex attention's block mask; built once per batch and layer type.

    Compiled: the plain builder holds several dense ``slots x keys`` integer tensors at once, gigabytes at 512 anchors.
    """
    mask: BlockMask = _builder(torch.device(device).type == "cuda")(
        rule, None, None, slots, tokens + slots, device=device
    )
    return mask


def attention_masks(
    layer_types: list[str],
    sliding_window: int | None,
    block_size: int,
    context_seq_T: Tensor,
    context_pos_T: Tensor,
    block_seq_N: Tensor,
    anchor_pos_N: Tensor,
    *,
    flex: bool,
) -> dict[str, Tensor | BlockMask]:
    """One mask per layer type in use, in the form the backend wants (``flex``: block mask, else dense)."""
    tokens, slots = context_seq_T.shape[0], block_seq_N.shape[0] * block_size
    masks: dict[str, Tensor | BlockMask] = {}
    for kind in sorted(set(layer_types)):
        window = sliding_window if kind == "sliding_attention" else None
        rule = visibility(context_seq_T, context_pos_T, block_seq_N, anchor_pos_N, block_size, window)
        build = flex_mask if flex else dense_mask
        masks[kind] = build(rule, tokens, slots, context_seq_T.device)
    return masks


def decoding_mask(
    slots: int, keys: int, window: int | None, padding: Tensor | None, device: torch.device
) -> Tensor | None:
    """Mask of one block per sequence at the end of ``keys`` contiguous positions, as decoding has it.

    ``padding`` is the usual 0/1 mask [B, >= keys] whose last ``keys`` columns belong to the keys, or None. Returns None
    where everything is visible, so that the fastest attention kernel applies.
    """
    valid = None if padding is None else padding[:, None, None, -keys:].bool()
    if window is None:
        return valid
    query = torch.arange(keys - slots, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    near = ((key <= query) & (key > query - window))[None, None]
    return near if valid is None else near & valid


@cache
def _builder(on_gpu: bool) -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask) if on_gpu else create_block_mask
