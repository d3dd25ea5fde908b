"""The target and the drafter as training would have them: features, agreement with the data, accepted length, speed.

Shape letters: T packed tokens, L context layers, D hidden size.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from dflash import estimate
from dflash.check.data import DataFound
from dflash.check.page import Page
from dflash.check.placement import Measured, device_memory, host_memory
from dflash.config import Config
from dflash.config_target import lookup, text_config
from dflash.data.batches import Batch, counted_slots, sample_anchors
from dflash.decode.walk import Answer, walk, walk_batch
from dflash.score import anchor_rows, padded_tokens, score_blocks
from dflash.target.features import SickFeatures, TargetFeatures
from dflash.target.model import Target
from dflash.train.build import new_drafter
from dflash.train.capture import frozen_target

SAMPLE_TOKENS = {"cpu": 2048, "cuda": 65_536}
"""Tokens of data that the target reads here: a few seconds of a small target on a CPU."""
AGREES, HARDLY = 0.7, 0.5
"""Shares of data tokens that the target would have chosen itself. SmolLM2: 1.0 of its own greedy answers, .84 of those
sampled at temperature .7, .19 of technical prose; kin of the target's lie between."""
ANSWERS, ANSWER_TOKENS = 4, 32
LEAK = 1.5
"""Accepted length that no untrained drafter reaches."""
MEASURED_S = 30.0
"""A micro-batch that would take longer is estimated, not measured."""


def check_layers(page: Page, config: Config, target_config: Any) -> None:
    """What ``fc`` sees and where labels come from."""
    page.section("layers")
    known = text_config(target_config)
    layers, width = config.target.context_layers or [], lookup(known, "hidden_size")
    depth, label = lookup(known, "num_hidden_layers"), config.target.label_layer
    page.line(
        "pass", "context layers", f"{layers} of {depth}: fc reads their outputs, {len(layers) * width:,} -> {width:,}"
    )
    last = f"layer {depth - 1}" if label == "final" else f"layer {label}"
    page.line("pass", "label layer", f"{label}: {last} through the target's own norm and head; none of fc's")
    early = min(layers) < depth / 3 and max(layers) >= depth / 2
    page.judge(
        "spread", f"layers {min(layers)} to {max(layers)}",
        warn="" if early or depth < 8 else "published drafters read from early to late layers; leave it null for those",
    )  # fmt: skip


def check_target(
    page: Page, config: Config, target_config: Any, tokenizer: Any, data: DataFound | None
) -> Measured | None:
    """Load the target where training would, and look at what it gives; returns how fast it was here."""
    page.section("target")
    devices = _devices(config, target_config)
    if not devices:
        for name in ("features", "agreement", "accepted length"):
            page.not_run(name, "the target is not loaded here")
        return None
    target: Target | None = None
    with page.guarded("target"):
        target = frozen_target(config, devices)
        page.line("pass", "target", f"loaded on {', '.join(devices)}; final norm and head give its own logits")
    if target is None:
        for name in ("features", "agreement", "accepted length"):
            page.not_run(name, "the target cannot be loaded")
        return None
    _mask_row(page, config, target)
    if data is None:
        for name in ("features", "agreement", "accepted length"):
            page.not_run(name, "the data cannot be read")
        return None
    rate = None
    with page.guarded("features"):
        rate = _features(page, config, target, data)
    with page.guarded("accepted length"):
        _accepted(page, config, target, data)
    if rate is None:
        return None
    measured = Measured(rate)
    shared = config.placement.target == config.placement.drafter and len(config.placement.target) == 1
    if shared and data.plan is not None and config.train.tokens_per_batch / rate < MEASURED_S:
        with page.guarded("time"):
            measured.batch_s = _measure(config, target, data)
    return measured


