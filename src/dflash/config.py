"""The YAML of a run as dataclasses: read, checked whole, written back.

Each default exists once, here, with its reason under it. Two phases, both reporting every problem they find at once:
:func:`load_config` checks what the file alone can tell, :func:`dflash.config_target.resolve` fills the nulls from the
target's config and checks against it. Neither imports torch: a wrong config is refused in a fraction of a second.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from dflash import strict_yaml
from dflash.config_rules import RULES
from dflash.strict_yaml import Bounds


class ConfigError(ValueError):
    """A config that cannot be run. ``problems`` holds one sentence per fault, each naming its key."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


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
    """Hub id, local folder, ``.gguf`` file, or ``package:NAME/FILE`` for weights inside an installed Python package.
    ``random:`` before one of them: drawn weights in its shape, to measure speed before a download."""
    revision: Text | None = None
    """Commit or tag on the hub. Null: the newest; the run's own config.yaml records which one that was."""
    config: Text | None = None
    """The target's config.json, for a ``--dry-run`` where its weights are not at hand."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the frozen target. float32 turns the drafter's autocast off too."""
    context_layers: Annotated[list[Index], Bounds(least=1)] | None = None
    """Layers whose *output* feeds ``fc`` (``hidden_states[l + 1]``). Null: :func:`default_context_layers`."""
    label_layer: Literal["final"] | Index = "final"
    """Layer whose state, past the target's own final norm and head, makes the labels. Never a context layer."""


