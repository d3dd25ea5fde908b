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
