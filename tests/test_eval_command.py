"""``dflash eval`` as a command, on a tiny saved target with a drafter that has learned something."""

import json
import re

import numpy as np
import pytest
import torch
from test_walk import learned
from tiny import EOS, save_target, tiny_llama, tiny_qwen35, tiny_tokenizer

from dflash import cli
from dflash.decode import agreement, evaluate, tables
from dflash.decode.agreement import differences
from dflash.decode.speculative import Decoded, Decoder
from dflash.decode.walk import Answer, walk
from dflash.target.model import Target


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, two drafters in the published layout, prompts, and the target's own answers as token rows."""
    folder = tmp_path_factory.mktemp("eval")
    t, module, answers = learned(tiny_llama, ("sliding_attention", "full_attention"))
    save_target(folder / "target", module)
    t.drafter.save_pretrained(folder / "drafter")
    for name, seed in (("other", 1),):
        g = torch.Generator().manual_seed(seed)
        before = {k: v.clone() for k, v in t.drafter.state_dict().items()}
        with torch.no_grad():
            for p in t.drafter.parameters():
                p.add_(torch.randn(p.shape, generator=g) * p.std().nan_to_num(0.1) * 0.7)
        t.drafter.save_pretrained(folder / name)
        t.drafter.load_state_dict(before)
    unasked = {"input_ids": answers[0].answer, "loss_mask": [1] * len(answers[0].answer)}
    (folder / "unasked.jsonl").write_text(json.dumps(unasked) + "\n")
    rows = []
    for i, answer in enumerate(answers):
        ids, mask = answer.prompt + answer.answer, [0] * len(answer.prompt) + [1] * len(answer.answer)
        rows.append({"id": f"row{i}", "category": ["maths", "code"][i % 2], "input_ids": ids, "loss_mask": mask})
    for name, part in (("prompts", rows), ("first", rows[:2]), ("second", rows[2:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder, t, answers


def run(place, *args, drafter="drafter", source=("--prompts", "prompts.jsonl"), code=0, capsys=None):
    folder = place[0]
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    source = [str(folder / a) if a.endswith(".jsonl") else a for a in source]
    options = [
        "eval", str(folder / drafter), "--target", str(folder / "target"), "--max-new-tokens", "30", "--device", "cpu",
        "--json", str(out), *source, *map(str, args),
    ]  # fmt: skip
    assert cli.main(options) == code
    return json.loads(out.read_text()) if code == 0 else None


def test_one_set_gives_one_number_however_it_is_batched_and_the_walk_gives_it_too(place):
    _, t, answers = place
    whole = [run(place, "--batch-size", n) for n in (1, 3, 16)]
    halves = [run(place, source=("--prompts", f"{name}.jsonl")) for name in ("first", "second")]
    per_prompt = [[row["accepted_lengths"][0] for row in report["prompts"]] for report in whole]
    assert per_prompt[0] == per_prompt[1] == per_prompt[2]
    assert per_prompt[0] == [row["accepted_lengths"][0] for half in halves for row in half["prompts"]]
    walked = walk(t.drafter, t.target, answers, 1000, 100)
    assert per_prompt[0] == walked.rounds
    for report in whole:
        arm = report["arms"][0]
        assert arm["accepted_length"] == walked.pooled() > 1.05
        assert arm["identical"] == 1 and arm["differing"] == []
        assert arm["tokens"] == report["alone"]["tokens"] == sum(len(a.answer) for a in answers)
        assert arm["speedup"] == pytest.approx(arm["tokens_per_s"] / report["alone"]["tokens_per_s"])
    scored = run(place, source=("--answers", "prompts.jsonl"))
    assert [row["accepted_lengths"][0] for row in scored["prompts"]] == walked.rounds
    assert scored["agreement"] == 1 and scored["alone"] is None and "speedup" not in scored["arms"][0]
    assert [row["category"] for row in scored["prompts"]] == ["maths", "code", "maths", "code"]


def test_tables_and_json_hold_the_same_figures_with_their_definitions(place, capsys):
    report = run(place, "--block-size", "2,4", "--ddtree", "1,6")
    out = capsys.readouterr().out
    assert [(a["block_size"], a["tree_budget"], a["decoded"]) for a in report["arms"]] == [
        (2, None, True), (4, None, True), (4, 1, False), (4, 6, False), (4, 1, True), (4, 6, True),
    ]  # fmt: skip
    for arm in report["arms"]:
        for figure in (f"{arm['accepted_length']:.3f}", f"{arm['accepted_length_per_prompt']:.3f}"):
            assert figure in out
        for row in arm["by_context"] + arm["by_category"]:
            assert f"{row['accepted_length']:.3f} ({row['rounds']})" in out
        assert sum(row["rounds"] for row in arm["by_category"]) == arm["rounds"]
        assert sum(row["rounds"] for row in arm["by_context"]) == arm["rounds"]
        assert all(f"{share:.2f}" in out for share in arm["accepted_at"])
        if arm["decoded"]:
            assert f"{arm['tokens_per_s']:.1f}" in out and f"{arm['speedup']:.2f}" in out
    assert "bonus token included" in out and re.search(r"fastest: (block|tree) \d+, ", out)
    assert all(len(line) <= tables.WIDTH for line in out.split("\n") if not line.startswith(("target ", "drafter ")))
    out = " ".join(out.split())  # definitions are wrapped
    for key in ("accepted_length", "accepted_length_per_prompt", "rounds", "speedup", "identical", "offline", "fault"):
        assert tables.DEFINITIONS[key] in out and report["definitions"][key] == tables.DEFINITIONS[key]
    offline, live = report["arms"][2:4], report["arms"][4:]
    assert [a["accepted_length"] for a in offline] == [a["accepted_length"] for a in live]  # a pass verifies the same
    assert offline[0]["accepted_length"] < offline[1]["accepted_length"]
    assert all(arm["identical"] == 1 for arm in report["arms"] if arm["decoded"])


def test_comparing_a_drafter_with_itself_gives_nothing_and_with_a_worse_one_something(place, capsys):
    for source in (("--prompts", "prompts.jsonl"), ("--answers", "prompts.jsonl")):
        same = run(place, "--compare", place[0] / "drafter", source=source)
        assert same["comparison"][0]["difference"] == 0 and same["comparison"][0]["interval"] == [0, 0]
        assert "no difference" in capsys.readouterr().out
        other = run(place, "--compare", place[0] / "other", source=source)
        a, b = other["arms"]
        assert other["comparison"][0]["difference"] == pytest.approx(a["accepted_length"] - b["accepted_length"])
        assert a["accepted_length"] > b["accepted_length"]
        assert len(other["drafters"]) == 2 and f"{a['accepted_length'] - b['accepted_length']:+.3f}" in (
            capsys.readouterr().out
        )


def test_an_output_that_differs_is_found_and_judged(place, monkeypatch, capsys):
    """A decoder that alters one token is at fault; one that takes the other of two equal logits is not."""
    honest = Decoder.decode

    def alters(self, prompts, *args, **kwargs):
        decoded = honest(self, prompts, *args, **kwargs)
        if self.drafter is not None and len(prompts) == 4:
            tokens = decoded[1].tokens
            decoded[1] = Decoded([*tokens[:2], tokens[2] + 1, *tokens[3:]], decoded[1].rounds)
            decoded[2] = Decoded(decoded[2].tokens[:-1], decoded[2].rounds)
        return decoded

    monkeypatch.setattr(Decoder, "decode", alters)
    arm = run(place)["arms"][0]
    out = capsys.readouterr().out
    assert arm["identical"] == 0.5 and [d["verdict"] for d in arm["differing"]] == ["fault", "fault"]
    first, second = arm["differing"]
    assert (first["prompt"], first["position"]) == (1, 2) and first["margin"] > first["threshold"] > 0
    assert second["speculative"] is None and second["margin"] is None
    assert "2 by a fault" in out and "prompts.jsonl:2, answer token 2" in out and "one answer stops" in out
    assert tables.DEFINITIONS["fault"] in " ".join(out.split())


def test_a_margin_within_rounding_is_a_tie():
    module, prompt = tiny_llama(0), list(range(20, 29))
    target = Target(module, None, [0, 2], "final")
    token = target.greedy([prompt], 6, 1)[0][2]
    with torch.no_grad():  # two tokens that no model can tell apart; the lower id is chosen
        head = module.get_output_embeddings()
        head.weight[token + 1] = head.weight[token]
    answer = target.greedy([prompt], 6, 1)[0]
    at = answer.index(token)
    swapped = [*answer[:at], token + 1, *answer[at + 1 :]]
    found = differences(target, [prompt], [answer], [swapped])
    assert [(d.position, d.tie) for d in found] == [(at, True)] and found[0].margin == 0
    logits = module(torch.tensor([[*prompt, *answer[:at]]])).logits[0, -1].detach()
    scale = agreement.ROUNDINGS * torch.finfo(torch.float32).eps * float(logits.abs().max())
    assert found[0].threshold == pytest.approx(scale)
    # A preference is one whichever of the two loops had it: the token that is worse is judged.
    worst = [*answer[:at], int(logits.argmin()), *answer[at + 1 :]]
    for pair in ((answer, worst), (worst, answer)):
        (one,) = differences(target, [prompt], [pair[0]], [pair[1]])
        assert not one.tie and one.margin == pytest.approx(float(logits.max() - logits.min()), rel=1e-5)


def test_sampling_is_not_compared_with_the_target_alone(place, capsys):
    report = run(place, "--temperature", "0.8", "--seed", "3")
    assert "differing" not in report["arms"][0] and "not compared with the target alone" in capsys.readouterr().out


def test_a_hybrid_target_gets_offline_trees_only(tmp_path, capsys):
    t, module, answers = learned(tiny_qwen35, ("full_attention",))
    save_target(tmp_path / "target", module)
    t.drafter.save_pretrained(tmp_path / "drafter")
    rows = [{"input_ids": a.prompt, "loss_mask": [0] * len(a.prompt)} for a in answers]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = run((tmp_path, t, answers), "--ddtree", "8", source=("--prompts", "p.jsonl"))
    assert [(a["tree_budget"], a["decoded"]) for a in report["arms"]] == [(None, True), (8, False)]
    assert report["arms"][0]["identical"] == 1
    assert "flat masked tree pass is wrong" in capsys.readouterr().out


def test_an_answer_of_several_turns_is_the_last_one(place, tmp_path):
    """Of rows with several supervised runs the last is scored, what came before is its prompt."""
    folder, t, _ = place
    target = Target(t.target.module, tiny_tokenizer(), [0, 2], "final")
    row = {
        "messages": [
            {"role": "user", "content": "one two"}, {"role": "assistant", "content": "three four"},
            {"role": "user", "content": "five"}, {"role": "assistant", "content": "six seven eight"},
        ],
        "category": "counting",
    }  # fmt: skip
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    settings = evaluate.Settings(str(folder / "drafter"), str(folder / "target"), answers=str(tmp_path / "a.jsonl"))
    pair = evaluate.load_both(settings.drafter, target=settings.target, device="cpu")
    given = evaluate._answer_set(pair, settings)
    tokenizer = target.tokenizer
    assert tokenizer.decode(given.answers[0].answer) == "six seven eight<|im_end|>"
    assert tokenizer.decode(given.answers[0].prompt).endswith("five<|im_end|>\n<|im_start|>assistant\n")
    assert given.categories == ["counting"] and given.answers[0].answer[-1] == EOS
    assert 0 <= given.agreement < 1  # not what this random target would say


def test_a_server_answers_the_prompts(place, monkeypatch):
    _, t, answers = place
    asked = []

    def served(url, prompts, tokenizer, *, max_new_tokens):
        asked.append((url, len(prompts), max_new_tokens))
        return [type("A", (), {"ids": a.answer})() for a in answers]

    monkeypatch.setattr(evaluate, "served_answers", served)
    report = run(place, source=("--prompts", "prompts.jsonl", "--answers", "http://localhost:1/v1"))
    assert asked == [("http://localhost:1/v1", 4, 30)]
    expected = [Answer(a.origin, a.prompt, a.answer) for a in answers]
    assert [row["accepted_lengths"][0] for row in report["prompts"]] == walk(
        t.drafter, t.target, expected, 1000, 100
    ).rounds


@pytest.mark.parametrize(
    "options,words",
    [
        ((), "give --prompts FILE"),
        (("--answers", "prompts.jsonl", "--prompts", "prompts.jsonl"), "leave out --prompts"),
        (("--answers", "http://x/v1"), "say with --prompts"),
        (("--answers", "prompts.jsonl", "--temperature", "1"), "leave out --temperature"),
        (("--prompts", "prompts.jsonl", "--ddtree", "4", "--temperature", "1"), "--ddtree is greedy"),
        (("--prompts", "gone.jsonl"), "no such file"),
        (("--prompts", "prompts.jsonl", "--block-size", "5"), "drafts blocks of 4; give 2 to 4"),
        (("--prompts", "prompts.jsonl", "--temperature", "-1"), "--temperature -1.0"),
        (("--prompts", "prompts.jsonl", "--device", "gpu"), "--device gpu is no device"),
        (("--prompts", "prompts.jsonl", "--device", "cuda:99"), "--device cuda:99: "),
        (("--answers", "unasked.jsonl"), "unasked.jsonl:1: every token is supervised"),
        (("--prompts", "prompts.jsonl", "--json", "nowhere/out.json"), "no such folder"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(place, capsys, options, words):
    run(place, source=options, code=1)
    err = capsys.readouterr().err
    complaints = [line for line in err.split("\n") if line.startswith("dflash: error: ")]
    assert len(complaints) == 1 and words in complaints[0] and "Traceback" not in err


MISMATCHES = [
    ({"num_target_layers": 9}, ("num_target_layers is 9", "4")),
    ({"hidden_size": 64}, ("hidden_size is 64", "32")),
    ({"vocab_size": 500}, ("vocab_size is 500", "192")),
    ({"target_layer_ids": [0, 7], "dflash_config": {}}, ("[0, 7]", "0 to 3")),
    ({"mask_token_id": 200, "dflash_config": {}}, ("mask_token_id is 200", "191")),
    ({"mask_token_id": None, "dflash_config": {}}, ("lacks mask_token_id",)),
    ({"block_size": None, "dflash_config": {}}, ("lacks block_size",)),
    ({"target_layer_ids": None, "dflash_config": {}}, ("lacks target_layer_ids",)),
]


@pytest.mark.parametrize("changes,words", MISMATCHES)
def test_a_drafter_of_another_target_is_refused_with_both_sides_named(place, tmp_path, capsys, changes, words):
    folder = place[0]
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    config = json.loads((folder / "drafter" / "config.json").read_text()) | changes
    (drafter / "config.json").write_text(json.dumps(config))
    (drafter / "model.safetensors").write_bytes((folder / "drafter" / "model.safetensors").read_bytes())
    run(place, drafter=drafter, code=1)
    err = capsys.readouterr().err.strip().split("\n")
    complaints = [line for line in err if line.startswith("dflash: error: ")]
    assert len(complaints) == 1 and all(word in complaints[0] for word in words), err


def test_bad_lists_of_numbers_are_refused_by_the_command_line(place, capsys):
    for option in (("--block-size", "4,x"), ("--ddtree", "0"), ("--batch-size", "-1"), ("stray",)):
        with pytest.raises(SystemExit) as stop:
            cli.main(["eval", "d", "--prompts", "p.jsonl", "--json", "o.json", *option])
        assert stop.value.code == 2
    assert np.all([word in capsys.readouterr().err for word in ("--ddtree",)])
