"""Context features and labels on disk: captured once, read in every epoch.

For small targets and single devices, where the target's forward pass would be most of an epoch. The data are cut into
shards of whole samples in data order; a shard's content depends on nothing but its samples, so an interrupted capture
goes on with the missing shards and ends with the same bits.

    FOLDER/manifest.json      what the features are of; compared in full before any is used
    FOLDER/00000.safetensors  context [T, L*D], labels [T]; samples end to end, in data order; its place, a digest of
                              the manifest and a checksum, which are verified when a process first reads from it

Rows are captured in groups of similar length: against a capture inside training only rounding differs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from dflash.target.features import TargetFeatures, assemble

if TYPE_CHECKING:
    from dflash.data.tokenize import TokenData
    from dflash.target.model import Target

SHARD_TOKENS = 1 << 16
CHECKED_ROWS = 1 << 12
"""Rows read at once while a shard's checksum is made: a shard of a large target has gigabytes."""
ABOUT = "dflash"
log = logging.getLogger("dflash")


class StoreError(RuntimeError):
    """The folder holds other features than asked for, is incomplete, or the disk has no room."""


class FeatureStore:
    """Features of a data set under one target.

    Args:
        folder: where the shards are.
        data: the tokenised data; shards follow its order.
        contract: JSON values that fix the features (target and revision, tokenizer and template, layers, dtype, data).

    Raises:
        StoreError: the folder's manifest differs; the sentence lists how.
    """

    def __init__(self, folder: Path, data: TokenData, contract: dict[str, Any]) -> None:
        self.folder, self.data, self.contract = folder, data, contract
        self._digest = hashlib.sha256(json.dumps(contract, sort_keys=True).encode()).hexdigest()[:16]
        shard_of_token = (data.offsets[:-1] // SHARD_TOKENS).astype(np.int64)
        self.first_sample = np.unique(shard_of_token, return_index=True)[1]
        self.shard_of = np.searchsorted(self.first_sample, np.arange(len(data)), side="right") - 1
        self._open: dict[int, Any] = {}
        self._written: set[int] = set()
        """Shards of this very process, which knows what it wrote."""
        self._agree()

    def _agree(self) -> None:
        folder, contract, manifest = self.folder, self.contract, self.folder / "manifest.json"
        if not manifest.exists() and any(folder.glob("*.safetensors")):
            raise StoreError(
                f"data.features: {folder} holds files but no manifest.json that says of what: name another"
            )
        if manifest.exists():
            try:
                stored = dict(json.loads(manifest.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise StoreError(f"data.features: {manifest} is no manifest ({error}); name another folder") from error
            keys = [*contract, *(key for key in stored if key not in contract)]
            odd = [
                f"{k} ({stored.get(k)} there, {contract.get(k)} here)" for k in keys if stored.get(k) != contract.get(k)
            ]
            if odd:
                raise StoreError(f"data.features: {folder} holds other features: {', '.join(odd)}; name another folder")

    def _file(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.safetensors"

    def missing(self) -> list[int]:
        """Shards not captured yet."""
        return [shard for shard in range(len(self.first_sample)) if not self._file(shard).exists()]

    def capture(self, target: Target, tokens_per_batch: int) -> None:
        """Fill the missing shards from the target.

        Raises:
            StoreError: not enough free space, said before the first shard.
            SickFeatures: the target gave something that must not be trained on.
        """
        if not self.missing():
            self._agree()  # another process may have been here since this object was made
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._agree()
                self._capture(target, tokens_per_batch)
        except OSError as error:
            raise StoreError(
                f"data.features: {self.folder} cannot be written ({error}); make room, or name a folder of yours, and "
                "start again: finished shards are kept"
            ) from error

    def _capture(self, target: Target, tokens_per_batch: int) -> None:
        missing, width = self.missing(), target.hidden_size * len(target.context_layers)
        tokens = sum(
            int(self.data.offsets[self._samples(s).stop] - self.data.offsets[self._samples(s).start]) for s in missing
        )
        needed = tokens * (width * target.dtype.itemsize + 4)
        free = shutil.disk_usage(self.folder).free
        size = f"{tokens:,} tokens need {needed / 2**30:.2f} GiB in {self.folder}, and {free / 2**30:.2f} GiB are free"
        if free < needed:
            raise StoreError(
                f"data.features: {size}: make room, or leave data.features out and let the target run in every epoch"
            )
        log.info(f"features: {size}; {len(missing)} of {len(self.first_sample)} shards to capture")
        _write_atomically(self.folder / "manifest.json", json.dumps(self.contract, indent=1))
        with tqdm(total=tokens, desc="features", unit="tok", unit_scale=True, disable=None) as bar:
            for shard in missing:
                tensors = self._captured(shard, target, tokens_per_batch, bar)
                about = self._about(shard) | {"crc32": _crc32(tensors["context"], _crc32(tensors["labels"], 0))}
                part = self._file(shard).with_suffix(".tmp")
                try:
                    save_file(tensors, part, {ABOUT: json.dumps(about)})  # one key: they have no order
                    os.replace(part, self._file(shard))
                    self._written.add(shard)
                except SafetensorError as error:
                    raise OSError(str(error)) from error
                finally:
                    part.unlink(missing_ok=True)

    def _captured(self, shard: int, target: Target, tokens_per_batch: int, bar: Any) -> dict[str, torch.Tensor]:
        samples = np.arange(self._samples(shard).start, self._samples(shard).stop)
        parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group in _groups(self.data.lengths[samples], tokens_per_batch):
            ids = samples[group].tolist()
            rows, masks = zip(*(self.data.sample(i) for i in ids), strict=True)
            features = target.capture(rows, masks, ids)
            features.check(target.hidden_size)
            for b, i in enumerate(ids):
                part = slice(features.bounds[b], features.bounds[b + 1])
                parts[i] = (features.context[part].cpu(), features.labels[part].cpu())
            bar.update(features.bounds[-1])
        context, labels = zip(*(parts[int(i)] for i in samples), strict=True)
        return {"context": torch.cat(context), "labels": torch.cat(labels)}

    def _samples(self, shard: int) -> range:
        ends = [*self.first_sample[1:], len(self.data)]
        return range(int(self.first_sample[shard]), int(ends[shard]))

    def _about(self, shard: int) -> dict[str, Any]:
        """What a shard says of itself: whose it is, its place and its size."""
        samples = self._samples(shard)
        tokens = self.data.offsets[samples.stop] - self.data.offsets[samples.start]
        return {"store": self._digest, "shard": shard, "first_sample": samples.start, "tokens": int(tokens)}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.folder / ".lock", "w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreError(
                    f"data.features: another process is capturing into {self.folder}; wait for it to end"
                ) from error
            yield

    def features(self, samples: Sequence[int], pad_to: int | None, device: torch.device) -> TargetFeatures:
        """The batch that :meth:`Target.capture` would have given for these samples."""
        rows, masks = zip(*(self.data.sample(int(i)) for i in samples), strict=True)
        context, labels = zip(*(self._read(int(i)) for i in samples), strict=True)
        used = sum(len(row) for row in rows)
        size = max(pad_to or 0, used)

        def packed(parts: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
            # Pinned for a GPU: it fetches a batch of 47 MB in 1 ms from there, in 6 from elsewhere.
            whole = torch.empty(size, *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=device.type == "cuda")
            torch.cat(list(parts), out=whole[:used])
            whole[used:] = fill
            return whole.to(device, non_blocking=True)

        return assemble(rows, masks, samples, packed(context, 0), packed(labels, -1))

    def _read(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        shard = int(self.shard_of[sample])
        if shard not in self._open:
            self._open[shard] = self._verified(shard)
        base = self.data.offsets[self.first_sample[shard]]
        part = slice(int(self.data.offsets[sample] - base), int(self.data.offsets[sample + 1] - base))
        return self._open[shard].get_slice("context")[part], self._open[shard].get_slice("labels")[part]

    def _verified(self, shard: int) -> Any:
        """A shard to read from, whole and ours; costs one pass over its bytes per process, but not the one that wrote
        them."""
        path = self._file(shard)
        try:
            file = safe_open(path, framework="pt")
            if shard in self._written:
                return file
            about = json.loads((file.metadata() or {}).get(ABOUT, "{}"))
            crc32 = 0
            for name in ("labels", "context"):
                stored = file.get_slice(name)
                for start in range(0, stored.get_shape()[0], CHECKED_ROWS):
                    crc32 = _crc32(stored[start : start + CHECKED_ROWS], crc32)
        except (OSError, ValueError, SafetensorError) as error:
            raise StoreError(
                f"data.features: {path} is damaged ({error}); delete it, and it is captured again"
            ) from error
        if odd := [key for key, value in self._about(shard).items() if about.get(key) != value]:
            raise StoreError(
                f"data.features: {path} is no shard of this folder ({odd[0]} is {about.get(odd[0])}, not "
                f"{self._about(shard)[odd[0]]}); delete it, and it is captured again"
            )
        if about.get("crc32") != crc32:
            raise StoreError(
                f"data.features: {path} is damaged (its bytes have changed); delete it, and it is captured again"
            )
        return file


def _crc32(rows: torch.Tensor, value: int) -> int:
    return zlib.crc32(rows.contiguous().view(-1).view(torch.uint8).numpy().data, value)


def _groups(lengths: np.ndarray, tokens_per_batch: int) -> list[np.ndarray]:
    """Indices sorted by length, cut so that the padded batch (rows x longest) stays in the budget."""
    order = np.argsort(lengths, kind="stable")[::-1]
    groups, start = [], 0
    while start < len(order):
        count = max(1, tokens_per_batch // int(lengths[order[start]]))
        groups.append(order[start : start + count])
        start += count
    return groups


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_suffix(".tmp")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
