"""The way of features from a replica to a drafter: who computes what for whom, and the drafter's end of it.

Both ends derive the same sequence of items from the plan. Per item the replica announces what it has (rows, checksum of
the ids, health or the error) through the :class:`~dflash.target.link.Link`; the drafter answers with ``go`` once a
buffer is free, and only then does either side post the transfer. So nothing waits inside a transport: a gloo receive
that timed out would close its pair for good, and a waiting NCCL kernel would spin on the GPU.

Shape letters: T packed tokens, L context layers, D hidden size.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from dflash.target.features import SickFeatures, TargetFeatures, assemble
from dflash.target.link import SLICE_S, Interrupted, Link, PeerLost, RunFailed, Store

AHEAD = 2
"""Batches that wait on each side beside the one in use: a full buffer is what holds the replicas back."""


@dataclass(frozen=True, eq=False)
class Item:
    """One batch on its way: sequences ``ids`` of the training data, or of the evaluation's answers."""

    key: str
    """Unique in an attempt: ``b0.17`` for batch 17 of epoch 0, ``e500.2`` for part 3 of step 500's evaluation."""
    ids: tuple[int, ...]
    replica: int
    """Rank of the process that computes it, and below of the one that trains on it."""
    drafter: int

    @property
    def is_eval(self) -> bool:
        return self.key.startswith("e")


Rows = Callable[[Item], tuple[Sequence[np.ndarray], Sequence[np.ndarray]]]
"""Token ids and loss masks of an item's sequences."""


def checksum(rows: Sequence[np.ndarray]) -> int:
    """Of the token ids: both ends must have read the same data."""
    value = 0
    for row in rows:
        value = zlib.crc32(np.ascontiguousarray(row, dtype=np.int64).tobytes(), value)
    return value


class Wire:
    """Point-to-point transfers of tensors: gloo through host memory, or NCCL between GPUs.

    Args:
        pairs: for NCCL, the group of each (replica, drafter); None: the default group, gloo.
    """

    def __init__(self, pairs: dict[tuple[int, int], Any] | None = None) -> None:
        self._pairs = pairs

    def send(self, tensor: Tensor, replica: int, drafter: int) -> None:
        """Blocks until the drafter has it (gloo), or until it may be overwritten on the current stream (NCCL)."""
        dist.send(tensor, dst=drafter, group=self._group(replica, drafter))

    def receive(self, tensor: Tensor, replica: int, drafter: int) -> None:
        dist.recv(tensor, src=replica, group=self._group(replica, drafter))

    def _group(self, replica: int, drafter: int) -> Any:
        return self._pairs[replica, drafter] if self._pairs else None

    @property
    def through_host(self) -> bool:
        return self._pairs is None


