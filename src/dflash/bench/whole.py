"""A whole run: servers of a randomly drawn target and drafters, through the real launcher, stream and trainer.

Every document has the length of a batch, and all of its tokens are supervised.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash import estimate
from dflash.bench.capture import context_layers, random_target
from dflash.bench.shapes import H200_PEAK, SHAPES, target_config
from dflash.bench.step import build, of_trainer, timed
from dflash.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    DrafterConfig,
    EvalConfig,
    PlacementConfig,
    TargetConfig,
    TrainConfig,
    dump_yaml,
    load_config,
)
from dflash.config_target import resolve
from dflash.target import compiled
from dflash.target.load import RANDOM
from dflash.target.model import Target
from dflash.target.stream import AHEAD
from dflash.train.log import log, read_lines

LEAST_WARM_UP, MOST_WARM_UP, LEAST_MEASURED = 5, 20, 4
LAST_LINES = 12
GIB = 1 << 30


class WholeError(RuntimeError):
    """The run did not come to its end; the sentence names its log."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run: sizes of a batch, processes, steps."""

    shape: str
    servers: int
    gpus_per_replica: int
    drafters: int
    steps: int
    tokens: int
    anchors: int
    repeats: int
    """Of the parts by themselves."""
    device: torch.device
    dtype: torch.dtype
    layers: int | None
    """Cut the target to so many decoder layers; None: whole."""

    @property
    def depth(self) -> int:
        return self.layers or SHAPES[self.shape].target_layers

    @property
    def held(self) -> int:
        """Steps whose batches replicas make before the first step, or have made when they reach the plan's end: there
        one side works without the other."""
        return math.ceil(self.servers * (AHEAD + 1 + self.gpus_per_replica) / self.drafters)

    @property
    def measured(self) -> range:
        """Indices of the measured steps: between a warm-up of a tenth, but no fewer than are held, and those held last.

        Raises:
            ConfigError: too few would be left.
        """
        first = max(self.held, min(max(self.steps // 10, LEAST_WARM_UP), MOST_WARM_UP))
        if self.steps < first + self.held + LEAST_MEASURED:
            raise ConfigError(
                [
                    f"--steps {self.steps} leaves too few to measure beside {first} of warm-up and {self.held} that "
                    f"{self.servers} servers make ahead; give {first + self.held + LEAST_MEASURED} or more"
                ]
            )
        return range(first, self.steps - self.held)

    def devices(self) -> list[str]:
        """Of the servers, then of the drafters: in order, and round again where there are too few."""
        count = self.servers * self.gpus_per_replica + self.drafters
        if self.device.type == "cpu":
            return ["cpu"] * count
        return [f"cuda:{i % torch.cuda.device_count()}" for i in range(count)]


def bench(job: Job, run_dir: Path | None = None) -> dict[str, Any]:
    """Train ``steps`` steps as ``dflash train`` would, then measure capture and step by themselves.

    Args:
        run_dir: folder to make and keep, the run itself in its ``run``; None: a temporary one, kept if the run fails.

    Returns:
        ``tokens_per_s`` of the whole and of a replica, ``s_per_step``, shares of the time spent waiting, bytes, memory
        of each GPU in MiB, ``parts`` with seconds of each, their ``bound_tokens_per_s``, and ``over_bound``.

    Raises:
        ConfigError: what was asked for cannot run, or ``run_dir`` is in use.
        WholeError: the run failed.
    """
    measured = job.measured
    if run_dir is not None and run_dir.expanduser().exists() and any(run_dir.expanduser().iterdir()):
        raise ConfigError([f"--run-dir {run_dir} holds something already; name a new folder"])
    folder = (run_dir.expanduser() if run_dir else Path(tempfile.mkdtemp(prefix="dflash-bench-"))).absolute()
    keep = False
    try:
        config = write_run(folder, job)
        keep = run_dir is not None
        log.info(f"{job.steps} steps of {job.servers} servers and {job.drafters} drafters, in {folder}")
        with most_memory() as memory:
            run(folder)
        run_folder = Path(config.run_dir)
        result = _setting(job, config) | figures(read_lines(run_folder / "metrics.jsonl"), measured, job.servers)
        result["restarts"] = len(read_lines(run_folder / "metrics.jsonl", "start")) - 1
    except WholeError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if memory and job.device.type == "cuda":
        result["memory_mib"] = memory
    result["parts"] = parts(job)
    result["bound_tokens_per_s"] = bound(job, result["parts"])
    result["over_bound"] = result["tokens_per_s"] / result["bound_tokens_per_s"]
    if job.device.type == "cuda":
        result["device"] = torch.cuda.get_device_name(job.device)
        result["mfu"] = result["parts"]["tflop"] * 1e12 / result["s_per_step"] / H200_PEAK
    return result


def _setting(job: Job, config: Config) -> dict[str, Any]:
    placement = config.placement
    return {
        "shape": job.shape, "layers": job.depth, "tokens": job.tokens, "anchors": job.anchors,
        "dtype": str(job.dtype).removeprefix("torch."), "servers": job.servers,
        "gpus_per_replica": job.gpus_per_replica, "drafters": job.drafters, "steps": job.steps,
        "target_devices": placement.target, "drafter_devices": placement.drafter,
        "devices_shared": len({*placement.target, *placement.drafter}) < len(job.devices()),
    }  # fmt: skip


# ---- the run ---------------------------------------------------------------------------------------------------------


def write_run(folder: Path, job: Job) -> Config:
    """A target's config and tokenizer, data for the steps, and ``config.yaml``; returns the resolved config.

    Raises:
        ConfigError: a combination that cannot run, or too little room for the one checkpoint at the end.
    """
    (folder / "target").mkdir(parents=True, exist_ok=True)
    shape, known = SHAPES[job.shape], target_config(job.shape, job.layers)
    known.save_pretrained(folder / "target")
    _tokenizer(shape.vocab_size).save_pretrained(folder / "target")
    drafter, devices = shape.drafter_config(), job.devices()
    rng, ones = np.random.default_rng(0), [1] * job.tokens
    with open(folder / "data.jsonl", "w", encoding="utf-8") as file:
        for _ in range(job.steps * job.drafters):
            ids = rng.integers(0, drafter.mask_token_id, job.tokens).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": ones}) + "\n")
    config = Config(
        run_dir=str(folder / "run"),
        target=TargetConfig(
            model=f"{RANDOM}{folder / 'target'}", dtype="bfloat16" if job.dtype == torch.bfloat16 else "float32",
            context_layers=context_layers(job.shape, job.depth),
        ),
        placement=PlacementConfig(
            target=devices[: -job.drafters], gpus_per_replica=job.gpus_per_replica, drafter=devices[-job.drafters :]
        ),
        drafter=DrafterConfig(
            mask_token_id=drafter.mask_token_id, num_hidden_layers=drafter.num_hidden_layers,
            block_size=drafter.block_size, layer_types=list(drafter.layer_types), sliding_window=drafter.sliding_window,
            num_attention_heads=drafter.num_attention_heads, num_key_value_heads=drafter.num_key_value_heads,
            head_dim=drafter.head_dim, intermediate_size=drafter.intermediate_size,
        ),
        data=DataConfig(
            train=[str(folder / "data.jsonl")], cache_dir=str(folder / "cache"), max_length=job.tokens, length_buckets=1
        ),
        train=TrainConfig(
            epochs=1, grad_accumulation=job.drafters, tokens_per_batch=job.tokens, anchors_per_batch=job.anchors
        ),
        checkpoint=CheckpointConfig(every=job.steps, keep_last=1, keep_best=False),
        eval=EvalConfig(every=job.steps),
    )  # fmt: skip
    dump_yaml(config, folder / "config.yaml")
    config = resolve(load_config(folder / "config.yaml"), known)
    needed, free = estimate.checkpoint_bytes(config, known), shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            [
                f"--run-dir {folder} has {free / GIB:.1f} GiB of disk left and the checkpoint at the end takes "
                f"{needed / GIB:.1f}; name a folder on another disk"
            ]
        )
    return config


def _tokenizer(size: int) -> Any:
    """A word for each id: training decodes an example, and takes ids beyond the vocabulary for another target's."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")


def run(folder: Path) -> None:
    """``dflash train`` in a process of its own, so that this one holds no memory of a GPU.

    Raises:
        WholeError: it failed; its last lines are on stderr.
    """
    output = folder / "train.log"
    command = [sys.executable, "-m", "dflash.cli", "train", str(folder / "config.yaml")]
    with open(output, "w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        except KeyboardInterrupt:  # it has had the signal too, and saves
            process.wait()
            raise
    if code:
        for line in output.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]:
            print(line, file=sys.stderr)
        raise WholeError(f"the run ended with exit code {code}; its last lines are above, all of them in {output}")


@contextmanager
def most_memory() -> Iterator[dict[str, int]]:
    """The largest MiB in use on each GPU, by the number nvidia-smi has for it, looked up once a second; empty where
    there is no nvidia-smi."""
    most: dict[str, int] = {}
    program, over = shutil.which("nvidia-smi"), threading.Event()

    def look() -> None:
        command = [str(program), "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
        while True:
            for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines():
                gpu, _, used = line.partition(",")
                if used.strip().isdecimal():
                    most[gpu.strip()] = max(most.get(gpu.strip(), 0), int(used))
            if over.wait(1.0):
                return

    thread = threading.Thread(target=look, name="memory", daemon=True)
    if program:
        thread.start()
    try:
        yield most
    finally:
        over.set()
        if program:
            thread.join()


def figures(lines: list[dict[str, Any]], measured: range, servers: int) -> dict[str, Any]:
    """Rates and shares over the measured steps, from the step lines of metrics.jsonl.

    ``feature_wait_share`` is drafter 0's. ``replica_wait_share`` is the mean over replicas of the time for which they
    stood still because drafters had no room; it is told with the batch after. ``moved_bytes`` are those of the whole
    run over all links; each batch moves once, so ``link_bytes_per_s``, what leaves one replica, follows from the rate.
    """
    before, last, inside = lines[measured[0] - 1], lines[measured[-1]], lines[measured[0] : measured[-1] + 1]
    seconds, tokens = last["time"] - before["time"], last["tokens"] - before["tokens"]
    out = {
        "warm_up_steps": measured[0], "measured_steps": len(measured), "measured_s": seconds,
        "measured_tokens": tokens, "s_per_step": seconds / len(measured), "tokens_per_s": tokens / seconds,
        "tokens_per_s_per_replica": tokens / seconds / servers,
        "longest_gap_s": max(b["time"] - a["time"] for a, b in pairwise([before, *inside])),
        "feature_wait_share": sum(line["feature_wait_s"] for line in inside) / seconds,
    }  # fmt: skip
    if "moved_bytes" in last:  # of one process nothing is sent
        moved = sum(line["moved_bytes"] for line in lines)
        out |= {
            "replica_wait_share": sum(line["replica_wait_s"] for line in inside) / seconds / servers,
            "moved_bytes": int(moved),
            "link_bytes_per_s": moved / lines[-1]["tokens"] * out["tokens_per_s_per_replica"],
        }
    return out


# ---- its parts -------------------------------------------------------------------------------------------------------


def parts(job: Job) -> dict[str, float]:
    """Seconds of a batch's capture on the devices of one replica, and of a drafter's step over it, each alone there.

    Of several devices one works at a time here; in a run each has a batch of its own in its layers.
    """
    capture = _capture(job)
    _free(job)
    device = torch.device(job.devices()[0])
    trainer = build(SHAPES[job.shape], job.tokens, job.anchors, device, job.dtype, 1, prompt=0)
    step = of_trainer(trainer, job.repeats)
    del trainer
    _free(job)
    mfu = {"step_mfu": step["mfu"]} if "mfu" in step else {}
    return {"capture_s": capture["s_per_step"], "step_s": step["s_per_step"], "tflop": step["tflop"], **mfu}


def _capture(job: Job) -> dict[str, float]:
    names = job.devices()[: job.gpus_per_replica]
    module = random_target(job.shape, job.layers, [torch.device(name) for name in names], job.dtype)
    target = Target(module, None, context_layers(job.shape, job.depth))
    compiled.choose_paths(target, job.tokens, job.tokens)
    ids = np.random.default_rng(0).integers(0, SHAPES[job.shape].vocab_size - 1, job.tokens)
    mask = np.ones(job.tokens, dtype=bool)
    return timed(itertools.repeat(partial(target.capture, [ids], [mask], [0])), job.repeats, target.device)


def _free(job: Job) -> None:
    gc.collect()
    if job.device.type == "cuda":
        torch.cuda.empty_cache()


def bound(job: Job, alone: dict[str, float]) -> float:
    """Tokens/s at which the busiest device has no second left, from the parts' seconds.

    ``min(N / capture, W / step)`` batches where each process has devices of its own, ``1 / (capture + step)`` where all
    share one; a replica's devices halve, or otherwise share, the work of a batch evenly.
    """
    devices = job.devices()
    serving, training = devices[: -job.drafters], devices[-job.drafters :]

    def busy(device: str) -> float:
        """Seconds for each batch of the run."""
        capture = alone["capture_s"] * serving.count(device) / len(serving)
        return capture + alone["step_s"] * training.count(device) / len(training)

    return job.tokens / max(map(busy, devices))


def table(result: dict[str, Any]) -> str:
    """The result for a terminal."""
    r, alone = result, result["parts"]
    shared = ", which they share" if r["devices_shared"] else ""
    lines = [
        f"whole run, shape {r['shape']} ({r['layers']} target layers), {r['servers']} servers of "
        f"{r['gpus_per_replica']} devices, {r['drafters']} drafters, {r['tokens']} tokens and {r['anchors']} anchors a "
        f"batch, {r['dtype']}, on {r.get('device', 'cpu')}",
        f"  target on {' '.join(r['target_devices'])}; drafter on {' '.join(r['drafter_devices'])}{shared}",
        f"  whole     {r['tokens_per_s']:,.0f} tokens/s, {r['tokens_per_s_per_replica']:,.0f} a replica; "
        f"{r['s_per_step']:.4f} s a step over {r['measured_steps']} steps of {r['steps']}",
        f"  waiting   drafter 0 {r['feature_wait_share']:.1%} of the time for features"
        + (f", replicas {r['replica_wait_share']:.1%} for room" if "replica_wait_share" in r else ""),
        f"  parts     capture {alone['capture_s']:.4f} s a batch, step {alone['step_s']:.4f} s, each by itself: at "
        f"most {r['bound_tokens_per_s']:,.0f} tokens/s",
        f"  ratio     {r['over_bound']:.3f} of that bound",
    ]
    if "link_bytes_per_s" in r:
        lines.insert(4, f"  links     {r['link_bytes_per_s'] / 1e6:,.0f} MB/s out of each replica")
    if "mfu" in r:
        peak = f"of {H200_PEAK / 1e12:.0f} TFLOP/s"
        lines.insert(3, f"  drafters  MFU {r['mfu']:.0%} {peak} each ({alone['step_mfu']:.0%} by itself)")
    if "memory_mib" in r:
        used = ", ".join(f"{gpu}: {mib / 1024:.1f}" for gpu, mib in r["memory_mib"].items())
        lines.append(f"  memory    GiB at most on each GPU, as nvidia-smi counts them: {used}")
    if r["restarts"]:
        gap = f"{r['longest_gap_s']:.1f} s between two steps at most, which counts above"
        lines.append(f"  restarts  {r['restarts']}: {gap}")
    return "\n".join(lines)
