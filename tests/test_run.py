"""Whole runs through the command line on a tiny target: train, kill, resume, interrupt, refuse."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from tiny import save_target, tiny_llama, tiny_tokenizer

from dflash.train.log import TIMING_KEYS, read_lines

WORDS = "one two three four five six seven eight nine ten".split()


def write_run(folder: Path, **over) -> Path:
    """A target, its data and a config in ``folder``; returns the config's path."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    save_target(folder / "target", tiny_llama(0), tokenizer)
    g = random.Random(0)

    def row(i):
        text = " ".join(g.choice(WORDS) for _ in range(g.randint(2, 30)))
        return {"messages": [{"role": "user", "content": g.choice(WORDS)}, {"role": "assistant", "content": text}]}

    for name, count in (("train", 60), ("eval", 4)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(count)))
    config = {
        "run_dir": str(folder / "run"),
        "target": {"model": str(folder / "target"), "dtype": "float32", "context_layers": [0, 2]},
        "placement": {"target": ["cpu"], "drafter": ["cpu"]},
        "drafter": {"num_hidden_layers": 1, "block_size": 4, "mask_token_id": 5},
        "data": {
            "train": [str(folder / "train.jsonl")], "eval": [str(folder / "eval.jsonl")], "max_length": 64,
            "length_buckets": 2, "cache_dir": str(folder / "cache"),
        },
        "train": {"epochs": 2, "grad_accumulation": 2, "tokens_per_batch": 128, "anchors_per_batch": 24},
        "checkpoint": {"every": 3, "keep_last": 2},
        "eval": {"every": 5, "samples": 4, "max_new_tokens": 12},
    }  # fmt: skip
    for key, value in over.items():
        section, _, name = key.partition("__")
        config[section] = (config.get(section, {}) | {name: value}) if name else value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def as_from_a_terminal():
    """A job in the background, or under nohup, ignores these and hands that on."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def dflash(*args, slow=False, **kwargs):
    """A command; ``slow`` has a training last long enough to be killed while it trains."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if slow:
        env |= {"PYTHONPATH": str(Path(__file__).parent / "faults"), "DFLASH_TEST_FAULT": "slow:0"}
    command = [sys.executable, "-m", "dflash.cli", *map(str, args)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=as_from_a_terminal,
        **kwargs,
    )  # fmt: skip


def finish(process, code=0, timeout=240):
    out, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, out
    return out


def outcome(run: Path):
    """All that must be equal: metrics lines without timing, and the newest checkpoint to the bit."""
    lines = []
    for line in read_lines(run / "metrics.jsonl") + read_lines(run / "metrics.jsonl", "eval"):
        lines.append({k: v for k, v in line.items() if k not in TIMING_KEYS})
    newest = max((run / "checkpoints").glob("step_*"))
    return lines, load_file(newest / "model.safetensors"), load_file(newest / "optimizer.safetensors")


