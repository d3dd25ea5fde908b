"""Token data of a run: every row of the sources through the chat template, counted, cached; and prompts to answer."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dflash.data.cache import CacheDamaged, TokenData, read_cache, write_cache
from dflash.data.chat import NO_PROMPT, OTHER_IDS, UNKNOWN_ID, ChatTokenizer, Encoded
from dflash.data.conversations import DataError, Rejected, Row, TokenRow, normalise, read_rows, source_digest

__all__ = [
    "DataError",
    "Prompt",
    "TokenData",
    "decode_example",
    "load_data",
    "load_prompts",
    "summary",
    "tokenizer_digests",
]

DATA_VERSION = 3
"""Part of every cache's key: raise it when a change of this package changes what rows become."""
CHUNK_ROWS = 256
SERIAL_ROWS = 20_480
"""Rows tokenised before worker processes start: below this their start-up costs more than they save."""
MAX_WORKERS = 16
MAX_REASONS = 100
SHOWN_LINES = 5
log = logging.getLogger("dflash")


@dataclass(frozen=True)
class Prompt:
    """Ids int32[S] of a conversation up to and including the generation prompt; ``origin`` is its ``file:line``."""

    ids: np.ndarray
    origin: str
    id: str | None
    category: str | None


def load_data(
    sources: Sequence[str],
    tokenizer: Any,
    *,
    max_length: int,
    chat_template_kwargs: dict[str, Any],
    cache_dir: Path | None,
    vocab_size: int | None = None,
) -> TokenData:
    """Tokenise ``sources``, or take them from ``cache_dir`` if the same content was tokenised in the same way before.

    Args:
        sources: files and hub data sets, see :func:`dflash.data.conversations.read_rows`.
        tokenizer: the target's, of transformers, with its chat template.
        max_length: longer rows are cut to so many tokens.
        chat_template_kwargs: passed to the template, such as ``enable_thinking``.
        vocab_size: ids the target embeds, where that may be fewer than the tokenizer knows.
        cache_dir: folder of caches; None keeps none.

    Raises:
        DataError: a source cannot be read, no row can be used, or everything would be supervised.
    """
    chat, files = ChatTokenizer(tokenizer, max_length, chat_template_kwargs, vocab_size), list(sources)
    fingerprint = _fingerprint(chat, files)
    path = Path(cache_dir) / f"{fingerprint}.safetensors" if cache_dir else None
    if path and path.exists():
        try:
            return read_cache(path, files)
        except CacheDamaged as error:
            log.warning(f"{error}: tokenising again")
    collected = _Collected(files)
    rows = ((f, line, normalise(raw)) for f, source in enumerate(files) for line, raw in read_rows(source))
    with tqdm(desc="tokenising", unit=" rows", disable=None) as bar:
        for chunk, encoded in _encode_all(chat, rows):
            for (file, line, _), result in zip(chunk, encoded, strict=True):
                collected.add(file, line, result)
            bar.update(len(chunk))
    data = collected.data(fingerprint)
    if path:
        write_cache(path, data)
        return read_cache(path, files)
    return data


def load_prompts(
    sources: Sequence[str],
    tokenizer: Any,
    *,
    limit: int | None,
    max_length: int,
    chat_template_kwargs: dict[str, Any],
    vocab_size: int | None = None,
) -> list[Prompt]:
    """Up to ``limit`` prompts, taken from the sources in turn: what the target sees before it answers.

    A last assistant turn is removed, whatever answer it holds. Prompts that cannot be used are counted in the log.

    Raises:
        DataError: a source cannot be read, or no prompt can be used.
    """
    chat, files = ChatTokenizer(tokenizer, max_length, chat_template_kwargs, vocab_size), list(sources)
    dropped: dict[str, dict[str, Any]] = {}
    found: list[list[Prompt]] = []
    for source in files:
        usable: list[Prompt] = []
        for line, raw in read_rows(source):
            row = normalise(raw, prompt=True)
            ids = row if isinstance(row, Rejected) else _prompt_ids(chat, row)
            if isinstance(ids, Rejected):
                _count(dropped, ids.reason, f"{source}:{line}")
            elif not isinstance(row, Rejected):
                usable.append(Prompt(ids, f"{source}:{line}", row.id, row.category))
                if limit is not None and len(usable) == limit:
                    break
        found.append(usable)
    prompts = [p for in_turn in zip_longest(*found) for p in in_turn if p is not None][:limit]
    if dropped:
        log.warning("\n".join(["prompts that cannot be used:", *_table(dropped)]))
    if not prompts:
        raise DataError("\n".join([f"no usable prompt in {', '.join(files) or 'an empty list'}", *_table(dropped)]))
    return prompts


