"""The elementwise parts of a target, compiled: norms, gated MLPs and short convolutions, each in one visit to memory.

Plain transformers spends a third of a 27B hybrid target's forward pass on them: a norm is seven kernels, and the
convolution of a linear layer is transposed for PyTorch's, which is made for images. Matrix products, attention and the
chunked recurrence stay whose they are. Compiling whole layers would save little more and compiles each layer anew.

Shape letters: B sequences, S tokens, C channels, W taps of the convolution.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from dflash import fast
from dflash.target.load import TargetError

if TYPE_CHECKING:
    from dflash.target.model import Target

log = logging.getLogger("dflash")

PLAIN = "its norms, MLPs and convolutions run as transformers has them, some 20 % slower"
CONVOLUTION = "causal_conv1d_fn"
"""What transformers' modelling files call the short convolution of a linear layer."""


def short_convolution(
    hidden_BCS: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Depthwise causal convolution over S with the activation after it, as a sum of W shifted products.

    Drop-in for the function of transformers' modelling files. Rows are whole documents here, so what else it may be
    given there (sequence ids of packed rows) is never there to be heeded.
    """
    width, length = weight_CW.shape[-1], hidden_BCS.shape[-1]
    padded = F.pad(hidden_BCS, (width - 1, 0))
    out = padded[..., :length].float() * weight_CW[:, 0, None].float()
    for tap in range(1, width):
        out = out + padded[..., tap : tap + length].float() * weight_CW[:, tap, None].float()
    if bias_C is not None:
        out = out + bias_C[:, None].float()
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_BCS.dtype)


class CompiledParts:
    """Compiled stand-ins for parts of a decoder, in force while :meth:`in_place` lasts.

    Only capture uses them: generation passes one token at a time, for which everything would be compiled once more.

    Args:
        decoder: its layers and final norm. Weights stay its own; parts that accelerate has wrapped are left alone.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.forwards: dict[nn.Module, Callable[..., Tensor]] = {
            part: _by_rows(torch.compile(part.forward, dynamic=True))
            for part in decoder.modules()
            if (_is_norm(part) or _is_mlp(part)) and "forward" not in vars(part)
        }
        self.convolution = torch.compile(short_convolution, dynamic=True)
        homes = {type(part).__module__ for part in decoder.modules()}
        own = importlib.util.find_spec("causal_conv1d") is None  # its kernel is as good as ours
        self.homes = [sys.modules[home] for home in sorted(homes) if own and hasattr(sys.modules[home], CONVOLUTION)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the parts stand in; afterwards all is as it was."""
        plain = [getattr(home, CONVOLUTION) for home in self.homes]
        try:
            for part, forward in self.forwards.items():
                part.forward = forward
            for home in self.homes:
                setattr(home, CONVOLUTION, self.convolution)
            yield
        finally:
            for part in self.forwards:
                vars(part).pop("forward", None)
            for home, function in zip(self.homes, plain, strict=True):
                setattr(home, CONVOLUTION, function)


def _is_norm(part: nn.Module) -> bool:
    """A module of nothing but vectors: a norm in some library's spelling. PyTorch's own are one kernel already."""
    weights = list(part.parameters())
    children = any(True for _ in part.children())
    own = isinstance(part, nn.LayerNorm | nn.RMSNorm)
    return not children and not own and len(weights) > 0 and all(weight.dim() == 1 for weight in weights)


def _is_mlp(part: nn.Module) -> bool:
    """An MLP as transformers spells them; experts held in one three-dimensional weight take other arguments."""
    return hasattr(part, "act_fn") and isinstance(getattr(part, "down_proj", None), nn.Linear)


def _by_rows(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Over [rows, width] whatever the shape: a batch of one sequence would be compiled apart from one of several."""

    def rows(value: Any) -> Any:  # a gate may be None, and some MLPs are told their layer
        return value.flatten(0, -2) if isinstance(value, Tensor) else value

    def forward(hidden: Tensor, *more: Any, **named: Any) -> Tensor:
        out = compiled(rows(hidden), *map(rows, more), **{key: rows(value) for key, value in named.items()})
        return out.view(hidden.shape)

    return forward


def trial_lengths(tokens: int, longest: int) -> tuple[list[int], list[int]]:
    """Rows of a batch of one and of a full batch of several (one is compiled apart from several), none longer than
    training has any: a longer one may not fit, or lie beyond the positions that the target knows."""
    several = [longest] * (tokens // longest) if tokens >= 2 * longest else [tokens - tokens // 2, tokens // 2]
    return [min(tokens, longest)], [length for length in several if length]


def choose_paths(target: Target, tokens: int, longest: int) -> None:
    """Compile the target's elementwise parts for capture and try them; on a CPU, or without Triton, they stay plain.

    Takes up to half a minute, so it is for those who have many batches to capture: once, before the first.

    Args:
        tokens: of the largest batch to come.
        longest: tokens of the longest row in it.

    Raises:
        TargetError: such a batch does not fit on the device.
    """
    if target.device.type != "cuda":
        return
    if not fast.uses(fast.TARGET, target.device):
        log.warning(f"{fast.TARGET} need Triton, which is not here: {PLAIN}")
        return
    target.compiled = CompiledParts(target.decoder)

    def work() -> None:
        for lengths in trial_lengths(tokens, longest):
            rows = [np.zeros(length, dtype=np.int64) for length in lengths]
            target.capture(rows, [row == 0 for row in rows], range(len(rows)), tokens)
        torch.cuda.synchronize(target.device)

    try:
        if not fast.attempt(fast.TARGET, PLAIN, work):
            target.compiled = None
    except torch.OutOfMemoryError as error:
        raise TargetError(
            f"train.tokens_per_batch {tokens}: the target cannot capture such a batch on {target.device}: lower it "
            f"({error})"
        ) from error
