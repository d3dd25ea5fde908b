"""Decoding: against the target's own generate, against the walk and the training code, and against exact
probabilities."""

import copy
import itertools
from functools import cache

import numpy as np
import pytest
import torch
from test_drafter import make as make_drafter
from test_walk import learned
from tiny import VOCAB, tiny_gemma2, tiny_llama, tiny_phi, tiny_qwen3, tiny_qwen35

from dflash.decode.drafter_cache import DrafterRows
from dflash.decode.rounds import Rounds
from dflash.decode.speculative import DecodeError, Decoder, Round, check_match
from dflash.decode.walk import walk
from dflash.metrics import streaks
from dflash.model import DFlashDraftModel
from dflash.score import score_blocks
from dflash.target.model import Target

TARGETS = [tiny_llama, tiny_qwen3, tiny_gemma2, tiny_phi, tiny_qwen35]
MIXED = ("sliding_attention", "full_attention")
PROMPTS = [np.random.default_rng(n).integers(10, 100, n).tolist() for n in (1, 7, 3, 20, 5)]


def random_drafter(target, kinds=MIXED, seed=0, **over):
    return make_drafter(
        kinds, seed, vocab_size=target.vocab_size, num_target_layers=target.num_layers,
        hidden_size=target.hidden_size, **({"mask_token_id": 5} | over),
    )  # fmt: skip


def target_of(make, **over):
    return Target(make(0, **over), None, [0, 2], "final")


def features_of(target, ids):
    """Context features [T, L*D] of one sequence, from the training code."""
    return target.capture([np.array(ids)], [np.ones(len(ids), dtype=bool)], [0]).context


class Oracle(DFlashDraftModel):
    """Drafts a known sequence, every token raised by ``off`` (0: perfect, 1: always wrong)."""

    def forward(self, **kwargs):
        out = super().forward(**kwargs)
        positions = kwargs["position_ids"][0, -out.last_hidden_state.shape[1] :].tolist()
        for slot, position in enumerate(positions):
            token = self.script[position] if position < len(self.script) else 0
            out.last_hidden_state[0, slot] = self.head[(token + self.off) % VOCAB] * 100
        return out


def oracle(target, script, off):
    drafter = random_drafter(target)
    drafter.__class__ = Oracle
    drafter.script, drafter.off, drafter.head = script, off, target.head_weight
    # A state that makes the head choose a token: its own row, given rows of one length.
    assert torch.equal((target.head_weight @ target.head_weight.T).argmax(-1), torch.arange(VOCAB))
    return drafter


def unit_head(make):
    module = make(0, tie_word_embeddings=False)
    with torch.no_grad():
        head = module.get_output_embeddings()
        head.weight.div_(head.weight.norm(dim=1, keepdim=True)).mul_(3.0)
    return Target(module, None, [0, 2], "final")


# ---- lossless ------------------------------------------------------------------------------------------------------


@cache
def long_answer(make, trained=False):
    """A target, a prompt, and transformers' own greedy answer of 201 tokens: prefill's, then 50 whole blocks of 4.

    The prompts are chosen so that the answer neither ends early nor falls into a short loop, which would hide a shift.
    """
    if trained:
        _, module, answers = learned(make, MIXED)
        target = Target(module, None, [0, 2], "final")
        prompt = answers[{tiny_llama: 0, tiny_qwen35: 2}[make]].prompt
    else:
        target, prompt = unit_head(make), np.random.default_rng(22).integers(10, 100, 6).tolist()
    answer = target.greedy([prompt], 201, 1)[0]
    assert len(answer) == 201 and len({*answer[100:]}) > 10
    return target, prompt, answer


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35])
@pytest.mark.parametrize("kind", ["trained", "random", "always wrong", "perfect"])
def test_two_hundred_tokens_equal_the_targets_own_generate(make, kind):
    target, prompt, answer = long_answer(make, kind == "trained")
    match kind:
        case "trained":
            drafter = learned(make, MIXED)[0].drafter
        case "random":
            drafter = random_drafter(target)
        case _:
            drafter = oracle(target, prompt + answer, off=kind == "always wrong")
    decoded = Decoder(target, drafter).decode([prompt], 201)
    assert decoded[0].tokens == answer
    check_rounds(prompt, decoded[0], target.eos_ids)
    accepted_length = Rounds.of_decoded(decoded, 4).pooled()
    least, most = {"trained": (1.05, 3), "random": (1, 1.05), "always wrong": (1, 1), "perfect": (4, 4)}[kind]
    assert least <= accepted_length <= most


