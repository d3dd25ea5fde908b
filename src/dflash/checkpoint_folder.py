"""Which folders of a run are its checkpoints: what training, which writes them, and every reader of runs agree on.

checkpoints/step_000500/   a drafter, what a resume needs (trainer.json), COMPLETE (written last, deleted first)
checkpoints/.writing_...   being written; of no concern to readers
"""

from __future__ import annotations

import re
from pathlib import Path

COMPLETE = "COMPLETE"
STATE = "trainer.json"
WRITING = ".writing_"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step_"))


def is_complete(path: Path) -> bool:
    return (path / COMPLETE).exists()


def step_folders(folder: Path) -> list[Path]:
    """Of a run's ``checkpoints``, complete or not, the oldest first. Our own names only: a user may keep copies."""
    return sorted((p for p in folder.glob("step_*") if re.fullmatch(r"step_\d{6,}", p.name)), key=step_of)


def complete(folder: Path) -> list[Path]:
    """The checkpoints that a reader may use, the oldest first."""
    return [path for path in step_folders(folder) if is_complete(path)]
