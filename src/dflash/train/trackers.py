"""TensorBoard and Weights & Biases through accelerate: the scalars of ``metrics.jsonl`` under the same names.

A tracker is a convenience. One that is not installed is refused before anything is loaded; one that fails later, at
its start or in the middle, is given up with a warning, and training goes on.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from dflash.train.log import log

NAMES = ("tensorboard", "wandb")
NO_SCALARS = ("kind", "step", "time")
"""Keys that trackers have means of their own for."""


class TrackerError(RuntimeError):
    """A tracker cannot be used here."""


def require_installed(names: Sequence[str]) -> None:
    """Refuse trackers whose package is missing.

    Raises:
        TrackerError: naming the package and the extra that brings it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise TrackerError(
                f"log.trackers names {name}, which is not installed: pip install 'dflash-trainer[{name}]', or take it "
                "off the list"
            )


class Trackers:
    """The trackers of one run.

    Args:
        names: out of :data:`NAMES`.
        run_dir: TensorBoard's events go to ``run_dir/tensorboard``, files of wandb to ``run_dir/wandb``.
        config: the run's, as nested plain values; wandb keeps it.
        first_step: the next to be trained. A resume goes on in the same tracker run: TensorBoard then hides what an
            earlier attempt wrote from this step on; wandb, which cannot take lines back, keeps what it has.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, config: dict[str, Any], first_step: int) -> None:
        self._active: dict[str, GeneralTracker] = {}
        self._wandb_step = 0
        if names:
            PartialState()  # accelerate's trackers write messages, which takes its idea of ranks
        for name in dict.fromkeys(names):
            self._try(name, lambda name=name: self._start(name, run_dir, config, first_step))  # type: ignore[misc]

    def _start(self, name: str, run_dir: Path, config: dict[str, Any], first_step: int) -> None:
        if name == "tensorboard":
            tracker: Any = TensorBoardTracker("tensorboard", run_dir, purge_step=first_step)
        else:
            tracker = WandBTracker(
                os.environ.get("WANDB_PROJECT", "dflash"), id=_wandb_id(run_dir), resume="allow", dir=str(run_dir),
                name=run_dir.absolute().name, config=config,
            )  # fmt: skip
        tracker.start()
        if name == "wandb":
            self._wandb_step = tracker.tracker.step
        self._active[name] = tracker

    def log(self, line: dict[str, Any]) -> None:
        """Pass on the scalars of a step's or an evaluation's line."""
        if not self._active or line.get("kind", "eval") != "eval":
            return
        step = line["step"]
        values = {k: v for k, v in line.items() if k not in NO_SCALARS and isinstance(v, int | float)}
        for name, tracker in list(self._active.items()):
            if name == "wandb" and step < self._wandb_step:
                continue  # it has this step already and would warn of every key
            self._try(name, lambda tracker=tracker: tracker.log(values, step=step))  # type: ignore[misc]

    def finish(self) -> None:
        """Hand over what is buffered."""
        for name, tracker in list(self._active.items()):
            self._try(name, tracker.finish)
        self._active.clear()

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever a service or its client may raise: none of it is worth a training
            self._active.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            log.warning(f"log.trackers: {name} failed and is not used any more; the training goes on ({reason})")


def _wandb_id(run_dir: Path) -> str:
    """The same for every start of a run, another for every run; kept beside what wandb itself writes."""
    path = run_dir / "wandb" / "dflash_run_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(8) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