@pytest.mark.parametrize("make", TARGETS)
def test_every_architecture_alone_and_with_a_drafter_in_batches(make):
    """Ragged rows, far past the windows of gemma (8) and of the drafter (6)."""
    target = target_of(make)
    want = target.greedy(PROMPTS[1:3], 40, 1)
    for drafter in (None, random_drafter(target)):
        got = Decoder(target, drafter).decode(PROMPTS[1:3], 40, 2)
        assert [d.tokens for d in got] == want
        for prompt, decoded in zip(PROMPTS[1:3], got, strict=True):
            check_rounds(prompt, decoded, target.eos_ids)


def check_rounds(prompt, decoded, eos):
    """Rounds put together are the answer, and say where they began."""
    known = decoded.tokens[:1]
    for r in decoded.rounds:
        assert r.position == len(prompt) + len(known) - 1
        known += r.tokens
        last = len(known) == len(decoded.tokens)
        assert r.streak == len(r.tokens) - 1 or (last and r.streak == len(r.tokens))
    assert known == decoded.tokens and not {*decoded.tokens[:-1]} & {*eos}


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35])
def test_a_learned_drafter_is_lossless_and_its_rounds_are_those_of_the_walk(make):
    t, _, answers = learned(make, MIXED)
    prompts = [a.prompt for a in answers]
    want = walk(t.drafter, t.target, answers, 1000, 100).rounds
    for batch_size in (1, 3):
        got = Decoder(t.target, t.drafter).decode(prompts, 30, batch_size)
        assert [d.tokens for d in got] == [a.answer for a in answers]
        assert [[r.streak + 1 for r in d.rounds] for d in got] == want
    assert sum(map(len, want)) < sum(len(a.answer) - 1 for a in answers)  # something was accepted


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35])
@pytest.mark.parametrize("size", [2, 3])
def test_smaller_blocks_of_a_perfect_drafter_are_accepted_whole(make, size):
    target, prompt, answer = long_answer(make)
    got = Decoder(target, oracle(target, prompt + answer, 0), block_size=size).decode([prompt], 30)[0]
    assert got.tokens == answer[:30]
    check_rounds(prompt, got, target.eos_ids)
    full, rest = divmod(29, size)
    assert [r.streak + 1 for r in got.rounds] == [size] * full + ([rest + 1] if rest else [])


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35])
def test_end_of_text_and_the_limit_cut_a_round_wherever_they_fall(make):
    target = unit_head(make)
    prompt = PROMPTS[1]
    answer = target.greedy([prompt], 30, 1)[0]
    drafter = oracle(target, prompt + answer, 0)
    decoder = Decoder(target, drafter)
    for limit in (1, 2, 3, 4, 5, 6, 9):
        got = decoder.decode([prompt], limit)[0]
        assert got.tokens == answer[:limit]
        check_rounds(prompt, got, target.eos_ids)
        assert sum(len(r.tokens) for r in got.rounds) == limit - 1 and (limit > 1) == bool(got.rounds)
    seen = set()
    for at in range(12):
        if answer[at] in answer[:at]:
            continue
        target.eos_ids = [answer[at]]
        got = decoder.decode([prompt], 30)[0]
        assert got.tokens == answer[: at + 1]
        check_rounds(prompt, got, target.eos_ids)
        if got.rounds:
            seen.add((len(got.rounds[-1].tokens), got.rounds[-1].streak))
    # End of text as first, second or third accepted token (which then counts), and as the target's own token.
    assert seen >= {(1, 1), (2, 2), (3, 3), (4, 3)}


# ---- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma2, tiny_qwen35])
def test_batches_and_halves_give_the_same_rounds(make):
    target = target_of(make)
    drafter = random_drafter(target)
    with torch.no_grad():
        drafter.norm.weight.mul_(0.1)
    # Prompts that end early make rows leave and enter at different times.
    alone = Decoder(target, drafter).decode(PROMPTS, 14)
    target.eos_ids = [alone[1].tokens[4], alone[3].tokens[11]]
    decoder = Decoder(target, drafter)
    alone = decoder.decode(PROMPTS, 14)
    assert len({len(d.tokens) for d in alone}) > 1
    finished = []
    for batch_size in (3, 16):
        together = decoder.decode(PROMPTS, 14, batch_size, lambda i, d: finished.append((i, d)))
        assert together == alone
    assert sorted(i for i, _ in finished) == sorted([*range(len(PROMPTS))] * 2)
    assert all(d == alone[i] for i, d in finished)
    assert decoder.decode(PROMPTS[:3], 14, 3) + decoder.decode(PROMPTS[3:], 14, 3) == alone


