"""One record of verification rounds, and every figure that is made from it.

Whoever decodes (the exact walk, live decoding, offline trees) leaves the same record, so the figures cannot differ in
what they count. A round's accepted length is streak + 1: the drafted tokens that were accepted and the target's own
next token (the bonus), also in the round that ends in end-of-text or at the length limit. Prefill is no round.

Shape letters: R rounds, P prompts, K block size, E resamples of the bootstrap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dflash.decode.speculative import Decoded

RESAMPLES = 10_000
_RESAMPLES_AT_ONCE = 500
SMALLEST_BUCKET = 32
"""Contexts below this share one bucket: system prompt and question alone are longer on most sets."""

DEFINITIONS = {
    "accepted_length": "tokens per verification round, bonus token included: sum over all rounds / number of rounds",
    "accepted_length_per_prompt": "mean over prompts of each prompt's own mean; prompts without a round are left out",
    "rounds": "verification rounds: every one counts, the last of an answer too; prefill is none",
    "prompts": "prompts whose answer has at least one round (two tokens)",
    "accepted_at": "share of all rounds in which slot k, and so every slot before it, was accepted",
    "by_context": "accepted length pooled over the rounds whose anchor has so many tokens before it",
    "by_category": "accepted length pooled over the rounds of the prompts of one category",
    "difference": "pooled accepted length of the drafter minus that of the other one, on the same prompts",
    "interval": f"95 % percentile bootstrap: prompts resampled {RESAMPLES:,} times, both pooled over the same ones",
}
"""What each figure is, by its name in tables, JSON and metrics lines."""


@dataclass(frozen=True, eq=False)
class Rounds:
    """Every verification round of a set of prompts, in the order of the prompts and then of decoding."""

    prompt_R: np.ndarray
    """int64: index of the prompt."""
    position_R: np.ndarray
    """int64: of the anchor in prompt + answer, which is the context length that the drafter saw."""
    streak_R: np.ndarray
    """int64: drafted tokens accepted."""
    block_size: int
    prompts: int
    """Number of prompts, those without a round included."""

    @classmethod
    def collect(cls, by_prompt: Iterable[Iterable[tuple[int, int]]], block_size: int) -> Rounds:
        """From (position, streak) of each prompt's rounds."""
        listed = [list(rounds) for rounds in by_prompt]
        table = np.array([(p, *one) for p, rounds in enumerate(listed) for one in rounds], dtype=np.int64)
        prompt, position, streak = table.reshape(-1, 3).T
        return cls(prompt, position, streak, block_size, len(listed))

    @classmethod
    def of_decoded(cls, decoded: Sequence[Decoded], block_size: int) -> Rounds:
        """Of live decoding."""
        return cls.collect([[(r.position, r.streak) for r in one.rounds] for one in decoded], block_size)

    @property
    def length_R(self) -> np.ndarray:
        """int64: accepted length of each round."""
        return self.streak_R + 1

    @property
    def rounds(self) -> list[list[int]]:
        """Accepted lengths, prompt by prompt."""
        ends = np.cumsum(np.bincount(self.prompt_R, minlength=self.prompts))
        return [part.tolist() for part in np.split(self.length_R, ends[:-1])] if self.prompts else []

    def pooled(self, chosen_R: np.ndarray | None = None) -> float:
        """Accepted length over all rounds, or over the chosen ones (bool [R]); nan without any."""
        length = self.length_R if chosen_R is None else self.length_R[chosen_R]
        return float(length.mean()) if length.size else float("nan")

    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """fp64 [P] each: tokens that each prompt's rounds emitted, and its number of rounds."""
        tokens = np.bincount(self.prompt_R, weights=self.length_R, minlength=self.prompts)
        return tokens, np.bincount(self.prompt_R, minlength=self.prompts).astype(np.float64)

    def summary(self) -> dict[str, Any]:
        """The figures of a metrics line, defined in :data:`DEFINITIONS`; ``accepted_at{k}`` for k = 1 .. K-1."""
        tokens, count = self.sums()
        some = count > 0
        out: dict[str, Any] = {
            "accepted_length": self.pooled(),
            "accepted_length_per_prompt": float((tokens[some] / count[some]).mean()) if some.any() else float("nan"),
            "rounds": len(self.streak_R),
            "prompts": int(some.sum()),
        }
        for slot in range(1, self.block_size):
            hit = self.streak_R >= slot
            out[f"accepted_at{slot}"] = float(hit.mean()) if hit.size else float("nan")
        return out

    def by_context(self) -> list[dict[str, Any]]:
        """Pooled accepted length by context length, in buckets that double; only those that occur.

        Returns:
            ``at_least`` and ``below`` in tokens, ``rounds``, ``accepted_length``, shortest context first.
        """
        bucket_R = np.maximum(self.position_R, 1) // SMALLEST_BUCKET
        power_R = np.frexp(bucket_R.astype(np.float64))[1]  # 0 below the smallest, then one more for each doubling
        out = []
        for power in np.unique(power_R).tolist():
            chosen = power_R == power
            out.append(
                {
                    "at_least": SMALLEST_BUCKET << (power - 1) if power else 0,
                    "below": SMALLEST_BUCKET << power,
                    "rounds": int(chosen.sum()),
                    "accepted_length": self.pooled(chosen),
                }
            )
        return out

    def by_category(self, categories: Sequence[str | None]) -> list[dict[str, Any]]:
        """Pooled accepted length by the category of the prompt, in the order in which categories first occur.

        Args:
            categories: one per prompt; None where a prompt has none. Without any the list is empty.
        """
        if all(name is None for name in categories):
            return []
        named = ["none" if name is None else name for name in categories]
        out = []
        for name in dict.fromkeys(named):
            chosen = np.array([other == name for other in named], dtype=bool)[self.prompt_R]
            out.append({"category": name, "rounds": int(chosen.sum()), "accepted_length": self.pooled(chosen)})
        return out


