"""``dflash eval``: the number that serving will see, measured on one set of prompts or of answers.

With prompts, the target decodes them alone and then with the drafter, under the same conditions in the same process:
accepted length, speed against its own baseline, and whether the outputs are the same. With answers that exist already
(a file, or a server's), the exact walk scores them: accepted length without speed, in a fraction of the time.

Everything is collected into one JSON document; the tables show what that document holds.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

import dflash
from dflash.data.conversations import HUB, Rejected, normalise, read_rows
from dflash.data.served import served_answers
from dflash.data.tokenize import Prompt, load_data, load_prompts, summary
from dflash.decode import tables
from dflash.decode.agreement import Difference, differences
from dflash.decode.drafters import Loaded, load_both
from dflash.decode.rounds import Rounds, paired_difference
from dflash.decode.speculative import Decoded, Decoder
from dflash.decode.walk import Answer, target_share, walk, walk_batch, walk_trees
from dflash.target.model import Target

log = logging.getLogger("dflash")
WARM_UP_TOKENS = 32
"""Answer tokens of each decoder's first, untimed prompts: kernels are chosen and compiled in them."""


class EvalError(ValueError):
    """Options that do not go together, or nothing to measure."""


@dataclass(frozen=True)
class Settings:
    """The command's options, as ``dflash eval --help`` explains them."""

    drafter: str
    target: str | None = None
    prompts: Sequence[str] = ()
    answers: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    enable_thinking: bool | None = None
    block_sizes: Sequence[int] = ()
    budgets: Sequence[int] = ()
    samples: int | None = None
    batch_size: int = 1
    compare: str | None = None
    device: str | None = None
    dtype: str | None = None
    seed: int = 0
    json: Path | None = None

    @property
    def url(self) -> bool:
        return bool(self.answers and self.answers.startswith(("http://", "https://")))

    def check(self) -> None:
        """Refuse what cannot work before anything is loaded.

        Raises:
            EvalError: naming the options.
        """
        if not self.prompts and not self.answers:
            raise EvalError("nothing to measure on: give --prompts FILE, or --answers FILE")
        if self.answers and not self.url and self.prompts:
            raise EvalError("--answers FILE holds its own prompts: leave out --prompts")
        if self.url and not self.prompts:
            raise EvalError(f"--answers {self.answers} is a server: say with --prompts what to ask it")
        if self.answers and self.temperature:
            raise EvalError("--answers is scored against the target's own choices: leave out --temperature")
        if not 0 <= self.temperature < math.inf:
            raise EvalError(f"--temperature {self.temperature}: give 0 (greedy) or a positive number")
        if self.budgets and self.temperature:
            raise EvalError("--ddtree is greedy: leave out --temperature, or --ddtree")
        if self.json is not None:
            parent = self.json.absolute().parent
            if not parent.is_dir():
                raise EvalError(f"--json {self.json}: there is no such folder; make it first")
            if self.json.is_dir() or not os.access(parent, os.W_OK):
                raise EvalError(f"--json {self.json}: cannot be written there; name a file in a folder of yours")
        files = [*self.prompts, *([] if self.url or not self.answers else [self.answers])]
        if gone := [file for file in files if not file.startswith(HUB) and not Path(file).expanduser().exists()]:
            raise EvalError(f"{gone[0]}: no such file; correct --prompts or --answers")


@dataclass
class Arm:
    """One way of decoding the set: a drafter with a block size, with chains or with trees of a budget."""

    drafter: str
    rounds: Rounds
    tree_budget: int | None = None
    seconds: float | None = None
    answers: list[list[int]] | None = None
    """What live decoding wrote; None where nothing was decoded (walks, offline trees)."""
    differing: list[Difference] | None = None
    """From the target alone; None where that is no question."""


@dataclass(frozen=True)
class Set:
    """What is measured on: one entry per prompt in each list."""

    answers: list[Answer]
    """Prompts, with the target's own answers or those that were given."""
    categories: list[str | None]
    names: list[str | None]
    seconds: float | None = None
    """Of the target alone."""
    agreement: float | None = None
    """Share of given answers' tokens that the target itself would have chosen."""


