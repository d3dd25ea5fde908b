"""The processes of a run with several: a replica, the leading drafter, the drafters that follow it.

They meet in this order: each loads what it needs and says it is ready; the leader opens the run with the step it
continues after and the evaluation's answers; the process groups form; embedding and head travel; training begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from dflash.config import Config
from dflash.data.batches import Batch
from dflash.decode.walk import Answer, answer_groups
from dflash.model import DFlashDraftModel
from dflash.score import padded_tokens
from dflash.target.features import TargetFeatures
from dflash.target.link import Link, RunFailed, Store
from dflash.target.load import load_target_config
from dflash.target.remote import RemoteTarget, describe, send_weights
from dflash.target.server import answer_questions, get_long, put_long, serve
from dflash.target.stream import Item, Rows, Stream, Wire
from dflash.train import build, schedule
from dflash.train.build import Prepared
from dflash.train.capture import frozen_target
from dflash.train.log import MetricsLog, log
from dflash.train.peers import Peers
from dflash.train.placement import Role, transport
from dflash.train.trainer import Trainer
from dflash.train.worker import NODE, Orders


def replica(config: Config, run_dir: Path, role: Role, everyone: Sequence[Role], orders: Orders) -> None:
    """Load the target, serve until the plan ends."""
    prepared = build.prepare(config)
    target = frozen_target(config, role.devices)
    link = _link(config, role, everyone, orders)
    link.ready(describe(target))
    if role.index == 0:
        answer_questions(target, link, link.leader)
    opened = get_long(link, "open", link.leader)
    wire, _ = _groups_of(role, everyone, link, target.device)
    drafters = [r.rank for r in everyone if r.kind == "drafter"]
    if role.index == 0:
        send_weights(target, wire, role.rank, drafters)
    plan = _items(config, prepared, opened, everyone)
    own = (item for item in plan if item.replica == role.rank)
    serve(target, link, wire, own, _rows_of(prepared, opened["answers"]), in_flight=len(role.devices))
    log.info(f"{role}: served to the end of the plan")
    link.await_("saved", link.leader)


def lead(
    config: Config, run_dir: Path, role: Role, everyone: Sequence[Role], orders: Orders, run: Callable[..., int]
) -> int:
    """Drafter 0: decides where the run continues, evaluates, logs, saves."""
    prepared = build.prepare(config)
    link = _link(config, role, everyone, orders)
    link.say("leader", {"pid": os.getpid(), "node": os.environ[NODE]})
    abouts = link.gather([r.rank for r in everyone if r.kind == "replica"])
    if len({about["fingerprint"] for about in abouts}) > 1:
        listed = ", ".join(f"{r}: {about['fingerprint']}" for r, about in zip(everyone, abouts, strict=False))
        raise RunFailed(f"the replicas loaded different weights ({listed}): give all machines the same target")
    link.gather([r.rank for r in everyone if r.kind == "drafter" and r != role])
    put_long(link, "target", abouts[0])
    target = _remote(config, role, link, abouts[0])
    answers: list[Answer] = []

    def make() -> Trainer:
        answers.extend(build.answers_of(config, run_dir, prepared, target))
        return build.trainer(config, run_dir, prepared, target, _drafter(config, target), answers, _unfed)

    def opened(trainer: Trainer) -> None:
        progress = trainer.progress
        told = {
            "step": progress.step,
            "owes_eval": progress.owes_eval,
            "answers": [[a.prompt, a.answer] for a in answers],
        }
        put_long(link, "open", told)
        _connect(config, role, everyone, link, trainer, target, told, prepared)

    try:
        return run(config, run_dir, make, orders, opened)
    finally:
        link.say("saved", True)
        # The others leave on this word; going first would take the store's last reader from under their feet.


def follow(config: Config, run_dir: Path, role: Role, everyone: Sequence[Role], orders: Orders) -> None:
    """A further drafter: the same weights and the same updates as drafter 0, on other batches."""
    prepared = build.prepare(config)
    link = _link(config, role, everyone, orders)
    link.ready({})
    target = _remote(config, role, link, get_long(link, "target", link.leader))
    told = get_long(link, "open", link.leader)
    trainer = build.trainer(config, run_dir, prepared, target, _drafter(config, target), [], _unfed)
    if told["step"]:
        trainer.resume(trainer.checkpoints.folder / f"step_{told['step']:06d}")
    _connect(config, role, everyone, link, trainer, target, told, prepared)
    trainer.run(MetricsLog(Path(os.devnull)), lambda: False)
    link.await_("saved", link.leader)


def _unfed(batch: Batch) -> TargetFeatures:
    raise RunFailed("the stream of features is not connected yet")


def _drafter(config: Config, target: RemoteTarget) -> DFlashDraftModel:
    return build.placed_drafter(config, target)


def _connect(
    config: Config,
    role: Role,
    everyone: Sequence[Role],
    link: Link,
    trainer: Trainer,
    target: RemoteTarget,
    told: dict[str, Any],
    prepared: Prepared,
) -> None:
    """Form the groups, take embedding and head, and let the features flow."""
    wire, group = _groups_of(role, everyone, link, target.device)
    target.receive_weights(wire, 0, role.rank)
    rows_of, pad_to = _rows_of(prepared, told["answers"]), padded_tokens(config.train.tokens_per_batch, target.device)
    longest = max((len(prompt) + len(answer) for prompt, answer in told["answers"]), default=0)
    stream = Stream(
        link, wire, (item for item in _items(config, prepared, told, everyone) if item.drafter == role.rank), rows_of,
        rows=max(config.train.tokens_per_batch, longest), dtype=target.dtype, device=target.device,
        width=target.hidden_size * len(config.target.context_layers or ()),
    )  # fmt: skip
    size = sum(r.kind == "drafter" for r in everyone)
    trainer.peers = Peers(role.index, size, group, stream, _eval_groups(config, told))
    trainer.features_of = lambda batch: stream.next(schedule.batch_key(batch), pad_to)


def _eval_groups(config: Config, told: dict[str, Any]) -> list[list[int]]:
    return answer_groups(
        [len(prompt) + len(answer) for prompt, answer in told["answers"]], config.train.tokens_per_batch
    )


def _items(config: Config, prepared: Prepared, told: dict[str, Any], everyone: Sequence[Role]) -> Any:
    """What is computed from where the run continues."""
    replicas = sum(r.kind == "replica" for r in everyone)
    return schedule.items(
        prepared.plan, told["step"], replicas, len(everyone) - replicas, config.eval.every,
        _eval_groups(config, told), told["owes_eval"],
    )  # fmt: skip


def _rows_of(prepared: Prepared, answers: Sequence[Sequence[Sequence[int]]]) -> Rows:
    """Tokens and masks of an item: of the training data, or of the evaluation's answers."""

    def rows_of(item: Item) -> tuple[list[np.ndarray], list[np.ndarray]]:
        if not item.is_eval:
            rows, masks = zip(*(prepared.data.sample(i) for i in item.ids), strict=True)
            return list(rows), list(masks)
        pairs = [answers[i] for i in item.ids]
        return (
            [np.array([*prompt, *answer]) for prompt, answer in pairs],
            [np.array([False] * len(prompt) + [True] * len(answer)) for prompt, answer in pairs],
        )

    return rows_of


