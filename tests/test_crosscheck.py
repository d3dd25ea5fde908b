"""Other people's code reads what we export: skipped where it is not installed (``scripts/crosscheck.sh`` installs it).

SpecForge's and speculators' drafter classes load the folder strictly and must give our hidden states. Of vLLM and
SGLang the code that reads configs runs without their kernels; their functions are taken out of the installed source
one by one where importing the module would need a GPU's libraries.
"""

import ast
import importlib.util
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_drafter import make as make_drafter
from tiny import MASK, VOCAB, save_target, tiny_llama, tiny_qwen35, tiny_tokenizer

from dflash.decode.drafters import find_drafter, load_drafter
from dflash.export.folder import export_drafter
from dflash.model.mask import attention_masks
from dflash.target.load import load_target_config

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = {"full": [FULL] * 3, "sliding": [SLIDING] * 3, "mixed": [SLIDING, SLIDING, FULL]}
K, LENGTH, ANCHORS = 5, 64, [3, 9, 30, 41, 58]
WINDOW = 12  # shorter than the context: its edge shows


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def target(request, tmp_path_factory):
    make = {"dense": tiny_llama, "hybrid": tiny_qwen35}[request.param]
    return save_target(tmp_path_factory.mktemp(request.param), make(0), tiny_tokenizer())


