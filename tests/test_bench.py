"""The figures that benchmarks divide by: FLOPs against torch's own counter, visible pairs against the dense mask."""

import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dflash import cli
from dflash.bench import capture, sweep, whole
from dflash.bench.peers import PeerError
from dflash.bench.shapes import SHAPES, capture_flops, step_flops, target_config, visible_pairs
from dflash.bench.step import bench, build, flops, table
from dflash.config import load_config
from dflash.config_target import resolve
from dflash.data.batches import sample_anchors
from dflash.model.mask import attention_masks
from dflash.train.build import CONTRACT, new_drafter
from dflash.train.log import read_lines

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_visible_pairs_are_those_of_the_mask(kind):
    config = SHAPES["tiny"].drafter_config()
    tokens = 200
    anchors = torch.tensor([0, 1, 40, 41, 63, 64, 65, 150, 199])
    seq, pos = torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens)
    masks = attention_masks(
        [kind], config.sliding_window, config.block_size, seq, pos, torch.zeros_like(anchors, dtype=torch.int32),
        anchors, flex=False,
    )  # fmt: skip
    assert visible_pairs(config, kind, anchors.numpy()) == int(masks[kind].sum())


def test_flops_are_those_that_torch_counts():
    """Attention left out: torch counts every pair of a dense mask, the formula only visible ones."""
    trainer = build(SHAPES["tiny"], 96, 8, CPU, torch.float32, 1)
    with FlopCounterMode(display=False) as counter:
        trainer.train_step(1)
    counted = counter.get_flop_counts()["Global"]
    products = sum(value for op, value in counted.items() if "attention" not in str(op) and "bmm" not in str(op))
    config = trainer.drafter.config
    _, mask = trainer.data.sample(0)
    anchors = sample_anchors(0, trainer.plan.batches(1)[0].epoch, 0, mask, 8)
    pairs = sum(visible_pairs(config, kind, anchors) for kind in config.layer_types)
    attention = 2 * 3 * 2 * config.num_attention_heads * config.head_dim * pairs
    assert flops(trainer, 1) - attention == products


def test_flops_of_the_missions_shape_are_the_known_ones():
    """79 TFLOP in the drafter's layers, 39 in the head, some 7 in context and attention."""
    config = SHAPES["qwen27b"].drafter_config()
    anchors = np.sort(np.random.default_rng(0).permutation(np.arange(768, 3071))[:512])
    assert step_flops(config, 3072, anchors, 512 * 15) == pytest.approx(124e12, rel=0.02)


def test_bench_runs_the_real_step_and_shows_it():
    result = bench("tiny", tokens=64, anchors=4, steps=2, device=CPU, dtype=torch.float32)
    assert 0 < result["s_fastest"] <= result["s_per_step"] <= result["s_slowest"]
    shown = table(result)
    assert "4 anchors" in shown and f"{result['s_per_step']:.4f} s" in shown


def test_a_missing_peer_is_named_before_anything_is_measured():
    with pytest.raises(PeerError, match="specforge is not installed"):
        bench("tiny", tokens=64, anchors=4, steps=1, device=CPU, dtype=torch.float32, peer=True)


