"""Taking tokens back: after many rounds the cache is that of a sequence which never saw the rejected ones."""

import functools

import numpy as np
import pytest
import torch
from test_speculative import PROMPTS, random_drafter, target_of
from test_walk import learned
from tiny import qwen35_config, randomise, tiny_gemma2, tiny_llama, tiny_qwen3, tiny_qwen35
from transformers.cache_utils import DynamicLayer
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from dflash.decode.speculative import Decoder
from dflash.target import cache as cache_module
from dflash.target.cache import CachedTarget, TargetRows, right_aligned, take_columns
from dflash.target.load import TargetError
from dflash.target.model import Target
from dflash.target.tree import TreeMasks


def assert_rows_equal_a_prefill(rows, sequences):
    """Keys, values and states of every row against a fresh pass over its tokens, fp32."""
    assert rows.lengths == [len(ids) for ids in sequences]
    for b, ids in enumerate(sequences):
        fresh, _ = rows.owner.prefill(ids)
        for mine, theirs in zip(rows.cache.layers, fresh.cache.layers, strict=True):
            if isinstance(mine, DynamicLayer):
                for name in ("keys", "values"):
                    got = getattr(mine, name)[b, :, getattr(mine, name).shape[2] - len(ids) :]
                    assert torch.allclose(got, getattr(theirs, name)[0], atol=1e-4)
        for i in rows.owner.mixers:
            for mine, theirs in zip(rows._states(i), fresh._states(i), strict=True):
                assert torch.allclose(mine[b], theirs[0], atol=1e-4)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3, tiny_gemma2, tiny_qwen35])
def test_kept_columns_of_ragged_rows_equal_a_fresh_prefill(make):
    """Random keeps, rows that leave and enter; contexts run past gemma's window of 8."""
    owner = CachedTarget(target_of(make))
    g = np.random.default_rng(0)
    sequences = [g.integers(10, 100, n).tolist() for n in (3, 9, 1)]
    rows, _ = owner.prefill(sequences[0])
    for ids in sequences[1:]:
        rows.admit(owner.prefill(ids)[0])
    for turn in range(12):
        block = g.integers(10, 100, (len(sequences), 4))
        done = rows.step(torch.from_numpy(block))
        for b, ids in enumerate(sequences):
            with torch.no_grad():
                want = owner.target.module(torch.tensor([ids + block[b].tolist()])).logits[0, -4:]
            assert torch.allclose(done.logits_BQV[b], want, atol=1e-4)
        counts = g.integers(1, 5, len(sequences)).tolist()
        going = [0, 2] if turn == 5 else list(range(len(sequences)))
        rows.commit(going, [range(counts[b]) for b in going])
        sequences = [sequences[b] + block[b, : counts[b]].tolist() for b in going]
        if turn == 8:
            sequences.append([20, 21])
            rows.admit(owner.prefill([20, 21])[0])
    assert_rows_equal_a_prefill(rows, sequences)
    assert all(layer.keys.shape[2] == max(rows.lengths) for layer in rows._attention())  # no column that no row needs


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35])
def test_after_many_rounds_of_decoding_no_rejected_token_has_left_a_trace(make, monkeypatch):
    t, _, answers = learned(make, ("full_attention",))
    decoder, commits = Decoder(t.target, t.drafter), []

    def commit(self, rows, kept, original=TargetRows.commit):
        original(self, rows, kept)
        commits.append((self, [len(columns) for columns in kept]))

    with monkeypatch.context() as patch:
        patch.setattr(TargetRows, "commit", commit)
        known = list(answers[0].prompt)
        for r in decoder.stream(answers[0].prompt, 30):
            known += r.tokens
            if len(commits) == 12:
                break
    assert_rows_equal_a_prefill(commits[-1][0], [known[:-1]])  # the next anchor has not been run yet
    assert {count for _, (count,) in commits[1:]} >= {1, 2}  # of blocks of 4


