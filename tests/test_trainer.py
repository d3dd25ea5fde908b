"""The step: rule 7 (loss over the whole optimizer step), rules 1, 2, 9, 10, and what stops a run."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_llama, tiny_qwen35

from dflash.data.batches import Batch, sample_anchors
from dflash.decode.walk import Answer, walk
from dflash.model import DFlashConfig, DFlashDraftModel
from dflash.target.features import SickFeatures
from dflash.target.model import Target
from dflash.train.checkpoint import Checkpoints
from dflash.train.trainer import NonFiniteStep, Trainer

K, MASK = 4, 5


class Rows:
    """Token data in memory."""

    def __init__(self, rows):
        self.rows = [(np.asarray(i, dtype=np.int32), np.asarray(m, dtype=bool)) for i, m in rows]
        self.lengths = np.array([len(i) for i, _ in self.rows])
        self.eligible = np.array([int((m[:-1] & m[1:]).sum()) for _, m in self.rows])

    def sample(self, i):
        return self.rows[i]

    def describe(self, i):
        return f"rows.jsonl:{i + 1}"


def rows(lengths, seed=0, vocab=100):
    g = np.random.default_rng(seed)
    return Rows([(g.integers(10, vocab, p + a), [0] * p + [1] * a) for p, a in lengths])


def followed(data, module, share=0.8, seed=0):
    """The same rows, whose supervised tokens are the module's own choice ``share`` of the time."""
    g = np.random.default_rng(seed)
    for ids, mask in data.rows:
        for at in np.flatnonzero(mask):
            if at and g.random() < share:
                with torch.no_grad():
                    ids[at] = int(module(torch.from_numpy(ids[:at].astype(np.int64))[None]).logits[0, -1].argmax())
    return data


def batch(index, samples, anchors, epoch=0):
    return Batch(epoch, index, np.array(samples), np.array(anchors))


