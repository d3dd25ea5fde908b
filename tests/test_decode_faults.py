"""Faults that decoding and evaluation had once: damaged folders, odd numbers, answers that are short or too long."""

import json

import numpy as np
import pytest
import torch
from test_eval_command import place, run  # noqa: F401 - a fixture
from test_speculative import random_drafter, target_of
from tiny import EOS, tiny_gemma2, tiny_llama, tiny_qwen35
from transformers.cache_utils import DynamicLayer

from dflash.decode import evaluate, tables
from dflash.decode.drafters import find_drafter, load_drafter
from dflash.decode.sampling import probabilities
from dflash.decode.speculative import DecodeError, Decoder
from dflash.model.config import DrafterError
from dflash.target import cache
from dflash.target.cache import CachedTarget, take_columns
from dflash.target.model import Target


def test_a_category_without_a_round_is_shown_as_such(place, tmp_path, capsys):  # noqa: F811
    """A prompt whose answer is the end-of-text token alone has no round, hence no figure."""
    _, t, answers = place
    drawn = [np.random.default_rng(n).integers(10, 100, 5).tolist() for n in range(1500)]
    with torch.no_grad():
        first = t.target.module(torch.tensor(drawn)).logits[:, -1].argmax(-1).tolist()
    silent = drawn[first.index(EOS)]
    rows = [{"category": "maths", "input_ids": a.prompt, "loss_mask": [0] * len(a.prompt)} for a in answers]
    rows.append({"category": "silent", "input_ids": silent, "loss_mask": [0] * len(silent)})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = run(place, source=("--prompts", str(tmp_path / "rows.jsonl")))
    by = {row["category"]: row for row in report["arms"][0]["by_category"]}
    assert by["silent"] == {"category": "silent", "rounds": 0, "accepted_length": None}
    assert by["maths"]["rounds"] == report["arms"][0]["rounds"]
    out = capsys.readouterr().out
    assert [line.split() for line in out.split("\n") if line.startswith("silent")] == [["silent", "-", "(0)"]]


def test_figures_are_on_disk_before_anything_is_printed(place, monkeypatch):  # noqa: F811
    def closed(report):
        raise BrokenPipeError("closed pipe")

    monkeypatch.setattr(tables, "render", closed)
    run(place, code=1)
    assert json.loads((place[0] / "out.json").read_text())["arms"]


def test_a_json_path_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    def check(path):
        evaluate.Settings("d", prompts=(__file__,), json=path).check()

    check(tmp_path / "out.json")
    with pytest.raises(evaluate.EvalError, match="cannot be written there"):
        check(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(evaluate.EvalError, match="cannot be written there"):
        check(tmp_path / "out.json")


def test_given_answers_end_at_the_first_end_of_text(place, tmp_path):  # noqa: F811
    """As decoded ones do: what a server wrote behind it is no part of the answer."""
    a = place[2][0]
    ids = a.prompt + a.answer[:10]
    for name, more in (("ended", []), ("goes_on", [40, 41, EOS])):
        row = {"input_ids": [*ids, EOS, *more], "loss_mask": [0] * len(a.prompt) + [1] * (11 + len(more))}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    ended, goes_on = (
        run(place, source=("--answers", str(tmp_path / f"{name}.jsonl")))["prompts"][0] for name in ("ended", "goes_on")
    )
    assert ended["answer_tokens"] == 11
    assert {k: v for k, v in goes_on.items() if k != "origin"} == {k: v for k, v in ended.items() if k != "origin"}


def test_answers_stay_within_the_targets_positions(place, capsys, caplog):  # noqa: F811
    assert place[1].target.config.max_position_embeddings == 512
    run(place, "--max-new-tokens", "512", code=1)
    assert "--max-new-tokens 512 leaves no room for a prompt" in capsys.readouterr().err
    lengths = sorted(len(a.prompt) for a in place[2])
    report = run(place, "--max-new-tokens", 512 - lengths[0])
    assert {row["prompt_tokens"] for row in report["prompts"]} == {lengths[0]} and lengths[0] < lengths[-1]
    assert "prompt is longer than max_length" in caplog.text


def test_agreement_is_with_the_targets_own_choice_whatever_layer_made_the_labels(place):  # noqa: F811
    _, t, answers = place
    inner = Target(t.target.module, None, [0, 2], 1)
    assert evaluate._agreement(inner, answers) == evaluate._agreement(t.target, answers) == 1
    assert inner.label_layer == 1


def test_a_negative_seed_is_refused():
    target = target_of(tiny_llama)
    with pytest.raises(DecodeError, match="seed is -1"):
        Decoder(target, random_drafter(target), seed=-1)


@pytest.mark.parametrize("temperature", [1e-3, 1e-200, 1e-310])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(probabilities(logits, temperature).amax(-1), torch.ones(3, 4, dtype=torch.float64))
    target = target_of(tiny_llama)
    drafter, prompt = random_drafter(target), [20, 30, 40]
    sampled = Decoder(target, drafter, temperature=temperature).decode([prompt], 20)[0].tokens
    assert sampled == Decoder(target, drafter).decode([prompt], 20)[0].tokens


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma2, tiny_qwen35])
def test_the_target_alone_copies_its_cache_only_when_a_row_leaves(make, monkeypatch):
    """Else a batch's speed-up would be measured against a baseline that does needless work once per token."""
    target, copies = target_of(make), []

    def counted(*args):
        copies.append(1)
        return take_columns(*args)

    monkeypatch.setattr(cache, "take_columns", counted)
    prompts = [[20], [30, 31, 32, 33], [40, 41]]
    got = Decoder(target, None).decode(prompts, 25, 3)
    assert [d.tokens for d in got] == [d.tokens for d in Decoder(target, None).decode(prompts, 25)]
    attention = sum(isinstance(layer, DynamicLayer) for layer in CachedTarget(target).empty_cache().layers)
    assert len(copies) <= 2 * (len(prompts) + 4) * attention  # the self-test's commits are the 4


