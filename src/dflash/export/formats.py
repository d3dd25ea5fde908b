"""The config.json of a drafter in the two formats that engines read, both ways. No weights, no files.

``published``: what the z-lab drafters are, and what vLLM (``method: dflash``), SGLang and SpecForge load; also the
layout of our own checkpoints. Sliding layers are causal inside the block, full ones look both ways.
``speculators``: vLLM's library of that name. Layer ids are one higher, the layers' shape is nested, the target named.

What is written comes from a list of keys: whatever else a config holds (fields of a hybrid target, paths, defaults of a
library) stays behind.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from dflash.model import DFlashConfig
from dflash.model.config import DrafterError

SPECULATORS = ("speculators_model_type", "speculators_config", "transformer_layer_config")
"""Keys by which a config in the format of the speculators library is known."""
SPECULATORS_VERSION = "0.9.0"
LAYER_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "attention_dropout",
    "initializer_range", "max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling", "layer_types",
    "sliding_window", "use_sliding_window", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    "dtype",
)  # fmt: skip
"""The drafter's layers, in both formats."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
OTHER_DRAFTERS = {
    "projector_type": None, "shift_label": False, "pure_draft_prefix_len": 0, "attention_sink_bias": False,
    "attention_value_scale": None, "use_aux_hidden_state": True, "sample_from_anchor": False, "logit_scale": 1.0,
    "input_embedding_scale": None, "output_multiplier": None, "markov_rank": None,
    "conv_kernel_size": None, "selector_rank": None,
}  # fmt: skip
"""Keys of relatives of this drafter, with the value at which each of them changes nothing."""


def published_config(config: DFlashConfig, target_config: Any | None, dtype: str = "bfloat16") -> dict[str, Any]:
    """The config.json of the published layout.

    Every key an engine may look for in two places is written in both: ``rope_theta`` flat and in ``rope_parameters``,
    block size, mask token and layer ids at top level and in ``dflash_config``. ``dflash_config.causal``, which vLLM
    applies to all layers, is there only where all layers agree.

    Args:
        config: of the drafter.
        target_config: the target's text config; token ids, vocabulary size and depth are its. None: as the drafter has
            them.
        dtype: of the weights.

    Raises:
        DrafterError: the drafter does not belong to the target, or would be run by engines other than it was trained.
    """
    check_published(config.to_dict())
    layers = _layers(config, target_config) | {"dtype": dtype}
    depth = config.num_target_layers if target_config is None else target_config.num_hidden_layers
    common = {
        "block_size": config.block_size, "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids), "num_target_layers": depth,
    }  # fmt: skip
    nested = dict(common)
    if len({*config.layer_types}) == 1:
        nested["causal"] = config.layer_types[0] == "sliding_attention"
    return {"architectures": ["DFlashDraftModel"], **layers, **common, "dflash_config": nested}


def speculators_config(config: DFlashConfig, target_config: Any, target: str) -> dict[str, Any]:
    """The config.json of the speculators library, bf16.

    vLLM turns ``sliding_window_non_causal`` into one causality for *all* layers (the library itself applies it to
    sliding ones), so only drafters whose layers are all of one kind are run in this format as they were trained.

    Args:
        target: name of the target, which vLLM loads from it.

    Raises:
        DrafterError: as for :func:`published_config`, and for drafters that mix kinds of layers.
    """
    check_published(config.to_dict())
    kinds = {*config.layer_types}
    if len(kinds) > 1:
        raise DrafterError(
            "the drafter mixes sliding and full-attention layers, which vLLM would run all causal or all not in the "
            "speculators format: export it with --format published"
        )
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "speculator_model",
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            # The anchor is known: a block of K drafts K - 1 tokens.
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": {
                "name_or_path": target, "architectures": list(getattr(target_config, "architectures", None) or []),
            },
        },
        "transformer_layer_config": _layers(config, target_config),
        "draft_vocab_size": target_config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "num_target_layers": target_config.num_hidden_layers,  # of ours alone: others pass it over
        "sliding_window_non_causal": "sliding_attention" not in kinds,
        "sample_from_anchor": False,
        "dtype": "bfloat16",
    }  # fmt: skip


def is_speculators(raw: dict[str, Any]) -> bool:
    return any(key in raw for key in SPECULATORS)


def from_speculators(raw: dict[str, Any], context_width: int) -> dict[str, Any]:
    """A speculators config as one of the published layout.

    Args:
        raw: its config.json.
        context_width: columns of ``fc.weight``; tells whether the list of layers ends with the one for the labels, as
            the ids given to vLLM's data generation do.

    Raises:
        DrafterError: it describes another drafter than ours, or lacks a field.
    """
    written = raw.get("transformer_layer_config")
    if raw.get("speculators_model_type") != "dflash" or not isinstance(written, dict):
        raise DrafterError(
            f"speculators_model_type is {raw.get('speculators_model_type')!r}, with transformer_layer_config of type "
            f"{type(written).__name__}; only dflash drafters are read"
        )
    # The library leaves out what equals a default of the layers' own model type.
    kind = str(written.get("model_type", "qwen3"))
    layers = AutoConfig.for_model(kind, **{k: v for k, v in written.items() if k != "model_type"}).to_dict()
    ids, width = raw.get("aux_hidden_state_layer_ids"), layers.get("hidden_size")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 1 for i in ids):
        raise DrafterError(f"aux_hidden_state_layer_ids is {ids}; it must list layers, counted from 1")
    if type(width) is not int or width < 1 or context_width % width:
        raise DrafterError(f"hidden_size is {width}, but fc.weight reads {context_width} numbers; they must agree")
    if context_width // width == len(ids) - 1:
        ids = ids[:-1]
    if context_width // width != len(ids):
        raise DrafterError(
            f"fc.weight reads {context_width // width} layers, aux_hidden_state_layer_ids has {ids}; they must agree"
        )
    vocabulary = layers.get("vocab_size")
    if raw.get("draft_vocab_size", vocabulary) != vocabulary:
        raise DrafterError(
            f"draft_vocab_size is {raw['draft_vocab_size']} of {vocabulary}: drafters with a vocabulary of their own "
            "are not supported, only those that use the target's head"
        )
    kinds = set(layers.get("layer_types") or ())
    if "sliding_attention" in kinds and raw.get("sliding_window_non_causal", False):
        raise DrafterError(
            "sliding_window_non_causal is true with sliding layers: our sliding layers are causal inside the block, so "
            "this would be another drafter"
        )
    if raw.get("target_hidden_size") not in (None, width):
        raise DrafterError(
            f"target_hidden_size is {raw['target_hidden_size']}, hidden_size {width}; they must be equal"
        )
    out = {key: layers[key] for key in LAYER_KEYS if layers.get(key) is not None}
    out |= {key: raw.get(key) for key in ("block_size", "mask_token_id", "num_target_layers")}
    out |= {key: raw[key] for key in OTHER_DRAFTERS if key in raw}
    return out | {"target_layer_ids": [layer - 1 for layer in ids], "architectures": ["DFlashDraftModel"]}