@dataclass(frozen=True)
class Difference:
    """Of two arms on the same prompts; ``interval`` is None where one prompt leaves nothing to resample."""

    difference: float
    interval: tuple[float, float] | None
    prompts: int
    resamples: int


def paired_difference(first: Rounds, second: Rounds, seed: int = 0) -> Difference:
    """Pooled accepted length of ``first`` minus that of ``second``, with a 95 % bootstrap interval.

    Prompts are resampled, not rounds: the rounds of one answer are not independent. Both arms are pooled over the same
    resampled prompts, so what makes a prompt easy for both cancels out. Prompts without a round in one of them are left
    out.

    Raises:
        ValueError: the two are not over equally many prompts.
    """
    if first.prompts != second.prompts:
        raise ValueError(f"{first.prompts} prompts against {second.prompts}; a paired difference needs the same ones")
    (tokens_a, count_a), (tokens_b, count_b) = first.sums(), second.sums()
    both = (count_a > 0) & (count_b > 0)
    arms = np.stack([tokens_a, count_a, tokens_b, count_b])[:, both]  # [4, P]
    prompts = arms.shape[1]
    if not prompts:
        return Difference(float("nan"), None, 0, 0)

    def pooled(weight_EP: np.ndarray) -> np.ndarray:
        sums_E4 = weight_EP @ arms.T
        return sums_E4[:, 0] / sums_E4[:, 1] - sums_E4[:, 2] / sums_E4[:, 3]

    whole = float(pooled(np.ones((1, prompts)))[0])
    if prompts < 2:
        return Difference(whole, None, prompts, 0)
    g = np.random.default_rng(seed)
    drawn = []
    for _ in range(RESAMPLES // _RESAMPLES_AT_ONCE):
        weight_EP = g.multinomial(prompts, np.full(prompts, 1 / prompts), size=_RESAMPLES_AT_ONCE)
        drawn.append(pooled(weight_EP.astype(np.float64)))
    low, high = np.percentile(np.concatenate(drawn), [2.5, 97.5]).tolist()
    return Difference(whole, (low, high), prompts, RESAMPLES)