def _devices(config: Config, target_config: Any) -> list[str]:
    """Those of the first replica, if they are all here and have room for its weights."""
    names = [name.rpartition("/")[2] for name in config.placement.target[: config.placement.gpus_per_replica]]
    if any(name.startswith("cuda") and int(name.partition(":")[2]) >= torch.cuda.device_count() for name in names):
        return []  # placement has said so
    weights = estimate.target_parameters(target_config) * (4 if config.target.dtype == "float32" else 2)
    room = sum(device_memory(name) if name.startswith("cuda") else host_memory() for name in names)
    return names if weights <= room else []


def _mask_row(page: Page, config: Config, target: Target) -> None:
    weight = cast(torch.Tensor, target.embed.weight)
    norms = weight[:: max(len(weight) // 4096, 1)].float().norm(dim=1)
    own, middle = float(weight[config.drafter.mask_token_id].float().norm()), float(norms.median())
    page.judge(
        "mask embedding", f"norm {own:.3g}, the middle one {middle:.3g}",
        warn="a row of zeros gives the drafter nothing to read; name another unused token" if own == 0 else "",
    )  # fmt: skip


def _features(page: Page, config: Config, target: Target, data: DataFound) -> float:
    """Health of context features on a sample, and how often the data are what the target would have said; returns
    tokens/s of the target."""
    tokens = data.tokens
    budget = SAMPLE_TOKENS[target.device.type]
    order = np.random.default_rng(config.seed).permutation(len(tokens))
    chosen = order[np.cumsum(tokens.lengths[order]) <= budget]
    chosen = chosen if len(chosen) else order[:1]
    same, total, read, spent = 0, 0, 0, 0.0
    sick: list[str] = []
    per_row: list[float] = []
    for start in range(0, len(chosen), 8):
        samples = [int(i) for i in chosen[start : start + 8]]
        rows, masks = zip(*(tokens.sample(i) for i in samples), strict=True)
        begun = time.perf_counter()
        features = target.capture(rows, masks, samples)
        _wait(target.device)
        if start or len(chosen) <= 8:  # the first one pays for what is set up once
            spent += time.perf_counter() - begun
            read += features.bounds[-1]
        with _collect(sick):
            features.check(target.hidden_size)
        hits, count = _agreement(features)
        same, total = same + int(hits.sum()), total + len(hits)
        per_row += [float(hits[count == b].mean()) for b in np.unique(count)]
    page.judge(
        "features", f"{len(chosen):,} rows of data read, {len(target.context_layers)} layers of {target.hidden_size:,}",
        fail=sick[0] if sick else "",
    )  # fmt: skip
    share = same / max(total, 1)
    advice = "off-policy data: let the target answer the prompts itself (dflash data regenerate)"
    page.judge(
        "agreement", f"the target would have chosen {share:.1%} of {total:,} supervised tokens itself",
        warn=advice if share < AGREES else "", fail=advice if share < HARDLY else "",
    )  # fmt: skip
    worst = np.quantile(per_row, 0.1) if per_row else 1.0
    if share >= HARDLY > worst:
        page.line("warn", "agreement", f"a tenth of the rows are under {worst:.0%}: some of the answers are another's")
    return read / spent


def _agreement(features: TargetFeatures) -> tuple[np.ndarray, np.ndarray]:
    """bool [pairs] whether the target's choice at a supervised position is the next token, supervised too; and the
    sequence of each pair."""
    mask, seq = features.loss_mask, features.seq
    pairs = mask[:-1] & mask[1:] & (seq[:-1] == seq[1:])
    same = features.labels[:-1] == features.ids[1:]
    return same[pairs].cpu().numpy(), seq[:-1][pairs].cpu().numpy()


class _collect:
    """Keeps the sentence of sick features and goes on: agreement is worth knowing all the same."""

    def __init__(self, found: list[str]) -> None:
        self.found = found

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, SickFeatures):
            self.found.append(str(error))
            return True
        return False


def _accepted(page: Page, config: Config, target: Target, data: DataFound) -> None:
    """Accepted length of a drafter of random weights, and of ``init_from``, on a few greedy answers."""
    prompts = data.prompts[:ANSWERS]
    if not prompts:
        page.not_run("accepted length", "no prompt in data.eval, and no training row begins with one")
        return
    asked = [prompt.ids.tolist() for prompt in prompts]
    answers = target.greedy(asked, min(ANSWER_TOKENS, config.eval.max_new_tokens), len(asked), progress=False)
    made = [Answer(prompt.origin, ids, answer) for prompt, ids, answer in zip(prompts, asked, answers, strict=True)]
    short = sum(len(answer) < 2 for answer in answers)
    page.judge(
        "greedy answers", f"{len(answers)} of the target's own, {sum(map(len, answers))} tokens",
        warn=f"{short} are shorter than two tokens: the target ends at once" if short else "",
        fail="all are shorter than two tokens, so there is nothing to draft; look at the prompts"
        if short == len(answers) else "",
    )  # fmt: skip
    if short == len(answers):
        page.not_run("accepted length", "no answer has two tokens")
        return
    untrained = _walked(_untrained(config), target, made)
    page.judge(
        "accepted length", f"{untrained:.2f} of an untrained drafter (plain decoding is 1)",
        warn="more than random weights can know: look at the answers, they may repeat one token"
        if untrained > LEAK else "",
    )  # fmt: skip
    if config.drafter.init_from:
        loaded = _walked(config, target, made)
        page.judge(
            "accepted length", f"{loaded:.2f} of {config.drafter.init_from}",
            warn="no better than an untrained one: another target, other layers, or another mask token"
            if loaded < untrained + 0.05 else "",
        )  # fmt: skip


def _untrained(config: Config) -> Config:
    return replace(config, drafter=replace(config.drafter, init_from=None))


def _walked(config: Config, target: Target, answers: list[Answer]) -> float:
    drafter = new_drafter(config, target.config).to(target.device).eval()
    batch = walk_batch(target.device)
    with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=config.target.dtype == "bfloat16"):
        return float(walk(drafter, target, answers, batch.tokens, batch.anchors).summary()["accepted_length"])


