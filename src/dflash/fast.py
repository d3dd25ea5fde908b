"""Which fast paths this process takes on a GPU; on a CPU there are none.

Each is tried once at start (:mod:`dflash.train.probe` does it with the run's own shapes). One that cannot be built
here, for want of Triton or a compiler, is switched off for good with a line that says why: nothing is caught in the
middle of a run, and the plain reference takes its place.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

log = logging.getLogger("dflash")

KERNELS = "Triton kernels of loss and optimizer"
COMPILED = "compiled layers and flex attention"
TARGET = "compiled parts of the target"
_off: set[str] = set()


def uses(path: str, device: torch.device) -> bool:
    """Whether this path runs on this device. Both are built by Triton."""
    return device.type == "cuda" and path not in _off and has_triton()


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def kernels() -> Any:
    """:mod:`dflash.kernels`, which needs Triton to be imported at all."""
    return importlib.import_module("dflash.kernels")


def attempt(path: str, instead: str, work: Callable[[], None]) -> bool:
    """Run ``work`` and say whether it could; else switch the path off and log what runs instead.

    Raises:
        torch.OutOfMemoryError: the device is too small, which no other path would change.
    """
    unbuilt: tuple[type[Exception], ...] = (ImportError, OSError, RuntimeError, subprocess.SubprocessError)
    unbuilt += _triton_errors()
    try:
        work()
    except torch.OutOfMemoryError:
        raise
    except unbuilt as error:
        _off.add(path)
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        log.warning(f"{path} cannot run here ({reason}): {instead}")
        return False
    return True


def _triton_errors() -> tuple[type[Exception], ...]:
    """Triton's own errors derive from nothing more telling than Exception."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)
