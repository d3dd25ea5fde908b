"""Features, labels and greedy answers against the library's own output on single, unpadded documents."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import EOS, PAD, tiny_gemma2, tiny_llama, tiny_phi, tiny_qwen3, tiny_qwen35
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

from dflash.target.model import Target, TargetError

MAKERS = [tiny_llama, tiny_qwen3, tiny_qwen35, tiny_gemma2, tiny_phi]


def documents(lengths, seed=0):
    g = np.random.default_rng(seed)
    return [g.integers(0, 190, n) for n in lengths], [g.random(n) < 0.5 for n in lengths]


def reference(module, row):
    """The library's forward pass over one document by itself."""
    with torch.no_grad():
        return module(torch.tensor(row)[None], output_hidden_states=True)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("lengths", [(9,), (5, 13, 1, 80), (7, 7, 70)])
def test_features_and_labels_are_those_of_each_document_by_itself(make, lengths):
    module = make(1)
    target = Target(module, None, [2, 0], "final")  # in the order asked for, not sorted
    rows, masks = documents(lengths)
    total = sum(lengths)
    got = target.capture(rows, masks, [40 + i for i in range(len(rows))], pad_to=total + 6)
    assert got.context.shape == (total + 6, 2 * target.hidden_size) and got.labels.dtype == torch.int32
    assert got.bounds == np.cumsum([0, *lengths]).tolist() and got.sample_ids == [40 + i for i in range(len(rows))]
    for b, row in enumerate(rows):
        part = slice(got.bounds[b], got.bounds[b + 1])
        want = reference(module, row)
        context = torch.cat([want.hidden_states[3][0], want.hidden_states[1][0]], dim=-1)
        torch.testing.assert_close(got.context[part], context, rtol=1e-4, atol=1e-4)
        supervised = torch.from_numpy(masks[b])
        choice = want.logits[0].argmax(-1)  # at every supervised position, 100 %
        assert torch.equal(got.labels[part].long(), choice.where(supervised, torch.tensor(-1)))
        assert got.ids[part].tolist() == row.tolist() and got.loss_mask[part].tolist() == masks[b].tolist()
        assert got.pos[part].tolist() == list(range(len(row))) and got.seq[part].eq(b).all()
    tail = slice(total, None)
    assert got.seq[tail].eq(-1).all() and got.labels[tail].eq(-1).all() and not got.context[tail].any()
    assert not got.loss_mask[tail].any() and not got.pos[tail].any() and not got.ids[tail].any()
    got.check(target.hidden_size)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("label_layer", [1, "last"])
def test_labels_of_an_inner_layer_pass_the_final_norm_once(make, label_layer):
    module = make(2)
    layer = module.config.num_hidden_layers - 1 if label_layer == "last" else label_layer
    target = Target(module, None, [0, 2], layer)
    rows, _ = documents((70, 6))
    masks = [np.ones(len(row), dtype=bool) for row in rows]
    got = target.capture(rows, masks, [0, 1])
    head = module.get_output_embeddings()
    decoder = module.get_decoder()
    norm = decoder.norm if hasattr(decoder, "norm") else decoder.final_layernorm
    for b, row in enumerate(rows):
        want = reference(module, row)
        if label_layer == "last":  # hidden_states[-1] is past the norm already: the model's own choice
            choice = want.logits[0].argmax(-1)
        else:
            choice = head(norm(want.hidden_states[layer + 1]))[0].argmax(-1)
            if b == 0:  # long enough that a missing norm would show
                assert (choice != head(want.hidden_states[layer + 1])[0].argmax(-1)).any()
        assert torch.equal(got.labels[got.bounds[b] : got.bounds[b + 1]].long(), choice)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35])
def test_the_hybrid_norm_matters_here(make):
    """The tiny targets' norms are so far from neutral that skipping or doubling one moves labels."""
    module = make(1)
    target = Target(module, None, [0], "final")
    row = documents((60,))[0][0]
    hidden = reference(module, row).hidden_states[-1][0]
    own = target.capture([row], [np.ones(len(row), dtype=bool)], [0]).labels.long()
    wrong = [target.final_norm(hidden), hidden / target.final_norm.weight]
    assert all((F.linear(h, target.head_weight).argmax(-1) != own).any() for h in wrong)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35])
def test_embedding_and_head_are_the_models_own(make, tied):
    module = make(3, tie_word_embeddings=tied)
    target = Target(module, None, [0], "final")
    assert target.embed is module.get_input_embeddings() and target.final_norm is module.model.norm
    assert target.head_weight.data_ptr() == module.lm_head.weight.data_ptr() and target.head_bias is None
    assert (target.head_weight is target.embed.weight) == tied
    assert not any(p.requires_grad for p in module.parameters()) and not module.training
    row = documents((30,))[0][0]
    got = target.capture([row], [np.ones(len(row), dtype=bool)], [0])
    assert torch.equal(got.labels.long(), reference(module, row).logits[0].argmax(-1))


