"""dflash check: every fault that it must catch, by name, on tiny targets in real folders; one fault hides no other."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tiny import CHATML, EOS, PAD, save_target, tiny_llama, tiny_qwen3, tiny_tokenizer

from dflash import cli
from dflash.check import check, placement
from dflash.config import load_config
from dflash.config_target import read_target_config, resolve
from dflash.target.model import load_target

ROOT = Path(__file__).resolve().parent.parent
WORDS = "one two three four five six seven eight nine ten".split()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), tiny_llama(0))


@pytest.fixture(scope="module")
def own_rows(target: Path) -> list[dict[str, Any]]:
    """Answers of the target itself, as tokens: text of a random model does not survive decoding."""
    loaded = load_target(str(target), dtype=torch.float32, device="cpu", context_layers=[0])
    g = random.Random(0)
    prompts = [[1, *(g.randrange(10, 190) for _ in range(g.randint(3, 9)))] for _ in range(40)]
    answers = loaded.greedy(prompts, 24, 40, progress=False)
    rows = [(p, a) for p, a in zip(prompts, answers, strict=True) if len(a) > 2 and 5 not in p + a]
    assert len(rows) > 20
    return [{"input_ids": [*p, *a], "loss_mask": [0] * len(p) + [1] * len(a)} for p, a in rows]


def others_rows(count: int = 40) -> list[dict[str, Any]]:
    """Words that the random target would not have said."""
    g = random.Random(1)

    def text(low: int, high: int) -> str:
        return " ".join(g.choice(WORDS) for _ in range(g.randint(low, high)))

    return [
        {"messages": [{"role": "user", "content": text(1, 3)}, {"role": "assistant", "content": text(8, 20)}]}
        for _ in range(count)
    ]


@pytest.fixture
def run(tmp_path: Path, target: Path, own_rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> Any:
    """Checks a config of the tiny target with what is changed; returns exit code, judged lines and the whole page."""

    def go(rows: list[dict[str, Any]] | None = None, **over: Any) -> tuple[int, list[tuple[str, str, str]], str]:
        data = tmp_path / "train.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in (own_rows if rows is None else rows)))
        config: dict[str, Any] = {
            "run_dir": str(tmp_path / "run"),
            "target": {"model": str(target), "dtype": "float32", "context_layers": [0, 2]},
            "placement": {"target": ["cpu"], "drafter": ["cpu"]},
            "drafter": {"num_hidden_layers": 1, "block_size": 4, "mask_token_id": 5},
            "data": {"train": [str(data)], "max_length": 64, "length_buckets": 2, "cache_dir": str(tmp_path / "c")},
            "train": {"epochs": 2, "grad_accumulation": 2, "tokens_per_batch": 128, "anchors_per_batch": 24},
        }
        for key, value in over.items():
            section, _, name = key.partition("__")
            config[section] = config.get(section, {}) | {name: value}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        capsys.readouterr()
        code = check(path)
        page = capsys.readouterr().out
        assert not (tmp_path / "run").exists()
        flat = re.sub(r"\n {20,}", " ", page)
        lines = [m.groups() for m in re.finditer(r"^  (pass|warn|fail)  (\S.{16}) (.*)$", flat, re.M)]
        return code, [(level, name.strip(), text) for level, name, text in lines], page

    return go


def found(lines: list[tuple[str, str, str]], level: str, name: str, words: str) -> bool:
    return any(one == level and name == what and words in text for one, what, text in lines)


def test_a_sound_config_passes(run: Any) -> None:
    code, lines, page = run()
    assert code == 0 and not [line for line in lines if line[0] == "fail"], page
    names = {name for _, name, _ in lines}
    assert names >= {
        "rows", "loss mask", "lengths", "buckets", "steps", "anchors", "embedding", "role", "unused", "context layers",
        "memory of cpu", "disk", "features", "agreement", "accepted length", "target", "drafter", "run",
    }  # fmt: skip
    assert found(lines, "pass", "agreement", "100.0%")
    assert found(lines, "pass", "accepted length", "of an untrained drafter")
    assert found(lines, "pass", "context layers", "[0, 2] of 4: fc reads their outputs, 64 -> 32")
    assert "⟦" in page and found(lines, "pass", "measured", "one micro-batch on this device") and "0 failed" in page


@pytest.mark.parametrize(("token", "what"), [(EOS, "eos"), (PAD, "pad"), (1, "bos")])
def test_mask_token_with_a_meaning(run: Any, token: int, what: str) -> None:
    code, lines, _ = run(drafter__mask_token_id=token)
    assert code == 1 and found(lines, "fail", "role", f"which is {what}")


def test_mask_token_in_use(run: Any) -> None:
    code, lines, _ = run(others_rows(), drafter__mask_token_id=tiny_tokenizer()("one")["input_ids"][0])
    assert code == 1 and found(lines, "fail", "unused", "train.jsonl:") and found(lines, "warn", "kind", "ordinary")
    _, lines, _ = run(drafter__mask_token_id=192)
    assert found(lines, "fail", "config", "drafter.mask_token_id is 192") and found(
        lines, "warn", "data", "not checked"
    )


@pytest.mark.parametrize("label", ["final", 2])
def test_label_layer_among_the_context_layers(run: Any, label: Any) -> None:
    code, lines, _ = run(target__label_layer=label, target__context_layers=[0, 3 if label == "final" else 2])
    assert code == 1 and found(lines, "fail", "config", "fc must never see the layer that makes the labels")
    assert found(lines, "warn", "placement", "the config must be right first")


def test_all_config_faults_at_once(run: Any) -> None:
    _, lines, _ = run(target__context_layers=[0, 7], drafter__block_size=1, train__nonsense=3)
    faults = [text for level, name, text in lines if level == "fail" and name == "config"]
    assert len(faults) == 2 and all(any(key in f for f in faults) for key in ("drafter.block_size", "train.nonsense"))


def test_loss_mask_that_is_all_prompt(run: Any, own_rows: list[dict[str, Any]]) -> None:
    silent = [row | {"loss_mask": [0] * len(row["loss_mask"])} for row in own_rows]
    code, lines, _ = run(silent)
    assert code == 1 and found(lines, "fail", "loss mask", f"{len(silent)} of {len(silent)} rows are all prompt")
    assert found(lines, "warn", "agreement", "not checked: the data cannot be read")
    assert found(lines, "pass", "memory of cpu", "GiB") and found(lines, "pass", "target", "loaded on cpu")
    _, lines, _ = run(silent[:2] + own_rows[2:])
    assert found(lines, "warn", "loss mask", "2 rows are all prompt") and found(lines, "pass", "agreement", "100.0%")


def test_loss_mask_that_is_all_ones(run: Any, own_rows: list[dict[str, Any]]) -> None:
    loud = [row | {"loss_mask": [1] * len(row["loss_mask"])} for row in own_rows]
    code, lines, _ = run(loud)
    assert code == 1 and found(lines, "fail", "loss mask", f"{len(loud)} rows are all ones")
    code, lines, _ = run(loud[:2] + own_rows[2:])
    assert code == 0 and found(lines, "warn", "loss mask", "2 rows are all ones")


def template(tmp_path: Path, text: str) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = text
    return str(save_target(tmp_path / "templated", tiny_llama(0), tokenizer))


def test_a_template_that_supervises_everything(run: Any, tmp_path: Path) -> None:
    bare = "{% if not add_generation_prompt %}{{ messages[-1]['content'] }}<|im_end|>{% endif %}"
    code, lines, _ = run(others_rows(), target__model=template(tmp_path, bare))
    assert code == 1 and found(lines, "fail", "loss mask", "are all ones")


def test_a_template_that_rewrites_earlier_turns(run: Any, tmp_path: Path) -> None:
    rewriting = CHATML.replace(
        "{{ m['content'] }}",
        "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split(' ')[-1] }}"
        "{% else %}{{ m['content'] }}{% endif %}",
    )
    rows = [
        {"messages": one["messages"] + two["messages"]} for one, two in zip(*[iter(others_rows())] * 2, strict=True)
    ]
    _, lines, page = run(rows, target__model=template(tmp_path, rewriting))
    assert found(lines, "warn", "template", "20 turns not trained on: template rewrites the turn once others follow"), (
        page
    )
    _, lines, _ = run(rows)
    assert not [line for line in lines if line[1] == "template"]


def test_off_policy_data(run: Any) -> None:
    code, lines, _ = run(others_rows())
    assert code == 1 and found(lines, "fail", "agreement", "off-policy data: let the target answer")


def test_answers_shorter_than_two_tokens(run: Any, own_rows: list[dict[str, Any]]) -> None:
    empty = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": ""}]}
    code, lines, _ = run([empty] * 5)
    assert code == 1 and found(lines, "fail", "short answers", "5 of 5 rows have answers shorter than two tokens")
    code, lines, _ = run([empty] * 5 + own_rows)
    assert code == 0 and found(lines, "warn", "short answers", "5 rows dropped: answers shorter than two tokens")


def test_a_target_that_gives_zeros(run: Any, tmp_path: Path) -> None:
    module = tiny_qwen3(0)  # no biases: what begins as zero stays zero
    with torch.no_grad():
        module.get_input_embeddings().weight.zero_()
    code, lines, _ = run(target__model=str(save_target(tmp_path / "zeros", module)))
    assert code == 1 and found(lines, "fail", "features", "all zero")
    assert found(lines, "fail", "agreement", "chosen 0.0%") or found(lines, "fail", "agreement", "off-policy")
    assert found(lines, "warn", "mask embedding", "a row of zeros")


def test_more_memory_than_the_device_has(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "host_memory", lambda: 2e5)
    code, lines, _ = run()
    assert code == 1 and found(lines, "fail", "memory of cpu", "more than the device has")
    assert found(lines, "pass", "agreement", "100.0%")
    monkeypatch.undo()
    code, lines, _ = run(train__anchors_per_batch=2_000_000_000)
    assert code == 1 and found(lines, "fail", "memory of cpu", "more than the device has")


def test_devices_that_are_not_here(run: Any) -> None:
    code, lines, _ = run(placement__target=["cuda:98"], placement__drafter=["1/cuda:99"])
    assert code == 1 and found(lines, "fail", "devices", "and not cuda:98 (")
    assert found(lines, "warn", "1/cuda:99", "on machine 1") and found(lines, "warn", "features", "not loaded here")
    assert found(lines, "pass", "rows", "kept") and any(name == "balance" for _, name, _ in lines)


def test_several_processes_are_estimated_from_the_target_here(run: Any) -> None:
    code, lines, page = run(placement__target=["cpu", "cpu"])
    assert code == 0 and found(lines, "pass", "assumed", "the target's rate on the sample above"), page
    assert any(name == "balance" for _, name, _ in lines) and found(lines, "pass", "target", "replicas: 2, devices: 2")
    (needed,) = [float(text.split()[0]) for _, name, text in lines if name == "memory of cpu"]
    assert needed >= 0 and "target replica 1    cpu" in page


def test_files_and_targets_that_are_not_there(run: Any, target: Path) -> None:
    code, lines, _ = run(data__train=["nowhere.jsonl"])
    assert code == 1 and found(lines, "fail", "files", "data.train names nowhere.jsonl")
    assert found(lines, "pass", "target", "loaded") and found(lines, "warn", "unused", "not checked")
    assert found(lines, "warn", "rows", "not checked: a file of data.train is missing")
    assert sum(level == "fail" for level, _, _ in lines) == 1
    code, lines, _ = run(data__eval=["./none.jsonl", "other.jsonl"])
    assert [(name, text.split()[2].rstrip(",")) for level, name, text in lines if level == "fail"] == [
        ("files", "./none.jsonl"), ("files", "other.jsonl"),
    ]  # fmt: skip
    assert code == 1 and found(lines, "warn", "data.eval", "not checked") and found(lines, "pass", "rows", "kept")
    assert found(lines, "pass", "accepted length", "of an untrained drafter")
    code, lines, _ = run(target__model="./nowhere", target__config=str(target / "config.json"))
    assert code == 1 and found(lines, "fail", "target", "nowhere does not exist")
    assert sum(level == "fail" for level, _, _ in lines) == 1
    assert found(lines, "warn", "target.config", "sizes are taken from") and found(
        lines, "pass", "memory of cpu", "GiB"
    )


def test_a_target_whose_weights_are_broken(run: Any, tmp_path: Path, target: Path) -> None:
    shutil.copytree(target, tmp_path / "broken")
    (tmp_path / "broken/model.safetensors").write_bytes(b"garbage")
    code, lines, _ = run(target__model=str(tmp_path / "broken"))
    assert code == 1 and found(lines, "fail", "target", "is broken (Error while deserializing")
    assert found(lines, "pass", "rows", "kept") and any(name == "run" for _, name, _ in lines)


def test_what_was_not_checked_says_which_fault_stood_in_its_way(run: Any) -> None:
    _, lines, _ = run(target__model="./nowhere")
    assert found(lines, "warn", "data", "not checked: there is no target")
    _, lines, _ = run(train__epochs=-1)
    assert found(lines, "warn", "data", "not checked: the config must be right first")


def test_data_files_without_a_row(run: Any) -> None:
    code, lines, _ = run(rows=[])
    assert code == 1 and found(lines, "fail", "rows", "the files of data.train are empty")


def test_seven_gpus_that_are_not_here_are_one_line(run: Any) -> None:
    gpus = [f"cuda:{i}" for i in range(7)]
    code, lines, _ = run(
        placement__target=gpus[:4], placement__drafter=gpus[4:], train__grad_accumulation=3, target__dtype="bfloat16"
    )
    ((level, _, text),) = [line for line in lines if line[1] == "devices"]
    assert code == 1 and level == "fail" and all(f"{gpu} (" in text for gpu in gpus)


def test_folders_that_cannot_be_written_to(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.os, "access", lambda path, mode: False)
    code, lines, _ = run()
    assert code == 1 and found(lines, "fail", "disk", "cannot be written to; name another folder")


def test_an_init_from_that_is_not_there_fails_once(run: Any) -> None:
    code, lines, _ = run(drafter__init_from="nowhere")
    (text,) = [text for level, _, text in lines if level == "fail"]
    assert code == 1 and "there is no folder nowhere" in text


def test_init_from_is_measured_and_a_foreign_one_refused(run: Any, tmp_path: Path, target: Path) -> None:
    from dflash.train.build import new_drafter

    code, _, _ = run()
    config = load_config(tmp_path / "config.yaml")
    config = resolve(config, read_target_config(target / "config.json"))
    known = load_target(str(target), dtype=torch.float32, device="cpu", context_layers=[0]).config
    new_drafter(config, known).save_pretrained(tmp_path / "given")
    code, lines, page = run(drafter__init_from=str(tmp_path / "given"))
    assert code == 0 and found(lines, "warn", "accepted length", "no better than an untrained one"), page
    code, lines, _ = run(drafter__init_from=str(tmp_path / "given"), drafter__block_size=8)
    assert code == 1 and found(lines, "fail", "accepted length", "block_size (4 there, 8 here)")


def test_the_command_takes_overrides(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    assert cli.main(["check", str(tmp_path / "config.yaml"), "drafter.mask_token_id=2"]) == 1
    assert "which is eos" in capsys.readouterr().out
    assert cli.main(["check", str(tmp_path / "config.yaml")]) == 0


# --- the numbers behind it -----------------------------------------------------------------------------------------


def mission(**over: str) -> tuple[Any, Any]:
    target = read_target_config(ROOT / "configs" / "targets" / "qwen3.6-27b.json")
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in over.items()]
    return resolve(load_config(ROOT / "configs" / "qwen27b.yaml", overrides, check_files=False), target), target


def test_work_of_the_mission() -> None:
    """Facts: 157 to 170 TFLOP for the target's 3,072 tokens; 79 + 39 + 3 + 4 for the drafter's at 512 anchors."""
    config, target = mission(train__tokens_per_batch="3072", data__max_length="3072")
    work = placement.work_of(config, target, None)
    assert work.tokens == 3072 and 157e12 < work.capture < 172e12
    assert work.context + 512 * work.block == pytest.approx(125e12, rel=0.06)


def test_balanced_anchors_make_both_sides_equally_fast(capsys: pytest.CaptureFixture[str]) -> None:
    from dflash.check.page import Page

    config, target = mission(train__tokens_per_batch="3072", data__max_length="3072")
    page = Page()
    placement.check_rates(page, config, target, None, None)
    (level, _, text), *_ = [line for line in page.lines if line[1] == "balance"]
    wanted = int(re.search(r"anchors_per_batch (\d+)", text).group(1))  # type: ignore[union-attr]
    assert level == "warn" and "the drafter takes" in text and 60 < wanted < 128
    config, target = mission(
        train__tokens_per_batch="3072", data__max_length="3072", train__anchors_per_batch=str(wanted)
    )
    page = Page()
    placement.check_rates(page, config, target, None, None)
    rates = [float(re.match(r"[\d,]+", text).group().replace(",", "")) for _, _, text in page.lines[1:3]]  # type: ignore[union-attr]
    assert rates[0] == pytest.approx(rates[1], rel=0.02)
    assert "TFLOP/s at best" in capsys.readouterr().out


def test_flops_of_a_dense_target_are_two_a_weight_and_attention(target: Path) -> None:
    known = read_target_config(target / "config.json") | {"attention_bias": False, "mlp_bias": False}
    lengths = np.array([10, 20])
    weights = 4 * (32 * (2 * 32 + 2 * 16) + 3 * 32 * 48)
    pairs = 4 * 32 * (10**2 + 20**2) / 2
    expected = 2 * 30 * (weights + 192 * 32 * 0.5) + 2 * 2 * pairs
    assert placement.capture_flops(known, lengths, 0.5) == pytest.approx(expected, rel=0.01)
