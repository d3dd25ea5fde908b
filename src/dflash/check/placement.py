"""Where everything goes: devices, memory, disk, and how fast either side will be.

Shape letters: N blocks, T packed tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dflash import estimate
from dflash.bench.shapes import H200_PEAK, step_flops
from dflash.check.data import DataFound
from dflash.check.page import Page
from dflash.config import Config
from dflash.config_target import lookup, text_config
from dflash.data.batches import counted_slots, sample_anchors
from dflash.report.status import duration

TARGET_SHARE, DRAFTER_SHARE = 0.70, 0.67
"""Of a GPU's best rate, measured on an H200 at the 27B shape: capture with labels, and a drafter step (docs/LOG.md)."""
NEARLY_FULL = 0.9
UNBALANCED = 1.5


@dataclass(frozen=True)
class Work:
    """FLOPs of one micro-batch: ``capture`` of the target; ``context + block * N`` of the drafter for N blocks."""

    tokens: float
    capture: float
    context: float
    block: float


@dataclass
class Measured:
    """How fast the target was on this machine, and seconds of target and drafter for one micro-batch of a single
    process; None where that was not taken."""

    tokens_per_s: float
    batch_s: tuple[float, float] | None = None


def check_placement(page: Page, config: Config, target_config: Any, data: DataFound | None) -> None:
    """Devices, memory, disk."""
    page.section("placement")
    roles = estimate.roles(config, target_config)
    for role in roles:
        page.block(f"{role.name:<19} {' '.join(role.devices)}")
    seen: set[str] = set()
    for role in roles:
        kind = role.name.rstrip(" 0123456789")
        if kind not in seen:
            seen.add(kind)
            page.block(f"memory of a {kind} (estimate): {role.bytes / estimate.GIB:.2f} GiB")
            page.block("\n".join(f"{need.bytes / estimate.GIB:10.2f}  {need.part}" for need in role.needs))
    count, absent = torch.cuda.device_count(), []
    for device, needed in estimate.per_device(roles).items():
        node, _, local = device.rpartition("/")
        need = f"{device} ({needed / estimate.GIB:.1f} GiB)"
        if node:
            page.not_run(device, f"on machine {node}; it needs {needed / estimate.GIB:.1f} GiB")
        elif local == "cpu":
            _fits(page, "memory of cpu", needed, host_memory(), "in all")
        elif int(local.partition(":")[2]) >= count:
            absent.append(need)
        else:
            _fits(page, f"memory of {device}", needed, device_memory(local), "in all")
    if absent:
        text = f"this machine has {count} GPUs, and not {', '.join(absent)}"
        page.line("fail", "devices", f"{text}; run this where training will run, or name other devices in placement")
    host = estimate.checkpoint_bytes(config, target_config)
    if "cpu" not in config.placement.drafter:
        _fits(page, "host memory", host, host_memory(), "for the copy that a checkpoint is written from")
    _disk(page, config, target_config, data)


def _fits(page: Page, name: str, needed: float, there: float, what: str) -> None:
    have = f"{needed / estimate.GIB:.2f} of {there / estimate.GIB:.2f} GiB, {what}"
    page.judge(
        name, have, warn="little room for what the estimate leaves out" if needed > NEARLY_FULL * there else "",
        fail="more than the device has; lower train.tokens_per_batch or train.anchors_per_batch, or split the target "
        "over more devices with placement.gpus_per_replica" if needed > there else "",
    )  # fmt: skip


def device_memory(device: str) -> float:
    """Bytes of a GPU."""
    return float(torch.cuda.get_device_properties(torch.device(device)).total_memory)


