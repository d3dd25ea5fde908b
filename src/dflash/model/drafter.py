"""The drafter: a few Qwen3-style layers whose keys and values come from the target's hidden states and the block.

Tensor names, shapes and config are those of the published DFlash drafters (arXiv 2602.06036), so ``save_pretrained``
writes a folder that serving engines load. Embedding and head are the target's; the drafter has neither.

Shape letters: B batch, S context tokens, Q block slots, D hidden size, H heads, L context layers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash.model.config import DFlashConfig
from dflash.model.mask import decoding_mask

Mask = Tensor | BlockMask | None


@cache
def _flex(on_gpu: bool) -> Any:
    """Uncompiled flex attention materialises the full score matrix."""
    return torch.compile(flex_attention) if on_gpu else flex_attention


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Grouped-query attention of [B, H, Q, d] over [B, H_kv, S + Q, d]; the mask's type picks the backend."""
    if isinstance(mask, BlockMask):
        flex = flex_attention if torch.compiler.is_compiling() else _flex(query.is_cuda)
        # Heads repeated, not grouped: the backward kernel walks all queries of a tile of keys in one program, and four
        # times as many programs share the work better (4.5 -> 3.6 ms a layer on an H200).
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        return flex(query, key, value, block_mask=mask)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


class DFlashRMSNorm(nn.Module):
    """RMSNorm in fp32 that returns its input's dtype, whatever the weight's: fp32 masters must not widen the stream."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class RotaryTables:
    """cos and sin in fp32, always: rounded to bf16 they change the output by 12 % at long range.

    No module and no buffer, so that ``drafter.to(torch.bfloat16)`` cannot round the frequencies.
    """

    def __init__(self, config: DFlashConfig) -> None:
        rope = config.rope_parameters
        if rope.get("rope_type", "default") == "default":
            dim = config.head_dim
            exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
            self.inv_freq, self.scale = 1.0 / (rope["rope_theta"] ** exponent), 1.0
        else:
            with torch.device("cpu"):  # a drafter made on the meta device needs its frequencies all the same
                self.inv_freq, self.scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))

    def __call__(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [B, 1, positions, head_dim] each, broadcast over heads."""
        if self.inv_freq.device != position_ids.device:
            self.inv_freq = self.inv_freq.to(position_ids.device)
        angle = position_ids[:, None, :, None].float() * self.inv_freq
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos() * self.scale, angle.sin() * self.scale


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class DFlashAttention(nn.Module):
    """Queries from the block; keys and values from the context, then the block."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=bias)
        self.q_norm = DFlashRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], mask: Mask, padding: Tensor | None, cache: Any
    ) -> Tensor:
        slots = x.shape[1]
        cos, sin = rope

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.head_dim))

        query = self.q_norm(heads(self.q_proj(x))).transpose(1, 2)
        key = torch.cat([heads(self.k_proj(context)), heads(self.k_proj(x))], dim=1)
        key = self.k_norm(key).transpose(1, 2)
        value = torch.cat([heads(self.v_proj(context)), heads(self.v_proj(x))], dim=1).transpose(1, 2)
        query = _rotate(query, cos[:, :, -slots:], sin[:, :, -slots:])
        key = _rotate(key, cos, sin)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if mask is None:
            mask = decoding_mask(slots, key.shape[2], self.window, padding, x.device)
        return self.o_proj(_attend(query, key, value, mask).transpose(1, 2).flatten(2))


class DFlashMLP(nn.Module):
    """Gated SiLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DFlashDecoderLayer(nn.Module):
    """Pre-norm attention and MLP. The context is not normalised again: ``hidden_norm`` did it once for all layers."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = 0.0
        """Of what attention and MLP add, in training; set by who trains, and no part of the published config."""

    def forward(
        self, x: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], mask: Mask, padding: Tensor | None, cache: Any
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), context, rope, mask, padding, cache)
        x = x + F.dropout(attended, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


class DFlashDraftModel(PreTrainedModel):
    """Block-diffusion drafter.

    ``forward`` takes the names that transformers' own DFlash decoding passes, so the object is an ``assistant_model``:
    ``target.generate(..., assistant_model=drafter, speculation_type="dflash")`` (transformers >= 5.24).
    """

    config_class = DFlashConfig
    config: DFlashConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    _no_split_modules = ["DFlashDecoderLayer"]  # noqa: RUF012 - the library reads this name off the class
    _supports_sdpa = True
    _supports_flex_attn = True

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config.require())
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryTables(config)
        self.post_init()

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: dict[str, Any] | Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Final-normed hidden states of the block slots, ready for the target's head.

        Args:
            noise_embeds: [B, Q, D] target embeddings of the blocks (anchor, mask, mask, ...), N blocks end to end in
                training, one block in decoding.
            context_hidden_states: [B, S, L*D] context features, in the order of ``target_layer_ids``. With a cache:
                only those not in it yet.
            position_ids: [B, S + Q] positions of the context, then of the slots. None: contiguous.
            attention_mask: in training a mask per layer type (:func:`dflash.model.mask.attention_masks`). Else a 0/1
                mask [B, keys] or None: one block per row, at the end of contiguous positions.
            cache: transformers' ``DFlashCache`` or None; holds keys and values, and is cropped by its owner.
        """
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            length = context_hidden_states.shape[1] + noise_embeds.shape[1]
            position_ids = torch.arange(seen, seen + length, device=noise_embeds.device)[None]
        masks = attention_mask if isinstance(attention_mask, dict) else {}
        padding = None if isinstance(attention_mask, dict) else attention_mask
        # Under autocast the embeddings' dtype carries the residual stream; else the weights' does, and nothing is
        # mixed.
        autocast = torch.is_autocast_enabled(noise_embeds.device.type)
        dtype = noise_embeds.dtype if autocast else self.fc.weight.dtype
        context = self.hidden_norm(self.fc(context_hidden_states.to(dtype)))
        rope = self.rotary(position_ids)
        x = noise_embeds.to(dtype)
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            x = layer(x, context, rope, masks.get(kind), padding, cache)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x).to(noise_embeds.dtype))
