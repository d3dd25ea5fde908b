"""What a run is made of: data, plan, target, drafter and trainer from its config; the same for a start and a resume."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import transformers

import dflash
from dflash.config import Config, ConfigError, dump_yaml, to_dict
from dflash.data.batches import Batch, BatchPlan
from dflash.data.tokenize import DataError, TokenData, decode_example, load_data, load_prompts, summary
from dflash.decode.drafters import find_drafter, load_drafter
from dflash.decode.walk import Answer, load_or_generate
from dflash.model import DFlashConfig, DFlashDraftModel
from dflash.score import padded_tokens
from dflash.target.features import TargetFeatures
from dflash.target.load import RANDOM, load_target_config, load_tokenizer
from dflash.target.model import Target
from dflash.target.store import FeatureStore
from dflash.train.capture import feature_contract, frozen_target
from dflash.train.launch import RESUME_SECTIONS
from dflash.train.log import MetricsLog, log
from dflash.train.schedule import StepPlan, batch_key, digest
from dflash.train.trackers import Trackers
from dflash.train.trainer import Trainer
from dflash.train.watch import Alerts

if TYPE_CHECKING:
    from dflash.target.remote import RemoteTarget

CONTRACT = (
    "block_size", "mask_token_id", "target_layer_ids", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "layer_types", "sliding_window",
    "rope_parameters", "attention_bias",
)  # fmt: skip
"""What makes two drafters the same model but for their weights, as far as the run's config or the target says it."""


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
            "target_parameters": trainer.target.parameter_count, "device": str(trainer.device),
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


@dataclass
class Prepared:
    """What every process of a run derives alike from the config."""

    data: TokenData
    prompts: list[Any]
    plan: StepPlan


def prepare(config: Config) -> Prepared:
    """Tokenised data, evaluation prompts and the plan.

    Raises:
        DataError, ConfigError: data that cannot be used, or that hold the mask token.
    """
    c = config
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
    return Prepared(data, prompts, plan)


def answers_of(config: Config, run_dir: Path, prepared: Prepared, target: Target | RemoteTarget) -> list[Answer]:
    """The target's greedy answers to the evaluation's prompts, generated once per run.

    Raises:
        DataError: none of them is of any use.
    """
    e = config.eval
    answers = load_or_generate(
        run_dir / "eval_answers.jsonl", cast(Target, target), prepared.prompts, e.max_new_tokens, e.batch_size
    )
    if answers and all(len(answer.answer) < 2 for answer in answers):
        raise DataError(
            "data.eval: the target ends every answer at once, so there is nothing to measure; look at the prompts"
        )
    return answers


def build(config: Config, run_dir: Path) -> Trainer:
    """The trainer of a process that has target and drafter; the same objects for a fresh start and a resume."""
    prepared = prepare(config)
    target = frozen_target(config, config.placement.target)
    drafter = placed_drafter(config, target)
    answers = answers_of(config, run_dir, prepared, target)
    features_of = feature_source(config, prepared, target)
    return trainer(config, run_dir, prepared, target, drafter, answers, features_of)


def trainer(
    config: Config,
    run_dir: Path,
    prepared: Prepared,
    target: Target | RemoteTarget,
    drafter: DFlashDraftModel,
    answers: list[Answer],
    features_of: Callable[[Batch], TargetFeatures],
) -> Trainer:
    """The trainer from its parts, with the digests that a resume must meet again."""
    fingerprint = {
        "data": prepared.data.fingerprint,
        "steps": prepared.plan.total,
        "target": target.fingerprint,
        "config": config_digest(config),
    }
    return Trainer(
        config, drafter, target, prepared.data, prepared.plan, features_of, answers, run_dir, fingerprint,
        max_sick=config.placement.max_sick_batches,
    )  # fmt: skip


def placed_drafter(config: Config, target: Target | RemoteTarget) -> DFlashDraftModel:
    """A new drafter on the target object's device, and a line about it."""
    drafter = new_drafter(config, target.config).to(target.device)
    trainable, frozen = sizes(drafter)
    if config.target.model.startswith(RANDOM):
        log.warning(f"target.model {config.target.model} has random weights: the drafter will be worthless")
    log.info(
        f"drafter: {(trainable + frozen) / 1e6:,.1f} M parameters ({trainable / 1e6:,.1f} M trainable, "
        f"{frozen / 1e6:,.1f} M frozen), {len(drafter.layers)} layers, blocks of {config.drafter.block_size}, on "
        f"{target.device}; target: {target.parameter_count / 1e6:,.1f} M parameters, all frozen"
    )
    return drafter


def new_drafter(config: Config, target_config: Any) -> DFlashDraftModel:
    """A drafter of the config's shape in fp32: its weights drawn from the run's seed, or those of ``init_from``.

    Raises:
        ConfigError: ``init_from`` is a drafter of another shape; the sentence lists how.
        DrafterError: it cannot be read.
    """
    d = config.drafter
    given = load_drafter(find_drafter(d.init_from), torch.float32, torch.device("cpu")) if d.init_from else None
    # No key of the config says it. Targets with another kind of norm have none either.
    eps = given.config.rms_norm_eps if given else getattr(target_config, "rms_norm_eps", 1e-6)
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
        rms_norm_eps=eps,
        eos_token_id=target_config.eos_token_id,
        pad_token_id=target_config.pad_token_id,
        bos_token_id=target_config.bos_token_id,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(config.seed)
    fresh = DFlashDraftModel(shape).float().train()
    for layer in fresh.layers:
        layer.dropout = config.train.dropout
    if given is None:
        return fresh
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


def feature_source(config: Config, prepared: Prepared, target: Target) -> Callable[[Batch], TargetFeatures]:
    """Where a batch's features come from: the target itself, or the folder it filled before step 1."""
    data, device = prepared.data, target.device
    pad_to = padded_tokens(config.train.tokens_per_batch, device)
    if config.data.features is None:

        def online(batch: Batch) -> TargetFeatures:
            ids = batch.samples.tolist()
            rows, masks = zip(*(data.sample(i) for i in ids), strict=True)
            features = target.capture(rows, masks, ids, pad_to)
            if config.placement.max_sick_batches:  # to skip one it must be known before it is trained on: a wait
                features.check(target.hidden_size)
            return features

        return online
    store = FeatureStore(Path(config.data.features), data, feature_contract(config, data, target))
    store.capture(target, config.train.tokens_per_batch)
    return read_ahead(prepared.plan, lambda batch: store.features(batch.samples.tolist(), pad_to, device))


def read_ahead(plan: StepPlan, read: Callable[[Batch], TargetFeatures]) -> Callable[[Batch], TargetFeatures]:
    """``read``, while a thread reads what comes next in the plan: a batch takes as long as a small drafter's step."""
    batches = [batch for step in range(1, plan.total + 1) for batch in plan.batches(step)]
    following = {batch_key(batch): later for batch, later in pairwise(batches)}
    pool, ahead = ThreadPoolExecutor(1, "features"), dict[str, Future[TargetFeatures]]()

    def features_of(batch: Batch) -> TargetFeatures:
        key = batch_key(batch)
        found = ahead.pop(key, None)
        features = found.result() if found else read(batch)
        ahead.clear()  # what was read for a step that did not come
        if later := following.get(key):
            ahead[batch_key(later)] = pool.submit(read, later)
        return features

    return features_of
