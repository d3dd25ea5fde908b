"""What a config takes from its target: nulls filled in, and everything that does not fit refused at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash.config import Config, ConfigError, DrafterConfig
from dflash.config_rules import head_dim_is_even, heads_share_evenly


def text_config(target_config: Any) -> Any:
    """The language model's part of a target's config, itself an object with attributes or a dict."""
    return lookup(target_config, "text_config") or target_config


def lookup(target_config: Any, key: str) -> Any:
    """A value of a target's config, or None. Not through ``to_dict()``: older models map their own names to these."""
    return target_config.get(key) if isinstance(target_config, Mapping) else getattr(target_config, key, None)


def read_target_config(path: str | Path) -> dict[str, Any]:
    """The language model's part of a config.json.

    Raises:
        ConfigError: the file cannot be read or is no JSON object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"target.config {path} cannot be read as JSON: {error}"]) from None
    if not isinstance(content, dict):
        raise ConfigError([f"target.config {path} must hold a JSON object"])
    found: dict[str, Any] = text_config(content)
    return found


def default_context_layers(num_layers: int, label_layer: int, count: int = 5) -> list[int]:
    """The published drafters' formula: from layer 1 to the third last, evenly; fewer where the target is shallow."""
    count = min(count, num_layers - 3)
    if count < 2:
        spread = [min(num_layers // 2, num_layers - 2)]
    else:
        spread = [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
    return [layer for layer in spread if layer >= 0 and layer != label_layer]


def resolve(config: Config, target_config: Any) -> Config:
    """A copy without nulls to derive: context layers, the drafter's shape and cache folder are filled in.

    Args:
        target_config: the target's config, a transformers object or a dict.

    Raises:
        ConfigError: listing everything that does not fit this target.
    """
    known = text_config(target_config)
    needed = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    if absent := [key for key in needed if not lookup(known, key)]:
        raise ConfigError(
            [f"target.model {config.target.model} has no {', '.join(absent)} in its config; use a decoder"]
        )
    depth, chosen = lookup(known, "num_hidden_layers"), config.target.label_layer
    label = depth - 1 if chosen == "final" else int(chosen)
    layers = config.target.context_layers
    if layers is None:
        layers = default_context_layers(depth, label)
    shape = _drafter_shape(config.drafter, known)
    problems = _misfits(config, known, layers, label)
    problems += [
        f"drafter.{k} is null and the target has none to take over; set it" for k, v in shape.items() if v is None
    ]
    uneven = heads_share_evenly(shape["num_attention_heads"], shape["num_key_value_heads"])
    problems += filter(None, (uneven, head_dim_is_even(shape["head_dim"])))
    if problems:
        raise ConfigError(problems)
    return replace(
        config,
        target=replace(config.target, context_layers=layers),
        drafter=replace(config.drafter, **shape),
        # Absolute, so that a resume from elsewhere finds them.
        data=replace(
            config.data,
            cache_dir=_absolute(config.data.cache_dir or "~/.cache/dflash"),
            features=config.data.features and _absolute(config.data.features),
        ),
        run_dir=str(Path(config.run_dir).expanduser()),
    )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _drafter_shape(d: DrafterConfig, known: Any) -> dict[str, Any]:
    """What the drafter's section leaves open, from the target; None where that has nothing either."""
    target_heads = lookup(known, "num_attention_heads")
    heads = d.num_attention_heads or target_heads
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": d.num_key_value_heads or lookup(known, "num_key_value_heads") or heads,
        "head_dim": d.head_dim or lookup(known, "head_dim") or lookup(known, "hidden_size") // target_heads,
        "intermediate_size": d.intermediate_size or lookup(known, "intermediate_size"),
        "rope_theta": d.rope_theta or _rope_theta(known),
        "layer_types": d.layer_types or ["full_attention"] * d.num_hidden_layers,
    }


def _misfits(config: Config, known: Any, layers: list[int], label: int) -> list[str]:
    """What this target cannot provide."""
    problems = []
    t, mask, length = config.target, config.drafter.mask_token_id, config.data.max_length
    depth, vocabulary = lookup(known, "num_hidden_layers"), lookup(known, "vocab_size")
    if label >= depth:
        problems.append(f"target.label_layer is {label}; the target's layers are 0 to {depth - 1}")
    if beyond := [layer for layer in layers if layer >= depth]:
        problems.append(f"target.context_layers has {beyond}; the target's layers are 0 to {depth - 1}")
    if label in layers:
        problems.append(
            f"target.context_layers lists {label}, which is target.label_layer {t.label_layer} of this target; "
            "fc must never see the layer that makes the labels: remove it from the list"
        )
    if not layers:
        problems.append(f"target.context_layers is empty; of {depth} layers none is left beside the label layer")
    if mask >= vocabulary:
        problems.append(f"drafter.mask_token_id is {mask}; the target's vocabulary ends at {vocabulary - 1}")
    longest = lookup(known, "max_position_embeddings")
    if longest and length > longest:
        problems.append(f"data.max_length is {length}; the target reads at most {longest} tokens")
    return problems


def _rope_theta(known: Any) -> float | None:
    """Of the full-attention layers: transformers 5 has it in ``rope_parameters``, by layer type where they differ."""
    parameters = lookup(known, "rope_parameters") or {}
    theta = parameters.get("full_attention", parameters).get("rope_theta") or lookup(known, "rope_theta")
    return None if theta is None else float(theta)
