"""A drafter step shared by several drafter ranks: one batch each, gradients and sums added up."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from dflash.bench.shapes import Shape
from dflash.bench.step import build, of_trainer
from dflash.train.peers import Peers


def counts(device: torch.device) -> list[int]:
    """Powers of two up to the GPUs of this machine, or to its cores; none where there is but one to share with."""
    most = torch.cuda.device_count() if device.type == "cuda" else os.cpu_count() or 1
    return [n for n in (1, 2, 4, 8) if n <= most] if most > 1 else []


def measured(
    sizes: Shape, tokens: int, anchors: int, steps: int, device: torch.device, dtype: torch.dtype, *, ranks: int
) -> dict[str, float]:
    """Seconds of a step of ``ranks`` batches on as many ranks, each a process on its own GPU or its own core.

    A CPU's rank has one thread, whatever the number of ranks, so that only what they share makes a difference.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        work = (ranks, Path(folder) / "store", told, sizes, tokens, anchors, steps, device.type, dtype)
        spawn(_rank, args=work, nprocs=ranks)
        return cast(dict[str, float], json.loads(told.read_text()))


def _rank(
    rank: int, ranks: int, store: Path, told: Path, sizes: Shape, tokens: int, anchors: int, steps: int, kind: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    on_gpu = kind == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=FileStore(str(store), ranks), rank=rank, world_size=ranks,
        device_id=device if on_gpu else None,
    )  # fmt: skip
    trainer = build(sizes, tokens, anchors, device, dtype, ranks)
    no_stream: Any = SimpleNamespace(take=dict)  # features are at hand
    trainer.peers = Peers(rank, ranks, None, no_stream, [])
    own = of_trainer(trainer, steps)
    if rank == 0:
        told.write_text(json.dumps(own))
    dist.destroy_process_group()
