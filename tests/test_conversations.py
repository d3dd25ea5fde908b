"""Rows of every accepted kind, and every way a row can be wrong: a reason, never a crash."""

import gzip
import json
import sys
from types import SimpleNamespace

import pytest

from dflash.data.conversations import Conversation, DataError, Rejected, TokenRow, normalise, read_rows, source_digest

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def write(path, *rows):
    path.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    return str(path)


def messages(raw):
    row = normalise(raw)
    assert isinstance(row, Conversation), row
    return row.messages


def test_lines_end_at_newlines_only(tmp_path):
    odd = "a\u2028b\u2029c\u0085d\x0b\x0c\x1c\re"
    path = write(tmp_path / "a.jsonl", {"t": odd}, {"t": 2})
    assert list(read_rows(path)) == [(1, {"t": odd}), (2, {"t": 2})]


def test_byte_order_mark_blank_lines_windows_ends_and_no_last_newline(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n   \n{"a": 2}\n\n{"a": 3}')
    assert list(read_rows(str(path))) == [(1, {"a": 1}), (4, {"a": 2}), (6, {"a": 3})]


def test_broken_lines_are_rejected_and_the_others_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n\xff\xfe\n[1]\n' + b"[" * 100_000 + b'\n{"a": 2}\n')
    rows = dict(read_rows(str(path)))
    assert rows[1] == {"a": 1} and rows[6] == {"a": 2}
    assert rows[2] == rows[5] == Rejected("broken JSON") and rows[3] == Rejected("not UTF-8")
    assert normalise(rows[2]) == rows[2] and normalise(rows[4]) == Rejected("row is no JSON object")


def test_gz_equals_plain(tmp_path):
    plain = write(tmp_path / "a.jsonl", {"messages": HI}, {"x": "é\u2028"})
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert list(read_rows(str(packed))) == list(read_rows(plain))
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a.jsonl.gz: cannot be read to its end"):
        list(read_rows(str(packed)))
    packed.write_bytes(b"not packed")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz"):
        list(read_rows(str(packed)))


def test_parquet_drops_the_nulls_it_filled_in(tmp_path):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    rows = [
        {"messages": HI, "finish_reason": "length"},
        {"messages": [HI[0], {"role": "assistant", "content": None, "tool_calls": [call]}], "finish_reason": None},
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    (first, raw), (second, other) = read_rows(str(path))
    assert (first, second) == (1, 2) and messages(raw) == HI and normalise(raw).finish_reason == "length"
    assert messages(other)[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        list(read_rows(str(path)))


def test_hub(monkeypatch):
    asked = []

    class Data(list):
        _fingerprint = "f00"

    def load_dataset(name, split):
        if name == "gone":
            raise FileNotFoundError("nothing there")
        asked.append((name, split))
        return Data([{"messages": HI}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(read_rows("hub:org/name")) == [(1, {"messages": HI})]
    assert list(read_rows("hub:org/name:test[:5]")) == [(1, {"messages": HI})]
    assert asked == [("org/name", "train"), ("org/name", "test[:5]")]
    assert "f00" in source_digest("hub:org/name") != source_digest("hub:org/name:test")
    with pytest.raises(DataError, match=r"hub:gone: .*nothing there"):
        list(read_rows("hub:gone"))


@pytest.mark.parametrize(
    ("source", "said"), [("no.jsonl", "no such file"), ("a.csv", "give .jsonl"), ("x", "hub:NAME")]
)
def test_no_such_source(source, said):
    for read in (lambda s: list(read_rows(s)), source_digest):
        with pytest.raises(DataError, match=said) as caught:
            read(source)
        assert source in str(caught.value)


def test_digest_is_of_the_content(tmp_path):
    a, b, c = (write(tmp_path / f"{n}.jsonl", {"n": n == "c"}) for n in "abc")
    assert source_digest(a) == source_digest(b) != source_digest(c)


def test_schemas_give_the_same_messages():
    expected = [
        {"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "t"}, {"role": "assistant", "content": "b"},
    ]  # fmt: skip
    names = ["system", "human", "gpt", "tool", "gpt"]
    sharegpt = [{"from": n, "value": m["content"]} for n, m in zip(names, expected, strict=True)]
    assert messages({"messages": expected}) == expected
    assert messages({"conversations": sharegpt}) == expected
    assert messages({"conversations": expected}) == expected  # OpenAI turns under the other key
    assert messages({"messages": sharegpt}) == expected
    assert messages({"system": "s", "conversations": sharegpt[1:]}) == expected
    assert messages({"system": "other", "messages": expected}) == expected
    assert messages({"messages": None, "conversations": sharegpt}) == expected


def test_what_a_message_carries():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, null]}'}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "why"},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "x", "reasoning_content": "because"},
    ]
    row = normalise({"messages": turns, "tools": '[{"type": "function"}]', "id": 7, "category": "c"})
    assert row.messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "reasoning_content": "why",
         "tool_calls": [call | {"function": {"name": "f", "arguments": {"x": [1, None]}}}]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "x", "reasoning_content": "because"},
    ]  # fmt: skip
    assert (row.tools, row.id, row.category, row.finish_reason) == ([{"type": "function"}], "7", "c", None)
    assert isinstance(call["function"]["arguments"], str)  # the row itself is left alone
    call["function"]["arguments"] = "not json"
    assert messages({"messages": turns})[1]["tool_calls"][0]["function"]["arguments"] == "not json"


def user(content):
    return {"messages": [{"role": "user", "content": content}, HI[1]]}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (3, "row is no JSON object"),
        ({}, "neither messages, conversations nor input_ids"),
        ({"messages": []}, "neither messages, conversations nor input_ids"),
        ({"messages": "hi"}, "neither messages, conversations nor input_ids"),
        ({"messages": ["hi"]}, "turn is no JSON object"),
        ({"messages": HI[:1]}, "no assistant turn"),
        ({"messages": [{"role": "narrator", "content": ""}, *HI]}, "unknown role 'narrator'"),
        ({"messages": [{"content": ""}, *HI]}, "unknown role 'None'"),
        ({"conversations": [{"from": "alien", "value": ""}]}, "unknown role 'alien'"),
        ({"conversations": [{"from": "human"}]}, "content is null"),
        (user(None), "content is null"),
        (user(5), "content is no text"),
        (user([{"type": "image_url", "image_url": {}}]), "content part of type 'image_url'"),
        (user([{"type": "text"}]), "content part of type 'text'"),
        (user([None]), "content part of type 'None'"),
        ({"messages": [HI[0], {"role": "assistant", "content": None}]}, "content is null"),
        ({"messages": [HI[0], HI[1] | {"tool_calls": "f()"}]}, "tool_calls is no list of objects"),
        ({"messages": [HI[0], HI[1] | {"reasoning_content": 3}]}, "reasoning_content is no text"),
        ({"messages": HI, "tools": {"a": 1}}, "tools is no list"),
        ({"messages": HI, "finish_reason": "error"}, "finish_reason 'error'"),
        ({"input_ids": [1, 2]}, "input_ids without loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "input_ids and loss_mask differ in length"),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "input_ids or loss_mask out of range"),
        ({"input_ids": [1, 2**31], "loss_mask": [1, 1]}, "input_ids or loss_mask out of range"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "input_ids or loss_mask out of range"),
        ({"input_ids": [1, 2.0], "loss_mask": [1, 1]}, "input_ids or loss_mask is no flat list of whole numbers"),
        ({"input_ids": [1, 2**80], "loss_mask": [1, 1]}, "input_ids or loss_mask is no flat list of whole numbers"),
        ({"input_ids": [], "loss_mask": []}, "input_ids or loss_mask is no flat list of whole numbers"),
        ({"input_ids": [[1], [2, 3]], "loss_mask": [1, 1]}, "input_ids or loss_mask is no flat list of numbers"),
        ({"input_ids": "abc", "loss_mask": [1, 1]}, "input_ids or loss_mask is no flat list of whole numbers"),
    ],
)  # fmt: skip
def test_reasons(raw, reason):
    assert normalise(raw) == Rejected(reason)


def test_finish_reasons_that_are_kept():
    for reason in (None, "stop", "length", "tool_calls"):
        assert normalise({"messages": HI, "finish_reason": reason}).finish_reason == reason


def test_prompts_need_no_answer():
    assert normalise({"messages": HI[:1]}, prompt=True).messages == HI[:1]
    assert normalise({"messages": HI, "finish_reason": "error"}, prompt=True).messages == HI


def test_token_rows():
    row = normalise({"input_ids": [5, 6, 7], "loss_mask": [False, 1, True], "messages": HI})
    assert isinstance(row, TokenRow) and row.ids.dtype == "int32" and row.loss_mask.dtype == bool
    assert row.ids.tolist() == [5, 6, 7] and row.loss_mask.tolist() == [False, True, True]
