"""The deliberately broken trainings of tests/broken.py are broken in the way they say, and only in that."""

import pytest
import torch
from broken import FAULTS, run
from test_run import write_run

from dflash.config import load_config
from dflash.config_target import resolve
from dflash.target.load import load_target_config
from dflash.train import build, trainer
from dflash.train.log import read_lines


@pytest.fixture(autouse=True)
def product_code_is_put_back(monkeypatch):
    monkeypatch.setattr(trainer, "score_blocks", trainer.score_blocks)


def built(tmp_path):
    config = load_config(write_run(tmp_path))
    config = resolve(config, load_target_config(config.target.model))
    (tmp_path / "run").mkdir()
    return build.build(config, tmp_path / "run")


def features(t):
    batch = t.plan.batches(1)[0]
    return t.features_of(batch)


def test_noise_reaches_the_labels_and_nothing_else(tmp_path):
    t = built(tmp_path)
    right = features(t)
    wrong = features(FAULTS["noisy_labels"](t))
    assert torch.equal(right.context, wrong.context)
    supervised = right.loss_mask
    share = float((right.labels != wrong.labels)[supervised].float().mean())
    assert 0.05 < share < 0.95 and torch.equal(right.labels[~supervised], wrong.labels[~supervised])


def test_fc_reads_the_label_layer_too(tmp_path):
    t = built(tmp_path)
    right = features(t)
    t = FAULTS["label_layer_in_fc"](t)
    wrong, width = features(t), t.target.hidden_size
    assert torch.equal(wrong.context[:, : 2 * width], right.context)
    assert t.drafter.fc.in_features == 3 * width and torch.equal(wrong.labels, right.labels)
    row, _ = t.data.sample(int(t.plan.batches(1)[0].samples[0]))
    hidden = t.target.module(torch.from_numpy(row).long()[None], output_hidden_states=True).hidden_states[-1][0]
    normed = t.target.final_norm(wrong.context[: len(row), 2 * width :])
    assert torch.allclose(normed, hidden, atol=1e-5)


def test_the_loss_is_a_mixture(tmp_path):
    t = built(tmp_path)
    right = {key: float(value.sum()) for key, value in t.train_step(1)[0].items()}
    t.drafter.zero_grad()
    wrong = {key: float(value.sum()) for key, value in FAULTS["soft_kl"](t).train_step(1)[0].items()}
    assert wrong["loss"] != pytest.approx(right["loss"], rel=0.01)
    assert {key for key in right if wrong[key] != pytest.approx(right[key])} == {"loss"}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_trains_to_the_end(tmp_path, fault):
    folder = run(fault, str(write_run(tmp_path)), [])
    assert len(read_lines(folder / "metrics.jsonl")) > 5
    assert read_lines(folder / "metrics.jsonl", "eval")
