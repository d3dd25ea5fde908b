"""Rule 5 (who sees whom) against a plain double loop written from the design's text, dense and flex alike."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from dflash.model.mask import UNUSED_BLOCK, attention_masks, decoding_mask, key_spans, visibility


def reference(context_seq, context_pos, block_seq, anchor_pos, block_size, window):
    """Every pair by itself, in Python."""
    tokens, blocks = len(context_seq), len(block_seq)
    seen = torch.zeros(blocks * block_size, tokens + blocks * block_size, dtype=torch.bool)
    for n in range(blocks):
        for k in range(block_size):
            q = n * block_size + k
            for t in range(tokens):
                if context_seq[t] != block_seq[n] or context_pos[t] >= anchor_pos[n]:
                    continue
                seen[q, t] = window is None or context_pos[t] > anchor_pos[n] + k - window
            for other in range(block_size):
                seen[q, tokens + n * block_size + other] = window is None or other <= k
    return seen


def packed(lengths, padding):
    seq = [b for b, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    pos = [p for length in lengths for p in range(length)] + [0] * padding
    return torch.tensor(seq, dtype=torch.int32), torch.tensor(pos)


@st.composite
def layouts(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    padding = draw(st.integers(0, 4))
    block_size = draw(st.integers(2, 5))
    window = draw(st.one_of(st.none(), st.integers(block_size, 8)))
    rows = draw(st.lists(st.integers(-1, sum(lengths) - 1), min_size=1, max_size=5))  # overlapping and repeated anchors
    seq, pos = packed(lengths, padding)
    anchors = torch.tensor(rows)
    block_seq = torch.where(anchors >= 0, seq[anchors.clamp(min=0)], UNUSED_BLOCK)
    anchor_pos = torch.where(anchors >= 0, pos[anchors.clamp(min=0)], 0)
    return seq, pos, block_seq, anchor_pos, block_size, window


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_dense_and_flex_masks_equal_the_loop(layout):
    seq, pos, block_seq, anchor_pos, block_size, window = layout
    kind = "full_attention" if window is None else "sliding_attention"
    want = reference(seq.tolist(), pos.tolist(), block_seq.tolist(), anchor_pos.tolist(), block_size, window)
    args = ([kind], window, block_size, seq, pos, block_seq, anchor_pos)
    assert torch.equal(attention_masks(*args, flex=False)[kind][0, 0], want)
    flex = attention_masks(*args, flex=True)[kind]
    zero = torch.tensor(0)
    q, k = torch.meshgrid(torch.arange(want.shape[0]), torch.arange(want.shape[1]), indexing="ij")
    assert torch.equal(flex.mask_mod(zero, zero, q, k), want)
    spans = torch.zeros_like(want)
    for query, runs in enumerate(key_spans(seq, block_seq, anchor_pos, block_size, window).tolist()):
        for begin, end in runs:
            spans[query, begin:end] = True
    assert torch.equal(spans, want)


@settings(max_examples=25, deadline=None)
@given(layouts(), st.integers(30, 120), st.integers(60, 200))
def test_tiles_are_exactly_those_of_the_librarys_builder(layout, stretch, anchors):
    """At sizes of several tiles: a tile is skipped where nothing is visible, taken whole where everything is, and
    looked at else."""
    seq, pos, _, _, block_size, window = layout
    lengths = [int((seq == b).sum()) * stretch for b in range(int(seq.max()) + 1)]
    seq, pos = packed(lengths, int((seq < 0).sum()) * stretch)
    window = window and window * stretch
    rows = torch.sort(torch.randint(0, sum(lengths), (anchors,), generator=torch.Generator().manual_seed(stretch)))[0]
    rows[-3:] = -1
    block_seq = torch.where(rows >= 0, seq[rows.clamp(min=0)], UNUSED_BLOCK)
    anchor_pos = torch.where(rows >= 0, pos[rows.clamp(min=0)], 0)
    kind = "full_attention" if window is None else "sliding_attention"
    mask = attention_masks([kind], window, block_size, seq, pos, block_seq, anchor_pos, flex=True)[kind]
    rule = visibility(seq, pos, block_seq, anchor_pos, block_size, window)
    slots = anchors * block_size
    want = create_block_mask(rule, None, None, slots, len(seq) + slots, device="cpu")
    assert mask.shape == want.shape
    for ours, theirs in ((mask.kv_num_blocks, want.kv_num_blocks), (mask.full_kv_num_blocks, want.full_kv_num_blocks)):
        assert torch.equal(ours, theirs)
    assert torch.equal(mask.to_dense(), want.to_dense())


def test_no_query_is_left_without_a_key():
    """An all-masked softmax row is NaN and would reach every weight."""
    seq, pos = packed([4, 3], 2)
    block_seq = torch.tensor([0, 1, UNUSED_BLOCK], dtype=torch.int32)
    for window in (None, 4):
        rule = visibility(seq, pos, block_seq, torch.tensor([0, 0, 0]), 4, window)
        q, k = torch.meshgrid(torch.arange(12), torch.arange(9 + 12), indexing="ij")
        assert bool(rule(None, None, q, k).any(dim=1).all())


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("context", [0, 1, 7])
def test_decoding_mask_is_the_training_rule_for_one_block_at_the_end(window, context):
    """Decoding builds its mask from index distance alone; it must be the training mask of the same anchor."""
    block_size = 4
    seq, pos = packed([context + 1], 0)
    want = reference(seq.tolist(), pos.tolist(), [0], [context], block_size, window)
    want = torch.cat([want[:, :context], want[:, context + 1 :]], dim=1)  # the anchor's own feature is not there yet
    got = decoding_mask(block_size, context + block_size, window, None, torch.device("cpu"))
    if window is None:
        assert got is None and bool(want.all())
    else:
        assert torch.equal(got[0, 0], want)


def test_decoding_mask_hides_padding():
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    mask = decoding_mask(2, 6, None, padding, torch.device("cpu"))
    assert torch.equal(mask.expand(2, 1, 2, 6)[:, 0, 0], padding.bool())
    near = decoding_mask(2, 5, 3, padding, torch.device("cpu"))
    assert near.shape == (2, 1, 2, 5)
    assert not bool(near[0, 0, :, 0].any())