def host_memory() -> float:
    """Bytes that this process may use: of the machine, or of its container."""
    there = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            there = min(there, float(Path(limit).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such control group, or no limit ("max")
            continue
    return there


def _disk(page: Page, config: Config, target_config: Any, data: DataFound | None) -> None:
    needs = {config.run_dir: sum(need.bytes for need in estimate.disk(config, target_config))}
    if config.data.features:
        if data is None:
            page.not_run("disk of features", "the data cannot be read")
        else:
            needs[config.data.features] = len(data.tokens.ids) * (
                estimate.feature_bytes_per_token(config, target_config) + 4
            )
    for folder, needed in needs.items():
        path = Path(folder).absolute()
        while not path.exists():
            path = path.parent
        free = shutil.disk_usage(path).free
        page.judge(
            "disk", f"{needed / estimate.GIB:.2f} GiB for {folder}, {free / estimate.GIB:.2f} GiB free",
            fail=f"{path} cannot be written to; name another folder" if not os.access(path, os.W_OK)
            else "make room, or name another folder" if needed > free else "",
        )  # fmt: skip


# --- rates ------------------------------------------------------------------------------------------------------------


def check_rates(
    page: Page, config: Config, target_config: Any, data: DataFound | None, measured: Measured | None
) -> None:
    """How fast both sides will be, how many anchors would balance them, and how long the run takes.

    Args:
        measured: None: the target is not here, and rates follow from a GPU's best rate.
    """
    page.section("time")
    work = work_of(config, target_config, data)
    place = config.placement
    alternates = place.target == place.drafter and len(place.target) == 1
    drafter_flops = work.context + work.block * config.train.anchors_per_batch
    if measured is not None and measured.batch_s is not None:
        page.line("pass", "measured", "one micro-batch on this device, without the optimizer")
        target_s, drafter_s = measured.batch_s
    elif measured is not None:
        target_s = work.tokens / measured.tokens_per_s
        drafter_s = target_s * drafter_flops / work.capture
        page.line(
            "pass", "assumed", f"the target's rate on the sample above, {measured.tokens_per_s:,.0f} tokens/s, and "
            "as many FLOP/s of the drafter",
        )  # fmt: skip
    else:
        page.line(
            "pass", "assumed", f"GPUs of {H200_PEAK / 1e12:.0f} TFLOP/s at best (an H200), of which the target reaches "
            f"{TARGET_SHARE:.0%} and the drafter {DRAFTER_SHARE:.0%}, as measured at the 27B shape",
        )  # fmt: skip
        target_s, drafter_s = work.capture / (TARGET_SHARE * H200_PEAK), drafter_flops / (DRAFTER_SHARE * H200_PEAK)
    sides = (len(place.target), len(place.drafter))
    rates = [work.tokens / target_s * sides[0], work.tokens / drafter_s * sides[1]]
    each = config.train.anchors_per_batch
    if alternates:
        per_batch = target_s + drafter_s
        page.line("pass", "target", f"{target_s:.3g} s a micro-batch of {work.tokens:,.0f} tokens")
        page.line("pass", "drafter", f"{drafter_s:.3g} s, at {each:,} anchors; one device does both in turn")
    else:
        per_batch = work.tokens / min(rates)
        replicas = sides[0] // place.gpus_per_replica
        page.line("pass", "target", f"{rates[0]:,.0f} tokens/s, replicas: {replicas}, devices: {sides[0]}")
        page.line("pass", "drafter", f"{rates[1]:,.0f} tokens/s, devices: {sides[1]}, at {each:,} anchors a batch")
        _balance(page, config, work, target_s, drafter_s, sides)
    if config.data.features:
        per_batch = drafter_s / sides[1]
    speed = work.tokens / per_batch
    if data is None or data.plan is None:
        page.line("pass", "rate", f"{speed:,.0f} tokens/s; without data nothing can be said of the whole run")
        return
    batches = data.plan.total * config.train.grad_accumulation
    text = f"{data.plan.total:,} steps, {batches * work.tokens:,.0f} tokens at {speed:,.0f} tokens/s: "
    text += duration(batches * per_batch)
    if config.data.features:
        text += f", after {duration(len(data.tokens.ids) / rates[0])} to capture data.features once"
    page.line("pass", "run", f"{text}; evaluations and the first compilation not counted")


def _balance(page: Page, config: Config, work: Work, target_s: float, drafter_s: float, sides: tuple[int, int]) -> None:
    """The anchors at which one side's seconds per batch are the other's: ``context + block * N`` scales with N."""
    each = config.train.anchors_per_batch
    per_flop = drafter_s / (work.context + work.block * each)
    wanted = (target_s / sides[0] * sides[1] / per_flop - work.context) / work.block
    ratio = (drafter_s / sides[1]) / (target_s / sides[0])
    slower = "drafter" if ratio > 1 else "target"
    if wanted < 1:
        page.line("warn", "balance", "no number of anchors lets the drafter follow: give it more devices")
        return
    text = f"both sides are equally fast at train.anchors_per_batch {wanted:,.0f}; at {each:,} the {slower} takes "
    text += f"{max(ratio, 1 / ratio):.2f} times as long as the other"
    page.judge(
        "balance", text,
        warn="more anchors cost nothing here" if ratio < 1 / UNBALANCED
        else "the target's devices wait; lower it, or give the drafter more devices" if ratio > UNBALANCED else "",
    )  # fmt: skip


def work_of(config: Config, target_config: Any, data: DataFound | None) -> Work:
    """FLOPs of a middling micro-batch: the plan's own first ones, or a full one of the longest sequences."""
    known, train, size = text_config(target_config), config.train, config.drafter.block_size
    shape = drafter_shape(config, target_config)
    if data is not None and data.plan is not None:
        batches = [batch for step in data.plan.steps[:32] for batch in step][:32]
        n = len(batches)
        lengths = [data.tokens.lengths[batch.samples] for batch in batches]
        at, counted = [], 0
        for batch in batches:
            for sample, count in zip(batch.samples.tolist(), batch.anchors.tolist(), strict=True):
                mask = data.tokens.sample(sample)[1]
                own = sample_anchors(config.seed, batch.epoch, sample, mask, count)
                at.append(own)
                counted += counted_slots(mask, own, size)
        anchor_pos = np.concatenate(at)
        supervised = float(data.tokens.loss_mask.mean())
    else:
        n, supervised = 1, 1.0
        lengths = [np.full(max(train.tokens_per_batch // config.data.max_length, 1), config.data.max_length)]
        anchor_pos = np.linspace(0, config.data.max_length - 1, train.anchors_per_batch).astype(np.int64)
        counted = train.anchors_per_batch * (size - 1)
    tokens = sum(int(one.sum()) for one in lengths)
    capture = sum(capture_flops(known, one, supervised) for one in lengths)
    none = np.empty(0, dtype=np.int64)
    context = step_flops(shape, tokens, none, 0)
    blocks = step_flops(shape, tokens, anchor_pos, counted) - context
    return Work(tokens / n, capture / n, context / n, blocks / max(len(anchor_pos), 1))


def capture_flops(known: Any, lengths: np.ndarray, supervised: float) -> float:
    """FLOPs of the target's forward pass over sequences of ``lengths``, its head at the supervised share of them.

    Two per active weight and token, and the causal half of attention; experts that do not run are left out.
    """
    width, vocabulary = lookup(known, "hidden_size"), lookup(known, "vocab_size")
    tables = (1 if lookup(known, "tie_word_embeddings") else 2) * vocabulary * width
    active = estimate.target_parameters(known) - tables
    experts = lookup(known, "num_experts") or lookup(known, "num_local_experts") or 0
    depth = lookup(known, "num_hidden_layers")
    if experts:
        idle = experts - (lookup(known, "num_experts_per_tok") or experts)
        inner = lookup(known, "moe_intermediate_size") or lookup(known, "intermediate_size")
        active -= depth * idle * 3 * width * inner
    heads = lookup(known, "num_attention_heads")
    query = heads * (lookup(known, "head_dim") or width // heads)
    full = estimate.layer_kinds(known, depth).count("full_attention")
    tokens = float(lengths.sum())
    head = vocabulary * width * supervised
    return 2 * tokens * (active + head) + 2 * 2 * full * query * float((lengths.astype(np.float64) ** 2).sum()) / 2


def drafter_shape(config: Config, target_config: Any) -> Any:
    """What :func:`dflash.bench.shapes.step_flops` reads of a drafter."""
    d, known = config.drafter, text_config(target_config)
    return SimpleNamespace(
        hidden_size=lookup(known, "hidden_size"), vocab_size=lookup(known, "vocab_size"), block_size=d.block_size,
        num_hidden_layers=d.num_hidden_layers, num_attention_heads=d.num_attention_heads, head_dim=d.head_dim,
        num_key_value_heads=d.num_key_value_heads, intermediate_size=d.intermediate_size, layer_types=d.layer_types,
        sliding_window=d.sliding_window, target_layer_ids=config.target.context_layers,
    )  # fmt: skip
