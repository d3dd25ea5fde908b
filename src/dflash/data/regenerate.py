"""Prompts answered by the target itself: the data that a drafter is to be trained on.

A drafter trained on other models' answers meets a distribution that its target never writes (accepted length 2.5 in
place of 6.0 in the DFlash paper). So every user turn is answered anew, in order, later prompts holding the new answers.

    OUT                        kept rows: messages, finish_reason, and the exact ids where they are known
    OUT.rejected.jsonl         rows that cannot be used, with the reason, and what the target said
    OUT.settings.json          what the answers depend on (target, its template, sampling); a later call must agree

A row is written whole when its last turn is answered. What is done is known by the rows' keys (a digest of id and
messages), so that after a kill, or with more prompts, the same command goes on with what is missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dflash.data.answering import Backend, Job, Local, Reply, Served, Turns
from dflash.data.chat import ChatTokenizer
from dflash.data.conversations import DataError, Rejected, TokenRow, normalise, read_rows
from dflash.data.tokenize import tokenizer_digests

NO_USER = "no user turn"
TOOL_RESULTS = "begins with a tool's result"
DUPLICATE = "duplicate of an earlier row"
KEPT = "kept"
log = logging.getLogger("dflash")


@dataclass(frozen=True)
class Settings:
    """What ``dflash data regenerate`` was asked for; the command line's own names and defaults."""

    target: str
    prompts: list[str]
    out: Path
    server: str | None
    model: str | None
    max_new_tokens: int
    temperature: float
    top_p: float
    enable_thinking: bool | None
    batch_size: int
    concurrency: int
    timeout_s: float
    samples: int | None
    seed: int
    device: str | None
    dtype: str | None


def run(settings: Settings) -> int:
    """Load the tokenizer, and the target where it runs here, and answer; returns the exit code.

    Raises:
        DataError, ServedError, TargetError, DrafterError, DecodeError: one sentence each.
    """
    from dflash.decode.drafters import DTYPES, pick_device
    from dflash.target.load import load_target_config, load_tokenizer

    s = settings
    if s.server is None and s.top_p != 1:
        raise DataError("--top-p is for servers: here answers are drawn from the whole distribution; leave it out")
    if not 0 <= s.temperature < float("inf") or not 0 < s.top_p <= 1:
        raise DataError(f"--temperature {s.temperature} --top-p {s.top_p}: give 0 or more, and above 0 up to 1")
    if not s.out.parent.is_dir():
        raise DataError(f"{s.out.parent} does not exist; make the folder first")
    for source in s.prompts:
        next(read_rows(source), None)  # a slip of the pen shows before a large target is loaded
    known = load_target_config(s.target)
    tokenizer = load_tokenizer(s.target)
    kwargs = {} if s.enable_thinking is None else {"enable_thinking": s.enable_thinking}
    reads = getattr(known, "max_position_embeddings", None) or 1 << 20
    longest = reads - s.max_new_tokens
    if longest < 1:
        raise DataError(
            f"--max-new-tokens {s.max_new_tokens} leaves no room for a prompt in {reads} positions; give fewer"
        )
    chat = ChatTokenizer(tokenizer, reads, kwargs, known.vocab_size)
    noted = {
        "target": s.target, "max_new_tokens": s.max_new_tokens, "temperature": s.temperature, "top_p": s.top_p,
        "chat_template_kwargs": kwargs, "seed": s.seed, "by": "server" if s.server else "target",
        "template": tokenizer_digests(tokenizer)["template"], "vocabulary": chat.vocabulary,
    }  # fmt: skip
    backend: Backend
    ends = {tokenizer.eos_token_id}
    if s.server:
        asked = {"max_tokens": s.max_new_tokens, "temperature": s.temperature, "top_p": s.top_p}
        backend = Served(s.server, asked, s.model, s.concurrency, s.timeout_s, s.seed)
        noted["model"] = backend.settings["model"]
        ends |= {*known.eos_token_id} if isinstance(known.eos_token_id, list) else {known.eos_token_id}
    else:
        from dflash.target.model import load_target

        device = pick_device(s.device)
        dtype = s.dtype or ("float32" if device.type == "cpu" else "bfloat16")
        target = load_target(s.target, dtype=DTYPES[dtype], device=device, context_layers=[0])
        noted |= {"dtype": dtype, "weights": target.fingerprint}
        backend = Local(target, s.max_new_tokens, s.temperature, s.seed, s.batch_size)
        ends |= {*target.eos_ids}
    turns = Turns(chat, longest, sorted(ends - {None}))
    regenerate(s.prompts, s.out, backend, turns, noted, s.samples)
    return 0


