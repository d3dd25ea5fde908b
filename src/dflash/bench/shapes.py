"""The shapes that benchmarks run at, and the model FLOPs of a drafter step.

Shape letters: N blocks, K block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash.model import DFlashConfig

H200_PEAK = 790e12
"""FLOP/s of an 8192 x 8192 x 8192 bf16 product, measured on an H200: the ceiling that MFU is a share of."""


@dataclass(frozen=True)
class Shape:
    """A target's sizes as far as a drafter's step sees them, and the drafter's own."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    target_layers: int
    context_layers: tuple[int, ...]
    sliding_layers: int
    """How many of the drafter's layers slide; they come first."""
    layers: int = 5
    block_size: int = 16
    window: int = 2048

    def drafter_config(self) -> DFlashConfig:
        kinds = ["sliding_attention"] * self.sliding_layers + ["full_attention"] * (self.layers - self.sliding_layers)
        return DFlashConfig(
            block_size=self.block_size, mask_token_id=self.vocab_size - 1, target_layer_ids=list(self.context_layers),
            num_target_layers=self.target_layers, vocab_size=self.vocab_size, hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, head_dim=self.head_dim, layer_types=kinds, sliding_window=self.window,
            rope_parameters={"rope_type": "default", "rope_theta": 1e7}, tie_word_embeddings=False,
        )  # fmt: skip


SHAPES = {
    "qwen27b": Shape(248_320, 5120, 17_408, 32, 8, 128, 64, (1, 16, 31, 46, 61), sliding_layers=4),
    "smollm2": Shape(49_152, 576, 1536, 9, 3, 64, 30, (1, 8, 14, 20, 27), sliding_layers=0),
    "tiny": Shape(512, 64, 128, 4, 2, 16, 8, (1, 3, 5), sliding_layers=1, layers=2, window=64),
}


def target_config(name: str, layers: int | None = None) -> Any:
    """The target's transformers config, for random weights of its shape.

    Args:
        layers: cut to so many decoder layers, which keeps the rate per layer; None: all.
    """
    from transformers import LlamaConfig
    from transformers.models.qwen3_5 import Qwen3_5TextConfig

    s = SHAPES[name]
    sizes: dict[str, Any] = {
        "vocab_size": s.vocab_size, "hidden_size": s.hidden_size, "intermediate_size": s.intermediate_size,
        "num_hidden_layers": layers or s.target_layers, "max_position_embeddings": 262_144,
    }  # fmt: skip
    if name == "smollm2":
        return LlamaConfig(
            **sizes, num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, tie_word_embeddings=True
        )
    heads = (24, 4, 256, 16, 48, 128) if name == "qwen27b" else (4, 2, 16, 2, 4, 16)
    keys = ("num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads")
    width = heads[-1]
    return Qwen3_5TextConfig(
        **sizes, **dict(zip(keys, heads, strict=False)), linear_key_head_dim=width, linear_value_head_dim=width,
        linear_conv_kernel_dim=4, full_attention_interval=4, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10] if name == "qwen27b" else [1, 1, 0], "mrope_interleaved": True,
        },
    )  # fmt: skip


def capture_flops(config: Any, length: int, products: int) -> float:
    """Model FLOPs of one document through the target and its head, labels at every position.

    Args:
        config: of the target.
        products: parameters of matrix products, the head's included.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    full = kinds.count("full_attention") * config.num_attention_heads * head_dim * length * (length + 1) / 2
    linear = 0.0
    if "linear_attention" in kinds:  # a state of keys by values per head: decayed, read, written and read again
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        linear = kinds.count("linear_attention") * length * 3 * state
    return 2.0 * (length * products + 2 * full + linear)


def step_flops(config: Any, tokens: int, anchor_pos_N: np.ndarray, counted_slots: int) -> float:
    """Model FLOPs of one drafter step: what the mathematics needs, recomputation and padding not counted.

    A product in a trained layer counts three times (forward, input gradient, weight gradient), ``fc`` twice (its input
    is data), the frozen head twice (it has no weight gradient), attention over visible pairs three times.

    Args:
        config: of the drafter.
        tokens: context tokens that ``fc`` reads.
        anchor_pos_N: position of each block's anchor in its sequence.
        counted_slots: slots that meet the head.
    """
    width, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    queries = config.num_attention_heads * config.head_dim
    slots = len(anchor_pos_N) * config.block_size
    per_slot = 2 * width * queries + 2 * width * kv + 3 * width * config.intermediate_size
    products = 3 * config.num_hidden_layers * (slots * per_slot + tokens * 2 * width * kv)
    products += 2 * tokens * len(config.target_layer_ids) * width**2
    products += 2 * counted_slots * config.vocab_size * width
    pairs = sum(visible_pairs(config, kind, anchor_pos_N) for kind in config.layer_types)
    return 2.0 * (products + 3 * 2 * queries * pairs)


def visible_pairs(config: Any, kind: str, anchor_pos_N: np.ndarray) -> int:
    """Pairs of a slot and a key it may see in one layer, over all blocks."""
    anchor = anchor_pos_N[:, None].astype(np.int64)
    slot = np.arange(config.block_size)[None]
    if kind == "full_attention":
        return int((anchor + config.block_size + 0 * slot).sum())
    first = np.maximum(anchor + slot - config.sliding_window + 1, 0)
    return int((np.maximum(anchor - first, 0) + slot + 1).sum())
