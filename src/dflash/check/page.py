"""The page that ``dflash check`` prints: sections of judged lines, each pass, warn or fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from huggingface_hub.errors import StrictDataclassError

from dflash.config import ConfigError
from dflash.data.conversations import DataError
from dflash.model.config import DrafterError
from dflash.report.text import WIDTH, wrap
from dflash.target.features import SickFeatures
from dflash.target.load import TargetError

Level = Literal["pass", "warn", "fail"]
EXPECTED = (
    ConfigError, DataError, DrafterError, SickFeatures, TargetError, OSError, StrictDataclassError,
    torch.OutOfMemoryError,
)  # fmt: skip
"""What a check may raise for a reason that lies in config, data or machine; the rest are bugs."""


class Page:
    """Prints as it goes: loading a target takes minutes, and what is known before need not wait for it."""

    def __init__(self) -> None:
        self.lines: list[tuple[Level, str, str]] = []
        """(level, name, text) of every judged line."""

    def section(self, title: str) -> None:
        print(f"{'' if not self.lines else chr(10)}== {title} {'=' * max(WIDTH - len(title) - 4, 0)}", flush=True)

    def line(self, level: Level, name: str, text: str) -> None:
        """One judged line."""
        self.lines.append((level, name, text))
        for part in wrap(text, f"  {level}  {name:<17} "):
            print(part, flush=True)

    def judge(self, name: str, text: str, warn: str = "", fail: str = "") -> None:
        """A line that fails or warns where there is a reason to, which is put behind the text."""
        level: Level = "fail" if fail else "warn" if warn else "pass"
        self.line(level, name, f"{text}: {fail or warn}" if fail or warn else text)

    def block(self, text: str) -> None:
        """Something to look at, which nobody judges."""
        print("\n".join(f"        {line}" for line in text.splitlines()), flush=True)

    def not_run(self, name: str, reason: str) -> None:
        """A check that could not be made. A warning: what stood in its way has its own line."""
        self.line("warn", name, f"not checked: {reason}")

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """What is raised in the block becomes a failed line: one fault must not hide the rest."""
        try:
            yield
        except ConfigError as error:
            for problem in error.problems:
                self.line("fail", name, problem)
        except torch.OutOfMemoryError as error:
            reason = str(error).split(". ")[0]
            self.line("fail", name, f"out of memory ({reason}); lower train.tokens_per_batch or anchors_per_batch")
        except EXPECTED as error:
            self.line("fail", name, " ".join(str(error).split()))

    def failed(self, name: str) -> bool:
        """Whether a line of that name did."""
        return any(level == "fail" and one == name for level, one, _ in self.lines)

    def close(self) -> int:
        """Print the count of lines; the exit code: 1 if one failed."""
        count = {level: sum(one == level for one, _, _ in self.lines) for level in ("pass", "warn", "fail")}
        print(f"\n{count['fail']} failed, {count['warn']} warnings, {count['pass']} passed", flush=True)
        return int(count["fail"] > 0)
