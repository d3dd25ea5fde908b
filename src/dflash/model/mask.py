"""Who sees whom (one rule for every backend).

A slot at offset ``k`` of a block anchored at position ``a`` of its sequence sees

* context ``t`` of its own sequence with ``t < a``, strictly: the anchor's own context feature would contain the
  target's hidden state from which the first label is read;
* slots of its own block: all of them in full-attention layers, those at ``k' <= k`` in sliding layers, which serving
  engines run causally;
* in sliding layers context only where ``t > a + k - window`` (the window counts the slot itself).

Nothing crosses sequences or blocks. One predicate, :func:`visibility`, is evaluated on broadcast indices for the dense
mask and handed to flex attention as its ``mask_mod``, so the two cannot drift apart; which tiles flex attention may
skip follows from the same rule as spans of keys (:func:`key_spans`).

Shape letters: T packed context tokens, N blocks, K block size. Queries are the N*K slots; keys are the T context tokens
followed by the N*K slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

Visibility = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TILE = 128
"""Edge of the tiles that flex attention skips or takes whole."""
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


def key_spans(
    context_seq_T: Tensor, block_seq_N: Tensor, anchor_pos_N: Tensor, block_size: int, window: int | None
) -> Tensor:
    """int64 [N*K, 2, 2]: the keys each slot sees, as two runs [begin, end): of the context, and of its own block.

    The same rule as :func:`visibility` said in another way, for packed rows as they are (sequences one after another,
    padding last); the tests hold the two against each other.
    """
    tokens, blocks = context_seq_T.shape[0], block_seq_N.shape[0]
    slot_K = torch.arange(block_size, device=block_seq_N.device)
    past_all = torch.iinfo(context_seq_T.dtype).max
    first_N = torch.searchsorted(context_seq_T.where(context_seq_T >= 0, past_all), block_seq_N)
    end_NK = (first_N + anchor_pos_N)[:, None].expand(-1, block_size)
    begin_NK = first_N[:, None].expand(-1, block_size)
    own_NK = tokens + block_size * torch.arange(blocks, device=slot_K.device)[:, None].expand(-1, block_size)
    own_end_NK = own_NK + block_size
    if window is not None:
        begin_NK = torch.maximum(begin_NK, end_NK + slot_K - window + 1)
        own_end_NK = own_NK + slot_K + 1
    begin_NK = torch.where((block_seq_N != UNUSED_BLOCK)[:, None], torch.minimum(begin_NK, end_NK), end_NK)
    context, own = torch.stack([begin_NK, end_NK], dim=-1), torch.stack([own_NK, own_end_NK], dim=-1)
    return torch.stack([context, own], dim=2).flatten(0, 1)


def flex_mask(rule: Visibility, spans_Q22: Tensor, keys: int) -> BlockMask:
    """The same rule as flex attention's block mask; built once per batch and layer type.

    From the spans, not by the library's builder: that evaluates every pair (compiling it takes minutes at 8,192 slots,
    and uncompiled it holds gigabytes), while a tile needs only to know whether a span touches or covers it.
    """
    slots = spans_Q22.shape[0]
    edge_C = TILE * torch.arange(-(-keys // TILE), device=spans_Q22.device)
    begin, end = spans_Q22[..., :1], spans_Q22[..., 1:]
    touched_QC = ((begin < edge_C + TILE) & (end > edge_C) & (begin < end)).any(dim=1)
    covered_QC = ((begin <= edge_C) & (end >= edge_C + TILE)).any(dim=1)
    # Rows past the last slot see nothing, so a tile with such rows is covered by no means.
    rows = (0, 0, 0, -slots % TILE)
    touched, covered = (
        F.pad(touched_QC, rows).unflatten(0, (-1, TILE)),
        F.pad(covered_QC, rows).unflatten(0, (-1, TILE)),
    )
    full = covered.all(dim=1)
    partial = touched.any(dim=1) & ~full

    def listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
        count = tiles.sum(dim=-1, dtype=torch.int32)
        order = tiles.int().argsort(dim=-1, descending=True, stable=True).int()
        return count[None, None], order[None, None]

    return BlockMask.from_kv_blocks(
        *listed(partial), *listed(full), BLOCK_SIZE=TILE, mask_mod=rule, seq_lengths=(slots, keys)
    )


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
        if flex:
            spans = key_spans(context_seq_T, block_seq_N, anchor_pos_N, block_size, window)
            masks[kind] = flex_mask(rule, spans, tokens + slots)
        else:
            masks[kind] = dense_mask(rule, tokens, slots, context_seq_T.device)
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
