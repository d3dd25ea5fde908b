"""A rehearsal of the step before step 1: which fast paths work here, at the run's own shapes, and whether it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dflash import fast
from dflash.loss import read_logits
from dflash.score import padded_tokens, score_blocks
from dflash.target.features import TargetFeatures
from dflash.train.log import log

if TYPE_CHECKING:
    from dflash.train.trainer import Trainer


DENSE = "dense masks and eager layers, several times slower and with more memory"


class DoesNotFit(RuntimeError):
    """The drafter's step needs more memory than its device has left."""


def choose_paths(trainer: Trainer) -> None:
    """Try the Triton kernels, then compile the drafter's layers and run one step's work; nothing of it is kept.

    On a CPU there is nothing to choose. What is compiled here serves every later step of the same shapes.

    Raises:
        DoesNotFit: naming the two settings that decide.
    """
    if trainer.device.type != "cuda":
        return
    if not fast.has_triton():
        log.warning(f"Triton is not installed: without {fast.KERNELS}, and with {DENSE}")
    try_kernels(trainer.device)
    try:
        if fast.uses(fast.COMPILED, trainer.device):
            for layer in trainer.drafter.layers:
                layer.compile(dynamic=False)
            if not fast.attempt(fast.COMPILED, DENSE, lambda: rehearse(trainer)):
                for layer in trainer.drafter.layers:
                    layer._compiled_call_impl = None
        if not fast.uses(fast.COMPILED, trainer.device):
            rehearse(trainer)
    except torch.OutOfMemoryError as error:
        train = trainer.config.train
        raise DoesNotFit(
            f"one batch of train.tokens_per_batch {train.tokens_per_batch} and train.anchors_per_batch "
            f"{train.anchors_per_batch} does not fit on {trainer.device}: lower one of them ({error})"
        ) from error
    finally:
        trainer.drafter.zero_grad(set_to_none=True)


def try_kernels(device: torch.device) -> None:
    """Build and run the Triton kernels on four rows of logits, and hold them against the plain reading."""

    def work() -> None:
        logits = torch.linspace(-4, 4, 4 * 300, device=device).view(4, 300).bfloat16()
        label = torch.arange(4, device=device)
        want, _, _ = read_logits(logits.clone(), label, slope=False)
        got, _, _ = fast.kernels().read_logits(logits, label, slope=True)
        if not torch.allclose(got, want, atol=1e-3):
            raise RuntimeError(f"its losses are {got.tolist()} and should be {want.tolist()}")

    if fast.uses(fast.KERNELS, device):
        fast.attempt(fast.KERNELS, "PyTorch's own, some 5 % slower", work)


def rehearse(trainer: Trainer) -> None:
    """Forward and backward of one made-up batch of the run's static shapes: one document, anchors all over it."""
    train, drafter, device = trainer.config.train, trainer.drafter, trainer.device
    rows = padded_tokens(train.tokens_per_batch, device) or train.tokens_per_batch
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    index = torch.arange(rows, device=device)
    generator = torch.Generator(device).manual_seed(0)
    dtype = trainer.target.head_weight.dtype
    features = TargetFeatures(
        ids=torch.zeros_like(index),
        context=torch.randn(rows, width, generator=generator, device=device, dtype=dtype),
        labels=torch.zeros_like(index, dtype=torch.int32),
        loss_mask=torch.ones_like(index, dtype=torch.bool),
        seq=torch.zeros_like(index, dtype=torch.int32),
        pos=index,
        bounds=[0, rows],
        sample_ids=[0],
    )
    anchors = torch.linspace(0, max(rows - 2, 0), train.anchors_per_batch, device=device).long()
    with trainer.autocast:
        scored = score_blocks(drafter, trainer.target, features, features.context, anchors)
    scored.weighted_sum.backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
