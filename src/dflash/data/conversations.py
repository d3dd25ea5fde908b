"""Rows of conversations from files and the hub, in the one form that chat templates take.

Accepted rows: OpenAI ``messages``, ShareGPT ``conversations`` (either kind of turn under either key), and
pre-tokenised ``input_ids`` with ``loss_mask``. A row that cannot be used becomes :class:`Rejected` with a short reason;
only a source that cannot be read at all is an error.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HUB = "hub:"
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
BOM = b"\xef\xbb\xbf"

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user",
    "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "assistant": "assistant", "bot": "assistant",
    "tool": "tool", "tool_response": "tool", "observation": "tool",
}  # fmt: skip

CUT_OFF = "length"
FINISHED = (None, "stop", "eos", "eos_token", "end_turn", "stop_sequence", "tool_calls", "function_call")


class DataError(ValueError):
    """A source that cannot be read, or data of which nothing can be used."""


@dataclass(frozen=True)
class Rejected:
    """A row that cannot be used; ``reason`` is short and the same for every row with that fault, for counting."""

    reason: str


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them: ``role``, ``content`` (text, never null), and what else the row has."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    finish_reason: str | None = None
    id: str | None = None
    category: str | None = None


@dataclass(frozen=True)
class TokenRow:
    """A pre-tokenised row: ``ids`` int32[S], ``loss_mask`` bool[S]; ``vocabulary``: digest of whose ids they are, in
    rows that say so."""

    ids: np.ndarray
    loss_mask: np.ndarray
    id: str | None = None
    category: str | None = None
    vocabulary: str | None = None


Row = Conversation | TokenRow


def read_rows(source: str) -> Iterator[tuple[int, Any]]:
    """(number, row) of every row of ``source``, one at a time.

    Args:
        source: a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file, or ``hub:NAME[:split]`` (split ``train`` by default).

    Returns:
        Pairs of the 1-based line (or row) number and the parsed row, or :class:`Rejected` where a line holds no JSON.

    Raises:
        DataError: there is no such source, or it is damaged as a whole.
    """
    if source.startswith(HUB):
        yield from enumerate(_hub_dataset(source), 1)
        return
    path = _existing(source)
    if path.name.endswith(".parquet"):
        yield from enumerate(_parquet_rows(path), 1)
        return
    opener: Any = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            # Binary files iterate over b"\n" alone. U+2028, U+2029 and U+0085 are text, not ends of lines.
            for number, line in enumerate(file, 1):
                line = line.removeprefix(BOM) if number == 1 else line
                if line.strip():
                    yield number, _parse(line)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source}: cannot be read to its end ({error}); fetch or write it again") from error


def source_digest(source: str) -> str:
    """What identifies the content of ``source``, wherever it lies: sha256 of a file, fingerprint of a hub data set.

    Raises:
        DataError: there is no such source.
    """
    if source.startswith(HUB):
        return f"{source} {_hub_dataset(source)._fingerprint}"
    with _existing(source).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def normalise(raw: Any, *, prompt: bool = False) -> Row | Rejected:
    """The conversation or tokens of one raw row, or why it has none.

    Args:
        raw: what :func:`read_rows` gave.
        prompt: the row is to be answered, so it needs no assistant turn.
    """
    if isinstance(raw, Rejected):
        return raw
    if not isinstance(raw, dict):
        return Rejected("row is no JSON object")
    about = {key: str(raw[key]) if raw.get(key) is not None else None for key in ("id", "category")}
    if raw.get("input_ids") is not None:
        about |= {"vocabulary": str(raw["vocabulary"])} if raw.get("vocabulary") is not None else {}
        return _token_row(raw["input_ids"], raw.get("loss_mask"), about)
    turns = raw.get("messages") if raw.get("messages") is not None else raw.get("conversations")
    if not isinstance(turns, list) or not turns:
        return Rejected("neither messages, conversations nor input_ids")
    messages: list[dict[str, Any]] = []
    for turn in turns:
        message = _message(turn)
        if isinstance(message, Rejected):
            return message
        messages.append(message)
    if isinstance(raw.get("system"), str) and raw["system"] and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": raw["system"]})  # where ShareGPT's descendants keep it
    if not prompt and all(m["role"] != "assistant" for m in messages):
        return Rejected("no assistant turn")
    reason = raw.get("finish_reason")
    if not prompt and reason != CUT_OFF and reason not in FINISHED:
        return Rejected(f"finish_reason {str(reason)[:40]!r}")
    tools = _from_json(raw.get("tools")) or None
    if tools is not None and not isinstance(tools, list):
        return Rejected("tools is no list")
    return Conversation(messages, tools, reason, **about)


def _message(turn: Any) -> dict[str, Any] | Rejected:
    """One turn of either schema; keys that the row left null (Parquet fills them in) are left out."""
    if not isinstance(turn, dict):
        return Rejected("turn is no JSON object")
    if turn.get("role") is None and "from" in turn:
        role, content = SHAREGPT_ROLES.get(str(turn["from"])), turn.get("value")
        extra: dict[str, Any] = {}
        if role is None:
            return Rejected(f"unknown role {str(turn['from'])[:40]!r}")
    else:
        role, content = turn.get("role"), turn.get("content")
        if role not in ROLES:
            return Rejected(f"unknown role {str(role)[:40]!r}")
        extra = {key: value for key, value in turn.items() if value is not None and key not in ("role", "content")}
        if "reasoning" in extra:  # what newer servers call it
            extra.setdefault("reasoning_content", extra.pop("reasoning"))
        if "tool_calls" in extra:
            calls = _tool_calls(extra.pop("tool_calls"))
            if isinstance(calls, Rejected):
                return calls
            extra |= {"tool_calls": calls} if calls else {}
    if isinstance(content, list):
        parts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]
        kinds = [p.get("type") if isinstance(p, dict) else None for p in parts]
        odd = next((kind for kind in kinds if kind != "text"), "text")
        if odd != "text" or not all(isinstance(p.get("text"), str) for p in parts):
            return Rejected(f"content part of type {str(odd)[:40]!r}")
        content = "".join(p["text"] for p in parts)
    if content is None and role == "assistant" and ("tool_calls" in extra or "reasoning_content" in extra):
        content = ""  # templates test it for truth or append it to text; null would end some of them
    if not isinstance(content, str):
        return Rejected("content is null" if content is None else "content is no text")
    if not isinstance(extra.get("reasoning_content", ""), str):
        return Rejected("reasoning_content is no text")
    return {"role": role, "content": content, **extra}


def _tool_calls(calls: Any) -> list[Any] | Rejected:
    """Tool calls with ``arguments`` as objects, which is how serving engines hand them to templates."""
    calls = _from_json(calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return Rejected("tool_calls is no list of objects")
    result = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict):
            function = function | {"arguments": _from_json(function.get("arguments"))}
            call = call | {"function": function}
        result.append(call)
    return result


def _from_json(value: Any) -> Any:
    """``value`` parsed where it is text that holds a JSON object or list, else as it is."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict | list) else value


