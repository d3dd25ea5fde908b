"""The command: help with an example, exit codes, errors as one sentence on stderr, a dry run that leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import dflash
from dflash import cli
from dflash.config import Config, ConfigError
from dflash.config_target import read_target_config

ROOT = Path(__file__).resolve().parent.parent
MISSION = ROOT / "configs" / "qwen27b.yaml"
TARGET = ROOT / "configs" / "targets" / "qwen3.6-27b.json"


class OwnError(ValueError):
    __module__ = "dflash.data.tokenize"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for dflash.train.launch and dflash.target.load: records the calls, returns or raises ``outcome``."""
    seen = SimpleNamespace(calls=[], outcome=0, target=read_target_config(TARGET))

    def record(*args: Any) -> int:
        seen.calls.append(args)
        if isinstance(seen.outcome, BaseException):
            raise seen.outcome
        return seen.outcome

    def load_target_config(name: str, revision: str | None) -> Any:
        if seen.target is None:
            raise OwnError(f"{name} cannot be reached")
        return seen.target

    launch, load = ModuleType("dflash.train.launch"), ModuleType("dflash.target.load")
    launch.__dict__.update(train=record, resume=record)

    load.__dict__.update(load_target_config=load_target_config)
    monkeypatch.setattr("dflash.train.launch", launch, raising=False)
    monkeypatch.setitem(sys.modules, "dflash.train.launch", launch)
    monkeypatch.setitem(sys.modules, "dflash.target.load", load)
    return seen


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the data that the mission's recipe asks for."""
    monkeypatch.chdir(tmp_path)
    for name in ("train", "eval"):
        path = tmp_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return tmp_path


COMMANDS = "train resume eval generate report status check data export import bench".split()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"example:\n  dflash {command} " in capsys.readouterr().out


def test_version_and_bad_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, code in ([["--version"], 0], [[], 2], [["fly"], 2], [["train"], 2], [["train", "x.yaml", "--fast"], 2]):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == code
    assert dflash.__version__ in capsys.readouterr().out


def test_dry_run_of_the_mission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No weights, no GPU, no network, no data yet, from any folder: the plan is printed and nothing is created."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", str(MISSION), "--dry-run", "train.epochs=3"]) == 0
    out, err = capsys.readouterr()
    for words in ("epochs: 3", "rope_theta: 10000000.0", "26.896 billion", "1.730 billion"):
        assert words in out
    for words in ("target replica 5", "drafter 0", "memory of a target replica", "cuda:6", "checkpoints"):
        assert words in out
    assert [line.split()[:4] for line in err.splitlines()] == [
        ["dflash:", "warning:", key, "names"] for key in ("data.train", "data.eval")
    ]
    assert list(tmp_path.iterdir()) == []


def test_train_hands_over_a_resolved_config(ready: Path, launched: SimpleNamespace) -> None:
    launched.outcome = 3
    assert cli.main(["train", str(MISSION), "seed=7"]) == 3
    ((config,),) = launched.calls
    assert isinstance(config, Config)
    assert (config.seed, config.drafter.rope_theta) == (7, 1e7)
    assert config.data.train == [str(ready / "data" / "train.jsonl")]


def test_train_refuses_missing_data_and_unknown_targets(
    ready: Path, launched: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", str(MISSION), "data.train=[nowhere.jsonl]"]) == 2
    assert "data.train names nowhere.jsonl" in capsys.readouterr().err
    launched.target = None
    assert cli.main(["train", str(MISSION)]) == 1
    assert capsys.readouterr().err == "dflash: error: Qwen/Qwen3.6-27B cannot be reached\n"
    assert launched.calls == []


def test_resume_passes_overrides_on(launched: SimpleNamespace) -> None:
    assert cli.main(["resume", "runs/x", "log.every=2"]) == 0
    assert launched.calls == [(Path("runs/x"), ["log.every=2"])]


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (ConfigError(["a is 1", "b is 2"]), 2, ["dflash: error: a is 1", "dflash: error: b is 2"]),
        (OwnError("row 7:\n  no text"), 1, ["dflash: error: row 7: no text"]),
        (OSError(28, "No space left on device", "x"), 1, ["dflash: error: [Errno 28] No space left on device: 'x'"]),
        (BrokenPipeError(32, "Broken pipe"), 1, ["dflash: error: [Errno 32] Broken pipe"]),  # some connection's
        (KeyboardInterrupt(), 130, ["dflash: error: interrupted"]),
    ],
)
def test_expected_errors_are_sentences(
    launched: SimpleNamespace, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, lines: list[str]
) -> None:
    launched.outcome = error
    assert cli.main(["resume", "runs/x"]) == code
    assert capsys.readouterr().err.splitlines() == lines


def test_unexpected_errors_keep_their_traceback(launched: SimpleNamespace) -> None:
    launched.outcome = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["resume", "runs/x"])


WATCH = "import sys, dflash.report.status as s, dflash.cli; s.REFRESH_S = 0.01; sys.exit(dflash.cli.main())"


@pytest.mark.parametrize("argv", [["status", ".", "--watch"], ["train", str(MISSION), "--dry-run"]])
def test_a_reader_that_has_seen_enough_is_no_error(argv: list[str], tmp_path: Path) -> None:
    """As under ``| head -1``."""
    (tmp_path / "config.yaml").touch()
    command = [sys.executable, "-c", WATCH, *argv]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        if argv[0] == "status":
            assert process.stdout.readline() == ".: stopped before its first step\n"
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(60) == 141
    assert not [line for line in err.splitlines() if not line.startswith("dflash: warning: data.")]


@pytest.mark.parametrize("argv", [["--help"], ["train", "nowhere.yaml"]])
def test_nobody_reads_from_the_start(argv: list[str]) -> None:
    """A short text is written as the command ends; one that says nothing there keeps its code."""
    gone, end = os.pipe()
    os.close(gone)
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "dflash.cli", *argv]
    done = subprocess.run(command, env=buffered, stdout=end, stderr=subprocess.PIPE, text=True)
    os.close(end)
    wanted = {"--help": (141, ""), "train": (2, "dflash: error: config file nowhere.yaml does not exist\n")}
    assert (done.returncode, done.stderr) == wanted[argv[0]]
