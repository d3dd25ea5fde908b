"""Trackers: names and steps as in metrics.jsonl, one run over resumes; no failure of theirs stops a training."""

import json
import logging
import os
import struct
import subprocess
import sys

import pytest

from dflash.train import launch, trackers
from dflash.train.log import MetricsLog
from dflash.train.trackers import TrackerError, Trackers, require_installed

STEP = {"step": 1, "epoch": 0.5, "loss": 2.5, "accuracy": 0.25, "tokens": 100, "time": 1.7e9}
EVAL = {"kind": "eval", "step": 1, "accepted_length": 1.5, "rounds": 10, "eval_s": 0.1, "time": 1.7e9}
ALERT = {"kind": "alert", "step": 1, "verdict": "flat", "slopes": {"loss": 0.0}, "sentence": "flat", "time": 1.7e9}


class Fake:
    """Stands for accelerate's tracker; fails when told to."""

    made: list["Fake"] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs, self.logged, self.finished, self.failing = args, kwargs, [], 0, False
        self.tracker = self
        self.step = 0
        Fake.made.append(self)

    def start(self):
        pass

    def log(self, values, step):
        if self.failing:
            raise ConnectionError("the server\nis gone")
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


class Broken(Fake):
    def start(self):
        raise RuntimeError("no key")


@pytest.fixture
def fakes(monkeypatch):
    Fake.made = []
    monkeypatch.setattr(trackers, "TensorBoardTracker", Fake)
    monkeypatch.setattr(trackers, "WandBTracker", Fake)
    return Fake.made


@pytest.fixture
def warnings_of(caplog):
    """``caplog`` hears the package's logger, which does not propagate once a run has set it up."""
    logger = logging.getLogger("dflash")
    before = logger.propagate
    logger.propagate = True
    with caplog.at_level(logging.INFO, logger="dflash"):
        yield lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    logger.propagate = before


def test_scalars_go_out_under_their_own_names_and_nothing_else(fakes, tmp_path):
    t = Trackers(["tensorboard", "wandb", "wandb"], tmp_path, {"seed": 0}, 0)
    for line in (STEP, EVAL, ALERT, {"kind": "start", "step": 1, "total_steps": 5}):
        t.log(line)
    t.finish()
    t.finish()
    assert len(fakes) == 2  # a name given twice is one tracker
    for fake in fakes:
        assert fake.logged == [
            (1, {"epoch": 0.5, "loss": 2.5, "accuracy": 0.25, "tokens": 100}),
            (1, {"accepted_length": 1.5, "rounds": 10, "eval_s": 0.1}),
        ]
        assert fake.finished == 1


def test_a_tracker_that_fails_is_given_up_with_one_warning(fakes, tmp_path, warnings_of):
    t = Trackers(["tensorboard", "wandb"], tmp_path, {}, 0)
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsLog(path, trackers=t)
    metrics.write(STEP)
    fakes[1].failing = True
    for step in range(2, 6):
        metrics.write(STEP | {"step": step})
    metrics.close()
    assert len(path.read_text().splitlines()) == 5
    assert [step for step, _ in fakes[0].logged] == [1, 2, 3, 4, 5] and len(fakes[1].logged) == 1
    assert len(warnings_of()) == 1
    assert "wandb failed" in warnings_of()[0] and "the server is gone" in warnings_of()[0]


def test_a_tracker_that_cannot_start_does_not_stop_the_training(fakes, tmp_path, monkeypatch, warnings_of):
    monkeypatch.setattr(trackers, "WandBTracker", Broken)
    t = Trackers(["wandb", "tensorboard"], tmp_path, {}, 0)
    t.log(STEP)
    assert len(warnings_of()) == 1 and "no key" in warnings_of()[0]
    assert len(fakes[1].logged) == 1 and not fakes[0].logged


