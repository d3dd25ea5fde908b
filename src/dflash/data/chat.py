"""Conversations to token ids and loss masks, exactly as the target reads them and would generate them.

The chat template renders the whole conversation, and for every assistant turn the prompt before it (generation prompt
included). A turn is supervised from the first token after its prompt to its end-of-turn token, where generation would
stop. What the prompt supplies (role headers, an empty think block) and what follows the end of the turn is not. A turn
whose text in the whole conversation is not what the target would have generated in its place is left unsupervised, with
the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from dflash.data.conversations import CUT_OFF, Conversation, DataError, Rejected, Row, TokenRow

RESERVED = {
    "conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
}  # fmt: skip

NO_PROMPT = "assistant turn without a message before it"
OTHER_PROMPT = "generation prompt is not how the template renders the turn (thinking mode?)"
REWRITTEN = "template rewrites the turn once others follow"
NO_END = "template ends the turn without an end-of-turn token"
THINKING_MANGLED = "template does not give back the thinking in content as it was generated"
THINKING_LOST = "template leaves reasoning_content out"
CALLS_LOST = "template leaves tool_calls out"
TEXT_CHANGED = "template changes the answer's text"
CUT_IN_THOUGHT = "answer was cut off while thinking"
BORDER = "a token spans the border of prompt and answer"
BEYOND = "answer begins beyond max_length"
NO_PAIR = "no two supervised tokens in a row"
OTHER_IDS = "input_ids of another vocabulary than the target's"
UNKNOWN_ID = "token id beyond the vocabulary of the tokenizer or of the target"


@dataclass(frozen=True)
class Encoded:
    """One row as tokens: ids int32[S], loss_mask bool[S].

    ``truncated``: by max_length. ``cut_off``: the last answer ended at a limit of its own. ``skipped``: the reason for
    each assistant turn left unsupervised. ``templated``: not a pre-tokenised row.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    truncated: bool
    templated: bool
    cut_off: bool = False
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turn:
    """A supervised turn: the character of the rendered text at which the answer begins, and the token that ends it."""

    start: int
    stop_id: int
    cut_off: bool


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, its supervised turns in order, and why other assistant turns are not among them."""

    text: str
    turns: list[Turn]
    skipped: tuple[str, ...]


class ChatTokenizer:
    """A tokenizer, its chat template and the settings of both. Picklable, so that worker processes get the same."""

    def __init__(
        self, tokenizer: Any, max_length: int, chat_template_kwargs: dict[str, Any], vocab_size: int | None = None
    ) -> None:
        clash = sorted(RESERVED & set(chat_template_kwargs))
        if clash:
            raise DataError(f"data.chat_template_kwargs: {', '.join(clash)} is set by the trainer itself; leave it out")
        self.tokenizer, self.max_length, self.kwargs = tokenizer, max_length, chat_template_kwargs
        # A tokenizer with added tokens may know more ids than its target embeds.
        self.vocab_size = min(len(tokenizer), vocab_size or len(tokenizer))
        self.specials = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.specials |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        # Tokenizers that put a space before whatever they are given cannot tokenise an answer by itself.
        self.splittable = "".join(tokenizer.convert_ids_to_tokens(self.tokenize(["a"])[0])) == "a"

    @cached_property
    def vocabulary(self) -> str:
        """Digest of which token has which id; the same for every target that shares them."""
        pairs = sorted(self.tokenizer.get_vocab().items())
        return hashlib.sha256(repr(pairs).encode(errors="surrogatepass")).hexdigest()[:16]

    def foreign(self, row: TokenRow) -> bool:
        """Whether a pre-tokenised row says that its ids are of another vocabulary."""
        return row.vocabulary not in (None, self.vocabulary)

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Ids of rendered texts. The template has written the special tokens, so none are added: no second BOS."""
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool) -> str | Rejected:
        """The template's text, with the generation prompt if ``prompt``; what it raises is the row's fault."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self.kwargs
            )
            text.encode()
            return text
        except UnicodeEncodeError:
            return Rejected("text with half a surrogate pair")
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            return Rejected(f"chat template: {' '.join(str(error).split())[:100]}")

    def find_turns(self, row: Conversation) -> Rendered | Rejected:
        """Render a conversation up to its last assistant turn and find the turns to supervise."""
        last = max(i for i, message in enumerate(row.messages) if message["role"] == "assistant")
        whole = self.render(row.messages[: last + 1], row.tools, prompt=False)
        if isinstance(whole, Rejected):
            return whole
        found = [
            self._find_turn(row, i, whole, i == last)
            for i, message in enumerate(row.messages[: last + 1])
            if message["role"] == "assistant"
        ]
        turns = [turn for turn in found if isinstance(turn, Turn)]
        skipped = tuple(turn.reason for turn in found if isinstance(turn, Rejected))
        return Rendered(whole, turns, skipped) if turns else Rejected(skipped[-1])

    def _find_turn(self, row: Conversation, i: int, whole: str, is_last: bool) -> Turn | Rejected:
        """Message ``i`` as a turn of ``whole``, if ``whole`` has it as the target would have generated it."""
        if i == 0:
            return Rejected(NO_PROMPT)
        prompt = self.render(row.messages[:i], row.tools, prompt=True)
        if isinstance(prompt, Rejected):
            return prompt
        # The conversation when the turn had just been generated: templates may rewrite it once other turns follow.
        own = whole if is_last else self.render(row.messages[: i + 1], row.tools, prompt=False)
        if isinstance(own, Rejected):
            return own
        if not own.startswith(prompt):
            return Rejected(OTHER_PROMPT)
        answered = own.rstrip()  # templates put a newline after the end of a turn
        stop = max((text for text in self.specials if answered.endswith(text)), key=len, default="")
        end = len(answered) - len(stop)
        if not stop or end < len(prompt):
            return Rejected(NO_END)
        if not whole.startswith(answered):
            return Rejected(REWRITTEN)
        cut_off = is_last and row.finish_reason == CUT_OFF
        fault = lost_text(row.messages[i], prompt, own[len(prompt) : end], cut_off)
        return Rejected(fault) if fault else Turn(len(prompt), self.specials[stop], cut_off)

    def encode(self, rows: Sequence[Row | Rejected]) -> list[Encoded | Rejected]:
        """Each row as tokens, or why not. Rows do not influence each other; many at once are faster."""
        found = [self.find_turns(row) if isinstance(row, Conversation) else row for row in rows]
        rendered = [row for row in found if isinstance(row, Rendered)]
        wholes = iter(self.tokenize([row.text for row in rendered]))
        prompts = iter(self.tokenize([row.text[: turn.start] for row in rendered for turn in row.turns]))
        results: list[Encoded | Rejected] = []
        for row in found:
            if isinstance(row, Rendered):
                results.append(self._mask(row, next(wholes), list(islice(prompts, len(row.turns)))))
            elif isinstance(row, TokenRow) and self.foreign(row):
                results.append(Rejected(OTHER_IDS))
            elif isinstance(row, TokenRow):
                results.append(self._fit(row.ids, row.loss_mask, templated=False))
            else:
                results.append(row)
        return results

    def _mask(self, row: Rendered, ids: list[int], prompts: list[list[int]]) -> Encoded | Rejected:
        starts = [len(prompt) for prompt in prompts]
        if any(ids[: len(prompt)] != prompt for prompt in prompts):
            # Tokenised at once, the text has a token across a border (a prompt ends in a newline, its answer begins
            # with one). When the target answers, the prompt was tokenised alone and the answer's tokens follow it.
            if not self.splittable:
                return Rejected(BORDER)
            ids, starts = self._cut_at_borders(row)
        mask = np.zeros(len(ids), dtype=bool)
        for turn, start in zip(row.turns, starts, strict=True):
            if turn.stop_id not in ids[start:]:
                return Rejected(NO_END)
            end = ids.index(turn.stop_id, start)  # the first: generation stops there, even if the text goes on
            mask[start:end] = True
            mask[end] = not turn.cut_off  # at a limit the target did not choose to stop
        return self._fit(np.array(ids, dtype=np.int32), mask, cut_off=row.turns[-1].cut_off, skipped=row.skipped)

    def _cut_at_borders(self, row: Rendered) -> tuple[list[int], list[int]]:
        """Ids of the text without tokens across borders of prompts and answers; where each answer begins in them."""
        done: list[int] = []
        starts: list[int] = []
        cut, rest = 0, self.tokenize([row.text])[0]
        for turn in row.turns:
            prompt = self.tokenize([row.text[cut : turn.start]])[0]
            starts.append(len(done) + len(prompt))
            if rest[: len(prompt)] != prompt:
                done += prompt
                cut, rest = turn.start, self.tokenize([row.text[turn.start :]])[0]
        return done + rest, starts

    def _fit(
        self,
        ids: np.ndarray,
        mask: np.ndarray,
        *,
        templated: bool = True,
        cut_off: bool = False,
        skipped: tuple[str, ...] = (),
    ) -> Encoded | Rejected:
        """Truncate ids and mask together, once. Without an anchor (two supervised tokens in a row) a row is no use."""
        if len(ids) and ids.max() >= self.vocab_size:
            return Rejected(UNKNOWN_ID)
        kept = mask[: self.max_length]
        if not (kept[:-1] & kept[1:]).any():
            return Rejected(BEYOND if (mask[:-1] & mask[1:]).any() else NO_PAIR)
        return Encoded(ids[: self.max_length], kept, len(ids) > self.max_length, templated, cut_off, skipped)


def lost_text(message: dict[str, Any], prompt: str, answer: str, cut_off: bool) -> str | None:
    """How the answer that the template rendered is not what the target generated, white space aside; None: it is."""
    texts = (message["content"], message.get("reasoning_content", ""), answer)
    content, reasoning, body = ("".join(text.split()) for text in texts)
    if reasoning not in body:
        return THINKING_LOST
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    if any("".join(str(call.get("name", "")).split()) not in body for call in calls if isinstance(call, dict)):
        return CALLS_LOST
    thinking = reasoning or "<think>" in content or prompt.rstrip().endswith("<think>")
    thought = "</think>" in content or (reasoning and content)
    if cut_off and thinking and not thought:
        return CUT_IN_THOUGHT  # the template closes a think block that the target never closed
    if "</think>" not in content:
        return None if content in body else TEXT_CHANGED
    # The thinking is in the content, and the prompt may have supplied its opening tag. An empty think block beside it,
    # of the prompt or of the template, would leave the content's own closing tag an orphan.
    closed = prompt.rstrip().endswith("</think>")
    if closed or not body.removeprefix("<think>").startswith(content.removeprefix("<think>")):
        return THINKING_MANGLED
    return None