def assert_same(a, b):
    assert a[0] == b[0]
    for left, right in zip(a[1:], b[1:], strict=True):
        assert left.keys() == right.keys() and all((left[k] == right[k]).all() for k in left)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run of the default tiny config."""
    folder = tmp_path_factory.mktemp("finished")
    out = finish(dflash("train", write_run(folder)))
    return folder, out


def kill_when(process, run: Path, steps: int) -> bool:
    """``kill -9`` once ``steps`` metrics lines are there; False if the run ended before."""
    while process.poll() is None:
        path = run / "metrics.jsonl"
        if path.exists() and len(path.read_bytes().split(b"\n")) > steps:
            process.kill()
            process.wait()
            return True
        time.sleep(0.005)
    return False


def test_a_run_writes_what_it_promises(finished):
    folder, _ = finished
    run = folder / "run"
    steps, evals = read_lines(run / "metrics.jsonl"), read_lines(run / "metrics.jsonl", "eval")
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1)) and len(steps) >= 8
    for key in (
        "step epoch loss accuracy top4_acc top8_acc avg_streak ddtree_streak4 ddtree_streak8 streak_limit acc_pos1 "
        "acc_pos3 anchors anchor_coverage grad_norm lr noise_std tokens samples tokens_per_s feature_wait_s step_s time"
    ).split():
        assert all(key in line for line in steps), key
    assert steps[-1]["epoch"] == 2.0 and steps[-1]["lr"] < steps[2]["lr"]
    assert [line["step"] for line in evals] == [*range(0, len(steps), 5), len(steps)]
    assert all(1.0 <= line["accepted_length"] <= 4.0 for line in evals)
    assert sorted(p.name for p in run.iterdir()) == [
        ".lock", "checkpoints", "config.yaml", "eval_answers.jsonl", "logs", "metrics.jsonl",
    ]  # fmt: skip
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert resolved["drafter"]["head_dim"] and resolved["drafter"]["rope_theta"]
    assert "torch" in (run / "config.yaml").read_text().split("\n")[0]


def test_the_same_config_trains_the_same_run(finished, tmp_path):
    folder, _ = finished
    finish(dflash("train", folder / "run" / "config.yaml", f"run_dir={tmp_path / 'again'}"))
    assert_same(outcome(folder / "run"), outcome(tmp_path / "again"))


def test_kill_and_resume_equals_a_run_never_killed(finished, tmp_path):
    folder, _ = finished
    process = dflash("train", write_run(tmp_path), slow=True)
    assert kill_when(process, tmp_path / "run", 6)
    out = finish(dflash("resume", tmp_path / "run"))
    assert "continuing after step" in out
    assert_same(outcome(folder / "run"), outcome(tmp_path / "run"))


@pytest.mark.slow
def test_kill_and_resume_with_muon_dropout_and_features_read_ahead(tmp_path):
    """In the middle of an epoch. Moments of AdamW are no help to Muon: a config changed by hand is refused."""
    over = {
        "train__optimizer": "muon", "train__weight_decay": 1.0, "train__dropout": 0.2,
        "data__features": str(tmp_path / "features"),
    }  # fmt: skip
    finish(dflash("train", write_run(tmp_path / "a", **over)))
    data = [f"data.{key}=[{tmp_path / 'a' / key}.jsonl]" for key in ("train", "eval")]
    process = dflash("train", tmp_path / "a" / "config.yaml", f"run_dir={tmp_path / 'run'}", *data, slow=True)
    assert kill_when(process, tmp_path / "run", 7)
    config = tmp_path / "run" / "config.yaml"
    whole = config.read_text()
    config.write_text(whole.replace("optimizer: muon", "optimizer: adamw"))
    out = finish(dflash("resume", tmp_path / "run"), code=1)
    assert "of another train.optimizer; put it back as it was" in out and "Traceback" not in out
    config.write_text(whole)
    assert "continuing after step" in finish(dflash("resume", tmp_path / "run"))
    assert_same(outcome(tmp_path / "a" / "run"), outcome(tmp_path / "run"))


@pytest.mark.slow
def test_kills_at_many_moments(finished, tmp_path):
    """Killed again and again, at moments that fall into start-up, saves, evaluations and steps."""
    folder, _ = finished
    process, g = dflash("train", write_run(tmp_path)), random.Random(1)
    kills = 0
    for lines in (0, 1, 2, 4, 5, 7, 8, 10):
        if kill_when(process, tmp_path / "run", lines):
            kills += 1
        time.sleep(g.random() * 0.05)
        process = dflash("resume", tmp_path / "run")
    finish(process)
    assert kills >= 6
    assert_same(outcome(folder / "run"), outcome(tmp_path / "run"))
    assert not list((tmp_path / "run" / "checkpoints").glob(".writing_*"))


@pytest.mark.parametrize("number,code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_last_finished_step(finished, tmp_path, number, code):
    folder, _ = finished
    process = dflash("train", write_run(tmp_path, checkpoint__every=1000), slow=True)
    while (
        len(read_lines(tmp_path / "run" / "metrics.jsonl") if (tmp_path / "run" / "metrics.jsonl").exists() else []) < 2
    ):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(number)
    out = finish(process, code)
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    newest = max((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert newest.name == f"step_{len(steps):06d}" and "dflash resume" in out
    finish(dflash("resume", tmp_path / "run", "checkpoint.every=3"))
    assert_same(outcome(folder / "run"), outcome(tmp_path / "run"))


def test_features_on_disk_train_the_same_run_to_rounding(finished, tmp_path):
    """And a second run reuses them; a config they do not fit is refused with the difference."""
    folder, _ = finished
    config = write_run(tmp_path, data__features=str(tmp_path / "features"))
    finish(dflash("train", config))
    online, stored = outcome(folder / "run")[0], outcome(tmp_path / "run")[0]
    for a, b in zip(online, stored, strict=True):
        for key in a:
            assert a[key] == (b[key] if key == "kind" else pytest.approx(b[key], rel=2e-3, abs=1e-5)), key
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "features").glob("*.safetensors")}
    finish(dflash("train", config, f"run_dir={tmp_path / 'second'}"))
    assert before and before == {p: p.stat().st_mtime_ns for p in (tmp_path / "features").glob("*.safetensors")}
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "second"))
    out = finish(dflash("train", config, f"run_dir={tmp_path / 'third'}", "target.context_layers=[0,1]"), code=1)
    assert "context_layers ([0, 2] there, [0, 1] here)" in out and "Traceback" not in out


def test_a_failed_start_leaves_the_folder_free_and_says_why_in_a_sentence(tmp_path):
    config = write_run(tmp_path)
    for override, code, word in (
        ("train.grad_accumulation=1000", 1, "train.grad_accumulation is 1000 but an epoch has only"),
        ("placement={target: [cuda:99], drafter: [cuda:99]}", 2, "cuda:99 is not here"),
        ("drafter.mask_token_id=1", 2, "mask_token_id 1 occurs in the data (first: "),
        ("drafter.init_from=" + str(tmp_path / "target"), 1, "lacks block_size"),
    ):
        if override.startswith("placement="):
            overrides = ["placement.target=[cuda:99]", "placement.drafter=[cuda:99]"]
        else:
            overrides = [override]
        out = finish(dflash("train", config, *overrides), code)
        assert word in out and "Traceback" not in out
        assert not (tmp_path / "run" / "config.yaml").exists()
    finish(dflash("train", config, "train.epochs=1"))


def test_a_drafter_to_start_from_is_loaded_or_refused_by_what_differs(finished, tmp_path):
    folder, _ = finished
    start = max((folder / "run" / "checkpoints").glob("step_*"))
    config = write_run(tmp_path, drafter__init_from=str(start))
    finish(dflash("train", config, "train.epochs=1"))
    evals = read_lines(tmp_path / "run" / "metrics.jsonl", "eval")
    before = read_lines(folder / "run" / "metrics.jsonl", "eval")
    assert evals[0]["accepted_length"] == before[-1]["accepted_length"]  # step 0 is that drafter
    first = read_lines(tmp_path / "run" / "metrics.jsonl")[0]["loss"]
    assert first < read_lines(folder / "run" / "metrics.jsonl")[0]["loss"]
    out = finish(dflash("train", config, f"run_dir={tmp_path / 'b'}", "drafter.block_size=6"), code=2)
    assert "block_size (4 there, 6 here)" in out


def test_folders_are_guarded(finished, tmp_path):
    folder, _ = finished
    assert "holds a run already" in finish(dflash("train", folder / "config.yaml"), code=1)
    foreign = tmp_path / "foreign"
    (foreign / "checkpoints" / "step_000777").mkdir(parents=True)
    assert "holds a run already" in finish(dflash("train", folder / "config.yaml", f"run_dir={foreign}"), code=1)
    assert (foreign / "checkpoints" / "step_000777").exists()  # somebody's: nothing was touched
    assert "holds no run" in finish(dflash("resume", tmp_path), code=1)
    assert "train.learning_rate: a resume" in finish(
        dflash("resume", folder / "run", "train.learning_rate=1.0"), code=2
    )
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    assert "done" in finish(dflash("resume", folder / "run"))
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before  # a finished run stays as it is
    process = dflash("train", write_run(tmp_path, train__epochs=50))
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    assert "another process is working" in finish(dflash("resume", tmp_path / "run"), code=1)
    process.kill()
    process.wait()


def test_changed_data_are_refused_on_resume(finished, tmp_path):
    process = dflash("train", write_run(tmp_path), slow=True)
    assert kill_when(process, tmp_path / "run", 8)
    with open(tmp_path / "train.jsonl", "a") as file:
        file.write((tmp_path / "train.jsonl").read_text().split("\n")[0] + "\n")
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    out = finish(dflash("resume", tmp_path / "run"), code=1)
    assert "data changed since the run began" in out and "Traceback" not in out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines  # a refused resume touches nothing


def test_an_edited_config_or_another_target_is_refused_on_resume(finished, tmp_path):
    process = dflash("train", write_run(tmp_path), slow=True)
    assert kill_when(process, tmp_path / "run", 8)
    path = tmp_path / "run" / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("learning_rate: 0.0006", "learning_rate: 0.0007"))
    assert path.read_text() != text
    assert "config changed since" in finish(dflash("resume", tmp_path / "run"), code=1)
    path.write_text(text)
    save_target(tmp_path / "target", tiny_llama(1), tiny_tokenizer())
    assert "target changed since" in finish(dflash("resume", tmp_path / "run"), code=1)


def test_changed_evaluation_is_generated_anew_on_resume(finished, tmp_path):
    process = dflash("train", write_run(tmp_path), slow=True)
    assert kill_when(process, tmp_path / "run", 8)
    finish(dflash("resume", tmp_path / "run", "eval.samples=2", "eval.max_new_tokens=20"))
    answers = (tmp_path / "run" / "eval_answers.jsonl").read_text().strip().split("\n")
    assert len(answers) == 1 + 2
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["eval"]["samples"] == 2
