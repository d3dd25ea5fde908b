"""Rows as they come: what is kept, and why the rest is not, by line; through the reader, the template and training."""

import json

import pytest
from test_run import write_run
from tiny import tiny_tokenizer

from dflash.cli import main
from dflash.data.chat import BEYOND, CALLS_LOST, NO_PROMPT, THINKING_LOST
from dflash.data.tokenize import DataError, load_data, summary

USER, ANSWER = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
KEPT = None


def chat(*messages, **row):
    return json.dumps({"messages": list(messages), **row})


def says(text, role="assistant", **more):
    return {"role": role, "content": text, **more}


ROWS = [
    (chat(USER, ANSWER), KEPT),
    ("", ...),  # a blank line is no row
    ("{broken", "broken JSON"),
    ("[]", "row is no JSON object"),
    ('{"messages": []}', "neither messages, conversations nor input_ids"),
    (chat(says("be brief", "system")), "no assistant turn"),
    (chat(ANSWER, USER, says("four")), KEPT),  # an assistant first: its turn is not supervised
    (chat(USER, says("two", "user"), ANSWER), KEPT),
    (chat(USER, says(None, tool_calls=[CALL]), says("3", "tool")), CALLS_LOST),
    (chat(USER, says("five"), says("3", "tool"), says("six")), KEPT),
    (chat(USER, says(None)), "content is null"),
    (chat(says("x", "narrator"), USER, ANSWER), "unknown role 'narrator'"),
    (json.dumps({"messages": [USER, says("two\u2028three\u0085four")]}, ensure_ascii=False), KEPT),
    (chat(says([{"type": "text", "text": "one "}, "two"], "user"), says("seven")), KEPT),
    (chat(says([{"type": "image_url", "image_url": {}}], "user"), ANSWER), "content part of type 'image_url'"),
    (json.dumps({"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "eight"}]}), KEPT),
    (json.dumps({"conversations": [USER, says("nine")]}), KEPT),
    (json.dumps({"input_ids": [20, 21, 22, 23], "loss_mask": [0, 1, 1, 1]}), KEPT),
    (chat(USER, ANSWER, finish_reason="error"), "finish_reason 'error'"),
    (chat(USER, says("ten"), finish_reason="length"), KEPT),
    (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not UTF-8"),
    (chat(says("\ud800", "user"), ANSWER), "text with half a surrogate pair"),
    (chat(USER, says("one one", reasoning_content="because")), THINKING_LOST),
    (chat(says("one " * 99, "user"), ANSWER), BEYOND),
    ("[" * 100_000, "broken JSON"),
    (chat(says("s", "system"), USER, says("one two one")), KEPT),
    (chat(USER, ANSWER), KEPT),  # a duplicate
    (chat(USER, says("")), "no two supervised tokens in a row"),
    ("7", "row is no JSON object"),
    (chat(USER, "two"), "turn is no JSON object"),
]


@pytest.fixture
def odd(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else row.encode() for row, _ in ROWS))
    return path


def load(*paths):
    return load_data(
        [str(path) for path in paths], tiny_tokenizer(), max_length=64, chat_template_kwargs={}, cache_dir=None
    )


def test_odd_rows_end_in_kept_rows_and_a_table_of_reasons_with_lines(odd, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    data = load(odd, tmp_path / "empty.jsonl")
    lines = {number: reason for number, (_, reason) in enumerate(ROWS, 1) if reason is not ...}
    assert len(lines) > 20 and data.stats["rows"] == len(lines)
    assert data.origin[:, 1].tolist() == [number for number, reason in lines.items() if reason is KEPT]
    wanted: dict[str, list[int]] = {}
    for number, reason in lines.items():
        if reason is not KEPT:
            wanted.setdefault(reason, []).append(number)
    found = {
        reason: [int(entry["first"].rpartition(":")[2]), *entry["next"]]
        for reason, entry in data.stats["dropped"].items()
    }  # fmt: skip
    assert found == wanted
    text = summary(data.stats)
    assert f"dropped 2: broken JSON (first: {odd}:3, 25)" in text
    assert f"assistant turns not supervised: 1: {NO_PROMPT} (first: {odd}:7)" in text
    assert "1 duplicates of earlier rows" in text and "1 answers that ended at a length limit" in text
    assert f"nothing usable in {tmp_path / 'empty.jsonl'}" in text and f"nothing usable in {odd}" not in text
    separated = next(i for i in range(len(data)) if data.describe(i).endswith(":13"))
    ids, mask = data.sample(separated)
    assert "".join(tiny_tokenizer().decode(ids[mask]).split()).endswith("four<|im_end|>")


def test_many_of_one_reason_show_a_few_lines(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join([chat(USER, ANSWER)] + ["{"] * 50))
    assert f"dropped 50: broken JSON (first: {path}:2, 3, 4, 5, 6)" in summary(load(path).stats)


def test_files_with_nothing_usable_are_refused(tmp_path, odd, capfd):
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"\n".join(row if isinstance(row, bytes) else row.encode() for row, reason in ROWS if reason))
    with pytest.raises(DataError, match="no usable row among") as raised:
        load(bad)
    assert "broken JSON (first: " in str(raised.value)
    for name, content in (("zero.jsonl", b""), ("blank.jsonl", b"\n\n  \n"), ("bom.jsonl", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"no usable row among 0 of .*{name}"):
            load(tmp_path / name)
    config = write_run(tmp_path / "run", data__train=[str(bad)])
    assert main(["train", str(config)]) == 1
    err = capfd.readouterr().err
    assert "dflash: error: no usable row among" in err and f"{bad}:" in err
    assert not (tmp_path / "run" / "run" / "checkpoints").exists()


def test_calls_that_the_template_shows_are_kept(tmp_path):
    """And a name that it leaves out is missed, though the text of the answer is there."""
    tokenizer = tiny_tokenizer()
    path = tmp_path / "calls.jsonl"
    path.write_text(chat(USER, says("I look", tool_calls=[CALL | {"function": {"name": "weather", "arguments": {}}}])))
    with pytest.raises(DataError, match=CALLS_LOST):
        load_data([str(path)], tokenizer, max_length=64, chat_template_kwargs={}, cache_dir=None)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{% for c in m.tool_calls or [] %} {{ c.function.name }}{% endfor %}"
    )
    data = load_data([str(path)], tokenizer, max_length=64, chat_template_kwargs={}, cache_dir=None)
    ids, mask = data.sample(0)
    assert tokenizer.decode(ids[mask]) == "I look weather<|im_end|>"