def test_head_bias_decides():
    module = tiny_phi(0)
    target = Target(module, None, [0], "final")
    assert target.head_bias is module.lm_head.bias
    row = documents((40,))[0][0]
    with torch.no_grad():
        module.lm_head.bias[77] = 1e3
    assert target.capture([row], [np.ones(len(row), dtype=bool)], [0]).labels.eq(77).all()


@pytest.mark.parametrize("make", MAKERS)
def test_a_document_does_not_depend_on_its_neighbours(make):
    target = Target(make(4), None, [1, 2], "final")
    rows, masks = documents((20, 75, 33), seed=5)
    alone = target.capture(rows[:1], masks[:1], [0])
    for others in ([1], [2, 1], [1, 2]):
        order = [*others, 0]
        got = target.capture([rows[i] for i in order], [masks[i] for i in order], order, pad_to=200)
        part = slice(got.bounds[-2], got.bounds[-1])
        torch.testing.assert_close(got.context[part], alone.context, rtol=1e-4, atol=1e-4)
        assert torch.equal(got.labels[part], alone.labels)


def test_labels_are_the_same_in_chunks(monkeypatch):
    target = Target(tiny_qwen3(0), None, [0], "final")
    rows, masks = documents((50, 23))
    whole = target.capture(rows, masks, [0, 1])
    monkeypatch.setattr("dflash.target.model.LOGITS_BYTES", 7 * 192 * 4)
    assert torch.equal(target.capture(rows, masks, [0, 1]).labels, whole.labels)


def test_dropout_in_the_config_leaves_the_target_deterministic():
    module = tiny_llama(0, attention_dropout=0.5).train()
    target = Target(module, None, [0, 2], "final")
    rows, masks = documents((40, 12))
    first, second = (target.capture(rows, masks, [0, 1]) for _ in range(2))
    assert torch.equal(first.context, second.context) and torch.equal(first.labels, second.labels)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35])