def exported(tmp_path, target, kinds, form, window=WINDOW):
    """The folder, and the drafter as we read it, fp32."""
    known = load_target_config(str(target))
    drafter = make_drafter(
        kinds, 2, vocab_size=known.vocab_size, hidden_size=known.hidden_size, mask_token_id=MASK, block_size=K,
        num_target_layers=known.num_hidden_layers, sliding_window=window, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    drafter.save_pretrained(tmp_path / "drafter")
    out = export_drafter(str(tmp_path / "drafter"), form, tmp_path / f"{form}_dflash", str(target))
    return out, load_drafter(find_drafter(str(out)), torch.float32, torch.device("cpu"))


def inputs(drafter):
    g = torch.Generator().manual_seed(5)
    width = drafter.config.hidden_size
    embed = torch.randn(VOCAB, width, generator=g)
    ids = torch.randint(10, VOCAB, (LENGTH,), generator=g)
    context = torch.randn(1, LENGTH, width * len(drafter.config.target_layer_ids), generator=g)
    anchor = torch.tensor(ANCHORS)
    block_ids = torch.full((len(ANCHORS), K), MASK)
    block_ids[:, 0] = ids[anchor]
    position = torch.cat([torch.arange(LENGTH), (anchor[:, None] + torch.arange(K)).flatten()])[None]
    zero = torch.zeros(LENGTH, dtype=torch.int32)
    masks = attention_masks(
        drafter.config.layer_types, drafter.config.sliding_window, K, zero, torch.arange(LENGTH),
        torch.zeros(len(ANCHORS), dtype=torch.int32), anchor, flex=False,
    )  # fmt: skip
    return SimpleNamespace(
        embed=embed, ids=ids, context=context, block=embed[block_ids.flatten()][None], position=position, masks=masks
    )


def ours(drafter, x):
    with torch.no_grad():
        return drafter(x.block, x.context, x.position, x.masks).last_hidden_state


@pytest.mark.parametrize("kind", KINDS)
def test_specforge_gives_our_hidden_states(tmp_path, target, kind):
    peer = pytest.importorskip("specforge.modeling.draft.dflash")
    out, drafter = exported(tmp_path, target, KINDS[kind], "published")
    model, info = peer.DFlashDraftModel.from_pretrained(
        str(out), dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model.load_state_dict({k: v.float() for k, v in load_file(out / "model.safetensors").items()}, strict=True)
    assert list(model.target_layer_ids) == drafter.config.target_layer_ids
    assert (model.block_size, model.mask_token_id) == (K, MASK)
    assert model.sliding_window == drafter.config.sliding_window
    x = inputs(drafter)
    with torch.no_grad():
        theirs = model.eval()(x.position, x.masks, x.block, x.context)
    assert (theirs - ours(drafter, x)).abs().max() < 1e-4


@pytest.mark.parametrize("window", [WINDOW, 512])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_speculators_gives_our_hidden_states(tmp_path, target, kind, window, monkeypatch):
    """With its own masks. A window shorter than the context is fed with ours: the library lets all slots of a block see
    the ``window`` tokens before the anchor, engines and we count them from each slot."""
    core = pytest.importorskip("speculators.models.dflash.core")
    out, drafter = exported(tmp_path, target, KINDS[kind], "speculators", window)
    raw = json.loads((out / "config.json").read_text())
    raw["speculators_config"]["verifier"]["name_or_path"] = None  # weights of the target are set below
    (out / "config.json").write_text(json.dumps(raw))
    config = core.DFlashDraftModel.config_class.from_pretrained(str(out))
    config.transformer_layer_config._attn_implementation = "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = super(core.SpeculatorModel, core.DFlashDraftModel).from_pretrained(
            str(out), config=config, dtype=torch.float32, output_loading_info=True
        )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    x = inputs(drafter)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(x.embed)
    anchors = torch.tensor(ANCHORS)
    monkeypatch.setattr(core, "select_anchors", lambda *args: (anchors, torch.ones(len(ANCHORS), dtype=torch.bool)))
    if kind == "sliding" and window < LENGTH:
        additive = torch.where(x.masks[SLIDING], 0.0, torch.finfo(torch.float32).min)
        monkeypatch.setattr(type(model), "_create_attention_mask", lambda *args, **kwargs: additive)
    with torch.no_grad():
        theirs, *_ = model.eval()._backbone_forward(
            x.context, x.ids[None], torch.ones(1, LENGTH, dtype=torch.bool),
            torch.zeros(1, LENGTH, drafter.config.hidden_size), torch.zeros(1, LENGTH, dtype=torch.long),
            max_anchors=len(ANCHORS),
        )  # fmt: skip
    assert (theirs - ours(drafter, x)).abs().max() < 1e-4
    # And back: what the library itself saves, full of its own defaults, is read as the same drafter.
    model.save_pretrained(tmp_path / "theirs")
    read = load_drafter(find_drafter(str(tmp_path / "theirs")), torch.float32, torch.device("cpu"))
    assert torch.equal(ours(read, x), ours(drafter, x))
    assert config.aux_hidden_state_layer_ids == [layer + 1 for layer in drafter.config.target_layer_ids]
    assert config.speculators_config.proposal_methods[0].speculative_tokens == K - 1


def functions_of(package: str, file: str, names: set[str]) -> dict[str, Any]:
    """Some functions and classes of an installed module, without importing what it imports."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(next(iter(spec.submodule_search_locations))) / file).read_text(encoding="utf-8"))

    def wanted(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return any(isinstance(t, ast.Name) and t.id in names for t in node.targets)
        return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names

    body: list[ast.stmt] = [ast.parse("from __future__ import annotations").body[0], *filter(wanted, tree.body)]
    assert len(body) == len(names) + 1, f"{file} of {package} is another version: {names}"
    import dataclasses
    import numbers
    import typing
    from collections.abc import Sequence

    scope: dict[str, Any] = {
        **vars(typing), "dataclass": dataclasses.dataclass, "Integral": numbers.Integral, "Sequence": Sequence,
        "AttentionType": SimpleNamespace(ENCODER_ONLY="both ways", DECODER="causal"), "__name__": __name__,
    }  # fmt: skip
    exec(compile(ast.Module(body, []), file, "exec"), scope)
    return scope


VLLM = {"_SLIDING_ATTENTION", "_dflash_layer_causal", "_resolve_layer_attention"}


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_runs_published_drafters_as_trained(tmp_path, target, kind):
    vllm = functions_of("vllm", "model_executor/models/qwen3_dflash.py", VLLM)
    from transformers import AutoConfig

    out, drafter = exported(tmp_path, target, KINDS[kind], "published")
    config = AutoConfig.from_pretrained(str(out))
    assert config.architectures == ["DFlashDraftModel"] and config.vocab_size == VOCAB
    assert config.dflash_config["target_layer_ids"] == drafter.config.target_layer_ids
    assert config.dflash_config["mask_token_id"] == MASK
    got = [vllm["_resolve_layer_attention"](config, i) for i in range(3)]
    assert got == [(WINDOW, True) if layer == SLIDING else (None, False) for layer in KINDS[kind]]


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_vllm_runs_speculators_drafters_as_trained(tmp_path, target, kind):
    vllm = functions_of("vllm", "model_executor/models/qwen3_dflash.py", VLLM)
    base = pytest.importorskip("vllm.transformers_utils.configs.speculators.base")
    out, drafter = exported(tmp_path, target, KINDS[kind], "speculators")
    raw = json.loads((out / "config.json").read_text())
    settings = base.SpeculatorsConfig.extract_vllm_speculative_config(raw)
    assert settings == {"method": "dflash", "num_speculative_tokens": K - 1}
    config = base.SpeculatorsConfig.from_pretrained(str(out))
    assert config.dflash_config["target_layer_ids"] == drafter.config.target_layer_ids
    assert config.dflash_config["mask_token_id"] == MASK and config.dflash_config["sample_from_anchor"] is False
    got = [vllm["_resolve_layer_attention"](config, i) for i in range(3)]
    assert got == [(WINDOW, True) if layer == SLIDING else (None, False) for layer in KINDS[kind]]
    assert config.rope_parameters["rope_theta"] == 1e4 and config.head_dim == drafter.config.head_dim


@pytest.mark.parametrize("kind", KINDS)
def test_sglang_runs_published_drafters_as_trained(tmp_path, target, kind):
    utils = functions_of(
        "sglang", "srt/speculative/dflash_utils.py",
        {
            "DEFAULT_DFLASH_MASK_TOKEN", "get_dflash_layer_types", "get_dflash_attention_sliding_window_size",
            "_cfg_get", "_get_text_config", "_get_dflash_config", "_parse_optional_int", "DFlashDraftConfig",
            "parse_dflash_draft_config",
        },
    )  # fmt: skip
    model = functions_of("sglang", "srt/models/dflash.py", {"_get_dflash_layer_attention_params"})
    model |= {key: value for key, value in utils.items() if key.startswith("get_dflash")}
    from transformers import AutoConfig

    out, drafter = exported(tmp_path, target, KINDS[kind], "published")
    config = AutoConfig.from_pretrained(str(out))
    read = utils["parse_dflash_draft_config"](draft_hf_config=config)
    assert (read.block_size, read.mask_token_id, read.num_hidden_layers) == (K, MASK, 3)
    assert read.target_layer_ids == drafter.config.target_layer_ids
    assert read.num_target_layers == drafter.config.num_target_layers
    got = [model["_get_dflash_layer_attention_params"](config, i) for i in range(3)]
    # It counts the window without the token itself.
    assert got == [(WINDOW - 1, "causal") if layer == SLIDING else (-1, "both ways") for layer in KINDS[kind]]
