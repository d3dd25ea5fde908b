"""One lossless answer, or a chat, streamed as rounds come.

A round brings several tokens at once, and a character may be split over tokens: text is held back until it decodes to
whole characters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any, TextIO

from dflash.data.chat import ChatTokenizer
from dflash.data.conversations import Rejected
from dflash.decode.speculative import Decoder
from dflash.model import DFlashDraftModel
from dflash.target.model import Target

UNDERLINED = ("\x1b[4m", "\x1b[24m")
BRACKETS = ("[", "]")
UNDECODED = "\ufffd"


class ChatError(ValueError):
    """A prompt that cannot be answered."""


def generate(
    target: Target,
    drafter: DFlashDraftModel,
    *,
    prompt: str | None,
    system: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    seed: int = 0,
    block_size: int | None = None,
    show_accepted: bool = False,
    source: TextIO,
    out: TextIO,
    err: TextIO,
) -> int:
    """Answer one prompt, or chat if none is given and ``source`` is a terminal.

    Args:
        prompt: the user's message; None: all of ``source``, or a chat (an empty line or Ctrl-D ends it, Ctrl-C stops
            the answer under way, which stays in the history as far as it came).
        system: the system message, if any.
        chat_template_kwargs: passed to the template, such as ``enable_thinking``.
        max_new_tokens: per answer.
        temperature, seed, block_size: as for :class:`dflash.decode.speculative.Decoder`.
        show_accepted: mark drafted tokens that were accepted: underlined on a terminal, else in brackets, each round's
            run by itself. The last token of every round is the target's own.
        source, out, err: prompt or chat lines, the answers, and one line of figures per answer.

    Returns:
        exit code 0.

    Raises:
        ChatError: an empty prompt, one that the template refuses, or no room left for an answer.
        DecodeError: drafter and target do not belong together.
    """
    decoder = Decoder(target, drafter, block_size=block_size, temperature=temperature, seed=seed)
    chat = ChatTokenizer(target.tokenizer, 0, chat_template_kwargs or {}, target.vocab_size)
    marks = (UNDERLINED if out.isatty() else BRACKETS) if show_accepted else ("", "")
    messages = [{"role": "system", "content": system}] if system else []

    def answer(text: str) -> None:
        messages.append({"role": "user", "content": text})
        ids = _prompt_ids(chat, messages)
        room = _room(target, len(ids), max_new_tokens)
        stream = TextStream(target.tokenizer)
        try:
            _answer(decoder, ids, room, stream, marks, out, err)
        finally:  # also when it is stopped: the next turn refers to what was said
            messages.append({"role": "assistant", "content": stream.text})

    if prompt is not None or not source.isatty():
        text = source.read().rstrip("\n") if prompt is None else prompt
        if not text.strip():
            raise ChatError("the prompt is empty; give one with --prompt or on standard input")
        answer(text)
        return 0
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and line editing, where the system has it
    print("An empty line or Ctrl-D ends the chat; Ctrl-C stops an answer.", file=err)
    while True:
        try:
            if not (line := input("> ")).strip():
                return 0
            answer(line)
        except EOFError:
            print(file=out)
            return 0
        except KeyboardInterrupt:
            print(file=out)


def _prompt_ids(chat: ChatTokenizer, messages: list[dict[str, Any]]) -> list[int]:
    text = chat.render(messages, None, prompt=True)
    if isinstance(text, Rejected):
        raise ChatError(f"the prompt cannot be rendered: {text.reason}")
    ids = chat.tokenize([text])[0]
    if not ids or max(ids) >= chat.vocab_size:
        raise ChatError(f"the prompt has {len(ids)} tokens or one that the target does not know; take its own template")
    return ids


def _room(target: Target, prompt_tokens: int, max_new_tokens: int) -> int:
    """Tokens the answer may have: positions end somewhere, and beyond them a model talks nonsense."""
    positions = getattr(target.config, "max_position_embeddings", None)
    room = max_new_tokens if positions is None else min(max_new_tokens, positions - prompt_tokens)
    if room < 1:
        raise ChatError(
            f"prompt and history are {prompt_tokens} tokens and leave no room for an answer within the target's "
            f"{positions} positions (--max-new-tokens {max_new_tokens}); start a new chat"
        )
    return room


def _answer(
    decoder: Decoder,
    ids: list[int],
    max_new_tokens: int,
    stream: TextStream,
    marks: tuple[str, str],
    out: TextIO,
    err: TextIO,
) -> None:
    """Stream one answer to ``out``, then its figures to ``err``."""
    rounds, tokens, accepted = -1, 0, 0  # prefill yields the first token and is no round
    begin = time.perf_counter()
    with closing(decoder.stream(ids, max_new_tokens)) as steps:
        for step in steps:
            if rounds < 0:
                begin = time.perf_counter()
            rounds, tokens, accepted = rounds + 1, tokens + len(step.tokens), accepted + step.streak
            if drafted := stream.add(step.tokens[: step.streak]):
                out.write(f"{marks[0]}{drafted}{marks[1]}")
            out.write(stream.add(step.tokens[step.streak :]))
            out.flush()
    seconds = time.perf_counter() - begin
    out.write(f"{stream.finish()}\n")
    out.flush()
    if rounds:
        figures = f"{rounds} rounds, accepted length {accepted / rounds + 1:.2f} (bonus token included)"
        print(f"{tokens} tokens, {figures}, {(tokens - 1) / seconds:.1f} tokens/s after prefill", file=err)
    else:
        print(f"{tokens} token, from prefill alone", file=err)


class TextStream:
    """Token ids to text, piece by piece; all pieces together are the decoded whole, special tokens left out.

    Decodes a window from a little before the end of what is shown: some tokenizers drop the space before the first
    token they decode, so a piece by itself would lose it, and decoding the whole every time is quadratic.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._whole = 0  # of the window; and where text last ended in a whole character
        self._shown = 0  # characters of the window

    def add(self, tokens: Sequence[int]) -> str:
        """What can be shown after ``tokens``; bytes of an unfinished character wait for the rest."""
        self._ids += tokens
        window = self._decode()
        ready = window.rstrip(UNDECODED)
        piece = self._show(ready)
        if tokens and ready == window:
            self._start, self._whole = self._whole, len(self._ids)
            self._shown = len(self._decode())
        return piece

    def finish(self) -> str:
        """The rest, whatever it is: an answer cut off inside a character ends in U+FFFD."""
        return self._show(self._decode())

    def _show(self, window: str) -> str:
        piece = window[self._shown :]
        self._shown = max(self._shown, len(window))
        self.text += piece
        return piece

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(
            self._ids[self._start :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
