"""Checkpoints: whole or absent, pruned, and exact to the bit."""

import errno
import json

import pytest
import torch
from safetensors import SafetensorError, safe_open

import dflash.train.checkpoint as checkpoint
from dflash.model import DFlashConfig, DFlashDraftModel
from dflash.train.adamw import AdamW
from dflash.train.checkpoint import CheckpointError, Checkpoints, Progress, load
from dflash.train.muon import Muon


def drafter(seed=0, **over):
    torch.manual_seed(seed)
    shape = dict(
        block_size=4, mask_token_id=1, target_layer_ids=[0], vocab_size=10, hidden_size=16, intermediate_size=16,
        head_dim=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, layer_types=["full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )  # fmt: skip
    return DFlashDraftModel(DFlashConfig(**(shape | over)))


def optimizer_of(model, kind=AdamW):
    return kind(model.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01)


def steps(model, optimizer, count, seed):
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.apply(torch.tensor(1.0), torch.tensor(False))


def progress(step, best=None):
    return Progress(step, 10 * step, step, best, None if best is None else 1.0, "answers", {"data": "x"})


def saved(folder):
    """A drafter, its optimizer after one step, and the folder that holds a checkpoint of it."""
    model = drafter()
    optimizer = optimizer_of(model)
    steps(model, optimizer, 1, 0)
    store = Checkpoints(folder, 2, True)
    store.save(model, optimizer, progress(1))
    store.wait()
    return model, optimizer, store


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_resumed_state_equals_the_state_that_was_saved(tmp_path, kind):
    model = drafter()
    optimizer = optimizer_of(model, kind)
    steps(model, optimizer, 3, 0)
    store = Checkpoints(tmp_path, 2, True)
    store.save(model, optimizer, progress(3))
    steps(model, optimizer, 2, 1)  # goes on while the save is being written: the copy must not see it
    store.wait()

    other = drafter(seed=9)
    again = optimizer_of(other, kind)
    assert load(store.newest(), other, again) == progress(3)
    steps(other, again, 2, 1)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for name in optimizer.moments(a):
            assert torch.equal(optimizer.state[a][name], again.state[b][name])
            assert again.state[b][name].dtype == torch.float32
        if "step" in optimizer.state[a]:
            assert torch.equal(optimizer.state[a]["step"], again.state[b]["step"])
    with safe_open(store.newest() / "model.safetensors", "pt") as file:
        assert {file.get_tensor(k).dtype for k in file.keys()} == {torch.float32}  # noqa: SIM118
    assert DFlashDraftModel.from_pretrained(store.newest()).config.block_size == 4


@pytest.mark.parametrize("kind,other", [(AdamW, Muon), (Muon, AdamW)])
def test_moments_of_another_optimizer_are_refused_by_its_key(tmp_path, kind, other):
    model = drafter()
    optimizer = optimizer_of(model, kind)
    steps(model, optimizer, 1, 0)
    store = Checkpoints(tmp_path, 2, True)
    store.save(model, optimizer, progress(1))
    store.wait()
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors: .* exp_avg_sq.*: of another train.optimizer"):
        load(store.newest(), model, optimizer_of(model, other))


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    model = drafter()
    optimizer = optimizer_of(model)
    steps(model, optimizer, 1, 0)
    store = Checkpoints(tmp_path, 2, True)
    for step in range(1, 6):
        store.save(model, optimizer, progress(step, best=2 if step > 1 else None))
    store.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000004", "step_000005"]
    assert store.newest().name == "step_000005"
    plain = Checkpoints(tmp_path, 1, False)
    plain.save(model, optimizer, progress(6, best=2))
    plain.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["step_000006"]


def test_incomplete_folders_do_not_exist_for_readers_and_are_swept(tmp_path):
    _, _, store = saved(tmp_path)
    (tmp_path / "step_000002").mkdir()
    (tmp_path / "step_000001_copy").mkdir()  # a user's own
    (tmp_path / "step_000001_copy" / "COMPLETE").touch()
    (tmp_path / ".writing_000003").mkdir()
    assert store.newest().name == "step_000001"
    store.remove_remains()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000001_copy"]


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_during_the_save_names_what_was_needed(tmp_path, monkeypatch, fault):
    model, optimizer, store = saved(tmp_path)

    def full(tensors, path, metadata=None):
        path.write_bytes(b"half")
        raise fault

    monkeypatch.setattr(checkpoint, "save_file", full)
    store.save(model, optimizer, progress(2))
    with pytest.raises(CheckpointError, match=r"step 2 needs .* GiB .* are free"):
        store.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"] and store.newest().name == "step_000001"


def test_no_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    model = drafter()
    optimizer = optimizer_of(model)
    steps(model, optimizer, 1, 0)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: type("U", (), {"free": 10})())
    with pytest.raises(CheckpointError, match=r"step 1 needs .* make room"):
        Checkpoints(tmp_path, 2, True).save(model, optimizer, progress(1))
    assert list(tmp_path.iterdir()) == []


def test_another_drafter_version_or_shape_is_refused_by_name(tmp_path):
    model, optimizer, store = saved(tmp_path)
    wide = drafter(intermediate_size=24)
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight"):
        load(store.newest(), wide, optimizer_of(wide))
    deep = drafter(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    with pytest.raises(CheckpointError, match="tensors missing or unexpected"):
        load(store.newest(), deep, optimizer_of(deep))
    whole = (store.newest() / "optimizer.safetensors").read_bytes()
    (store.newest() / "optimizer.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors is damaged .* delete this checkpoint"):
        load(store.newest(), model, optimizer)
    file = store.newest() / "trainer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 99}))
    with pytest.raises(CheckpointError, match="another version"):
        load(store.newest(), drafter(), optimizer)
