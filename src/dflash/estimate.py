"""What a run will need, before anything is loaded: processes, memory per role, disk. Plain arithmetic on two configs.

Shape letters: T packed tokens, N blocks, K block size, M = N * K slots, D hidden size, L context layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash.config import Config
from dflash.config_target import lookup, read_target_config, text_config

GIB = 1 << 30
LOGITS_CHUNK_BYTES = 1 << 28
"""Largest fp32 logits chunk of dflash.loss and of the target's labels (a test compares it with the former)."""
CHUNKS_ALIVE = 3
"""Logits, their softmax or mask, and its cast for the second product."""
BATCHES_AHEAD = 2
"""Feature batches that wait in the drafter's buffers beside the one in use; a replica holds one more on its way out."""


@dataclass(frozen=True)
class Need:
    """Bytes that one part of a role takes, over all its devices."""

    part: str
    bytes: float


@dataclass(frozen=True)
class Role:
    """One process: what it does, on which devices, and what is alive there at its peak."""

    name: str
    devices: tuple[str, ...]
    needs: tuple[Need, ...]

    @property
    def bytes(self) -> float:
        return sum(need.bytes for need in self.needs)


def find_target_config(config: Config, weights_needed: bool) -> Any:
    """The target's config: for a dry run from ``target.config`` where that is given, else from the model itself.

    Raises:
        ConfigError: the file cannot be read.
        TargetError: the model cannot be found or read.
    """
    if config.target.config and not weights_needed:
        return read_target_config(config.target.config)
    from dflash.target.load import load_target_config

    return load_target_config(config.target.model, config.target.revision)


def drafter_parameters(config: Config, target_config: Any) -> int:
    """Number of trained weights of a resolved config; embedding and head are borrowed and not among them."""
    d, width = config.drafter, lookup(text_config(target_config), "hidden_size")
    query, key = _attention_widths(config)
    attention = width * (2 * query + 2 * key) + 2 * _whole(d.head_dim)
    layer = attention + 3 * width * _whole(d.intermediate_size) + 2 * width
    return width * width * len(config.target.context_layers or ()) + 2 * width + d.num_hidden_layers * layer


