"""The YAML of a run as dataclasses: read, checked whole, completed from the target's config, written back.

Each default exists once, here, with its reason under it. Two phases, both reporting every problem they find at once:
:func:`load_config` checks what the file alone can tell; :func:`resolve` fills the nulls from the target's config and checks
against it. Neither imports torch, so that a wrong config is refused in a fraction of a second.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from dflash import yaml12


class ConfigError(ValueError):
    """A config that cannot be run. ``problems`` holds one sentence per fault, each naming its key."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class Bounds(NamedTuple):
    """Limits of a number, or of the length of a text or list."""

    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf

    def complaint(self, size: float) -> str | None:
        if size < self.least:
            return f"must be at least {self.least}"
        if size <= self.above:
            return f"must be above {self.above}"
        return f"must be below {self.below}" if size >= self.below else None


Count = Annotated[int, Bounds(least=1)]
Index = Annotated[int, Bounds(least=0)]
Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, Bounds(least=0)]
Share = Annotated[float, Bounds(least=0, below=1)]
Text = Annotated[str, Bounds(least=1)]
Texts = Annotated[list[Text], Bounds(least=1)]
LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(kw_only=True)
class TargetConfig:
    model: Text
    """Hub id, local folder, ``.gguf`` file, or ``package:NAME/FILE`` for weights inside an installed Python package."""
    revision: Text | None = None
    """Commit or tag on the hub. Null: the newest; the run's own config.yaml records which one that was."""
    config: Text | None = None
    """The target's config.json, for ``--dry-run`` and for checks where the weights are not at hand."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the frozen target. float32 turns the drafter's autocast off too."""
    context_layers: Annotated[list[Index], Bounds(least=1)] | None = None
    """Decoder layers whose *output* feeds ``fc`` (``hidden_states[l + 1]``). Null: five, by the published drafters' formula."""
    label_layer: Literal["final"] | Index = "final"
    """Layer whose state, past the target's own final norm and head, makes the labels. Never a context layer."""


@dataclass(kw_only=True)
class PlacementConfig:
    target: Texts = field(default_factory=lambda: ["cuda:0"])
    """Devices that serve the target: ``cpu``, ``cuda:N``, or ``NODE/cuda:N`` over several machines."""
    gpus_per_replica: Count = 1
    """How many of them share one replica, its layers split. One: the most throughput, if the weights fit."""
    drafter: Texts = field(default_factory=lambda: ["cuda:0"])
    """Devices that train. The default is the target's one device: a single process that alternates."""
    max_restarts: Index = 3
    """How often a dead worker may restart the run from its last checkpoint before the run gives up."""
    ready_timeout_s: Positive = 1800.0
    """Until every replica has loaded: a 54 GB target from a cold network disk takes many minutes."""
    heartbeat_timeout_s: Positive = 600.0
    """Silence after which a replica counts as dead; the first compilation alone can take minutes."""
    max_sick_batches: Index = 0
    """Batches of unusable features (zero, constant, not finite) to skip before the run stops. None: they are a fault."""


@dataclass(kw_only=True)
class DrafterConfig:
    mask_token_id: Index
    """Unused row of the target's embedding that fills the slots to draft. The target is never resized for it."""
    num_hidden_layers: Count = 5
    """Depth of the published drafters."""
    block_size: Annotated[int, Bounds(least=2)] = 16
    """K: the anchor plus K - 1 drafted tokens. 16 as published."""
    layer_types: list[LayerType] | None = None
    """One per layer. Null: all full_attention."""
    sliding_window: Count | None = None
    """Tokens a sliding layer sees, the slot itself included; needed where ``layer_types`` has one."""
    num_attention_heads: Count | None = None
    """Null, here and in the next four: the target's own."""
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count | None = None
    rope_theta: Positive | None = None
    """Base of the rotary embedding, applied to the whole head whatever the target does."""
    init_from: Text | None = None
    """Drafter folder or hub id to start from. Null: random weights from the seed."""


@dataclass(kw_only=True)
class DataConfig:
    train: Texts
    """Conversations: ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` files, or ``hub:NAME[:SPLIT]``."""
    eval: list[Text] = field(default_factory=list)
    """Held-out prompts, in the same formats. Empty: no evaluation, and no best checkpoint either."""
    features: Text | None = None
    """Folder to capture context features and labels into once, before step 1, and to read in every epoch. Null: computed
    anew each time. Pays for many epochs over few tokens: it holds ``L * D`` numbers per token."""
    cache_dir: Text | None = None
    """Where tokenised data is kept between runs. Null: ``~/.cache/dflash``."""
    max_length: Annotated[int, Bounds(least=2)] = 4096
    """Longer conversations are cut here, tokens."""
    length_buckets: Count = 6
    """Batches are made of sequences of similar length, for little padding on the target's side."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the chat template. Thinking mode must be the same here and in use."""


