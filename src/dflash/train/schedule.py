"""What a step number fixes: its batches, anchors, learning rate, noise, and the seeds of everything random.

All of it is a pure function of (config, data), so a resumed run needs nothing but the step number.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dflash.bench.shapes import step_flops
from dflash.data.batches import counted_slots, sample_anchors
from dflash.data.conversations import DataError
from dflash.score import anchor_rows
from dflash.target.stream import Item

if TYPE_CHECKING:
    from dflash.config import Config
    from dflash.data.batches import Batch, BatchPlan
    from dflash.data.tokenize import TokenData
    from dflash.model import DFlashConfig


class StepPlan:
    """Optimizer steps 1 .. ``total`` over all epochs; step ``s`` trains ``grad_accumulation`` batches together.

    An epoch's incomplete last group is dropped, so that no step mixes epochs; ``dropped`` counts such batches.

    Raises:
        DataError: the data give no complete step.
    """

    def __init__(self, plan: BatchPlan, epochs: int, grad_accumulation: int) -> None:
        self.steps: list[list[Batch]] = []
        self.epoch_ends: list[int] = []
        self.dropped = 0
        for epoch in range(epochs):
            batches = plan.epoch(epoch)
            whole = len(batches) - len(batches) % grad_accumulation
            self.dropped += len(batches) - whole
            self.steps += [batches[i : i + grad_accumulation] for i in range(0, whole, grad_accumulation)]
            self.epoch_ends.append(len(self.steps))
        if not self.steps:
            raise DataError(
                f"train.grad_accumulation is {grad_accumulation} but an epoch has only {self.dropped // epochs} "
                "batches: lower it or train.tokens_per_batch, or give more data"
            )

    @property
    def total(self) -> int:
        return len(self.steps)

    def batches(self, step: int) -> list[Batch]:
        """The batches of step ``step`` (1-based)."""
        return self.steps[step - 1]

    def epoch_of(self, step: int) -> float:
        """Epochs finished after ``step``, with the fraction of the running one."""
        epoch = int(np.searchsorted(self.epoch_ends, step, side="left"))
        start = self.epoch_ends[epoch - 1] if epoch else 0
        return round(epoch + (step - start) / (self.epoch_ends[epoch] - start), 4)


def digest(value: Any) -> str:
    """Short hash of a JSON value: equal for the same run, another for another."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def learning_rate(step: int, total: int, peak: float, warmup_ratio: float) -> float:
    """Linear warm-up over ``int(warmup_ratio * total)`` steps, then half a cosine that would reach 0 after the last."""
    warmup = int(warmup_ratio * total)
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - 1 - warmup) / (total - warmup)))


def noise_std(step: int, total: int, config: Config) -> float:
    """Noise of the step, relative to each feature's RMS: linear from ``noise.start`` to ``noise.end`` over the run."""
    done = (step - 1) / max(total - 1, 1)
    return config.noise.start + (config.noise.end - config.noise.start) * done


def noise_seed(seed: int, epoch: int, batch: int) -> int:
    """Seed of a batch's noise, from its place in the plan alone; 0x6E015E keeps the stream apart from all others."""
    return int(np.random.SeedSequence([seed, 0x6E015E, epoch, batch]).generate_state(1, np.uint64)[0] >> 1)


def add_noise(context_TF: Tensor, width: int, std: float, seed: int) -> Tensor:
    """Gaussian noise of ``std`` times the RMS of each token's feature in each layer; ``std`` 0 returns the very tensor.

    Only the drafter's ``fc`` reads the result: labels and the cached features stay clean. Own generator, so that noise
    moves no other random stream.
    """
    if std == 0:
        return context_TF
    features_TLD = context_TF.unflatten(-1, (-1, width))
    rms = features_TLD.float().square().mean(dim=-1, keepdim=True).sqrt()
    generator = torch.Generator(context_TF.device).manual_seed(seed)
    noise = torch.randn(features_TLD.shape, generator=generator, device=context_TF.device, dtype=torch.float32)
    return (features_TLD + noise * rms * std).to(context_TF.dtype).flatten(-2)


@dataclass(frozen=True)
class Anchors:
    """Where the blocks of a batch start, and what the host knows of them without asking the device."""

    rows_N: Tensor
    """int64 [N] rows of the packed batch, -1 without an anchor."""
    counted: int
    """Slots of the blocks that count."""
    eligible: int
    """Positions of the batch that could start a block."""
    flops: float
    """Model FLOPs of the batch; 0 where the device's peak is not known."""


def draw_anchors(
    batch: Batch, data: TokenData, config: Config, drafter: DFlashConfig, device: torch.device, *, count_flops: bool
) -> Anchors:
    """A batch's anchors, in row order (neighbours share keys: fewer attention tiles)."""
    rows, anchor_pos, counted = [], [], 0
    starts = np.cumsum([0, *data.lengths[batch.samples]])
    for start, sample, count in zip(starts, batch.samples.tolist(), batch.anchors.tolist(), strict=False):
        _, mask = data.sample(sample)
        own = sample_anchors(config.seed, batch.epoch, sample, mask, count)
        rows.append(start + own)
        anchor_pos.append(own)
        counted += counted_slots(mask, own, drafter.block_size)
    flops = step_flops(drafter, int(starts[-1]), np.concatenate(anchor_pos), counted) if count_flops else 0.0
    rows_N = anchor_rows(np.concatenate(rows), config.train.anchors_per_batch, device)
    return Anchors(rows_N, counted, int(data.eligible[batch.samples].sum()), flops)


def items(
    plan: StepPlan,
    done: int,
    replicas: int,
    drafters: int,
    eval_every: int,
    eval_groups: Sequence[Sequence[int]],
    owes_eval: bool,
) -> Iterator[Item]:
    """Everything that replicas compute from here on, in order: the steps after ``done`` and the evaluations between.

    Batch ``i`` is computed by replica ``i mod R`` and trained by drafter ``i mod W``; the parts of an evaluation go
    round the replicas to drafter 0. In an order all processes share, the first batch not yet trained on is always at
    the head of its replica's and of its drafter's queue, so two queues of any length above 0 cannot wait on each other.

    Args:
        done: last step trained already; 0 evaluates before the first step too.
        eval_groups: the answers that are captured together; none: no evaluation.
        owes_eval: whether the evaluation of step ``done`` is still to come.
    """

    def evaluation(step: int) -> Iterator[Item]:
        for part, ids in enumerate(eval_groups):
            yield Item(f"e{step}.{part}", tuple(ids), part % replicas, replicas)

    if done == 0 or owes_eval:
        yield from evaluation(done)
    for step in range(done + 1, plan.total + 1):
        batches = plan.batches(step)
        first = (step - 1) * len(batches)
        for i, batch in enumerate(batches, start=first):
            yield Item(batch_key(batch), tuple(batch.samples.tolist()), i % replicas, replicas + i % drafters)
        if step % eval_every == 0 or step == plan.total:
            yield from evaluation(step)


def batch_key(batch: Batch) -> str:
    """The name under which a batch of the plan travels."""
    return f"b{batch.epoch}.{batch.index}"
