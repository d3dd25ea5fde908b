"""What a DRAFTER argument may name, read strictly: a run, a checkpoint, a released drafter's folder, or a hub id.

A run's own config says which target it was trained for and how prompts were rendered, so that nobody has to repeat it
and thinking mode cannot differ by accident.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash.checkpoint_folder import COMPLETE, STATE, WRITING, complete, is_complete, step_of
from dflash.config import Config, load_config
from dflash.decode.speculative import check_match
from dflash.export.formats import check_published, from_speculators, is_speculators
from dflash.model import DFlashConfig, DFlashDraftModel
from dflash.model.config import DrafterError
from dflash.target.load import load_target_config
from dflash.target.model import Target, load_target

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t")
"""Copies of the target's tensors that drafters of the speculators library may hold; here they come from the target."""
log = logging.getLogger("dflash")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Source:
    """A drafter that was found, before its weights are read."""

    folder: Path
    config: DFlashConfig
    run: Config | None
    """Config of the run that trained it, where the folder lies in one."""
    note: str
    """Which checkpoint of a run this is; empty elsewhere."""

    @property
    def line(self) -> str:
        """What was found, in one line."""
        c = self.config
        kinds = c.layer_types or []
        sliding = kinds.count("sliding_attention")
        layers = f"{c.num_hidden_layers} layers ({sliding} sliding, window {c.sliding_window})" if sliding else (
            f"{c.num_hidden_layers} full-attention layers"
        )  # fmt: skip
        depth = f" of {c.num_target_layers}" if c.num_target_layers else ""  # speculators drafters do not say
        return (
            f"drafter {self.folder}{self.note}: {layers}, block size {c.block_size}, context layers "
            f"{c.target_layer_ids}{depth}"
        )