def _measure(config: Config, target: Target, data: DataFound) -> tuple[float, float]:
    """Seconds of target and drafter for one micro-batch of the plan, captured and trained on as a step would, without
    the optimizer; on a GPU those of the second of two, since the first sets things up."""
    assert data.plan is not None
    (batch, *_), device = data.plan.batches(1), target.device
    drafter = new_drafter(_untrained(config), target.config).to(device)
    out = (0.0, 0.0)
    for _ in range(2 if device.type == "cuda" else 1):
        begun = time.perf_counter()
        ids = batch.samples.tolist()
        rows, masks = zip(*(data.tokens.sample(i) for i in ids), strict=True)
        features = target.capture(rows, masks, ids, padded_tokens(config.train.tokens_per_batch, device))
        _wait(device)
        middle = time.perf_counter()
        anchors, counted = _anchors(config, batch, data, features)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.target.dtype == "bfloat16"):
            scored = score_blocks(drafter, target, features, features.context, anchors, counted=counted)
        scored.weighted_sum.backward()
        drafter.zero_grad(set_to_none=True)
        _wait(device)
        out = (middle - begun, time.perf_counter() - middle)
    return out


def _anchors(config: Config, batch: Batch, data: DataFound, features: TargetFeatures) -> tuple[torch.Tensor, int]:
    rows, counted = [], 0
    for b, (sample, count) in enumerate(zip(batch.samples.tolist(), batch.anchors.tolist(), strict=True)):
        mask = data.tokens.sample(sample)[1]
        own = sample_anchors(config.seed, batch.epoch, sample, mask, count)
        rows.append(features.bounds[b] + own)
        counted += counted_slots(mask, own, config.drafter.block_size)
    return anchor_rows(np.concatenate(rows), config.train.anchors_per_batch, features.ids.device), counted


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
