"""The same work done by peers, on the same device in the same run. Measured against, never depended on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dflash.bench.shapes import Shape


class PeerError(RuntimeError):
    """The peer cannot be run here."""


def specforge_step(
    shape: Shape, tokens: int, anchors: int, prompt: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], Any]:
    """One optimizer step of SpecForge's DFlash trainer as a function, over a synthetic document as ours.

    Its own model, loss and optimizer; its trainer's loop, FSDP and data plane are left out, which is in its favour.
    Weights and compute are in ``dtype``, as its model provider casts them.

    Args:
        prompt: tokens at the front that are not supervised.

    Raises:
        PeerError: it is not installed.
    """
    require("specforge")
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.optimizer import BF16Optimizer

    config = shape.drafter_config()
    config._attn_implementation = "flex_attention" if device.type == "cuda" else "sdpa"
    torch.manual_seed(0)
    with torch.device(device):
        drafter = DFlashDraftModel(config)
        embed = nn.Embedding(shape.vocab_size, shape.hidden_size, dtype=dtype)
        head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, dtype=dtype)
    for module in (embed, head):
        module.weight.requires_grad_(False).normal_(std=0.02)
    model = OnlineDFlashModel(
        draft_model=drafter, target_lm_head=head, target_embed_tokens=embed,
        mask_token_id=config.mask_token_id, block_size=shape.block_size,
        attention_backend=config._attn_implementation, num_anchors=anchors, loss_decay_gamma=7.0,
        objective_chunk_blocks=128, loss_type="dflash",
    )  # fmt: skip
    model = model.to(device=device, dtype=dtype).train()
    optimizer = BF16Optimizer(drafter, lr=6e-4, max_grad_norm=1.0, total_steps=1000, warmup_ratio=0.04)
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(0, shape.vocab_size - 1, (1, tokens), generator=generator, device=device)
    width = len(shape.context_layers) * shape.hidden_size
    features = torch.randn(1, tokens, width, generator=generator, device=device, dtype=dtype)
    mask = torch.ones_like(ids)
    mask[:, :prompt] = 0

    def step() -> None:
        _, _, metrics = model(input_ids=ids, hidden_states=features, loss_mask=mask)
        numerator, weight = metrics["loss_terms"]
        numerator.backward()
        for parameter in drafter.parameters():
            parameter.grad.mul_(1.0 / weight)
        optimizer.step()

    return step


def require(name: str) -> None:
    """Refuse before anything is measured."""
    if importlib.util.find_spec(name) is None:
        raise PeerError(f"the peer {name} is not installed; pip install --no-deps {name}, then what it misses")


def version(name: str) -> str:
    return f"{name} {importlib.metadata.version(name)}"
