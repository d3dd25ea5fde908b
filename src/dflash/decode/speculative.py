"""Speculative decoding with a DFlash drafter: what the target alone would say, in fewer of its passes.

A round: the drafter fills the slots behind the last known token (the anchor), the target runs over the block once, and
the leading drafted tokens that it accepts are emitted together with its own next token. Greedy output is the target's
greedy output token for token. At a temperature, tokens are accepted by rejection sampling (Leviathan et al. 2023,
arXiv 2211.17192), which leaves exactly the target's distribution.

Prompts are read one by one, answers are written together: a row that finishes leaves, the next prompt enters. The host
waits for the device once per round (twice with trees, which it builds).

Shape letters: B rows, K block size, J = K - 1 drafted slots, Q tokens that a row verifies, D hidden size, F features,
V vocabulary, M candidates per slot.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.decode.ddtree import ROOT, Tree, best_first, candidates
from dflash.decode.drafter_cache import DrafterRows
from dflash.decode.sampling import judge, probabilities, sample
from dflash.model import DFlashConfig, DFlashDraftModel
from dflash.target.cache import CachedTarget, TargetRows
from dflash.target.model import Target, untouched
from dflash.target.tree import TreeMasks


class DecodeError(ValueError):
    """Drafter, target and settings that cannot decode together; one sentence."""


@dataclass(frozen=True)
class Round:
    """One verification."""

    position: int
    """Of the anchor in prompt + answer: the number of context tokens that the drafter saw."""
    streak: int
    """Drafted tokens accepted and emitted; never counts tokens past the end of the answer."""
    tokens: list[int]
    """Emitted: the accepted ones, then the target's own, unless the answer ended before it."""


@dataclass
class Decoded:
    """An answer, up to and including the first end-of-text token or to the limit."""

    tokens: list[int]
    """The first one comes from prefill, which is no round."""
    rounds: list[Round]


def check_match(drafter_config: DFlashConfig, target: Target) -> None:
    """Refuse a drafter that was not trained for this target.

    Raises:
        DecodeError: layers, hidden size, vocabulary, mask token or context layers differ; both sides are named.
    """
    pairs = [
        ("num_target_layers", drafter_config.num_target_layers, "layers", target.num_layers),
        ("hidden_size", drafter_config.hidden_size, "a hidden size of", target.hidden_size),
        ("vocab_size", drafter_config.vocab_size, "a vocabulary of", target.vocab_size),
        ("target_layer_ids", drafter_config.target_layer_ids, "context layers", target.context_layers),
    ]
    for key, drafter_has, words, target_has in pairs:
        if drafter_has is not None and drafter_has != target_has:
            raise DecodeError(
                f"the drafter's {key} is {drafter_has}, the target has {words} {target_has}; "
                f"use the target that the drafter was trained for"
            )
    if not 0 <= drafter_config.mask_token_id < target.vocab_size:
        raise DecodeError(
            f"the drafter's mask_token_id is {drafter_config.mask_token_id}, the target knows 0 to "
            f"{target.vocab_size - 1}; correct the drafter's config.json"
        )


@dataclass
class _Row:
    """A running answer."""

    index: int
    prompt_length: int
    limit: int
    decoded: Decoded
    draws: np.random.Generator

    @property
    def position(self) -> int:
        return self.prompt_length + len(self.decoded.tokens) - 1


@dataclass
class _Running:
    """The rows that advance together, and what they have seen. ``fresh`` is context that the drafter has not."""

    rows: list[_Row]
    target: TargetRows
    drafter: DrafterRows | None
    fresh_BSF: Tensor
    fresh_counts: list[int]


@dataclass
class _Verdict:
    """A verification, on the host: per row the tokens it yields (accepted ones, then the target's own) and which of
    the Q verified tokens stay."""

    tokens: list[list[int]]
    kept: list[list[int]]
    context_BQF: Tensor


