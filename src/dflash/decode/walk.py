"""Accepted length by the exact walk.

On the target's own greedy answer, whose tokens are the target's choices, the block at every position is drafted in one
pass. Then the walk goes through the answer as decoding would: the anchor is the first answer token (prefill yields it,
it is no round); a round accepts the leading run of drafted tokens that equal the target's choice, plus the target's own
next token, and the next anchor is that token. Accepted length is streak + 1; every round counts, the one that ends in
end-of-text or the limit too. Scored with the training code itself (:func:`dflash.score.score_blocks`), so it cannot
disagree with training about blocks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from dflash.decode.ddtree import candidates, tree_streaks
from dflash.decode.rounds import Rounds
from dflash.metrics import streaks
from dflash.model import DFlashDraftModel
from dflash.score import anchor_rows, draft_blocks, padded_tokens, score_blocks

if TYPE_CHECKING:
    from dflash.target.features import TargetFeatures
    from dflash.target.model import Target

LOGITS_BYTES = 1 << 28
"""The drafter's fp32 logits in memory at once while trees are made."""


@dataclass
class Answer:
    """One held-out prompt and the target's greedy answer to it, as token ids."""

    origin: str
    prompt: list[int]
    answer: list[int]


def load_or_generate(
    path: Path, target: Target, prompts: Sequence[Any], max_new_tokens: int, batch_size: int
) -> list[Answer]:
    """The target's greedy answers to ``prompts``: generated once, then kept in ``path`` (JSON lines).

    The first line says what they answer (prompts, length limit, weights); where that differs they are generated anew.
    Answers of fewer than two tokens are kept, but give no round.
    """
    asked = [prompt.ids.tolist() for prompt in prompts]
    made_for = {"prompts": asked, "max_new_tokens": max_new_tokens, "target": target.fingerprint}
    head = json.dumps({"made_for": hashlib.sha256(json.dumps(made_for).encode()).hexdigest()})
    kept = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    if kept[:1] != [head] or len(kept) != 1 + len(asked):
        answers = target.greedy(asked, max_new_tokens, batch_size)
        made = [Answer(prompt.origin, ids, a) for prompt, ids, a in zip(prompts, asked, answers, strict=True)]
        kept = [head, *(json.dumps(asdict(answer)) for answer in made)]
        part = path.with_suffix(".tmp")
        part.write_text("\n".join(kept) + "\n", encoding="utf-8")
        os.replace(part, path)
    return [Answer(**json.loads(line)) for line in kept[1:]]


@dataclass(frozen=True)
class WalkBatch:
    """How much of the walk is on the device at once: packed tokens whose features are captured together, and blocks."""

    tokens: int
    anchors: int


def walk_batch(device: torch.device) -> WalkBatch:
    """For evaluation outside a run. A CPU holds dense masks of blocks against tokens, so it takes less at once."""
    return WalkBatch(16384, 512) if device.type == "cuda" else WalkBatch(2048, 64)


@torch.no_grad()
def walk(
    drafter: DFlashDraftModel,
    target: Target,
    answers: Sequence[Answer],
    tokens_per_batch: int,
    anchors_per_batch: int,
    block_size: int | None = None,
) -> Rounds:
    """Exact accepted lengths of ``drafter`` on ``answers``; run it under the autocast that training runs under.

    Args:
        block_size: K; None: the drafter's own.
    """
    size = block_size or drafter.config.block_size
    streak_at: list[np.ndarray] = [np.zeros(len(a.prompt) + len(a.answer), dtype=np.int64) for a in answers]
    for features, _, parts in _blocks(target, answers, tokens_per_batch, anchors_per_batch):
        for anchors, places in parts:
            scored = score_blocks(drafter, target, features, features.context, anchors, size)
            run = streaks(scored.rank_NJ == 0, scored.blocks.on_path_NJ).tolist()
            for (i, position), length in zip(places, run, strict=False):  # padded blocks come last
                streak_at[i][position] = length
    return Rounds.collect([accept_points(s, len(a.prompt)) for s, a in zip(streak_at, answers, strict=True)], size)