def regenerate(
    sources: Sequence[str],
    out: Path,
    backend: Backend,
    turns: Turns,
    settings: dict[str, Any],
    limit: int | None = None,
) -> Counter[str]:
    """Answer the prompts that have no answer in ``out`` yet.

    Args:
        sources: as for :func:`dflash.data.conversations.read_rows`; answers they hold are not used.
        out: JSONL to write or to go on with.
        settings: JSON values on which the answers depend.
        limit: rows at most, the first of all sources.

    Returns:
        rows by reason, :data:`KEPT` among them, those of earlier calls included.

    Raises:
        DataError: a source cannot be read, ``out`` was made with other settings or cannot be written, or nothing in it
            can be used.
        ServedError: the server is gone; the same command goes on later.
    """
    rejected = out.with_name(out.name + ".rejected.jsonl")
    try:
        counts, before = _answer(sources, out, rejected, backend, turns, settings, limit)
    except OSError as error:  # closing a file on a full disk raises once more
        raise DataError(
            f"{out} cannot be written ({error}); make room, or name a file in a folder of yours, and start again: "
            "finished rows are kept"
        ) from error
    log.info(summary(counts, out, before))
    if not counts[KEPT]:
        raise DataError(f"{out}: not one answer can be used; {rejected} says why, row by row")
    return counts


def _answer(
    sources: Sequence[str],
    out: Path,
    rejected: Path,
    backend: Backend,
    turns: Turns,
    settings: dict[str, Any],
    limit: int | None,
) -> tuple[Counter[str], int]:
    """Rows by reason, and how many of them are from before. One process at a time: two would double every row."""
    with open(rejected, "ab") as rejected_file:
        try:
            fcntl.flock(rejected_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process is writing {out}; wait for it to end, or name another file") from error
        _agree(out, settings)
        done, counts = _finished(out, KEPT), Counter[str]()
        counts[KEPT] = len(done)
        for key, reason in _finished(rejected, None).items():
            if key not in done:
                done[key] = reason
                counts[reason] += 1
        if done:
            log.info(f"{out}: {len(done):,} rows are done already")
        before, writing = len(done), threading.Lock()
        with open(out, "ab") as kept_file, tqdm(desc="answers", unit=" rows", disable=None) as bar:

            def finish(job: Job) -> None:
                file = rejected_file if job.reason else kept_file
                line = json.dumps(_row(job, turns.chat.vocabulary)).encode() + b"\n"
                with writing:  # rows that are refused at once come from the threads that take them
                    # A kill leaves at most the last line unfinished, and that is removed at the next start.
                    file.write(line)
                    file.flush()
                    counts[job.reason or KEPT] += 1
                    bar.update()

            def missing() -> Iterator[Job]:
                for job in islice(_jobs(sources), limit):
                    if done.get(job.key) == "this call":
                        counts[DUPLICATE] += 1
                        continue
                    known = job.key in done
                    done[job.key] = "this call"
                    if not known and job.reason is None:
                        yield job
                    elif not known:
                        finish(job)

            backend.run(missing(), turns, finish)
    return counts, before


def summary(counts: Counter[str], out: Path, before: int) -> str:
    """Rows by reason, in lines for people."""
    total = sum(counts.values())
    lines = [f"{out}: {counts[KEPT]:,} of {total:,} rows kept" + (f" ({before:,} from before)" if before else "")]
    lines += [f"  {count:,}: {reason}" for reason, count in counts.most_common() if reason != KEPT and count]
    return "\n".join(lines)


def _jobs(sources: Sequence[str]) -> Iterator[Job]:
    for source in sources:
        for line, raw in read_rows(source):
            yield _job(raw, f"{source}:{line}")


def _job(raw: Any, origin: str) -> Job:
    """A row's prompts: an answer is due wherever the row has one, and after the last user turn; after every user turn
    if it has no answers at all. A tool's result ends the conversation, since only the old answer had asked for it."""
    if isinstance(raw, dict) and (raw.get("messages") or raw.get("conversations")):
        raw = {key: value for key, value in raw.items() if key != "input_ids"}  # rows of an earlier regeneration
    row = normalise(raw, prompt=True)
    if isinstance(row, TokenRow):
        row = Rejected("pre-tokenised row, which has no messages to answer")
    if isinstance(row, Rejected):  # by its place, for want of content
        return Job(_digest([origin, row.reason]), origin, None, None, [], origin, reason=row.reason)
    answered = any(message["role"] == "assistant" for message in row.messages)
    parts: list[list[dict[str, Any]]] = [[]]
    reason = None
    for message in row.messages:
        role = message["role"]
        if role == "tool":
            reason = TOOL_RESULTS
            break
        has_user = any(m["role"] == "user" for m in parts[-1])
        if role == "assistant":
            if has_user:
                parts.append([])
        elif role == "user" and has_user and not answered:
            parts.append([message])
        else:
            parts[-1].append(message)
    parts = [part for part in parts if any(m["role"] == "user" for m in part)]
    reason = (reason or NO_USER) if not parts else None
    key = _digest([row.id, row.messages, row.tools])
    return Job(key, row.id or key, row.category, row.tools, parts, origin, reason=reason)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]


