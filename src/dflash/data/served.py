"""Answers from an OpenAI-compatible server (vLLM, SGLang, llama.cpp's), with the standard library alone.

``/completions`` is asked, not ``/chat/completions``: the prompt goes out as the very token ids that the target's own
template gave, so that thinking mode, system prompt and special tokens are what the drafter was trained on. Ids come
back where the server returns them (vLLM: ``return_token_ids``). Else the text is tokenised, which is nearly always, but
not by necessity, what was generated.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import queue
import random
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from tqdm import tqdm

from dflash.data.tokenize import Prompt

ATTEMPTS = 8
"""Of one request, about a minute in all: a server behind a proxy that restarts comes back within it."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
LONGEST_RETRY_AFTER_S = 600.0
MESSAGE_CHARS = 300
log = logging.getLogger("dflash")

T = TypeVar("T")
R = TypeVar("R")


class ServedError(ValueError):
    """The server cannot be reached, refuses, or answers what is no completion."""


class RequestRefused(ServedError):
    """The server refuses this one request, such as a prompt beyond its limit, and may well answer others."""


@dataclass(frozen=True)
class ServedAnswer:
    """Answer to prompt number ``prompt``: its token ids, and whether it ended before an end-of-text token.

    ``text``: what the ids were made from, where the server gave none.
    """

    prompt: int
    ids: list[int]
    cut_off: bool
    finish_reason: str | None = field(default=None, compare=False)
    text: str | None = field(default=None, compare=False)


def served_answers(
    url: str,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    *,
    max_new_tokens: int,
    model: str | None = None,
    temperature: float = 0.0,
    concurrency: int = 8,
    timeout_s: float = 600.0,
) -> list[ServedAnswer]:
    """Let a server answer ``prompts``, several at a time.

    Args:
        url: of the API, such as ``http://localhost:8000/v1``; without a path, ``/v1`` is meant. The environment
            variable ``OPENAI_API_KEY``, if set, is sent along.
        tokenizer: the target's; makes ids of answers that come as text only.
        model: as the server names it; None: the first that it lists.
        temperature: 0 is greedy, the only answers on which the walk is exact.
        concurrency: requests under way at once.
        timeout_s: longest silence of the server within one request; it is silent while it generates.

    Returns:
        one answer per prompt, in their order. An empty answer has no ids; how many there are is logged.

    Raises:
        ServedError: naming the URL and the prompt, with the server's own message.
    """
    server = Server(url, timeout_s)
    model = model or server.first_model()
    log.info(f"asking {model} at {server.base}")
    settings = {"model": model, "max_tokens": max_new_tokens, "temperature": temperature, "return_token_ids": True}

    def ask(numbered: tuple[int, Prompt], stop: threading.Event) -> ServedAnswer:
        number, prompt = numbered
        reply = server.request("completions", settings | {"prompt": prompt.ids.tolist()}, prompt.origin, stop)
        return read_answer(number, reply, tokenizer, f"{server.base}: {prompt.origin}")

    found: list[ServedAnswer] = []
    with tqdm(total=len(prompts), desc="served answers", unit="prompt", disable=None) as bar:
        for answer in as_finished(ask, enumerate(prompts), concurrency):
            found.append(answer)
            bar.update()
    found.sort(key=lambda answer: answer.prompt)
    if empty := [answer.prompt for answer in found if not answer.ids]:
        log.warning(f"{len(empty)} of {len(found)} answers are empty (first: {prompts[empty[0]].origin})")
    return found


def as_finished(ask: Callable[[T, threading.Event], R], items: Iterable[T], concurrency: int) -> Iterator[R]:
    """Results of ``ask(item, stop)`` as they finish, ``concurrency`` at a time; items are taken when their turn comes.

    What ``ask`` raises is raised here. ``stop`` is set when the generator ends for any reason. The threads are daemons:
    a pool's would be joined at exit, and Ctrl-C would wait for the slowest answer.
    """
    todo, taking = iter(items), threading.Lock()
    done: queue.Queue[tuple[bool, Any]] = queue.Queue(maxsize=2 * concurrency)
    stop, ended = threading.Event(), object()

    def work() -> None:
        try:
            while not stop.is_set():
                with taking:
                    item = next(todo, ended)
                if item is ended:
                    break
                done.put((True, ask(item, stop)))  # type: ignore[arg-type]
            done.put((True, ended))
        except BaseException as error:  # raised again in the thread that waits for it
            done.put((False, error))

    for _ in range(concurrency):
        threading.Thread(target=work, daemon=True).start()
    running = concurrency
    try:
        while running:
            fine, result = done.get()
            if not fine:
                raise result
            if result is ended:
                running -= 1
            else:
                yield result
    finally:
        stop.set()
        with contextlib.suppress(queue.Empty):
            while True:  # make room for what is under way, or its threads would never end
                done.get_nowait()


