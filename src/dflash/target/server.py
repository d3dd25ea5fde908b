"""The loop of a target replica: compute the plan's batches in order, look at their health, send them.

It holds no state: what it computes follows from the plan, so a restart begins wherever the drafter stands.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from dflash.target.features import SickFeatures, TargetFeatures
from dflash.target.link import Link
from dflash.target.model import Target
from dflash.target.stream import Item, Outbox, Rows, Wire, checksum

REPORT_S = 30.0
CHUNK = 1 << 20
"""Bytes of a message in one value of the store."""


def serve(target: Target, link: Link, wire: Wire, items: Iterable[Item], rows_of: Rows, in_flight: int = 1) -> None:
    """Compute and send every item of this replica.

    Args:
        items: this replica's, in the plan's order.
        in_flight: batches launched before the oldest one's health is read: as many as the replica has GPUs, so that
            each of them has a batch in its layers.

    Raises:
        PeerLost, Interrupted: see :class:`Outbox`.
    """
    outbox = Outbox(link, wire, target.device)
    launched: deque[tuple[Item, int, TargetFeatures, Tensor]] = deque()

    def pass_on() -> None:
        item, crc, features, sick = launched.popleft()
        about: dict[str, Any] = {"rows": features.bounds[-1], "crc": crc}
        if bool(sick):  # waits for the device
            outbox.put(item, about | {"sick": _illness(features, target.hidden_size)}, None)
        else:
            outbox.put(item, about, features)

    for item in items:
        rows, masks = rows_of(item)
        try:
            features = target.capture(rows, masks, item.ids)
            launched.append((item, checksum(rows), features, features.sick(target.hidden_size)))
            del features
            if len(launched) >= in_flight:
                pass_on()
        except (RuntimeError, ValueError) as error:
            if type(error).__module__.startswith("dflash.target.link"):
                raise
            while launched:
                pass_on()
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            outbox.put(item, {"rows": 0, "crc": 0, "error": reason}, None)
            outbox.finish()
            link.stopped.wait(REPORT_S)  # the drafter ends the run in its own words; dying now would only restart it
            raise
    while launched:
        pass_on()
    outbox.finish()


def _illness(features: TargetFeatures, width: int) -> str:
    try:
        features.check(width)
    except SickFeatures as error:
        return str(error)
    return f"samples {features.sample_ids}: sick when first looked at, sound the second time; the device is at fault"


def put_long(link: Link, name: str, value: Any) -> None:
    """A message of any length, in pieces that the store takes."""
    packed = zlib.compress(json.dumps(value).encode()).hex()
    parts = [packed[i : i + CHUNK] for i in range(0, len(packed), CHUNK)]
    for i, part in enumerate(parts):
        link.say(f"{name}/{i}", part)
    link.say(name, len(parts))


def get_long(link: Link, name: str, rank: int) -> Any:
    """Wait for what ``rank`` put."""
    link.await_(name, rank)
    packed = "".join(link.hear(f"{name}/{i}") for i in range(link.hear(name)))
    return json.loads(zlib.decompress(bytes.fromhex(packed)))


def answer_questions(target: Target, link: Link, leader: int) -> None:
    """Generate the evaluation's answers if the leader asks for them, until it opens the run."""
    while not link.told("open"):
        link.await_any(("ask", "open"), leader)
        if link.told("ask"):
            asked = get_long(link, "ask", leader)
            link.forget("ask")
            put_long(link, "answers", target.greedy(**asked))