def _prompt_ids(chat: ChatTokenizer, row: Row) -> np.ndarray | Rejected:
    if isinstance(row, TokenRow):
        if chat.foreign(row):
            return Rejected(OTHER_IDS)
        # Everything before the last answer: the prompt ends where the last run of supervised tokens begins.
        begins = np.flatnonzero(np.diff(row.loss_mask, prepend=False) & row.loss_mask)
        ids = row.ids[: begins[-1]] if len(begins) else row.ids
    else:
        messages = list(row.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        text = chat.render(messages, row.tools, prompt=True) if messages else Rejected(NO_PROMPT)
        if isinstance(text, Rejected):
            return text
        ids = np.array(chat.tokenize([text])[0], dtype=np.int32)
    if ids.size and ids.max() >= chat.vocab_size:
        return Rejected(UNKNOWN_ID)
    if not 0 < len(ids) <= chat.max_length:
        return Rejected("prompt is empty" if not len(ids) else "prompt is longer than max_length")
    return ids


def decode_example(data: TokenData, i: int, tokenizer: Any) -> str:
    """Sequence ``i`` as text, what is supervised between ⟦ and ⟧, long parts shortened in their middle."""
    ids, mask = data.sample(i)
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    parts = []
    for begin, end in pairwise(borders):
        part = ids[begin:end].tolist()
        text = tokenizer.decode(part, clean_up_tokenization_spaces=False)
        text = text if len(text) <= 1000 else f"{text[:500]} … {text[-500:]}"
        parts.append(f"⟦{text}⟧" if mask[begin] else text)
    return f"{data.describe(i)} ({len(ids)} tokens, {int(mask.sum())} supervised)\n{''.join(parts)}"


def summary(stats: dict[str, Any]) -> str:
    """What was read, kept and dropped, in lines for people."""
    share = stats["supervised"] / max(stats["tokens"], 1)
    notes = [f"{stats['truncated']:,} cut to max_length"] if stats["truncated"] else []
    notes += [f"{stats['cut_off']:,} answers that ended at a length limit"] if stats["cut_off"] else []
    notes += [f"{stats['duplicates']:,} duplicates of earlier rows"] if stats["duplicates"] else []
    lines = [
        f"data: {stats['kept']:,} of {stats['rows']:,} rows, {stats['tokens']:,} tokens, {share:.1%} supervised",
        *([f"  kept: {', '.join(notes)}"] if notes else []),
        *(_table(stats["dropped"], "dropped ")),
        *(_table(stats["unsupervised_turns"], "assistant turns not supervised: ")),
        *(f"  nothing usable in {stats['files'][i]}" for i in stats["unused_files"]),
    ]
    return "\n".join(lines)


def _table(reasons: dict[str, dict[str, Any]], what: str = "") -> list[str]:
    ordered = sorted(reasons.items(), key=lambda item: (-item[1]["count"], item[0]))
    return [
        f"  {what}{entry['count']:,}: {reason} (first: {', '.join([entry['first'], *map(str, entry['next'])])})"
        for reason, entry in ordered
    ]


def _count(table: dict[str, dict[str, Any]], reason: str, where: str) -> None:
    """One more of ``reason``; the first place is kept whole, of a few more in the same file the line."""
    if reason not in table and len(table) >= MAX_REASONS:
        reason = "other reasons"  # templates may put a row's own text into what they raise
    entry = table.setdefault(reason, {"count": 0, "first": where, "next": []})
    entry["count"] += 1
    (file, _, line), first = where.rpartition(":"), entry["first"]
    if where != first and file == first.rpartition(":")[0] and len(entry["next"]) < SHOWN_LINES - 1:
        entry["next"].append(int(line))


@dataclass
class _Collected:
    """Rows as they come, counted and kept in order."""

    files: list[str]
    rows: int = 0
    truncated: int = 0
    cut_off: int = 0
    duplicates: int = 0
    seen: set[bytes] = field(default_factory=set)
    templated: list[int] = field(default_factory=lambda: [0, 0])
    ids: list[np.ndarray] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    origin: list[tuple[int, int]] = field(default_factory=list)
    dropped: dict[str, dict[str, Any]] = field(default_factory=dict)
    unsupervised_turns: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, file: int, line: int, result: Encoded | Rejected) -> None:
        self.rows += 1
        where = f"{self.files[file]}:{line}"
        if isinstance(result, Rejected):
            _count(self.dropped, result.reason, where)
            return
        for reason in result.skipped:
            _count(self.unsupervised_turns, reason, where)
        self.truncated += result.truncated
        self.cut_off += result.cut_off
        # Counted, not dropped: whoever gives a file twice may mean it.
        content = hashlib.blake2b(result.ids.tobytes() + result.loss_mask.tobytes(), digest_size=8).digest()
        self.duplicates += content in self.seen
        self.seen.add(content)
        if result.templated:
            self.templated[0] += len(result.ids)
            self.templated[1] += int(result.loss_mask.sum())
        self.ids.append(result.ids)
        self.masks.append(result.loss_mask)
        self.origin.append((file, line))

    def data(self, fingerprint: str) -> TokenData:
        """All of it as arrays.

        Raises:
            DataError: nothing is left, or the template left nothing unsupervised.
        """
        if not self.ids:
            head = f"no usable row among {self.rows} of {', '.join(self.files) or 'an empty list'}"
            raise DataError("\n".join([head, *_table(self.dropped)]))
        if self.templated[0] and self.templated[0] == self.templated[1]:
            raise DataError(
                f"{', '.join(self.files)}: the chat template leaves every token supervised, so prompts would be "
                "trained on; give the target's own template, with its generation prompt"
            )
        ids, mask = np.concatenate(self.ids), np.concatenate(self.masks)
        stats = {
            "files": self.files, "rows": self.rows, "kept": len(self.ids), "dropped": self.dropped,
            "unsupervised_turns": self.unsupervised_turns, "tokens": len(ids), "supervised": int(mask.sum()),
            "truncated": self.truncated, "cut_off": self.cut_off, "duplicates": self.duplicates,
            "unused_files": sorted({*range(len(self.files))} - {file for file, _ in self.origin}),
        }  # fmt: skip
        offsets = np.cumsum([0, *(len(row) for row in self.ids)], dtype=np.int64)
        return TokenData(ids, mask, offsets, np.array(self.origin, dtype=np.int32), self.files, stats, fingerprint)