@torch.no_grad()
def walk_trees(
    drafter: DFlashDraftModel,
    target: Target,
    answers: Sequence[Answer],
    budgets: Sequence[int],
    batch: WalkBatch,
    block_size: int | None = None,
) -> dict[int, Rounds]:
    """The walk with a draft tree in place of a chain (DDTree, arXiv 2604.12989), for every node budget at once.

    The tree of ``n`` nodes is the ``n`` most probable prefixes under the drafter's own distributions per slot; a round
    accepts as deep as the target's path lies inside it. No tree pass is made, so this is exact on hybrid targets too.
    Each budget walks its own accept points; one best-first run at a position serves all that come by.
    """
    size = block_size or drafter.config.block_size
    anchors = max(1, min(batch.anchors, LOGITS_BYTES // (4 * (size - 1) * target.vocab_size)))
    rounds: dict[int, list[list[tuple[int, int]]]] = {budget: [[] for _ in answers] for budget in budgets}
    due = {budget: [len(answer.prompt) for answer in answers] for budget in budgets}  # position of its next round
    with tqdm(total=len(answers), desc="draft trees", unit="answer", disable=None) as bar:
        for features, group, parts in _blocks(target, answers, batch.tokens, anchors):
            for anchors_N, places in parts:
                blocks, slots_NJD = draft_blocks(drafter, target, features, features.context, anchors_N, size)
                used = slice(len(places))  # padded blocks come last
                logits = F.linear(slots_NJD[used], target.head_weight, target.head_bias)
                # Only the most probable tokens leave the device, never [positions, K - 1, V].
                log_prob, ids = candidates(logits, max(budgets))
                match = (ids == blocks.labels_NJ[used, :, None]) & blocks.counted_NJ[used, :, None]
                rank = torch.where(match.any(dim=-1), match.int().argmax(dim=-1), -1).tolist()
                for (i, position), lp_JM, rank_J in zip(places, log_prob.cpu().numpy(), rank, strict=True):
                    here = [budget for budget in budgets if due[budget][i] == position]
                    for budget, streak in zip(here, tree_streaks(lp_JM, rank_J, here) if here else [], strict=True):
                        rounds[budget][i].append((position, streak))
                        due[budget][i] += streak + 1
            bar.update(len(group))
    return {budget: Rounds.collect(listed, size) for budget, listed in rounds.items()}


def target_share(target: Target, answers: Sequence[Answer], batch: WalkBatch) -> float:
    """Share of the answers' tokens (the first of each left out) that the target itself would have chosen there.

    1 on the target's own greedy answers, ties aside: only on those is the walk what decoding does.
    """
    same = total = 0
    for features, group in _captured(target, answers, batch.tokens):
        rows, _ = _anchor_places(features, group, answers)
        if rows:
            at = torch.tensor(rows, device=target.device)
            same += int((features.labels[at] == features.ids[at + 1]).sum())
            total += len(rows)
    return same / total if total else float("nan")


def accept_points(streak_at: np.ndarray, prompt_length: int) -> list[tuple[int, int]]:
    """(position, streak) of each round on one answer, from the streak of the block at every position."""
    rounds, position = [], prompt_length
    while position < len(streak_at) - 1:
        rounds.append((position, int(streak_at[position])))
        position += rounds[-1][1] + 1
    return rounds


def _captured(
    target: Target, answers: Sequence[Answer], tokens_per_batch: int
) -> Iterator[tuple[TargetFeatures, list[int]]]:
    """Features of the answers, as many at a time as the budget holds, and which answers those are."""
    lengths = [len(a.prompt) + len(a.answer) for a in answers]
    for group in answer_groups(lengths, tokens_per_batch):
        features = target.capture(
            [np.array(answers[i].prompt + answers[i].answer) for i in group],
            [np.array([False] * len(answers[i].prompt) + [True] * len(answers[i].answer)) for i in group],
            group,
            padded_tokens(max(tokens_per_batch, sum(lengths[i] for i in group)), target.device),
        )
        yield features, group


def _anchor_places(
    features: TargetFeatures, group: Sequence[int], answers: Sequence[Answer]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Rows of the batch at which a round can begin, and what they are: (answer, position in it)."""
    places = [
        (b, i, position)
        for b, i in enumerate(group)
        for position in range(len(answers[i].prompt), len(answers[i].prompt) + len(answers[i].answer) - 1)
    ]
    return [features.bounds[b] + p for b, _, p in places], [(i, p) for _, i, p in places]


def _blocks(
    target: Target, answers: Sequence[Answer], tokens_per_batch: int, anchors_per_batch: int
) -> Iterator[tuple[TargetFeatures, list[int], Iterator[tuple[Tensor, list[tuple[int, int]]]]]]:
    """Per batch of answers: features, which answers, and the anchors of every position in parts (padded ones last)."""
    for captured, group in _captured(target, answers, tokens_per_batch):
        # Labels are the answer's own tokens, whatever target.label_layer trains on: a server verifies with the model.
        next_ids = torch.cat([captured.ids[1:], captured.ids[:1]])
        features = replace(captured, labels=next_ids.int())
        rows, places = _anchor_places(features, group, answers)

        def parts(
            rows: list[int] = rows, places: list[tuple[int, int]] = places
        ) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
            for start in range(0, len(rows), anchors_per_batch):
                part = slice(start, start + anchors_per_batch)
                yield anchor_rows(np.array(rows[part]), anchors_per_batch, target.device), places[part]

        yield features, group, parts()


def answer_groups(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Indices in groups whose tokens fit the budget (at least one each); the longest first, so that rows pad little."""
    groups: list[list[int]] = []
    budget = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not groups or lengths[i] > budget:
            groups.append([])
            budget = tokens_per_batch
        groups[-1].append(i)
        budget -= lengths[i]
    return groups
