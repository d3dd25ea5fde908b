"""What several drafter ranks share in a step: gradients and sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from dflash.target.link import PeerLost

if TYPE_CHECKING:
    from dflash.target.stream import Stream


@dataclass
class Peers:
    """The drafter ranks of a run and the stream that feeds this one."""

    rank: int
    size: int
    group: Any
    """Process group of the drafters; None when there is one."""
    stream: Stream
    eval_groups: list[list[int]]

    def add(self, sums: dict[str, Tensor], gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """Sums and gradients over all drafters, in place for the gradients: one all-reduce each, none divided."""
        if self.size == 1:
            return sums
        flat = torch.cat([value.double().flatten() for value in sums.values()])
        try:
            works = [dist.all_reduce(part, group=self.group, async_op=True) for part in (*gradients, flat)]
            for work in works:
                work.wait()
        except RuntimeError as error:  # gloo and NCCL raise nothing more telling when a rank dies
            raise PeerLost(f"another drafter was lost ({' '.join(str(error).split())[:200]})") from error
        parts = flat.split([value.numel() for value in sums.values()])
        return {key: part.view(value.shape) for (key, value), part in zip(sums.items(), parts, strict=True)}
