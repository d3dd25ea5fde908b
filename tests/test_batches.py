"""The batch plan against loops and brute force: every sample once, budgets kept, shares as defined, draws uniform."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.batches import BatchPlan, largest_remainder, sample_anchors

BUDGET = 64


def shares_by_hand(counts, slots):
    """Hamilton's method with exact fractions, counts as limits, slots left over given in further rounds."""
    total = sum(counts)
    if total <= slots:
        return list(counts)
    quotas = [Fraction(slots * c, total) for c in counts]
    shares = [int(q) for q in quotas]
    order = sorted(range(len(counts)), key=lambda i: (-(quotas[i] - int(quotas[i])), i))
    while sum(shares) < slots:
        for i in order:
            if sum(shares) < slots and shares[i] < counts[i]:
                shares[i] += 1
    return shares


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(0, 200))
def test_largest_remainder(counts, slots):
    shares = largest_remainder(np.array(counts), slots)
    assert shares.tolist() == shares_by_hand(counts, slots)
    assert shares.sum() == min(slots, sum(counts)) and (shares <= counts).all() and (shares >= 0).all()
    if sum(counts) > slots:
        assert all(abs(s - Fraction(slots * c, sum(counts))) < 1 for s, c in zip(shares.tolist(), counts, strict=True))


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(0, 30))
def test_largest_remainder_of_groups_is_that_of_each(groups, slots):
    starts = np.cumsum([0, *map(len, groups)])[:-1]
    together = largest_remainder(np.array([c for g in groups for c in g]), slots, starts)
    assert together.tolist() == [s for g in groups for s in largest_remainder(np.array(g), slots).tolist()]