@pytest.fixture
def published(tmp_path):
    random_drafter(target_of(tiny_llama)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "key,value,words",
    [
        ("mask_token_id", "5", "mask_token_id is '5'; it must be a whole number"),
        ("mask_token_id", 5.5, "mask_token_id is 5.5"),  # would be read as 5
        ("mask_token_id", True, "mask_token_id is True"),  # would be read as 1
        ("block_size", 4.0, "block_size is 4.0"),
        ("block_size", "4", "block_size is '4'"),
        ("num_target_layers", "4", "num_target_layers is '4'"),
        ("target_layer_ids", 5, "target_layer_ids is 5"),
        ("target_layer_ids", ["0", "2"], "list of layer numbers"),
        ("target_layer_ids", [], "list of layer numbers"),
        ("target_layer_ids", [-1, 2], "list of layer numbers"),
        ("target_layer_ids", [2, 2], "must be different layers"),
        ("target_layer_ids", [0, 4], "out of 0 to 3"),
        ("hidden_act", "gelu", "hidden_act is gelu"),  # would be computed as silu
        ("rope_parameters", {"rope_type": "none"}, "rope_type is none"),
        ("sliding_window", "8", "describes no drafter"),
        ("num_hidden_layers", 1, "describes no drafter"),
        ("rms_norm_eps", None, "describes no drafter"),
    ],
)
def test_a_config_with_odd_values_is_refused_naming_the_key(published, key, value, words):
    config = json.loads((published / "config.json").read_text()) | {key: value}
    config["dflash_config"] |= {key: value for key in [key] if key in config["dflash_config"]}
    (published / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match=words) as refused:
        find_drafter(str(published))
    assert "config.json" in str(refused.value)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {"fc.weight": 1}}'])
def test_an_index_without_files_is_named(published, text):
    (published / "model.safetensors").unlink()
    (published / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DrafterError, match=r"index\.json has no weight_map"):
        load_drafter(find_drafter(str(published)), torch.float32, torch.device("cpu"))


def test_a_folder_in_place_of_the_weights_is_no_file(published):
    (published / "model.safetensors").unlink()
    (published / "model.safetensors").mkdir()
    with pytest.raises(DrafterError, match=r"model\.safetensors does not exist"):
        load_drafter(find_drafter(str(published)), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("text", ["{}", '{"step": "a"}'])
def test_a_checkpoint_whose_state_names_no_step_is_refused(published, text):
    (published / "trainer.json").write_text(text)
    (published / "COMPLETE").write_text("")
    with pytest.raises(DrafterError, match=r"trainer\.json names no step"):
        find_drafter(str(published))