class Slot:
    """One preallocated batch: on the device, and in pinned host memory where gloo brings it there."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device, through_host: bool) -> None:
        self.context_TF = torch.zeros(rows, width, dtype=dtype, device=device)
        self.labels_T = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.landing = (self.context_TF, self.labels_T)
        if device.type == "cuda" and through_host:
            pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (self.context_TF, self.labels_T)]
            self.landing = (pinned[0], pinned[1])
        self.free_after: torch.cuda.Event | None = None


@dataclass
class Arrived:
    """An item in a slot, or why there is nothing in it."""

    item: Item
    slot: Slot | None
    rows: int
    sick: str | None
    ready: torch.cuda.Event | None


class Stream:
    """A drafter's features, in order, received ahead by a thread into :data:`AHEAD` + 1 fixed buffers.

    Args:
        items: this drafter's, in the plan's order.
        rows_of: token ids and masks of an item.
        rows, width, dtype, device: largest T of an item, L*D, and of the features.

    Raises (from :meth:`next`):
        RunFailed: a replica could not compute a batch, or read other data.
        PeerLost: a replica died or fell silent.
        Interrupted: this process is to end.
    """

    def __init__(
        self,
        link: Link,
        wire: Wire,
        items: Iterable[Item],
        rows_of: Rows,
        *,
        rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.link, self.wire, self.rows_of, self.device = link, wire, rows_of, device
        self._items = iter(items)
        self._free: queue.Queue[Slot] = queue.Queue()
        for _ in range(AHEAD + 1):
            self._free.put(Slot(rows, width, dtype, device, wire.through_host))
        self._arrived: queue.Queue[Arrived | BaseException] = queue.Queue()
        self._in_use: Slot | None = None
        self._sender: int | None = None
        self._closed = threading.Event()
        self._moved, self._replica_wait, self._lock = 0, 0.0, threading.Lock()
        self._thread = threading.Thread(target=self._receive_all, name="receiver", daemon=True)
        self._thread.start()

    # ---- the training thread's side ----------------------------------------------------------------------------------

    def next(self, key: str, pad_to: int | None) -> TargetFeatures:
        """The features of item ``key``, which must be the next one. The batch before it is given up: its buffer may be
        written again once the work queued on the device so far is done.

        Args:
            pad_to: T of the result; None: as many rows as tokens.

        Raises:
            SickFeatures: zero, constant or not finite; nothing was sent. Name of replica and samples in the text.
        """
        self._give_back()
        while True:
            if self.link.stopped.is_set():
                raise Interrupted(f"while waiting for features {key}")
            try:
                got = self._arrived.get(timeout=SLICE_S)
                break
            except queue.Empty:
                # The receiver cannot look while it is inside a transfer whose other end stands still.
                if self._sender is not None:
                    self.link.require_alive(self._sender, self.link.store)
        if isinstance(got, BaseException):
            raise got
        if got.item.key != key:
            raise RunFailed(f"features {got.item.key} arrived where {key} was due: the processes read different plans")
        if got.sick is not None or got.slot is None:
            raise SickFeatures(f"{self.link.names[got.item.replica]}: {got.sick}")
        slot = self._in_use = got.slot
        if got.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(got.ready)
        total = max(got.rows, pad_to or 0)
        context, labels = slot.context_TF[:total], slot.labels_T[:total]
        context[got.rows :] = 0
        labels[got.rows :] = -1
        return assemble(*self.rows_of(got.item), got.item.ids, context, labels)

    def _give_back(self) -> None:
        slot, self._in_use = self._in_use, None
        if slot is not None:
            if self.device.type == "cuda":
                slot.free_after = torch.cuda.current_stream(self.device).record_event()
            self._free.put(slot)

    def take(self) -> dict[str, float]:
        """Bytes received, and seconds that replicas stood still because buffers were full, since the last call."""
        with self._lock:
            moved, waited, self._moved, self._replica_wait = self._moved, self._replica_wait, 0, 0.0
        return {"moved_bytes": float(moved), "replica_wait_s": waited}

    def close(self) -> None:
        """End the receiver; a transfer under way is finished first."""
        self._closed.set()
        self._thread.join(timeout=10)

    # ---- the receiver's side -----------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        try:
            store = self.link.second()
            side = None
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                side = torch.cuda.Stream(self.device)
            for item in self._items:
                self._arrived.put(self._receive(item, store, side))
        except Exception as error:  # carried to the training thread, which raises it
            self._arrived.put(error)

    def _receive(self, item: Item, store: Store, side: torch.cuda.Stream | None) -> Arrived:
        ended = self._closed.is_set
        while True:
            try:
                slot = self._free.get(timeout=SLICE_S)
                break
            except queue.Empty:
                if ended() or self.link.stopped.is_set():
                    raise Interrupted("while the buffers were full") from None
        self.link.await_(f"have/{item.key}", item.replica, store, ended)
        have = self.link.hear(f"have/{item.key}", store, keep=False)
        name = self.link.names[item.replica]
        if have.get("error"):
            raise RunFailed(f"{name} failed on {_described(item)}: {have['error']}")
        token_rows, _ = self.rows_of(item)
        count = sum(len(row) for row in token_rows)
        if have["rows"] != count or have["crc"] != checksum(token_rows):
            raise RunFailed(
                f"{name} read other tokens for {_described(item)} ({have['rows']} rows there, {count} here): give all "
                "machines the same data files"
            )
        with self._lock:
            self._replica_wait += have["waited_s"]
        if have.get("sick"):
            self._free.put(slot)
            return Arrived(item, None, count, have["sick"], None)
        if slot.free_after is not None:
            slot.free_after.synchronize()
        self._sender = item.replica
        self.link.say(f"go/{item.key}", True, store)
        try:
            with torch.cuda.stream(side):
                for landing, place in zip(slot.landing, (slot.context_TF, slot.labels_T), strict=True):
                    self.wire.receive(landing[:count], item.replica, item.drafter)
                    if landing is not place:
                        place[:count].copy_(landing[:count], non_blocking=True)
                ready = side.record_event() if side is not None else None
        except RuntimeError as error:  # gloo and NCCL raise nothing more telling when the other end dies
            raise PeerLost(
                f"{name} was lost while it sent {_described(item)} ({' '.join(str(error).split())[:200]})"
            ) from error
        self._sender = None
        with self._lock:
            self._moved += sum(part[:count].nbytes for part in slot.landing)
        return Arrived(item, slot, count, None, ready)


def _described(item: Item) -> str:
    kind = "evaluation answers" if item.is_eval else "samples"
    return f"batch {item.key} ({kind} {list(item.ids)})"


class Outbox:
    """A replica's end: what is computed waits here, :data:`AHEAD` batches at most, until its drafter has room."""

    def __init__(self, link: Link, wire: Wire, device: torch.device) -> None:
        self.link, self.wire, self.device = link, wire, device
        self._due: queue.Queue[tuple[Item, dict[str, Any], TargetFeatures | None] | None] = queue.Queue()
        self._room = threading.Semaphore(AHEAD)
        self._error: BaseException | None = None
        self._waited, self._staging = 0.0, [None, None]
        self._thread = threading.Thread(target=self._send_all, name="sender", daemon=True)
        self._thread.start()

    def put(self, item: Item, about: dict[str, Any], features: TargetFeatures | None) -> None:
        """Announce and send; returns as soon as there is room.

        Raises:
            PeerLost: the drafter died or fell silent. Interrupted: this process is to end.
        """
        started = time.monotonic()
        while not self._room.acquire(timeout=SLICE_S):
            self._raise()
            self.link.require_alive(item.drafter, self.link.store)
        self._raise()
        self._waited += time.monotonic() - started
        self._due.put((item, about | {"waited_s": self._waited}, features))
        self._waited = 0.0

    def finish(self) -> None:
        """Wait until everything has been sent."""
        self._due.put(None)
        while self._thread.is_alive():
            self._thread.join(timeout=SLICE_S)
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self.link.stopped.is_set():
            raise Interrupted("while the drafter's buffers were full")

    def _send_all(self) -> None:
        try:
            store = self.link.second()
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            while (due := self._due.get()) is not None:
                self._send(*due, store)
                del due
                self._room.release()
        except Exception as error:  # carried to the thread that computes
            self._error = error
            self._room.release()

    def _send(self, item: Item, about: dict[str, Any], features: TargetFeatures | None, store: Store) -> None:
        self.link.say(f"have/{item.key}", about, store)
        if features is None:
            return
        self.link.await_(f"go/{item.key}", item.drafter, store)
        self.link.forget(f"go/{item.key}", store)
        try:
            for part in (features.context, features.labels):
                part = part[: about["rows"]]
                if part.is_cuda and self.wire.through_host:
                    part = part.to("cpu")  # synchronous; pinned staging would hold two more batches of host memory
                self.wire.send(part.contiguous(), item.replica, item.drafter)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        except RuntimeError as error:
            name = self.link.names[item.drafter]
            raise PeerLost(
                f"{name} was lost while it received {_described(item)} ({' '.join(str(error).split())[:200]})"
            ) from error
