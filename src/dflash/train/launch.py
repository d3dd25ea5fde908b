"""A run from its config: folder, data, target, trainer; and the same again for a resume."""

from __future__ import annotations

import fcntl
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import dflash
from dflash.config import Config, ConfigError, dump_yaml, load_config, to_dict
from dflash.data.batches import Batch, BatchPlan
from dflash.data.tokenize import DataError, TokenData, decode_example, load_data, load_prompts, summary
from dflash.decode.walk import load_or_generate
from dflash.model import DFlashConfig, DFlashDraftModel
from dflash.score import padded_tokens
from dflash.target.features import TargetFeatures
from dflash.target.load import load_target_config, load_tokenizer
from dflash.target.model import Target, load_target
from dflash.target.store import FeatureStore
from dflash.train.log import MetricsLog, drop_lines_after, log, start_logging
from dflash.train.schedule import StepPlan, digest
from dflash.train.trackers import Trackers, require_installed
from dflash.train.trainer import Trainer
from dflash.train.watch import Alerts

CONTRACT = (
    "block_size", "mask_token_id", "target_layer_ids", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "layer_types", "sliding_window",
    "rope_parameters",
)  # fmt: skip
"""What makes two drafters the same model but for their weights."""
RESUME_SECTIONS = ("placement", "log", "checkpoint", "eval")
"""What a resume may change: the rest is the run itself."""


class RunError(RuntimeError):
    """The run's folder does not allow what was asked."""


def train(config: Config) -> int:
    """Start a new run of a resolved config; returns the exit code.

    Raises:
        RunError: the folder holds a run already, or another process works in it.
    """
    run_dir = Path(config.run_dir)
    if any((run_dir / name).exists() for name in ("config.yaml", "checkpoints", "metrics.jsonl")):
        raise RunError(
            f"run_dir {run_dir} holds a run already: continue it with `dflash resume {run_dir}`, or name another"
        )
    refuse_placement(config)
    require_installed(config.log.trackers)
    run_dir.mkdir(parents=True, exist_ok=True)
    with locked(run_dir):
        return run(config, run_dir)


def resume(run_dir: Path, overrides: Sequence[str] = ()) -> int:
    """Continue a run from its newest complete checkpoint; returns the exit code.

    Raises:
        RunError: no run in the folder, or another process works in it.
        ConfigError: an override outside ``RESUME_SECTIONS``.
    """
    if not (run_dir / "config.yaml").exists():
        raise RunError(
            f"{run_dir} holds no run (no config.yaml): start one with `dflash train CONFIG run_dir={run_dir}`"
        )
    refused = [o for o in overrides if o.split("=")[0].split(".")[0] not in RESUME_SECTIONS]
    if refused:
        raise ConfigError(
            [
                f"{o.split('=')[0]}: a resume continues the same run and changes {', '.join(RESUME_SECTIONS)} only"
                for o in refused
            ]
        )
    config = load_config(run_dir / "config.yaml", overrides)
    refuse_placement(config)
    require_installed(config.log.trackers)
    config.run_dir = str(run_dir)  # the folder may have been moved or copied since
    with locked(run_dir):
        return run(config, run_dir)


def run(config: Config, run_dir: Path) -> int:
    """Everything between a resolved config and the exit code, in one process."""
    start_logging(run_dir / "logs" / "rank0.log")
    trainer = build(config, run_dir)
    newest = trainer.checkpoints.newest()
    if newest:
        trainer.resume(newest)
    # Nothing of the run was touched until here: what follows happens only to a run that can go on.
    trainer.checkpoints.remove_remains()
    write_config(config, run_dir / "config.yaml")
    dropped = drop_lines_after(run_dir / "metrics.jsonl", trainer.progress.step if newest else -1)
    if newest or dropped:
        start = f"continuing after step {trainer.progress.step}" if newest else "no complete checkpoint: starting over"
        log.info(start + (f"; {dropped} newer metrics lines dropped" if dropped else ""))
    metrics = open_metrics(trainer, first_step=trainer.progress.step + 1 if newest else 0)
    try:
        # Before this, nothing is worth saving and Ctrl-C may simply end the process.
        with interrupts() as caught:
            trainer.run(metrics, lambda: bool(caught))
    finally:
        metrics.close()
    if trainer.progress.step < trainer.plan.total:
        log.info(f"stopped after step {trainer.progress.step}: `dflash resume {run_dir}` continues")
        return 128 + caught[0]
    best = trainer.progress.best_step
    kept = f"; best evaluation at step {best}" if best and config.checkpoint.keep_best else ""
    log.info(f"done: {trainer.plan.total} steps, drafter in {trainer.checkpoints.newest()}{kept}")
    return 0