def evaluate(settings: Settings) -> int:
    """Measure, print, and write ``settings.json`` if asked; returns the exit code.

    Raises:
        EvalError, DrafterError, TargetError, DecodeError, DataError, ServedError: one sentence each.
    """
    settings.check()
    pair = load_both(
        settings.drafter, target=settings.target, dtype=settings.dtype, device=settings.device,
        enable_thinking=settings.enable_thinking, block_sizes=settings.block_sizes,
    )  # fmt: skip
    pairs = [pair]
    if settings.compare:
        pairs.append(load_both(settings.compare, block_sizes=settings.block_sizes, beside=pair))
    if settings.answers:
        given = _served_set(pair, settings) if settings.url else _answer_set(pair, settings)
        arms = [arm for loaded in pairs for arm in _score(loaded, given, settings)]
    else:
        given = _decode_alone(pair, settings)
        arms = [arm for loaded in pairs for arm in _decode(loaded, given, settings)]
    if not any(len(arm.rounds.streak_R) for arm in arms):
        raise EvalError("every answer has fewer than two tokens, so there is no round to measure; look at the prompts")
    report = _report(settings, pairs, given, arms)
    if settings.json is not None:  # before the tables: a closed pipe must not lose what took hours
        part = settings.json.with_name(settings.json.name + ".tmp")
        part.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(part, settings.json)
    print(tables.render(report))
    return 0


# ---- what is measured on ---------------------------------------------------------------------------------------------


def _prompts(pair: Loaded, settings: Settings) -> list[Prompt]:
    positions = getattr(pair.target.config, "max_position_embeddings", None)
    longest = pair.max_length
    if positions is not None:  # beyond them a model talks nonsense, or has no embedding at all
        longest = min(longest, positions - settings.max_new_tokens)
        if longest < 1:
            raise EvalError(
                f"--max-new-tokens {settings.max_new_tokens} leaves no room for a prompt within the target's "
                f"{positions} positions; give fewer"
            )
    return load_prompts(
        settings.prompts, pair.target.tokenizer, limit=settings.samples, max_length=longest,
        chat_template_kwargs=pair.chat_template_kwargs, vocab_size=pair.target.vocab_size,
    )  # fmt: skip


def _decode_alone(pair: Loaded, settings: Settings) -> Set:
    """The target by itself, through the same loop: the baseline of speed and the outputs to compare with."""
    prompts = _prompts(pair, settings)
    ids = [prompt.ids.tolist() for prompt in prompts]
    decoder = Decoder(pair.target, None, temperature=settings.temperature, seed=settings.seed)
    decoded, seconds = _timed(decoder, ids, settings, "target alone")
    answers = [Answer(p.origin, own, d.tokens) for p, own, d in zip(prompts, ids, decoded, strict=True)]
    return Set(answers, [p.category for p in prompts], [p.id for p in prompts], seconds)


def _served_set(pair: Loaded, settings: Settings) -> Set:
    prompts = _prompts(pair, settings)
    served = served_answers(
        settings.answers or "", prompts, pair.target.tokenizer, max_new_tokens=settings.max_new_tokens
    )
    answers = [
        Answer(p.origin, p.ids.tolist(), _to_end(a.ids, pair.target)) for p, a in zip(prompts, served, strict=True)
    ]
    given = Set(answers, [p.category for p in prompts], [p.id for p in prompts])
    return replace(given, agreement=_agreement(pair.target, answers))


