"""Prompts answered anew, here and by a server that is late, fails, stalls and answers out of order."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from test_served import Api, completion, quick  # noqa: F401 - a fixture
from tiny import EOS, VOCAB, save_target, tiny_llama, tiny_qwen35, tiny_tokenizer

from dflash.cli import main
from dflash.data.answering import CUT_OFF, EMPTY, REFUSED, TOO_LONG, Reply
from dflash.data.chat import OTHER_IDS, UNKNOWN_ID
from dflash.data.regenerate import DUPLICATE, NO_USER, TOOL_RESULTS, _job, token_row
from dflash.data.tokenize import DataError, load_data, load_prompts

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"), tiny_llama(0), TOKENIZER)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ask(target, prompts, out, *more):
    return main(["data", "regenerate", "--target", str(target), "--prompts", str(prompts), "--out", str(out), *more])


def echo(body):
    """The last user turn with a word behind it, as ids."""
    text = TOKENIZER.decode(body["prompt"])
    last = text.rsplit("user\n", 1)[1].split("<|im_end|>")[0]
    return TOKENIZER(f"{last} and", add_special_tokens=False)["input_ids"] + [EOS]


def test_where_answers_are_due():
    def parts(*messages, **row):
        job = _job({"messages": list(messages), **row}, "f:1")
        return [[m["content"] for m in part] for part in job.parts], job.reason

    system, tool = {"role": "system", "content": "s"}, {"role": "tool", "content": "t"}
    assert parts(user("a")) == ([["a"]], None)
    assert parts(system, user("a"), said("x"), user("b")) == ([["s", "a"], ["b"]], None)
    assert parts(user("a"), user("b")) == ([["a"], ["b"]], None)  # no answers: one after each
    assert parts(user("a"), user("b"), said("x")) == ([["a", "b"]], None)  # where the row had one
    assert parts(said("hello"), user("a"), said("x")) == ([["a"]], None)
    assert parts(user("a"), said("call"), tool, said("x"), user("b")) == ([["a"]], None)
    assert parts(system) == ([], NO_USER)
    assert parts(tool, user("a")) == ([], TOOL_RESULTS)
    assert _job({"input_ids": [1], "loss_mask": [1]}, "f:1").reason.startswith("pre-tokenised")
    assert _job({"messages": []}, "f:1").reason.startswith("neither messages")
    keys = {_job({"messages": [user(t)], "id": i}, "f:1").key for t in "ab" for i in (None, "1")}
    assert len(keys) == 4


def test_a_token_row_holds_every_answer_that_later_prompts_show_unchanged():
    first, second = ([1, 2], Reply([3, 4], "stop")), ([1, 2, 3, 4, 5], Reply([6], "stop"))
    assert token_row([first, second]) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])
    rewritten = ([1, 2, 9, 5], Reply([6], "stop"))
    assert token_row([first, rewritten]) == ([1, 2, 9, 5, 6], [0, 0, 0, 0, 1])


def test_a_difficult_server(target, tmp_path, capfd):
    """Late, out of order, 503 and 429, a stall, a refusal, cut-off and empty answers: each row ends somewhere, once."""
    prompts = [{"id": f"row{i}", "messages": [user(f"one {i}"), user(f"two {i}")]} for i in range(12)]
    prompts += [prompts[3], {"messages": [{"role": "system", "content": "s"}]}, {"messages": [user("one " * 600)]}]
    special = {5: "refuse", 6: "cut", 7: "empty", 8: "stall"}

    def reply(body, times):
        text = TOKENIZER.decode(body["prompt"])
        number = int(text.split("one ")[1].split("<")[0])
        kind, second = special.get(number), "two" in text
        wait = 0.03 * ((number * 7) % 4)
        if times == 0 and number % 4 == 1:
            return 503, "busy", {}, 0
        if times == 0 and number % 4 == 2:
            return 429, "slow down", {"Retry-After": "0"}, 0
        if kind == "stall" and times == 0:
            return 200, completion(token_ids=echo(body)), {}, 1.5
        if kind == "refuse" and second:
            return 400, json.dumps({"error": {"message": "too long"}}), {}, 0
        if kind == "cut":
            return 200, completion("length", token_ids=echo(body)[:-1]), {}, wait
        if kind == "empty":
            return 200, completion(token_ids=[EOS]), {}, wait
        return 200, completion(token_ids=echo(body), text="not what counts"), {}, wait

    source, out = write(tmp_path / "p.jsonl", prompts), tmp_path / "a.jsonl"
    with Api(reply) as api:
        args = ("--server", api.url, "--concurrency", "4", "--timeout", "0.7", "--max-new-tokens", "16")
        assert ask(target, source, out, *args, "--top-p", "0.9", "--temperature", "0.5") == 0
        assert 2 <= api.most <= 5  # a stalled request is still under way on its side
        body = api.posts()[0]
        assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.5, 0.9, 16)
        kept, rejected = rows(out), rows(tmp_path / "a.jsonl.rejected.jsonl")
        assert sorted(row["id"] for row in kept) == sorted(f"row{i}" for i in range(12) if i not in (5, 6, 7))
        assert Counter(row["reason"] for row in rejected) == Counter([REFUSED, CUT_OFF, EMPTY, NO_USER, TOO_LONG])
        assert f"1: {DUPLICATE}" in capfd.readouterr().err
        for row in kept:
            number = row["id"][3:]
            answers = [f"one {number} and", f"two {number} and"]
            assert [m["content"] for m in row["messages"]] == [
                f"one {number}", answers[0], f"two {number}", answers[1],
            ]  # fmt: skip
            ids, mask = np.array(row["input_ids"]), np.array(row["loss_mask"], dtype=bool)
            runs = "".join(TOKENIZER.convert_ids_to_tokens(ids[mask])).replace("Ġ", " ").split("<|im_end|>")
            assert runs == [*answers, ""]
        asked = len(api.posts())
        assert ask(target, source, out, *args, "--top-p", "0.9", "--temperature", "0.5") == 0
        assert len(api.posts()) == asked and rows(out) == kept  # nothing is left to ask
        assert ask(target, source, out, *args) == 1
        assert "temperature (0.5 there, 0.7 now), top_p (0.9 there, 1.0 now)" in capfd.readouterr().err
    cut = next(row for row in rejected if row["reason"] == CUT_OFF)
    assert cut["finish_reason"] == "length" and cut["messages"][-1]["content"] and "input_ids" not in cut
    assert cut["origin"].endswith("p.jsonl:7")


def test_text_only_servers_give_rows_that_the_template_tokenises(target, tmp_path):
    source = write(tmp_path / "p.jsonl", [{"messages": [user("one")]}])
    with Api(lambda body, times: (200, completion(text=" two  three"), {}, 0)) as api:
        assert ask(target, source, tmp_path / "a.jsonl", "--server", api.url, "--max-new-tokens", "16") == 0
    (row,) = rows(tmp_path / "a.jsonl")
    assert row["messages"][-1] == said(" two  three") and "input_ids" not in row and row["finish_reason"] == "stop"
    data = load_data(
        [str(tmp_path / "a.jsonl")], TOKENIZER, max_length=64, chat_template_kwargs={}, cache_dir=None
    )  # fmt: skip
    ids, mask = data.sample(0)
    assert TOKENIZER.decode(ids[mask]) == " two  three<|im_end|>"


def test_a_server_that_goes_away_is_an_error_and_the_rest_is_done_later(target, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("dflash.data.served.ATTEMPTS", 2)
    source = write(tmp_path / "p.jsonl", [{"messages": [user(f"one {i}")]} for i in range(6)])
    out = tmp_path / "a.jsonl"
    alive = [3]

    def reply(body, times):
        alive[0] -= 1
        return (200, completion(token_ids=echo(body)), {}, 0) if alive[0] >= 0 else (500, "dead", {}, 0)

    with Api(reply) as api:
        args = ("--server", api.url, "--concurrency", "1", "--max-new-tokens", "16")
        monkeypatch.setattr("dflash.data.served.Server.request.__defaults__", (2,))
        assert ask(target, source, out, *args) == 1
        assert "the server says 500: dead, 2 times" in capfd.readouterr().err
        assert len(rows(out)) == 3
        alive[0] = 100
        assert ask(target, source, out, *args) == 0
    assert len({row["key"] for row in rows(out)}) == len(rows(out)) == 6


def test_kill_9_loses_and_doubles_no_row(target, tmp_path):
    """Killed twice at any moment, a line cut in its middle, and more prompts at the end."""
    prompts = [{"id": str(i), "messages": [user(f"one {i}"), user("two")]} for i in range(40)]
    source, out = write(tmp_path / "p.jsonl", prompts), tmp_path / "a.jsonl"
    with Api(lambda body, times: (200, completion(token_ids=echo(body)), {}, 0.02)) as api:
        args = ("--server", api.url, "--concurrency", "2", "--max-new-tokens", "16")
        command = [sys.executable, "-m", "dflash.cli", "data", "regenerate", "--target", str(target)]
        command += ["--prompts", str(source), "--out", str(out), *args]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "no_proxy": "127.0.0.1"}
        for enough in (5, 15):
            process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < enough):
                time.sleep(0.005)
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            whole = out.read_bytes()
            out.write_bytes(whole[: len(whole) - 40])  # as if the last write had not come through
        write(source, [*prompts, {"id": "40", "messages": [user("one 40")]}])
        assert ask(target, source, out, *args) == 0
    got = [row["id"] for row in rows(out)]
    assert sorted(got, key=int) == [str(i) for i in range(41)]
    assert all(len(row["messages"]) == (4 if int(row["id"]) < 40 else 2) for row in rows(out))


def answers(body, times):
    return 200, completion(token_ids=echo(body)), {}, 0


def test_what_answers_depend_on_must_stay(tmp_path, capfd):
    """Model and template, beside the settings; a note of them that is damaged is no licence."""
    folder = save_target(tmp_path / "target", tiny_llama(0), TOKENIZER)
    source, out = write(tmp_path / "p.jsonl", [{"messages": [user("one")]}]), tmp_path / "a.jsonl"
    with Api(answers) as api:
        args = ("--server", api.url, "--max-new-tokens", "16")
        assert ask(folder, source, out, *args) == 0
        assert f"asking first at {api.url}/v1" in capfd.readouterr().err
        assert ask(folder, source, out, *args, "--model", "second") == 1
        assert "model (first there, second now)" in capfd.readouterr().err
        changed = tiny_tokenizer()
        changed.chat_template += "{# another #}"
        save_target(folder, tiny_llama(0), changed)
        assert ask(folder, source, out, *args) == 1
        err = capfd.readouterr().err
        assert "template (" in err and "vocabulary (" not in err
        (tmp_path / "a.jsonl.settings.json").write_text('{"target": ')
        assert ask(folder, source, out, *args) == 1
        assert "a.jsonl.settings.json is damaged" in capfd.readouterr().err
        assert len(api.posts()) == 1


def test_another_targets_weights_under_the_same_name_are_refused(tmp_path, capfd):
    folder = save_target(tmp_path / "target", tiny_llama(0), TOKENIZER)
    source = write(tmp_path / "p.jsonl", [{"messages": [user("one")]}])
    args = ("--max-new-tokens", "4", "--device", "cpu")
    ask(folder, source, tmp_path / "a.jsonl", *args)
    save_target(folder, tiny_llama(1), TOKENIZER)
    assert ask(folder, source, tmp_path / "a.jsonl", *args) == 1
    err = capfd.readouterr().err
    assert "was made with other settings: weights (" in err and "seed (" not in err


def test_only_one_process_writes_a_file(target, tmp_path, capfd):
    source = write(tmp_path / "p.jsonl", [{"messages": [user("one")]}])
    with Api(answers) as api, open(tmp_path / "a.jsonl.rejected.jsonl", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        args = ("--server", api.url, "--max-new-tokens", "16")
        assert ask(target, source, tmp_path / "a.jsonl", *args) == 1
        assert "another process is writing" in capfd.readouterr().err
        assert not api.posts() and not (tmp_path / "a.jsonl").exists()


def test_a_full_disk_is_one_sentence_and_the_rest_is_done_later(target, tmp_path, capfd):
    prompts = [{"id": str(i), "messages": [user(f"one {i}")]} for i in range(20)]
    source, out = write(tmp_path / "p.jsonl", prompts), tmp_path / "a.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Api(answers) as api:
        args = ("--server", api.url, "--max-new-tokens", "16")
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))  # of any one file: as a disk that is full
        try:
            assert ask(target, source, out, *args) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "a.jsonl cannot be written ([Errno 27] File too large); make room" in capfd.readouterr().err
        assert out.stat().st_size == 3000 and not out.read_bytes().endswith(b"\n")
        assert ask(target, source, out, *args) == 0
        assert sorted(int(row["id"]) for row in rows(out)) == list(range(20))
        (tmp_path / "b.jsonl.rejected.jsonl").mkdir()
        assert ask(target, source, tmp_path / "b.jsonl", *args) == 1
        assert "b.jsonl cannot be written" in capfd.readouterr().err


def test_every_request_draws_from_a_seed_of_its_own(target, tmp_path):
    prompts = [{"id": str(i), "messages": [user("one"), user("two")]} for i in range(6)]
    source = write(tmp_path / "p.jsonl", prompts)
    found = []
    with Api(answers) as api:
        for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
            args = ("--server", api.url, "--max-new-tokens", "16", "--seed", seed)
            assert ask(target, source, tmp_path / f"{name}.jsonl", *args) == 0
            found.append({body["seed"] for body in api.posts()[12 * len(found) :]})
    first, again, other = found
    assert len(first) == 12 and first == again and not first & other
    assert all(0 <= seed < 1 << 31 for seed in first)


def test_ids_of_another_vocabulary_are_taken_neither_from_a_server_nor_from_a_file(target, tmp_path, capfd):
    source, out = (
        write(tmp_path / "p.jsonl", [{"messages": [user(f"one {i}")]} for i in range(2)]),
        tmp_path / "a.jsonl",
    )

    def reply(body, times):
        odd = "one 1" in TOKENIZER.decode(body["prompt"])
        return 200, completion(token_ids=[20, VOCAB, 1 << 40] if odd else echo(body)), {}, 0

    with Api(reply) as api:
        assert ask(target, source, out, "--server", api.url, "--max-new-tokens", "16") == 0
    assert [row["reason"] for row in rows(tmp_path / "a.jsonl.rejected.jsonl")] == [UNKNOWN_ID]
    files, shared = [str(out)], {"max_length": 64, "chat_template_kwargs": {}}
    assert len(load_data(files, TOKENIZER, cache_dir=None, **shared)) == 1
    assert len(load_prompts(files, TOKENIZER, limit=None, **shared)) == 1
    other = tiny_tokenizer()
    other.add_tokens(["another"])
    with pytest.raises(DataError, match=OTHER_IDS):
        load_data(files, other, cache_dir=None, **shared)
    with pytest.raises(DataError, match=OTHER_IDS):
        load_prompts(files, other, limit=None, **shared)


def test_rows_of_an_earlier_regeneration_are_answered_anew(target, tmp_path):
    source = write(tmp_path / "p.jsonl", [{"id": "x", "messages": [user("one"), user("two")]}])
    with Api(answers) as api:
        args = ("--server", api.url, "--max-new-tokens", "16")
        assert ask(target, source, tmp_path / "a.jsonl", *args) == 0
        assert "input_ids" in rows(tmp_path / "a.jsonl")[0]
        assert ask(target, tmp_path / "a.jsonl", tmp_path / "b.jsonl", *args) == 0
    (first,), (second,) = rows(tmp_path / "a.jsonl"), rows(tmp_path / "b.jsonl")
    assert first["messages"] == second["messages"] and first["input_ids"] == second["input_ids"]


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35])
def test_a_target_of_this_machine(make, tmp_path):
    """Greedy answers are its own, turn by turn, and training reads the very tokens."""
    module = make(0)
    folder = save_target(tmp_path / "target", module, TOKENIZER)
    prompts = [{"id": str(i), "messages": [user("one two " * i), user("three"), user("four")]} for i in range(1, 8)]
    source, out = write(tmp_path / "p.jsonl", prompts), tmp_path / "a.jsonl"
    args = ("--temperature", "0", "--max-new-tokens", "6", "--batch-size", "3", "--device", "cpu")
    code = ask(folder, source, out, *args)
    everything = rows(out) + rows(tmp_path / "a.jsonl.rejected.jsonl")
    assert sorted(row["id"] for row in everything) == [str(i) for i in range(1, 8)]
    assert code == (0 if rows(out) else 1)
    import torch

    from dflash.target.model import load_target

    loaded = load_target(str(folder), dtype=torch.float32, device="cpu", context_layers=[0])
    for row in everything:
        first = TOKENIZER.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, tokenize=True, return_dict=False
        )  # fmt: skip
        (answer,) = loaded.greedy([first], 6, 1, progress=False)
        spoken = answer[:-1] if answer[-1] == EOS else answer
        assert row["messages"][1]["content"] == TOKENIZER.decode(spoken, clean_up_tokenization_spaces=False)
        ended = answer[-1] == EOS
        assert ended or (row["reason"] == CUT_OFF and len(row["messages"]) == 2)


def test_answers_that_end_are_kept_and_sampled_from_the_seed(tmp_path):
    """A target that ends often: its end-of-text row of the head is made likely."""
    import torch

    module = tiny_llama(0)
    with torch.no_grad():
        module.lm_head.weight[EOS] *= 4
    folder = save_target(tmp_path / "target", module, TOKENIZER)
    source = write(
        tmp_path / "p.jsonl", [{"id": str(i), "messages": [user(f"one {i}"), user("two")]} for i in range(30)]
    )
    args = ("--temperature", "1", "--max-new-tokens", "40", "--batch-size", "8", "--device", "cpu")
    outs = [tmp_path / f"{n}.jsonl" for n in range(3)]
    for n, out in enumerate(outs):
        assert ask(folder, source, out, *args, "--seed", str(n // 2)) == 0
    first, again, other = ({row["id"]: row["messages"] for row in rows(out)} for out in outs)
    assert first == again and first != other and len(first) >= 3
    data = load_data([str(outs[0])], TOKENIZER, max_length=4096, chat_template_kwargs={}, cache_dir=None)
    assert len(data) == len(first)
    for i, row in enumerate(rows(outs[0])):
        ids, mask = data.sample(i)
        assert ids.tolist() == row["input_ids"] and ids[mask].tolist().count(EOS) == 2


def test_what_is_refused(target, tmp_path, capfd):
    source = write(tmp_path / "p.jsonl", [{"messages": [{"role": "system", "content": "s"}]}])
    for more, words in (
        (("--top-p", "0.9"), "--top-p is for servers"),
        (("--temperature", "-1"), "--temperature -1.0"),
        (("--prompts", str(tmp_path / "nothing.jsonl")), "nothing.jsonl: no such file"),
        (("--out", str(tmp_path / "nowhere" / "a.jsonl")), "nowhere does not exist; make the folder first"),
        (("--max-new-tokens", "512"), "leaves no room for a prompt in 512 positions"),
        (("--server", "nonsense", "--max-new-tokens", "9"), "is no address of a server"),
    ):
        assert ask(target, source, tmp_path / "a.jsonl", *more) == 1
        assert words in capfd.readouterr().err
    assert not list(tmp_path.glob("a.jsonl*"))
    assert ask(target, source, tmp_path / "a.jsonl", "--max-new-tokens", "9", "--device", "cpu") == 1
    err = capfd.readouterr().err
    assert "not one answer can be used" in err and f"1: {NO_USER}" in err
    (tmp_path / "b.jsonl").write_text("{}\n")
    assert ask(target, source, tmp_path / "b.jsonl", "--max-new-tokens", "9", "--device", "cpu") == 1
    assert "exists, without b.jsonl.settings.json" in capfd.readouterr().err
