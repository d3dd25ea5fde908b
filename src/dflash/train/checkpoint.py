"""Checkpoints: complete or absent, written beside training, pruned by age and by merit.

    checkpoints/step_000500/
        model.safetensors, config.json   fp32 masters: a drafter that `DFlashDraftModel.from_pretrained` loads
        optimizer.safetensors            the optimizer's moments in fp32
        trainer.json                     step, counters, best evaluation, fingerprints
        COMPLETE                         written last; a folder without it does not exist for readers

A save copies everything to host memory (that is all training waits for) and a thread writes it into a hidden folder
that is renamed once it is whole: a kill at any moment leaves the previous checkpoint and nothing half-written.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash.checkpoint_folder import (
    COMPLETE,
    STATE,
    WRITING,
    complete,
    is_complete,
    step_folders,
    step_of,
)
from dflash.model import DFlashDraftModel
from dflash.train.adamw import AdamW
from dflash.train.muon import Muon

VERSION = 1
OLDER = "delete this checkpoint's folder to resume from the one before"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or is not what the run needs; the sentence says which and why."""


@dataclass
class Progress:
    """Everything of a run besides weights and moments that a resume needs."""

    step: int
    tokens: int
    samples: int
    best_step: int | None
    best_value: float | None
    answers: str
    """Digest of the evaluation's answers: a best value holds only among evaluations on the same ones."""
    fingerprint: dict[str, Any]
    """Of data and plan: equal, or the resumed run would not be the same run."""
    owes_eval: bool = False
    """Saved by a signal before the step's evaluation was done: the resumed run begins with it."""


class Checkpoints:
    """The ``checkpoints`` folder of a run.

    Args:
        keep_last: how many of the newest stay.
        keep_best: whether the one with the best evaluation stays as well.
    """

    def __init__(self, folder: Path, keep_last: int, keep_best: bool) -> None:
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def newest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return next(reversed(complete(self.folder)), None)

    def save(self, drafter: DFlashDraftModel, optimizer: AdamW | Muon, progress: Progress) -> None:
        """Copy the state to host memory and start writing it; waits for a save still under way.

        Raises:
            CheckpointError: the previous save failed, or the disk has no room for this one.
        """
        self.wait()
        model = {name: _host_copy(p) for name, p in drafter.named_parameters()}
        moments = {
            f"{m}.{name}": _host_copy(optimizer.state[p][m])
            for name, p in drafter.named_parameters()
            if p in optimizer.state
            for m in optimizer.moments(p)
        }
        needed = sum(t.numel() * t.element_size() for t in [*model.values(), *moments.values()]) + (1 << 20)
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise CheckpointError(_no_room(progress.step, self.folder, needed, free))
        config = drafter.config.to_json_string(use_diff=False)
        arguments = (model, moments, config, replace(progress), needed)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until the save under way is on disk; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc: object) -> None:
        self.wait()  # also when training fails: the run's lock must outlive the writing, and a failed save be told

    def failed(self) -> bool:
        """Whether a finished save failed (without waiting for one under way)."""
        return self._failure is not None

    def _write(
        self, model: dict[str, Tensor], moments: dict[str, Tensor], config: str, progress: Progress, needed: int
    ) -> None:
        part = self.folder / f"{WRITING}{progress.step:06d}"
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            save_file(model, part / "model.safetensors", metadata={"format": "pt"})
            save_file(moments, part / "optimizer.safetensors")
            (part / "config.json").write_text(config, encoding="utf-8")
            (part / STATE).write_text(json.dumps({"version": VERSION, **asdict(progress)}, indent=1), "utf-8")
            for file in part.iterdir():
                _to_disk(file)
            (part / COMPLETE).touch()
            _to_disk(part)
            final = self.folder / f"step_{progress.step:06d}"
            shutil.rmtree(final, ignore_errors=True)
            os.replace(part, final)
            _to_disk(self.folder)
            self._prune(progress.best_step)
        except Exception as error:  # carried to the training thread, which raises it: a lost save must not go unseen
            shutil.rmtree(part, ignore_errors=True)
            free = shutil.disk_usage(self.folder).free
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
            self._failure = CheckpointError(
                _no_room(progress.step, self.folder, needed, free)
                if full
                else f"checkpoint of step {progress.step} could not be written to {self.folder}: {error}; "
                "the last complete one is untouched"
            )

    def _prune(self, best_step: int | None) -> None:
        for path in complete(self.folder)[: -self.keep_last]:
            if not (self.keep_best and step_of(path) == best_step):
                (path / COMPLETE).unlink()  # first, so that a kill in the middle leaves no complete-looking remains
                shutil.rmtree(path)

    def remove_remains(self) -> None:
        """Delete what kills left behind: folders being written or pruned. Call it with the run's lock held."""
        for path in [*self.folder.glob(f"{WRITING}*"), *step_folders(self.folder)]:
            if not is_complete(path):
                shutil.rmtree(path)


def load(path: Path, drafter: DFlashDraftModel, optimizer: AdamW | Muon) -> Progress:
    """Put a checkpoint's weights and moments into a drafter and optimizer built as for a fresh run.

    Raises:
        CheckpointError: unknown version, or tensors that are missing, unexpected or of another shape.
    """
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path / STATE} is damaged ({error}); {OLDER}") from error
    if state.pop("version") != VERSION:
        raise CheckpointError(f"{path}: written by another version of dflash; resume it with that version")
    progress = Progress(**state)
    parameters = dict(drafter.named_parameters())
    with torch.no_grad():
        _read_into(path / "model.safetensors", parameters, "of another drafter")
    moments: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        entry = {m: torch.empty_like(parameter, dtype=torch.float32) for m in optimizer.moments(parameter)}
        moments |= {f"{m}.{name}": value for m, value in entry.items()}
        # Of AdamW, on the device since it is fused; Muon's matrices need no count and let it be.
        entry["step"] = torch.tensor(float(progress.step), device=parameter.device)
        optimizer.state[parameter] = entry
    _read_into(path / "optimizer.safetensors", moments, "of another train.optimizer; put it back as it was")
    return progress


def _read_into(file: Path, tensors: dict[str, Tensor], otherwise: str) -> None:
    try:
        opened = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged ({error}); {OLDER}") from error
    with opened as stored:
        names = set(stored.keys())
        if names != set(tensors):
            odd = sorted(names ^ set(tensors))
            raise CheckpointError(f"{file}: {len(odd)} tensors missing or unexpected, {odd[0]} first: {otherwise}")
        for name, tensor in tensors.items():
            value = stored.get_tensor(name)
            if value.shape != tensor.shape or value.dtype != torch.float32:
                raise CheckpointError(
                    f"{file}: {name} is {value.dtype} {tuple(value.shape)}, not fp32 {tuple(tensor.shape)}"
                )
            tensor.copy_(value)


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_room(step: int, folder: Path, needed: int, free: int) -> str:
    return (
        f"checkpoint of step {step} needs {needed / 2**30:.2f} GiB in {folder} and {free / 2**30:.2f} GiB are free: "
        "make room, then resume; the last complete checkpoint is untouched"
    )
