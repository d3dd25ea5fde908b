"""The target's cache over running rows: what several sequences have seen, and how rejected tokens leave it.

A pass over a block writes keys, values and recurrent states for tokens of which only some are accepted.

* Attention layers keep every column, sliding ones too (the model's mask hides what left the window), so that rejected
  columns can be dropped. Rows are right-aligned and contiguous: column c of C holds position ``length - C + c``.
* Stateful layers (linear attention, convolutions) cannot be cropped. Their states are copied before the pass, the
  inputs of their mixers are recorded during it, and after acceptance the mixers alone run again over the accepted
  inputs: everything is causal, so a prefix's inputs are the same. That reads a fifth of the weights that a second
  pass of the target would.

Shape letters: B rows, C cached columns, Q tokens of a pass, W columns kept, H heads, d head size, V vocabulary,
F = L*D context features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from dflash.target.load import TargetError
from dflash.target.model import SHAPE_FREE_ATTENTION, Target, untouched

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "past_key_value")
STATES = ("conv_states", "recurrent_states")


def right_aligned(keep_BC: Tensor, width: int) -> Tensor:
    """int64 [B, W]: for each row its kept columns, in order and flush right; what fills the left is arbitrary."""
    # A stable sort of booleans is the order wanted: dropped columns first, then the kept ones as they were.
    return keep_BC.to(torch.int8).argsort(dim=1, stable=True)[:, keep_BC.shape[1] - width :]


def take_columns(x_BHCd: Tensor, index_BW: Tensor) -> Tensor:
    """[B, H, W, d]: columns of each row by index."""
    index = index_BW.to(x_BHCd.device)[:, None, :, None]
    return x_BHCd.gather(2, index.expand(-1, x_BHCd.shape[1], -1, x_BHCd.shape[3]))


def join_rows(first: Tensor, second: Tensor) -> Tensor:
    """Rows of two [B, H, C, d] under each other, the shorter one padded on the left."""
    width = max(first.shape[2], second.shape[2])
    return torch.cat([F.pad(x, (0, 0, width - x.shape[2], 0)) for x in (first, second)])


class Pass(NamedTuple):
    """What a pass of the target gives: logits [B, Q, V] as its own ``generate`` reads them, features [B, Q, F]."""

    logits_BQV: Tensor
    context_BQF: Tensor


class CachedTarget:
    """A target that can take tokens back.

    Construction finds the stateful mixers and runs a few tokens in pieces, with rejected ones between them and with a
    second row beside them, and refuses a model whose logits then differ from those of one pass.

    Raises:
        TargetError: a layer's cache is of a kind that is not understood, or the test fails.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.device = target, target.device
        self.name = f"target.model: {type(target.module).__name__}"
        taken = inspect.signature(target.module.forward).parameters
        self.cache_name = next((name for name in CACHE_NAMES if name in taken), None)
        if self.cache_name is None or "position_ids" not in taken:
            raise TargetError(
                f"{self.name} takes no cache or no position_ids, so it cannot be decoded with; name another"
            )
        self.keeps_logits = "logits_to_keep" in taken
        self.mixers = {
            i: self._mixer(i) for i, layer in enumerate(self.empty_cache().layers) if hasattr(layer, STATES[0])
        }
        if target.hybrid and not self.mixers:
            raise TargetError(f"{self.name} keeps its states elsewhere than in its cache; no way to take tokens back")
        self._self_test()

    def empty_cache(self) -> Any:
        """As the model itself would build it, but with sliding layers that forget nothing."""
        cache: Any = DynamicCache(config=self.target.config)
        for i, layer in enumerate(cache.layers):
            kind = type(layer)
            if kind in (DynamicLayer, DynamicSlidingWindowLayer):
                cache.layers[i] = DynamicLayer()
            elif kind.__name__ != "LinearAttentionLayer" or not all(
                isinstance(getattr(layer, name, None), dict) for name in STATES
            ):
                raise TargetError(
                    f"{self.name}: layer {i} caches in a {kind.__name__}, from which tokens cannot be taken back; a "
                    f"hybrid target needs layers that are either attention or linear, and transformers >= 5.24"
                )
        return cache

    def _mixer(self, index: int) -> nn.Module:
        layer = self.target.layers[index]
        found = [
            child
            for child in layer.children()
            if any(name in inspect.signature(child.forward).parameters for name in CACHE_NAMES)
        ]
        if len(found) != 1:
            raise TargetError(f"{self.name}: layer {index} has {len(found)} parts that take a cache; one was expected")
        return found[0]

    def prefill(self, ids: Sequence[int]) -> tuple[TargetRows, Pass]:
        """One sequence from its first token on, alone: its numbers depend on no neighbour and no padding.

        The pass's logits are those of the last token only, [1, 1, V].
        """
        rows = TargetRows(self)
        done = rows.step(torch.tensor([list(ids)], device=self.device))
        rows.commit([0], [range(len(ids))])
        return rows, Pass(done.logits_BQV[:, -1:], done.context_BQF)

    @untouched
    def _self_test(self) -> None:
        """Pieces, rejections and a neighbour of another length against one pass."""
        ids = torch.linspace(0, self.target.vocab_size - 1, 7, device=self.device).long()
        whole_SV = self.target.module(input_ids=ids[None], use_cache=False).logits[0].float()
        rows, first = self.prefill(ids[:3].tolist())
        rows.step(torch.stack([ids[3], ids[0], ids[1]])[None])
        rows.commit([0], [[0]])
        neighbour, _ = self.prefill(ids[:2].tolist())
        rows.admit(neighbour)
        both = rows.step(torch.stack([ids[4:6], ids[2:4]])).logits_BQV
        rows.commit([0, 1], [[0, 1], [0]])
        last = rows.step(torch.stack([ids[6:7], ids[3:4]])).logits_BQV
        got = torch.cat([first.logits_BQV[0], both[0], last[0], both[1], last[1]]).float()
        want = whole_SV[[2, 4, 5, 6, 2, 3, 3]]
        # Rounding differs with shapes, by a per cent or two in bf16; a state that was lost or kept differs by far more.
        error = float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
        if not error <= torch.finfo(self.target.dtype).eps ** 0.5:
            raise TargetError(
                f"{self.name} gives other logits in pieces than in one pass (relative error {error:.2g}), so rejected "
                f"tokens would leave traces; with a hybrid target, use transformers >= 5.24"
            )


