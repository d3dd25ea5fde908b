"""Write drafter folders: ``dflash export`` and ``dflash import``."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dflash.decode.drafters import Source, find_drafter, load_drafter
from dflash.export.card import is_hub_id, model_card
from dflash.export.formats import published_config, speculators_config
from dflash.model.config import DrafterError
from dflash.target.load import load_target_config

FORMATS = ("published", "speculators")
log = logging.getLogger("dflash")


class ExportError(RuntimeError):
    """The folder cannot be written, or the drafter cannot be expressed in the format; the sentence says why."""


def export_drafter(name: str, form: str, out: Path, target: str | None = None) -> Path:
    """Write a drafter for engines: config.json, bf16 model.safetensors and a model card, whole or not at all.

    Args:
        name: as for :func:`dflash.decode.drafters.find_drafter`.
        form: one of :data:`FORMATS`.
        out: folder to make.
        target: as ``target.model`` of a config. None: what the drafter's run was trained for.

    Raises:
        DrafterError, TargetError: the drafter or its target cannot be read, or they do not belong together.
        ExportError: ``out`` holds something, or an engine would not run in this format what was trained.
    """
    source = find_drafter(name)
    run = source.run
    model = target or (run.target.model if run else None)
    if model is None:
        raise ExportError(f"{name} does not lie in a run that would name its target; give --target")
    if run and run.target.label_layer != "final":
        log.warning(
            f"{name} was trained on the choices of layer {run.target.label_layer}, not on the target's own; engines "
            "verify with the latter"
        )
    known = load_target_config(model, run.target.revision if run and model == run.target.model else None)
    if form == "published":
        config = published_config(source.config, known)
    else:
        config = speculators_config(source.config, known, model)
        if not is_hub_id(model):
            log.warning(
                f"{out} names its target {model}, which engines must find under that name; --target gives another"
            )
    card = model_card(source, model, form, out.absolute().name)
    _write(out, config, _weights(source, torch.bfloat16), card)
    log.info(f"{source.line}: exported to {out} ({form}, bfloat16)")
    return out


def import_drafter(name: str, out: Path) -> Path:
    """Write a released drafter as a folder of our own layout, weights to the bit.

    Training and evaluation read released drafters as they are; a copy is for changing it, and for engines that do not
    know the speculators format.

    Args:
        name: folder or hub id, published or speculators layout.
        out: folder to make.

    Raises:
        DrafterError: it cannot be read, or is a drafter of another kind.
        ExportError: ``out`` holds something.
    """
    source = find_drafter(name)
    tensors = _weights(source, torch.float32)
    dtype = torch.float32
    if all(torch.equal(value.bfloat16().float(), value) for value in tensors.values()):
        tensors, dtype = {name: value.bfloat16() for name, value in tensors.items()}, torch.bfloat16
    config = published_config(source.config, None, str(dtype).removeprefix("torch."))
    _write(out, config, tensors, None)
    log.info(f"{source.line}: imported to {out}")
    return out


def _weights(source: Source, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {
        name: value.contiguous()
        for name, value in load_drafter(source, dtype, torch.device("cpu")).state_dict().items()
    }
    # Again after the cast: the largest numbers of float32 become infinite in bfloat16.
    if odd := [name for name, value in tensors.items() if not bool(value.isfinite().all())]:
        raise DrafterError(f"{source.folder}: {odd[0]} is not finite in {dtype}; the drafter is damaged")
    return tensors


def _write(out: Path, config: dict[str, Any], tensors: dict[str, Tensor], card: str | None) -> None:
    out = out.absolute()  # "." has no name to put a dot before
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"--out {out} holds something already; name another folder")
    part = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        part.mkdir(parents=True)
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if card is not None:
            (part / "README.md").write_text(card, encoding="utf-8")
        os.replace(part, out)  # over an empty folder too
    except (OSError, SafetensorError) as error:
        raise ExportError(f"--out {out} cannot be written ({error}); make room, or name a folder of yours") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