def test_a_stream_is_the_answer_round_by_round():
    t, _, answers = learned(tiny_qwen35, MIXED)
    decoder = Decoder(t.target, t.drafter)
    for answer in answers[:2]:
        first, *rounds = decoder.stream(answer.prompt, 30)
        assert first == Round(len(answer.prompt) - 1, 0, answer.answer[:1])
        assert rounds == decoder.decode([answer.prompt], 30)[0].rounds
    assert list(decoder.stream(answers[0].prompt, 1)) == [Round(len(answers[0].prompt) - 1, 0, answers[0].answer[:1])]


# ---- the drafter's side --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("full_attention",), ("sliding_attention",), MIXED])
def test_the_drafters_cache_gives_what_the_whole_context_gives(kinds):
    """Ragged pieces, rows that leave and enter, contexts of many windows (of 6)."""
    drafter = make_drafter(kinds)
    g = torch.Generator().manual_seed(0)
    context = torch.randn(4, 60, 64, generator=g)
    embeds = torch.randn(4, 4, 32, generator=g)

    def whole(row, a):
        return drafter(
            noise_embeds=embeds[row][None], context_hidden_states=context[row][None, :a],
            position_ids=torch.arange(a + 4)[None],
        ).last_hidden_state[0]  # fmt: skip

    running, at, chooser = DrafterRows(drafter), {}, np.random.default_rng(0)
    compared = 0
    with torch.no_grad():
        for turn in range(24):
            if turn in (0, 2, 5, 9):
                row, start = len(at) if turn else 0, int(chooser.integers(1, 9))
                entering = DrafterRows(drafter)
                entering.draft(embeds[row][None, :1], context[row][None, :start], [start])
                running.admit(entering)
                at[row] = start
            if turn == 14:
                running.select([0, 2, 3])
                del at[1]
            counts = {row: int(chooser.integers(0 if turn < 3 else 1, 4)) for row in at}
            if turn == 12:
                counts = dict.fromkeys(at, 2)
            fresh = torch.stack([
                torch.cat([context[row, a : a + counts[row]], torch.full((3 - counts[row], 64), 7.0)])
                for row, a in at.items()
            ])[:, : max(counts.values())]  # fmt: skip
            at = {row: a + counts[row] for row, a in at.items()}
            got = running.draft(embeds[list(at)], fresh, list(counts.values()))
            for hidden, (row, a) in zip(got, at.items(), strict=True):
                assert torch.allclose(hidden, whole(row, a), atol=1e-5), (turn, row)
                compared += a > 2 * 6
    assert compared > 20
    stored = {k.shape[2] for k, kind in zip(running._keys, kinds, strict=True) if kind == "sliding_attention"}
    assert stored <= {5}  # the slot itself is the sixth


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35])
def test_the_training_codes_streak_is_decodings_at_every_anchor_it_visited(make):
    t, _, answers = learned(make, MIXED)
    decoded = Decoder(t.target, t.drafter).decode([a.prompt for a in answers], 30)
    visited = 0
    for answer, one in zip(answers, decoded, strict=True):
        ids = np.array(answer.prompt + one.tokens)
        features = t.target.capture([ids], [np.arange(len(ids)) >= len(answer.prompt)], [0])
        anchors = torch.tensor([r.position for r in one.rounds])
        with torch.no_grad():
            scored = score_blocks(t.drafter, t.target, features, features.context, anchors, 4)
        run = streaks(scored.rank_NJ == 0, scored.blocks.on_path_NJ).tolist()
        assert run == [r.streak for r in one.rounds]
        visited += sum(r.streak > 0 for r in one.rounds)
    assert visited > 5


# ---- sampling ------------------------------------------------------------------------------------------------------

SMALL = 8