def _row(job: Job, vocabulary: str) -> dict[str, Any]:
    """A line of the output. With ``input_ids``, training takes the very tokens that were generated;
    ``vocabulary``, a digest, keeps it from taking them for another target's."""
    row: dict[str, Any] = {"id": job.id, "key": job.key}
    row |= {"category": job.category} if job.category else {}
    row |= {"reason": job.reason, "origin": job.origin} if job.reason else {}
    row |= {"messages": job.messages} | ({"tools": job.tools} if job.tools else {})
    if job.turns:
        row["finish_reason"] = job.turns[-1][1].finish_reason
        if job.reason is None and all(reply.text is None for _, reply in job.turns):
            ids, mask = token_row(job.turns)
            row |= {"input_ids": ids, "loss_mask": mask, "vocabulary": vocabulary}
    return row


def token_row(turns: Sequence[tuple[list[int], Reply]]) -> tuple[list[int], list[int]]:
    """Ids of the last prompt and its answer, and the loss mask of all answers in them.

    An earlier answer counts where the last prompt begins with its prompt and itself, token for token. Templates that
    rewrite earlier turns (leave out their thinking) show later prompts something else, on which nothing is trained.
    """
    prompt, reply = turns[-1]
    ids = prompt + reply.ids
    mask = np.zeros(len(ids), dtype=int)
    for earlier, said in [*turns[:-1], (prompt, reply)]:
        end = len(earlier) + len(said.ids)
        if ids[:end] == earlier + said.ids:
            mask[len(earlier) : end] = 1
    return ids, mask.tolist()


def _agree(out: Path, settings: dict[str, Any]) -> None:
    """Note the settings, or refuse those that differ from what is there."""
    path = out.with_name(out.name + ".settings.json")
    if path.exists():
        try:
            stored = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{path} is damaged ({error}): correct it, or name another file, since it says how {out.name} was made"
            ) from error
        odd = [
            f"{key} ({stored.get(key)} there, {settings.get(key)} now)"
            for key in sorted({*stored, *settings})
            if stored.get(key) != settings.get(key)
        ]
        if odd:
            raise DataError(f"{out} was made with other settings: {', '.join(odd)}; name another file, or use those")
        return
    if out.exists():
        raise DataError(f"{out} exists, without {path.name} that says how it was made; name another file")
    part = path.with_name(path.name + ".tmp")
    part.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def _finished(path: Path, reason: str | None) -> dict[str, str]:
    """Key and reason of every row in a file of ours; an unfinished last line is removed."""
    if not path.exists():
        return {}
    found, whole = {}, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                found[row["key"]] = reason or row["reason"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}:{number} is no row of ours; correct or remove the line") from error
            whole += len(line)
    if whole < path.stat().st_size:
        os.truncate(path, whole)
    return found