@dataclass(frozen=True)
class Loaded:
    """A drafter and its target, on one device and in one dtype, and how prompts are to be rendered for them."""

    source: Source
    drafter: DFlashDraftModel
    target: Target
    target_name: str
    max_length: int
    """Prompts longer than this are not used: the run's own limit, else what the target reads."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


def find_drafter(name: str) -> Source:
    """What ``name`` stands for.

    Args:
        name: folder of a run (its best checkpoint if one was kept, else the newest complete one), of a checkpoint, or
            in the published layout or that of the speculators library (``config.json`` and ``model.safetensors``); or
            a hub id.

    Raises:
        DrafterError: nothing usable there; the sentence says what is missing.
        ConfigError: the run's own config.yaml is faulty.
    """
    folder, note = Path(name).expanduser(), ""
    if not folder.exists():
        folder = _from_hub(name)
    elif not folder.is_dir():
        raise DrafterError(f"{name} is a file; name the folder of a run, a checkpoint or a drafter")
    elif (folder / "config.yaml").exists():
        folder, note = _checkpoint_of(folder)
    elif (folder / STATE).exists() or folder.name.startswith(WRITING):
        if not is_complete(folder):
            raise DrafterError(
                f"{name} is a checkpoint that was never finished (no {COMPLETE} in it); name another one"
            )
        note = f" (step {_state(folder)['step']})"
    if not (folder / "config.json").exists():
        raise DrafterError(
            f"{name} holds neither config.yaml (a run that has started training) nor config.json (a drafter); name the "
            "folder of a run, a checkpoint or a drafter"
        )
    yaml = folder.resolve().parent.parent / "config.yaml"
    in_run = folder.resolve().parent.name == "checkpoints" and yaml.exists()
    run = load_config(yaml, check_files=False) if in_run else None
    return Source(folder, _config(folder / "config.json"), run, note)


def load_drafter(source: Source, dtype: torch.dtype, device: torch.device) -> DFlashDraftModel:
    """The drafter in ``dtype`` on ``device``, every tensor from its files: none is drawn at random.

    Raises:
        DrafterError: tensors are missing, unexpected, of another shape, float16 or not finite.
    """
    with torch.device("meta"):
        drafter = DFlashDraftModel(source.config)
    wanted = dict(drafter.named_parameters())
    found: dict[str, Tensor] = {}
    left_out = TARGETS_OWN if is_speculators(_json(source.folder / "config.json")) else ()
    for file in _weight_files(source.folder):
        try:
            with safe_open(file, framework="pt", device=str(device)) as stored:
                own = [name for name in stored.keys() if name not in left_out]  # noqa: SIM118
                found |= {name: _checked(file, name, stored.get_tensor(name), dtype) for name in own}
        except SafetensorError as error:
            raise DrafterError(f"{file} is damaged ({error}); fetch or write it again") from error
    for names, what in ((wanted.keys() - found.keys(), "lacks"), (found.keys() - wanted.keys(), "has unexpected")):
        if names:
            raise DrafterError(
                f"{source.folder}: {what} {len(names)} tensors, {min(names)} first; its config.json describes another "
                "drafter than its weights"
            )
    for name, parameter in wanted.items():
        if found[name].shape != parameter.shape:
            raise DrafterError(
                f"{source.folder}: {name} is {tuple(found[name].shape)} in the file and {tuple(parameter.shape)} by "
                "config.json; they must agree"
            )
    drafter.load_state_dict(found, assign=True)
    return drafter.eval().requires_grad_(False)


def load_both(
    name: str,
    *,
    target: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    enable_thinking: bool | None = None,
    block_sizes: Sequence[int] = (),
    beside: Loaded | None = None,
) -> Loaded:
    """A drafter with its target, checked against each other before the target's weights are read.

    Args:
        name: as for :func:`find_drafter`.
        target: as ``target.model`` of a config. None: what the drafter's run was trained for.
        dtype: ``bfloat16`` or ``float32``, of both. None: the run's, else bfloat16 on a GPU and float32 on a CPU.
        device: None: the first GPU if there is one, else the CPU.
        enable_thinking: for the chat template. None: as the run rendered its data.
        block_sizes: what it shall draft; refused here if it cannot.
        beside: an already loaded pair whose target, prompts and dtype this drafter is to share.

    Raises:
        DrafterError, TargetError, DecodeError: one of them cannot be used, or they do not belong together.
    """
    source = find_drafter(name)
    log.info(source.line)  # now, since reading a large target takes minutes
    run, own_size = source.run, source.config.block_size
    if odd := [size for size in block_sizes if not 2 <= size <= own_size]:
        raise DrafterError(f"--block-size {odd[0]}: {source.folder} drafts blocks of {own_size}; give 2 to {own_size}")
    if beside is not None:
        shared = beside.target
        own = Target(shared.module, shared.tokenizer, source.config.target_layer_ids, _label_layer(run))
        check_match(source.config, own)
        if run and run.data.chat_template_kwargs != beside.chat_template_kwargs:
            log.warning(
                f"{name} was trained on prompts rendered with {run.data.chat_template_kwargs}, and is compared on "
                f"prompts rendered with {beside.chat_template_kwargs}"
            )
        drafter = load_drafter(source, shared.dtype, shared.device)
        return Loaded(source, drafter, own, beside.target_name, beside.max_length, beside.chat_template_kwargs)
    model = target or (run.target.model if run else None)
    if model is None:
        raise DrafterError(f"{name} does not lie in a run that would name its target; give --target")
    revision = run.target.revision if run and model == run.target.model else None
    place = pick_device(device)
    kind = dtype or (run.target.dtype if run else None) or ("float32" if place.type == "cpu" else "bfloat16")
    known = load_target_config(model, revision)
    shape = SimpleNamespace(
        num_layers=known.num_hidden_layers, hidden_size=known.hidden_size, vocab_size=known.vocab_size,
        context_layers=list(source.config.target_layer_ids),
    )  # fmt: skip
    check_match(source.config, cast(Target, shape))
    loaded = load_target(
        model, revision=revision, dtype=DTYPES[kind], device=place, context_layers=source.config.target_layer_ids,
        label_layer=_label_layer(run),
    )  # fmt: skip
    kwargs = dict(run.data.chat_template_kwargs) if run else {}
    if enable_thinking is not None:
        kwargs["enable_thinking"] = enable_thinking
    limit = run.data.max_length if run else getattr(known, "max_position_embeddings", None) or 1 << 20
    drafter = load_drafter(source, DTYPES[kind], place)
    return Loaded(source, drafter, loaded, model, limit, kwargs)


def pick_device(name: str | None) -> torch.device:
    """A ``--device``; None: the first GPU if there is one, else the CPU.

    Raises:
        DrafterError: no device, or one that is not here.
    """
    name = name or ("cuda:0" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise DrafterError(f"--device {name} is no device; name cpu or cuda:N")
    index = int(name[5:] or 0) if name.startswith("cuda") else -1
    if index >= torch.cuda.device_count():
        raise DrafterError(f"--device {name}: {torch.cuda.device_count()} GPUs are here; name one of them, or cpu")
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


def _label_layer(run: Config | None) -> Any:
    return run.target.label_layer if run else "final"


def _from_hub(name: str) -> Path:
    if name.startswith(("/", ".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise DrafterError(f"{name} does not exist; name the folder of a run, a checkpoint or a drafter, or a hub id")
    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors", INDEX]))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        raise DrafterError(f"there is no folder {name}, and the hub gives no such drafter: {reason}") from error


def _checkpoint_of(run_dir: Path) -> tuple[Path, str]:
    found = complete(run_dir / "checkpoints")
    if not found:
        raise DrafterError(f"{run_dir} is a run without a complete checkpoint; wait for its first, or name another")
    state = _state(found[-1])
    best_step = state.get("best_step")
    if best := [path for path in found if step_of(path) == best_step]:
        return best[0], f" (step {best_step}, the best of the run)"
    return found[-1], f" (step {state['step']}, the newest of the run)"


def _state(folder: Path) -> dict[str, Any]:
    state = _json(folder / STATE)
    if type(state.get("step")) is not int:
        raise DrafterError(f"{folder / STATE} names no step; the checkpoint is damaged, name another one")
    return state


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DrafterError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise DrafterError(f"{path} must hold a JSON object")
    return content


def _config(path: Path) -> DFlashConfig:
    raw = _json(path)
    try:
        if is_speculators(raw):
            raw = from_speculators(raw, _stored_slice(path.parent, "fc.weight").get_shape()[-1])
        check_published(raw)
        config = DFlashConfig.from_dict(raw)
        _check_fields(config)
        return config.require()
    except DrafterError as error:
        raise DrafterError(f"{path}: {error}") from error
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:  # transformers' own checks of a config
        raise DrafterError(f"{path} describes no drafter: {' '.join(str(error).split())[:200]}") from error


def _check_fields(config: DFlashConfig) -> None:
    """What JSON may hold in place of whole numbers, and what this drafter's layers would not do as described."""
    ids, layers = config.target_layer_ids, config.num_target_layers
    if ids is not None:
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise DrafterError(f"target_layer_ids is {ids}; it must be a list of layer numbers, 0 or more")
        if len({*ids}) < len(ids) or (isinstance(layers, int) and max(ids) >= layers):
            known = f" out of 0 to {layers - 1} (num_target_layers)" if isinstance(layers, int) else ""
            raise DrafterError(f"target_layer_ids {ids} must be different layers{known}")
    for key in ("block_size", "mask_token_id", "num_target_layers"):
        if type(value := getattr(config, key)) not in (int, NoneType):
            raise DrafterError(f"{key} is {value!r}; it must be a whole number")
    if config.hidden_act != "silu":
        raise DrafterError(f"hidden_act is {config.hidden_act}; the layers of a drafter use silu")
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise DrafterError(f"rope_type is {kind}; this transformers knows default, {', '.join(ROPE_INIT_FUNCTIONS)}")


def _weight_files(folder: Path) -> list[Path]:
    files = [folder / WEIGHTS]
    if not files[0].exists() and (folder / INDEX).exists():
        named = _json(folder / INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise DrafterError(f"{folder / INDEX} has no weight_map from tensors to files; fetch or write it again")
        files = [folder / name for name in sorted(set(named.values()))]
    if gone := [file for file in files if not file.is_file()]:
        raise DrafterError(f"{gone[0]} does not exist; the drafter's weights are read from safetensors files only")
    return files


def _stored_slice(folder: Path, name: str) -> Any:
    """A tensor's shape and dtype, from its file's header."""
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as stored:
                if name in stored.keys():  # noqa: SIM118
                    return stored.get_slice(name)
        except SafetensorError as error:
            raise DrafterError(f"{file} is damaged ({error}); fetch or write it again") from error
    raise DrafterError(f"{folder} has no tensor {name}; it holds no drafter")


def _checked(file: Path, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.dtype == torch.float16:
        raise DrafterError(f"{file}: {name} is float16, whose range the drafter's activations leave; store bfloat16")
    if not bool(value.isfinite().all()):
        raise DrafterError(f"{file}: {name} holds values that are not finite; the drafter is damaged")
    return value.to(dtype)
