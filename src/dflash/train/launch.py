"""Starting and continuing a run: its folder and lock, PyTorch's elastic launcher, and what the run's end means.

The launcher of a machine starts one worker per role of that machine (:mod:`dflash.train.worker`), restarts all of them
when one dies, and passes SIGINT and SIGTERM on; the library supervises, this file only says what to start and reads
what came of it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.config import Config, ConfigError, dump_yaml, load_config
from dflash.train.placement import Role, local_roles, require_devices
from dflash.train.trackers import require_installed
from dflash.train.worker import LAUNCHER, NODE, NODES, ORDERS

RESUME_SECTIONS = ("placement", "log", "checkpoint", "eval")
"""What a resume may change: the rest is the run itself."""
DISK_BYTES_PER_S = 1e8
"""A slow disk: how long two checkpoints may take (one under way, one to come) before a shutdown turns into a kill."""
SHUTDOWN_S = 30
LAST_LINES = 12


class RunError(RuntimeError):
    """The run's folder does not allow what was asked, or the run failed; the sentence says which and why."""


@dataclass(frozen=True)
class Machines:
    """The machines of a run, as torchrun's options say it: how many, which one this is, where they meet."""

    nodes: int = 1
    node: int = 0
    endpoint: str | None = None


def train(config: Config, machines: Machines | None = None) -> int:
    """Start a new run of a resolved config; returns the exit code.

    Raises:
        RunError: the folder holds a run already, another process works in it, or the run failed.
        ConfigError: a placement that cannot be served here.
    """
    machines = machines or Machines()
    run_dir = Path(config.run_dir)
    here = local_roles(config, machines.node, machines.nodes)
    if _keeps(here) and any((run_dir / name).exists() for name in ("config.yaml", "checkpoints", "metrics.jsonl")):
        raise RunError(
            f"run_dir {run_dir} holds a run already: continue it with `dflash resume {run_dir}`, or name another"
        )
    require_devices(here)
    require_installed(config.log.trackers)
    return _launch(config, run_dir, here, machines)


def resume(run_dir: Path, overrides: Sequence[str] = (), machines: Machines | None = None) -> int:
    """Continue a run from its newest complete checkpoint; returns the exit code.

    Raises:
        RunError: no run in the folder, another process works in it, or the run failed.
        ConfigError: an override outside ``RESUME_SECTIONS``, or a placement that cannot be served here.
    """
    machines = machines or Machines()
    if not (run_dir / "config.yaml").exists():
        raise RunError(
            f"{run_dir} holds no run (no config.yaml): start one with `dflash train CONFIG run_dir={run_dir}`"
        )
    refused = [o for o in overrides if o.split("=")[0].split(".")[0] not in RESUME_SECTIONS]
    if refused:
        raise ConfigError(
            [
                f"{o.split('=')[0]}: a resume continues the same run and changes {', '.join(RESUME_SECTIONS)} only"
                for o in refused
            ]
        )
    config = load_config(run_dir / "config.yaml", overrides)
    here = local_roles(config, machines.node, machines.nodes)
    require_devices(here)
    require_installed(config.log.trackers)
    config.run_dir = str(run_dir)  # the folder may have been moved or copied since
    return _launch(config, run_dir, here, machines)


def _keeps(here: Sequence[Role]) -> bool:
    """Whether the run's folder is this machine's to guard: drafters write it."""
    return any(role.kind != "replica" for role in here)