def test_wandb_keeps_one_id_per_run_and_is_not_told_twice(fakes, tmp_path, monkeypatch):
    Trackers(["wandb"], tmp_path / "a", {"train": {"epochs": 1}}, 0)
    Trackers(["wandb"], tmp_path / "b", {}, 0)
    monkeypatch.setattr(Fake, "start", lambda self: setattr(self, "step", 4))
    again = Trackers(["wandb"], tmp_path / "a", {}, 2)
    first, other, second = (fake.kwargs for fake in fakes)
    assert first["id"] == second["id"] != other["id"] and first["config"] == {"train": {"epochs": 1}}
    assert first["resume"] == "allow" and first["name"] == "a"
    for step in (2, 3, 4, 5):
        again.log(STEP | {"step": step})
    assert [step for step, _ in fakes[2].logged] == [4, 5]  # 2 and 3 are there from before


@pytest.mark.parametrize("name", trackers.NAMES)
def test_a_missing_package_is_refused_in_a_sentence_before_anything_is_loaded(name, tmp_path, monkeypatch):
    from dflash.config import Config, DataConfig, DrafterConfig, LogConfig, PlacementConfig, TargetConfig

    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda wanted: None)
    require_installed([])
    config = Config(
        run_dir=str(tmp_path / "run"), target=TargetConfig(model="nowhere"), drafter=DrafterConfig(mask_token_id=5),
        data=DataConfig(train=["nowhere.jsonl"]), log=LogConfig(trackers=[name]),
        placement=PlacementConfig(target=["cpu"], drafter=["cpu"]),
    )  # fmt: skip
    with pytest.raises(TrackerError, match=rf"{name}, which is not installed: pip install 'dflash-trainer\[{name}\]'"):
        launch.train(config)
    assert not (tmp_path / "run").exists()


def test_tensorboard_shows_one_run_over_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def attempt(first_step, last_step, loss):
        t = Trackers(["tensorboard"], tmp_path, {}, first_step)
        for step in range(max(first_step, 1), last_step + 1):
            t.log(STEP | {"step": step, "loss": loss})
        t.log(EVAL | {"step": last_step})
        t.finish()

    attempt(0, 5, 2.0)  # killed after step 5, while the newest checkpoint was of step 3
    attempt(4, 6, 1.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        "epoch", "loss", "accuracy", "tokens", "accepted_length", "rounds", "eval_s",
    }  # fmt: skip
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(s, 2.0 if s < 4 else 1.0) for s in range(1, 7)]
    assert [e.step for e in events.Scalars("accepted_length")] == [6]  # that of step 5 was taken back


OFFLINE = """
import json, sys
from pathlib import Path
from dflash.train.trackers import Trackers
lines = json.loads(sys.argv[2])
t = Trackers(["wandb"], Path(sys.argv[1]), {"train": {"epochs": 2}, "target": {"context_layers": [0, 2]}}, 0)
assert list(t._active) == ["wandb"]
for line in lines:
    t.log(line)
t.finish()
"""


def records(raw: bytes):
    """Of a .wandb file: LevelDB's log format, after seven bytes of its own; short files have whole records only."""
    assert raw[:4] == b":W&B" and len(raw) < 1 << 15
    at = 7
    while at + 7 <= len(raw):
        _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
        assert kind == 1
        yield raw[at + 7 : at + 7 + length]
        at += 7 + length


def test_wandb_offline_keeps_names_and_steps(tmp_path):
    """In a process of its own: wandb keeps a service and state of the process."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    env = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
    lines = [STEP, EVAL, *(STEP | {"step": s, "loss": 2.5 / s} for s in (2, 3)), ALERT]
    for _ in range(2):
        command = [sys.executable, "-c", OFFLINE, str(tmp_path), json.dumps(lines)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "failed" not in done.stderr
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1  # one id, whatever the folders: `wandb sync --append` joins them
    history = {}
    for data in records(files[0].read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history[row.pop("_step")] = {k: v for k, v in row.items() if not k.startswith("_")}
    expected = {k: v for k, v in (STEP | EVAL).items() if k not in trackers.NO_SCALARS}
    assert history[1] == expected
    assert history[3]["loss"] == pytest.approx(2.5 / 3) and sorted(history) == [1, 2, 3]