def target_parameters(target_config: Any) -> int:
    """Number of weights of a decoder: exact for Llama, Qwen3 (dense, MoE) and Qwen3.5/3.6, within 1 % for their kin."""
    config = text_config(target_config)

    def get(key: str, default: int = 0) -> int:
        return int(lookup(config, key) or default)

    family = str(lookup(config, "model_type") or "")
    width, depth, heads = get("hidden_size"), get("num_hidden_layers"), get("num_attention_heads")
    head_dim = get("head_dim", width // heads)
    query, key = heads * head_dim, get("num_key_value_heads", heads) * head_dim
    gated = family.startswith(("qwen3_5", "qwen3_next"))  # their q_proj makes an output gate as well
    full = width * ((3 if gated else 2) * query + 2 * key)
    full += 2 * head_dim if family.startswith("qwen3") else 0
    full += query + 2 * key + width if lookup(config, "attention_bias") else 0

    value_heads = get("linear_num_value_heads")
    keys, values = get("linear_num_key_heads") * get("linear_key_head_dim"), value_heads * get("linear_value_head_dim")
    linear = width * (2 * keys + 3 * values + 2 * value_heads) + get("linear_conv_kernel_dim") * (2 * keys + values)
    linear += 2 * value_heads + get("linear_value_head_dim")

    experts = get("num_experts") or get("num_local_experts")
    mlp = 3 * width * get("intermediate_size")
    if experts:
        shared = get("shared_expert_intermediate_size")
        mlp = experts * width * (3 * get("moe_intermediate_size", get("intermediate_size")) + 1)
        mlp += width * (3 * shared + 1) if shared else 0

    linear_layers = layer_kinds(config, depth).count("linear_attention")
    layers = linear_layers * linear + (depth - linear_layers) * full + depth * (mlp + 2 * width)
    embeddings = (1 if lookup(config, "tie_word_embeddings") else 2) * get("vocab_size") * width
    return embeddings + layers + width


def roles(config: Config, target_config: Any) -> list[Role]:
    """The processes of a resolved config, each with what it needs: targets first, as ranks are numbered."""
    p, known = config.placement, text_config(target_config)
    features = config.train.tokens_per_batch * feature_bytes_per_token(config, target_config)
    weights = Need("weights of the target", target_parameters(known) * _itemsize(config))
    rows = max(config.train.tokens_per_batch, config.train.anchors_per_batch * config.drafter.block_size)
    logits_bytes = CHUNKS_ALIVE * min(LOGITS_CHUNK_BYTES, 4 * rows * lookup(known, "vocab_size"))
    logits = Need("logits in chunks", logits_bytes)
    capture, train = _target_activations(config, known), _drafter_activations(config, known)
    trained = _trained_state(config, known)
    if p.target == p.drafter and len(p.target) == 1:
        # One process alternates: what the target works with is free again before the drafter's turn.
        work = max(capture, train, key=lambda need: need.bytes)
        read = Need("context features", features)
        if config.data.features:  # from disk the next batch is read during the step
            read = Need("context features, in use and ahead", 2 * features)
        needs = (weights, *trained, work, logits, read)
        return [Role("target and drafter", tuple(p.target), needs)]
    serving = (weights, capture, logits, Need("context features, made and on their way out", 2 * features))
    embeddings = (1 if lookup(known, "tie_word_embeddings") else 2) * lookup(known, "vocab_size")
    borrowed = Need("embedding and head of the target", embeddings * lookup(known, "hidden_size") * _itemsize(config))
    ahead = Need("context features, in use and ahead", (1 + BATCHES_AHEAD) * features)
    each = p.gpus_per_replica
    replicas = [tuple(p.target[start : start + each]) for start in range(0, len(p.target), each)]
    return [
        *(Role(f"target replica {i}", devices, serving) for i, devices in enumerate(replicas)),
        *(Role(f"drafter {i}", (d,), (*trained, train, logits, borrowed, ahead)) for i, d in enumerate(p.drafter)),
    ]


def per_device(processes: list[Role]) -> dict[str, float]:
    """Bytes on each device; a role over several is taken to spread evenly."""
    found: dict[str, float] = {}
    for role in processes:
        for device in role.devices:
            found[device] = found.get(device, 0) + role.bytes / len(role.devices)
    return found


def feature_bytes_per_token(config: Config, target_config: Any) -> int:
    """Context features of one token, as they travel and as ``data.features`` keeps them."""
    width: int = lookup(text_config(target_config), "hidden_size")
    return width * len(config.target.context_layers or ()) * _itemsize(config)


def checkpoint_bytes(config: Config, target_config: Any) -> int:
    """Of one checkpoint: weights and moments in fp32."""
    return (4 + _moment_bytes(config)) * drafter_parameters(config, target_config)


def _moment_bytes(config: Config) -> int:
    """Per weight; the vectors' second moment is too little to count."""
    return 4 if config.train.optimizer == "muon" else 8


def disk(config: Config, target_config: Any) -> list[Need]:
    """Bytes that the run's folder grows to."""
    c = config.checkpoint
    best = int(c.keep_best and bool(config.data.eval))
    # Retention deletes an old checkpoint only once the new one is complete.
    count = c.keep_last + best + 1
    whole = count * checkpoint_bytes(config, target_config)
    return [Need(f"{count} checkpoints (fp32 weights and moments; keep_last, best, one being written)", whole)]


def _target_activations(config: Config, known: Any) -> Need:
    """Nothing is kept for a backward pass: the residual stream in its forms, and the widest layer at work."""
    width = lookup(known, "hidden_size")
    inner = lookup(known, "moe_intermediate_size") or lookup(known, "intermediate_size") or 4 * width
    active = lookup(known, "num_experts_per_tok") or 1
    numbers = config.train.tokens_per_batch * (4 * width + 3 * inner * active)
    return Need("activations of the target", numbers * _itemsize(config))


def _drafter_activations(config: Config, known: Any) -> Need:
    """What autograd keeps, as measured on the drafter per slot and context token (a test measures it again), and the
    gradients of the widest layer."""
    d, size, width = config.drafter, _itemsize(config), lookup(known, "hidden_size")
    query, key = _attention_widths(config)
    tokens, slots = config.train.tokens_per_batch, config.train.anchors_per_batch * d.block_size
    inner, head_dim = _whole(d.intermediate_size), _whole(d.head_dim)
    per_width, per_head, per_inner = (22, 12, 8) if size == 2 else (28, 16, 16)
    per_layer = slots * (per_width * width + per_head * (query + key) + per_inner * inner) + per_head * tokens * key
    kept = d.num_hidden_layers * per_layer + (8 * tokens + 4 * slots) * width + per_head * (tokens + slots) * head_dim
    if config.placement.drafter[0].endswith("cpu"):
        # Dense masks where GPUs have block masks: a bool one per layer type, and each layer's as numbers to add.
        kept += (len(set(d.layer_types or ())) + size * d.num_hidden_layers) * slots * (tokens + slots)
    return Need("activations of the drafter", kept + slots * (3 * inner + 4 * width) * size)


def _trained_state(config: Config, known: Any) -> list[Need]:
    count = drafter_parameters(config, known)
    copy = [Need("weights of the drafter, bf16 copy of autocast", 2 * count)] if _itemsize(config) == 2 else []
    return [
        Need("weights of the drafter, fp32", 4 * count),
        *copy,
        Need("gradients, fp32", 4 * count),
        Need("moments of the optimizer, fp32", _moment_bytes(config) * count),
    ]


def layer_kinds(config: Any, depth: int) -> list[str]:
    """Kind of each target layer; configs of hybrid models may give the interval of full attention instead."""
    kinds = lookup(config, "layer_types")
    if kinds:
        return list(kinds)
    interval = lookup(config, "full_attention_interval") or 1
    return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(depth)]