def test_the_command_prints_and_writes_what_was_measured(tmp_path, capsys):
    out = tmp_path / "step.json"
    argv = ["bench", "step", "--shape", "tiny", "--tokens", "64", "--anchors", "4", "--repeats", "1", "--device", "cpu"]
    assert cli.main([*argv, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert f"{result['s_per_step']:.4f} s a step" in capsys.readouterr().out
    assert (result["tokens"], result["dtype"]) == (64, "float32")
    assert cli.main([*argv, "--peer"]) == 1
    assert "specforge is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["tiny", "smollm2"])
def test_capture_flops_are_those_that_torch_counts(shape):
    """Products only: torch counts every pair of causal attention, and the plain delta rule by its chunks."""
    module = capture.random_target(shape, 4, [CPU], torch.float32)
    length = 24
    with FlopCounterMode(display=False) as counter:
        module(torch.randint(0, 500, (1, length)), use_cache=False)
    counted = counter.get_flop_counts()["Global"]
    mm = sum(value for op, value in counted.items() if str(op) in ("aten.mm", "aten.addmm"))
    products = sum(p.numel() for p in capture._products(module))
    assert 2 * length * products == mm
    config, kinds = module.config, target_config(shape, 4)
    kinds = getattr(kinds, "layer_types", None) or ["full_attention"] * 4
    pairs = sum(min(i, j) == j for i in range(length) for j in range(length))  # j may be seen by i
    attention = kinds.count("full_attention") * 4 * config.hidden_size * pairs
    linear = kinds.count("linear_attention") * length * 2 * 3 * 4 * 16 * 16
    assert capture_flops(config, length, products) == mm + attention + linear


def test_the_missions_target_is_the_one_of_its_config_file():
    told = json.loads((Path(__file__).parents[1] / "configs/targets/qwen3.6-27b.json").read_text())
    ours = target_config("qwen27b").to_dict()
    full = [i for i, kind in enumerate(ours["layer_types"]) if kind == "full_attention"]
    assert full == [i for i in range(64) if (i + 1) % told["full_attention_interval"] == 0]
    same = told.keys() - {"architectures", "dtype", "eos_token_id", "pad_token_id", "full_attention_interval"}
    assert {k: ours[k] for k in same} == {k: told[k] for k in same}


def test_capture_bench_agrees_with_plain_transformers():
    result = capture.bench("tiny", rows=2, length=30, repeats=1, device=CPU, dtype=torch.float32, peer=True)
    assert result["features_differ"] < 1e-6 and result["labels_equal"] == 1
    assert result["ratio"] == pytest.approx(result["tokens_per_s"] / result["plain"]["tokens_per_s"])
    assert f"{result['tokens_per_s']:,.0f} tokens/s" in capture.table(result)


def test_pipeline_bench_measures_both_ways_of_bringing_the_sides_together(tmp_path, capsys):
    out = tmp_path / "pipeline.json"
    sizes = ["--shape", "tiny", "--tokens", "64", "--anchors", "4", "--repeats", "2", "--device", "cpu"]
    assert cli.main(["bench", "pipeline", *sizes, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    parts = result["capture_s"] + result["step_s"]
    assert result["over_parts"] == pytest.approx(result["both_s"] / parts)
    stream = result["stream"]
    assert stream["bytes"] == 64 * (3 * 64 * 4 + 4)  # features of three layers and a label
    assert stream["over_transfer"] == pytest.approx(stream["stream_s"] / stream["transfer_s"])
    assert f"{stream['over_transfer']:.3f} of its bytes' transfer" in capsys.readouterr().out


def test_the_missions_drafter_is_the_one_of_its_config():
    folder = Path(__file__).parents[1] / "configs"
    told = json.loads((folder / "targets/qwen3.6-27b.json").read_text())
    known = target_config("qwen27b")
    config = resolve(load_config(folder / "qwen27b.yaml", check_files=False), told)
    with torch.device("meta"):
        drafter = new_drafter(config, known).config
    ours = SHAPES["qwen27b"].drafter_config()
    same = [key for key in CONTRACT if key != "mask_token_id"]  # an unused row, whichever
    assert {key: getattr(ours, key) for key in same} == {key: getattr(drafter, key) for key in same}
    assert (ours.num_target_layers, config.target.dtype) == (told["num_hidden_layers"], "bfloat16")
    assert capture.context_layers("qwen27b", 64) == config.target.context_layers


WHOLE = "bench pipeline --shape tiny --tokens 96 --anchors 4 --repeats 2 --device cpu".split()


@pytest.mark.parametrize("servers,drafters,steps", [(2, 1, 20), pytest.param(3, 2, 17, marks=pytest.mark.slow)])
def test_a_whole_run_is_measured_through_launcher_stream_and_trainer(tmp_path, capsys, servers, drafters, steps):
    out, kept = tmp_path / "whole.json", tmp_path / "kept"
    sizes = ["--servers", servers, "--drafters", drafters, "--steps", steps]
    started = time.time()
    assert cli.main([*WHOLE, *map(str, sizes), "--run-dir", str(kept), "--json", str(out)]) == 0
    took = time.time() - started
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert result["measured_tokens"] == result["measured_steps"] * drafters * 96 > 0
    assert result["tokens_per_s"] * result["measured_s"] == pytest.approx(result["measured_tokens"])
    assert result["s_per_step"] * result["measured_steps"] == pytest.approx(result["measured_s"])
    assert result["tokens_per_s_per_replica"] * servers == pytest.approx(result["tokens_per_s"])
    row = 3 * 64 * 4 + 4  # features of three layers and a label
    assert result["moved_bytes"] == steps * drafters * 96 * row
    assert result["link_bytes_per_s"] == pytest.approx(result["tokens_per_s_per_replica"] * row)
    assert 0 <= result["feature_wait_share"] <= 1 and result["replica_wait_share"] >= 0
    alone = result["parts"]["capture_s"] + result["parts"]["step_s"]
    assert result["devices_shared"] and result["bound_tokens_per_s"] == pytest.approx(96 / alone)
    assert result["over_bound"] == pytest.approx(result["tokens_per_s"] / result["bound_tokens_per_s"])
    assert f"{result['tokens_per_s']:,.0f} tokens/s" in printed and f"{result['over_bound']:.3f} of that" in printed
    lines = read_lines(kept / "run" / "metrics.jsonl")
    inside = lines[result["warm_up_steps"] - 1 : result["warm_up_steps"] + result["measured_steps"]]
    assert result["measured_s"] == inside[-1]["time"] - inside[0]["time"] and result["restarts"] == 0
    assert result["longest_gap_s"] == max(b["time"] - a["time"] for a, b in pairwise(inside))
    waited = result["replica_wait_share"] * servers * result["measured_s"]
    assert waited == pytest.approx(sum(line["replica_wait_s"] for line in inside[1:]))
    assert sum(line["replica_wait_s"] for line in lines) <= servers * took
    assert len(lines) == steps and "has random weights" in (kept / "train.log").read_text()
    on_gpus = {"mfu": 0.5, "memory_mib": {"0": 2048, "7": 512}, "parts": result["parts"] | {"step_mfu": 0.6}}
    shown = whole.table(result | on_gpus | {"restarts": 1, "longest_gap_s": 7.5})
    assert "MFU 50% of 790 TFLOP/s each (60% by itself)" in shown and "0: 2.0, 7: 0.5" in shown
    assert "restarts  1" in shown and "7.5 s" in shown and "restarts" not in printed
    resume = [sys.executable, "-m", "dflash.cli", "resume", kept / "run"]
    subprocess.run(resume, check=True, capture_output=True)  # nothing is left to do, and all is there to do it with
    assert cli.main([*WHOLE, *map(str, sizes), "--run-dir", str(kept)]) == 2
    assert "holds something already" in capsys.readouterr().err


def test_a_whole_run_that_fails_names_its_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "faults"))
    monkeypatch.setenv("DFLASH_TEST_FAULT", "raise:1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert cli.main([*WHOLE, "--servers", "2", "--steps", "20"]) == 1
    (log,) = tmp_path.glob("dflash-bench-*/train.log")
    said = capsys.readouterr().err
    assert said.endswith(f"error: the run ended with exit code 1; its last lines are above, all of them in {log}\n")
    assert "replica 1 (rank 1, cpu) failed on batch" in said and "illegal memory access" in said


def test_a_whole_run_that_cannot_be_is_refused_before_it_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(whole, "run", None)
    kept = ["--run-dir", str(tmp_path / "kept")]
    for argv, said in (
        ([*WHOLE, "--servers", "2", "--steps", "19"], "--steps 19 leaves too few to measure .* give 20 or more"),
        ([*WHOLE, "--servers", "2", "--gpus-per-replica", "2", *kept], "it needs 2 different devices of one machine"),
        ([*WHOLE, "--servers", "2", "--layers", "3", *kept], "target.context_layers lists"),
        ([*WHOLE, *kept], "give --servers too"),
        (["bench", "step", "--servers", "2"], "--servers is of dflash bench pipeline"),
    ):
        assert cli.main(argv) == 2 and re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "kept").exists()
    monkeypatch.setattr(whole.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert cli.main([*WHOLE, "--servers", "2", *kept]) == 2
    assert "the checkpoint at the end takes" in capsys.readouterr().err and not (tmp_path / "kept").exists()


def job(**over):
    sizes = dict(shape="tiny", servers=6, gpus_per_replica=1, drafters=1, steps=100, tokens=10, anchors=4, repeats=1)
    return whole.Job(**(sizes | dict(device=torch.device("cuda", 0), dtype=torch.bfloat16, layers=None) | over))


@pytest.mark.parametrize(
    "gpus,over,seconds",
    [
        (8, {}, 1.0),  # seven devices: the drafter decides
        (8, {"servers": 2}, 1.5),  # now the two servers do
        (8, {"servers": 3, "gpus_per_replica": 2, "drafters": 2}, 0.5),
        (8, {"servers": 1, "gpus_per_replica": 2}, 1.5),
        (1, {"servers": 2, "drafters": 2}, 4.0),  # all on one
        (2, {"servers": 2}, 2.5),  # the drafter beside a server
    ],
)
def test_the_bound_is_where_the_busiest_device_has_no_time_left(monkeypatch, gpus, over, seconds):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert whole.bound(job(**over), {"capture_s": 3.0, "step_s": 1.0}) == pytest.approx(10 / seconds)


def test_memory_of_gpus_is_the_most_that_was_seen(tmp_path, monkeypatch):
    told = tmp_path / "told"
    told.write_text("0, 100\n1, 7\n")
    program = tmp_path / "nvidia-smi"
    asked = "--query-gpu=index,memory.used --format=csv,noheader,nounits"
    program.write_text(f'#!/bin/sh\n[ "$*" = "{asked}" ] && cat {told} && echo x >> {tmp_path / "looks"}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def looked(count):
        end = time.monotonic() + 20
        while not (tmp_path / "looks").exists() or len((tmp_path / "looks").read_text().split()) < count:
            assert time.monotonic() < end
            time.sleep(0.02)

    with whole.most_memory() as most:
        looked(1)
        told.write_text("0, 50\n1, 70000\n")
        looked(3)
    assert most == {"0": 100, "1": 70000}
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with whole.most_memory() as none:
        pass
    assert none == {}


def test_sweep_measures_every_size_and_draws_it(tmp_path, monkeypatch, capsys):
    small = {"anchors": [2, 4, 8], "tokens": [64, 128], "vocab_size": [512, 1024]}
    monkeypatch.setattr(sweep, "SIZES", {vary: [16 * n for n in values] for vary, values in small.items()})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    plot, out = tmp_path / "cost.svg", tmp_path / "cost.json"
    line = ["bench", "sweep", "--shape", "tiny", "--tokens", "64", "--anchors", "4", "--repeats", "1"]
    assert cli.main([*line, "--device", "cpu", "--plot", str(plot), "--json", str(out)]) == 0
    points = json.loads(out.read_text())["points"]
    work = {(p["vary"], p["value"]): p["tflop"] for p in points}
    sizes = small | {"drafters": [1, 2]}
    assert list(work) == [(v, n) for v, values in sizes.items() for n in values]
    assert work["drafters", 1] == work["anchors", 4]
    assert 1.9 < work["drafters", 2] / work["drafters", 1] < 2.1  # a batch each, with other anchors
    assert work["anchors", 4] == work["tokens", 64] == work["vocab_size", 512]  # the point they share, measured once
    assert len({p["s_per_step"] for p in points if (p["vary"], p["value"]) in {("anchors", 4), ("tokens", 64)}}) == 1
    # Twice the anchors: twice the slots' work, the context's stays.
    assert 1.5 < work["anchors", 8] / work["anchors", 4] < 2.0 and work["vocab_size", 1024] > work["vocab_size", 512]
    assert capsys.readouterr().out.count(" s a step") == len(points)
    assert plot.stat().st_size > 5000
    assert cli.main([*line, "--device", "cpu", "--plot", str(tmp_path / "cost.txt")]) == 1
    for argv, said in ((["step", "--plot", str(plot)], "--plot draws"), (["sweep", "--peer"], "--peer has nobody")):
        assert cli.main(["bench", *argv]) == 2 and said in capsys.readouterr().err
