"""Our drafter as transformers' own ``assistant_model``: the same tokens, round by round the same accepted lengths."""

import pytest
import torch
import transformers
from test_walk import learned
from tiny import tiny_gemma2, tiny_llama, tiny_qwen3, tiny_qwen35

from dflash.decode.speculative import Decoder

pytestmark = pytest.mark.skipif(
    tuple(int(x) for x in transformers.__version__.split(".")[:2]) < (5, 24),
    reason="transformers decodes DFlash from 5.24 on",
)
FULL, SLIDING = "full_attention", "sliding_attention"


def theirs(module, drafter, prompt, max_new_tokens):
    """Answer of ``generate`` with the drafter, and where it drafted: the position of every anchor."""
    anchors, block = [], drafter.config.block_size
    handle = drafter.register_forward_pre_hook(
        lambda module, args, kwargs: anchors.append(int(kwargs["position_ids"][0, -block])), with_kwargs=True
    )
    try:
        out = module.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            assistant_model=drafter, speculation_type="dflash", max_new_tokens=max_new_tokens, do_sample=False,
        )  # fmt: skip
    finally:
        handle.remove()
    return out[0, len(prompt) :].tolist(), anchors


def assert_same_rounds(decoded, prompt, anchors):
    """Anchors differ by the accepted length. Where a single token is left, transformers asks for no draft."""
    ours = [r.position for r in decoded.rounds]
    assert all(b - a == r.streak + 1 for a, b, r in zip(ours, ours[1:], decoded.rounds, strict=False))
    assert ours[: len(anchors)] == anchors
    undrafted = ours[len(anchors) :]
    assert undrafted in ([], [len(prompt) + len(decoded.tokens) - 2])
    return len(anchors)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize("kinds", [(FULL,), (SLIDING, FULL)])
def test_a_trained_drafter_decodes_the_same_in_both_loops(make, kinds):
    """Sequences run to 37 tokens, past the drafter's window of 8."""
    t, module, answers = learned(make, kinds)
    compared = 0
    for answer, ours in zip(answers, Decoder(t.target, t.drafter).decode([a.prompt for a in answers], 30), strict=True):
        tokens, anchors = theirs(module, t.drafter, answer.prompt, 30)
        assert tokens == ours.tokens == answer.answer
        compared += assert_same_rounds(ours, answer.prompt, anchors)
    assert compared > 20


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma2])
@pytest.mark.parametrize("kinds", [(FULL,), (SLIDING, FULL)])
def test_prompts_beyond_every_window_and_any_limit(make, kinds):
    """The first thing that the drafter's cache is given is more than a sliding layer keeps."""
    t, module, answers = learned(make, kinds)
    longest = max(answers, key=lambda a: len(a.answer))
    prompt = longest.prompt + longest.answer[:12]
    decoder, accepted = Decoder(t.target, t.drafter), 0
    for limit in (1, 2, 3, 7, 40):
        ours = decoder.decode([prompt], limit)[0]
        tokens, anchors = theirs(module, t.drafter, prompt, limit)
        assert tokens == ours.tokens
        assert_same_rounds(ours, prompt, anchors)
        accepted += sum(r.streak for r in ours.rounds)
    assert accepted > 5  # the drafter had a say


def test_hybrid_targets_are_refused_there_and_decoded_here():
    t, module, answers = learned(tiny_qwen35, (FULL,))
    prompt = answers[0].prompt
    with pytest.raises(ValueError, match="stateful"):
        theirs(module, t.drafter, prompt, 10)
    assert Decoder(t.target, t.drafter).decode([prompt], 30)[0].tokens == answers[0].answer
