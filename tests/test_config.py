"""Configs: every wrong key is named, all at once, before anything is loaded; what was resolved reads back as it was."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash import strict_yaml
from dflash.config import ConfigError, TrainConfig, dump_yaml, load_config, missing_files, to_dict
from dflash.config_target import default_context_layers, read_target_config, resolve

ROOT = Path(__file__).resolve().parent.parent
TARGET = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "vocab_size": 100,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "max_position_embeddings": 8192,
}
SMALLEST = """
run_dir: runs/x
target: {model: some/model}
drafter: {mask_token_id: 5}
data: {train: [train.jsonl], eval: [eval.jsonl]}
"""


@pytest.fixture
def smallest(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "eval.jsonl").touch()
    path = tmp_path / "config.yaml"
    path.write_text(SMALLEST)
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


WRONG = {
    "train.learning_rte=1": ("train.learning_rte", "train.learning_rate"),
    "trian.epochs=1": ("trian", "train"),
    "data.learning_rate=1e-4": ("data.learning_rate", "train.learning_rate"),
    'train.learning_rate="1e-4"': ("train.learning_rate", "remove the quotes"),
    "train.learning_rate=0": ("train.learning_rate", "above 0"),
    "train.learning_rate=-1e-4": ("train.learning_rate", "above 0"),
    "train.learning_rate=.nan": ("train.learning_rate", "finite"),
    "train.learning_rate=.inf": ("train.learning_rate", "finite"),
    "train.max_grad_norm=0": ("train.max_grad_norm", "above 0"),
    "train.grad_accumulation=0": ("train.grad_accumulation", "at least 1"),
    "train.anchors_per_batch=0": ("train.anchors_per_batch", "at least 1"),
    "train.warmup_ratio=1": ("train.warmup_ratio", "below 1"),
    "train.warmup_ratio=-0.1": ("train.warmup_ratio", "at least 0"),
    "train.schedule=linear": ("train.schedule", "cosine"),
    "train.betas=[0.9, 1.0]": ("train.betas[1]", "below 1"),
    "train.betas=[0.9]": ("train.betas", "length"),
    "train.epochs=true": ("train.epochs", "whole number"),
    "train.epochs=1.5": ("train.epochs", "whole number"),
    "drafter.block_size=1": ("drafter.block_size", "at least 2"),
    "drafter.sliding_window=8": ("drafter.sliding_window", "drafter.block_size"),
    "drafter.layer_types=[full_attention]": ("drafter.layer_types", "drafter.num_hidden_layers"),
    "drafter.layer_types=[full_attention, full_attention, full_attention, full_attention, linear_attention]": (
        "drafter.layer_types[4]",
        "sliding_attention",
    ),
    "drafter.layer_types=[sliding_attention, full_attention, full_attention, full_attention, full_attention]": (
        "drafter.sliding_window",
        "sliding_attention",
    ),
    "drafter.mask_token_id=-1": ("drafter.mask_token_id", "at least 0"),
    "drafter.head_dim=7": ("drafter.head_dim", "even"),
    "data.max_length=20000": ("data.max_length", "train.tokens_per_batch"),
    "data.train=[nowhere.jsonl]": ("data.train", "nowhere.jsonl"),
    "data.train=[]": ("data.train", "length"),
    "data.train=train.jsonl": ("data.train", "a list"),
    "data.train=['hub:a b']": ("data.train", "hub:NAME"),
    "data.eval=[train.jsonl]": ("data.eval", "held-out"),
    "target.context_layers=[1, 5, 5]": ("target.context_layers", "[5] twice"),
    "target.context_layers=[-1, 3]": ("target.context_layers[0]", "at least 0"),
    "target.context_layers=[]": ("target.context_layers", "length"),
    "target.dtype=float16": ("target.dtype", "outliers"),
    "target.label_layer=last": ("target.label_layer", "final"),
    "target.label_layer=true": ("target.label_layer", "whole number"),
    "target.model=''": ("target.model", "length"),
    "target.config=nowhere.json": ("target.config", "nowhere.json"),
    "run_dir=''": ("run_dir", "length"),
    "run_dir=": ("run_dir", "text"),
    "run_dir=1e-4": ("run_dir", "quotes"),
    "placement.target=[cuda]": ("placement", "cuda:0"),
    "placement.gpus_per_replica=2": ("placement.gpus_per_replica", "[1]"),
    "noise.start=-1": ("noise.start", "at least 0"),
    "eval.every=0": ("eval.every", "at least 1"),
    "checkpoint.keep_best=1": ("checkpoint.keep_best", "true or false"),
    "seed=-1": ("seed", "at least 0"),
    "train=3": ("train", "train.epochs="),
    "epochs": ("epochs", "key=value"),
    "data.chat_template_kwargs=[1]": ("data.chat_template_kwargs", "name: value"),
}


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_named_with_what_to_do(smallest: Path, override: str) -> None:
    (problem,) = problems_of(smallest, override)
    key, advice = WRONG[override]
    assert key in problem
    assert advice in problem


def test_pairs_that_cannot_be(smallest: Path) -> None:
    (problem,) = problems_of(smallest, "target.context_layers=[1, 5]", "target.label_layer=5")
    assert "fc must never see" in problem
    (problem,) = problems_of(smallest, "drafter.num_attention_heads=6", "drafter.num_key_value_heads=4")
    assert "drafter.num_key_value_heads" in problem
    (problem,) = problems_of(smallest, "placement.drafter=[cuda:1, cuda:2, cuda:3]")
    assert "train.grad_accumulation" in problem
    six = "placement.target=[cuda:0, cuda:1, cuda:2, cuda:3, cuda:4, cuda:5]"
    (problem,) = problems_of(smallest, six, "placement.gpus_per_replica=4")
    assert "[1, 2, 3, 6]" in problem
    (problem,) = problems_of(smallest, "placement.target=[0/cuda:0, 1/cuda:0]", "placement.gpus_per_replica=2")
    assert "one machine" in problem


def test_all_problems_come_at_once_in_seconds_and_leave_nothing_behind(tmp_path: Path) -> None:
    """The issue's list in one file, through the installed command's entry point in a fresh process."""
    wrong = """
        run_dir: runs/wrong
        target: {model: some/model, context_layers: [3, 3, -1]}
        drafter: {mask_token_id: 5, block_size: 1, sliding_windw: 4}
        data: {train: [nowhere.jsonl], max_length: 4096}
        train: {learning_rate: "1e-4", max_grad_norm: 0, grad_accumulation: 0, warmup_ratio: 1.5, tokens_per_batch: 64}
    """
    path = tmp_path / "wrong.yaml"
    path.write_text(wrong)
    command = [sys.executable, "-m", "dflash.cli", "train", str(path), "noise.start=-1"]
    started = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert time.monotonic() - started < 10
    assert done.returncode == 2
    assert done.stdout == ""
    for key in (
        "target.context_layers[2]", "drafter.block_size", "drafter.sliding_windw", "data.train", "data.max_length",
        "train.learning_rate", "train.max_grad_norm", "train.grad_accumulation", "train.warmup_ratio", "noise.start",
    ):  # fmt: skip
        assert sum(f"dflash: error: {key} " in line for line in done.stderr.splitlines()) == 1, key
    assert list(tmp_path.iterdir()) == [path]


def test_validation_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, dflash.cli, dflash.config; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "must hold keys"),
        ("- 1", "must hold keys"),
        ("a: [1", "YAML"),
        ("a: !!python/object:os.system {}", "YAML"),
        ("a: 1\n---\nb: 2", "YAML"),
        (b"\xff\xfe\xff", "YAML"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: str | bytes, words: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (problem,) = problems_of(path)
    assert str(path) in problem
    assert words in problem
    assert "\n" not in problem


def test_missing_file_missing_keys_and_duplicates(smallest: Path) -> None:
    assert "does not exist" in problems_of(smallest.with_name("other.yaml"))[0]
    assert "directory" in problems_of(smallest.parent)[0]
    smallest.write_text(SMALLEST + "train: {epochs: 1, epochs: 2}\nseed: 1\nseed: 2\n")
    assert [p.split()[0] for p in problems_of(smallest)] == ["train.epochs", "seed"]
    smallest.write_text("seed: 1")
    required = ["run_dir", "target.model", "drafter.mask_token_id", "data.train"]
    assert [p.split()[0] for p in problems_of(smallest)] == required


def test_numbers_are_those_of_yaml_1_2() -> None:
    numbers = strict_yaml.load("[1e-4, 6.0e-4, 1E3, .5, 1., -2, 012, .inf]")
    assert numbers == ([1e-4, 6e-4, 1e3, 0.5, 1.0, -2, 12, math.inf], [])
    words = strict_yaml.load("[1:30, no, yes, 0x10, 1_000, '3', 2026-12-01]")
    assert words == (["1:30", "no", "yes", "0x10", "1_000", "3", "2026-12-01"], [])
    assert strict_yaml.load("[true, False, null, ~]") == ([True, False, None, None], [])


def test_inputs_are_found_beside_the_config_from_anywhere(
    smallest: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    config = load_config(smallest)
    assert config.data.train == [str(smallest.parent / "train.jsonl")]
    (elsewhere / "train.jsonl").touch()
    assert load_config(smallest).data.train == [str(elsewhere / "train.jsonl")]
    sources = load_config(smallest, ["data.train=['hub:org/name:train[:10]']"]).data.train
    assert sources == ["hub:org/name:train[:10]"]
    lenient = load_config(smallest, ["data.train=[nowhere.jsonl]"], check_files=False)
    assert ["nowhere.jsonl" in problem for problem in missing_files(lenient)] == [True]


def test_override_reaches_into_a_free_dictionary(smallest: Path) -> None:
    config = load_config(smallest, ["data.chat_template_kwargs.enable_thinking=false", "train.learning_rate=3e-4"])
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    assert config.train.learning_rate == 3e-4
    assert "seed" in problems_of(smallest, "seed=0", "seed.inner=1")[0]


def test_resolve_takes_the_open_shape_from_the_target(smallest: Path) -> None:
    config = load_config(smallest)
    for target in (TARGET, SimpleNamespace(**TARGET), {"text_config": TARGET, "vision_config": {}}):
        found = resolve(config, target)
        d = found.drafter
        assert (d.num_attention_heads, d.num_key_value_heads, d.head_dim, d.intermediate_size) == (6, 2, 10, 96)
        assert (d.rope_theta, d.layer_types) == (5e5, ["full_attention"] * 5)
        assert found.target.context_layers == [1, 2, 3, 4, 5]
        assert found.data.cache_dir == str(Path.home() / ".cache" / "dflash")
    assert config.drafter.head_dim is None  # the given config stays as it was
    by_type = TARGET | {
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    }
    assert resolve(config, by_type).drafter.rope_theta == 1e6
    flat = TARGET | {"rope_parameters": None, "rope_theta": 7e4}
    assert resolve(config, flat).drafter.rope_theta == 7e4


def test_resolve_names_everything_that_does_not_fit_the_target(smallest: Path) -> None:
    overrides = ["target.context_layers=[1, 7, 8]", "drafter.mask_token_id=100", "data.max_length=9000"]
    overrides += ["drafter.num_key_value_heads=4", "drafter.layer_types=null"]
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(smallest, overrides), TARGET | {"intermediate_size": None, "rope_parameters": None})
    text = str(caught.value)
    for words in (
        "has [8]",
        "lists 7, which is target.label_layer final",
        "mask_token_id is 100",
        "max_length is 9000",
    ):
        assert words in text
    for words in ("num_key_value_heads 4", "drafter.intermediate_size is null", "drafter.rope_theta is null"):
        assert words in text
    with pytest.raises(ConfigError, match=r"label_layer is 8"):
        resolve(load_config(smallest, ["target.label_layer=8"]), TARGET)
    with pytest.raises(ConfigError, match="vocab_size"):
        resolve(load_config(smallest), {"hidden_size": 3})


def test_formulas_of_the_published_drafters() -> None:
    assert default_context_layers(64, 63) == [1, 16, 31, 46, 61]
    assert default_context_layers(36, 35) == [1, 9, 17, 25, 33]
    assert default_context_layers(64, 61) == [1, 16, 31, 46]  # the narrower reading: the labels' layer drops out
    for depth in range(2, 100):
        layers = default_context_layers(depth, depth - 1)
        assert layers
        assert layers == sorted(set(layers))
        assert 0 <= layers[0] <= layers[-1] < depth - 1
    assert default_context_layers(1, 0) == []


def test_mission_recipe_says_what_the_design_says() -> None:
    config = load_config(ROOT / "configs" / "qwen27b.yaml", check_files=False)
    found = to_dict(resolve(config, read_target_config(config.target.config)))
    published = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 17408}
    assert published.items() <= found["drafter"].items()
    assert found["drafter"]["layer_types"] == ["sliding_attention"] * 4 + ["full_attention"]
    assert found["drafter"]["rope_theta"] == 1e7
    assert found["train"] == to_dict_of(TrainConfig())  # the defaults are the recipe
    assert found["placement"]["drafter"] == ["cuda:6"]
    assert len(found["placement"]["target"]) == 6


def to_dict_of(section: Any) -> dict[str, Any]:
    return dataclasses.asdict(section)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path: Path) -> None:
    load_config(path, check_files=False)


def test_a_resolved_config_reads_back_equal(smallest: Path, tmp_path: Path) -> None:
    config = resolve(load_config(smallest), TARGET)
    dump_yaml(config, tmp_path / "out.yaml", "two lines\nof header")
    text = (tmp_path / "out.yaml").read_text()
    assert text.startswith("# two lines\n# of header\n")
    assert load_config(tmp_path / "out.yaml") == config
    assert yaml.safe_load(text) == to_dict(config)  # and means the same to a YAML 1.1 reader


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1)
numbers = st.floats(min_value=1e-300, max_value=1e300)
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | words, lambda x: st.lists(x) | st.dictionaries(words, x)
)


@settings(max_examples=30, deadline=None)
@given(rate=numbers, seed=st.integers(0), run_dir=words, extra=st.dictionaries(words, trees))
def test_what_is_dumped_or_overridden_is_what_is_read(
    rate: float, seed: int, run_dir: str, extra: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Texts that look like numbers, odd characters, nested template arguments: none changes on its way."""
    folder = tmp_path_factory.mktemp("trip", numbered=True)
    (folder / "config.yaml").write_text(SMALLEST)
    config = load_config(folder / "config.yaml", check_files=False)
    config.run_dir, config.seed, config.train.learning_rate = run_dir, seed, rate
    config.data.chat_template_kwargs = extra
    dump_yaml(config, folder / "out.yaml")
    assert load_config(folder / "out.yaml", check_files=False) == config
    values = {"run_dir": run_dir, "seed": seed, "train.learning_rate": rate, "data.chat_template_kwargs": extra}
    overrides = [f"{key}={strict_yaml.dump(value)}" for key, value in values.items()]
    assert load_config(folder / "config.yaml", overrides, check_files=False) == config
