"""Tiny random targets and a tokenizer for them, built in well under a second and shared by all tests.

Every norm weight and bias is random, so that a norm left out, applied twice or read with the wrong convention shows.
Vocabulary (192 ids): 0 ``<unk>``, 1 ``<|im_start|>``, 2 ``<|im_end|>`` (end of turn), 3 ``<pad>``, 4 unused,
5 ``<mask>``, 6 to 9 unused, then printable ASCII and a few words.
"""

from __future__ import annotations

import string
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

VOCAB = 192
EOS, PAD, MASK = 2, 3, 5
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>", "<pad>", "<extra_4>", "<mask>", *(f"<extra_{i}>" for i in "6789")]
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512, bos_token_id=1, eos_token_id=EOS, pad_token_id=PAD,
    tie_word_embeddings=False,
)  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def randomise(module: PreTrainedModel, seed: int) -> Any:
    """Weights that tell positions and layers apart: unit-gain matrices, norms and biases off their neutral value."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            drawn = torch.randn(p.shape, generator=g)
            if "A_log" in name:  # decay of the linear layers: its range matters
                p.copy_(torch.rand(p.shape, generator=g) * 2 - 1)
            elif "embed" in name:
                p.copy_(drawn)
            elif p.ndim == 1:  # norms start at 1, or at 0 where the factor is (1 + w)
                p.add_(drawn.clamp(-2, 2) * 0.25)
            else:
                p.copy_(drawn * p[0].numel() ** -0.5)
    return module.float().eval()


def tiny_llama(seed: int = 0, **over: Any) -> LlamaForCausalLM:
    """Dense, biases everywhere a Llama can have them."""
    return randomise(LlamaForCausalLM(LlamaConfig(**(SHAPE | dict(attention_bias=True, mlp_bias=True) | over))), seed)


def tiny_qwen3(seed: int = 0, **over: Any) -> Qwen3ForCausalLM:
    """Dense, with query and key norms."""
    return randomise(Qwen3ForCausalLM(Qwen3Config(**(SHAPE | over))), seed)


def qwen35_config(**over: Any) -> Qwen3_5TextConfig:
    """Five layers, the fourth full attention, the rest gated delta rule; partial interleaved rotary; (1 + w) norms."""
    shape: dict[str, Any] = SHAPE | dict(
        num_hidden_layers=5, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_conv_kernel_dim=4,
        rope_parameters=dict(
            rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25, mrope_section=[2, 1, 1],
            mrope_interleaved=True,
        ),
    )  # fmt: skip
    return Qwen3_5TextConfig(**(shape | over))


def tiny_qwen35(seed: int = 0, **over: Any) -> Qwen3_5ForCausalLM:
    """Hybrid: see :func:`qwen35_config`."""
    return randomise(Qwen3_5ForCausalLM(qwen35_config(**over)), seed)


def tiny_gemma2(seed: int = 0, **over: Any) -> Gemma2ForCausalLM:
    """Scaled embeddings, (1 + w) norms, sliding layers, tied head, capped logits."""
    shape = SHAPE | dict(tie_word_embeddings=True, sliding_window=8, query_pre_attn_scalar=8)
    module = randomise(Gemma2ForCausalLM(Gemma2Config(**(shape | over))), seed)
    with torch.no_grad():
        module.get_input_embeddings().weight.mul_(module.config.hidden_size**-0.5)  # the model multiplies it back
    return module


def tiny_phi(seed: int = 0, **over: Any) -> PhiForCausalLM:
    """LayerNorm called ``final_layernorm`` and a head with a bias."""
    return randomise(PhiForCausalLM(PhiConfig(**({k: v for k, v in SHAPE.items() if k != "head_dim"} | over))), seed)


@cache
def _bpe(vocab: int) -> str:
    text = "one two three four five six seven eight nine ten user assistant system the sum of and is"
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = [c for c in string.printable if c.isprintable() and c != " "] + ["Ġ", "Ċ", "ĉ"]
    bpe.train_from_iterator(
        [text, " " + text] * 4,
        trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    fill = vocab - bpe.get_vocab_size()
    bpe.add_special_tokens([AddedToken(f"<fill_{i}>", special=True) for i in range(fill)])
    return bpe.to_str()


def tiny_tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Byte-pair tokenizer of exactly ``vocab`` ids with a ChatML template that has no generation tags."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bpe(vocab)),
        unk_token="<unk>", eos_token="<|im_end|>", pad_token="<pad>", mask_token="<mask>",
        additional_special_tokens=["<|im_start|>"], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHATML
    return tokenizer


def save_target(folder: Path, module: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """Write a model folder as the hub has it: config, safetensors, generation config, tokenizer."""
    module.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder
