"""One drafter step as training runs it, on synthetic features of a real shape."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from dflash.bench import peers
from dflash.bench.shapes import H200_PEAK, SHAPES, Shape, step_flops
from dflash.config import Config, DataConfig, DrafterConfig, PlacementConfig, TargetConfig, TrainConfig
from dflash.data.batches import Batch, sample_anchors
from dflash.model import DFlashDraftModel
from dflash.target.features import TargetFeatures
from dflash.train.probe import choose_paths
from dflash.train.trainer import Trainer

PROMPT = 0.25
"""Share of the document that is prompt, not supervised."""
WARM_UP = 3


def build(
    s: Shape, tokens: int, anchors: int, device: torch.device, dtype: torch.dtype, accumulation: int,
    prompt: float = PROMPT,
) -> Trainer:  # fmt: skip
    """A real trainer over one synthetic document; only what feeds it is made up.

    Args:
        prompt: share of the document that is not supervised.
    """
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*size: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype).mul_(std)

    embed = nn.Embedding(1, 1)
    embed.weight = nn.Parameter(drawn(s.vocab_size, s.hidden_size, std=0.02), requires_grad=False)
    target = SimpleNamespace(
        embed=embed, head_weight=drawn(s.vocab_size, s.hidden_size, std=0.02), head_bias=None,
        hidden_size=s.hidden_size, device=device,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, s.vocab_size - 1, tokens), np.arange(tokens) >= int(prompt * tokens)
    labels = rng.integers(0, s.vocab_size - 1, tokens)
    features = TargetFeatures(
        ids=torch.from_numpy(ids).to(device),
        context=drawn(tokens, len(s.context_layers) * s.hidden_size),
        labels=torch.from_numpy(labels).to(device, torch.int32),
        loss_mask=torch.from_numpy(mask).to(device),
        seq=torch.zeros(tokens, dtype=torch.int32, device=device),
        pos=torch.arange(tokens, device=device),
        bounds=[0, tokens],
        sample_ids=[0],
    )
    config = Config(
        run_dir="bench",
        target=TargetConfig(model="bench", dtype="bfloat16" if dtype == torch.bfloat16 else "float32"),
        placement=PlacementConfig(),
        drafter=DrafterConfig(mask_token_id=s.vocab_size - 1),
        data=DataConfig(train=["bench"]),
        train=TrainConfig(
            tokens_per_batch=tokens, anchors_per_batch=anchors, grad_accumulation=accumulation,
        ),
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        drafter = DFlashDraftModel(s.drafter_config()).float().train()
    eligible = int((mask[:-1] & mask[1:]).sum())
    data = SimpleNamespace(
        sample=lambda i: (ids, mask), lengths=np.array([tokens]), eligible=np.array([eligible]), describe=str
    )
    # Another epoch each step: other anchors, as in training.
    plan = SimpleNamespace(
        total=10_000,
        batches=lambda step: [
            Batch(step * accumulation + i, 0, np.zeros(1, dtype=np.int64), np.array([min(anchors, eligible)]))
            for i in range(accumulation)
        ],
        epoch_of=lambda step: 0.0,
    )
    return Trainer(
        config, drafter, cast(Any, target), cast(Any, data), cast(Any, plan), lambda batch: features, [], Path("bench"),
        {},
    )  # fmt: skip


def flops(trainer: Trainer, step: int) -> float:
    """Model FLOPs of the step's batches, from their real anchors."""
    total = 0.0
    for batch in trainer.plan.batches(step):
        _, mask = trainer.data.sample(0)
        anchors = sample_anchors(trainer.config.seed, batch.epoch, 0, mask, int(batch.anchors[0]))
        block = trainer.drafter.config.block_size
        counted = int(np.minimum(len(mask) - 1 - anchors, block - 1).sum())
        total += step_flops(trainer.drafter.config, len(mask), anchors, counted)
    return total


