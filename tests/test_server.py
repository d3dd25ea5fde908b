"""Replicas and a drafter as processes over gloo: flat memory over thousands of batches; weights borrowed from afar."""

import multiprocessing
import os
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from tiny import tiny_gemma2, tiny_llama, tiny_phi
from torch import distributed as dist

from dflash.target.features import TargetFeatures, assemble
from dflash.target.link import Link
from dflash.target.model import Target
from dflash.target.remote import RemoteTarget, describe, send_weights
from dflash.target.server import serve
from dflash.target.stream import AHEAD, Item, Stream, Wire

NAMES = ["replica 0", "replica 1", "drafter 0"]
WIDTH, TOKENS, CPU = 512, 256, torch.device("cpu")
EARLY, LATE = 200, 2000


def rows_of(item):
    row = np.arange(item.ids[0], item.ids[0] + TOKENS - item.ids[0] % 7)
    return [row], [np.ones(len(row), dtype=bool)]


class Cheap:
    """A target that costs nothing and answers with the ids; notes this process's resident size now and then."""

    device, hidden_size = CPU, WIDTH

    def __init__(self, share):
        self.count, self.share, self.sizes = 0, share, []

    def capture(self, rows, masks, ids, pad_to=None) -> TargetFeatures:
        self.count += 1
        if self.count in (EARLY // self.share, LATE // self.share):
            self.sizes.append(resident())
        context = torch.from_numpy(rows[0]).float()[:, None] + torch.arange(WIDTH)
        return assemble(rows, masks, ids, context, torch.zeros(len(context), dtype=torch.int32))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def one_rank(rank, port, results, pause):
    torch.set_num_threads(1)
    stopped = threading.Event()

    def connect():
        return dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=60))

    link = Link(connect, rank, 2, NAMES, stopped, 60.0, 60.0)
    if rank < 2:
        link.ready({})
    else:
        link.gather([0, 1])
    store = dist.PrefixStore(link.token, connect())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    plan = [Item(f"b{i}", (i,), i % 2, 2) for i in range(LATE + 20)]
    if rank < 2:
        target = Cheap(2)
        serve(target, link, Wire(), [item for item in plan if item.replica == rank], rows_of)
        results.put((rank, target.sizes))
    else:
        stream = Stream(link, Wire(), plan, rows_of, rows=TOKENS, width=WIDTH, dtype=torch.float32, device=CPU)
        sizes, buffers = [], set()
        for i, item in enumerate(plan, start=1):
            features = stream.next(item.key, None)
            assert features.context[3, 2] == item.ids[0] + 3 + 2
            buffers.add(features.context.data_ptr())
            if pause and i % 100 == 0:
                time.sleep(pause)
            if i in (EARLY, LATE):
                sizes.append(resident())
        assert len(buffers) == AHEAD + 1
        results.put((rank, sizes))
        link.say("done", True)
    link.await_("done", 2)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.2])
def test_memory_is_flat_on_every_rank(pause):
    """Resident size at batch 2,000 minus that at batch 200, at most 20 MB, also with a drafter that pauses."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=one_rank, args=(rank, store.port, results, pause)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=240) for _ in processes)
        for process in processes:
            process.join(timeout=30)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    assert set(found) == {0, 1, 2}
    for rank, (early, late) in found.items():
        assert late - early <= 20e6, f"{NAMES[rank]} grew by {(late - early) / 1e6:.1f} MB"
    # Announcements are forgotten: what is left is a handful of keys, whatever the number of batches.
    assert store.num_keys() < 40


class Loop:
    """A wire within one process."""

    through_host = True

    def __init__(self):
        self.sent = []

    def send(self, tensor, replica, drafter):
        self.sent.append(tensor.clone())

    def receive(self, tensor, replica, drafter):
        tensor.copy_(self.sent.pop(0))


@pytest.mark.parametrize("module", [tiny_llama(0), tiny_gemma2(0), tiny_phi(0)], ids=["untied", "tied", "bias"])
def test_what_the_drafter_borrows_is_what_the_target_has(module):
    target, wire = Target(module, None, [0, 2]), Loop()
    remote = RemoteTarget(describe(target), target.config, None, 0, torch.float32, CPU)
    send_weights(target, wire, 0, [1])
    remote.receive_weights(wire, 0, 1)
    assert not wire.sent
    ids = torch.arange(190)
    assert torch.equal(remote.embed(ids), target.embed(ids))
    assert torch.equal(remote.head_weight, target.head_weight)
    assert (remote.head_bias is None) == (target.head_bias is None)
    assert remote.head_bias is None or torch.equal(remote.head_bias, target.head_bias)
    assert (remote.hidden_size, remote.vocab_size) == (target.hidden_size, target.vocab_size)
    assert (remote.fingerprint, remote.parameter_count) == (target.fingerprint, target.parameter_count)
    assert (remote.head_weight is remote.embed.weight) == bool(target.config.tie_word_embeddings)
    assert not any(p.requires_grad for p in remote.embed.parameters())
