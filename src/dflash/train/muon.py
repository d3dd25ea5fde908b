"""Muon: momentum that is made orthogonal before it moves a weight matrix.

Fewer steps than AdamW to the same drafter, and one moment in place of two; in return every step orthogonalises every
matrix, 10 m^2 n multiplications and more for one of m x n (m <= n). That is little beside a batch for a small drafter,
and as much as a batch of 3,072 tokens for the 27B one.

Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); update size by arXiv
2502.16982, so that one learning rate serves matrices and vectors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dflash.train.adamw import AdamW

MOMENTUM = 0.95
ITERATIONS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration: steep at 0, so that five of them lift small singular values near 1."""
LIKE_ADAMW = 0.2
"""Root mean square of an AdamW update in practice, in units of the learning rate."""
STACK = 1 << 24
"""Weights orthogonalised at once: small matrices of one shape share their kernels, large ones their memory."""


def orthogonalised(matrices: Tensor) -> Tensor:
    """[b, m, n] with all singular values drawn near 1 (0.7 to 1.2); the singular vectors stay.

    In bf16 on a GPU: the iteration forgives its rounding.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.bfloat16() if x.is_cuda else x
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for matrices and AdamW for vectors, told on the device what to divide by and whether to step at all.

    Args:
        parameters, lr, betas: as for :class:`dflash.train.adamw.AdamW`; ``betas`` are the vectors'.
        weight_decay: of the matrices, whose size nothing else bounds; vectors (the norms' weights) have none.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "weight_decay": weight_decay})
        (group,) = self.param_groups
        self._vectors = AdamW([p for p in group["params"] if p.ndim != 2], lr=lr, betas=betas, weight_decay=0.0)
        self._vectors.state = self.state  # one state, so that a checkpoint sees one optimizer

    def moments(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Names of what the state holds for a parameter beside its step count."""
        return ("exp_avg",) if parameter.ndim == 2 else self._vectors.moments(parameter)

    @torch.no_grad()
    def apply(self, divisor: Tensor, refused: Tensor) -> None:
        """As :meth:`dflash.train.adamw.AdamW.apply`."""
        (group,) = self.param_groups
        for vectors in self._vectors.param_groups:
            vectors["lr"] = group["lr"]
        self._vectors.apply(divisor, refused)
        decay = 1.0 - group["lr"] * group["weight_decay"]
        for stack in self._stacks():
            gradient = torch.stack([p.grad for p in stack if p.grad is not None]) / divisor.float()
            means = [self._mean_of(p) for p in stack]
            mean = torch.stack(means)
            moved = mean.lerp(gradient, 1.0 - MOMENTUM)
            update = orthogonalised(gradient.lerp(moved, MOMENTUM))  # Nesterov's look ahead
            size = group["lr"] * LIKE_ADAMW * max(stack[0].shape) ** 0.5
            # Chosen, not multiplied by zero: what is refused may not be finite.
            weights: list[Tensor] = list(stack)
            weight = torch.stack(weights)
            torch._foreach_copy_(means, list(torch.where(refused, mean, moved).unbind()))
            torch._foreach_copy_(weights, list(torch.where(refused, weight, weight * decay - update * size).unbind()))

    def _stacks(self) -> list[list[nn.Parameter]]:
        """Trained matrices of one shape, as many together as :data:`STACK` allows."""
        stacks: list[list[nn.Parameter]] = []
        trained = [p for p in self.param_groups[0]["params"] if p.ndim == 2 and p.grad is not None]
        for p in sorted(trained, key=lambda p: tuple(p.shape)):
            fits = stacks and stacks[-1][0].shape == p.shape and (len(stacks[-1]) + 1) * p.numel() <= STACK
            if fits:
                stacks[-1].append(p)
            else:
                stacks.append([p])
        return stacks

    def _mean_of(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean: Tensor = state["exp_avg"]
        return mean