def bench(
    shape: str,
    *,
    tokens: int,
    anchors: int,
    steps: int,
    accumulation: int = 1,
    device: torch.device,
    dtype: torch.dtype,
    peer: bool = False,
) -> dict[str, Any]:
    """Seconds per optimizer step (median over ``steps``), peak memory and MFU; with ``peer`` SpecForge's beside them.

    Warm-up compiles and is timed apart. The peer runs after ours, once our memory is free again.

    Raises:
        PeerError: the peer is not installed.
    """
    sizes = SHAPES[shape]
    peer_step = peers.specforge_step if peer else None
    if peer_step is not None:
        peers.require("specforge")
    own = measured(sizes, tokens, anchors, steps, device, dtype, accumulation)
    out: dict[str, Any] = {
        "shape": shape, "tokens": tokens, "anchors": anchors, "accumulation": accumulation,
        "dtype": str(dtype).removeprefix("torch."), **own,
    }  # fmt: skip
    if device.type == "cuda":
        out["device"] = torch.cuda.get_device_name(device)
    if peer_step is not None:
        gc.collect()
        theirs = peer_step(sizes, tokens, anchors, int(PROMPT * tokens), device, dtype)
        out["specforge"] = timed(itertools.repeat(theirs), steps, device) | {"version": peers.version("specforge")}
        out["ratio"] = own["s_per_step"] / out["specforge"]["s_per_step"]
    return out


def measured(
    sizes: Shape, tokens: int, anchors: int, steps: int, device: torch.device, dtype: torch.dtype, accumulation: int = 1
) -> dict[str, float]:
    """Our own step: :func:`of_trainer`."""
    return of_trainer(build(sizes, tokens, anchors, device, dtype, accumulation), steps)


def of_trainer(trainer: Trainer, steps: int) -> dict[str, float]:
    """:func:`timed` of its steps, their TFLOP on all ranks, and on a GPU the MFU of each rank."""
    device, ranks = trainer.device, trainer.peers.size if trainer.peers else 1
    work = flops(trainer, 4)
    choose_paths(trainer)
    own = timed((partial(trainer.one_step, n) for n in itertools.count(1)), steps, device) | {"tflop": work / 1e12}
    return own | ({"mfu": work / own["s_per_step"] / (ranks * H200_PEAK)} if device.type == "cuda" else {})


def timed(work: Iterable[Callable[[], Any]], steps: int, device: torch.device) -> dict[str, float]:
    """Each call is waited for, so nothing of a step is left to the next one's time."""
    on_gpu = device.type == "cuda"

    def spent(one: Callable[[], Any]) -> float:
        started = time.perf_counter()
        one()
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    calls = iter(work)
    if on_gpu:
        torch.cuda.empty_cache()
    warm_up = sum(spent(one) for one in itertools.islice(calls, WARM_UP))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [spent(one) for one in itertools.islice(calls, steps)]
    out = {
        "s_per_step": float(np.median(seconds)), "s_fastest": min(seconds), "s_slowest": max(seconds),
        "warm_up_s": warm_up,
    }  # fmt: skip
    return out | ({"peak_gib": torch.cuda.max_memory_allocated(device) / 2**30} if on_gpu else {})


def table(result: dict[str, Any]) -> str:
    """The result for a terminal."""
    lines = [
        f"drafter step, shape {result['shape']}, {result['tokens']} tokens, {result['anchors']} anchors, "
        f"{result['dtype']}, on {result.get('device', 'cpu')}: {result['tflop']:.1f} TFLOP"
    ]
    for name, own in (("dflash", result), ("specforge", result.get("specforge"))):
        if own is None:
            continue
        memory = f", {own['peak_gib']:.1f} GiB" if "peak_gib" in own else ""
        span = f"{own['s_fastest']:.4f} to {own['s_slowest']:.4f}"
        mfu = f", MFU {own['mfu']:.0%} of {H200_PEAK / 1e12:.0f} TFLOP/s" if "mfu" in own else ""
        lines.append(f"  {name:9} {own['s_per_step']:.4f} s a step ({span}){memory}{mfu}")
    if "ratio" in result:
        lines.append(f"  ratio     {result['ratio']:.3f} (ours over {result['specforge']['version']})")
    return "\n".join(lines)
