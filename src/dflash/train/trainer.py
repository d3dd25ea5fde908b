"""The training loop: features -> blocks -> drafter -> loss -> backward, one optimizer step per group of batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from dflash.data.batches import Batch
from dflash.decode.walk import Answer, walk
from dflash.metrics import Told, add_sums, divide, pooled_sums
from dflash.model import DFlashDraftModel
from dflash.model.blocks import Blocks
from dflash.score import score_blocks
from dflash.target.features import SickFeatures, TargetFeatures
from dflash.target.link import Interrupted, PeerLost
from dflash.train import checkpoint
from dflash.train.adamw import AdamW
from dflash.train.checkpoint import Checkpoints, Progress
from dflash.train.log import Clock, MetricsLog, log
from dflash.train.muon import Muon
from dflash.train.peers import Peers
from dflash.train.probe import choose_paths
from dflash.train.schedule import (
    Anchors,
    StepPlan,
    add_noise,
    batch_key,
    digest,
    draw_anchors,
    learning_rate,
    noise_seed,
    noise_std,
)
from dflash.train.watch import ProgressLine, known_peak

if TYPE_CHECKING:
    from dflash.config import Config
    from dflash.data.tokenize import TokenData
    from dflash.target.model import Target
    from dflash.target.remote import RemoteTarget

EMPTY = "step {step}: every batch of it was sick, so there is nothing to train on"


class NonFiniteStep(RuntimeError):
    """Loss or gradient of a step is NaN or infinite; nothing of that step reached the weights."""


@dataclass(frozen=True)
class Launched:
    """A step that the device has been given and the host has not read."""

    step: int
    told: Told
    feature_wait: Callable[[], float]
    """Seconds the features took, once ``told`` is read."""
    flops: float
    started: float


@dataclass
class Trainer:
    """One drafter rank. Everything random is derived from (seed, plan), so the step number is the only position."""

    config: Config
    drafter: DFlashDraftModel
    target: Target | RemoteTarget
    data: TokenData
    plan: StepPlan
    features_of: Callable[[Batch], TargetFeatures]
    answers: Sequence[Answer]
    run_dir: Path
    fingerprint: dict[str, Any]
    peers: Peers | None = None
    """None: one process, whose target computes features in its own turn."""
    max_sick: int = 0
    """Sick batches to skip before the run stops."""

    def __post_init__(self) -> None:
        c = self.config
        self.device, self.skipped = self.drafter.device, 0
        self.feature_clock = Clock(self.device)
        self.peak, self.flops = known_peak(self.device, c.target.dtype), 0.0  # the model FLOPs of the step in hand
        self.autocast = torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=c.target.dtype == "bfloat16", cache_enabled=True
        )
        kind: type[AdamW] | type[Muon] = Muon if c.train.optimizer == "muon" else AdamW
        self.optimizer: AdamW | Muon = kind(
            self.drafter.parameters(),
            lr=c.train.learning_rate,
            betas=(c.train.betas[0], c.train.betas[1]),
            weight_decay=c.train.weight_decay,
        )
        self._ahead: dict[int, list[Anchors]] = {}
        self._read_at = 0.0
        # Skipping a sick batch means waiting for the verdict on it, so there is nothing to gain then.
        self.run_ahead = self.device.type == "cuda" and not self.max_sick
        self.answers_digest = digest([asdict(answer) for answer in self.answers])
        self.progress = Progress(0, 0, 0, None, None, self.answers_digest, self.fingerprint)
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", c.checkpoint.keep_last, c.checkpoint.keep_best)

    # ---- one step --------------------------------------------------------------------------------------------------

    def train_step(self, step: int) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
        """Forward and backward of one optimizer step's batches.

        Returns the pooled sums, the gradient norm after division by the step's weight sum, and which batches were sick.
        Gradients of the unnormalised loss accumulate in fp32 and :meth:`update` divides them once, so how the step is
        cut into batches changes nothing but rounding and what dropout leaves out; who computes which, only rounding.
        """
        sums: dict[str, Tensor] = {}
        sick, skipped = [], 0
        std = noise_std(step, self.plan.total, self.config)
        for batch, anchors in zip(self.own_batches(step), self.anchors_of(step), strict=True):
            try:
                with self.feature_clock:
                    features = self.features_of(batch)
            except SickFeatures as error:
                skipped += 1
                self.tolerate(step, error, self.skipped + skipped)
                sick.append(torch.zeros((), dtype=torch.bool, device=self.device))  # not trained on
                continue
            seed = noise_seed(self.config.seed, batch.epoch, batch.index)
            context = add_noise(features.context, self.target.hidden_size, std, seed)
            torch.manual_seed(seed + 1)  # dropout's, which takes no generator; not the noise's seed again
            with self.autocast:
                scored = score_blocks(
                    self.drafter, self.target, features, context, anchors.rows_N, counted=anchors.counted
                )
            scored.weighted_sum.backward()
            weighted, weights = scored.weighted_sum, scored.weight_NJ.sum()
            sums = add_sums(sums, pooled_sums(scored.blocks, scored.rank_NJ, weighted, weights, anchors.eligible))
            self.flops += anchors.flops
            sick.append(features.sick(self.target.hidden_size))
        if not sums:
            sums = self.nothing(step)
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        sums["ill"] = torch.stack(sick).sum().double()
        sums["skipped"] = torch.full((), skipped, dtype=torch.float64, device=self.device)
        if self.peers:
            for key, value in self.peers.stream.take().items():
                sums[key] = torch.full((), value, dtype=torch.float64, device=self.device)
            sums = self.peers.add(sums, gradients)
        return sums, torch.nn.utils.get_total_norm(gradients) / sums["weight"].float(), sick

    def own_batches(self, step: int) -> list[Batch]:
        """This rank's batches of a step: every W-th."""
        batches: list[Batch] = self.plan.batches(step)
        return batches[self.peers.rank :: self.peers.size] if self.peers else batches

    def nothing(self, step: int) -> dict[str, Tensor]:
        """Sums and gradients of a rank all of whose batches were sick: the others wait for its share."""
        if self.peers is None or self.peers.size == 1:
            raise SickFeatures(EMPTY.format(step=step))
        for parameter in self.drafter.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        blank = torch.zeros(0, self.drafter.config.block_size - 1, dtype=torch.bool, device=self.device)
        zero = torch.zeros((), device=self.device)
        return pooled_sums(Blocks(blank, blank, blank, blank, blank, blank), blank.long(), zero, zero, 0)

    def tolerate(self, step: int, error: SickFeatures, skipped: int) -> None:
        """Batch number ``skipped`` that could not be trained on; one more than allowed ends the run."""
        allowed = self.max_sick
        if skipped > allowed:
            said = "none is tolerated" if not allowed else f"{allowed} are tolerated and this is one more"
            raise SickFeatures(f"step {step}: {error}; {said} (placement.max_sick_batches)") from error
        log.warning(f"step {step}: {error}; skipped, {skipped} of {allowed} that placement.max_sick_batches allows")

    def update(self, step: int, weight_sum: Tensor, grad_norm: Tensor, refused: Tensor) -> None:
        """Divide, clip and step, all on the device: where ``refused`` is true, nothing reaches the weights."""
        shrink = (self.config.train.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(step)
        self.optimizer.apply(weight_sum / shrink, refused)
        self.optimizer.zero_grad(set_to_none=True)

    def lr(self, step: int) -> float:
        return learning_rate(step, self.plan.total, self.config.train.learning_rate, self.config.train.warmup_ratio)

    def anchors_of(self, step: int) -> list[Anchors]:
        """Of each of this rank's batches of the step; made ahead, or now."""
        return self._ahead.pop(step, None) or [self.anchors(batch) for batch in self.own_batches(step)]

    def anchors(self, batch: Batch) -> Anchors:
        return draw_anchors(
            batch, self.data, self.config, self.drafter.config, self.device, count_flops=bool(self.peak)
        )

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
        either way, without waiting for features that have not come.

        Raises:
            NonFiniteStep, SickFeatures, RunFailed, CheckpointError: the run stops; the newest complete checkpoint
            stays. PeerLost: another process is gone, and the last finished step is saved.
        """
        choose_paths(self)
        last, lost, saved = self.plan.total, None, self.progress.step
        with self.checkpoints, ProgressLine(self.progress.step, last, self.peak) as bar:
            try:
                if self.progress.step == 0 or self.progress.owes_eval:
                    is_best = self.evaluate(metrics)
                    if is_best and self.config.checkpoint.keep_best:
                        self.save(metrics)
                for line, flops in self.steps(interrupted):
                    saved = self.after_step(line, metrics, saved)
                    bar.update(line, flops)
            except Interrupted:
                pass
            except PeerLost as error:
                lost = error
        if saved != self.progress.step and self.leads:
            self.save(metrics)
            self.checkpoints.wait()
        if lost is not None:
            raise lost

    def steps(self, interrupted: Callable[[], bool]) -> Iterator[tuple[dict[str, Any], float]]:
        """Train step after step; yields each one's metrics line and model FLOPs.

        On a GPU the next step is launched before the last one is read, so that the device never waits for the host; a
        step after which something is done at rest (evaluation, checkpoint) is read first. Whatever ends this, the
        steps yielded are those that the weights have seen, unless a step was refused, which ends the run.
        """
        unread: Launched | None = None
        while True:
            step = self.progress.step + (1 if unread is None else 2)
            free = unread is None or (self.run_ahead and not self.rests_after(unread.step))
            launched = None
            try:
                if free and step <= self.plan.total and not interrupted():
                    launched = self.launch(step)
            except (Interrupted, PeerLost, SickFeatures):
                if unread is not None:
                    yield self.finish(unread), unread.flops
                raise
            if unread is not None:
                yield self.finish(unread), unread.flops
            elif launched is None:
                return
            unread = launched

    def rests_after(self, step: int) -> bool:
        """Whether the weights are needed as the step left them."""
        last, every = self.plan.total, (self.config.eval.every, self.config.checkpoint.every)
        return step == last or any(step % each == 0 for each in every)

    @property
    def leads(self) -> bool:
        """Whether this rank evaluates, logs and saves."""
        return self.peers is None or self.peers.rank == 0

    def after_step(self, line: dict[str, Any], metrics: MetricsLog, saved: int) -> int:
        """Log, evaluate and save as the finished step demands; returns the last saved step."""
        if not self.leads:
            return saved
        step, last, config = self.progress.step, self.plan.total, self.config
        if step % config.log.every == 0 or step == last:
            metrics.write(line)
        self.progress.owes_eval = step % config.eval.every == 0 or step == last
        is_best = self.progress.owes_eval and self.evaluate(metrics)
        if step % config.checkpoint.every == 0 or step == last or (is_best and config.checkpoint.keep_best):
            self.save(metrics)
            return step
        if self.checkpoints.failed():
            self.checkpoints.wait()
        return saved

    def save(self, metrics: MetricsLog) -> None:
        """Write a checkpoint of the present step beside training."""
        metrics.sync()
        self.checkpoints.save(self.drafter, self.optimizer, self.progress)

    def explain_sick(self, step: int, flags: Sequence[float]) -> None:
        """Say which batch arrived sick, though its replica had found it sound; the step was not applied."""
        for batch, is_ill in zip(self.own_batches(step), flags, strict=True):
            if is_ill and self.peers is None:
                self.features_of(batch).check(self.target.hidden_size)  # again, for the sentence
            if is_ill:
                raise SickFeatures(
                    f"step {step}: features of samples {batch.samples.tolist()} were zero, constant or not "
                    "finite, and are sound when computed again: the device or the file system is at fault"
                    if self.peers is None
                    else f"step {step}: features of samples {batch.samples.tolist()} (batch {batch_key(batch)}) were "
                    "sound on their replica and arrived zero, constant or not finite: the transport is at fault"
                )
        raise PeerLost(f"step {step}: another drafter received features that must not be trained on")

    def one_step(self, step: int) -> dict[str, Any]:
        """Train step ``step`` and return its metrics line."""
        return self.finish(self.launch(step))

    def launch(self, step: int) -> Launched:
        """Give the device all work of a step, its update included, and wait for nothing."""
        started, self.flops = time.perf_counter(), 0.0
        sums, grad_norm, sick = self.train_step(step)
        refused = ~(torch.isfinite(grad_norm) & torch.isfinite(sums["loss"])) | (sums["ill"] > 0)
        self.update(step, sums["weight"], grad_norm, refused)
        # While the device is busy: the host's share of the next step, for which the device would stand still.
        if step < self.plan.total:
            self._ahead = {step + 1: [self.anchors(batch) for batch in self.own_batches(step + 1)]}
        told = Told(sums | {"grad_norm": grad_norm, "sick": torch.stack(sick)})
        return Launched(step, told, self.feature_clock.stop(), self.flops, started)

    def finish(self, launched: Launched) -> dict[str, Any]:
        """Wait for a launched step and return its metrics line.

        Raises:
            NonFiniteStep, SickFeatures: the step was refused; nothing of it reached the weights.
        """
        step, batches = launched.step, self.plan.batches(launched.step)
        host = launched.told.read()
        norm, loss = host["grad_norm"], host["loss"]
        if host["ill"]:
            self.explain_sick(step, host["sick"])
        if not host["weight"]:
            raise SickFeatures(EMPTY.format(step=step))
        self.skipped += int(host["skipped"])
        if self.skipped > self.max_sick:  # each of several drafters counted its own
            counted = f"{self.skipped} sick batches so far on all drafters together and {self.max_sick} are tolerated"
            raise SickFeatures(f"step {step}: {counted} (placement.max_sick_batches); the logs have each")
        if not (np.isfinite(norm) and np.isfinite(loss)):
            samples = [int(s) for batch in batches for s in batch.samples]
            named = ", ".join(f"{s} ({self.data.describe(s)})" for s in samples[:16]) + ", ..." * (len(samples) > 16)
            raise NonFiniteStep(
                f"step {step}: {'loss' if not np.isfinite(loss) else 'gradient'} is not finite (loss {loss}, gradient "
                f"norm {norm}); the step was not applied. Its samples: {named}. Look at these rows, or start a new run "
                "with a lower train.learning_rate"
            )
        tokens = int(sum(self.data.lengths[batch.samples].sum() for batch in batches))
        self.progress.step = step
        self.progress.tokens += tokens
        self.progress.samples += sum(len(batch.samples) for batch in batches)
        line = {"step": step, "epoch": self.plan.epoch_of(step), **divide(host), "grad_norm": norm}
        line |= {"lr": self.lr(step), "noise_std": noise_std(step, self.plan.total, self.config)}
        line |= {"tokens": self.progress.tokens, "samples": self.progress.samples}
        line |= {key: host[key] for key in ("moved_bytes", "replica_wait_s") if key in host}
        if host["skipped"]:
            line["sick_batches"] = int(host["skipped"])
        now = time.perf_counter()
        spent, self._read_at = now - max(launched.started, self._read_at), now
        line |= {
            "tokens_per_s": tokens / spent,
            "feature_wait_s": launched.feature_wait(),
            "step_s": spent,
            "time": time.time(),
        }
        return line

    def evaluate(self, metrics: MetricsLog) -> bool:
        """Write an ``eval`` line at the present step; True if the drafter is the best so far."""
        if not self.answers or not self.leads:
            self.progress.owes_eval = False
            return False
        started = time.perf_counter()
        train = self.config.train
        if self.peers:
            keys = [f"e{self.progress.step}.{part}" for part in range(len(self.peers.eval_groups))]
            cast("RemoteTarget", self.target).evaluate_from(self.peers.stream, keys)
        self.drafter.eval()
        with self.autocast:
            result = walk(
                self.drafter, cast("Target", self.target), self.answers, train.tokens_per_batch, train.anchors_per_batch
            ).summary()
        self.drafter.train()
        self.progress.owes_eval = False
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