def tokenizer_digests(tokenizer: Any) -> dict[str, str]:
    """Short digests of a tokenizer's rules and of its chat template, to tell which of the two is another one."""
    content = {"tokenizer": [_rules(tokenizer), tokenizer.special_tokens_map], "template": tokenizer.chat_template}
    return {key: _sha256(value)[:16] for key, value in content.items()}


def _fingerprint(chat: ChatTokenizer, files: list[str]) -> str:
    """sha256 over everything that shapes the data: content, tokenizer, template, settings and this code's version."""
    tokenizer = chat.tokenizer
    everything = {
        "version": DATA_VERSION, "sources": [source_digest(f) for f in files], "tokenizer": _rules(tokenizer),
        "special": [chat.specials, tokenizer.special_tokens_map], "template": tokenizer.chat_template,
        "kwargs": chat.kwargs, "max_length": chat.max_length, "vocab_size": chat.vocab_size,
    }  # fmt: skip
    return _sha256(everything)


def _rules(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {"vocab": tokenizer.get_vocab()}
    for state in ("truncation", "padding"):  # of the last call, not of the tokenizer
        rules.pop(state, None)
    return rules


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


_Numbered = tuple[int, int, Row | Rejected]


def _encode_all(
    chat: ChatTokenizer, rows: Iterable[_Numbered]
) -> Iterator[tuple[list[_Numbered], list[Encoded | Rejected]]]:
    """Chunks of rows with their results, in order: here at first, in processes if there are many."""
    chunks = _chunks(iter(rows))
    for chunk in islice(chunks, SERIAL_ROWS // CHUNK_ROWS):
        yield chunk, chat.encode([row for _, _, row in chunk])
    first, workers = next(chunks, None), min(os.cpu_count() or 1, MAX_WORKERS)
    if first is None:
        return
    # Spawned, not forked: the tokenizer's and torch's threads of this process do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pending: deque[tuple[list[_Numbered], Future[list[Encoded | Rejected]]]] = deque()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (chat,))
    try:
        for chunk in chain([first], chunks):
            pending.append((chunk, pool.submit(_encode_in_worker, [row for _, _, row in chunk])))
            if len(pending) >= 4 * workers:  # bounded: the whole data as text may not fit in memory
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()
    except BrokenProcessPool as error:
        raise DataError(f"a tokenising process died ({error}); see whether memory ran out, and start again") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _chunks(rows: Iterator[_Numbered]) -> Iterator[list[_Numbered]]:
    while chunk := list(islice(rows, CHUNK_ROWS)):
        yield chunk


_worker_chat: ChatTokenizer


def _start_worker(chat: ChatTokenizer) -> None:
    global _worker_chat
    _worker_chat = chat
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    parent = multiprocessing.parent_process()
    if parent is not None:  # a parent that is killed cannot end its workers

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()


def _encode_in_worker(rows: list[Row | Rejected]) -> list[Encoded | Rejected]:
    return _worker_chat.encode(rows)
