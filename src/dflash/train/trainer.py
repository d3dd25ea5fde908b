"""The training loop: features -> blocks -> drafter -> loss -> backward, one fp32 AdamW step per group of batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from dflash.bench.shapes import step_flops
from dflash.data.batches import Batch, counted_slots, sample_anchors
from dflash.decode.walk import Answer, walk
from dflash.metrics import add_sums, divide, pooled_sums, read
from dflash.model import DFlashDraftModel, slot_weights
from dflash.score import anchor_rows, score_blocks
from dflash.target.features import SickFeatures, TargetFeatures
from dflash.train import checkpoint
from dflash.train.checkpoint import Checkpoints, Progress
from dflash.train.log import Clock, MetricsLog, log
from dflash.train.schedule import StepPlan, digest, learning_rate, noise_seed, noise_std
from dflash.train.watch import ProgressLine, known_peak

if TYPE_CHECKING:
    from dflash.config import Config
    from dflash.data.tokenize import TokenData
    from dflash.target.model import Target


class NonFiniteStep(RuntimeError):
    """Loss or gradient of a step is NaN or infinite; nothing of that step reached the weights."""


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


@dataclass
class Trainer:
    """One drafter rank. Everything random is derived from (seed, plan), so the step number is the only position."""

    config: Config
    drafter: DFlashDraftModel
    target: Target
    data: TokenData
    plan: StepPlan
    features_of: Callable[[Batch], TargetFeatures]
    answers: Sequence[Answer]
    run_dir: Path
    fingerprint: dict[str, Any]

    def __post_init__(self) -> None:
        c = self.config
        self.device = self.drafter.device
        self.feature_clock = Clock(self.device)
        self.peak, self.flops = known_peak(self.device, c.target.dtype), 0.0  # the model FLOPs of the step in hand
        self.slot_weight = slot_weights(self.drafter.config.block_size, cast(float, c.train.gamma), self.device)
        self.autocast = torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=c.target.dtype == "bfloat16", cache_enabled=True
        )
        self.optimizer = torch.optim.AdamW(
            self.drafter.parameters(),
            lr=c.train.learning_rate,
            betas=(c.train.betas[0], c.train.betas[1]),
            weight_decay=c.train.weight_decay,
            fused=True,
        )
        if self.device.type == "cuda":
            for layer in self.drafter.layers:
                layer.compile(dynamic=False)
        self.answers_digest = digest([asdict(answer) for answer in self.answers])
        self.progress = Progress(0, 0, 0, None, None, self.answers_digest, self.fingerprint)
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", c.checkpoint.keep_last, c.checkpoint.keep_best)

    # ---- one step --------------------------------------------------------------------------------------------------

    def train_step(self, step: int) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
        """Forward and backward of one optimizer step's batches.

        Returns the pooled sums, the gradient norm after division by the step's weight sum, and which batches were sick.
        Gradients of the unnormalised loss accumulate in fp32 and :meth:`update` divides them once, so how the step is
        cut into batches (and, with several ranks, who computes which) changes nothing but rounding.
        """
        sums: dict[str, Tensor] = {}
        sick = []
        std = noise_std(step, self.plan.total, self.config)
        for batch in self.plan.batches(step):
            with self.feature_clock:
                features = self.features_of(batch)
            anchors, counted, eligible = self.anchors(batch, features)
            seed = noise_seed(self.config.seed, batch.epoch, batch.index)
            context = add_noise(features.context, self.target.hidden_size, std, seed)
            with self.autocast:
                scored = score_blocks(self.drafter, self.target, features, context, anchors, self.slot_weight, counted)
            scored.loss.weighted_sum.backward()
            sums = add_sums(
                sums, pooled_sums(scored.blocks, scored.rank_NJ, scored.loss.weighted_sum, scored.weight_sum, eligible)
            )
            sick.append(features.sick(self.target.hidden_size))
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        return sums, torch.nn.utils.get_total_norm(gradients) / sums["weight"].float(), sick

    def update(self, step: int, weight_sum: Tensor, grad_norm: Tensor) -> None:
        """Divide, clip and step: the fused kernel takes one divisor for both, which spares two passes over all
        gradients."""
        shrink = (self.config.train.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
        self.optimizer.grad_scale = (weight_sum / shrink).float()  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def lr(self, step: int) -> float:
        return learning_rate(step, self.plan.total, self.config.train.learning_rate, self.config.train.warmup_ratio)

    def anchors(self, batch: Batch, features: TargetFeatures) -> tuple[Tensor, int, int]:
        """Rows of the batch's anchors, in row order (neighbours share keys: fewer attention tiles), how many slots of
        their blocks count, and how many positions were eligible."""
        rows, anchor_pos, counted = [], [], 0
        for b, (sample, count) in enumerate(zip(batch.samples.tolist(), batch.anchors.tolist(), strict=True)):
            _, mask = self.data.sample(sample)
            own = sample_anchors(self.config.seed, batch.epoch, sample, mask, count)
            rows.append(features.bounds[b] + own)
            anchor_pos.append(own)
            counted += counted_slots(mask, own, self.drafter.config.block_size)
        if self.peak:
            tokens = int(self.data.lengths[batch.samples].sum())
            self.flops += step_flops(self.drafter.config, tokens, np.concatenate(anchor_pos), counted)
        anchors = anchor_rows(np.concatenate(rows), self.config.train.anchors_per_batch, self.device)
        return anchors, counted, int(self.data.eligible[batch.samples].sum())

    # ---- the run ---------------------------------------------------------------------------------------------------

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint; the rest of the run is what it would have been."""
        self.progress = checkpoint.load(path, self.drafter, self.optimizer)
        if self.progress.fingerprint != self.fingerprint:
            odd = [k for k in self.fingerprint if self.progress.fingerprint.get(k) != self.fingerprint[k]]
            raise checkpoint.CheckpointError(
                f"{path}: {', '.join(odd)} changed since the run began, so its steps would be others: "
                "put it back as it was, or start a new run"
            )
        if self.progress.answers != self.answers_digest:
            log.info("the evaluation's answers are others than before: the best value starts anew")
            self.progress.best_step = self.progress.best_value = None
            self.progress.answers = self.answers_digest

    def run(self, metrics: MetricsLog, interrupted: Callable[[], bool]) -> None:
        """Train from where ``progress`` stands to the end, or until ``interrupted``; saves the last finished step
        either way.

        Raises:
            NonFiniteStep, SickFeatures, CheckpointError: the run stops; the newest complete checkpoint stays.
        """
        every, last = self.config.checkpoint.every, self.plan.total
        if self.progress.step == 0:
            self.evaluate(metrics)
        saved = self.progress.step
        with self.checkpoints, ProgressLine(self.progress.step, last, self.peak) as bar:
            while self.progress.step < last and not interrupted():
                line = self.one_step(self.progress.step + 1)
                step = self.progress.step
                if step % self.config.log.every == 0 or step == last:
                    metrics.write(line)
                bar.update(line, self.flops)
                is_best = (step % self.config.eval.every == 0 or step == last) and self.evaluate(metrics)
                if step % every == 0 or step == last or (is_best and self.config.checkpoint.keep_best):
                    metrics.sync()
                    self.checkpoints.save(self.drafter, self.optimizer, self.progress)
                    saved = step
                elif self.checkpoints.failed():
                    self.checkpoints.wait()
        if saved != self.progress.step:
            metrics.sync()
            self.checkpoints.save(self.drafter, self.optimizer, self.progress)
            self.checkpoints.wait()

    def one_step(self, step: int) -> dict[str, Any]:
        """Train step ``step`` and return its metrics line."""
        started, self.flops = time.perf_counter(), 0.0
        batches = self.plan.batches(step)
        sums, grad_norm, sick = self.train_step(step)
        # The step's one wait for the device: nothing may reach the weights before it is known to be finite.
        host = read(sums | {"grad_norm": grad_norm, "sick": torch.stack(sick)})
        norm, loss = host["grad_norm"], host["loss"]
        for batch, is_ill in zip(batches, host["sick"], strict=True):
            if is_ill:
                self.features_of(batch).check(self.target.hidden_size)  # again, for the sentence
                raise SickFeatures(
                    f"step {step}: features of samples {batch.samples.tolist()} were zero, constant or not "
                    "finite, and are sound when computed again: the device or the file system is at fault"
                )
        if not (np.isfinite(norm) and np.isfinite(loss)):
            samples = [int(s) for batch in batches for s in batch.samples]
            named = ", ".join(f"{s} ({self.data.describe(s)})" for s in samples[:16]) + ", ..." * (len(samples) > 16)
            raise NonFiniteStep(
                f"step {step}: {'loss' if not np.isfinite(loss) else 'gradient'} is not finite (loss {loss}, gradient "
                f"norm {norm}); the step was not applied. Its samples: {named}. Look at these rows, or start a new run "
                "with a lower train.learning_rate"
            )
        self.update(step, sums["weight"], grad_norm)
        tokens = int(sum(self.data.lengths[batch.samples].sum() for batch in batches))
        self.progress.step = step
        self.progress.tokens += tokens
        self.progress.samples += sum(len(batch.samples) for batch in batches)
        line = {"step": step, "epoch": self.plan.epoch_of(step), **divide(host), "grad_norm": norm}
        line |= {"lr": self.lr(step), "noise_std": noise_std(step, self.plan.total, self.config)}
        line |= {"tokens": self.progress.tokens, "samples": self.progress.samples}
        spent = time.perf_counter() - started
        line |= {
            "tokens_per_s": tokens / spent,
            "feature_wait_s": self.feature_clock.take(),
            "step_s": spent,
            "time": time.time(),
        }
        return line

    def evaluate(self, metrics: MetricsLog) -> bool:
        """Write an ``eval`` line at the present step; True if the drafter is the best so far."""
        if not self.answers:
            return False
        started = time.perf_counter()
        train = self.config.train
        with self.autocast:
            result = walk(
                self.drafter, self.target, self.answers, train.tokens_per_batch, train.anchors_per_batch
            ).summary()
        step, value = self.progress.step, result["accepted_length"]
        metrics.write(
            {"kind": "eval", "step": step, **result, "eval_s": time.perf_counter() - started, "time": time.time()}
        )
        over = f"{result['rounds']} rounds on {result['prompts']} held-out prompts"
        log.info(f"step {step}: accepted length {value:.3f} over {over}")
        if self.progress.best_value is not None and value <= self.progress.best_value:
            return False
        self.progress.best_step, self.progress.best_value = step, value
        return step > 0
