"""Which process does what: roles from ``placement``, and from (node, local rank) to a role.

Replicas are ranks 0 .. R-1, drafters R .. R+W-1, in the order of the config. A process finds its role from the machine
it is on and its number there, never from the launcher's global rank, which may change on a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash.config import Config, ConfigError


@dataclass(frozen=True)
class Role:
    """One process of a run."""

    kind: str
    """``replica``, ``drafter``, or ``both``: one process that alternates."""
    index: int
    """Number among its kind."""
    rank: int
    """Number among all: replicas first."""
    node: int
    devices: tuple[str, ...]
    """As torch names them; a replica's layers are split over them in this order."""

    def __str__(self) -> str:
        name = "the training process" if self.kind == "both" else f"{self.kind} {self.index}"
        return f"{name} (rank {self.rank}, {' '.join(self.devices)})"


def roles(config: Config) -> list[Role]:
    """All processes of a run, by rank.

    Raises:
        ConfigError: a combination that no process can serve.
    """
    p = config.placement
    if p.target == p.drafter and len(p.target) == 1:
        node, device = _split(p.target[0])
        return [Role("both", 0, 0, node, (device,))]
    each = p.gpus_per_replica
    groups = [[_split(d) for d in p.target[start : start + each]] for start in range(0, len(p.target), each)]
    out = [Role("replica", i, i, group[0][0], tuple(d for _, d in group)) for i, group in enumerate(groups)]
    for i, (node, device) in enumerate(map(_split, p.drafter)):
        out.append(Role("drafter", i, len(groups) + i, node, (device,)))
    if len({role.node for role in out if role.kind == "drafter"}) > 1:
        raise ConfigError(
            [f"placement.drafter {p.drafter} spans machines; put all of them on one, where the checkpoints are written"]
        )
    if config.data.features is not None:
        raise ConfigError(
            [
                f"data.features is read by one process that has target and drafter, and placement asks for {len(out)}: "
                "give placement.target and placement.drafter the same single device, or set data.features=null"
            ]
        )
    return out


def local_roles(config: Config, node: int, nodes: int) -> list[Role]:
    """The processes of machine ``node``, by local rank.

    Raises:
        ConfigError: the placement names more machines than there are, or none of its entries is here.
    """
    everyone = roles(config)
    beyond = sorted({role.node for role in everyone} - set(range(nodes)))
    if beyond:
        raise ConfigError(
            [
                f"placement names machine {beyond[0]} and the run has {nodes} ({', '.join(map(str, range(nodes)))}): "
                "start it on every machine with --nnodes, --node-rank and --rdzv-endpoint, or correct the placement"
            ]
        )
    here = [role for role in everyone if role.node == node]
    if not here:
        raise ConfigError([f"placement has no entry for machine {node}; write its devices as {node}/cuda:0 and so on"])
    return here


def require_devices(here: list[Role]) -> None:
    """Refuse devices that this machine lacks.

    Raises:
        ConfigError: naming the first.
    """
    named = [device for role in here for device in role.devices if device != "cpu"]
    if not named:
        return
    import torch  # not needed to say that a run on CPUs is fine

    count = torch.cuda.device_count()
    for device in named:
        if int(device.removeprefix("cuda:")) >= count:
            raise ConfigError(
                [
                    f"placement: {device} is not here ({count} GPUs are); for a CPU give "
                    "placement.target=[cpu] placement.drafter=[cpu] target.dtype=float32"
                ]
            )


def transport(everyone: list[Role]) -> str:
    """``nccl`` where every process has GPUs of its own, else ``gloo``: NCCL refuses two processes on one GPU."""
    devices = [(role.node, device) for role in everyone for device in role.devices]
    own_gpus = all(device != "cpu" for _, device in devices) and len(set(devices)) == len(devices)
    return "nccl" if own_gpus else "gloo"


def _split(entry: str) -> tuple[int, str]:
    node, _, device = entry.rpartition("/")
    return int(node or 0), device
