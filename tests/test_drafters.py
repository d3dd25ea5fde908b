"""What a DRAFTER argument may name, and what is refused, each in one sentence."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_run import dflash, finish, write_run

from dflash.decode.drafters import find_drafter, load_both, load_drafter
from dflash.model import DFlashDraftModel
from dflash.model.config import DrafterError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished tiny run whose config names how prompts are rendered."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_run(
        folder,
        data__chat_template_kwargs={"enable_thinking": False},
        drafter__layer_types=["sliding_attention"],
        drafter__sliding_window=16,
    )
    finish(dflash("train", config))
    return folder


@pytest.fixture
def published(trained, tmp_path):
    """A copy of its newest drafter as a plain folder, free to be damaged."""
    newest = max((trained / "run" / "checkpoints").glob("step_*"))
    folder = tmp_path / "published"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(newest / name, folder)
    return folder


def test_a_run_gives_everything_it_was_trained_with(trained):
    source = find_drafter(str(trained / "run"))
    assert "block size 4" in source.line and "1 layers (1 sliding, window 16)" in source.line
    assert "context layers [0, 2] of 4" in source.line
    loaded = load_both(str(trained / "run"), device="cpu")
    assert loaded.target_name == str(trained / "target") and loaded.chat_template_kwargs == {"enable_thinking": False}
    assert loaded.max_length == 64 and loaded.target.dtype == loaded.drafter.dtype == torch.float32
    assert loaded.target.context_layers == [0, 2]
    stored = load_file(source.folder / "model.safetensors")
    state = loaded.drafter.state_dict()
    assert state.keys() == stored.keys() and all(torch.equal(state[k], stored[k]) for k in stored)


def test_options_override_the_run(trained, caplog):
    loaded = load_both(str(trained / "run"), device="cpu", dtype="bfloat16", enable_thinking=True)
    assert loaded.chat_template_kwargs == {"enable_thinking": True}
    assert loaded.target.dtype == loaded.drafter.dtype == torch.bfloat16
    beside = load_both(str(trained / "run"), beside=loaded)
    assert "rendered with {'enable_thinking': False}, and is compared on prompts rendered with" in caplog.text
    assert beside.target.module is loaded.target.module and beside.drafter.dtype == torch.bfloat16


def test_a_run_means_its_best_checkpoint_if_kept_else_the_newest_complete_one(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    steps = sorted((run / "checkpoints").glob("step_*"))
    step = int(steps[0].name.removeprefix("step_"))
    for best, folder, words in (
        (step, steps[0], f"step {step}, the best of the run"),
        (step + 1, steps[-1], "the newest of the run"),  # not kept
        (None, steps[-1], "the newest of the run"),
    ):
        for path in steps:
            state = json.loads((path / "trainer.json").read_text()) | {"best_step": best}
            (path / "trainer.json").write_text(json.dumps(state))
        assert find_drafter(str(run)).folder == folder and words in find_drafter(str(run)).line
    assert find_drafter(str(run)).folder == steps[-1] and "newest of the run" in find_drafter(str(run)).line
    (steps[-1] / "COMPLETE").unlink()
    assert find_drafter(str(run)).folder == steps[-2]
    with pytest.raises(DrafterError, match="never finished"):
        find_drafter(str(steps[-1]))
    for path in steps[:-1]:
        (path / "COMPLETE").unlink()
    with pytest.raises(DrafterError, match="without a complete checkpoint"):
        find_drafter(str(run))


def test_a_checkpoint_knows_its_run_and_a_copy_elsewhere_does_not(trained, published):
    inside = find_drafter(str(max((trained / "run" / "checkpoints").glob("step_*"))))
    assert inside.run is not None and inside.run.target.model == str(trained / "target")
    assert find_drafter(str(published)).run is None
    with pytest.raises(DrafterError, match="give --target"):
        load_both(str(published), device="cpu")
    loaded = load_both(str(published), target=str(trained / "target"), device="cpu")
    assert loaded.chat_template_kwargs == {} and loaded.max_length == 512
    reference = DFlashDraftModel.from_pretrained(published, dtype=torch.float32)
    embeds, context = torch.randn(1, 4, 32), torch.randn(1, 7, 64)
    with torch.no_grad():
        outs = [d(noise_embeds=embeds, context_hidden_states=context) for d in (loaded.drafter, reference)]
    assert torch.equal(outs[0].last_hidden_state, outs[1].last_hidden_state)


def test_weights_in_several_files(published):
    tensors = load_file(published / "model.safetensors")
    (published / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, published / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    state = load_drafter(find_drafter(str(published)), torch.float32, CPU).state_dict()
    assert all(torch.equal(state[name], tensors[name]) for name in names)
    (published / "b.safetensors").unlink()
    with pytest.raises(DrafterError, match=r"b\.safetensors does not exist"):
        load_drafter(find_drafter(str(published)), torch.float32, CPU)


def spoiled(tensors, kind):
    first = min(tensors)
    if kind == "missing":
        return {k: v for k, v in tensors.items() if k != first}
    if kind == "unexpected":
        return tensors | {"lm_head.weight": torch.zeros(2, 2)}
    if kind == "shape":
        return tensors | {first: torch.zeros(3, 3)}
    if kind == "nan":
        return tensors | {first: torch.full_like(tensors[first], float("nan"))}
    return {k: v.half() for k, v in tensors.items()}


@pytest.mark.parametrize(
    "kind,words",
    [
        ("missing", "lacks 1 tensors, fc.weight first"),
        ("unexpected", "has unexpected 1 tensors, lm_head.weight first"),
        ("shape", r"fc.weight is \(3, 3\) in the file and \(32, 64\)"),
        ("nan", "fc.weight holds values that are not finite"),
        ("half", "is float16"),
    ],
)
def test_weights_that_are_not_the_drafter_are_refused(published, kind, words):
    tensors = load_file(published / "model.safetensors")
    save_file(spoiled(tensors, kind), published / "model.safetensors")
    with pytest.raises(DrafterError, match=words):
        load_drafter(find_drafter(str(published)), torch.float32, CPU)


def test_a_damaged_file_is_named(published):
    whole = (published / "model.safetensors").read_bytes()
    (published / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DrafterError, match="is damaged"):
        load_drafter(find_drafter(str(published)), torch.float32, CPU)
    (published / "config.json").write_text("{")
    with pytest.raises(DrafterError, match="cannot be read as JSON"):
        find_drafter(str(published))


def test_what_is_no_drafter(trained, published, tmp_path):
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({"speculators_model_type": "dflash", **config}))
    with pytest.raises(
        DrafterError,
        match=r"config\.json: speculators_model_type is 'dflash', with transformer_layer_config of type NoneType",
    ):
        find_drafter(str(published))
    with pytest.raises(DrafterError, match=r"config\.json: drafter config lacks block_size"):
        find_drafter(str(trained / "target"))
    empty = tmp_path / "empty"
    empty.mkdir()
    for name, words in (
        (empty, "holds neither config.yaml"),
        (published / "config.json", "is a file"),
        (tmp_path / "gone", "does not exist"),
        ("a/b/c", "does not exist"),
    ):
        with pytest.raises(DrafterError, match=words):
            find_drafter(str(name))


def test_an_id_that_the_hub_cannot_give_is_refused_in_a_sentence(monkeypatch):
    def offline(name, **kwargs):
        raise OSError("offline\nmode. To enable, set 'X")

    monkeypatch.setattr("dflash.decode.drafters.snapshot_download", offline)
    with pytest.raises(DrafterError, match=r"no folder z-lab/none, and the hub gives no such drafter: offline mode$"):
        find_drafter("z-lab/none")


def test_a_hub_id_is_fetched_and_read(published, monkeypatch):
    monkeypatch.setattr("dflash.decode.drafters.snapshot_download", lambda name, **kwargs: str(published))
    assert find_drafter("z-lab/some-drafter").folder == published