@dataclass(kw_only=True)
class PlacementConfig:
    """Which devices do what (docs/placement.md). The last four keys concern runs of several processes."""

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
    """Batches of zero, constant or non-finite features to skip before the run stops. None: they are a fault."""


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
    """Folder to capture context features and labels into once, before step 1, and to read from in every epoch. Null:
    computed anew each time. Pays for many epochs over few tokens: it holds ``L * D`` numbers per token."""
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
    """From the peak down to what would be 0 one step after the last."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Muon learns more from a step and keeps half the moments (vectors stay with AdamW), but each of its steps costs a
    large drafter as much as some 3,000 tokens: for small ones, and for steps of many batches. Wants a higher
    learning_rate, 2e-3 or more."""
    betas: Annotated[list[Share], Bounds(least=2, below=3)] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW. A shorter second moment than 0.999 follows the fast early phase."""
    weight_decay: NotNegative = 0.0
    """Share of a weight lost each step, times the learning rate; with Muon of matrices only. For few data passed many
    times (docs/recipe.md), where Muon wants 1 to 3."""
    dropout: Share = 0.0
    """Share of what attention and MLP of a drafter layer add that a step leaves out. For few data passed many times."""
    max_grad_norm: Positive = 1.0
    """Clip of the global gradient norm, as in the paper."""
    grad_accumulation: Count = 4
    """Batches per optimizer step, over all drafter processes together."""
    tokens_per_batch: Count = 16384
    """Token budget of a batch: whole sequences whose lengths sum to at most this."""
    anchors_per_batch: Count = 512
    """Blocks trained per batch, shared among its sequences. They cost the drafter alone: the knob to balance both."""


@dataclass(kw_only=True)
class NoiseConfig:
    start: NotNegative = 0.0
    """Standard deviation of noise on the context features at step 1, in units of their RMS. Zero is exactly none."""
    end: NotNegative = 0.0
    """The same at the last step; linear between."""


@dataclass(kw_only=True)
class LogConfig:
    every: Count = 1
    """Optimizer steps from one line of metrics.jsonl to the next; each line is its own step's."""
    alert_window: Annotated[int, Bounds(least=100)] = 2500
    """Lines over which, and over twice which, training tests itself for a regression or a plateau. The default sees a
    loss of .001 accuracy per 1,000 steps; fewer see coarser ones sooner; under 100 it would be guesswork."""
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Where else the figures go. None: metrics.jsonl and ``dflash report`` need no package and no account."""


@dataclass(kw_only=True)
class CheckpointConfig:
    every: Count = 500
    """Optimizer steps."""
    keep_last: Count = 3
    """Older ones are deleted. Each holds fp32 weights and moments: 12 bytes per parameter, 8 with Muon."""
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


# --- reading ----------------------------------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: Sequence[str] = (), check_files: bool = True) -> Config:
    """Read and check a config file.

    An input's relative path is looked for in the working directory, then beside the config file; what was found is made
    absolute, so that a resume may run from elsewhere.

    Args:
        path: the YAML file.
        overrides: ``train.learning_rate=3e-4``, values in YAML; applied before anything is checked.
        check_files: also refuse missing input files.

    Raises:
        ConfigError: listing every problem of the file and the overrides.
    """
    try:
        tree, problems = strict_yaml.load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"config file {path} does not exist"]) from None
    except (OSError, UnicodeDecodeError, strict_yaml.YAMLError) as error:
        raise ConfigError([f"config file {path} cannot be read as YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"config file {path} must hold keys: {', '.join(f.name for f in fields(Config))}"])
    for text in overrides:
        problems += _apply_override(tree, text)

    faulty: set[str] = set()

    def report(key: str, problem: str) -> None:
        faulty.add(key.partition("[")[0])
        problems.append(f"{key} {problem}")

    config: Config = strict_yaml.build(Config, tree, strict_yaml.key_paths(Config), report)
    missing = _locate_inputs(config, Path(path).parent, faulty)
    for keys, rule in RULES:
        if not faulty & set(keys) and (problem := rule(*(_get(config, key) for key in keys))):
            problems.append(problem)
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
        value, problems = strict_yaml.load(value_text)
    except strict_yaml.YAMLError:
        return [f"override {text!r} has a value that is no YAML; quote it"]
    *parents, name = key.split(".")
    node: Any = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            return [f"override {text!r} names a key inside {parent}, which holds {node!r} and has none"]
    inside = [path for path in strict_yaml.key_paths(Config) if path.startswith(key + ".")]
    if inside:
        return [f"override {text!r} must name one key of the section, as in {inside[0]}=..."]
    node[name] = value
    return problems


def _locate_inputs(config: Config, folder: Path, faulty: set[str]) -> list[str]:
    """Make the paths of inputs absolute, looking beside the config file too; returns what was not found anywhere."""
    problems = []

    def locate(key: str, path: str) -> str:
        if path.startswith(("hub:", "package:")):
            return path
        if key == "target.model" and path.startswith("random:"):
            return "random:" + locate(key, path.removeprefix("random:"))
        for candidate in (Path(path).expanduser(), folder / path):
            if candidate.exists():
                return os.path.abspath(candidate)
        # What is no file may still name a model on the hub.
        if key in _FILES or path.startswith(("/", ".", "~")) or path.endswith(".gguf"):
            problems.append(f"{key} names {path}, which is neither in the working directory nor beside the config file")
        return path

    for key in (*_FILES, "target.model", "drafter.init_from"):
        section, name = key.split(".")
        value = _get(config, key)
        if value and key not in faulty:
            found = [locate(key, path) for path in value] if isinstance(value, list) else locate(key, value)
            setattr(getattr(config, section), name, found)
    return problems


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


_FILES = ("data.train", "data.eval", "target.config")


# --- writing ----------------------------------------------------------------------------------------------------------


def to_dict(config: Config) -> dict[str, Any]:
    """Plain values, section by section, in the order of the dataclasses."""
    return asdict(config)


def dump_yaml(config: Config, path: str | Path, header_comment: str = "") -> None:
    """Write a file that :func:`load_config` reads back as an equal config."""
    header = "".join(f"# {line}\n" for line in header_comment.splitlines())
    Path(path).write_text(header + strict_yaml.dump(to_dict(config)), encoding="utf-8")
