"""The stream by itself: replicas and drafters as threads, a store in memory, a wire of queues. No process, no port."""

import queue
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny_llama
from torch import distributed as dist

from dflash.target import link as link_module
from dflash.target.features import SickFeatures
from dflash.target.link import Interrupted, Link, PeerLost, RunFailed
from dflash.target.model import Target
from dflash.target.server import get_long, put_long, serve
from dflash.target.stream import AHEAD, Item, Stream, checksum
from dflash.train.schedule import items

CPU = torch.device("cpu")
ROWS = [np.arange(10, 10 + n) for n in (3, 9, 5, 7, 4, 8, 6, 2)]


class QueueWire:
    """Blocks as a transport does: a send ends when the other side has received."""

    through_host = True

    def __init__(self):
        self.lanes = {}
        self.sent = 0

    def _lane(self, *pair):
        return self.lanes.setdefault(pair, (queue.Queue(1), queue.Queue(1)))

    def send(self, tensor, replica, drafter):
        there, back = self._lane(replica, drafter)
        there.put(tensor.clone())
        self.sent += 1
        back.get(timeout=20)

    def receive(self, tensor, replica, drafter):
        there, back = self._lane(replica, drafter)
        tensor.copy_(there.get(timeout=20))
        back.put(True)


def rows_of(item):
    return [ROWS[i] for i in item.ids], [np.arange(len(ROWS[i])) > 0 for i in item.ids]


class World:
    """R replicas and W drafters over one store; ranks as in a run."""

    def __init__(self, replicas, drafters, ready_s=20.0, silent_s=20.0):
        self.store, self.wire, self.stops = dist.HashStore(), QueueWire(), []
        self.names = [*(f"replica {i}" for i in range(replicas)), *(f"drafter {i}" for i in range(drafters))]
        self.limits = (ready_s, silent_s)
        self.leader = replicas
        self.links = {}
        threads = [threading.Thread(target=self.join, args=(rank,)) for rank in range(len(self.names))]
        for thread in threads:
            thread.start()
        while len(self.links) < len(self.names):
            if self.leader in self.links:
                self.links[self.leader]._greet()
            time.sleep(0.01)

    def join(self, rank):
        self.links[rank] = Link(lambda: self.store, rank, self.leader, self.names, threading.Event(), *self.limits)

    def stream(self, drafter, plan, rows=32, width=64):
        own = [item for item in plan if item.drafter == drafter]
        return Stream(
            self.links[drafter], self.wire, own, rows_of, rows=rows, width=width, dtype=torch.float32, device=CPU
        )

    def serve(self, rank, plan, target=None, rows=rows_of, in_flight=1):
        own = [item for item in plan if item.replica == rank]
        self.errors = getattr(self, "errors", [])

        def run():
            try:
                serve(target or TARGET, self.links[rank], self.wire, own, rows, in_flight)
            except Exception as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def close(self):
        for link in self.links.values():
            link.stopped.set()
            link.close()


TARGET = Target(tiny_llama(0), None, [0, 2], "final")
ONE_AT_A_TIME, CAPTURE = threading.Lock(), TARGET.capture


def alone(*args, **kwargs):
    """Replicas are processes with a model each; these threads share one, and its hooks."""
    with ONE_AT_A_TIME:
        return CAPTURE(*args, **kwargs)


TARGET.capture = alone