def _launch(config: Config, run_dir: Path, here: Sequence[Role], machines: Machines) -> int:
    """Run the workers of this machine to their end.

    Raises:
        RunError, ConfigError: in the words of the worker that gave up, or naming the one that died.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):  # each of the library's has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.ERROR)
    run_dir.mkdir(parents=True, exist_ok=True)
    with locked(run_dir) if _keeps(here) else _unlocked(), _orders(config) as orders:
        if machines.nodes > 1 or len(here) > 1:
            _tokenise(config)
        os.environ |= {
            ORDERS: str(orders), LAUNCHER: str(os.getpid()), NODE: str(machines.node), NODES: str(machines.nodes),
        }  # fmt: skip
        if len(here) > 1:  # or each would take all cores and they would spin against one another
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(here))))
        elastic = LaunchConfig(
            min_nodes=machines.nodes,
            max_nodes=machines.nodes,
            nproc_per_node=len(here),
            run_id=uuid.uuid4().hex if machines.nodes == 1 else "dflash",
            rdzv_backend="c10d",
            rdzv_endpoint=machines.endpoint or "localhost:0",
            rdzv_configs={"is_host": machines.node == 0, "timeout": int(config.placement.ready_timeout_s)},
            local_addr="localhost" if machines.nodes == 1 else None,
            max_restarts=config.placement.max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(orders)),
            signals_to_handle=",".join(_handled()),
        )
        try:
            with _patience(_shutdown_s(config)):
                elastic_launch(elastic, sys.executable)("-m", "dflash.train.worker")
        except SignalException as error:
            _report_verdict(orders)
            return 128 + error.sigval
        except ChildFailedError as error:
            _report_verdict(orders)
            raise RunError(_obituary(error, here, run_dir, config.placement.max_restarts)) from error
        except RendezvousError as error:
            raise RunError(
                f"the machines did not meet at {machines.endpoint} ({' '.join(str(error).split())}): start the same "
                "command on each, with its own --node-rank"
            ) from error
    return 0


def _handled() -> list[str]:
    """Signals that end the run: the library would take SIGHUP from a run that nohup protects from it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return ["SIGTERM", "SIGINT", "SIGQUIT", *([] if ignored else ["SIGHUP"])]


@contextmanager
def _patience(seconds: int) -> Iterator[None]:
    """After a signal, let workers save for so long before they are killed. PyTorch 2.12 has an option for it, 2.11 a
    fixed 30 s; all versions end workers through this method, and name a signal only if they pass one on."""
    from torch.distributed.elastic.multiprocessing import PContext

    close = PContext.close

    def patient(self: Any, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        close(self, death_sig, timeout if death_sig is None else seconds)

    PContext.close = patient  # type: ignore[method-assign]
    try:
        yield
    finally:
        PContext.close = close  # type: ignore[method-assign]


def _tokenise(config: Config) -> None:
    """Once, before the ranks start and all want to: they read the cache. What is wrong with the data shows here."""
    from dflash.train.build import prepare

    prepare(config)


def _shutdown_s(config: Config) -> int:
    from dflash.estimate import checkpoint_bytes
    from dflash.target.load import load_target_config

    size = checkpoint_bytes(config, load_target_config(config.target.model, config.target.revision))
    return SHUTDOWN_S + int(2 * size / DISK_BYTES_PER_S)


@contextmanager
def _orders(config: Config) -> Iterator[Path]:
    """A folder with the config for the workers, in which one that gives up says why."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-"))
    try:
        dump_yaml(config, folder / "config.yaml")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _report_verdict(orders: Path) -> None:
    """Raise what a worker of this machine gave up for, if one did."""
    path = orders / "gave_up.json"
    if not path.exists():
        return
    verdict = json.loads(path.read_text(encoding="utf-8"))
    if verdict["code"] == 2:
        raise ConfigError(verdict["problems"])
    raise RunError(verdict["problems"][0])


def _obituary(error: Any, here: Sequence[Role], run_dir: Path, restarts: int) -> str:
    """Which process failed first, how, and its last words."""
    failure = min(error.failures.values(), key=lambda f: (f.exitcode >= 0, f.timestamp))
    role = here[failure.local_rank]
    how = f"was killed by {signal.Signals(-failure.exitcode).name}" if failure.exitcode < 0 else (
        f"ended with exit code {failure.exitcode}"
    )  # fmt: skip
    path = run_dir / "logs" / f"rank{role.rank}.log"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:] if path.exists() else []
    for line in lines:
        print(f"[rank{role.rank}] {line}", file=sys.stderr)
    spent = f"after {restarts} restarts " if restarts else ""
    return (
        f"{role} {how} {spent}(placement.max_restarts {restarts}); its log is {path}: `dflash resume {run_dir}` "
        "continues from the newest checkpoint"
    )


@contextmanager
def _unlocked() -> Iterator[None]:
    yield


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run's folder against a second launcher; the kernel lets go when the process ends, however it ends."""
    with open(run_dir / ".lock", "w", encoding="utf-8") as file:
        for patience in (0.05, 0.2, None):  # dflash status, which asks for the lock, holds it for a moment
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if patience is None:
                    raise RunError(f"another process is working in {run_dir}: wait for it or stop it") from None
                time.sleep(patience)
        yield
