"""What the processes of a run tell each other besides tensors: joining, announcements, heartbeats, the end.

All of it goes through the launcher's TCPStore under a token that the leader (drafter 0) draws anew at each start, so
that nothing of an earlier attempt is ever read. No wait is without a limit, and none sleeps through a signal: each is
cut into slices of :data:`SLICE_S`.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from torch import distributed as dist

Store = Any
"""A ``torch.distributed.Store``, which torch does not declare to type checkers."""

SLICE_S = 0.5
FIRST_LOOK_S, LAST_LOOK_S = 0.0005, 0.01
BEAT_S = 3.0
"""Between heartbeats. They come from a thread of their own, so a long capture or compilation does not stop them."""


class RunFailed(RuntimeError):
    """Something that a restart would only repeat; the sentence names the process and what it was at."""


class PeerLost(RuntimeError):
    """Another process of the run died or fell silent: the launcher restarts all of them, if it may."""


class Interrupted(RuntimeError):
    """The run is asked to end."""


class Link:
    """A process's place in the run's conversation.

    Args:
        connect: opens a connection to the launcher's store; the heartbeat and each thread that waits need their own,
            since a connection answers one request at a time.
        rank: of this process; ``leader`` that of the one who decides.
        names: of all ranks, for messages.
        stopped: set when this process is asked to end.
        ready_s, silent_s: how long to wait for everybody to be ready, and for a sign of life.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        rank: int,
        leader: int,
        names: Sequence[str],
        stopped: threading.Event,
        ready_s: float,
        silent_s: float,
    ) -> None:
        self._connect, self.rank, self.leader, self.names = connect, rank, leader, names
        self.stopped, self.ready_s, self.silent_s = stopped, ready_s, silent_s
        self.store = connect()
        self._seen: dict[int, tuple[bytes, float, float]] = {}
        self._answered: set[bytes] = set()
        self._nonce = uuid.uuid4().hex
        self._closed = threading.Event()
        self.token = self._nonce if rank == leader else self._join()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    # ---- joining -----------------------------------------------------------------------------------------------------

    def _join(self) -> str:
        """Say hello until the leader of this very attempt answers: only it can know this process's nonce."""
        self.store.set(f"hello/{self.rank}", self._nonce)
        end = time.monotonic() + self.ready_s
        while not self._wait_key(self.store, f"welcome/{self._nonce}"):
            if time.monotonic() > end:
                raise RunFailed(
                    f"{self.names[self.rank]} heard nothing from {self.names[self.leader]} within "
                    f"placement.ready_timeout_s {self.ready_s:g} s; look at that one's log under logs/"
                )
        return self.store.get(f"welcome/{self._nonce}").decode()

    def _greet(self) -> None:
        for rank in range(len(self.names)):
            if rank != self.rank and self.store.check([f"hello/{rank}"]):
                nonce = self.store.get(f"hello/{rank}")
                if nonce not in self._answered:
                    self._answered.add(nonce)
                    self.store.set(f"welcome/{nonce.decode()}", self.token)

    def ready(self, about: dict[str, Any]) -> None:
        """Tell the leader that this process can begin."""
        self.say(f"ready/{self.rank}", about)

    def gather(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """The leader's wait until ``ranks`` are ready; what they said.

        Raises:
            RunFailed: naming those that are not, after ``ready_timeout_s``.
        """
        end = time.monotonic() + self.ready_s
        while True:
            self._greet()
            absent = [rank for rank in ranks if not self.store.check([self._key(f"ready/{rank}")])]
            if not absent:
                return [self.hear(f"ready/{rank}") for rank in ranks]
            if time.monotonic() > end:
                listed = ", ".join(self.names[rank] for rank in absent)
                raise RunFailed(
                    f"{listed}: not ready within placement.ready_timeout_s {self.ready_s:g} s; look at its log under "
                    "logs/, or raise the limit if it was still loading"
                )
            if self.stopped.wait(0.05):
                raise Interrupted("while waiting for the others to be ready")

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self.token}/{name}"

    def second(self) -> Store:
        """A connection of its own for a thread."""
        return self._connect()

    def say(self, name: str, value: Any, store: Store | None = None) -> None:
        (store or self.store).set(self._key(name), json.dumps(value))

    def told(self, name: str, store: Store | None = None) -> bool:
        """Whether it has been said (no wait)."""
        return (store or self.store).check([self._key(name)])

    def hear(self, name: str, store: Store | None = None, keep: bool = True) -> Any:
        """What has been said; ``keep=False`` forgets it, so that the store does not grow with the run."""
        store = store or self.store
        value = json.loads(store.get(self._key(name)))
        if not keep:
            store.delete_key(self._key(name))
        return value

    def forget(self, name: str, store: Store | None = None) -> None:
        (store or self.store).delete_key(self._key(name))

    def await_(
        self,
        name: str,
        rank: int,
        store: Store | None = None,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for what ``rank`` will say, as long as it shows signs of life.

        Args:
            ended: asked between slices; True ends the wait.

        Raises:
            Interrupted: this process is to end, or ``ended``.
            PeerLost: no heartbeat of ``rank`` for ``heartbeat_timeout_s``.
        """
        store = store or self.store
        while not self._wait_key(store, self._key(name), ended):
            self.require_alive(rank, store)

    def await_any(self, names: Sequence[str], rank: int) -> None:
        """As :meth:`await_`, until the first of several."""
        while not any(self.told(name) for name in names):
            if self.stopped.wait(0.05):
                raise Interrupted(f"while waiting for {names[0]}")
            self.require_alive(rank, self.store)

    def require_alive(self, rank: int, store: Store) -> None:
        """Raises:
        PeerLost: the heartbeat of ``rank`` has not changed for ``heartbeat_timeout_s`` of this process's clock.
        """
        beat, now = self.beat_of(rank, store), time.monotonic()
        last, since, looked = self._seen.get(rank, (None, now, now))
        # Silence counts only where it was listened to: after Ctrl-Z and fg all processes have slept alike.
        if beat != last or now - looked > max(2 * SLICE_S, self.silent_s / 2):
            since = now
        self._seen[rank] = (beat, since, now)
        if now - since > self.silent_s:
            raise PeerLost(
                f"{self.names[rank]}: no sign of life for {now - since:.0f} s "
                f"(placement.heartbeat_timeout_s {self.silent_s:g})"
            )

    def beat_of(self, rank: int, store: Store) -> bytes:
        """The last heartbeat of a rank; empty before the first."""
        key = self._key(f"beat/{rank}")
        return store.get(key) if store.check([key]) else b""

    def _wait_key(self, store: Store, key: str, ended: Callable[[], bool] = lambda: False) -> bool:
        """One slice of waiting; whether the key is there."""
        if self.stopped.is_set() or ended():
            raise Interrupted(f"while waiting for {key.partition('/')[2]}")
        end, pause = time.monotonic() + SLICE_S, FIRST_LOOK_S
        # Asked again and again: a wait of the store's own that runs out writes two warnings each time.
        while not store.check([key]):
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, LAST_LOOK_S)
        return True

    # ---- heartbeats --------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        store, count = self._connect(), 0
        pause = min(BEAT_S, self.silent_s / 4)
        while not self._closed.wait(pause if count else 0):
            count += 1
            try:
                store.set(self._key(f"beat/{self.rank}"), str(count))
            except (dist.DistError, RuntimeError):  # the launcher is gone, and this process with it in a moment
                return

    def close(self) -> None:
        """No more heartbeats."""
        self._closed.set()
        self._thread.join(timeout=5)