class TargetRows:
    """Cache of B sequences that advance together. :meth:`step` and :meth:`commit` alternate."""

    def __init__(self, owner: CachedTarget) -> None:
        self.owner, self.device = owner, owner.device
        self.cache = owner.empty_cache()
        self.lengths: list[int] = []
        """Tokens that each row holds."""
        self._width = 0
        self._before: dict[int, list[Tensor]] = {}
        self._inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    @untouched
    def step(self, ids_BQ: Tensor, position_BQ: Tensor | None = None, mask: Any = None) -> Pass:
        """Run Q more tokens of every row; they stay until :meth:`commit` says which.

        Args:
            ids_BQ: token ids.
            position_BQ: their positions; None: the next ones.
            mask: prepared attention mask(s) over C + Q columns, as the model takes them; None: causal.
        """
        target, self._width = self.owner.target, ids_BQ.shape[1]
        lengths = self.lengths or [0]
        if position_BQ is None:
            start_B = torch.tensor(lengths, device=self.device)
            position_BQ = start_B[:, None] + torch.arange(self._width, device=self.device)
        if mask is None and min(lengths) < max(lengths):
            mask = torch.cat([self.valid(), torch.ones_like(ids_BQ, dtype=torch.bool)], dim=1).long()
        extra: dict[str, Any] = {str(self.owner.cache_name): self.cache, "use_cache": True}
        if not self.lengths and self.owner.keeps_logits:
            extra["logits_to_keep"] = 1  # all logits of a long prompt would be gigabytes
        tapped: dict[int, Tensor] = {}

        def sink(layer: int) -> Callable[[Tensor], None]:
            return lambda hidden_BQD: tapped.update({layer: hidden_BQD})

        sinks = {layer: sink(layer) for layer in target.context_layers}
        with target.taps(sinks), self._recorded(), sdpa_kernel(SHAPE_FREE_ATTENTION):
            logits = target.module(input_ids=ids_BQ, attention_mask=mask, position_ids=position_BQ, **extra).logits
        context = torch.cat([tapped[layer].to(self.device) for layer in target.context_layers], dim=-1)
        return Pass(logits, context)

    def valid(self) -> Tensor:
        """bool [B, C]: columns that hold a token of their row."""
        width = max(self.lengths)
        empty_B = torch.tensor([width - length for length in self.lengths], device=self.device)
        return torch.arange(width, device=self.device) >= empty_B[:, None]

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Copy the states and note the mixers' inputs, where the pass may have to be taken back in part."""
        self._before, self._inputs = {}, {}
        handles = []
        if self.lengths and self._width > 1:
            for i, mixer in self.owner.mixers.items():
                # Copies: the model writes its states in place.
                self._before[i] = [state.clone() for state in self._states(i)]

                def note(_module: Any, args: Any, kwargs: Any, i: int = i) -> None:
                    self._inputs[i] = (args, kwargs)

                handles.append(mixer.register_forward_pre_hook(note, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @untouched
    def commit(self, rows: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
        """Keep some rows, and of the last pass some tokens of each; all else is as if it had never been seen.

        Args:
            rows: indices of the rows that stay, ascending.
            kept: for each of them which of the pass's Q tokens stay, ascending; at least one.
        """
        if not rows:
            self.cache, self.lengths = self.owner.empty_cache(), []
            return
        counts, before = [len(columns) for columns in kept], self.lengths or [0]
        self._roll_back_states(rows, counts)
        keep_BQ = np.zeros((len(rows), self._width), dtype=bool)
        for i, columns in enumerate(kept):
            keep_BQ[i, list(columns)] = True
        index, chosen = None, torch.tensor(list(rows), device=self.device)
        lengths = [before[row] + count for row, count in zip(rows, counts, strict=True)]
        # Where every row and column stays nothing moves: the target alone would else copy its cache once per token, and
        # a drafter look faster beside it than it is.
        stays = len(rows) == len(before) and bool(keep_BQ.all())
        if not stays and (len(before) > 1 or not keep_BQ[:, : counts[0]].all()):
            block_BQ = torch.from_numpy(keep_BQ).to(self.device)
            valid_BC = self.valid()[chosen]
            index = right_aligned(torch.cat([valid_BC, block_BQ], dim=1), max(lengths))
        for layer in self._attention():
            for name in ("keys", "values"):
                x = getattr(layer, name)
                if index is None:
                    x = x[:, :, : max(lengths)]
                else:
                    x = take_columns(x if len(rows) == len(before) else x[chosen.to(x.device)], index)
                setattr(layer, name, x)
        self.lengths = lengths
        self._before, self._inputs = {}, {}

    @untouched
    def admit(self, other: TargetRows) -> None:
        """Take in the rows of another cache, below one's own; the other one is used up."""
        if not self.lengths:
            self.cache, self.lengths = other.cache, other.lengths
            return
        for layer, theirs in zip(self._attention(), other._attention(), strict=True):
            layer.keys = join_rows(layer.keys, theirs.keys)
            layer.values = join_rows(layer.values, theirs.values)
        for i in self.owner.mixers:
            pairs = zip(self._states(i), other._states(i), strict=True)
            self._set_states(i, [torch.cat(pair) for pair in pairs])
        self.lengths = self.lengths + other.lengths

    # ---- layers --------------------------------------------------------------------------------------------------

    def _attention(self) -> list[Any]:
        return [layer for layer in self.cache.layers if isinstance(layer, DynamicLayer)]

    def _states(self, index: int) -> list[Tensor]:
        layer = self.cache.layers[index]
        return [state for name in STATES for state in getattr(layer, name).values() if state is not None]

    def _set_states(self, index: int, states: Sequence[Tensor]) -> None:
        new = iter(states)
        for name in STATES:
            held = getattr(self.cache.layers[index], name)
            for key, state in held.items():
                if state is not None:
                    held[key] = next(new)

    def _roll_back_states(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        if len(rows) == max(len(self.lengths), 1) and {*counts} == {self._width}:
            return  # every row stays, and all of the pass
        for i, mixer in self.owner.mixers.items():
            done = [state[torch.tensor(list(rows), device=state.device)] for state in self._states(i)]
            for count in sorted(set(counts) - {self._width}):
                members = [b for b, own in enumerate(counts) if own == count]
                source = torch.tensor([rows[b] for b in members], device=done[0].device)
                self._set_states(i, [state[source] for state in self._before[i]])
                args, kwargs = self._inputs[i]
                kwargs = dict(kwargs)
                if "hidden_states" in kwargs:
                    kwargs["hidden_states"] = kwargs["hidden_states"][source, :count]
                else:
                    args = (args[0][source, :count], *args[1:])
                if "attention_mask" in kwargs:
                    kwargs["attention_mask"] = None  # padding lies in cached columns only, which it does not read
                mixer(*args, **kwargs)
                for state, replayed in zip(done, self._states(i), strict=True):
                    state[torch.tensor(members, device=state.device)] = replayed
            self._set_states(i, done)