@pytest.fixture
def world():
    made = []

    def make(*args, **kwargs):
        made.append(World(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def plan_of(replicas, drafters, count):
    return [
        Item(f"b0.{i}", (i % len(ROWS), (i + 3) % len(ROWS)), i % replicas, replicas + i % drafters)
        for i in range(count)
    ]


@pytest.mark.parametrize("replicas,drafters,in_flight", [(1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 2, 3)])
def test_what_arrives_is_what_the_target_gives_in_plan_order(world, replicas, drafters, in_flight):
    w, plan = world(replicas, drafters), plan_of(replicas, drafters, 24)
    servers = [w.serve(rank, plan, in_flight=in_flight) for rank in range(replicas)]
    streams = {replicas + d: w.stream(replicas + d, plan) for d in range(drafters)}
    for i, item in enumerate(plan):  # the drafters take turns, as their all-reduce makes them
        got = streams[item.drafter].next(item.key, pad_to=32 if i % 2 else None)
        rows, masks = rows_of(item)
        wanted = TARGET.capture(rows, masks, item.ids, 32 if i % 2 else None)
        for name in ("ids", "context", "labels", "loss_mask", "seq", "pos"):
            mine, right = getattr(got, name), getattr(wanted, name)
            assert mine.dtype == right.dtype and torch.equal(mine, right), name
        assert (got.bounds, got.sample_ids) == (wanted.bounds, wanted.sample_ids)
    for server in servers:
        server.join(timeout=20)
        assert not server.is_alive()
    assert not w.errors
    moved = sum(stream.take()["moved_bytes"] for stream in streams.values())
    tokens = sum(len(ROWS[i]) for item in plan for i in item.ids)
    assert moved == tokens * (64 * 4 + 4)
    # No announcement stays behind: the store must not grow with the run.
    assert not [k for item in plan for k in ("have", "go") if w.links[replicas].told(f"{k}/{item.key}")]


def test_a_full_buffer_holds_the_replica_back(world):
    w, plan = world(1, 1), plan_of(1, 1, 40)
    seen = []
    w.serve(0, plan, rows=lambda item: seen.append(item.key) or rows_of(item))
    stream = w.stream(1, plan)
    stream.next("b0.0", None)
    time.sleep(1.5)
    # In use, two ahead here; two in the outbox there, one more computed that found no room.
    assert len(seen) == 1 + AHEAD + AHEAD + 1
    buffers = {stream.next(f"b0.{i}", None).context.data_ptr() for i in range(1, 40)}
    assert len(buffers) == AHEAD + 1 and stream.take()["replica_wait_s"] > 0.5


def test_the_batch_in_use_is_not_overwritten(world):
    w, plan = world(1, 1), plan_of(1, 1, 12)
    w.serve(0, plan)
    stream = w.stream(1, plan)
    for item in plan:
        got = stream.next(item.key, None)
        before = got.context.clone()
        time.sleep(0.05)
        assert torch.equal(got.context, before)


@pytest.mark.parametrize("value,word", [(0.0, "all zero"), (float("nan"), "not finite"), (1.5, "constant")])
def test_sick_features_are_named_and_not_sent(world, value, word):
    class Sick:
        device, hidden_size = CPU, TARGET.hidden_size

        def capture(self, rows, masks, ids, pad_to=None):
            features = TARGET.capture(rows, masks, ids)
            if 5 in ids:
                features.context[4, :32] = value
            return features

    w, plan = world(1, 1), plan_of(1, 1, 4)
    w.serve(0, plan, target=Sick())
    stream = w.stream(1, plan)
    stream.next("b0.0", None)
    stream.next("b0.1", None)
    with pytest.raises(SickFeatures, match=rf"replica 0: sample 2, token 4: context layer number 0 is {word}"):
        stream.next("b0.2", None)
    assert w.wire.sent == 4  # two batches, context and labels each
    assert stream.next("b0.3", None).sample_ids == [3, 6]  # whoever tolerates it goes on


def test_an_error_of_a_replica_reaches_the_drafter_with_its_batch(world, monkeypatch):
    class Broken:
        device, hidden_size = CPU, TARGET.hidden_size

        def capture(self, rows, masks, ids, pad_to=None):
            if 2 in ids:
                raise RuntimeError("out of\nmemory")
            return TARGET.capture(rows, masks, ids)

    w, plan = world(2, 1), plan_of(2, 1, 6)
    w.serve(0, plan, target=Broken())
    w.serve(1, plan)
    stream = w.stream(2, plan)
    stream.next("b0.0", None)
    stream.next("b0.1", None)
    with pytest.raises(
        RunFailed, match=r"replica 0 failed on batch b0.2 \(samples \[2, 5\]\): RuntimeError: out of mem"
    ):
        stream.next("b0.2", None)


def test_other_data_on_a_replica_are_noticed(world):
    w, plan = world(1, 1), plan_of(1, 1, 2)

    def others(item):
        rows, masks = rows_of(item)
        return [row + (row == 12) for row in rows], masks

    w.serve(0, plan, rows=others)
    with pytest.raises(RunFailed, match=r"replica 0 read other tokens for batch b0\.0"):
        w.stream(1, plan).next("b0.0", None)


def test_a_silent_replica_is_lost_and_a_slow_one_is_waited_for(world, monkeypatch):
    monkeypatch.setattr(link_module, "SLICE_S", 0.1)
    w, plan = world(1, 1, silent_s=0.8), plan_of(1, 1, 2)
    stream = w.stream(1, plan)  # nobody serves, but the heart beats
    time.sleep(1.6)
    assert stream._arrived.empty()
    w.links[0].close()
    with pytest.raises(PeerLost, match=r"replica 0: no sign of life for \d s"):
        stream.next("b0.0", None)


def test_silence_counts_only_while_it_is_listened_to(world, monkeypatch):
    """Ctrl-Z and fg, a suspended machine: everybody slept, nobody is dead."""
    w, now = world(1, 1, silent_s=6.0), [1000.0]
    w.links[0].close()
    link = w.links[1]
    monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    link.require_alive(0, link.store)
    now[0] += 3600
    link.require_alive(0, link.store)
    for _ in range(12):
        now[0] += link_module.SLICE_S
        link.require_alive(0, link.store)
    now[0] += link_module.SLICE_S
    with pytest.raises(PeerLost, match="replica 0: no sign of life for 6 s"):
        link.require_alive(0, link.store)


def test_waits_end_when_the_process_is_asked_to(world):
    w, plan = world(1, 1), plan_of(1, 1, 2)
    stream = w.stream(1, plan)
    threading.Timer(0.3, w.links[1].stopped.set).start()
    started = time.monotonic()
    with pytest.raises(Interrupted):
        stream.next("b0.0", None)
    assert time.monotonic() - started < 3


def test_those_who_are_not_ready_are_named(world):
    w = world(2, 1, ready_s=0.4)
    w.links[0].ready({"a": 1})
    with pytest.raises(RunFailed, match=r"^replica 1: not ready within placement.ready_timeout_s 0.4 s"):
        w.links[2].gather([0, 1])
    w.links[1].ready({"a": 2})
    assert w.links[2].gather([0, 1]) == [{"a": 1}, {"a": 2}]


def test_long_messages_go_in_pieces(world, monkeypatch):
    from dflash.target import server

    monkeypatch.setattr(server, "CHUNK", 64)
    w = world(1, 1)
    value = [list(range(i, i + 50)) for i in range(30)]
    put_long(w.links[0], "answers", value)
    assert get_long(w.links[1], "answers", 0) == value


def test_words_of_an_earlier_attempt_are_not_heard():
    store, stopped = dist.HashStore(), threading.Event()

    def link(rank):
        return Link(lambda: store, rank, 1, ["replica 0", "drafter 0"], stopped, 5.0, 5.0)

    old = link(1)
    old.say("ready/0", {"stale": True})
    store.set("hello/0", "nobody")  # of a replica that died before it was greeted
    new = link(1)
    made = []
    thread = threading.Thread(target=lambda: made.append(link(0)))
    thread.start()
    while not made:
        new._greet()
        time.sleep(0.01)
    assert made[0].token == new.token != old.token
    assert not new.told("ready/0")
    for one in (old, new, made[0]):
        one.close()


def test_the_plan_of_who_computes_what():
    """Batch i by replica i mod R for drafter i mod W, evaluations in between, and the tail of it after a resume."""
    steps = [[SimpleNamespace(epoch=0, index=s * 4 + g, samples=np.array([s])) for g in range(4)] for s in range(5)]
    plan = SimpleNamespace(total=5, batches=lambda s: steps[s - 1])
    whole = list(items(plan, 0, 3, 2, 2, [[0, 1], [2]], False))
    assert [i.key for i in whole if i.is_eval] == ["e0.0", "e0.1", "e2.0", "e2.1", "e4.0", "e4.1", "e5.0", "e5.1"]
    trained = [i for i in whole if not i.is_eval]
    assert [(i.replica, i.drafter) for i in trained] == [(n % 3, 3 + n % 2) for n in range(20)]
    assert {i.drafter for i in whole if i.is_eval} == {3}
    for done in range(1, 5):
        owing = [i.key for i in items(plan, done, 3, 2, 2, [[0, 1], [2]], True)]
        rest = [i.key for i in items(plan, done, 3, 2, 2, [[0, 1], [2]], False)]
        assert owing == [f"e{done}.0", f"e{done}.1", *rest]
        assert rest == [i.key for i in whole][len(whole) - len(rest) :] and rest[0] == f"b0.{done * 4}"
    assert [i.replica for i in items(plan, 0, 5, 1, 2, [], False)] == [n % 5 for n in range(20)]


def test_checksums_tell_rows_apart():
    a = [np.array([1, 2]), np.array([3])]
    assert checksum(a) == checksum([np.array([1, 2], dtype=np.int32), np.array([3])])
    assert checksum(a) != checksum([np.array([1, 2]), np.array([4])])