def _answer_set(pair: Loaded, settings: Settings) -> Set:
    """Rows of a file whose last turn is the answer, or pre-tokenised ones whose last supervised run is."""
    file = settings.answers or ""
    data = load_data(
        [file], pair.target.tokenizer, max_length=pair.max_length, chat_template_kwargs=pair.chat_template_kwargs,
        cache_dir=None, vocab_size=pair.target.vocab_size,
    )  # fmt: skip
    log.info(summary(data.stats))
    about = {line: normalise(raw) for line, raw in read_rows(file)}
    answers, categories, names = [], [], []
    for i in range(len(data.lengths))[: settings.samples]:
        ids, mask = data.sample(i)
        inside = mask.nonzero()[0]
        end = int(inside[-1]) + 1
        gaps = (~mask[:end]).nonzero()[0]
        begin = int(gaps[-1]) + 1 if len(gaps) else 0
        row = about[int(data.origin[i, 1])]
        if begin == 0:
            raise EvalError(f"{data.describe(i)}: every token is supervised, so there is no prompt to draft after")
        answers.append(Answer(data.describe(i), ids[:begin].tolist(), _to_end(ids[begin:end].tolist(), pair.target)))
        categories.append(None if isinstance(row, Rejected) else row.category)
        names.append(None if isinstance(row, Rejected) else row.id)
    return Set(answers, categories, names, agreement=_agreement(pair.target, answers))


def _to_end(ids: list[int], target: Target) -> list[int]:
    """Up to the first end-of-text token, where decoding stops; another server may know fewer of them and go on."""
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in target.eos_ids), len(ids))]


def _agreement(target: Target, answers: Sequence[Answer]) -> float:
    if target.label_layer != "final":  # the labels of such a run are not what the target would choose
        target = Target(target.module, target.tokenizer, [0], "final")
    return target_share(target, answers, walk_batch(target.device))


# ---- the arms --------------------------------------------------------------------------------------------------------


def _decode(loaded: Loaded, given: Set, settings: Settings) -> list[Arm]:
    """Live decoding per block size, then trees: offline on the target's own answers, and live where that is right."""
    prompts = [answer.prompt for answer in given.answers]
    name = str(loaded.source.folder)
    common: dict[str, Any] = {"temperature": settings.temperature, "seed": settings.seed}
    arms = []

    def live(label: str, **options: Any) -> None:
        decoder = Decoder(loaded.target, loaded.drafter, **common, **options)
        decoded, seconds = _timed(decoder, prompts, settings, label)
        written = [d.tokens for d in decoded]
        differing = None
        if settings.temperature == 0:
            differing = differences(loaded.target, prompts, [a.answer for a in given.answers], written)
        rounds = Rounds.of_decoded(decoded, decoder.block_size)
        arms.append(Arm(name, rounds, options.get("tree_budget"), seconds, written, differing))

    for size in settings.block_sizes or [loaded.drafter.config.block_size]:
        live(f"blocks of {size}", block_size=size)
    arms += _offline_trees(loaded, given, settings)
    if not loaded.target.hybrid:
        for budget in settings.budgets:
            live(f"trees of {budget}", tree_budget=budget)
    return arms


def _score(loaded: Loaded, given: Set, settings: Settings) -> list[Arm]:
    batch = walk_batch(loaded.target.device)
    arms = []
    sizes = settings.block_sizes or [loaded.drafter.config.block_size]
    for size in tqdm(sizes, desc="walk", unit="block size", disable=None):
        rounds = walk(loaded.drafter, loaded.target, given.answers, batch.tokens, batch.anchors, size)
        arms.append(Arm(str(loaded.source.folder), rounds))
    return arms + _offline_trees(loaded, given, settings)


def _offline_trees(loaded: Loaded, given: Set, settings: Settings) -> list[Arm]:
    if not settings.budgets:
        return []
    batch = walk_batch(loaded.target.device)
    by_budget = walk_trees(loaded.drafter, loaded.target, given.answers, settings.budgets, batch)
    return [Arm(str(loaded.source.folder), rounds, budget) for budget, rounds in by_budget.items()]