class Decoder:
    """Decodes prompts with a target and a drafter.

    Args:
        target: its ``context_layers`` must be the drafter's ``target_layer_ids``.
        drafter: on the target's device, in any dtype but float16; None: the target alone through the same loop, in
            blocks of one token, which is the baseline of every speed figure.
        block_size: K, at most the drafter's own (None).
        tree_budget: verify a tree of so many nodes in place of a chain (:mod:`dflash.decode.ddtree`); greedy, dense
            targets only.
        temperature: of both models' softmax; 0 is greedy.
        seed: of sampling; each prompt draws from its own generator, whatever is decoded beside it.

    Raises:
        DecodeError: the parts do not fit. TargetError: the target's cache cannot take tokens back.
    """

    def __init__(
        self,
        target: Target,
        drafter: DFlashDraftModel | None,
        *,
        block_size: int | None = None,
        tree_budget: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.target, self.drafter, self.device = target, drafter, target.device
        self.temperature, self.seed, self.tree_budget = temperature, seed, tree_budget
        if not 0 <= temperature < float("inf"):
            raise DecodeError(f"temperature is {temperature}; give 0 (greedy) or a positive number")
        if seed < 0:
            raise DecodeError(f"seed is {seed}; give 0 or more")
        if drafter is None:
            if tree_budget is not None or block_size not in (None, 1):
                raise DecodeError("block_size and tree_budget are given but no drafter; leave them out")
            block_size = 1
        else:
            block_size = self._checked_block_size(drafter, block_size)
        self.block_size: int = block_size
        if tree_budget is not None:
            self._check_tree(tree_budget)
        if torch.float16 in (target.dtype, drafter.dtype if drafter is not None else None):
            raise DecodeError("hidden states of large models overflow in float16; use bfloat16 or float32")
        self._cached = CachedTarget(target)
        self._tree_masks = TreeMasks(self._cached) if tree_budget is not None else None

    def _checked_block_size(self, drafter: DFlashDraftModel, wanted: int | None) -> int:
        check_match(drafter.config, self.target)
        if drafter.device != self.device:
            raise DecodeError(f"the drafter is on {drafter.device}, the target's head on {self.device}; move one")
        own: int = drafter.config.block_size
        if wanted is not None and not 2 <= wanted <= own:
            raise DecodeError(f"block_size is {wanted}, the drafter was trained for blocks of {own}; give 2 to {own}")
        return wanted or own

    def _check_tree(self, budget: int) -> None:
        if budget < 1:
            raise DecodeError(f"tree_budget is {budget}; give the number of drafted nodes, at least 1")
        if self.temperature > 0:
            raise DecodeError(f"tree_budget with temperature {self.temperature}: trees are greedy; use temperature 0")
        if self.target.hybrid:
            raise DecodeError(
                "tree_budget with a hybrid target: a flat masked tree pass is wrong in linear layers; "
                "use the offline figure of dflash eval --ddtree"
            )

    # ---- the loop ----------------------------------------------------------------------------------------------------

    @untouched
    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        batch_size: int = 1,
        on_answer: Callable[[int, Decoded], None] | None = None,
    ) -> list[Decoded]:
        """Answers in the order of the prompts.

        Args:
            prompts: token ids, generation prompt included.
            max_new_tokens: per answer.
            batch_size: rows that advance together, at most.
            on_answer: called with a prompt's index and its answer as each one finishes.

        Raises:
            DecodeError: an empty prompt, an unknown token id, or a limit below 1.
        """
        self._check_prompts(prompts, max_new_tokens)
        if batch_size < 1:
            raise DecodeError(f"batch_size is {batch_size}; give at least 1")
        answers: dict[int, Decoded] = {}

        def finish(row: _Row) -> None:
            answers[row.index] = row.decoded
            if on_answer is not None:
                on_answer(row.index, row.decoded)

        running: _Running | None = None
        for index, prompt in enumerate(prompts):
            entering = self._prefill(index, prompt, max_new_tokens)
            if self._ended(entering.rows[0]):
                finish(entering.rows[0])
                continue
            running = entering if running is None else self._join(running, entering)
            while running is not None and len(running.rows) == batch_size:
                running = self._advance(running, finish)
        while running is not None:
            running = self._advance(running, finish)
        return [answers[index] for index in range(len(prompts))]

    def stream(self, prompt: Sequence[int], max_new_tokens: int) -> Generator[Round, None, None]:
        """The rounds of one answer as they come.

        The first item holds the token of prefill (position of the prompt's last token, streak 0); it is no round.
        """
        self._check_prompts([prompt], max_new_tokens)
        running: _Running | None = self._prefill(0, prompt, max_new_tokens)
        assert running is not None
        row = running.rows[0]
        yield Round(len(prompt) - 1, 0, list(row.decoded.tokens))
        while running is not None and not self._ended(row):
            running = self._advance(running, lambda row: None)
            yield row.decoded.rounds[-1]

    @untouched
    def _prefill(self, index: int, prompt: Sequence[int], limit: int) -> _Running:
        seen, done = self._cached.prefill(prompt)
        row = _Row(index, len(prompt), limit, Decoded([], []), np.random.default_rng((self.seed, index)))
        if self.temperature > 0:
            first = sample(probabilities(done.logits_BQV, self.temperature), self._uniform([row], 1))
        else:
            first = done.logits_BQV.argmax(dim=-1)
        row.decoded.tokens.append(int(first))
        drafts = None
        if self.drafter is not None:
            drafts = DrafterRows(self.drafter)
            # The whole prompt through a block of one slot, so that rows already running need not be padded to it.
            drafts.draft(self._embed(first[:, :1]), done.context_BQF, [len(prompt)])
        return _Running([row], seen, drafts, done.context_BQF[:, :0], [0])

    def _join(self, running: _Running, entering: _Running) -> _Running:
        running.rows += entering.rows
        running.target.admit(entering.target)
        if running.drafter is not None and entering.drafter is not None:
            running.drafter.admit(entering.drafter)
        running.fresh_BSF = F.pad(running.fresh_BSF, (0, 0, 0, 0, 0, len(entering.rows)))
        running.fresh_counts += entering.fresh_counts
        return running

    @untouched
    def _advance(self, running: _Running, finish: Callable[[_Row], None]) -> _Running | None:
        """One round of every row; rows that end leave. None when none is left."""
        verdict = self._round(running)
        going: list[int] = []
        for b, (row, tokens) in enumerate(zip(running.rows, verdict.tokens, strict=True)):
            emitted = self._cut(tokens, row.limit - len(row.decoded.tokens))
            row.decoded.rounds.append(Round(row.position, min(len(tokens) - 1, len(emitted)), emitted))
            row.decoded.tokens += emitted
            if self._ended(row):
                finish(row)
            else:
                going.append(b)
        if not going:
            return None
        kept = [verdict.kept[b] for b in going]
        running.target.commit(going, kept)
        if running.drafter is not None:
            running.drafter.select(going)
        running.rows = [running.rows[b] for b in going]
        running.fresh_counts = [len(columns) for columns in kept]
        width = max(running.fresh_counts)
        column_BS = np.array([[*columns] + [0] * (width - len(columns)) for columns in kept])
        running.fresh_BSF = verdict.context_BQF[self._on_device(going)[:, None], self._on_device(column_BS)]
        return running

    def _round(self, running: _Running) -> _Verdict:
        anchor_B1 = self._on_device([[row.decoded.tokens[-1]] for row in running.rows])
        if running.drafter is None or self.drafter is None:
            logits_BJV = None
        else:
            mask_BJ = anchor_B1.new_full((1, 1), self.drafter.config.mask_token_id)
            block_BK = torch.cat([anchor_B1, mask_BJ.expand(len(anchor_B1), self.block_size - 1)], dim=1)
            hidden_BKD = running.drafter.draft(self._embed(block_BK), running.fresh_BSF, running.fresh_counts)
            head = self.target.head_weight
            logits_BJV = F.linear(hidden_BKD[:, 1:].to(head.dtype), head, self.target.head_bias)
        if self._tree_masks is not None and logits_BJV is not None:
            return self._verify_trees(running, anchor_B1, logits_BJV, self._tree_masks)
        if self.temperature > 0:
            return self._verify_samples(running, anchor_B1, logits_BJV)
        ids_BK = anchor_B1 if logits_BJV is None else torch.cat([anchor_B1, logits_BJV.argmax(dim=-1)], dim=1)
        done = running.target.step(ids_BK)
        choice_BK = done.logits_BQV.argmax(dim=-1)
        hit_BJ = choice_BK[:, :-1] == ids_BK[:, 1:]
        return self._chain_verdict(hit_BJ, choice_BK, done.context_BQF)

    def _chain_verdict(self, hit_BJ: Tensor, out_BK: Tensor, context_BQF: Tensor) -> _Verdict:
        """``out_BK`` holds the accepted tokens and, right behind them, the target's own."""
        streak_B1 = hit_BJ.long().cumprod(dim=1).sum(dim=1, keepdim=True)
        read = torch.cat([streak_B1, out_BK], dim=1).tolist()
        return _Verdict(
            [line[1 : line[0] + 2] for line in read], [list(range(line[0] + 1)) for line in read], context_BQF
        )

    def _verify_samples(self, running: _Running, anchor_B1: Tensor, logits_BJV: Tensor | None) -> _Verdict:
        slots = self.block_size - 1
        draw = self._uniform(running.rows, slots + self.block_size)
        q_BJV, drafted_BJ = None, anchor_B1[:, :0]
        if logits_BJV is not None:
            q_BJV = probabilities(logits_BJV, self.temperature)
            drafted_BJ = sample(q_BJV, draw[:, :slots])
        done = running.target.step(torch.cat([anchor_B1, drafted_BJ], dim=1))
        p_BKV = probabilities(done.logits_BQV, self.temperature)
        hit_BJ, out_BK = judge(drafted_BJ, q_BJV, p_BKV, draw[:, slots:])
        return self._chain_verdict(hit_BJ, out_BK, done.context_BQF)

    def _verify_trees(
        self, running: _Running, anchor_B1: Tensor, logits_BJV: Tensor, tree_masks: TreeMasks
    ) -> _Verdict:
        log_prob_BJM, token_BJM = (x.cpu().numpy() for x in candidates(logits_BJV, self.tree_budget or 0))
        trees = [best_first(log_prob_JM, self.tree_budget or 0) for log_prob_JM in log_prob_BJM]
        # Every row has the same number of slots and candidates, hence of nodes.
        depth_BQ = np.array([[0, *tree.depth] for tree in trees])
        token_BN = np.array([t[np.array(tree.depth) - 1, tree.rank] for t, tree in zip(token_BJM, trees, strict=True)])
        ids_BQ = torch.cat([anchor_B1, self._on_device(token_BN)], dim=1)
        position_BQ = self._on_device(np.array([[row.position] for row in running.rows]) + depth_BQ)
        sees_BQQ = self._on_device(np.stack([tree.ancestors() for tree in trees]))
        mask = tree_masks.build(running.target, position_BQ, sees_BQQ)
        done = running.target.step(ids_BQ, position_BQ, mask)
        read = torch.cat([done.logits_BQV.argmax(dim=-1), ids_BQ], dim=1).tolist()
        tokens, kept = [], []
        for tree, line in zip(trees, read, strict=True):
            width = len(tree) + 1
            path = _descend(tree, line[width:], line[:width])
            tokens.append([line[column] for column in path])
            kept.append(path)
        return _Verdict(tokens, kept, done.context_BQF)

    # ---- small parts -------------------------------------------------------------------------------------------------

    def _ended(self, row: _Row) -> bool:
        tokens = row.decoded.tokens
        return len(tokens) >= row.limit or tokens[-1] in self.target.eos_ids

    def _cut(self, tokens: list[int], room: int) -> list[int]:
        """At the first end-of-text token, which stays, and at the limit."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.target.eos_ids), len(tokens))
        return tokens[: min(end, room)]

    def _embed(self, ids: Tensor) -> Tensor:
        embeds: Tensor = self.target.embed(ids)
        return embeds.to(self.device)

    def _uniform(self, rows: Sequence[_Row], count: int) -> Tensor:
        return self._on_device(np.stack([row.draws.random(count) for row in rows]))

    def _on_device(self, values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values)).to(self.device)

    def _check_prompts(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise DecodeError(f"max_new_tokens is {max_new_tokens}; give at least 1")
        for index, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise DecodeError(f"prompt {index} is empty; there is nothing to answer")
            if not 0 <= min(prompt) <= max(prompt) < self.target.vocab_size:
                raise DecodeError(
                    f"prompt {index} has token ids {min(prompt)} to {max(prompt)}, but the target knows 0 to "
                    f"{self.target.vocab_size - 1}; tokenise with the target's own tokenizer"
                )


def _descend(tree: Tree, ids: Sequence[int], choice: Sequence[int]) -> list[int]:
    """Columns of the tree (0 is the anchor) along the target's own choices."""
    child = {(parent, ids[node + 1]): node for node, parent in enumerate(tree.parent)}
    node, path = ROOT, [0]
    while (node, choice[node + 1]) in child:
        node = child[node, choice[node + 1]]
        path.append(node + 1)
    return path