def _attention_widths(config: Config) -> tuple[int, int]:
    d = config.drafter
    return _whole(d.num_attention_heads) * _whole(d.head_dim), _whole(d.num_key_value_heads) * _whole(d.head_dim)


def _whole(value: int | None) -> int:
    if value is None:
        raise ValueError("the drafter's shape is open: estimate a resolved config")
    return value


def _itemsize(config: Config) -> int:
    return 4 if config.target.dtype == "float32" else 2


def describe(config: Config, target_config: Any) -> str:
    """The tables of ``--dry-run``: parameters, placement with memory per role and device, disk."""
    processes = roles(config, target_config)
    lines = [
        f"target   {target_parameters(target_config) / 1e9:8.3f} billion parameters, frozen, {config.target.dtype}",
        f"drafter  {drafter_parameters(config, target_config) / 1e9:8.3f} billion parameters, trained",
        "",
        "process  role                 devices",
        *(f"{rank:<7}  {role.name:<19}  {' '.join(role.devices)}" for rank, role in enumerate(processes)),
    ]
    seen: set[str] = set()
    for role in processes:
        kind = role.name.rstrip(" 0123456789")
        if kind in seen:
            continue
        seen.add(kind)
        over = f", over {len(role.devices)} devices" if len(role.devices) > 1 else ""
        lines += ["", f"memory of a {kind} (estimate{over})"]
        lines += [f"  {need.bytes / GIB:8.2f} GiB  {need.part}" for need in role.needs]
        lines += [f"  {role.bytes / GIB:8.2f} GiB  in all"]
    lines += ["", "memory per device (estimate)"]
    lines += [f"  {total / GIB:8.2f} GiB  {device}" for device, total in per_device(processes).items()]
    host = checkpoint_bytes(config, target_config)
    lines += [f"  {host / GIB:8.2f} GiB  host memory beside it, for the copy a checkpoint is written from"]
    lines += ["", f"disk under {config.run_dir} (estimate)"]
    lines += [f"  {need.bytes / GIB:8.2f} GiB  {need.part}" for need in disk(config, target_config)]
    if config.data.features:
        per_token = feature_bytes_per_token(config, target_config)
        lines += [f"  {per_token / 1024:8.2f} KiB  per token of data, under {config.data.features}"]
    return "\n".join(lines)
