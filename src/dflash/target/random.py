"""A target of a real shape with weights drawn at random: how fast a run would go, before any weights are downloaded."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import dispatch_model, init_empty_weights
from torch import nn
from transformers.initialization import no_init_weights


def random_module(auto: Any, config: Any, dtype: torch.dtype, place: Mapping[str, torch.device]) -> Any:
    """A model of the config, made on its devices themselves: nothing of its weights passes through host memory or disk.

    Each weight is drawn from a seed of its own name: every replica, every start and every way to split the layers over
    devices of one kind have the same.

    Args:
        auto: class of transformers that knows the config, such as ``AutoModelForCausalLM``.
        place: as a ``device_map``: the device of each part, or of the whole under the empty name.
    """
    # Buffers are computed, and computed on the CPU as ever: nothing draws the frequencies of a rotary embedding.
    with init_empty_weights(include_buffers=False), no_init_weights():
        module = auto.from_config(config, dtype=dtype)
    module.tie_weights()
    drawn: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, part in module.named_modules():
        for key, empty in part._parameters.items():
            if empty is None:
                continue
            if empty not in drawn:
                name = f"{prefix}.{key}"
                drawn[empty] = _draw(name, empty, _device(name, place))
            part._parameters[key] = drawn[empty]
    return dispatch_model(module, dict(place), skip_keys=module._skip_keys_device_placement).eval()


def _device(name: str, place: Mapping[str, torch.device]) -> torch.device:
    return next(device for part, device in place.items() if not part or name.startswith(f"{part}."))


@torch.no_grad()
def _draw(name: str, empty: nn.Parameter, device: torch.device) -> nn.Parameter:
    weight = torch.empty(empty.shape, dtype=empty.dtype, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    if weight.dim() > 1:
        weight.normal_(0, 0.02, generator=generator)
    elif "A_log" in name:
        weight.uniform_(0, 1, generator=generator)
    elif name.endswith("bias"):
        weight.fill_(1.0 if "dt_bias" in name else 0.0)
    else:  # norms: some multiply by 1 + w
        weight.normal_(0, 0.05, generator=generator)
    return nn.Parameter(weight, requires_grad=empty.requires_grad)