def test_largest_remainder_is_the_closest_sharing():
    """Among all sharings of the slots, none has a smaller sum of squared distances to the quotas (brute force)."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts, slots = rng.integers(0, 7, 4), int(rng.integers(1, 9))
        total = max(int(counts.sum()), 1)
        quotas = min(slots, total) * counts / total
        best = min(
            sum((s - q) ** 2 for s, q in zip(shares, quotas, strict=True))
            for shares in itertools.product(*(range(c + 1) for c in counts))
            if sum(shares) == min(slots, counts.sum())
        )
        assert ((largest_remainder(counts, slots) - quotas) ** 2).sum() == pytest.approx(best)


@st.composite
def plans(draw):
    n = draw(st.integers(1, 60))
    lengths = draw(st.lists(st.integers(2, BUDGET), min_size=n, max_size=n))
    eligible = [draw(st.integers(0, length - 1)) for length in lengths]
    kwargs = dict(
        seed=draw(st.integers(0, 2**40)), tokens_per_batch=BUDGET, anchors_per_batch=draw(st.integers(1, 40)),
        length_buckets=draw(st.integers(1, 8)),
    )  # fmt: skip
    return np.array(lengths), np.array(eligible), kwargs


@given(plans(), st.integers(0, 3))
@settings(max_examples=150)
def test_plan(plan, epoch):
    lengths, eligible, kwargs = plan
    batches = BatchPlan(lengths, eligible, **kwargs).epoch(epoch)
    assert sorted(np.concatenate([b.samples for b in batches]).tolist()) == list(range(len(lengths)))
    edges = np.sort(lengths)[
        [-(-len(lengths) * q // kwargs["length_buckets"]) - 1 for q in range(1, kwargs["length_buckets"])]
    ]
    for i, batch in enumerate(batches):
        assert (batch.epoch, batch.index) == (epoch, i) and batch.samples.dtype == batch.anchors.dtype == np.int64
        assert lengths[batch.samples].sum() <= BUDGET
        assert batch.anchors.tolist() == shares_by_hand(eligible[batch.samples].tolist(), kwargs["anchors_per_batch"])
        buckets = {sum(int(edge) < length for edge in set(edges.tolist())) for length in lengths[batch.samples]}
        assert len(buckets) == 1
    again = BatchPlan(lengths, eligible, **kwargs).epoch(epoch)
    assert [b.samples.tolist() for b in again] == [b.samples.tolist() for b in batches]


def big(seed=0, n=3000, **over):
    rng = np.random.default_rng(5)
    lengths = np.clip(rng.lognormal(5, 0.8, n).astype(int), 8, 1024)
    kwargs = dict(tokens_per_batch=4096, anchors_per_batch=256, length_buckets=6) | over
    return lengths, BatchPlan(lengths, lengths // 2, seed=seed, **kwargs)


def test_batches_are_nearly_full():
    lengths, plan = big()
    batches = plan.epoch(0)
    assert lengths.sum() / (len(batches) * 4096) > 0.85
    assert sum(b.anchors.sum() == 256 for b in batches) >= len(batches) - 6  # but for each bucket's last


def test_epochs_and_seeds_differ_and_buckets_stay():
    _, plan = big()
    first, second, other = plan.epoch(0), plan.epoch(1), big(seed=1)[1].epoch(0)
    orders = [np.concatenate([b.samples for b in e]).tolist() for e in (first, second, other)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    together = [{frozenset(b.samples.tolist()) for b in e} for e in (first, second)]
    assert len(together[0] & together[1]) <= 1  # mixed anew inside the bucket
    assert all((a == b).all() for a, b in zip(plan.buckets, big(seed=1)[1].buckets, strict=True))
    assert max(map(len, plan.buckets)) - min(map(len, plan.buckets)) < 3000 * 0.02


def test_every_stretch_sees_every_length_in_proportion():
    lengths, plan = big(n=20_000)
    batches = plan.epoch(0)
    bucket = np.array([np.searchsorted(plan.edges, lengths[b.samples[0]], side="left") for b in batches])
    totals = np.bincount(bucket)
    for begin in range(0, len(batches) - 40, 7):
        for width in (10, 40):
            seen = np.bincount(bucket[begin : begin + width], minlength=len(totals))
            # Points of one bucket lie exactly 1/n apart, so no stretch has more than one or two beyond its share.
            assert (np.abs(seen - width * totals / len(batches)) < 2.5).all()


def test_ties_and_order_of_equal_lengths():
    plan = BatchPlan(np.full(50, 8), np.full(50, 4), seed=0, tokens_per_batch=32, anchors_per_batch=9, length_buckets=6)
    assert len(plan.buckets) == 1 and {len(b.samples) for b in plan.epoch(0)} == {4, 2}
    assert all(b.anchors.tolist() == [3, 2, 2, 2] for b in plan.epoch(0) if len(b.samples) == 4)


def test_errors():
    with pytest.raises(ValueError, match=r"sample 1 has 65 tokens and train.tokens_per_batch is 64"):
        BatchPlan(
            np.array([3, 65]), np.array([1, 1]), seed=0, tokens_per_batch=64, anchors_per_batch=1, length_buckets=1
        )
    with pytest.raises(ValueError, match="no sample"):
        BatchPlan(np.array([]), np.array([]), seed=0, tokens_per_batch=64, anchors_per_batch=1, length_buckets=1)


masks = st.lists(st.booleans(), min_size=1, max_size=80).map(np.array)


@given(masks, st.integers(0, 90), st.integers(0, 9), st.integers(0, 9))
def test_anchors_are_eligible_distinct_sorted(mask, n, epoch, sample):
    eligible = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    anchors = sample_anchors(3, epoch, sample, mask, n)
    assert anchors.dtype == np.int64 and len(anchors) == min(n, len(eligible))
    assert anchors.tolist() == sorted(set(anchors.tolist())) and set(anchors.tolist()) <= set(eligible)


@given(masks, st.integers(0, 40), st.integers(0, 40))
def test_a_larger_budget_extends_the_same_anchors(mask, few, more):
    small, large = (sample_anchors(0, 1, 2, mask, n).tolist() for n in sorted((few, more)))
    assert set(small) <= set(large)


def test_anchor_keys():
    mask = np.ones(1000, dtype=bool)
    drawn = [
        tuple(sample_anchors(*key, mask, 20)) for key in itertools.product(range(3), range(3), range(3))
    ]  # fmt: skip
    assert len(set(drawn)) == 27
    assert tuple(sample_anchors(1, 2, 0, mask, 20)) == drawn[15] and tuple(np.unique(drawn)[[0, -1]]) < (100, 999)


@pytest.mark.slow
@pytest.mark.parametrize("vary", ["seed", "epoch", "sample"])
def test_anchors_are_uniform(vary):
    """Chi-square over 20,000 draws: all eligible positions alike, the first and the last too."""
    mask = np.array([False] * 3 + [True] * 21 + [False] + [True] * 12 + [False] * 2 + [True])
    eligible = np.flatnonzero(mask[:-1] & mask[1:])
    counts = np.zeros(len(mask))
    draws, n = 20_000, 5
    for i in range(draws):
        key = {"seed": (i, 0, 0), "epoch": (0, i, 0), "sample": (0, 0, i)}[vary]
        counts[sample_anchors(*key, mask, n)] += 1
    assert counts.sum() == counts[eligible].sum() == draws * n
    p = n / len(eligible)
    # Without replacement the counts have variance draws * p * (1 - p): this is chi-square with len - 1 degrees.
    statistic = (
        ((counts[eligible] - draws * p) ** 2).sum() / (draws * p * (1 - p)) * (len(eligible) - 1) / len(eligible)
    )
    degrees = len(eligible) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5
    assert (np.abs(counts[eligible] - draws * p) < 4.5 * (draws * p * (1 - p)) ** 0.5).all()
