"""One process of a run, started by the launcher: ``python -m dflash.train.worker``.

Its first act ties its life to the launcher's: elastic workers outlive their launcher otherwise. Only the leader (the
one process, or drafter 0) acts on SIGINT and SIGTERM: it saves the last finished step. The others go on serving it
until it has, so that it is never left waiting inside a transfer or a collective.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash.config import Config
    from dflash.target.link import Link
    from dflash.train.placement import Role
    from dflash.train.trainer import Trainer

ORDERS = "DFLASH_ORDERS"
"""Environment variable: the folder in which the launcher left the config, and in which a worker says why it gave up."""
LAUNCHER = "DFLASH_LAUNCHER_PID"
NODE, NODES = "DFLASH_NODE", "DFLASH_NODES"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
SILENT_LEADER_S = 8.0
"""After a signal, without a heartbeat of the leader's: it is gone and there is nothing to wait for."""
NOTICE_S, AGENT_S = 5.0, 20.0
"""How long the launcher may take to notice a death that another process has noticed, and to end one that gave up."""


def die_with_launcher() -> None:
    """The kernel kills this process when its launcher ends, however that ends. The signal is not sent if the launcher
    was gone before it was asked for, hence the second look."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ[LAUNCHER]):
        os._exit(1)


@dataclass
class Orders:
    """Asks to end, by signal, and how this process takes them."""

    stopped: threading.Event
    number: int = 0
    leads: bool = True
    training: bool = False
    """Whether there is anything to save yet."""
    link: Link | None = None

    @classmethod
    def listen(cls, leads: bool) -> Orders:
        """Take :data:`SIGNALS` in a thread: handlers of the main thread would wait for a transfer or collective."""
        orders = cls(threading.Event(), leads=leads)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=orders._wait, name="signals", daemon=True).start()
        return orders

    def _wait(self) -> None:
        self.number = signal.sigwait(SIGNALS)
        if self.leads and self.training:
            self.stopped.set()
            return
        if self.link is not None and not self.leads:
            self._await_leader(self.link)
        os._exit(128 + self.number)

    def _await_leader(self, link: Link) -> None:
        """Until the leader has saved, or is gone."""
        try:
            store = link.second()
            leader = link.hear("leader", store) if link.told("leader", store) else None
            last, since = None, time.monotonic()
            while not link.told("saved", store) and time.monotonic() - since < SILENT_LEADER_S:
                if leader and leader["node"] == os.environ[NODE] and _has_ended(leader["pid"]):
                    return
                if (beat := link.beat_of(link.leader, store)) != last:
                    last, since = beat, time.monotonic()
                time.sleep(0.1)
        except RuntimeError:  # the store is gone, and with it the launcher that keeps it
            return


def _has_ended(pid: int) -> bool:
    """Gone, or a zombie that the launcher has not collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def main() -> int:
    die_with_launcher()
    config, run_dir, role, everyone = _assignment()
    leader = next(r for r in everyone if r.kind != "replica")
    leads = role == leader
    if not leads:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        own_log = os.open(_log_file(run_dir, role), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(own_log, 1)
        os.dup2(own_log, 2)
    orders = Orders.listen(leads)
    try:
        code = _work(config, run_dir, role, everyone, orders)
    except Exception as error:
        code = _give_up(error, orders)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may sit in a transfer that nobody will finish


def _log_file(run_dir: Path, role: Role) -> Path:
    return run_dir / "logs" / f"rank{role.rank}.log"


def _assignment() -> tuple[Config, Path, Role, list[Role]]:
    """Who this process is."""
    from dflash.config import load_config
    from dflash.train.placement import local_roles, roles

    config = load_config(Path(os.environ[ORDERS]) / "config.yaml", check_files=False)
    here = local_roles(config, int(os.environ[NODE]), int(os.environ[NODES]))
    return config, Path(config.run_dir), here[int(os.environ["LOCAL_RANK"])], roles(config)


def _give_up(error: Exception, orders: Orders) -> int:
    """What a restart would only repeat is told to the launcher, which ends the run; anything else is a restart."""
    from dflash.config import ConfigError
    from dflash.target.link import Interrupted, PeerLost
    from dflash.train.log import log

    if isinstance(error, Interrupted) or orders.stopped.is_set():
        return 128 + orders.number
    if isinstance(error, PeerLost):
        log.error(str(error))
        orders.stopped.wait(NOTICE_S)  # its launcher has seen it die, mostly, and is about to say so
        return 1
    if not isinstance(error, OSError) and not type(error).__module__.startswith("dflash."):
        import traceback

        traceback.print_exc()
        return 1
    known = isinstance(error, ConfigError)
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    log.error("\n".join(problems))
    try:
        with open(Path(os.environ[ORDERS]) / "gave_up.json", "x", encoding="utf-8") as file:
            json.dump({"code": 2 if known else 1, "problems": problems}, file)
    except FileExistsError:  # another process was first: its reason is the one to tell
        pass
    os.kill(os.getppid(), signal.SIGTERM)
    orders.stopped.wait(AGENT_S)  # for the launcher to end it: leaving first would read as a crash to be restarted
    return 1


def _work(config: Config, run_dir: Path, role: Role, everyone: Sequence[Role], orders: Orders) -> int:
    from dflash.train.log import start_logging

    # Replicas and further drafters already write to their file by stderr.
    if orders.leads:
        start_logging(_log_file(run_dir, role))
    else:
        start_logging(Path(os.devnull))
    import torch

    if role.devices[-1] != "cpu":
        torch.cuda.set_device(torch.device(role.devices[-1]))
    if role.kind == "both":
        from dflash.train.build import build

        return _lead(config, run_dir, lambda: build(config, run_dir), orders, None)
    from dflash.train import ranks

    if role.kind == "replica":
        ranks.replica(config, run_dir, role, everyone, orders)
        return 0
    if role.index:
        ranks.follow(config, run_dir, role, everyone, orders)
        return 0
    return ranks.lead(config, run_dir, role, everyone, orders, _lead)


def _lead(config: Config, run_dir: Path, make: Any, orders: Orders, opened: Any) -> int:
    """The process that keeps the run's folder: from the built trainer to the exit code.

    Args:
        make: builds the trainer.
        opened: called with the trainer once it is known where the run continues.
    """
    from dflash.train.build import open_metrics, write_config
    from dflash.train.log import drop_lines_after, log

    with _writing(run_dir):
        trainer: Trainer = make()
        newest = trainer.checkpoints.newest()
        if newest:
            trainer.resume(newest)
        # Nothing of the run was touched until here: what follows happens only to a run that can go on.
        trainer.checkpoints.remove_remains()
        write_config(config, run_dir / "config.yaml")
        last = trainer.progress.step if newest else -1
        dropped = drop_lines_after(run_dir / "metrics.jsonl", last, trainer.progress.owes_eval)
        if newest or dropped:
            start = (
                f"continuing after step {trainer.progress.step}" if newest else "no complete checkpoint: starting over"
            )
            log.info(start + (f"; {dropped} newer metrics lines dropped" if dropped else ""))
        if restarts := int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
            log.warning(f"a process of the run was lost: restart {restarts} of {config.placement.max_restarts}")
        if opened:
            opened(trainer)
        metrics = open_metrics(trainer, first_step=trainer.progress.step + 1 if newest else 0)
        orders.training = True  # before this, nothing is worth saving and a signal simply ends the process
        try:
            trainer.run(metrics, orders.stopped.is_set)
        finally:
            metrics.close()
    if trainer.progress.step < trainer.plan.total:
        log.info(f"stopped after step {trainer.progress.step}: `dflash resume {run_dir}` continues")
        return 128 + orders.number
    best = trainer.progress.best_step
    kept = f"; best evaluation at step {best}" if best and config.checkpoint.keep_best else ""
    log.info(f"done: {trainer.plan.total} steps, drafter in {trainer.checkpoints.newest()}{kept}")
    return 0


@contextmanager
def _writing(run_dir: Path) -> Iterator[None]:
    """Hold the folder itself while this process may write into it: a launcher killed a moment ago has let go of its
    lock before its workers are gone."""
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_dir, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