@pytest.mark.parametrize(
    ("outputs", "length", "sharp"),
    [(600, 2, True), *(pytest.param(20_000, 3, sharp, marks=pytest.mark.slow) for sharp in (False, True))],
)
def test_sampled_answers_follow_the_targets_distribution(outputs, length, sharp):
    """Chi-square over every possible answer. ``sharp``: a drafter that is sure of itself, and wrong."""
    module = tiny_gemma2(0, vocab_size=SMALL, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=7,
                         final_logit_softcapping=3.0)  # fmt: skip
    target = Target(module, None, [0], "final")
    drafter = random_drafter(target, ("full_attention",), target_layer_ids=[0])
    with torch.no_grad():
        drafter.norm.weight.mul_(30.0 if sharp else 0.3)
    prompt, temperature = [3, 4, 5], 0.8

    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for answer, weight in exact.items():
            if answer[-1:] == (7,):
                grown[answer] = weight
                continue
            with torch.no_grad():
                logits = module(torch.tensor([prompt + list(answer)])).logits[0, -1].double()
            for token, p in enumerate((logits / temperature).softmax(-1).tolist()):
                grown[(*answer, token)] = weight * p
        exact = grown
    assert abs(sum(exact.values()) - 1) < 1e-9

    got = Decoder(target, drafter, temperature=temperature, seed=1).decode([prompt] * outputs, length, 500)
    drawn = [tuple(d.tokens) for d in got]
    assert {*drawn} <= {*exact}
    counts = dict.fromkeys(exact, 0)
    for answer in drawn:
        counts[answer] += 1
    # Rare answers share a bin, as the test wants at least five expected in each.
    bins = [(counts[a], outputs * p) for a, p in exact.items() if outputs * p >= 5]
    rare = [(counts[a], outputs * p) for a, p in exact.items() if outputs * p < 5]
    bins.append((sum(c for c, _ in rare), sum(e for _, e in rare)))
    statistic = sum((c - e) ** 2 / e for c, e in bins if e > 0)
    free = len(bins) - 1
    # Wilson-Hilferty: the cube root of chi-square / free is near normal. 4 standard deviations.
    assert (statistic / free) ** (1 / 3) < 1 - 2 / (9 * free) + 4 * (2 / (9 * free)) ** 0.5
    streak = np.mean([r.streak for d in got for r in d.rounds])
    assert 0.02 < streak < length - 1.02  # some were accepted, some rejected


def test_sampling_depends_on_seed_and_prompt_only():
    target = target_of(tiny_qwen35)
    drafter = random_drafter(target)
    decoder = Decoder(target, drafter, temperature=0.7, seed=3)
    alone = decoder.decode(PROMPTS, 12)
    assert decoder.decode(PROMPTS, 12, 4) == alone
    assert Decoder(target, drafter, temperature=0.7, seed=4).decode(PROMPTS, 12, 4) != alone
    same = decoder.decode([PROMPTS[1]] * 2, 12, 2)
    assert same[0].tokens != same[1].tokens  # each prompt has its own draws
    cold = Decoder(target, drafter, temperature=1e-4).decode(PROMPTS, 12, 4)
    assert [d.tokens for d in cold] == target.greedy(PROMPTS, 12, 1)


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (dict(num_target_layers=7), "num_target_layers is 7, the target has layers 4"),
        (dict(hidden_size=64), "hidden_size is 64, the target has a hidden size of 32"),
        (dict(vocab_size=50), f"vocab_size is 50, the target has a vocabulary of {VOCAB}"),
        (dict(mask_token_id=VOCAB), f"mask_token_id is {VOCAB}, the target knows 0 to {VOCAB - 1}"),
        (dict(target_layer_ids=[2, 0]), r"target_layer_ids is \[2, 0\], the target has context layers \[0, 2\]"),
    ],
)
def test_a_drafter_of_another_target_is_refused(over, words):
    target = target_of(tiny_llama)
    config = copy.deepcopy(random_drafter(target).config)
    for key, value in over.items():
        setattr(config, key, value)
    with pytest.raises(DecodeError, match=words):
        check_match(config, target)


def test_settings_that_cannot_work_are_refused():
    target = target_of(tiny_llama)
    drafter = random_drafter(target)
    for size in (1, 5):
        with pytest.raises(DecodeError, match=f"block_size is {size}, the drafter was trained for blocks of 4"):
            Decoder(target, drafter, block_size=size)
    with pytest.raises(DecodeError, match="no drafter"):
        Decoder(target, None, block_size=4)
    with pytest.raises(DecodeError, match="temperature is -1"):
        Decoder(target, drafter, temperature=-1)
    with pytest.raises(DecodeError, match="overflow in float16"):
        Decoder(target, copy.deepcopy(drafter).half())
    decoder = Decoder(target, drafter)
    for prompts, limit, words in [
        ([[11], []], 5, "prompt 1 is empty"),
        ([[11, VOCAB]], 5, f"prompt 0 has token ids 11 to {VOCAB}"),
        ([[11]], 0, "max_new_tokens is 0"),
    ]:
        with pytest.raises(DecodeError, match=words):
            decoder.decode(prompts, limit)
        with pytest.raises(DecodeError):
            list(decoder.stream(prompts[-1], limit))
    with pytest.raises(DecodeError, match="batch_size is 0"):
        decoder.decode([[11]], 5, 0)


def test_bfloat16_drafter_and_float32_target_mix():
    target = target_of(tiny_llama)
    drafter = random_drafter(target).to(torch.bfloat16)
    got = Decoder(target, drafter).decode(PROMPTS, 20, 3)
    assert [d.tokens for d in got] == target.greedy(PROMPTS, 20, 1)
    assert all(p.dtype == torch.bfloat16 for p in drafter.parameters())
    assert len(list(itertools.chain(*(d.rounds for d in got)))) > 0