def _remote(config: Config, role: Role, link: Link, about: dict[str, Any]) -> RemoteTarget:
    known = load_target_config(config.target.model, config.target.revision)
    dtype: torch.dtype = getattr(torch, config.target.dtype)
    return RemoteTarget(about, known, link, 0, dtype, torch.device(role.devices[0]))


def _link(config: Config, role: Role, everyone: Sequence[Role], orders: Orders) -> Link:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    p, leader = config.placement, next(r.rank for r in everyone if r.kind == "drafter")

    def connect() -> Store:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        return PrefixStore("dflash", store)

    link = Link(
        connect, role.rank, leader, [str(r) for r in everyone], orders.stopped, p.ready_timeout_s, p.heartbeat_timeout_s
    )  # fmt: skip
    orders.link = link
    return link


def _groups_of(role: Role, everyone: Sequence[Role], link: Link, device: torch.device) -> tuple[Wire, Any]:
    """The wire of this process and the group of the drafters. All processes are ready when this begins, so nobody is
    waited for long; the transports' own limits are out of reach, since heartbeats tell who is dead.

    Args:
        device: that features leave from or arrive on: of a replica's GPUs the one with the head, first or last.
    """
    kind, forever = transport(list(everyone)), timedelta(days=30)
    store = PrefixStore(f"groups/{link.token}", link.second())
    dist.init_process_group("gloo", store=store, rank=role.rank, world_size=len(everyone), timeout=forever)
    replicas = [r.rank for r in everyone if r.kind == "replica"]
    drafters = [r.rank for r in everyone if r.kind == "drafter"]
    group = dist.new_group(drafters, backend=kind, timeout=forever) if len(drafters) > 1 else None
    if kind == "gloo":
        return Wire(), group
    pairs = {(r, d): dist.new_group([r, d], backend="nccl", timeout=forever) for r in replicas for d in drafters}
    wire = Wire(pairs)
    token = torch.zeros(1, device=device)
    # In one order everywhere: a communicator opens at its first use, with both ends present, for good on that device.
    for pair in pairs:
        if role.rank == pair[0]:
            wire.send(token, *pair)
        elif role.rank == pair[1]:
            wire.receive(token, *pair)
    return wire, group
