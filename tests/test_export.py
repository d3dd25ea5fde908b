"""Drafters out and in again: nothing changes on the way, and what an engine would run otherwise is refused."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafter import make as make_drafter
from test_run import dflash, finish, write_run
from tiny import MASK, VOCAB, qwen35_config, save_target, tiny_llama, tiny_qwen35, tiny_tokenizer
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash.cli import main
from dflash.config import ConfigError, load_config
from dflash.config_target import resolve
from dflash.decode.drafters import find_drafter, load_drafter
from dflash.export.folder import ExportError, export_drafter, import_drafter
from dflash.export.formats import LAYER_KEYS, check_published, from_speculators, published_config, speculators_config
from dflash.model import DFlashDraftModel
from dflash.model.config import DrafterError
from dflash.target.load import load_target_config
from dflash.train.build import new_drafter

CPU = torch.device("cpu")
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = {"full": [FULL, FULL], "sliding": [SLIDING, SLIDING], "mixed": [SLIDING, SLIDING, FULL]}
TARGETS = {"dense": tiny_llama, "hybrid": tiny_qwen35}
CASES = [
    (kind, target, form)
    for kind in KINDS
    for target in TARGETS
    for form in ("published", "speculators")
    if (kind, form) != ("mixed", "speculators")
]


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return {
        name: save_target(tmp_path_factory.mktemp(name), make(0), tiny_tokenizer()) for name, make in TARGETS.items()
    }


def saved(folder, kinds, target, **over):
    """A drafter for ``target`` in the layout of our checkpoints, with weights that bf16 can hold; and its folder."""
    known = load_target_config(str(target))
    drafter = make_drafter(
        kinds, 1, vocab_size=known.vocab_size, hidden_size=known.hidden_size, mask_token_id=MASK,
        num_target_layers=known.num_hidden_layers, **over,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16().float())
    drafter.save_pretrained(folder)
    return drafter, folder


def logits(drafter, seed=0):
    """Of one block behind 40 context tokens, under a head drawn from the seed, fp32."""
    g = torch.Generator().manual_seed(seed)
    c = drafter.config
    context = torch.randn(1, 40, len(c.target_layer_ids) * c.hidden_size, generator=g)
    block = torch.randn(1, c.block_size, c.hidden_size, generator=g)
    head = torch.randn(VOCAB, c.hidden_size, generator=g)
    with torch.no_grad():
        return drafter(block, context).last_hidden_state @ head.T


@pytest.mark.parametrize(("kind", "target", "form"), CASES)
def test_out_and_in_again(targets, tmp_path, kind, target, form):
    drafter, folder = saved(tmp_path / "drafter", KINDS[kind], targets[target])
    out = export_drafter(str(folder), form, tmp_path / "out", str(targets[target]))
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == dict(drafter.named_parameters()).keys()
    assert all(value.dtype == torch.bfloat16 and value.isfinite().all() for value in stored.values())
    back = import_drafter(str(out), tmp_path / "back")
    for again in (out, back):  # a released drafter is read as it is, or from its copy
        source = find_drafter(str(again))
        read = load_drafter(source, torch.float32, CPU)
        assert torch.equal(logits(read), logits(drafter))
        for key in (
            "target_layer_ids",
            "num_target_layers",
            "block_size",
            "mask_token_id",
            "layer_types",
            "sliding_window",
            "head_dim",
        ):
            assert getattr(read.config, key) == getattr(drafter.config, key), key
    copied = load_file(back / "model.safetensors")
    assert stored.keys() == copied.keys() and all(torch.equal(stored[k], copied[k]) for k in stored)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("form", ["published", "speculators"])
def test_only_listed_keys_leave_and_they_are_the_targets_where_they_are_about_it(tmp_path, form):
    known = qwen35_config(eos_token_id=77, bos_token_id=None, max_position_embeddings=5000)
    drafter, _ = saved_for(tmp_path, known)
    drafter.config.secret, drafter.config.linear_num_key_heads = "/home/someone", 2
    if form == "published":
        config = layers = published_config(drafter.config, known)
        own = {
            "architectures", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "dflash_config",
        }  # fmt: skip
        assert set(config) <= own | set(LAYER_KEYS)
        assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
        for key in ("block_size", "mask_token_id", "target_layer_ids"):
            assert config[key] == config["dflash_config"][key] == getattr(drafter.config, key)
    else:
        config = speculators_config(drafter.config, known, "some/target")
        layers = config["transformer_layer_config"]
        assert set(layers) <= set(LAYER_KEYS) and "secret" not in config
        assert config["aux_hidden_state_layer_ids"] == [layer + 1 for layer in drafter.config.target_layer_ids]
        methods = config["speculators_config"]["proposal_methods"]
        assert methods == [{"proposal_type": "greedy", "speculative_tokens": drafter.config.block_size - 1}]
        assert config["draft_vocab_size"] == known.vocab_size
    assert layers["rope_theta"] == layers["rope_parameters"]["rope_theta"]
    assert (layers["eos_token_id"], layers["bos_token_id"], layers["vocab_size"]) == (77, None, known.vocab_size)
    assert (layers["max_position_embeddings"], layers["dtype"]) == (5000, "bfloat16")
    assert layers["tie_word_embeddings"] is False


def saved_for(folder, known, kinds=(FULL,), **over):
    drafter = make_drafter(
        list(kinds), 1, vocab_size=known.vocab_size, hidden_size=known.hidden_size, mask_token_id=MASK,
        num_target_layers=known.num_hidden_layers, **over,
    )  # fmt: skip
    drafter.save_pretrained(folder)
    return drafter, folder


def test_causality_is_written_where_one_word_can_say_it(tmp_path):
    known = qwen35_config()
    for kinds, causal in ((KINDS["full"], False), (KINDS["sliding"], True), (KINDS["mixed"], None)):
        drafter, _ = saved_for(tmp_path, known, kinds)
        config = published_config(drafter.config, known)
        assert config["dflash_config"].get("causal") is causal
        assert config["use_sliding_window"] is (causal is not False)
        assert config.get("sliding_window") == (None if causal is False else drafter.config.sliding_window)
        if causal is not None:  # vLLM makes it one causality of all layers
            assert speculators_config(drafter.config, known, "t")["sliding_window_non_causal"] is not causal
    with pytest.raises(DrafterError, match=r"mixes sliding and full-attention layers.*--format published"):
        speculators_config(drafter.config, known, "t")


@pytest.mark.parametrize("form", ["published", "speculators"])
@pytest.mark.parametrize("theta", [1e4, 1e7])
def test_rope_tables_follow_from_the_exported_config_alone(tmp_path, targets, form, theta):
    rope = {"rope_type": "default", "rope_theta": theta}
    drafter, folder = saved(tmp_path / "d", [FULL], targets["hybrid"], rope_parameters=rope)
    out = export_drafter(str(folder), form, tmp_path / "out", str(targets["hybrid"]))
    config = json.loads((out / "config.json").read_text())
    config = config.get("transformer_layer_config", config)
    position = torch.tensor([*range(0, 200_000, 37), 200_000])
    # In fp32, as everywhere: at 200,000 the last bit of a frequency is worth .01 radian.
    frequency = 1.0 / config["rope_theta"] ** (torch.arange(0, config["head_dim"], 2) / config["head_dim"])
    angle = (position[:, None].float() * frequency).repeat(1, 2)
    cos, sin = drafter.rotary(position[None])
    assert (cos[0, 0] - angle.cos()).abs().max() < 1e-6 and (sin[0, 0] - angle.sin()).abs().max() < 1e-6
    library = Qwen3RotaryEmbedding(Qwen3Config(**config))(torch.zeros(1), position[None])
    assert (cos[0, 0] - library[0]).abs().max() < 1e-6 and (sin[0, 0] - library[1]).abs().max() < 1e-6
    again = load_drafter(find_drafter(str(out)), torch.bfloat16, CPU).rotary(position[None])
    assert again[0].dtype == torch.float32 and torch.equal(again[0], cos) and torch.equal(again[1], sin)


def test_scaled_rope_survives(tmp_path, targets):
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
    }  # fmt: skip
    drafter, folder = saved(
        tmp_path / "d", [FULL], targets["dense"], rope_parameters=rope, max_position_embeddings=512
    )  # fmt: skip
    out = export_drafter(str(folder), "published", tmp_path / "out", str(targets["dense"]))
    config = json.loads((out / "config.json").read_text())
    assert config["rope_scaling"]["factor"] == 4.0 and config["rope_theta"] == 1e4
    position = torch.arange(0, 512, 7)[None]
    again = load_drafter(find_drafter(str(out)), torch.float32, CPU)
    assert math.isclose(again.rotary.scale, drafter.rotary.scale) and drafter.rotary.scale != 1.0
    assert all(torch.equal(a, b) for a, b in zip(again.rotary(position), drafter.rotary(position), strict=True))


REFUSED = [
    ({"dflash_config": {"causal": True}}, "causal is True for all layers"),
    ({"is_causal": True}, "causal is True for all layers"),
    ({"layer_types": [SLIDING, FULL], "is_causal": False}, "causal is False"),
    ({"dflash_config": {"sample_from_anchor": True}}, "sample_from_anchor is True"),
    ({"dflash_config": {"shift_label": True}}, "shift_label is True"),
    ({"dflash_config": {"projector_type": "gated"}}, "projector_type is 'gated'"),
    ({"dflash_config": {"use_swa": True}}, "use_swa is set"),
    ({"layer_types": [SLIDING], "sliding_window": 8, "dflash_config": {"swa_window_size": 9}}, "swa_window_size is 9"),
    ({"hidden_size": 8, "target_hidden_size": 16}, "target_hidden_size is 16"),
    ({"vocab_size": 8, "draft_vocab_size": 4}, "draft_vocab_size is 4"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters differ by kind"),
    ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 1000000.0 at top level"),
    ({"dflash_config": 3}, "dflash_config is 3"),
]


@pytest.mark.parametrize(("over", "words"), REFUSED)
def test_relatives_of_this_drafter_are_refused(over, words):
    with pytest.raises(DrafterError, match=words):
        check_published(over)


def test_neutral_values_pass():
    check_published({"dflash_config": {"use_aux_hidden_state": True, "causal": False, "sample_from_anchor": False}})
    check_published({"layer_types": [SLIDING, FULL], "dflash_config": {"use_swa": True, "causal": None}})
    check_published({"layer_types": [SLIDING], "sliding_window": 8, "is_causal": True})


def test_speculators_configs_are_read_and_relatives_refused(tmp_path):
    known = qwen35_config()
    drafter, _ = saved_for(tmp_path, known, KINDS["sliding"])
    good = speculators_config(drafter.config, known, "t")
    width = len(drafter.config.target_layer_ids) * known.hidden_size
    read = from_speculators(good, width)
    assert read["target_layer_ids"] == drafter.config.target_layer_ids and read["sliding_window"] == 6
    # vLLM's data generation appends the last layer, for the labels: fc's width tells.
    ids = [*good["aux_hidden_state_layer_ids"], known.num_hidden_layers]
    assert from_speculators(good | {"aux_hidden_state_layer_ids": ids}, width) == read
    for over, words in (
        ({"speculators_model_type": "eagle3"}, "only dflash drafters"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "counted from 1"),
        ({"aux_hidden_state_layer_ids": [1]}, "fc.weight reads 2 layers"),
        ({"draft_vocab_size": 32}, "vocabulary of their own"),
        ({"sliding_window_non_causal": True}, "sliding_window_non_causal is true"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64"),
        ({"transformer_layer_config": None}, "only dflash drafters"),
    ):
        with pytest.raises(DrafterError, match=words):
            from_speculators(good | over, width)
    with pytest.raises(DrafterError, match="they must agree"):
        from_speculators(good, width + 1)
    # The library writes what differs from the defaults of its layers' model type only.
    shape = good["transformer_layer_config"]
    defaults = Qwen3Config().to_dict()
    short = {key: value for key, value in shape.items() if defaults.get(key) != value} | {"model_type": "qwen3"}
    assert {"rms_norm_eps", "attention_bias", "hidden_act"} <= shape.keys() - short.keys()
    assert from_speculators(good | {"transformer_layer_config": short}, width) == read
    large = {key: value for key, value in short.items() if key not in ("hidden_size", "vocab_size", "head_dim")}
    wide = from_speculators(good | {"transformer_layer_config": large, "draft_vocab_size": 151936}, 2 * 4096)
    assert (wide["hidden_size"], wide["vocab_size"], wide["head_dim"]) == (4096, 151936, 128)
    assert from_speculators(good | {"sample_from_anchor": True}, width)["sample_from_anchor"]  # then refused as such


def test_copies_of_the_targets_tensors_are_left_out(tmp_path, targets):
    drafter, folder = saved(tmp_path / "d", [FULL], targets["dense"])
    out = export_drafter(str(folder), "speculators", tmp_path / "out", str(targets["dense"]))
    tensors = load_file(out / "model.safetensors")
    save_file(
        tensors | {name: torch.ones(2) for name in ("embed_tokens.weight", "lm_head.weight")}, out / "model.safetensors"
    )
    read = load_drafter(find_drafter(str(out)), torch.float32, CPU)
    assert torch.equal(logits(read), logits(drafter))


def test_what_a_target_refuses(tmp_path):
    known = qwen35_config()
    drafter, _ = saved_for(tmp_path, known)
    base = {
        key: getattr(known, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers", *("eos_token_id",))
    }  # fmt: skip
    for over, words in (
        ({"vocab_size": 1 << 10}, "vocab_size is 192, the target's 1024"),
        ({"hidden_size": 64}, "hidden_size is 32, the target's 64"),
        ({"num_hidden_layers": 9}, "num_target_layers is 5, the target's 9"),
    ):
        with pytest.raises(DrafterError, match=words):
            published_config(drafter.config, SimpleNamespace(**(base | over)))
    drafter.config.num_target_layers = None
    with pytest.raises(DrafterError, match=r"target_layer_ids has \[2\]"):
        published_config(drafter.config, SimpleNamespace(**(base | {"num_hidden_layers": 2})))
    drafter.config.mask_token_id = 192
    with pytest.raises(DrafterError, match="mask_token_id is 192"):
        published_config(drafter.config, known)


def test_folders_that_hold_something_are_left_alone(tmp_path, targets):
    _, folder = saved(tmp_path / "d", [FULL], targets["dense"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ExportError, match="holds something already"):
        import_drafter(str(folder), tmp_path / "out")
    with pytest.raises(ExportError, match="give --target"):
        export_drafter(str(folder), "published", tmp_path / "new")
    assert (tmp_path / "out" / "mine").read_text() == "x" and not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    import_drafter(str(folder), tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"][0] = 3.4e38  # finite in fp32 only
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(DrafterError, match=r"norm\.weight is not finite in torch\.bfloat16"):
        export_drafter(str(folder), "published", tmp_path / "new", str(targets["dense"]))
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".*"))


def test_an_import_keeps_every_bit_of_mixed_dtypes_and_goes_where_the_shell_is(tmp_path, targets, monkeypatch):
    _, folder = saved(tmp_path / "d", [FULL], targets["dense"])
    weights = {key: value.bfloat16() for key, value in load_file(folder / "model.safetensors").items()}
    weights["norm.weight"] = weights["norm.weight"].float() + 2**-20
    save_file(weights, folder / "model.safetensors")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["import", str(folder), "--out", "."]) == 0
    back = load_file(tmp_path / "empty" / "model.safetensors")
    assert back.keys() == weights.keys() and all(torch.equal(back[key], weights[key].float()) for key in back)
    assert json.loads((tmp_path / "empty" / "config.json").read_text())["dtype"] == "float32"


def test_a_drafter_with_biases_is_no_start(tmp_path):
    path = write_run(tmp_path)
    known = load_target_config(str(tmp_path / "target"))
    shape = resolve(load_config(path), known)
    start = new_drafter(shape, known)
    start.config.attention_bias = True
    DFlashDraftModel(start.config).save_pretrained(tmp_path / "other")
    shape.drafter.init_from = str(tmp_path / "other")
    with pytest.raises(ConfigError, match="is another drafter: attention_bias "):
        new_drafter(shape, known)


def test_a_drafter_to_start_from_keeps_its_own_epsilon_and_takes_the_runs_dropout(tmp_path):
    """The config has no key for the one, and the target has another; the drafter has none for the other."""
    path = write_run(tmp_path, train__dropout=0.25)
    known = load_target_config(str(tmp_path / "target"))
    shape = resolve(load_config(path), known)
    start = new_drafter(shape, known)
    assert start.config.rms_norm_eps == known.rms_norm_eps != 1e-3
    start.config.rms_norm_eps = 1e-3
    DFlashDraftModel(start.config).save_pretrained(tmp_path / "other")
    shape.drafter.init_from = str(tmp_path / "other")
    given = load_drafter(find_drafter(str(tmp_path / "other")), torch.float32, CPU)
    further = new_drafter(shape, known)
    assert further.training and further.config.rms_norm_eps == 1e-3
    assert all(layer.dropout == 0.25 for layer in (*start.layers, *further.layers))
    small_D = torch.randn(known.hidden_size) * 0.01
    for name, norm in further.named_modules():
        if name.endswith("norm"):
            x = small_D[: norm.weight.shape[0]]
            assert torch.equal(norm(x), given.get_submodule(name)(x)), name
            assert not torch.allclose(norm(x), start.get_submodule(name)(x)), name
    further.save_pretrained(tmp_path / "further")
    out = export_drafter(str(tmp_path / "further"), "published", tmp_path / "out", str(tmp_path / "target"))
    assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == 1e-3


def test_a_run_is_exported_with_its_card_and_trained_further(tmp_path, capfd):
    config = write_run(tmp_path, eval__every=100)
    finish(dflash("train", config))
    for form in ("published", "speculators"):
        export_drafter(str(tmp_path / "run"), form, tmp_path / form)
    card = (tmp_path / "published" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags: [dflash, speculative-decoding]\n---\n")
    for words in (
        "# published", "DFlash drafter for `target`", "| [0, 2] of 4", '"num_speculative_tokens": 3',
        "--speculative-algorithm DFLASH", "accepted length on held-out prompts", "| samples seen |", "learning_rate:",
        "`train.jsonl`", "`eval.jsonl`", "Exported with dflash", "Trained with dflash",
    ):  # fmt: skip
        assert words in card, words
    assert str(tmp_path) not in card
    assert "vllm serve ./speculators" in (tmp_path / "speculators" / "README.md").read_text()
    assert main(["import", str(tmp_path / "speculators"), "--out", str(tmp_path / "copy")]) == 0
    assert "imported to" in capfd.readouterr().err
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("published", "copy"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    known = load_target_config(str(tmp_path / "target"))
    for name in ("copy", "speculators", "published"):  # by each name the same start of a training
        resolved = resolve(load_config(config, [f"drafter.init_from={tmp_path / name}"]), known)
        state = new_drafter(resolved, known).state_dict()
        assert state.keys() == a.keys() and all(torch.equal(state[k], a[k].float()) for k in a)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "copy")]) == 1
    assert "holds something already" in capfd.readouterr().err