def _timed(
    decoder: Decoder, prompts: Sequence[Sequence[int]], settings: Settings, label: str
) -> tuple[list[Decoded], float]:
    """Answers and seconds of wall clock, device waited for, prefill included."""
    device = decoder.target.device

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    limit = settings.max_new_tokens
    decoder.decode(prompts[: settings.batch_size], min(limit, WARM_UP_TOKENS), settings.batch_size)
    with tqdm(total=len(prompts), desc=label, unit="prompt", disable=None) as bar:

        def tick(_index: int, _answer: Decoded) -> None:
            bar.update()

        begin = now()
        decoded = decoder.decode(prompts, limit, settings.batch_size, on_answer=tick)
        return decoded, now() - begin


# ---- the document ----------------------------------------------------------------------------------------------------


def _report(settings: Settings, pairs: Sequence[Loaded], given: Set, arms: Sequence[Arm]) -> dict[str, Any]:
    """All figures as JSON values; what is not a number there is null."""
    target = pairs[0].target
    versions = {"dflash": dflash.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    alone = None
    if given.seconds is not None:
        tokens = sum(len(answer.answer) for answer in given.answers)
        alone = {"tokens": tokens, "seconds": given.seconds, "tokens_per_s": tokens / given.seconds}
    whole = {
        "versions": versions | {"python": platform.python_version()},
        "settings": asdict(settings) | {"json": str(settings.json) if settings.json else None},
        "target": {
            "model": pairs[0].target_name, "dtype": str(target.dtype).removeprefix("torch."), "hybrid": target.hybrid,
            "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
            "chat_template_kwargs": pairs[0].chat_template_kwargs,
        },
        "drafters": [
            {
                "name": str(p.source.folder), "line": p.source.line, "block_size": p.drafter.config.block_size,
                "config": p.drafter.config.to_dict(),
            }
            for p in pairs
        ],
        "alone": alone,
        "agreement": given.agreement,
        "arms": [_arm(arm, given) for arm in arms],
        "comparison": _comparison(pairs, arms),
        "prompts": [
            {
                "origin": answer.origin, "id": given.names[i], "category": given.categories[i],
                "prompt_tokens": len(answer.prompt), "answer_tokens": len(answer.answer),
                "accepted_lengths": [arm.rounds.rounds[i] for arm in arms],
            }
            for i, answer in enumerate(given.answers)
        ],
        "definitions": tables.DEFINITIONS,
    }  # fmt: skip
    clean: dict[str, Any] = _clean(whole)
    return clean


def _arm(arm: Arm, given: Set) -> dict[str, Any]:
    rounds = arm.rounds
    figures = rounds.summary()
    out: dict[str, Any] = {
        "drafter": arm.drafter,
        "decoded": arm.answers is not None,
        "block_size": rounds.block_size,
        "tree_budget": arm.tree_budget,
        **{key: value for key, value in figures.items() if not key.startswith("accepted_at")},
        "accepted_at": [figures[f"accepted_at{slot}"] for slot in range(1, rounds.block_size)],
        "by_context": rounds.by_context(),
        "by_category": rounds.by_category(given.categories),
    }
    if arm.answers is not None and arm.seconds is not None and given.seconds is not None:
        tokens = sum(map(len, arm.answers))
        base = sum(len(answer.answer) for answer in given.answers) / given.seconds
        out |= {"tokens": tokens, "seconds": arm.seconds, "tokens_per_s": tokens / arm.seconds}
        out["speedup"] = tokens / arm.seconds / base
    if arm.differing is not None:
        out["identical"] = 1 - len(arm.differing) / len(given.answers)
        out["differing"] = [
            asdict(d) | {"origin": given.answers[d.prompt].origin, "verdict": "tie" if d.tie else "fault"}
            for d in arm.differing
        ]
    return out


def _comparison(pairs: Sequence[Loaded], arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """The first drafter's arms against the second's, one by one in their order."""
    if len(pairs) < 2:
        return []
    half = len(arms) // 2
    return [
        {
            "block_sizes": [a.rounds.block_size, b.rounds.block_size],
            "tree_budget": a.tree_budget,
            "decoded": a.answers is not None,
            **asdict(paired_difference(a.rounds, b.rounds)),
        }
        for a, b in zip(arms[:half], arms[half:], strict=True)
    ]


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
