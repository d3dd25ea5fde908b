"""Tokenised data in memory and on disk. Needs numpy and safetensors only, so every rank can open a cache in no time."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dflash.data.conversations import DataError

DTYPES = {"I64": np.int64, "I32": np.int32, "BOOL": np.bool_}
ARRAYS = {"ids": "I32", "loss_mask": "BOOL", "offsets": "I64", "origin": "I32"}


class CacheDamaged(ValueError):
    """A cache file that is not whole; tokenising again replaces it."""


@dataclass(frozen=True, eq=False)
class TokenData:
    """Token ids and loss masks of n sequences, end to end.

    ``ids`` int32[total] and ``loss_mask`` bool[total] (token supervised). Sequence ``i`` is
    ``offsets[i]:offsets[i + 1]`` (int64[n + 1]) and came from row ``origin[i] = (file index, 1-based line)``
    (int32[n, 2]) of ``files``. ``stats`` counts what was read, kept and dropped (see
    :func:`dflash.data.tokenize.summary`); ``fingerprint`` names everything that shaped the data.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    origin: np.ndarray
    files: list[str]
    stats: dict[str, Any]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per sequence, int64[n]."""
        return np.diff(self.offsets)

    @cached_property
    def eligible(self) -> np.ndarray:
        """Positions per sequence that may be anchors (they and the next supervised), int64[n]."""
        pairs = self.loss_mask.copy()
        pairs[:-1] &= self.loss_mask[1:]
        pairs[self.offsets[1:] - 1] = False  # the next token is another sequence's
        return np.add.reduceat(pairs, self.offsets[:-1], dtype=np.int64)

    def sample(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Views of sequence ``i``: ids int32[S], loss_mask bool[S]."""
        part = slice(self.offsets[i], self.offsets[i + 1])
        return self.ids[part], self.loss_mask[part]

    def describe(self, i: int) -> str:
        """``file:line`` that sequence ``i`` came from."""
        file, line = self.origin[i]
        return f"{self.files[file]}:{line}"


def write_cache(path: Path, data: TokenData) -> None:
    """Write ``data`` to ``path``, which is the old file or the whole new one at any moment.

    Raises:
        DataError: the folder cannot be written.
    """
    arrays = {name: np.ascontiguousarray(getattr(data, name)) for name in ARRAYS}
    metadata = {"stats": json.dumps(data.stats), "fingerprint": data.fingerprint, "crc32": str(_crc32(arrays))}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, temporary, metadata)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        size = sum(a.nbytes for a in arrays.values()) / 1e6
        raise DataError(
            f"data.cache_dir: {size:.0f} MB cannot be written to {path.parent} ({error}); make room or name another"
        ) from error
    finally:
        if temporary.exists():
            temporary.unlink()


def read_cache(path: Path, files: Sequence[str]) -> TokenData:
    """Data that :func:`write_cache` wrote, mapped from disk; ``files`` are the sources' names of today.

    Raises:
        FileNotFoundError: no such cache.
        CacheDamaged: the file is not what was written.
    """
    raw = np.memmap(path, dtype=np.uint8, mode="c") if path.stat().st_size else np.empty(0, dtype=np.uint8)
    try:
        # The file format of safetensors: length of the header, header, arrays. Mapped here because its reader copies.
        # Copy-on-write ("c") gives arrays that torch takes without a warning; nothing is ever written back.
        start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
        header = json.loads(raw[8:start].tobytes())
        metadata = header.pop("__metadata__")
        arrays = {}
        for name, dtype in ARRAYS.items():
            entry = header[name]
            begin, end = entry["data_offsets"]
            if entry["dtype"] != dtype or start + end > len(raw):
                raise CacheDamaged(f"{path}: {name} is cut off")
            arrays[name] = np.asarray(raw[start + begin : start + end]).view(DTYPES[dtype]).reshape(entry["shape"])
        if int(metadata["crc32"]) != _crc32(arrays):
            raise CacheDamaged(f"{path}: bytes have changed")
        stats = _renamed(json.loads(metadata["stats"]), list(files))
        return TokenData(**arrays, files=list(files), stats=stats, fingerprint=metadata["fingerprint"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise error if isinstance(error, CacheDamaged) else CacheDamaged(f"{path}: no header of this kind") from error


def _renamed(stats: dict[str, Any], files: list[str]) -> dict[str, Any]:
    """``stats`` with the sources' names of today: a cache is found by content, and files move."""
    today = dict(zip(stats["files"], files, strict=True))
    for table in (stats["dropped"], stats["unsupervised_turns"]):
        for entry in table.values():
            name, _, line = entry["first"].rpartition(":")
            entry["first"] = f"{today[name]}:{line}"
    return stats | {"files": files}


def _crc32(arrays: dict[str, np.ndarray]) -> int:
    """Checksum of all arrays: about a second per GB, once per start, against days of training on damaged data."""
    value = 0
    for name in ARRAYS:
        value = zlib.crc32(arrays[name].reshape(-1).view(np.uint8).data, value)
    return value