@dataclass(kw_only=True)
class TrainConfig:
    epochs: Count = 6
    """As in the DFlash paper (arXiv 2602.06036)."""
    learning_rate: Positive = 6.0e-4
    """Peak, as in the paper."""
    warmup_ratio: Share = 0.04
    """Linear warm-up, as a share of all optimizer steps."""
    schedule: Literal["cosine"] = "cosine"
    """From the peak down to 0 at the last step."""
    betas: Annotated[list[Share], Bounds(least=2, below=3)] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW. A shorter second moment than 0.999 follows the fast early phase."""
    weight_decay: NotNegative = 0.0
    """None: every run here is shorter than what decay would need to matter."""
    max_grad_norm: Positive = 1.0
    """Clip of the global gradient norm, as in the paper."""
    grad_accumulation: Count = 4
    """Batches per optimizer step, over all drafter processes together."""
    tokens_per_batch: Count = 16384
    """Token budget of a batch: whole sequences whose lengths sum to at most this."""
    anchors_per_batch: Count = 512
    """Blocks trained per batch, shared among its sequences; with the token budget the knob that balances target and drafter."""
    gamma: Positive | None = None
    """Decay of the loss weight over a block, ``exp(-(k - 1) / gamma)``. Null: :func:`default_gamma` of the block size."""


@dataclass(kw_only=True)
class NoiseConfig:
    start: NotNegative = 0.0
    """Standard deviation of noise on the context features at step 0, in units of their RMS. Zero is exactly none."""
    end: NotNegative = 0.0
    """The same at the last step; linear between."""


@dataclass(kw_only=True)
class LogConfig:
    every: Count = 1
    """Optimizer steps per line of metrics.jsonl."""
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Besides metrics.jsonl, which is always written."""
    alert_window: Count = 2500
    """Steps without a better rolling average before the run says so."""


@dataclass(kw_only=True)
class CheckpointConfig:
    every: Count = 500
    """Optimizer steps."""
    keep_last: Count = 3
    """Older ones are deleted. Each holds fp32 weights and both moments: 12 bytes per parameter."""
    keep_best: bool = True
    """Keep the one of the best evaluation besides."""


@dataclass(kw_only=True)
class EvalConfig:
    every: Count = 2000
    """Optimizer steps; the last step is always evaluated."""
    samples: Count = 256
    """Held-out prompts at most."""
    max_new_tokens: Count = 128
    """Length of the target's greedy answers, which are generated once per run."""
    batch_size: Count = 32
    """Answers generated at once."""


@dataclass(kw_only=True)
class Config:
    run_dir: Text
    """Folder of the run; one that already holds a run is refused."""
    seed: Index = 0
    """Of weights, batch plan, anchors and noise."""
    target: TargetConfig
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    drafter: DrafterConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


def default_gamma(block_size: int) -> float:
    """Decay constant for a block size: the paper's 4, 5 and 7 at K = 8, 10 and 16, and the straight lines through them."""
    return min(block_size / 2, (block_size + 5) / 3)


# --- reading -----------------------------------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: Sequence[str] = (), check_files: bool = True) -> Config:
    """Read and check a config file.

    A relative path of an input (data, target, ...) that does not exist from the working directory is looked for beside the
    config file; what was found is made absolute, so that a resume may run from elsewhere.

    Args:
        path: the YAML file.
        overrides: ``train.learning_rate=3e-4``, values in YAML; they replace what the file says before anything is checked.
        check_files: also refuse missing input files.

    Raises:
        ConfigError: listing every problem of the file and the overrides.
    """
    try:
        tree, problems = yaml12.load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"config file {path} does not exist"]) from None
    except (yaml12.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"config file {path} cannot be read as YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"config file {path} must hold keys ({', '.join(f.name for f in fields(Config))}), not {tree!r}"])
    for text in overrides:
        problems += _apply_override(tree, text)

    faulty: set[str] = set()

    def report(key: str, problem: str) -> None:
        faulty.add(key)
        problems.append(f"{key} {problem}")

    config: Config = _build(Config, tree, "", report)
    # A rule over several keys says something only where each of them is sound by itself.
    problems += [text for keys, rule in _RULES if not faulty & set(keys) and (text := rule(*(_get(config, k) for k in keys)))]
    missing = _locate_inputs(config, Path(path).parent, faulty)
    if check_files:
        problems += missing
    if problems:
        raise ConfigError(problems)
    return config


def missing_files(config: Config) -> list[str]:
    """One sentence per input file that is named but not there."""
    return _locate_inputs(config, Path.cwd(), set())


def _apply_override(tree: dict[str, Any], text: str) -> list[str]:
    key, equals, value_text = text.partition("=")
    if not equals or not key:
        return [f"override {text!r} must read key=value, as in train.learning_rate=3e-4"]
    try:
        value, problems = yaml12.load(value_text)
    except yaml12.YAMLError:
        return [f"override {text!r} has a value that is no YAML; quote it"]
    *parents, name = key.split(".")
    node: Any = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            return [f"override {text!r} names a key inside {parent}, which holds {node!r} and has none"]
    if not parents and name in _SECTIONS:
        return [f"override {text!r} must name one key of the section, as in {name}.{fields(_SECTIONS[name])[0].name}=..."]
    node[name] = value
    return problems


def _build(kind: Any, tree: Mapping[Any, Any], prefix: str, report: Callable[[str, str], None]) -> Any:
    """An instance of the dataclass ``kind`` from ``tree``; a faulty value is reported and its default stands in."""
    hints = get_type_hints(kind, include_extras=True)
    for key in tree.keys() - hints.keys():
        report(f"{prefix}{key}", f"is no key of the config{_suggestion(prefix, str(key), hints)}")
    values: dict[str, Any] = {}
    for f in fields(kind):
        key, hint = prefix + f.name, hints[f.name]
        if is_dataclass(hint):
            section = tree.get(f.name)
            if section is not None and not isinstance(section, dict):
                report(key, f"is {section!r}; it must hold keys ({', '.join(x.name for x in fields(hint))})")
                section = None
            values[f.name] = _build(hint, section or {}, key + ".", report)
        elif f.name in tree:
            try:
                values[f.name] = _read(hint, tree[f.name])
                continue
            except _Unfit as unfit:
                report(key + unfit.where, str(unfit))
                report_as_faulty(report, key, unfit)
        elif f.default is MISSING and f.default_factory is MISSING:
            report(key, f"is missing: {_first_sentence(kind, f.name)}")
    return values