def trainer(
    tmp_path,
    data,
    steps,
    target=None,
    dtype="float32",
    noise=(0.0, 0.0),
    lr=1e-3,
    kinds=("full_attention",),
    seed=0,
    optimizer="adamw",
):
    module = target or tiny_llama(0)
    borrowed = Target(module, None, [0, 2], "final")
    config = SimpleNamespace(
        seed=0,
        target=SimpleNamespace(dtype=dtype),
        train=SimpleNamespace(
            learning_rate=lr, warmup_ratio=0.0, betas=[0.9, 0.95], weight_decay=0.0, max_grad_norm=1.0,
            optimizer=optimizer,
            anchors_per_batch=64, tokens_per_batch=1024,
        ),
        noise=SimpleNamespace(start=noise[0], end=noise[1]),
        checkpoint=SimpleNamespace(every=10**9, keep_last=2, keep_best=True),
        eval=SimpleNamespace(every=10**9),
        log=SimpleNamespace(every=1),
    )  # fmt: skip
    torch.manual_seed(seed)
    shape = DFlashConfig(
        block_size=K, mask_token_id=MASK, target_layer_ids=[0, 2], num_target_layers=borrowed.num_layers,
        vocab_size=borrowed.vocab_size, hidden_size=borrowed.hidden_size, intermediate_size=48,
        num_hidden_layers=len(kinds), num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        layer_types=list(kinds), sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    drafter = DFlashDraftModel(shape).float()
    plan = SimpleNamespace(total=len(steps), batches=lambda s: steps[s - 1], epoch_of=lambda s: 0.0)

    def features_of(b):
        ids = b.samples.tolist()
        return borrowed.capture([data.sample(i)[0] for i in ids], [data.sample(i)[1] for i in ids], ids)

    return Trainer(config, drafter, borrowed, data, plan, features_of, [], tmp_path, {"data": "x"})


def gradients(t):
    return [p.grad.clone() for p in t.drafter.parameters()]


UNEQUAL = [(4, 3), (6, 300), (2, 40), (5, 9)]  # (prompt, supervised) tokens: one row of 3, one of 300


@pytest.mark.parametrize("kinds", [("full_attention", "sliding_attention"), ("sliding_attention",)])
def test_loss_and_gradient_do_not_depend_on_how_the_step_is_cut(tmp_path, kinds):
    data, counts = rows(UNEQUAL), [2, 40, 7, 5]
    together = trainer(tmp_path, data, [[batch(0, [0, 1, 2, 3], counts)]], kinds=kinds)
    apart = trainer(tmp_path, data, [[batch(i, [i], [counts[i]]) for i in range(4)]], kinds=kinds)
    results = []
    for t in (together, apart):
        sums, norm, _ = t.train_step(1)
        results.append((float(sums["loss"] / sums["weight"]), float(norm), gradients(t)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)
    for a, b in zip(results[0][2], results[1][2], strict=True):
        assert torch.allclose(a, b, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35])
def test_loss_of_a_step_equals_the_written_out_sum(tmp_path, make):
    """Every block by itself, labels by a plain forward of the target, all logits at once, weights by formula."""
    module, counts = make(0), [7, 4]
    data = followed(rows(UNEQUAL[2:], seed=3), module)
    t = trainer(tmp_path, data, [[batch(5, [0, 1], counts, epoch=2)]], target=module)
    sums, norm, _ = t.train_step(1)

    total, weights, ends = torch.zeros(()), 0.0, []
    fresh = copy.deepcopy(t.drafter).requires_grad_(True)
    fresh.zero_grad()
    for s, count in ((0, counts[0]), (1, counts[1])):
        ids, mask = data.sample(s)
        ids = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            out = module(ids[None], output_hidden_states=True)
        context = torch.cat([out.hidden_states[1], out.hidden_states[3]], dim=-1)
        labels = out.logits[0].argmax(-1)
        for a in sample_anchors(0, 2, s, mask, count).tolist():
            block = torch.tensor([int(ids[a])] + [MASK] * (K - 1))
            hidden = fresh(
                noise_embeds=module.get_input_embeddings()(block)[None].detach(),
                context_hidden_states=context[:, :a],
                position_ids=torch.arange(a + K)[None],
            ).last_hidden_state[0]
            logits = module.get_output_embeddings()(hidden)
            terms = []
            for k in range(1, K):
                if a + k == len(ids) or not mask[a : a + k + 1].all():
                    break
                terms.append(F.cross_entropy(logits[k], labels[a + k - 1]))
                if labels[a + k - 1] != ids[a + k]:  # from here on the labels answer another prefix
                    break
            ends.append(len(terms))
            sure = [0.5 * float(torch.exp(-term)) + 0.5 for term in terms]
            for j, term in enumerate(terms):
                w = sum(float(np.prod(sure[: m + 1])) for m in range(j, len(terms)))
                total = total + w * term
                weights += w
    assert set(ends) == set(range(1, K))  # blocks that leave the path early, late, and not at all
    loss = total / weights
    loss.backward()
    assert float(sums["loss"] / sums["weight"]) == pytest.approx(loss.item(), rel=1e-5)
    for p, q in zip(t.drafter.parameters(), fresh.parameters(), strict=True):
        assert torch.allclose(p.grad / sums["weight"], q.grad, atol=1e-6, rtol=1e-3)
    reference = torch.stack([q.grad.norm() for q in fresh.parameters()]).norm()
    assert float(norm) == pytest.approx(float(reference), rel=1e-4)


def test_noise_reaches_neither_labels_nor_stored_features(tmp_path):
    data, step = rows(UNEQUAL), [[batch(0, [1, 2], [20, 10])]]
    quiet, noisy = trainer(tmp_path, data, step), trainer(tmp_path, data, step, noise=(0.3, 0.3))
    seen = []
    for t in (quiet, noisy):
        original = t.features_of
        t.features_of = lambda b, original=original: seen.append(original(b)) or seen[-1]
        sums, _, _ = t.train_step(1)
        seen[-1] = (seen[-1], sums)
    (clean, a), (other, b) = seen
    assert torch.equal(clean.labels, other.labels) and torch.equal(clean.context, other.context)
    assert float(a["loss"]) != float(b["loss"])  # and the noise did reach fc
    assert a["slots_at"].tolist() == b["slots_at"].tolist() and float(a["path"]) == float(b["path"])


def test_two_passes_over_a_step_are_identical_to_the_bit(tmp_path):
    data, step = rows(UNEQUAL), [[batch(0, [0, 1, 2], [2, 30, 7])]]
    first, second = trainer(tmp_path, data, step), trainer(tmp_path, data, step)
    first.train_step(1)
    second.train_step(1)
    assert all(torch.equal(a, b) for a, b in zip(gradients(first), gradients(second), strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_target_is_untouched_and_borrowed_weights_get_no_gradient(tmp_path, optimizer):
    module = tiny_llama(0)
    before = copy.deepcopy(module.state_dict())
    t = trainer(tmp_path, rows(UNEQUAL), [[batch(0, [1], [20])]] * 3, target=module, optimizer=optimizer)
    for step in (1, 2, 3):
        t.one_step(step)
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in module.parameters())
    assert {id(p) for g in t.optimizer.param_groups for p in g["params"]} == {id(p) for p in t.drafter.parameters()}


def test_bf16_training_moves_norm_weights_and_keeps_fp32_moments(tmp_path):
    """bf16 masters would round every small update of a weight near 1 away."""
    data = rows(UNEQUAL)
    t = trainer(tmp_path, data, [[batch(i, [1, 2, 3], [12, 6, 4])] for i in range(200)], dtype="bfloat16", lr=3e-4)
    start = {n: p.detach().clone() for n, p in t.drafter.named_parameters()}
    for step in range(1, 201):
        line = t.one_step(step)
    assert np.isfinite(line["loss"])
    for name, p in t.drafter.named_parameters():
        assert p.dtype == torch.float32
        if "norm" in name:
            assert float((p.detach() - start[name]).abs().mean()) > 1e-4, name
    store = Checkpoints(tmp_path / "checkpoints", 1, False)
    store.save(t.drafter, t.optimizer, t.progress)
    store.wait()
    again = trainer(tmp_path, data, [[batch(0, [1], [4])]], dtype="bfloat16", seed=8)
    again.resume(store.newest())
    for p, q in zip(t.drafter.parameters(), again.drafter.parameters(), strict=True):
        state = again.optimizer.state[q]
        assert torch.equal(p, q) and q.dtype == torch.float32
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
        assert torch.equal(state["exp_avg_sq"], t.optimizer.state[p]["exp_avg_sq"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_non_finite_step_stops_with_its_samples_and_changes_nothing(tmp_path, optimizer):
    data = rows(UNEQUAL)
    t = trainer(tmp_path, data, [[batch(0, [1, 3], [10, 4])]] * 2, optimizer=optimizer)
    t.one_step(1)
    before = [p.detach().clone() for p in t.drafter.parameters()]
    with torch.no_grad():
        t.drafter.norm.weight[0] = float("nan")
    with pytest.raises(NonFiniteStep, match=r"step 2: loss is not finite.*1 \(rows.jsonl:2\), 3 \(rows.jsonl:4\)"):
        t.one_step(2)
    assert t.progress.step == 1
    with torch.no_grad():
        t.drafter.norm.weight[0] = dict(zip([n for n, _ in t.drafter.named_parameters()], before, strict=True))[
            "norm.weight"
        ][0]
    assert all(torch.equal(a, b) for a, b in zip(before, t.drafter.parameters(), strict=True))


@pytest.mark.parametrize("poison,word", [(float("nan"), "not finite"), (0.0, "all zero")])
def test_sick_features_stop_before_the_weights_and_name_the_sample(tmp_path, poison, word):
    data = rows(UNEQUAL)
    t = trainer(tmp_path, data, [[batch(0, [0], [2]), batch(1, [1, 3], [10, 4])]])
    original, before = t.features_of, [p.detach().clone() for p in t.drafter.parameters()]

    def poisoned(b):
        features = original(b)
        if 3 in b.samples:
            features.context[features.bounds[1] + 2, t.target.hidden_size :] = poison
        return features

    t.features_of = poisoned
    with pytest.raises(SickFeatures, match=f"sample 3, token 2: context layer number 1 is {word}"):
        t.one_step(1)
    assert all(torch.equal(a, b) for a, b in zip(before, t.drafter.parameters(), strict=True))


def one_sick_and_one_poisoned(tmp_path):
    """Batch 0 cannot be had; batch 1 arrives with zeros in sample 3."""
    data = rows(UNEQUAL)
    t = trainer(tmp_path, data, [[batch(0, [0], [2]), batch(1, [1, 3], [10, 4])]])
    original = t.features_of

    def features_of(b):
        if 0 in b.samples:
            raise SickFeatures("sample 0 is sick")
        features = original(b)
        features.context[features.bounds[1] + 2, :] = 0
        return features

    t.features_of = features_of
    return t


def test_the_poisoned_batch_is_named_beside_one_that_was_skipped(tmp_path):
    t = one_sick_and_one_poisoned(tmp_path)
    t.max_sick = 1
    with pytest.raises(SickFeatures, match="sample 3, token 2"):
        t.one_step(1)


class Others:
    """Drafter 0 of two, whose fellow has the sums and gradients of ``fellow``."""

    rank, size, eval_groups = 0, 2, ()
    stream = SimpleNamespace(take=dict)

    def __init__(self, fellow, skipped=0.0):
        self.sums, _, _ = fellow.train_step(1)
        self.sums["skipped"] += skipped
        self.gradients = gradients(fellow)

    def add(self, sums, own):
        assert list(sums) == list(self.sums) and all(sums[k].shape == v.shape for k, v in self.sums.items())
        for mine, theirs in zip(own, self.gradients, strict=True):
            mine += theirs
        return {key: value + self.sums[key] for key, value in sums.items()}


def test_a_drafter_whose_batches_are_all_sick_takes_the_step_of_the_others(tmp_path):
    data, steps = rows(UNEQUAL), [[batch(0, [0], [2]), batch(1, [1, 3], [10, 4])]]
    fellow = trainer(tmp_path, data, [steps[0][1:]])
    t = trainer(tmp_path, data, steps)
    t.peers, t.max_sick = Others(fellow), 1

    def sick(b):
        raise SickFeatures("sample 0 is sick")

    t.features_of = sick
    line = t.one_step(1)
    fellow.drafter.zero_grad()
    alone = fellow.one_step(1)
    assert line["sick_batches"] == 1 and line["loss"] == pytest.approx(alone["loss"])
    for a, b in zip(t.drafter.parameters(), fellow.drafter.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7)
    t = trainer(tmp_path, data, steps)
    fellow.drafter.zero_grad()
    t.peers, t.max_sick, t.features_of = Others(fellow, skipped=1.0), 1, sick
    with pytest.raises(SickFeatures, match="2 sick batches so far on all drafters together and 1 are tolerated"):
        t.one_step(1)


def test_cliping_uses_the_norm_of_the_divided_gradient(tmp_path):
    data = rows(UNEQUAL)
    t = trainer(tmp_path, data, [[batch(0, [1, 2], [30, 9])]])
    _, norm, _ = t.train_step(1)
    raw = gradients(t)
    t.config.train.max_grad_norm = float(norm) / 4
    torch.nn.utils.clip_grads_with_norm_(t.drafter.parameters(), t.config.train.max_grad_norm, norm)
    for a, b in zip(raw, gradients(t), strict=True):
        assert torch.allclose(a / 4, b, rtol=1e-4)


def test_dropout_is_the_batchs_own_and_leaves_evaluation_alone(tmp_path, monkeypatch):
    """Derived from the plan as all else: a resumed run and another rank leave out the same."""
    data = rows(UNEQUAL)
    steps = [[batch(0, [0, 1], [2, 9])], [batch(1, [0, 1], [2, 9])]]
    t = trainer(tmp_path, data, steps)

    def gradient(step, dropout):
        for layer in t.drafter.layers:
            layer.dropout = dropout
        t.drafter.zero_grad()
        t.train_step(step)
        return torch.cat([g.flatten() for g in gradients(t)])

    first = gradient(1, 0.3)
    torch.manual_seed(99)
    assert torch.equal(first, gradient(1, 0.3))
    assert not torch.allclose(first, gradient(1, 0.0)) and not torch.allclose(first, gradient(2, 0.3))
    assert torch.equal(gradient(1, 0.0), gradient(2, 0.0))  # the same samples and anchors, so nothing else differs

    t.answers = [Answer("p:1", [5, 9, 12], [int(i) for i in data.sample(1)[0][:40]])]
    lines, training = [], []

    def looked_at(drafter, *args):
        training.append(drafter.training)
        return walk(drafter, *args)

    monkeypatch.setattr("dflash.train.trainer.walk", looked_at)
    for dropout in (0.0, 0.9):
        gradient(1, dropout)
        t.evaluate(SimpleNamespace(write=lines.append))
        assert t.drafter.training
    assert training == [False, False]
    assert lines[0]["accepted_length"] == lines[1]["accepted_length"]
