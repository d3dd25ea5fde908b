"""A drafter in the shape of z-lab/Qwen3.6-27B-DFlash, of small widths: read, trained further, written out again."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_run import dflash, finish, write_run
from tiny import EOS, MASK, VOCAB, save_target, tiny_qwen35, tiny_tokenizer

from dflash.decode.drafters import find_drafter, load_both, load_drafter
from dflash.decode.speculative import Decoder
from dflash.export.folder import export_drafter, import_drafter
from dflash.model import DFlashDraftModel
from dflash.model.config import DrafterError
from dflash.train.log import read_lines

D, HEADS, KV, HEAD_DIM, INNER = 32, 4, 2, 16, 48
LAYER_IDS = [1, 16, 31, 46, 61]
CONFIG = {  # the published file, key by key; only sizes and token ids are smaller
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": LAYER_IDS}, "num_target_layers": 64,
    "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": 5, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": HEAD_DIM, "hidden_act": "silu", "attention_bias": False,
    "rms_norm_eps": 1e-06, "rope_theta": 10000000, "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048, "use_sliding_window": True, "max_position_embeddings": 262144, "vocab_size": VOCAB,
    "eos_token_id": EOS, "pad_token_id": EOS, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def tensors():
    g = torch.Generator().manual_seed(3)

    def matrix(out, into):
        return (torch.randn(out, into, generator=g) * into**-0.5).bfloat16()

    def norm(size):
        return (1 + 0.2 * torch.randn(size, generator=g)).bfloat16()

    out = {"fc.weight": matrix(D, len(LAYER_IDS) * D), "hidden_norm.weight": norm(D), "norm.weight": norm(D)}
    for i in range(5):
        parts = {
            "self_attn.q_proj": matrix(HEADS * HEAD_DIM, D), "self_attn.k_proj": matrix(KV * HEAD_DIM, D),
            "self_attn.v_proj": matrix(KV * HEAD_DIM, D), "self_attn.o_proj": matrix(D, HEADS * HEAD_DIM),
            "self_attn.q_norm": norm(HEAD_DIM), "self_attn.k_norm": norm(HEAD_DIM), "mlp.gate_proj": matrix(INNER, D),
            "mlp.up_proj": matrix(INNER, D), "mlp.down_proj": matrix(D, INNER), "input_layernorm": norm(D),
            "post_attention_layernorm": norm(D),
        }  # fmt: skip
        out |= {f"layers.{i}.{name}.weight": value for name, value in parts.items()}
    return out


def write_full_size(folder):
    """The published shape itself: 1.73 billion random parameters, 3.5 GB."""
    from dflash.bench.shapes import SHAPES

    shape = SHAPES["qwen27b"].drafter_config()
    with torch.device("meta"):
        names = {name: p.shape for name, p in DFlashDraftModel(shape).named_parameters()}
    g = torch.Generator("cuda").manual_seed(0)

    def drawn(size):
        value = torch.randn(size, generator=g, device="cuda")
        return (value * size[-1] ** -0.5 if len(size) == 2 else 1 + 0.1 * value).bfloat16().cpu()

    folder.mkdir()
    save_file({name: drawn(size) for name, size in names.items()}, folder / "model.safetensors")
    sizes = {
        "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 248320, "eos_token_id": 248044, "pad_token_id": 248044,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": LAYER_IDS},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_full_size_imports_trains_a_step_and_exports_to_the_same_keys(tmp_path):
    """On features that are drawn at random; the target is there as its config alone."""
    from dflash.bench.shapes import SHAPES
    from dflash.bench.step import build

    write_full_size(tmp_path / "released")
    base = import_drafter(str(tmp_path / "released"), tmp_path / "base")
    drafter = load_drafter(find_drafter(str(base)), torch.float32, torch.device("cuda"))
    trainer = build(SHAPES["qwen27b"], 1024, 64, torch.device("cuda"), torch.bfloat16, 1)
    trainer.drafter.load_state_dict(drafter.state_dict())
    trainer.one_step(1)
    trained = {name: p.detach().cpu() for name, p in trainer.drafter.named_parameters()}
    before = drafter.state_dict()
    assert not [name for name, p in trained.items() if p.ndim == 2 and torch.equal(p, before[name].cpu())]
    drafter.load_state_dict(trained)
    drafter.cpu().save_pretrained(tmp_path / "trained")
    target = Path(__file__).parent.parent / "configs" / "targets" / "qwen3.6-27b.json"
    out = export_drafter(str(tmp_path / "trained"), "published", tmp_path / "out", str(target))
    with (
        safe_open(tmp_path / "released" / "model.safetensors", "pt") as a,
        safe_open(out / "model.safetensors", "pt") as b,
    ):
        assert {*a.keys()} == {*b.keys()} and len(b.keys()) == 58
        for name in a.keys():  # noqa: SIM118
            assert a.get_slice(name).get_shape() == b.get_slice(name).get_shape()
    written = json.loads((out / "config.json").read_text())
    assert CONFIG.keys() <= written.keys() and written["vocab_size"] == 248320
    assert (written["eos_token_id"], written["sliding_window"]) == (248044, 2048)


@pytest.fixture
def released(tmp_path):
    folder = tmp_path / "released"
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}))
    return folder


def test_imports_trains_a_step_and_exports_to_the_same_keys(released, tmp_path):
    finish(dflash("import", released, "--out", tmp_path / "base"))
    copied = load_file(tmp_path / "base" / "model.safetensors")
    assert len(copied) == 58 and all(torch.equal(copied[key], value) for key, value in tensors().items())

    layers = {key: CONFIG[key] for key in ("num_hidden_layers", "layer_types", "sliding_window", "block_size")}
    path = write_run(
        tmp_path / "run", drafter=layers | {
            "mask_token_id": MASK, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD_DIM,
            "intermediate_size": INNER, "rope_theta": 1e7, "init_from": str(tmp_path / "base"),
        },
    )  # fmt: skip
    save_target(
        tmp_path / "run" / "target", tiny_qwen35(0, num_hidden_layers=64, layer_types=None), tiny_tokenizer()
    )  # fmt: skip
    config = yaml.safe_load(path.read_text())
    config["target"]["context_layers"] = LAYER_IDS
    config["train"] |= {"epochs": 1, "grad_accumulation": 8, "warmup_ratio": 0.0}
    del config["data"]["eval"]
    path.write_text(yaml.safe_dump(config))
    finish(dflash("train", path))
    assert len(read_lines(tmp_path / "run" / "run" / "metrics.jsonl")) >= 1

    out = export_drafter(str(tmp_path / "run" / "run"), "published", tmp_path / "again")
    trained = load_file(out / "model.safetensors")
    assert {k: v.shape for k, v in trained.items()} == {k: v.shape for k, v in tensors().items()}
    # A step moves norms by less than bf16 shows near 1.
    assert not [key for key, value in tensors().items() if value.ndim == 2 and torch.equal(value, trained[key])]
    written = json.loads((out / "config.json").read_text())
    assert CONFIG.keys() <= written.keys() and "auto_map" not in written
    # The target's: what this small one has in place of the large one's.
    own = {"dflash_config", "max_position_embeddings", "pad_token_id"}
    assert {k: written[k] for k in CONFIG.keys() - own} == {k: CONFIG[k] for k in CONFIG.keys() - own}
    assert CONFIG["dflash_config"].items() <= written["dflash_config"].items()
    assert "causal" not in written["dflash_config"]  # 4 + 1 kinds: no one word for all

    pair = load_both(str(tmp_path / "again"), target=str(tmp_path / "run" / "target"), device="cpu", dtype="float32")
    prompt = [[20, 30, 40, 50]]
    drafted = Decoder(pair.target, pair.drafter).decode(prompt, 12)[0].tokens
    assert drafted == Decoder(pair.target, None).decode(prompt, 12)[0].tokens


def test_a_released_drafter_is_read_as_it_is(released):
    source = find_drafter(str(released))
    drafter = load_drafter(source, torch.float32, torch.device("cpu"))
    assert sum(1 for _ in drafter.parameters()) == 58
    c = source.config
    assert (c.target_layer_ids, c.mask_token_id, c.block_size) == (LAYER_IDS, MASK, 16)
    assert (c.sliding_window, c.rope_parameters["rope_theta"], c.head_dim) == (2048, 1e7, HEAD_DIM)
    assert [layer.self_attn.window for layer in drafter.layers] == [2048] * 4 + [None]


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"dflash_config": CONFIG["dflash_config"] | {"causal": True}}, "causal is True for all layers"),
        ({"dflash_config": CONFIG["dflash_config"] | {"block_size": 8}}, "block_size is 16 at top level and 8 in"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
    ],
)
def test_what_would_be_another_drafter_is_refused(released, over, words):
    (released / "config.json").write_text(json.dumps(CONFIG | over))
    with pytest.raises(DrafterError, match=words):
        find_drafter(str(released))
