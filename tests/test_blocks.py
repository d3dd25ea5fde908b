"""Rules 3, 4 and 6: block inputs, labels, which slots count; against a Python loop over tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.model.blocks import make_blocks, slot_weights
from dflash.model.mask import UNUSED_BLOCK

MASK = 99


def batch(sequences, padding=0):
    """sequences: list of (ids, labels, loss_mask) lists."""
    ids = [i for s in sequences for i in s[0]] + [0] * padding
    labels = [i for s in sequences for i in s[1]] + [-1] * padding
    mask = [bool(i) for s in sequences for i in s[2]] + [False] * padding
    seq = [b for b, s in enumerate(sequences) for _ in s[0]] + [-1] * padding
    pos = [p for s in sequences for p in range(len(s[0]))] + [0] * padding
    return (
        torch.tensor(ids), torch.tensor(labels, dtype=torch.int32), torch.tensor(mask),
        torch.tensor(seq, dtype=torch.int32), torch.tensor(pos),
    )  # fmt: skip


@st.composite
def batches(draw):
    sequences = []
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(2, 10))
        ids = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))  # few values: labels often agree with the data
        labels = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
        mask = draw(st.lists(st.integers(0, 3).map(bool), min_size=n, max_size=n))
        sequences.append((ids, labels, mask))
    total = sum(len(s[0]) for s in sequences)
    anchors = draw(st.lists(st.integers(-1, total - 1), min_size=1, max_size=6))
    return sequences, draw(st.integers(0, 3)), anchors, draw(st.integers(2, 6))


@settings(max_examples=150, deadline=None)
@given(batches())
def test_blocks_equal_the_loop(case):
    sequences, padding, anchors, K = case
    blocks = make_blocks(*batch(sequences, padding), torch.tensor(anchors), K, MASK)
    starts = [0]
    for s in sequences:
        starts.append(starts[-1] + len(s[0]))
    for n, row in enumerate(anchors):
        if row < 0:
            assert blocks.seq_N[n] == UNUSED_BLOCK and not bool(blocks.counted_NJ[n].any())
            assert blocks.input_ids_NK[n].tolist() == [MASK] * K
            continue
        b = max(i for i in range(len(sequences)) if starts[i] <= row)
        ids, labels, mask = sequences[b]
        a = row - starts[b]
        assert blocks.seq_N[n] == b
        assert blocks.input_ids_NK[n].tolist() == [ids[a]] + [MASK] * (K - 1)
        assert blocks.position_NK[n].tolist() == list(range(a, a + K))
        path = True
        for k in range(1, K):
            counts = a + k < len(ids) and all(mask[a : a + k + 1])
            assert bool(blocks.counted_NJ[n, k - 1]) == counts
            assert bool(blocks.on_path_NJ[n, k - 1]) == (counts and path)
            if counts:
                assert blocks.labels_NJ[n, k - 1] == labels[a + k - 1]  # the target's choice for position a + k
                path = path and labels[a + k - 1] == ids[a + k]


@pytest.mark.parametrize("answer", [1, 2, 7, 8, 9])  # 1, 2, K-1, K, K+1 tokens
def test_short_answers_count_exactly_their_own_slots(answer):
    K, prompt = 8, 3
    n = prompt + answer
    one = (list(range(n)), list(range(1, n + 1)), [0] * prompt + [1] * answer)
    blocks = make_blocks(*batch([one, one], padding=2), torch.tensor([prompt, prompt + n]), K, MASK)
    assert blocks.counted_NJ.sum(dim=1).tolist() == [min(K - 1, answer - 1)] * 2
    assert blocks.valid_N.tolist() == [answer > 1] * 2
    assert bool((blocks.on_path_NJ == blocks.counted_NJ).all())  # labels equal the data here


def test_a_block_never_counts_slots_of_the_next_sequence_even_if_all_is_supervised():
    rows = ([1, 2, 3], [2, 3, 4], [1, 1, 1])
    blocks = make_blocks(*batch([rows, rows]), torch.tensor([1, 2, 5]), 4, MASK)
    assert blocks.counted_NJ.tolist() == [[True, False, False], [False] * 3, [False] * 3]


def test_slot_weights_equal_their_formula():
    """Written out slot by slot; the path ends anywhere."""
    g = torch.Generator().manual_seed(0)
    ce, length = torch.rand(40, 5, generator=g) * 4, torch.randint(0, 6, (40, 1), generator=g)
    path = torch.arange(5) < length
    weights = slot_weights(ce.clone().requires_grad_(), path)
    assert weights.dtype == torch.float32 and not weights.requires_grad
    for n in range(40):
        for j in range(5):
            want = 0.0
            for m in range(j, 5):
                if path[n, m]:
                    want += math.prod(0.5 * math.exp(-float(ce[n, i])) + 0.5 for i in range(m + 1))
            assert weights[n, j].item() == pytest.approx(want, rel=1e-5, abs=1e-7)
    sure = slot_weights(torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool))
    assert sure.tolist() == [[3.0, 2.0, 1.0]]  # every slot counts for itself and those behind it
