"""The exact walk: against a loop that drafts one block at a time, and its parts."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from test_trainer import batch, rows, trainer
from tiny import tiny_llama, tiny_qwen35

from dflash.decode.walk import (
    Answer,
    WalkBatch,
    accept_points,
    load_or_generate,
    target_share,
    walk,
    walk_trees,
)
from dflash.target.model import Target


@cache
def learned(make, kinds):
    """A drafter that drafts something: fitted for a moment to the target's own greedy answers."""
    tmp_path = Path(tempfile.gettempdir())  # nothing is written: the run never saves
    module = make(0)
    borrowed = Target(module, None, [0, 2], "final")
    prompts = [np.random.default_rng(s).integers(10, 100, 5 + s % 3).tolist() for s in range(4)]
    answers = [
        Answer(f"p:{i}", p, a) for i, (p, a) in enumerate(zip(prompts, borrowed.greedy(prompts, 30, 2), strict=True))
    ]
    data = rows([(1, 1)])
    data.rows = [
        (np.array(a.prompt + a.answer), np.array([0] * len(a.prompt) + [1] * len(a.answer), bool)) for a in answers
    ]
    data.lengths = np.array([len(i) for i, _ in data.rows])
    data.eligible = np.array([len(a.answer) - 1 for a in answers])
    usable = [i for i, a in enumerate(answers) if len(a.answer) > 2]
    step = batch(0, usable, [len(answers[i].answer) - 1 for i in usable])
    t = trainer(tmp_path, data, [[step]] * 60, target=module, lr=3e-3, kinds=kinds)
    for s in range(1, 61):
        t.one_step(s)
    return t, module, answers


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35])
@pytest.mark.parametrize("kinds", [("full_attention",), ("sliding_attention", "full_attention")])
def test_walk_equals_a_walk_that_drafts_one_block_at_a_time(make, kinds):
    t, module, answers = learned(make, kinds)
    got = walk(t.drafter, t.target, answers, tokens_per_batch=60, anchors_per_batch=7)
    whole = walk(t.drafter, t.target, answers, tokens_per_batch=10_000, anchors_per_batch=10_000)
    assert got.rounds == whole.rounds  # how it is batched changes nothing
    embed, head = module.get_input_embeddings(), module.get_output_embeddings()
    for answer, rounds in zip(answers, got.rounds, strict=True):
        ids = torch.tensor(answer.prompt + answer.answer)
        with torch.no_grad():
            out = module(ids[None], output_hidden_states=True)
            context = torch.cat([out.hidden_states[1], out.hidden_states[3]], dim=-1)
            choice = out.logits[0].argmax(-1)
            position, want = len(answer.prompt), []
            while position < len(ids) - 1:
                block = torch.tensor([int(ids[position]), 5, 5, 5])
                hidden = t.drafter(
                    noise_embeds=embed(block)[None], context_hidden_states=context[:, :position],
                    position_ids=torch.arange(position + 4)[None],
                ).last_hidden_state[0]  # fmt: skip
                drafted, streak = head(hidden).argmax(-1), 0
                while streak < 3 and position + streak + 1 < len(ids):
                    if drafted[streak + 1] != choice[position + streak]:
                        break
                    streak += 1
                want.append(streak + 1)
                position += streak + 1
        assert rounds == want
    assert got.summary()["accepted_length"] > 1.02  # the comparison was about something


def test_walk_of_smaller_blocks_and_of_trees():
    """A tree of one node is a block of one slot; more nodes never accept less at a position; all against the walk."""
    t, _, answers = learned(tiny_llama, ("sliding_attention", "full_attention"))
    small, large = WalkBatch(60, 7), WalkBatch(10_000, 10_000)
    chain = walk(t.drafter, t.target, answers, 60, 7, block_size=2)
    trees = walk_trees(t.drafter, t.target, answers, [1, 8, 500], small, block_size=2)
    assert trees[1].rounds == chain.rounds and trees[1].block_size == chain.block_size == 2
    trees = walk_trees(t.drafter, t.target, answers, [1, 8, 500], small)
    assert {b: r.rounds for b, r in walk_trees(t.drafter, t.target, answers, [1, 8, 500], large).items()} == {
        b: r.rounds for b, r in trees.items()
    }
    own = walk(t.drafter, t.target, answers, 60, 7)
    assert trees[500].pooled() > own.pooled() > trees[1].pooled() > 1
    for rounds in trees.values():  # every token but the first was emitted by one round
        for one, answer in zip(rounds.rounds, answers, strict=True):
            assert len(answer.answer) - 1 <= sum(one) <= len(answer.answer)


def test_share_of_tokens_that_the_target_itself_would_choose():
    t, _, answers = learned(tiny_llama, ("full_attention",))
    assert target_share(t.target, answers, WalkBatch(60, 7)) == 1
    answer = answers[0]
    changed = [*answer.answer[:3], answer.answer[3] ^ 1, *answer.answer[4:]]
    share = target_share(t.target, [Answer("x", answer.prompt, changed)], WalkBatch(60, 7))
    assert 0 < share < 1


def test_walk_measures_what_the_model_verifies_whatever_layer_made_the_labels():
    t, module, answers = learned(tiny_llama, ("full_attention",))
    inner = Target(module, None, [0, 2], 1)
    assert walk(t.drafter, inner, answers, 1000, 100).rounds == walk(t.drafter, t.target, answers, 1000, 100).rounds


def test_accept_points_equal_a_loop():
    g = np.random.default_rng(0)
    for _ in range(50):
        streak = g.integers(0, 5, 30)
        prompt = int(g.integers(1, 28))
        want, p = [], prompt
        while p < 29:
            want.append((p, streak[p]))
            p += streak[p] + 1
        assert accept_points(streak, prompt) == want
    assert accept_points(np.zeros(6, int), 5) == []  # an answer of one token: prefill gave it, no round


def test_answers_are_generated_once_and_read_back(tmp_path):
    module = tiny_llama(0)
    target = Target(module, None, [0, 2], "final")
    prompts = [type("P", (), {"ids": np.array([11, 12, 13]), "origin": "p:1"})()]
    path = tmp_path / "answers.jsonl"
    first = load_or_generate(path, target, prompts, 6, 2)
    target.greedy = None  # a second generation would fail
    assert load_or_generate(path, target, prompts, 6, 2) == first
    assert first[0].prompt == [11, 12, 13] and 1 <= len(first[0].answer) <= 6
