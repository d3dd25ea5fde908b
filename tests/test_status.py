"""One screen of a run: in progress, finished, dead, starting, half-written last lines; and the lock it takes."""

from __future__ import annotations

import fcntl
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_plot import LEVEL

from dflash import cli
from dflash.checkpoint_folder import COMPLETE
from dflash.report import status as module
from dflash.report.series import ReportError
from dflash.report.status import duration, is_held, screen
from dflash.train.launch import RunError, locked

BEGIN = 1_000_000.0


def write_run(folder: Path, steps: int, total: int = 1000, first: int = 0, resumed_at: float = 0.0) -> Path:
    """A run of 2 s a step, begun at BEGIN (a resumed one: ``resumed_at`` seconds later)."""
    folder.mkdir(exist_ok=True)
    start = {"kind": "start", "step": first, "total_steps": total, "epochs": 4, "time": BEGIN + resumed_at}
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")
        for step in range(first + 1, steps + 1):
            when = BEGIN + resumed_at + 2.0 * (step - first)
            line: dict[str, Any] = LEVEL | {"step": step, "epoch": 4 * step / total, "time": when}
            file.write(json.dumps(line) + "\n")
    return folder


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    with open(run_dir / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def rows(text: str) -> dict[str, str]:
    """By name; the first row has none."""
    flat = re.sub(r"\n {12}(?!\[)", " ", text)
    first, *rest = flat.split("\n")
    return {"": first} | {line[:12].strip() or "bar": line[12:] for line in rest}


def test_a_run_in_progress(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 250)
    lines = [
        {"kind": "eval", "step": 100, "accepted_length": 2.5}, {"kind": "eval", "step": 200, "accepted_length": 2.25},
        {"kind": "alert", "step": 240, "verdict": "flat", "sentence": "flat over steps"},
    ]  # fmt: skip
    with open(run / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
        file.write('{"step": 251, "loss": 2.')  # in the middle of being written
    (run / "checkpoints" / "step_000200").mkdir(parents=True)
    (run / "checkpoints" / "step_000200" / COMPLETE).touch()
    with held(run):
        shown = rows(screen(run, BEGIN + 510))
        assert is_held(run)
    assert shown[""] == f"{run}: running"
    assert shown["step"] == "250 of 1,000 (25.0%), epoch 1.00 of 4"
    assert shown["bar"] == "[" + "#" * 10 + "." * 30 + "]"
    assert shown["rates"].startswith("25,000 tokens/s, 2 s a step, 25% of it waiting for features (last 200 entries)")
    assert shown["figures"].startswith("loss 2.000, accuracy 0.200, streak 1.000, learning rate 0.0006")
    assert shown["left"].startswith("25 min, done ")  # 750 steps of 2 s
    assert shown["evaluation"] == "accepted length 2.250 at step 200; best 2.500 at step 100"
    assert shown["checkpoint"].startswith("step_000200, ")
    assert shown["verdict"] == "too short to say: 250 of 2,500 entries"
    assert shown["alert"] == "1, the last at step 240: flat over steps"
    assert shown["last line"] == "10 s ago"


def test_finished_stopped_and_not_begun(tmp_path: Path) -> None:
    done = rows(screen(write_run(tmp_path / "done", 1000), BEGIN + 9999))
    assert done[""].endswith(": finished") and "left" not in done and done["checkpoint"] == "none yet"
    dead = rows(screen(write_run(tmp_path / "dead", 400), BEGIN + 9999))
    assert dead[""].endswith(": stopped") and dead["left"] == "20 min once resumed" and dead["evaluation"] == "none yet"
    new = write_run(tmp_path / "new", 0)
    assert rows(screen(new, BEGIN))["step"] == "0 of 1,000 (0.0%)"
    (tmp_path / "loading").mkdir()
    (tmp_path / "loading/config.yaml").touch()
    assert screen(tmp_path / "loading", 0).endswith("stopped before its first step")
    with held(tmp_path / "loading"):
        assert screen(tmp_path / "loading", 0).endswith("starting: data and target are being loaded")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match="holds no run"):
        screen(tmp_path / "empty", 0)


def test_the_night_between_a_kill_and_its_resume_is_not_pace(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 300)
    write_run(run, 350, first=300, resumed_at=50_000.0)
    assert rows(screen(run, BEGIN + 50_100))["left"].startswith("22 min")  # 650 steps of 2 s


def test_a_log_of_another_tool(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "loss": 2.0}) + "\n" for i in range(1, 50)))
    shown = rows(screen(tmp_path, 0))
    assert (
        shown["step"] == "49" and "loss 2.000" in shown["figures"] and not {"left", "rates", "last line"} & set(shown)
    )


def test_the_command_and_its_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", 250)
    assert cli.main(["status", str(run)]) == 0
    assert "250 of 1,000" in capsys.readouterr().out
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt
        write_run(run, 250 + len(naps), first=249 + len(naps))

    monkeypatch.setattr(module.time, "sleep", nap)
    assert cli.main(["status", str(run), "--watch"]) == 0
    assert re.findall(r"(\d+) of 1,000", capsys.readouterr().out) == ["250", "251", "252"]
    assert naps == [module.REFRESH_S] * 3
    for name in ("nowhere", "run/metrics.jsonl"):  # a log file is no folder
        assert cli.main(["status", str(tmp_path / name)]) == 1
        assert f"{name} holds no run: name the run_dir of one" in capsys.readouterr().err


def test_looking_does_not_stop_a_training_from_starting(tmp_path: Path) -> None:
    """Status holds the lock for a moment; a launcher that comes just then tries again, and gives up on a real one."""
    (tmp_path / ".lock").touch()
    with open(tmp_path / ".lock", "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        release = threading.Timer(0.1, lambda: fcntl.flock(looking, fcntl.LOCK_UN))
        release.start()
        begun = time.monotonic()
        with locked(tmp_path):
            assert time.monotonic() - begun > 0.03 and is_held(tmp_path)
        release.join()
    with locked(tmp_path), pytest.raises(RunError, match="another process is working in"), locked(tmp_path):
        pass
    assert not is_held(tmp_path)


def test_durations() -> None:
    given = {-5: "0 s", 12.4: "12 s", 99.6: "2 min", 3599: "1 h 0 min", 5400: "1 h 30 min", 172_800: "2 d 0 h"}
    assert {seconds: duration(seconds) for seconds in given} == given