class Server:
    """Requests to one API, with retries; usable from many threads."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServedError(f"{url} is no address of a server; give one such as http://localhost:8000/v1")
        self.base = urllib.parse.urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))
        self.timeout_s = timeout_s

    def first_model(self) -> str:
        """Name of the first model that the server lists."""
        # Few attempts: here a wrong address shows, and nobody waits a minute to learn of a slip of the pen.
        listed = self.request("models", None, "models", threading.Event(), attempts=3)
        match listed:
            case {"data": [{"id": str(name)}, *_]}:
                return name
        raise ServedError(f"{self.base}/models lists no model; name the one to ask")

    def request(
        self, path: str, body: dict[str, Any] | None, what: str, stop: threading.Event, attempts: int = ATTEMPTS
    ) -> Any:
        """Parsed JSON of the answer to one GET (``body`` None) or POST.

        Connection errors, timeouts, 429 and 5xx are tried again, waiting twice as long each time (half of it random,
        or all clients of a server that went down would return at once), or as ``Retry-After`` says.
        """
        where, fault = f"{self.base}/{path}: {what}", None
        for attempt in range(1, attempts + 1):
            try:
                return self._send(path, body, where)
            except _TryAgain as error:
                fault = error
            if attempt == attempts or stop.is_set():
                break
            longest = min(FIRST_WAIT_S * 2 ** (attempt - 1), LONGEST_WAIT_S)
            wait_s = max(longest * random.uniform(0.5, 1.0), fault.retry_after_s)
            if wait_s > 2:
                log.warning(f"{where}: {fault}; again in {wait_s:.0f} s")
            stop.wait(wait_s)
        raise ServedError(f"{where}: {fault}, {attempt} times; see whether the server is up") from fault

    def _send(self, path: str, body: dict[str, Any] | None, where: str) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base}/{path}", data, {"Content-Type": "application/json"})
        if key := os.environ.get("OPENAI_API_KEY"):
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            with error:
                message = f"the server says {error.code}: {_message(error)}"
            if error.code == 429 or error.code >= 500:
                raise _TryAgain(message, _retry_after_s(error.headers.get("Retry-After"))) from error
            kind = RequestRefused if error.code in (400, 413, 422) else ServedError
            raise kind(f"{where}: {message}") from error
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            raise _TryAgain(f"no answer ({getattr(error, 'reason', None) or error or type(error).__name__})") from error
        try:
            return json.loads(text)
        except ValueError as error:
            start = text[:80].decode(errors="replace")
            raise ServedError(f"{where}: the server answers no JSON but {start!r}; is this the API?") from error


class _TryAgain(Exception):
    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says about a refusal: the API's ``error.message``, other servers' ``message`` or ``detail``."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    match parsed:
        case {"error": {"message": str(said)}} | {"error": str(said)} | {"message": str(said)} | {"detail": str(said)}:
            text = said
    return " ".join(text.split())[:MESSAGE_CHARS] or str(error.reason)


def _retry_after_s(value: str | None) -> float:
    """Seconds of a ``Retry-After`` header, which holds a number or a date (RFC 9110, 10.2.3); 0 where it says
    nothing."""
    if value is None:
        return 0.0
    try:
        seconds = float(value) if value.strip().isdigit() else _until(parsedate_to_datetime(value))
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S)


def _until(moment: datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()


def read_answer(number: int, reply: Any, tokenizer: Any, where: str) -> ServedAnswer:
    match reply:
        case {"choices": [{} as choice, *_]}:
            pass
        case _:
            raise ServedError(f"{where}: the answer holds no choices; is this an OpenAI-compatible server?")
    reason = choice.get("finish_reason")
    cut_off = reason != "stop"
    match choice:
        case {"token_ids": [*ids]} if (ids or not choice.get("text")) and all(type(i) is int and i >= 0 for i in ids):
            return ServedAnswer(number, ids, cut_off, reason)
        case {"text": str(text)}:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
            # Servers leave the end-of-text token out of the text.
            if ids and not cut_off and tokenizer.eos_token_id is not None:
                ids.append(tokenizer.eos_token_id)
            return ServedAnswer(number, ids, cut_off, reason, text)
    raise ServedError(f"{where}: the answer has neither text nor token_ids; is this an OpenAI-compatible server?")
