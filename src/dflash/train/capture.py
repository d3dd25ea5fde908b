"""A run's target and what its features depend on; ``dflash data capture``, which puts them on disk before training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash import estimate
from dflash.config import Config, ConfigError, load_config
from dflash.config_target import resolve
from dflash.data.tokenize import TokenData, load_data, summary, tokenizer_digests
from dflash.target.compiled import choose_paths
from dflash.target.load import load_target_config, load_tokenizer
from dflash.target.model import Target, load_target
from dflash.target.store import FeatureStore
from dflash.train.log import log


def frozen_target(config: Config, devices: Sequence[str]) -> Target:
    """The target of a run, its layers split over ``devices`` where there are several."""
    t = config.target
    target = load_target(
        t.model, revision=t.revision, dtype=getattr(torch, t.dtype), device=devices,
        context_layers=t.context_layers or (), label_layer=t.label_layer,
    )  # fmt: skip
    choose_paths(target, config.train.tokens_per_batch, config.data.max_length)
    return target


def feature_contract(config: Config, data: TokenData, target: Target) -> dict[str, Any]:
    """What features of ``data`` under ``target`` depend on: the manifest of a store, compared key by key."""
    return {
        "target": config.target.model,
        "revision": config.target.revision,
        "weights": target.fingerprint,
        "dtype": config.target.dtype,
        "context_layers": config.target.context_layers,
        "label_layer": config.target.label_layer,
        **tokenizer_digests(target.tokenizer),
        "data": data.fingerprint,
    }


def capture(path: Path, overrides: Sequence[str], out: Path) -> int:
    """Fill ``out`` with the features of a config's training data; returns the exit code.

    A training with ``data.features`` set to that folder reads them, and captures itself what is missing.

    Raises:
        ConfigError: the config is faulty, or its target's device is not here.
        StoreError: the folder holds other features, or has no room.
        DataError, TargetError: the data or the target cannot be read.
    """
    c = load_config(path, [*overrides, f"data.features={out.expanduser().absolute()}"])
    target_config = estimate.find_target_config(c, weights_needed=True)
    c = resolve(c, target_config)
    c.target.revision = getattr(target_config, "_commit_hash", None) or c.target.revision
    device = c.placement.target[0].rpartition("/")[2]
    if device != "cpu" and int(device.removeprefix("cuda:")) >= torch.cuda.device_count():
        raise ConfigError(
            [f"placement.target names {device}, which is not here; give placement.target=[cpu] or another"]
        )
    tokenizer = load_tokenizer(c.target.model, c.target.revision)
    data = load_data(
        c.data.train, tokenizer, max_length=c.data.max_length, chat_template_kwargs=c.data.chat_template_kwargs,
        vocab_size=load_target_config(c.target.model, c.target.revision).vocab_size,
        cache_dir=Path(c.data.cache_dir) if c.data.cache_dir else None,
    )  # fmt: skip
    log.info(summary(data.stats))
    target = frozen_target(c, [device])
    store = FeatureStore(Path(c.data.features or out), data, feature_contract(c, data, target))
    store.capture(target, c.train.tokens_per_batch)
    log.info(f"features of {len(data):,} rows are in {store.folder}; train with data.features={store.folder}")
    return 0