def check_published(raw: dict[str, Any]) -> None:
    """Refuse a config of the published layout that describes another drafter than ours: what our code would ignore
    would be ignored in training, evaluation and every export.

    Raises:
        DrafterError: naming the key.
    """
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise DrafterError(f"dflash_config is {nested!r}; it must be an object")
    both = raw | nested
    for key, neutral in OTHER_DRAFTERS.items():
        if both.get(key, neutral) not in (neutral, None):
            raise DrafterError(f"{key} is {both[key]!r}: this is a relative of DFlash drafters that is not supported")
    layer_types = raw.get("layer_types") or ["full_attention"]
    causal = raw.get("is_causal") if raw.get("is_causal") is not None else nested.get("causal")
    trained = [kind == "sliding_attention" for kind in layer_types]
    if causal is not None and {*trained} != {bool(causal)}:
        raise DrafterError(
            f"causal is {causal} for all layers, which are {', '.join(sorted({*layer_types}))}: sliding layers are "
            "causal inside the block and full-attention ones are not, so this would be another drafter"
        )
    if nested.get("use_swa") and not any(trained):
        raise DrafterError("dflash_config.use_swa is set: name the sliding layers in layer_types instead")
    if nested.get("swa_window_size") not in (None, raw.get("sliding_window")):
        raise DrafterError(
            f"dflash_config.swa_window_size is {nested['swa_window_size']}, sliding_window "
            f"{raw.get('sliding_window')}; they must be equal"
        )
    for key in ("target_hidden_size", "draft_vocab_size"):
        own = raw.get("hidden_size" if key == "target_hidden_size" else "vocab_size")
        if both.get(key) not in (None, own):
            raise DrafterError(f"{key} is {both[key]}, the drafter's own {own}; they must be equal")
    _check_rope(raw)


def _check_rope(raw: dict[str, Any]) -> None:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise DrafterError("rope_parameters differ by kind of layer; one rotary embedding for all layers is supported")
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise DrafterError(f"partial_rotary_factor is {share}; drafters turn the whole head")
    flat, inside = raw.get("rope_theta"), rope.get("rope_theta")
    if flat is not None and inside is not None and flat != inside:
        raise DrafterError(f"rope_theta is {flat} at top level and {inside} in rope_parameters: keep one")


def _layers(config: DFlashConfig, target_config: Any | None) -> dict[str, Any]:
    """The drafter's layers from :data:`LAYER_KEYS`, bf16, with what belongs to the target taken from there."""
    if target_config is not None:
        _check_target(config, target_config)
    known = config.to_dict()
    rope = {key: value for key, value in (known.get("rope_parameters") or {}).items() if value is not None}
    plain_rope = rope.get("rope_type", "default") == "default"
    sliding = "sliding_attention" in config.layer_types
    known |= {
        "model_type": "qwen3",
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain_rope else rope,
        "sliding_window": config.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if target_config is not None:
        known |= {key: getattr(target_config, key, None) for key in TOKEN_IDS}
        # The training length is no limit, and engines clamp positions at a value that is too small. Scaled embeddings
        # are another matter: their frequencies follow from it.
        if plain_rope:
            known["max_position_embeddings"] = getattr(
                target_config, "max_position_embeddings", config.max_position_embeddings
            )
    return {key: known[key] for key in LAYER_KEYS if known.get(key) is not None or key in TOKEN_IDS}


def _check_target(config: DFlashConfig, target_config: Any) -> None:
    pairs = (
        ("vocab_size", config.vocab_size, target_config.vocab_size),
        ("hidden_size", config.hidden_size, target_config.hidden_size),
        ("num_target_layers", config.num_target_layers, target_config.num_hidden_layers),
    )
    for key, own, targets in pairs:
        if own is not None and own != targets:
            raise DrafterError(f"the drafter's {key} is {own}, the target's {targets}; give the drafter's own target")
    if beyond := [layer for layer in config.target_layer_ids if layer >= target_config.num_hidden_layers]:
        raise DrafterError(f"target_layer_ids has {beyond}; the target has {target_config.num_hidden_layers} layers")
    if not 0 <= config.mask_token_id < target_config.vocab_size:
        raise DrafterError(
            f"mask_token_id is {config.mask_token_id}; the target's vocabulary ends at {target_config.vocab_size - 1}"
        )