def test_autocast_around_it_does_not_reach_the_target(make):
    target = Target(make(0), None, [0, 2], 1)
    rows, masks = documents((40, 12))
    plain = target.capture(rows, masks, [0, 1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = target.capture(rows, masks, [0, 1])
    assert torch.equal(plain.context, inside.context) and torch.equal(plain.labels, inside.labels)


def test_features_serve_autograd_and_hold_no_graph():
    target = Target(tiny_llama(0), None, [0, 2], "final")
    rows, masks = documents((8,))
    context = target.capture(rows, masks, [0]).context
    assert not context.requires_grad and not context.is_inference()
    fc = nn.Linear(context.shape[1], 4)
    fc(context).sum().backward()  # saves the context for the weight's gradient
    assert fc.weight.grad is not None


def test_hooks_are_gone_after_a_capture_that_failed():
    module = tiny_llama(0)
    target = Target(module, None, [0, 2], "final")
    broken = module.model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.capture(*documents((8,)), [0])
    broken.remove()
    assert not any(layer._forward_hooks for layer in module.model.layers)
    target.capture(*documents((8,)), [0]).check(target.hidden_size)
    assert not any(layer._forward_hooks for layer in module.model.layers)


# ---- greedy answers --------------------------------------------------------------------------------


def greedy_loop(module, prompt, limit, ends):
    """One token at a time without any cache."""
    ids = list(prompt)
    for _ in range(limit):
        with torch.no_grad():
            ids.append(int(module(torch.tensor(ids)[None]).logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("make", MAKERS)
def test_greedy_in_batches_equals_a_loop_without_cache(make):
    module = make(6)
    g = np.random.default_rng(0)
    prompts = [g.integers(0, 190, n).tolist() for n in (4, 11, 4, 30, 7, 11, 4)] + [[PAD, PAD, EOS, 9]]
    ends = sorted({EOS, *(greedy_loop(module, prompts[i], 8, {EOS})[i] for i in (1, 3))})  # some answers end early
    sampling = dict(temperature=5.0, top_k=3, repetition_penalty=4.0, suppress_tokens=[40], min_new_tokens=12)
    module.generation_config.update(eos_token_id=ends, do_sample=True, **sampling)
    target = Target(module, None, [0], "final")
    assert target.eos_ids == ends
    want = [greedy_loop(module, prompt, 16, set(ends)) for prompt in prompts]
    for batch_size in (1, 3, 16):
        assert target.greedy(prompts, 16, batch_size) == want
    assert {len(answer) for answer in want} > {16} and len({tuple(answer) for answer in want}) > 4


def test_hybrid_prompts_are_never_padded(monkeypatch):
    module = tiny_qwen35(0)
    target = Target(module, None, [0], "final")
    seen, generate = [], module.generate

    def watched(ids, attention_mask, **settings):
        seen.append(attention_mask)
        return generate(ids, attention_mask=attention_mask, **settings)

    monkeypatch.setattr(module, "generate", watched)
    target.greedy([[1, 2, 3], [4, 5], [6, 7, 8], [9, 10, 11]], 2, 2)
    assert [tuple(mask.shape) for mask in seen] == [(2, 3), (1, 3), (1, 2)] and all(mask.all() for mask in seen)
    assert target.hybrid and not Target(tiny_gemma2(0), None, [0], "final").hybrid


def test_end_tokens_are_the_generation_configs_and_the_tokenizers():
    class Tokenizer:
        eos_token_id = 9

    module = tiny_llama(0)
    module.generation_config.eos_token_id = 4
    assert Target(module, Tokenizer(), [0], "final").eos_ids == [4, 9]
    bare = tiny_llama(0, eos_token_id=None)
    target = Target(bare, None, [0], "final")
    assert target.eos_ids == [] and len(target.greedy([[5]], 30, 1)[0]) == 30
    assert target.greedy([], 30, 1) == []


# ---- what is refused -------------------------------------------------------------------------------


def test_a_model_that_changes_the_hidden_state_before_its_head_is_refused():
    class Twisted(type(tiny_llama(0))):
        def forward(self, **kwargs):
            out = super().forward(**kwargs)
            out.logits = out.logits.roll(1, dims=-1)
            return out

    module = tiny_llama(0)
    module.__class__ = Twisted
    with pytest.raises(TargetError, match="Twisted does not choose the tokens"):
        Target(module, None, [0], "final")


def test_a_norm_that_is_not_all_there_is_refuses_only_an_inner_label_layer():
    def flip(_module, _args, out):
        out["last_hidden_state"] = out.last_hidden_state.flip(-1)

    module = tiny_llama(0)
    module.model.register_forward_hook(flip)
    Target(copy.deepcopy(module), None, [0], "final")
    with pytest.raises(TargetError, match="label_layer: final"):
        Target(module, None, [0], 2)


def test_a_head_of_another_width_is_refused():
    shape = dict(vocab_size=192, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, ffn_dim=48)
    with pytest.raises(TargetError, match="OPTForCausalLM has layers 32 wide, a head that reads 16"):
        Target(OPTForCausalLM(OPTConfig(**shape, word_embed_proj_dim=16)), None, [0], "final")


def test_weights_that_are_not_finite_are_refused():
    module = tiny_llama(0)
    with torch.no_grad():
        module.model.norm.weight[3] = float("nan")
    with pytest.raises(TargetError, match="not finite"):
        Target(module, None, [0], "final")


def test_missing_parts_are_named():
    wanted = {"layers": "list of decoder layers under layers, h, blocks", "norm": "final norm under norm, final_layer"}
    for part, message in wanted.items():
        module = tiny_llama(0)
        delattr(module.model, part)
        with pytest.raises(TargetError, match=message):
            Target(module, None, [0], "final")


UNFIT = [([0, 0], "final"), ([-1, 2], "final"), ([1, 4], "final"), ([0, 3], "final"), ([0, 2], 2), ([], 1), ([0], 9)]


@pytest.mark.parametrize(("context", "label"), UNFIT)
def test_layer_ids_that_do_not_fit_are_refused(context, label):
    with pytest.raises(TargetError, match="different layers out of 0 to 3"):
        Target(tiny_llama(0), None, context, label)


def test_rows_that_do_not_fit_are_refused_by_sample():
    target = Target(tiny_llama(0), None, [0], "final")
    rows, masks = documents((4, 6))
    for bad, message in (
        (([rows[0], [5, 192]], [masks[0], [True, True]], [7, 8]), "sample 8: token ids 5 to 192.*0 to 191"),
        (([rows[0], [5, -1]], [masks[0], [True, True]], [7, 8]), "sample 8: token ids -1"),
        (([rows[0], []], [masks[0], []], [7, 8]), "sample 8: 0 tokens"),
        ((rows, [masks[0], masks[0]], [7, 8]), "sample 8: 6 tokens and a loss mask of 4"),
        ((rows, masks, [7]), "2 rows, 2 masks, 1 sample ids"),
        ((rows, masks, [7, 8], 9), "10 tokens in a batch of at most 9"),
    ):
        with pytest.raises(TargetError, match=message):
            target.capture(*bad)
    with pytest.raises(TargetError, match="prompt 1 is empty"):
        target.greedy([[1], []], 4, 2)
