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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash.metrics import streaks
from dflash.model import DFlashDraftModel, slot_weights
from dflash.score import anchor_rows, padded_tokens, score_blocks

if TYPE_CHECKING:
    from dflash.target.model import Target


@dataclass
class Answer:
    """One held-out prompt and the target's greedy answer to it, as token ids."""

    origin: str
    prompt: list[int]
    answer: list[int]


@dataclass
class Walk:
    """Accepted length of every round, prompt by prompt."""

    rounds: list[list[int]]
    block_size: int

    def summary(self) -> dict[str, Any]:
        """``accepted_length`` pooled over rounds and ``accepted_length_per_prompt``, the mean of the prompts' own
        means.

        Both count the bonus token. ``accepted_at{k}`` is the share of rounds in which slot k was accepted.
        """
        pooled = np.array([length for rounds in self.rounds for length in rounds], dtype=np.float64)
        own = [float(np.mean(rounds)) for rounds in self.rounds if rounds]
        out: dict[str, Any] = {
            "accepted_length": float(pooled.mean()) if pooled.size else float("nan"),
            "accepted_length_per_prompt": float(np.mean(own)) if own else float("nan"),
            "rounds": int(pooled.size),
            "prompts": len(own),
        }
        for slot in range(1, self.block_size):
            out[f"accepted_at{slot}"] = float((pooled > slot).mean()) if pooled.size else float("nan")
        return out


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


@torch.no_grad()
def walk(
    drafter: DFlashDraftModel, target: Target, answers: Sequence[Answer], tokens_per_batch: int, anchors_per_batch: int
) -> Walk:
    """Exact accepted lengths of ``drafter`` on ``answers``; run it under the autocast that training runs under."""
    device = target.device
    weight = slot_weights(drafter.config.block_size, gamma=1.0, device=device)
    streak_at: list[np.ndarray] = [np.zeros(len(a.prompt) + len(a.answer), dtype=np.int64) for a in answers]
    lengths = [len(a.prompt) + len(a.answer) for a in answers]
    for group in _groups(lengths, tokens_per_batch):
        features = target.capture(
            [np.array(answers[i].prompt + answers[i].answer) for i in group],
            [np.array([False] * len(answers[i].prompt) + [True] * len(answers[i].answer)) for i in group],
            group,
            padded_tokens(max(tokens_per_batch, sum(lengths[i] for i in group)), device),
        )
        # Labels are the answer's own tokens, whatever target.label_layer trains on: a server verifies with the model.
        next_ids = torch.cat([features.ids[1:], features.ids[:1]])
        features = replace(features, labels=next_ids.int())
        rows = [
            row
            for b, i in enumerate(group)
            for row in range(features.bounds[b] + len(answers[i].prompt), features.bounds[b + 1] - 1)
        ]
        for start in range(0, len(rows), anchors_per_batch):
            part = rows[start : start + anchors_per_batch]
            anchors = anchor_rows(np.array(part), anchors_per_batch, device)
            scored = score_blocks(drafter, target, features, features.context, anchors, weight)
            run = streaks(scored.rank_NJ == 0, scored.blocks.on_path_NJ).tolist()
            for row, length in zip(part, run, strict=False):  # padded blocks come last
                b = int(np.searchsorted(features.bounds, row, side="right")) - 1
                streak_at[group[b]][row - features.bounds[b]] = length
    return Walk(
        [accept_points(s, len(a.prompt)) for s, a in zip(streak_at, answers, strict=True)], drafter.config.block_size
    )


def accept_points(streak_at: np.ndarray, prompt_length: int) -> list[int]:
    """Accepted length of each round on one answer, from the streak of the block at every position."""
    lengths, position = [], prompt_length
    while position < len(streak_at) - 1:
        lengths.append(int(streak_at[position]) + 1)
        position += lengths[-1]
    return lengths


def _groups(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
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
