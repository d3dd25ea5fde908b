"""What it costs to bring both sides together: on one device in turns, and between processes through the stream."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from dflash.bench.capture import context_layers, random_target
from dflash.bench.shapes import SHAPES
from dflash.bench.step import build, timed
from dflash.target import compiled
from dflash.target.features import assemble
from dflash.target.link import Link
from dflash.target.model import Target
from dflash.target.stream import Item, Outbox, Stream, Wire, checksum
from dflash.train.probe import choose_paths

REPLICA, DRAFTER = 0, 1
NAMES = ["replica 0", "drafter 0"]
WARM_UP = 3


def alternate(
    shape: str, *, tokens: int, anchors: int, repeats: int, device: torch.device, dtype: torch.dtype, layers: int | None
) -> dict[str, Any]:
    """One process that captures a batch and trains on it, against capture and step by themselves.

    Args:
        layers: cut the target to so many decoder layers; None: whole.

    Returns:
        seconds of each and ``over_parts``: the whole over the sum of its parts.
    """
    module = random_target(shape, layers, [device], dtype)
    depth = len(module.get_decoder().layers)
    target = Target(module, None, context_layers(shape, depth))
    compiled.choose_paths(target, tokens, tokens)
    trainer = build(SHAPES[shape], tokens, anchors, device, dtype, 1)
    choose_paths(trainer)
    ids, mask = trainer.data.sample(0)
    fixed = trainer.features_of

    def captured(batch: Any) -> Any:
        return target.capture([ids], [mask], [0], tokens)

    steps = itertools.count(1)
    step = timed((partial(trainer.one_step, n) for n in steps), repeats, device)
    capture = timed(itertools.repeat(partial(captured, None)), repeats, device)
    trainer.features_of = captured
    both = timed((partial(trainer.one_step, n) for n in steps), repeats, device)
    trainer.features_of = fixed
    parts = step["s_per_step"] + capture["s_per_step"]
    return {
        "layers": depth, "step_s": step["s_per_step"], "capture_s": capture["s_per_step"],
        "both_s": both["s_per_step"], "over_parts": both["s_per_step"] / parts,
    }  # fmt: skip


def stream(tokens: int, width: int, dtype: torch.dtype, batches: int) -> dict[str, Any]:
    """Two processes on the host: batches that are ready travel through the stream, then the same bytes barely.

    Args:
        tokens, width: rows of a batch, and L*D values in each.
        batches: timed after a warm-up.

    Returns:
        median seconds a batch takes through the stream (announced, answered, checked, received), the transport alone
        takes for its bytes, and their ratio ``over_transfer``.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = (store.port, tokens, width, str(dtype).removeprefix("torch."), batches, str(Path(folder) / "out.json"))
        spawn(_end, args=job, nprocs=2)
        result: dict[str, Any] = json.loads((Path(folder) / "out.json").read_text("utf-8"))
    return result


def _end(rank: int, port: int, tokens: int, width: int, kind: str, batches: int, out: str) -> None:
    """One of the two processes: first the transport alone, then the stream."""
    torch.set_num_threads(1)
    dtype: torch.dtype = getattr(torch, kind)

    def connect() -> Any:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        return PrefixStore("bench", store)

    dist.init_process_group("gloo", store=PrefixStore("group", connect()), rank=rank, world_size=2)
    wire = Wire()
    rows, mask = np.arange(tokens) % 251, np.ones(tokens, dtype=bool)
    context = torch.randn(tokens, width, dtype=dtype)
    labels = torch.zeros(tokens, dtype=torch.int32)
    move = wire.send if rank == REPLICA else wire.receive
    bare = []
    for _ in range(WARM_UP + batches):
        dist.barrier()
        started = time.perf_counter()
        for part in (context, labels):
            move(part, REPLICA, DRAFTER)
        bare.append(time.perf_counter() - started)

    link = Link(connect, rank, DRAFTER, NAMES, threading.Event(), 60.0, 60.0)
    items = [Item(f"b0.{i}", (0,), REPLICA, DRAFTER) for i in range(WARM_UP + batches)]
    if rank == REPLICA:
        link.ready({})
        outbox = Outbox(link, wire, torch.device("cpu"))
        features = assemble([rows], [mask], (0,), context, labels)
        for item in items:
            outbox.put(item, {"rows": tokens, "crc": checksum([rows])}, features)
        outbox.finish()
        link.await_("done", DRAFTER)
    else:
        link.gather([REPLICA])
        ends = Stream(
            link, wire, items, lambda item: ([rows], [mask]), rows=tokens, width=width, dtype=dtype,
            device=torch.device("cpu"),
        )  # fmt: skip
        arrived = []
        for item in items:
            ends.next(item.key, None)
            arrived.append(time.perf_counter())
        ends.close()
        link.say("done", True)
        through, alone = float(np.median(np.diff(arrived)[WARM_UP - 1 :])), float(np.median(bare[WARM_UP:]))
        size = context.nbytes + labels.nbytes
        figures = {"bytes": size, "stream_s": through, "transfer_s": alone, "over_transfer": through / alone}
        Path(out).write_text(json.dumps(figures), "utf-8")
        time.sleep(1.0)  # the replica hears of the end before the link's other end is gone
    link.close()
    dist.destroy_process_group()
    sys.stdout.flush()


def bench(
    shape: str, *, tokens: int, anchors: int, repeats: int, device: torch.device, dtype: torch.dtype, layers: int | None
) -> dict[str, Any]:
    """Both measurements, for a target and drafter of the shape."""
    s = SHAPES[shape]
    out: dict[str, Any] = {
        "shape": shape, "tokens": tokens, "anchors": anchors, "dtype": str(dtype).removeprefix("torch."),
        "stream": stream(tokens, s.hidden_size * len(s.context_layers), dtype, repeats),
    }  # fmt: skip
    if device.type == "cuda":
        out["device"] = torch.cuda.get_device_name(device)
    out |= alternate(shape, tokens=tokens, anchors=anchors, repeats=repeats, device=device, dtype=dtype, layers=layers)
    return out


def table(result: dict[str, Any]) -> str:
    """The result for a terminal."""
    s = result["stream"]
    return "\n".join(
        [
            f"pipeline, shape {result['shape']} ({result['layers']} target layers), {result['tokens']} tokens, "
            f"{result['anchors']} anchors, {result['dtype']}, on {result.get('device', 'cpu')}",
            f"  in turns  {result['both_s']:.4f} s a step: {result['over_parts']:.3f} of capture "
            f"({result['capture_s']:.4f} s) and step ({result['step_s']:.4f} s) by themselves",
            f"  stream    {s['stream_s']:.4f} s a batch of {s['bytes'] / 2**20:,.0f} MiB between two processes: "
            f"{s['over_transfer']:.3f} of its bytes' transfer alone ({s['transfer_s']:.4f} s, gloo)",
        ]
    )
