"""Draft trees: against all prefixes enumerated, and against what live decoding does."""

import itertools

import numpy as np
import pytest
import torch
from test_speculative import PROMPTS, features_of, random_drafter
from test_walk import learned
from tiny import tiny_gemma2, tiny_llama, tiny_qwen3, tiny_qwen35

from dflash.decode.ddtree import ROOT, best_first, candidates, tree_streaks
from dflash.decode.speculative import DecodeError, Decoder, _descend
from dflash.target.model import Target


def distributions(seed, slots=4, vocab=5):
    """float64 [J, M] log probabilities, each slot's descending."""
    p = np.random.default_rng(seed).dirichlet(np.full(vocab, 0.5), slots)
    return np.log(np.sort(p, axis=1)[:, ::-1])


def paths(tree):
    """Each node as the ranks on the way to it."""
    found = []
    for rank, parent in zip(tree.rank, tree.parent, strict=True):
        found.append(((*found[parent],) if parent != ROOT else ()) + (rank,))
    return found


def enumerated(log_prob):
    """All prefixes with their log probability, the most probable first."""
    slots, vocab = log_prob.shape
    every = [p for depth in range(1, slots + 1) for p in itertools.product(range(vocab), repeat=depth)]
    return sorted(((sum(log_prob[k, r] for k, r in enumerate(p)), p) for p in every), key=lambda x: -x[0])


@pytest.mark.parametrize("seed", range(5))
def test_best_first_takes_the_most_probable_prefixes(seed):
    log_prob = distributions(seed)
    want = enumerated(log_prob)
    for budget in (1, 2, 7, 50, 300):
        tree = best_first(log_prob, budget)
        assert paths(tree) == [p for _, p in want[:budget]]  # random reals: no ties
        assert np.allclose(tree.log_prob, [score for score, _ in want[:budget]])
        assert tree.depth == [len(p) for _, p in want[:budget]]
        assert all(parent < node for node, parent in enumerate(tree.parent))
    assert len(best_first(log_prob, 10_000)) == 5 + 25 + 125 + 625  # there are no more


def test_fewer_candidates_than_the_vocabulary_give_the_same_tree():
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(1)) * 2
    for budget in (1, 3, 20):
        some, ids = candidates(logits, budget)
        every, _ = candidates(logits, 60)
        assert some.shape == (4, budget) and some.dtype == torch.float64
        assert paths(best_first(some.numpy(), budget)) == paths(best_first(every.numpy(), budget))
        assert torch.equal(ids[:, 0], logits.argmax(-1))


def test_ties_are_broken_the_same_way_every_time():
    flat = np.log(np.full((3, 4), 0.25))
    largest = best_first(flat, 60)
    for budget in (1, 4, 17):
        assert paths(best_first(flat, budget)) == paths(largest)[:budget]


def test_ancestors_are_the_way_to_the_root():
    tree = best_first(distributions(3), 30)
    sees = tree.ancestors()
    for node, path in enumerate(paths(tree)):
        want = {0} | {other + 1 for other, p in enumerate(paths(tree)) if p == path[: len(p)]}
        assert set(np.flatnonzero(sees[node + 1])) == want


def test_offline_streak_is_the_descent_in_the_built_tree():
    g = np.random.default_rng(0)
    budgets = [1, 2, 5, 20, 100]
    deep = 0
    for seed in range(60):
        log_prob = distributions(seed)
        label = g.integers(-1, 6, 4).tolist() if seed % 2 else g.integers(0, 2, 4).tolist()
        got = tree_streaks(log_prob, label, budgets)
        for budget, streak in zip(budgets, got, strict=True):
            tree = best_first(log_prob, budget)
            reached = [len(p) for p in paths(tree) if list(p) == label[: len(p)]]
            assert streak == max(reached, default=0)
            # The live descent reads tokens; here a token is its rank, and the target chooses the label at each depth.
            choice = [*label, -9][0:1] + [[*label, -9][depth] for depth in tree.depth]
            assert streak == len(_descend(tree, [-7, *tree.rank], choice)) - 1
        assert got == sorted(got)  # more nodes never accept less
        assert got[0] == int(label[0] == 0)  # one node is the drafter's first choice
        deep += got[-1]
    assert deep > 60


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3, tiny_gemma2])
@pytest.mark.parametrize("budget", [1, 6, 25])
def test_live_trees_are_lossless_and_accept_what_the_offline_figure_says(make, budget):
    target = Target(make(0), None, [0, 2], "final")
    drafter = random_drafter(target)
    want = target.greedy(PROMPTS, 25, 3)
    decoder = Decoder(target, drafter, tree_budget=budget)
    one = decoder.decode(PROMPTS, 25)
    assert [d.tokens for d in one] == want
    assert decoder.decode(PROMPTS, 25, 3) == one
    accepted = 0
    for prompt, decoded in zip(PROMPTS, one, strict=True):
        context = features_of(target, prompt + decoded.tokens)
        for r in decoded.rounds:
            assert r.streak == offline_streak(target, drafter, prompt + decoded.tokens, context, r.position, budget)
            accepted += r.streak
    assert accepted > 0 or budget == 1  # gemma's answers run past its window of 8


def offline_streak(target, drafter, ids, context, a, budget):
    size = drafter.config.block_size
    block = torch.tensor([ids[a]] + [drafter.config.mask_token_id] * (size - 1))
    with torch.no_grad():
        hidden = drafter(
            noise_embeds=target.embed(block)[None], context_hidden_states=context[None, :a],
            position_ids=torch.arange(a + size)[None],
        ).last_hidden_state[0, 1:]  # fmt: skip
        logits = torch.nn.functional.linear(hidden, target.head_weight, target.head_bias)
    log_prob, tokens = candidates(logits, budget)
    label = ids[a + 1 : a + size] + [-1] * max(a + size - len(ids), 0)
    rank = [next(iter(np.flatnonzero(row == t)), -1) for row, t in zip(tokens.numpy(), label, strict=True)]
    return tree_streaks(log_prob.numpy(), rank, [budget])[0]


def test_trees_of_a_learned_drafter_accept_more_than_its_chain():
    t, _, answers = learned(tiny_llama, ("sliding_attention", "full_attention"))
    prompts = [a.prompt for a in answers]
    streaks = {}
    for budget in (None, 3, 40):
        got = Decoder(t.target, t.drafter, tree_budget=budget).decode(prompts, 30, 2)
        assert [d.tokens for d in got] == [a.answer for a in answers]
        streaks[budget] = sum(len(d.rounds) for d in got)
    assert streaks[40] < streaks[3] <= streaks[None]  # rounds needed


def test_what_trees_cannot_do_is_refused():
    dense, hybrid = (Target(make(0), None, [0, 2], "final") for make in (tiny_llama, tiny_qwen35))
    with pytest.raises(DecodeError, match="hybrid target: a flat masked tree pass is wrong"):
        Decoder(hybrid, random_drafter(hybrid), tree_budget=4)
    with pytest.raises(DecodeError, match=r"temperature 0\.5: trees are greedy"):
        Decoder(dense, random_drafter(dense), tree_budget=4, temperature=0.5)
    with pytest.raises(DecodeError, match="tree_budget is 0"):
        Decoder(dense, random_drafter(dense), tree_budget=0)
    with pytest.raises(DecodeError, match="no drafter"):
        Decoder(dense, None, tree_budget=4)
