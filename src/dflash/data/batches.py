"""The batch plan: which samples train together, in which order, with how many anchors each; and which anchors.

Both ends of a run derive the same plan from (seed, epoch) alone, so nothing about it is ever sent or saved.
Shape letters: n samples, B samples of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash.data.conversations import DataError

# First word of every seed, so that no two streams coincide. All seeds are four words long: numpy pads shorter ones with
# zeros, and [a, b, c] would be [a, b, c, 0].
SHUFFLE, STRIDE, ANCHORS = 0x5348, 0x5354, 0x414E


@dataclass(frozen=True, eq=False)
class Batch:
    """Batch ``index`` of ``epoch``: sample ids int64[B] and how many anchors each gets, int64[B]."""

    epoch: int
    index: int
    samples: np.ndarray
    anchors: np.ndarray


class BatchPlan:
    """Batches of whole sequences of similar length under a token budget, with a fixed budget of anchors each.

    Args:
        lengths: tokens per sample, int64[n].
        eligible: positions per sample that may be anchors, int64[n].
        seed: of the run.
        tokens_per_batch: what the lengths of a batch sum to at most.
        anchors_per_batch: anchors shared among a batch's samples in proportion to ``eligible``, never more than a
            sample has.
        length_buckets: number of groups of similar length; batches do not mix them.

    Raises:
        DataError: a sample is longer than the budget, or there is none.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        eligible: np.ndarray,
        *,
        seed: int,
        tokens_per_batch: int,
        anchors_per_batch: int,
        length_buckets: int,
    ) -> None:
        self.lengths, self.eligible = np.asarray(lengths, dtype=np.int64), np.asarray(eligible, dtype=np.int64)
        self.seed, self.tokens_per_batch, self.anchors_per_batch = seed, tokens_per_batch, anchors_per_batch
        if not len(self.lengths):
            raise DataError("no sample to plan batches of; give data of which rows can be used")
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > tokens_per_batch:
            raise DataError(
                f"sample {longest} has {self.lengths[longest]} tokens and train.tokens_per_batch is {tokens_per_batch}"
                "; raise it or lower data.max_length"
            )
        # Upper edges of all buckets but the last: quantiles that are lengths of samples. Equal lengths share a bucket.
        ranks = -(-len(self.lengths) * np.arange(1, length_buckets) // length_buckets) - 1
        self.edges = np.unique(np.sort(self.lengths)[ranks])
        bucket_of = np.searchsorted(self.edges, self.lengths, side="left")
        members = [np.flatnonzero(bucket_of == b) for b in range(len(self.edges) + 1)]
        self.buckets = [m for m in members if len(m)]
        """Sample ids of each bucket, ascending; fixed for the run."""

    def epoch(self, epoch: int) -> list[Batch]:
        """All batches of ``epoch`` (0-based) in order: every sample once, a pure function of (seed, epoch)."""
        orders, starts, keys = [], [], []
        placed = 0
        for b, members in enumerate(self.buckets):
            order = _generator(SHUFFLE, self.seed, epoch, b).permutation(members)
            first = self._fill(self.lengths[order])
            # Proportional strides: each bucket's batches lie evenly over the epoch, at a random offset.
            offset = _generator(STRIDE, self.seed, epoch, b).random()
            keys.append((np.arange(len(first)) + offset) / len(first))
            orders.append(order)
            starts.append(first + placed)
            placed += len(order)
        samples, start = np.concatenate(orders), np.concatenate(starts)
        anchors = largest_remainder(self.eligible[samples], self.anchors_per_batch, start)
        end = np.append(start[1:], placed)
        in_turn = np.argsort(np.concatenate(keys), kind="stable")  # equal keys: the shorter bucket first
        return [
            Batch(epoch, index, samples[start[i] : end[i]], anchors[start[i] : end[i]])
            for index, i in enumerate(in_turn.tolist())
        ]

    def _fill(self, lengths: np.ndarray) -> np.ndarray:
        """Where batches begin if sequences are taken in order while they fit the token budget, int64[batches]."""
        ends = np.cumsum(lengths)
        starts, done = [0], 0
        while True:
            start = int(np.searchsorted(ends, done + self.tokens_per_batch, side="right"))
            if start == len(lengths):
                return np.array(starts, dtype=np.int64)
            starts.append(start)
            done = int(ends[start - 1])


def largest_remainder(counts: np.ndarray, slots: int, starts: np.ndarray | None = None) -> np.ndarray:
    """Share ``slots`` in proportion to ``counts``, in whole numbers, never more than a count.

    Args:
        counts: int64[n], not negative: both weight and limit.
        slots: to be shared by each group; min(slots, sum of the group's counts) are given out.
        starts: where each group begins in ``counts``, ascending from 0, no group empty; None is one group.

    Returns:
        int64[n]. Every share is its quota ``slots * count / sum`` rounded down, or up for the largest remainders (equal
        ones: the first in order).
    """
    counts = np.asarray(counts, dtype=np.int64)
    starts = np.zeros(1, dtype=np.int64) if starts is None else np.asarray(starts, dtype=np.int64)
    if not len(counts):
        return counts.copy()
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(counts))))
    total = np.maximum(np.add.reduceat(counts, starts), 1)
    given = np.minimum(slots, total)
    # Slots for everybody: the quota is the count itself. Fewer: each quota is below its count, so even rounded up it
    # stays within it, and one round gives all slots out.
    shares, remainder = np.divmod(given[group] * counts, total[group])
    left = given - np.add.reduceat(shares, starts)
    order = np.lexsort((-remainder, group))  # stable
    rank = np.arange(len(counts)) - starts[group]
    shares[order] += (rank < left[group]) & (remainder[order] > 0)
    return shares


def sample_anchors(seed: int, epoch: int, sample_id: int, loss_mask: np.ndarray, n: int) -> np.ndarray:
    """Up to ``n`` anchors of a sample, uniform without replacement, int64[min(n, eligible)] ascending.

    Eligible are positions ``a`` with ``a`` and ``a + 1`` supervised. They are the first ``n`` of a permutation that
    (seed, epoch, sample_id) alone decides, so a larger ``n`` keeps them and adds to them.
    """
    positions = np.flatnonzero(loss_mask[:-1] & loss_mask[1:])
    return np.sort(_generator(ANCHORS, seed, epoch, sample_id).permutation(positions)[:n])


def counted_slots(loss_mask: np.ndarray, anchors: np.ndarray, block_size: int) -> int:
    """How many slots of the blocks at ``anchors`` count: those whose positions, from the anchor on, are supervised."""
    unsupervised = np.append(np.flatnonzero(~loss_mask), len(loss_mask))
    end = unsupervised[np.searchsorted(unsupervised, anchors)]
    return int(np.minimum(end - 1 - anchors, block_size - 1).sum())


def _generator(stream: int, seed: int, epoch: int, item: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([stream, seed, epoch, item])))
