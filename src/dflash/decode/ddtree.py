"""Draft trees: the n most probable prefixes of a drafted block (DDTree, arXiv 2604.12989).

A block gives one distribution per slot, so a prefix has the product of its tokens' probabilities. Under a budget of n
nodes the tree that is expected to be accepted deepest is the n most probable prefixes. They are found best first:
after the most probable prefix come only its next sibling (the last token replaced by the next most probable one) and
its first child (the most probable token appended), so a heap holds at most two entries more per node.

Shape letters: J = K - 1 drafted slots, V vocabulary, M candidates per slot.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

ROOT = -1


@dataclass
class Tree:
    """Nodes in the order of their probability, parents before children; the root (the anchor) is none of them."""

    rank: list[int] = field(default_factory=list)
    """The node's token as its rank in its slot's list of candidates."""
    parent: list[int] = field(default_factory=list)
    """Index of the parent node, :data:`ROOT` for the anchor."""
    depth: list[int] = field(default_factory=list)
    """1 for children of the anchor: the slot that the node fills."""
    log_prob: list[float] = field(default_factory=list)
    """Of the whole prefix, in nats."""

    def __len__(self) -> int:
        return len(self.rank)

    def children(self) -> dict[tuple[int, int], int]:
        """Node by (parent, rank)."""
        return {key: node for node, key in enumerate(zip(self.parent, self.rank, strict=True))}

    def ancestors(self) -> np.ndarray:
        """bool [1 + n, 1 + n]: row i sees column j (itself, its ancestors, the anchor); index 0 is the anchor."""
        sees = np.eye(len(self) + 1, dtype=bool)
        sees[:, 0] = True
        for node, parent in enumerate(self.parent):
            sees[node + 1] |= sees[parent + 1]
        return sees


def candidates(logits: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Log probabilities (float64) and ids (int64) of the ``min(budget, V)`` most probable tokens, [..., M] each.

    No more are needed: a node of rank r has r siblings that are more probable.
    """
    best = logits.float().log_softmax(dim=-1).topk(min(budget, logits.shape[-1]), dim=-1)
    return best.values.double(), best.indices


def best_first(log_prob_JM: np.ndarray, budget: int) -> Tree:
    """The ``budget`` most probable prefixes, or all where there are fewer.

    Args:
        log_prob_JM: float64, per slot the log probabilities of its candidates, descending (:func:`candidates`).
        budget: nodes, the root not counted.

    Ties are broken by the order of discovery, so equal input gives an equal tree, and a smaller budget its beginning.
    """
    slots: list[list[float]] = log_prob_JM.tolist()
    tree = Tree()
    # (-log probability of the prefix, order of discovery, parent, depth, rank)
    heap = [(-slots[0][0], 0, ROOT, 1, 0)]
    found = 1
    while heap and len(tree) < budget:
        cost, _, parent, depth, rank = heapq.heappop(heap)
        node = len(tree)
        tree.rank.append(rank)
        tree.parent.append(parent)
        tree.depth.append(depth)
        tree.log_prob.append(-cost)
        own = slots[depth - 1]
        if rank + 1 < len(own):
            above = 0.0 if parent == ROOT else tree.log_prob[parent]
            heapq.heappush(heap, (-(above + own[rank + 1]), found, parent, depth, rank + 1))
            found += 1
        if depth < len(slots):
            heapq.heappush(heap, (cost - slots[depth][0], found, node, depth + 1, 0))
            found += 1
    return tree


def tree_streaks(log_prob_JM: np.ndarray, label_rank_J: Sequence[int], budgets: Sequence[int]) -> list[int]:
    """How deep the target's own path lies inside the tree, for each budget: the streak of a round with that tree.

    One search to the largest budget serves all, since a smaller tree is the beginning of a larger one; no pass of the
    target is needed.

    Args:
        log_prob_JM: as for :func:`best_first`, M at least ``min(max(budgets), V)``.
        label_rank_J: rank of the target's choice in each slot's list; -1 or >= M where it is not in the list or lies
            past the end of the answer.
        budgets: numbers of nodes.
    """
    children = best_first(log_prob_JM, max(budgets)).children()
    node, path = ROOT, []
    for rank in label_rank_J:
        if (node, int(rank)) not in children:
            break
        node = children[node, int(rank)]
        path.append(node)
    return [sum(node < budget for node in path) for budget in budgets]