def _token_row(ids: Any, loss_mask: Any, about: dict[str, str | None]) -> TokenRow | Rejected:
    if loss_mask is None:
        return Rejected("input_ids without loss_mask")
    try:
        tokens, mask = np.asarray(ids), np.asarray(loss_mask)
    except (ValueError, OverflowError):
        return Rejected("input_ids or loss_mask is no flat list of numbers")
    if tokens.ndim != 1 or mask.ndim != 1 or tokens.dtype.kind not in "iu" or mask.dtype.kind not in "iub":
        return Rejected("input_ids or loss_mask is no flat list of whole numbers")
    if len(tokens) != len(mask):
        return Rejected("input_ids and loss_mask differ in length")
    if tokens.min() < 0 or tokens.max() >= 1 << 31 or mask.min() < 0 or mask.max() > 1:
        return Rejected("input_ids or loss_mask out of range")
    return TokenRow(tokens.astype(np.int32), mask.astype(bool), **about)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Rejected("not UTF-8")
    except (ValueError, RecursionError):
        return Rejected("broken JSON")


def _existing(source: str) -> Path:
    path = Path(source).expanduser()
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{source}: not a kind of data that is read; give {', '.join(SUFFIXES)} or {HUB}NAME[:split]")
    if not path.is_file():
        raise DataError(f"{source}: no such file; correct the path (relative ones start at {Path.cwd()})")
    return path


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({error}); fetch or write it again") from error


def _hub_dataset(source: str) -> Any:
    import datasets

    name, _, split = source.removeprefix(HUB).partition(":")
    try:
        return datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError) as error:
        raise DataError(f"{source}: cannot be loaded from the hub: {error}") from error
