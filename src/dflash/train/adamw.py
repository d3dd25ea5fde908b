"""AdamW that is told on the device what to divide the gradients by, and whether to step at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dflash import fast


class AdamW(torch.optim.AdamW):
    """Decoupled weight decay (arXiv 1711.05101); fp32 weights and moments, all parameters stepping together.

    Arithmetic and state are torch's own fused AdamW's, so checkpoints of either fit the other.

    Args:
        parameters, lr, betas, weight_decay: as for ``torch.optim.AdamW``.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)

    def moments(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Names of what the state holds for a parameter beside its step count."""
        return ("exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def apply(self, divisor: Tensor, refused: Tensor) -> None:
        """One step with gradients divided by ``divisor``; where ``refused``, weights, moments and step count stay.

        Both are scalars on the parameters' device: the host waits for neither.
        """
        device = self.param_groups[0]["params"][0].device
        if not fast.uses(fast.KERNELS, device):
            self.grad_scale, self.found_inf = divisor.float(), refused.float()
            self.step()
            return
        taken = 1.0 - refused.float()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(p) for p in trained]
            for state in states:
                state["step"].add_(taken)  # one _foreach_add_ with a tensor would read it on the host
            beta1, beta2 = group["betas"]
            count = states[0]["step"].double()
            scalars = torch.stack(
                [
                    taken.double(),
                    1.0 / divisor.double(),
                    group["lr"] / (1.0 - beta1**count),
                    (1.0 - beta2**count).rsqrt(),
                ]
            ).float()
            for parameter, state in zip(trained, states, strict=True):
                fast.kernels().adamw(
                    parameter, parameter.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"], scalars,
                    beta1, beta2, group["eps"], 1.0 - group["lr"] * group["weight_decay"],
                )  # fmt: skip

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state
