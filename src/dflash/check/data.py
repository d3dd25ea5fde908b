"""The data as training would read them: rows, loss masks, template, lengths, mask token, steps.

Shape letters: S tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash.check.page import Page
from dflash.config import Config, missing_files
from dflash.config_target import lookup, text_config
from dflash.data import chat
from dflash.data.batches import BatchPlan
from dflash.data.chat import ChatTokenizer
from dflash.data.conversations import DataError, Rejected, TokenRow, normalise, read_rows
from dflash.data.tokenize import Prompt, TokenData, decode_example, load_data, load_prompts
from dflash.train.schedule import StepPlan

MANY_DROPPED = 0.01
MOST_DROPPED = 0.5
"""Shares of the rows that are worth a warning, and that make a failure."""
LOOKED_AT = 2000
"""Rows read again to tell apart what is wrong with those that were dropped."""
_BAR = 30

ADVICE = {
    chat.REWRITTEN: "it gives earlier turns another text than the target generated (thinking taken out, mostly), so "
    "they are left out of the loss; split such conversations, or give a template that keeps earlier turns",
    chat.OTHER_PROMPT: "the prompt that generation adds is not how the template renders a finished turn; set "
    "data.chat_template_kwargs as in use (enable_thinking)",
    chat.NO_END: "the template writes no end-of-turn token after an answer; give the target's own template",
    chat.THINKING_LOST: "the template drops reasoning_content; put the thinking into content as it was generated",
    chat.THINKING_MANGLED: "thinking in content and the template's own think tags do not agree; set enable_thinking",
    chat.TEXT_CHANGED: "the template alters answers, so what is trained on is not what was generated",
    chat.BEYOND: "raise data.max_length",
    chat.UNKNOWN_ID: "they were tokenised for another model",
}


@dataclass
class DataFound:
    """What later sections need."""

    tokens: TokenData
    prompts: list[Prompt]
    """Of data.eval; else the beginnings of training rows."""
    plan: StepPlan | None


def check_data(page: Page, config: Config, target_config: Any, tokenizer: Any) -> DataFound | None:
    """Rows, masks, lengths, plan; None where no data can be used."""
    page.section("data")
    missing = {problem.partition(" ")[0] for problem in missing_files(config)}  # named above, one line each
    if "data.train" in missing:
        page.not_run("rows", "a file of data.train is missing")
        return None
    known = text_config(target_config)
    shared: dict[str, Any] = {
        "max_length": config.data.max_length,
        "chat_template_kwargs": config.data.chat_template_kwargs,
        "vocab_size": lookup(known, "vocab_size"),
    }
    cache = Path(config.data.cache_dir) if config.data.cache_dir else None
    try:
        data = load_data(config.data.train, tokenizer, cache_dir=cache, **shared)
    except DataError as error:
        _explain(page, config, ChatTokenizer(tokenizer, **shared), str(error))
        return None
    _rows(page, config, data)
    _masks(page, data)
    page.block(decode_example(data, 0, tokenizer))
    _lengths(page, config, data)
    prompts: list[Prompt] = []
    with page.guarded("data.eval"):
        if "data.eval" in missing:
            page.not_run("data.eval", "a file of it is missing")
        elif config.data.eval:
            prompts = load_prompts(config.data.eval, tokenizer, limit=config.eval.samples, **shared)
            page.line("pass", "data.eval", f"{len(prompts):,} prompts (eval.samples {config.eval.samples:,})")
        else:
            page.line("warn", "data.eval", "empty: no accepted length is measured and no best checkpoint is kept")
    return DataFound(data, prompts or _beginnings(data), _plan(page, config, data))


def _rows(page: Page, config: Config, data: TokenData) -> None:
    stats = data.stats
    dropped = stats["rows"] - stats["kept"]
    share = dropped / max(stats["rows"], 1)
    what = f"{stats['kept']:,} of {stats['rows']:,} kept, {dropped:,} dropped"
    page.judge(
        "rows", what, warn="see why below" if share > MANY_DROPPED else "",
        fail="most of the data cannot be used" if share > MOST_DROPPED else "",
    )  # fmt: skip
    without_answer = _all_prompt(config) if chat.NO_PAIR in stats["dropped"] else 0
    for reason, entry in sorted(stats["dropped"].items(), key=lambda item: -item[1]["count"]):
        count, where = entry["count"], f"first: {entry['first']}"
        if reason == chat.NO_PAIR:
            _no_pair(page, without_answer, count - without_answer, where)
        else:
            advice = f"; {ADVICE[reason]}" if reason in ADVICE else ""
            page.line("warn", "dropped", f"{count:,} rows: {reason} ({where}){advice}")
    for reason, entry in stats["unsupervised_turns"].items():
        name = "template" if reason == chat.REWRITTEN else "turns"
        advice = f"; {ADVICE[reason]}" if reason in ADVICE else ""
        page.line("warn", name, f"{entry['count']:,} turns not trained on: {reason} (first: {entry['first']}){advice}")
    for count, what, advice in (
        (stats["truncated"], "cut to data.max_length", "raise it if use is longer"),
        (stats["cut_off"], "end at a length limit of their own", "answer them again with more max_new_tokens"),
    ):
        if count:
            many = count > 0.1 * stats["kept"]
            page.judge("cut rows", f"{count:,} {what}", warn=advice if many else "")


def _no_pair(page: Page, all_prompt: int, short: int, where: str) -> None:
    if all_prompt > 0:
        page.line(
            "warn", "loss mask", f"{all_prompt:,} rows are all prompt: no token of theirs is supervised ({where}); "
            "set loss_mask to 1 where the target answers",
        )  # fmt: skip
    if short > 0:
        page.line("warn", "short answers", f"{short:,} rows dropped: answers shorter than two tokens ({where})")


def _masks(page: Page, data: TokenData) -> None:
    supervised = np.add.reduceat(data.loss_mask, data.offsets[:-1], dtype=np.int64)
    everything = int((supervised == data.lengths).sum())
    share = float(data.loss_mask.mean())
    fail = warn = ""
    if everything:
        first = data.describe(int((supervised == data.lengths).argmax()))
        text = f"{everything:,} rows are all ones: their prompts would be trained on (first: {first}); mask the prompts"
        fail, warn = (text, "") if everything > MOST_DROPPED * len(data) else ("", text)
    page.judge("loss mask", f"{share:.1%} of {len(data.ids):,} tokens supervised", warn, fail)
    short = int((supervised < 8).sum())
    page.judge(
        "answers", f"{np.median(supervised):,.0f} supervised tokens in the middle row, {supervised.min():,} at least",
        warn=f"{short:,} rows have fewer than 8: their blocks are mostly empty" if short > 0.1 * len(data) else "",
    )  # fmt: skip


def _lengths(page: Page, config: Config, data: TokenData) -> None:
    marks = np.quantile(data.lengths, [0, 0.05, 0.5, 0.95, 1]).round().astype(int)
    names = ("shortest", "5 %", "middle", "95 %", "longest")
    page.line("pass", "lengths", ", ".join(f"{name} {mark:,}" for name, mark in zip(names, marks, strict=True)))
    edges = np.unique(np.geomspace(marks[0], max(marks[-1], marks[0] + 1) + 1, 9).round().astype(int))
    counts, _ = np.histogram(data.lengths, bins=edges)
    page.block(
        "\n".join(
            f"{low:>7,} to {high - 1:>7,}  {count:>9,}  {'#' * round(_BAR * int(count) / max(int(counts.max()), 1))}"
            for low, high, count in zip(edges, edges[1:], counts, strict=False)
        )
    )


def _plan(page: Page, config: Config, data: TokenData) -> StepPlan | None:
    """Buckets, steps, and how many anchors there are for the slots."""
    plan: StepPlan | None = None
    with page.guarded("plan"):
        train = config.train
        batches = BatchPlan(
            data.lengths, data.eligible, seed=config.seed, tokens_per_batch=train.tokens_per_batch,
            anchors_per_batch=train.anchors_per_batch, length_buckets=config.data.length_buckets,
        )  # fmt: skip
        first = batches.epoch(0)
        bounds = [f"{data.lengths[m].min():,} to {data.lengths[m].max():,} ({len(m):,})" for m in batches.buckets]
        page.line("pass", "buckets", f"tokens (sequences): {', '.join(bounds)}")
        plan = StepPlan(batches, train.epochs, train.grad_accumulation)
        lost = plan.dropped / max(plan.dropped + plan.total * train.grad_accumulation, 1)
        page.judge(
            "steps", f"{plan.total:,} steps of {train.grad_accumulation} batches, {train.epochs} epochs of "
            f"{len(first):,} batches and {len(data.ids):,} tokens",
            warn=f"{lost:.0%} of the batches are left over by incomplete steps" if lost > 0.05 else "",
        )  # fmt: skip
        used = sum(int(batch.anchors.sum()) for batch in first)
        slots = train.anchors_per_batch * len(first)
        page.judge(
            "anchors", f"{used:,} blocks an epoch, at {used / max(int(data.eligible.sum()), 1):.0%} of the positions "
            "that can start one",
            warn=f"{1 - used / slots:.0%} of train.anchors_per_batch find no position; lower it"
            if used < 0.9 * slots else "",
        )  # fmt: skip
    return plan


def check_mask_token(page: Page, config: Config, target_config: Any, tokenizer: Any, data: TokenData | None) -> None:
    """The mask token must be a real row of the embedding that nothing else uses."""
    page.section("mask token")
    mask, known = config.drafter.mask_token_id, text_config(target_config)
    text = tokenizer.convert_ids_to_tokens(mask) if mask < len(tokenizer) else None
    name = f"{mask} ({text!r})" if text else f"{mask} (no token of the tokenizer's)"
    vocabulary = lookup(known, "vocab_size")
    page.judge(
        "embedding", f"row {mask} of {vocabulary:,}", fail="outside; name a smaller id" if mask >= vocabulary else ""
    )
    ends = {"eos": _ids(lookup(known, "eos_token_id")) | _ids(tokenizer.eos_token_id)}
    ends |= {"pad": _ids(lookup(known, "pad_token_id")) | _ids(tokenizer.pad_token_id)}
    ends |= {"bos": _ids(lookup(known, "bos_token_id")) | _ids(tokenizer.bos_token_id)}
    clash = [kind for kind, ids in ends.items() if mask in ids]
    page.judge(
        "role", f"{name}, " + ("no eos, pad or bos" if not clash else f"which is {' and '.join(clash)}"),
        fail="a token with a meaning of its own; name an unused special token" if clash else "",
    )  # fmt: skip
    is_plain = text is not None and mask not in tokenizer.all_special_ids and mask not in tokenizer.added_tokens_decoder
    page.judge("kind", "ordinary token" if is_plain else "special or unused",
               warn="text may contain it; name an unused special token" if is_plain else "")  # fmt: skip
    if data is None:
        page.not_run("unused", "the data cannot be read")
        return
    used = np.flatnonzero(data.ids == mask)
    first = data.describe(int(np.searchsorted(data.offsets, used[0], side="right")) - 1) if used.size else ""
    page.judge(
        "unused", f"in {used.size:,} of {len(data.ids):,} tokens of the data",
        fail=f"training refuses that (first: {first}); name a token that is never used" if used.size else "",
    )  # fmt: skip


def _ids(value: Any) -> set[int]:
    return set(value) if isinstance(value, list | tuple) else set() if value is None else {int(value)}


def _beginnings(data: TokenData, count: int = 64) -> list[Prompt]:
    """Prompts made of training rows: what stands before the first answer."""
    found = []
    for i in range(min(len(data), count)):
        ids, mask = data.sample(i)
        if start := int(mask.argmax()):
            found.append(Prompt(ids[:start], data.describe(i), None, None))
    return found


def _all_prompt(config: Config) -> int:
    rows = (normalise(raw) for source in config.data.train for _, raw in read_rows(source))
    return sum(isinstance(row, TokenRow) and not row.loss_mask.any() for row in rows)


def _explain(page: Page, config: Config, tokenizer: ChatTokenizer, problem: str) -> None:
    """Data of which nothing can be used: why, by looking at the first rows once more."""
    page.line("fail", "rows", problem.splitlines()[0])
    seen = short = all_prompt = everything = 0
    others: dict[str, int] = {}
    try:
        for source in config.data.train:
            for _, raw in read_rows(source):
                if seen == LOOKED_AT:
                    break
                seen += 1
                row = normalise(raw)
                (found,) = tokenizer.encode([row])
                if not isinstance(found, Rejected):
                    everything += bool(found.loss_mask.all())
                elif found.reason != chat.NO_PAIR:
                    others[found.reason] = others.get(found.reason, 0) + 1
                elif isinstance(row, TokenRow) and not row.loss_mask.any():
                    all_prompt += 1
                else:
                    short += 1
    except DataError:  # a source that cannot be read: the first line has said so
        return
    if not seen:
        page.line("fail", "rows", "the files of data.train are empty; write conversations into them")
    for count, name, text in (
        (all_prompt, "loss mask", "are all prompt: no token is supervised; set loss_mask to 1 in answers"),
        (everything, "loss mask", "are all ones: prompts would be trained on; mask the prompts"),
        (short, "short answers", "have answers shorter than two tokens; there is nothing to draft"),
    ):
        if count:
            page.line("fail", name, f"{count:,} of {seen:,} rows {text}")
    for reason, count in others.items():
        name = "template" if reason == chat.REWRITTEN else "dropped"
        advice = f"; {ADVICE[reason]}" if reason in ADVICE else ""
        page.line("fail", name, f"{count:,} of {seen:,} rows: {reason}{advice}")