def open_metrics(trainer: Trainer, first_step: int) -> MetricsLog:
    """The run's log with whoever listens to it. A run that has steps left says what starts here; one that has none
    stays as it is."""
    path, config = trainer.run_dir / "metrics.jsonl", trainer.config
    if trainer.progress.step >= trainer.plan.total:
        return MetricsLog(path)
    trackers = Trackers(config.log.trackers, trainer.run_dir, to_dict(config), first_step)
    metrics = MetricsLog(path, Alerts(path, config.log.alert_window), trackers)
    trainable, frozen = sizes(trainer.drafter)
    metrics.write(
        {
            "kind": "start", "step": trainer.progress.step, "total_steps": trainer.plan.total,
            "epochs": config.train.epochs, "trainable_parameters": trainable, "frozen_parameters": frozen,
            "target_parameters": sum(sizes(trainer.target.module)), "device": str(trainer.device),
            "versions": versions() | {"python": platform.python_version()}, "time": time.time(),
        }
    )  # fmt: skip
    return metrics


def sizes(module: torch.nn.Module) -> tuple[int, int]:
    """Parameters that are trained, and that are not."""
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return trainable, sum(p.numel() for p in module.parameters()) - trainable


def versions() -> dict[str, str]:
    return {"dflash": dflash.__version__, "torch": torch.__version__, "transformers": transformers.__version__}


def write_config(config: Config, path: Path) -> None:
    """What this run is, with the versions it runs under; whole or not at all."""
    part = path.with_suffix(".tmp")
    dump_yaml(config, part, ", ".join(f"{name} {version}" for name, version in versions().items()))
    os.replace(part, path)


def build(config: Config, run_dir: Path) -> Trainer:
    """Data, target, plan and drafter of a run; the same objects for a fresh start and a resume."""
    c, device = config, torch.device(config.placement.drafter[0])
    tokenizer = load_tokenizer(c.target.model, c.target.revision)
    mask = c.drafter.mask_token_id
    shared: dict[str, Any] = {
        "max_length": c.data.max_length,
        "chat_template_kwargs": c.data.chat_template_kwargs,
        "vocab_size": load_target_config(c.target.model, c.target.revision).vocab_size,
    }
    data = load_data(c.data.train, tokenizer, cache_dir=Path(c.data.cache_dir) if c.data.cache_dir else None, **shared)
    log.info(summary(data.stats))
    log.info("first conversation, supervised part marked:\n" + decode_example(data, 0, tokenizer))
    if (used := np.flatnonzero(data.ids == mask)).size:
        row = data.describe(int(np.searchsorted(data.offsets, used[0], side="right")) - 1)
        raise ConfigError(
            [f"drafter.mask_token_id {mask} occurs in the data (first: {row}); name a token that is never used"]
        )
    prompts = load_prompts(c.data.eval, tokenizer, limit=c.eval.samples, **shared) if c.data.eval else []
    batches = BatchPlan(
        data.lengths, data.eligible, seed=c.seed, tokens_per_batch=c.train.tokens_per_batch,
        anchors_per_batch=c.train.anchors_per_batch, length_buckets=c.data.length_buckets,
    )  # fmt: skip
    plan = StepPlan(batches, c.train.epochs, c.train.grad_accumulation)
    dropped = f", {plan.dropped} batches of incomplete steps dropped" if plan.dropped else ""
    log.info(f"plan: {plan.total} steps of {c.train.grad_accumulation} batches over {c.train.epochs} epochs{dropped}")

    target = load_target(
        c.target.model, revision=c.target.revision, dtype=getattr(torch, c.target.dtype), device=device,
        context_layers=c.target.context_layers or (), label_layer=c.target.label_layer,
    )  # fmt: skip
    drafter = new_drafter(c, target.config).to(device)
    trainable, frozen = sizes(drafter)
    log.info(
        f"drafter: {(trainable + frozen) / 1e6:,.1f} M parameters ({trainable / 1e6:,.1f} M trainable, "
        f"{frozen / 1e6:,.1f} M frozen), {len(drafter.layers)} layers, blocks of {c.drafter.block_size}, on {device}; "
        f"target: {sum(sizes(target.module)) / 1e6:,.1f} M parameters, all frozen"
    )
    answers = load_or_generate(
        run_dir / "eval_answers.jsonl", target, prompts, c.eval.max_new_tokens, c.eval.batch_size
    )
    if answers and all(len(answer.answer) < 2 for answer in answers):
        raise DataError(
            "data.eval: the target ends every answer at once, so there is nothing to measure; look at the prompts"
        )
    fingerprint = {
        "data": data.fingerprint,
        "steps": plan.total,
        "target": target.fingerprint,
        "config": config_digest(c),
    }
    return Trainer(c, drafter, target, data, plan, feature_source(c, data, target), answers, run_dir, fingerprint)