def test_features_are_those_of_the_training_code():
    target = target_of(tiny_qwen35)
    rows, first = CachedTarget(target).prefill(PROMPTS[1])
    ids = [*PROMPTS[1], 40, 41, 42]
    done = rows.step(torch.tensor([[40, 41, 42]]))
    want = target.capture([np.array(ids)], [np.ones(len(ids), dtype=bool)], [0]).context
    assert torch.allclose(torch.cat([first.context_BQF, done.context_BQF], dim=1)[0], want, atol=1e-5)


def test_right_aligned_takes_kept_columns_in_order():
    keep = torch.rand(5, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    x = torch.randn(5, 2, 20, 3)
    width = int(keep.sum(1).max())
    got = take_columns(x, right_aligned(keep, width))
    for b in range(5):
        count = int(keep[b].sum())
        assert torch.equal(got[b, :, width - count :], x[b][:, keep[b]])


def test_a_multimodal_wrapper_is_decoded_like_its_language_model():
    vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32, patch_size=4)
    wrapper = randomise(
        Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(text_config=qwen35_config().to_dict(), vision_config=vision, tie_word_embeddings=False)
        ),
        0,
    )
    target = Target(wrapper, None, [0, 2], "final")
    got = Decoder(target, random_drafter(target)).decode(PROMPTS[:4], 20, 3)
    assert [d.tokens for d in got] == target.greedy(PROMPTS[:4], 20, 1)


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_states_that_are_not_rolled_back_are_noticed(monkeypatch):
    target = target_of(tiny_qwen35)

    def no_replay(self, rows, counts):
        for i in self.owner.mixers:
            self._set_states(i, [state[list(rows)] for state in self._states(i)])

    monkeypatch.setattr(TargetRows, "_roll_back_states", no_replay)
    with pytest.raises(
        TargetError, match=r"Qwen3_5ForCausalLM gives other logits in pieces.*use transformers >= 5\.24"
    ):
        CachedTarget(target)


def test_a_mixer_that_forgets_its_state_when_several_tokens_come_is_noticed(monkeypatch):
    """As in older transformers."""
    target = target_of(tiny_qwen35)
    mixer = type(target.layers[0].linear_attn)
    original = mixer.forward

    @functools.wraps(original)
    def forgets(self, hidden_states, **kwargs):
        cache = next((kwargs[name] for name in cache_module.CACHE_NAMES if name in kwargs), None)  # by version
        state = None if cache is None else cache.layers[self.layer_idx].recurrent_states[0]
        if state is not None and hidden_states.shape[1] > 1:
            state.zero_()
        return original(self, hidden_states, **kwargs)

    monkeypatch.setattr(mixer, "forward", forgets)
    with pytest.raises(TargetError, match="in pieces"):
        CachedTarget(target)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma2])
def test_columns_that_are_not_dropped_are_noticed(make, monkeypatch):
    target = target_of(make)
    monkeypatch.setattr(cache_module, "right_aligned", lambda keep, width: torch.arange(width).expand(len(keep), -1))
    with pytest.raises(TargetError, match="in pieces"):
        CachedTarget(target)


def test_a_cache_of_an_unknown_kind_is_refused(monkeypatch):
    class Odd(DynamicLayer):
        pass

    monkeypatch.setattr(cache_module, "DynamicLayer", Odd)
    monkeypatch.setattr(cache_module, "DynamicSlidingWindowLayer", Odd)
    with pytest.raises(TargetError, match="LlamaForCausalLM: layer 0 caches in a DynamicLayer"):
        CachedTarget(target_of(tiny_llama))


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma2])
def test_tree_masks_that_show_too_much_are_noticed(make, monkeypatch):
    owner = CachedTarget(target_of(make))
    TreeMasks(owner)
    original = TreeMasks.build

    def siblings(self, rows, position, sees):
        return original(self, rows, position, position[:, :, None] >= position[:, None])

    monkeypatch.setattr(TreeMasks, "build", siblings)
    with pytest.raises(TargetError, match="other logits for a tree than for its chains"):
        TreeMasks(owner)


def test_trees_on_attention_kernels_without_masks_are_refused():
    target = target_of(tiny_llama)
    owner = CachedTarget(target)
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(TargetError, match="full_attention layers on flash_attention_2 kernels"):
        TreeMasks(owner)
