"""Who answers prompts, a server or a target on a device of this machine; conversations advance turn by turn."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from dflash.data.chat import UNKNOWN_ID, ChatTokenizer
from dflash.data.conversations import Rejected
from dflash.data.served import RequestRefused, Server, as_finished, read_answer

CUT_OFF = "answer was cut off"
EMPTY = "answer is empty"
TOO_LONG = "prompt leaves no room for an answer"
REFUSED = "server refused the prompt"
log = logging.getLogger("dflash")


@dataclass
class Reply:
    """An answer to one prompt: token ids, and the text they were made from where they are not what was generated."""

    ids: list[int]
    finish_reason: str | None
    text: str | None = None


@dataclass
class Job:
    """A row on its way: ``parts`` are the messages before each answer that is due."""

    key: str
    id: str
    category: str | None
    tools: list[Any] | None
    parts: list[list[dict[str, Any]]]
    origin: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[tuple[list[int], Reply]] = field(default_factory=list)
    reason: str | None = None

    @property
    def done(self) -> bool:
        return self.reason is not None or len(self.turns) == len(self.parts)


class Backend(Protocol):
    """Who answers. ``run`` finishes every job, in any order, and hands each one on as soon as it is done."""

    def run(self, jobs: Iterator[Job], turns: Turns, finish: Callable[[Job], None]) -> None: ...


class Turns:
    """Prompts of jobs, and their answers put back. Usable from several threads.

    Args:
        chat: the target's tokenizer with its template.
        longest_prompt: tokens.
        eos_ids: tokens that end an answer.
    """

    def __init__(self, chat: ChatTokenizer, longest_prompt: int, eos_ids: Sequence[int]) -> None:
        self.chat, self.longest_prompt, self.eos_ids = chat, longest_prompt, {*eos_ids}
        self._lock = threading.Lock()  # tokenizers refuse to be used from two threads at once

    def prompt(self, job: Job) -> list[int] | None:
        """Ids of the next prompt; None where the job is over, with its reason set."""
        job.messages += job.parts[len(job.turns)]
        with self._lock:
            text = self.chat.render(job.messages, job.tools, prompt=True)
            ids = self.chat.tokenize([text])[0] if isinstance(text, str) else []
        if isinstance(text, Rejected):
            job.reason = text.reason
        elif ids and max(ids) >= self.chat.vocab_size:
            job.reason = UNKNOWN_ID
        elif not 0 < len(ids) <= self.longest_prompt:
            job.reason = TOO_LONG
        return None if job.reason else ids

    def answer(self, job: Job, prompt: list[int], reply: Reply) -> None:
        """Put an answer into its job, and judge it."""
        if reply.ids and max(reply.ids) >= self.chat.vocab_size:  # a server of another model
            job.turns.append((prompt, reply))
            job.reason = UNKNOWN_ID
            return
        spoken = reply.ids[:-1] if reply.ids and reply.ids[-1] in self.eos_ids else reply.ids
        text = reply.text
        if text is None:
            with self._lock:
                text = str(self.chat.tokenizer.decode(spoken, clean_up_tokenization_spaces=False)) if spoken else ""
        job.turns.append((prompt, reply))
        job.messages.append({"role": "assistant", "content": text})
        if reply.finish_reason != "stop":
            job.reason = CUT_OFF if reply.finish_reason == "length" else f"finish_reason {reply.finish_reason!r}"
        elif not text.strip():
            job.reason = EMPTY


class Served:
    """An OpenAI-compatible server, several conversations at a time.

    Every request has a seed of its own, whatever the order of the answers: with one for all, servers would draw all
    answers from the same random numbers, and prompts alike would begin alike.
    """

    def __init__(
        self, url: str, settings: dict[str, Any], model: str | None, concurrency: int, timeout_s: float, seed: int
    ) -> None:
        self.server, self.seed = Server(url, timeout_s), seed
        self.settings = settings | {"model": model or self.server.first_model(), "return_token_ids": True}
        self.concurrency = concurrency
        log.info(f"asking {self.settings['model']} at {self.server.base}")

    def run(self, jobs: Iterator[Job], turns: Turns, finish: Callable[[Job], None]) -> None:
        def converse(job: Job, stop: threading.Event) -> Job:
            while not job.done and not stop.is_set():
                prompt = turns.prompt(job)
                if prompt is None:
                    break
                drawn = hashlib.sha256(f"{self.seed} {job.key} {len(job.turns)}".encode()).digest()[:4]
                asked = self.settings | {"prompt": prompt, "seed": int.from_bytes(drawn) >> 1}
                try:
                    said = self.server.request("completions", asked, job.origin, stop)
                except RequestRefused as error:
                    log.warning(str(error))
                    job.reason = REFUSED
                    break
                answer = read_answer(0, said, turns.chat.tokenizer, f"{self.server.base}: {job.origin}")
                turns.answer(job, prompt, Reply(answer.ids, answer.finish_reason, answer.text))
            return job

        for job in as_finished(converse, jobs, self.concurrency):
            finish(job)


class Local:
    """A target on a device of this machine.

    Answers are written by the decoding loop that evaluation uses, without a drafter: rows that end make room for the
    next at once, on hybrid targets too, where transformers' own ``generate`` takes prompts of equal length only and
    waits for the longest answer of a batch.
    """

    def __init__(self, target: Any, max_new_tokens: int, temperature: float, seed: int, batch_size: int) -> None:
        self.target, self.max_new_tokens, self.batch_size = target, max_new_tokens, batch_size
        self.temperature, self.seed = temperature, seed

    def run(self, jobs: Iterator[Job], turns: Turns, finish: Callable[[Job], None]) -> None:
        from dflash.decode.speculative import Decoded, Decoder

        seed = self.seed
        # Groups bound what a kill can cost where conversations have several turns: these advance turn by turn.
        while group := list(islice(jobs, 16 * self.batch_size)):
            while group:
                prompts = [(job, turns.prompt(job)) for job in group]
                for job in group:
                    if job.done:
                        finish(job)
                asked = [(job, prompt) for job, prompt in prompts if prompt is not None]
                # Each pass draws from numbers of its own; the first prompts of all would else draw the same.
                decoder, seed = Decoder(self.target, None, temperature=self.temperature, seed=seed), seed + 1

                def put(index: int, decoded: Decoded, asked: list[tuple[Job, list[int]]] = asked) -> None:
                    job, prompt = asked[index]
                    ended = decoded.tokens[-1] in turns.eos_ids
                    turns.answer(job, prompt, Reply(decoded.tokens, "stop" if ended else "length"))
                    if job.done:
                        finish(job)

                if asked:
                    decoder.decode([prompt for _, prompt in asked], self.max_new_tokens, self.batch_size, put)
                group = [job for job, _ in asked if not job.done]
