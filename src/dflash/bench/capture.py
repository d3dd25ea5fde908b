"""How fast a target yields context features and labels, beside plain transformers on the same weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash.bench.shapes import H200_PEAK, SHAPES, capture_flops, target_config
from dflash.bench.step import timed
from dflash.target.compiled import choose_paths
from dflash.target.load import split
from dflash.target.model import Target
from dflash.target.random import random_module

PLAIN_CHUNK = 4096
"""Tokens whose logits plain transformers holds at once."""


def random_target(shape: str, layers: int | None, devices: Sequence[torch.device], dtype: torch.dtype) -> Any:
    """A causal language model of the shape with random weights, made on the devices themselves, which share its layers.

    Args:
        layers: None: all of the shape's.
    """
    from transformers import AutoModelForCausalLM

    config = target_config(shape, layers)
    place = {"": devices[0]} if len(devices) == 1 else split(AutoModelForCausalLM, config, devices)
    return random_module(AutoModelForCausalLM, config, dtype, place)


def context_layers(shape: str, depth: int) -> list[int]:
    """The shape's own where all its layers are there; of a cut target as many, spread over what is left."""
    own = SHAPES[shape]
    if depth == own.target_layers:
        return list(own.context_layers)
    return [int(layer) for layer in np.linspace(0, depth - 2, len(own.context_layers)).round()]


def plain(module: Any, layers: list[int], ids_BS: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """What a script of twenty lines does: hooks, a forward pass without cache, the head in chunks."""
    decoder, head = module.get_decoder(), module.get_output_embeddings()
    kept: dict[int, Tensor] = {}

    def run() -> tuple[Tensor, Tensor]:
        hooks = [
            decoder.layers[i].register_forward_hook(
                lambda _m, _a, out, i=i: kept.__setitem__(i, out[0] if isinstance(out, tuple) else out)
            )
            for i in layers
        ]
        with torch.inference_mode():
            hidden = decoder(ids_BS, use_cache=False).last_hidden_state.flatten(0, 1)
            context = torch.cat([kept[i] for i in layers], dim=-1).flatten(0, 1)
            labels = torch.cat([head(part).argmax(dim=-1) for part in hidden.split(PLAIN_CHUNK)])
        for hook in hooks:
            hook.remove()
        return context, labels

    return run


def bench(
    shape: str,
    *,
    rows: int,
    length: int,
    repeats: int,
    device: torch.device,
    dtype: torch.dtype,
    layers: int | None = None,
    peer: bool = False,
) -> dict[str, Any]:
    """Tokens per second of :meth:`Target.capture`, every position supervised; with ``peer`` plain transformers' too.

    Args:
        rows, length: documents in the batch, and tokens in each.
        layers: cut the target to so many decoder layers; None: whole.

    Returns:
        figures of both, their ratio, and how far the features and labels of the two agree.
    """
    module = random_target(shape, layers, [device], dtype)
    depth = len(module.get_decoder().layers)
    context = [i for i in SHAPES[shape].context_layers if i < depth - 1]
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, SHAPES[shape].vocab_size, length) for _ in range(rows)]
    masks = [np.ones(length, dtype=bool)] * rows
    work = rows * capture_flops(module.config, length, sum(p.numel() for p in _products(module)))
    theirs = plain(module, context, torch.from_numpy(np.stack(documents)).to(device))
    # Before the module is ours: what we change about it must not serve the peer.
    other = timed(itertools.repeat(theirs), repeats, device) if peer else None
    want = theirs() if peer else None
    target = Target(module, None, context)
    choose_paths(target, rows * length, length)

    def ours() -> Any:
        return target.capture(documents, masks, list(range(rows)))

    own = timed(itertools.repeat(ours), repeats, device)
    tokens = rows * length
    out: dict[str, Any] = {
        "shape": shape, "layers": depth, "rows": rows, "length": length, "dtype": str(dtype).removeprefix("torch."),
        "tflop": work / 1e12, **_rates(own, tokens, work, device),
    }  # fmt: skip
    if device.type == "cuda":
        out["device"] = torch.cuda.get_device_name(device)
    if other is not None and want is not None:
        got = ours()
        scale = want[0].float().square().mean().sqrt()
        out["plain"] = _rates(other, tokens, work, device)
        out["ratio"] = out["tokens_per_s"] / out["plain"]["tokens_per_s"]
        out["features_differ"] = float((got.context.float() - want[0].float()).square().mean().sqrt() / scale)
        out["labels_equal"] = float((got.labels.long() == want[1]).float().mean())
    return out


def _products(module: nn.Module) -> list[nn.Parameter]:
    """Weights of matrix products: every matrix but the embedding, which is read and not multiplied (unless tied)."""
    head = module.get_output_embeddings().weight  # type: ignore[operator]
    embedding = module.get_input_embeddings().weight  # type: ignore[operator]
    return [p for p in module.parameters() if p.dim() == 2 and (p is not embedding or p is head)]


def _rates(seconds: dict[str, float], tokens: int, work: float, device: torch.device) -> dict[str, float]:
    per_pass = seconds["s_per_step"]
    mfu = {"mfu": work / per_pass / H200_PEAK} if device.type == "cuda" else {}
    return {**seconds, "tokens_per_s": tokens / per_pass, **mfu}


def table(result: dict[str, Any]) -> str:
    """The result for a terminal."""
    lines = [
        f"capture, shape {result['shape']}, {result['layers']} layers, {result['rows']} x {result['length']} tokens, "
        f"{result['dtype']}, on {result.get('device', 'cpu')}: {result['tflop']:.1f} TFLOP"
    ]
    for name, own in (("dflash", result), ("plain", result.get("plain"))):
        if own is None:
            continue
        memory = f", {own['peak_gib']:.1f} GiB" if "peak_gib" in own else ""
        mfu = f", MFU {own['mfu']:.0%} of {H200_PEAK / 1e12:.0f} TFLOP/s" if "mfu" in own else ""
        lines.append(f"  {name:7} {own['tokens_per_s']:,.0f} tokens/s ({own['s_per_step']:.3f} s){memory}{mfu}")
    if "ratio" in result:
        lines.append(
            f"  ratio   {result['ratio']:.3f} (ours over plain transformers); features differ by "
            f"{result['features_differ']:.1e} of their size, {result['labels_equal']:.2%} of labels are equal"
        )
    return "\n".join(lines)
