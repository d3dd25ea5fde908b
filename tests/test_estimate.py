"""Estimates of --dry-run against what exists: parameters of meta-device models, activations that autograd keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dflash import estimate, loss
from dflash.config import Config, DataConfig, DrafterConfig, PlacementConfig, TargetConfig, TrainConfig, load_config
from dflash.config_target import resolve
from dflash.model import DFlashConfig, DFlashDraftModel

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
MISSION = ROOT / "configs" / "targets" / "qwen3.6-27b.json"
SHAPE: dict[str, Any] = dict(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=8, num_attention_heads=6,
    num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)  # fmt: skip


def tiny_config(target_config: Any, **sections: Any) -> Config:
    defaults: dict[str, Any] = {
        "target": TargetConfig(model="tiny"),
        "drafter": DrafterConfig(mask_token_id=5, num_hidden_layers=2, block_size=8),
        "data": DataConfig(train=["train.jsonl"], max_length=64),
    }
    return resolve(Config(run_dir="runs/x", **(defaults | sections)), target_config)


def tiny_drafter(config: Config, target: Any) -> DFlashDraftModel:
    d = config.drafter
    return DFlashDraftModel(
        DFlashConfig(
            block_size=d.block_size, mask_token_id=d.mask_token_id, target_layer_ids=config.target.context_layers,
            num_target_layers=target.num_hidden_layers, vocab_size=target.vocab_size, hidden_size=target.hidden_size,
            intermediate_size=d.intermediate_size, num_hidden_layers=d.num_hidden_layers, head_dim=d.head_dim,
            num_attention_heads=d.num_attention_heads, num_key_value_heads=d.num_key_value_heads,
            layer_types=d.layer_types, sliding_window=d.sliding_window, rope_theta=d.rope_theta,
        )
    )  # fmt: skip


TARGETS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "llama, tied, biased, head_dim": lambda: transformers.LlamaConfig(
        **SHAPE, tie_word_embeddings=True, attention_bias=True, head_dim=16
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(
        **SHAPE, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "mission": lambda: transformers.AutoConfig.from_pretrained(MISSION),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_target_parameters_are_those_of_the_model(name: str) -> None:
    config = TARGETS[name]()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert estimate.target_parameters(config) == sum(p.numel() for p in model.parameters())
    assert estimate.target_parameters(config.to_dict()) == estimate.target_parameters(config)


def test_mission_figures() -> None:
    """Facts of the published pair: 26.9 and 1.73 billion parameters, 58 tensors, 51 KB of features per token."""
    target = estimate.read_target_config(MISSION)
    config = resolve(load_config(ROOT / "configs" / "qwen27b.yaml", check_files=False), target)
    assert estimate.target_parameters(target) == pytest.approx(26.9e9, rel=1e-3)
    assert estimate.drafter_parameters(config, target) == pytest.approx(1.73e9, rel=1e-3)
    with torch.device("meta"):
        drafter = tiny_drafter(config, transformers.AutoConfig.from_pretrained(MISSION))
    assert len(drafter.state_dict()) == 58
    assert sum(p.numel() for p in drafter.parameters()) == estimate.drafter_parameters(config, target)
    assert estimate.feature_bytes_per_token(config, target) == 51200

    *replicas, drafting = estimate.roles(config, target)
    assert [role.devices for role in replicas] == [(f"cuda:{i}",) for i in range(6)]
    assert drafting.devices == ("cuda:6",)
    assert 50 * GIB < replicas[0].bytes < 70 * GIB
    assert 40 * GIB < drafting.bytes < 80 * GIB
    (need,) = estimate.disk(config, target)
    assert need.bytes == 5 * 12 * estimate.drafter_parameters(config, target)

    before = drafting.bytes
    config.train.optimizer = "muon"
    (need,) = estimate.disk(config, target)
    assert need.bytes == 5 * 8 * estimate.drafter_parameters(config, target)
    assert before - estimate.roles(config, target)[-1].bytes == 4 * estimate.drafter_parameters(config, target)
    host = estimate.checkpoint_bytes(config, target) / GIB
    assert f"{host:8.2f} GiB  host memory" in estimate.describe(config, target)

    config.placement.gpus_per_replica = 3
    assert [role.devices for role in estimate.roles(config, target)[:-1]] == [
        ("cuda:0", "cuda:1", "cuda:2"),
        ("cuda:3", "cuda:4", "cuda:5"),
    ]


def test_one_device_holds_one_copy_of_embedding_and_head() -> None:
    target = transformers.LlamaConfig(**SHAPE)
    alone, apart = (
        tiny_config(target),
        tiny_config(target, placement=PlacementConfig(target=["cuda:1"])),
    )
    (both,) = estimate.roles(alone, target)
    assert not [need for need in both.needs if "embedding" in need.part]
    alone.data.features = "features"  # of which one batch is read ahead
    (reading,) = estimate.roles(alone, target)
    assert reading.bytes - both.bytes == alone.train.tokens_per_batch * estimate.feature_bytes_per_token(alone, target)
    _, drafter = estimate.roles(apart, target)
    (borrowed,) = [need for need in drafter.needs if "embedding" in need.part]
    assert borrowed.bytes == 2 * 97 * 48 * 2
    assert "target and drafter" in estimate.describe(alone, target)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "tokens", "blocks"),
    # No number of slots or tokens equals a width: weights are told from activations by their shape.
    [
        (dict(hidden_size=96, intermediate_size=320), 72, 13),
        (dict(hidden_size=144, num_attention_heads=6, num_key_value_heads=6), 200, 5),
    ],
)
def test_drafter_activations_are_what_autograd_keeps(
    dtype: str, shape: dict[str, Any], tokens: int, blocks: int
) -> None:
    target = transformers.LlamaConfig(**(SHAPE | shape))
    train = TrainConfig(tokens_per_batch=tokens, anchors_per_batch=blocks)
    cpu = PlacementConfig(target=["cpu"], drafter=["cpu"])
    config = tiny_config(target, target=TargetConfig(model="tiny", dtype=dtype), train=train, placement=cpu)
    drafter, slots, width = tiny_drafter(config, target), blocks * config.drafter.block_size, target.hidden_size
    kind = getattr(torch, dtype)
    embeds, context = torch.randn(1, slots, width, dtype=kind), torch.randn(1, tokens, 5 * width, dtype=kind)
    mask = torch.ones(1, 1, slots, tokens + slots, dtype=torch.bool)
    given = {t.untyped_storage().data_ptr() for t in (*drafter.parameters(), context)}
    weights = {s for p in drafter.parameters() for s in (tuple(p.shape), tuple(p.shape[::-1]))}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Weights cast by autocast are a line of their own in the estimate.
        if storage.data_ptr() not in given and tuple(tensor.shape) not in weights:
            kept[storage.data_ptr()] = storage  # holding it keeps its address from being used again
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        drafter(embeds, context, attention_mask={"full_attention": mask})
    measured = sum(storage.nbytes() for storage in kept.values())
    (role,) = estimate.roles(config, target)
    (estimated,) = [need.bytes for need in role.needs if need.part == "activations of the drafter"]
    transient = slots * (3 * target.intermediate_size + 4 * width) * (2 if dtype == "bfloat16" else 4)
    assert estimated - transient == pytest.approx(measured, rel=0.1)


def test_constants_of_the_loss() -> None:
    assert loss.CHUNK_BYTES["cpu"] == estimate.LOGITS_CHUNK_BYTES
    assert loss.CHUNK_BYTES["cuda"] <= estimate.CHUNKS_ALIVE * estimate.LOGITS_CHUNK_BYTES  # which works in place