def new_drafter(config: Config, target_config: Any) -> DFlashDraftModel:
    """A drafter of the config's shape with weights drawn from the run's seed, in fp32."""
    d = config.drafter
    shape = DFlashConfig(
        block_size=d.block_size,
        mask_token_id=d.mask_token_id,
        target_layer_ids=list(config.target.context_layers or ()),
        num_target_layers=target_config.num_hidden_layers,
        vocab_size=target_config.vocab_size,
        hidden_size=target_config.hidden_size,
        intermediate_size=d.intermediate_size,
        num_hidden_layers=d.num_hidden_layers,
        num_attention_heads=d.num_attention_heads,
        num_key_value_heads=d.num_key_value_heads,
        head_dim=d.head_dim,
        layer_types=list(d.layer_types or ()),
        sliding_window=d.sliding_window,
        rope_parameters={"rope_type": "default", "rope_theta": d.rope_theta},
        # The target's, not the training length: engines size RoPE and the KV cache from it.
        max_position_embeddings=getattr(target_config, "max_position_embeddings", 32768),
        rms_norm_eps=getattr(target_config, "rms_norm_eps", 1e-6),  # targets with another norm have no such key
        eos_token_id=target_config.eos_token_id,
        pad_token_id=target_config.pad_token_id,
        bos_token_id=target_config.bos_token_id,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(config.seed)
    fresh = DFlashDraftModel(shape).float().train()
    if d.init_from is None:
        return fresh
    given = DFlashDraftModel.from_pretrained(d.init_from, dtype=torch.float32)
    odd = [key for key in CONTRACT if getattr(given.config, key) != getattr(shape, key)]
    if odd:
        listed = ", ".join(f"{key} ({getattr(given.config, key)} there, {getattr(shape, key)} here)" for key in odd)
        raise ConfigError(
            [f"drafter.init_from {d.init_from} is another drafter: {listed}; make the config agree with it"]
        )
    fresh.load_state_dict(given.state_dict())
    return fresh


def config_digest(config: Config) -> str:
    """Of everything a resume must not change; not where data and target lie: what they hold has digests of its own."""
    tree = to_dict(config)
    for key in ("run_dir", *RESUME_SECTIONS):
        del tree[key]
    tree["data"] = {k: v for k, v in tree["data"].items() if k not in ("train", "eval", "features", "cache_dir")}
    tree["target"] = {k: tree["target"][k] for k in ("dtype", "context_layers", "label_layer")}
    return digest(tree)


def feature_source(config: Config, data: TokenData, target: Target) -> Callable[[Batch], TargetFeatures]:
    """Where a batch's features come from: the target itself, or the folder it filled before step 1."""
    device = target.device
    pad_to = padded_tokens(config.train.tokens_per_batch, device)
    if config.data.features is None:

        def online(batch: Batch) -> TargetFeatures:
            ids = batch.samples.tolist()
            rows, masks = zip(*(data.sample(i) for i in ids), strict=True)
            return target.capture(rows, masks, ids, pad_to)

        return online
    contract = {
        "target": config.target.model,
        "weights": target.fingerprint,
        "dtype": config.target.dtype,
        "context_layers": config.target.context_layers,
        "label_layer": config.target.label_layer,
        "data": data.fingerprint,
    }
    store = FeatureStore(Path(config.data.features), data, contract)
    store.capture(target, config.train.tokens_per_batch)
    return lambda batch: store.features(batch.samples.tolist(), pad_to, device)


def refuse_placement(config: Config) -> None:
    """One process alternates between target and drafter; other placements are not built yet.

    Raises:
        ConfigError: the placement asks for several processes, or for a device that is not there.
    """
    p = config.placement
    if p.target != p.drafter or len(p.target) != 1:
        problem = (
            f"placement: target {p.target} and drafter {p.drafter} need several processes, which this version does not "
            "start: give both the same single device, such as placement.target=[cuda:0] placement.drafter=[cuda:0]"
        )
        raise ConfigError([problem])
    device = p.drafter[0]
    if device != "cpu" and (not device.startswith("cuda:") or int(device[5:]) >= torch.cuda.device_count()):
        problem = (
            f"placement: {device} is not here ({torch.cuda.device_count()} GPUs are); for a CPU give "
            "placement.target=[cpu] placement.drafter=[cpu] target.dtype=float32"
        )
        raise ConfigError([problem])


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run's folder against a second launcher; the kernel lets go when the process ends, however it ends."""
    with open(run_dir / ".lock", "w", encoding="utf-8") as file:
        for patience in (0.05, 0.2, None):  # dflash status, which asks for the lock, holds it for a moment
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if patience is None:
                    raise RunError(f"another process is working in {run_dir}: wait for it or stop it") from None
                time.sleep(patience)
        yield


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that the step in hand is finished and saved; a second one ends the process."""
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        for n, handler in before.items():
            signal.signal(n, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
