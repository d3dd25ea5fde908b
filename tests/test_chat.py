"""Answers streamed as text: whole characters, the drafted part marked, and a chat that Ctrl-C does not end."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_walk import learned
from tiny import save_target, tiny_llama, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash.cli import main
from dflash.decode.chat import ChatError, TextStream, generate
from dflash.decode.speculative import Decoder
from dflash.target.model import Target


class Terminal(io.StringIO):
    def isatty(self):
        return True


def pair():
    """A drafter that drafts something, and its target with a tokenizer."""
    t, module, _ = learned(tiny_llama, ("full_attention",))
    return Target(module, tiny_tokenizer(), [0, 2]), t.drafter


def say(prompt, out=None, source="", **over):
    target, drafter = pair()
    out, err = out or io.StringIO(), io.StringIO()
    source = io.StringIO(source) if isinstance(source, str) else source
    settings = {"prompt": prompt, "max_new_tokens": 24, "source": source, "out": out, "err": err} | over
    assert generate(target, drafter, **settings) == 0
    return out.getvalue(), err.getvalue()


def rendered(target, *messages):
    text = target.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


def user(text):
    return {"role": "user", "content": text}


def bytes_tokenizer():
    """One token per byte, and one special token (256)."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False)
    assert tokenizer.eos_token_id == 256
    return tokenizer


def dropping_tokenizer():
    """Drops the space before the first token it decodes, as SentencePiece models do."""
    vocab = {"<unk>": 0, "▁one": 1, "▁two": 2, "▁three": 3, "s": 4}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", clean_up_tokenization_spaces=False)


TEXT = "naïve 👩‍🚀 日本 done"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_no_broken_character_is_ever_shown_and_nothing_is_lost(size):
    tokenizer = bytes_tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(TEXT.encode())  # every character beyond ASCII is split over tokens
    stream, pieces = TextStream(tokenizer), []
    for i in range(0, len(ids), size):
        pieces.append(stream.add(ids[i : i + size]))
        pieces.append(stream.add([]))
        assert TEXT.startswith(stream.text) and "".join(pieces) == stream.text
        shown = len(stream.text.encode())
        assert shown <= min(i + size, len(ids)) and min(i + size, len(ids)) - shown < 4  # no later than need be
    assert stream.text == TEXT and stream.finish() == "" and stream.text == TEXT


def test_an_answer_that_ends_inside_a_character_or_holds_bad_bytes_shows_it():
    tokenizer = bytes_tokenizer()

    # The byte-level alphabet: printable bytes stand for themselves, the others for characters from 256 on.
    spare = iter(range(256, 512))
    name = [chr(b) if 33 <= b <= 126 or (161 <= b != 173) else chr(next(spare)) for b in range(256)]

    def ids(raw):
        return tokenizer.convert_tokens_to_ids([name[b] for b in raw])

    stream = TextStream(tokenizer)
    assert stream.add(ids("ab👍".encode()[:-1])) == "ab"
    assert stream.finish() == "\ufffd" and stream.text == "ab\ufffd"
    stream = TextStream(tokenizer)
    pieces = [stream.add(ids(bytes([b]))) for b in b"a\xff\xffb\xf0c"]
    assert "".join(pieces) + stream.finish() == "a\ufffd\ufffdb\ufffdc" == stream.text


def test_special_tokens_are_not_shown():
    tokenizer = bytes_tokenizer()
    a, b = tokenizer("ab", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    assert [stream.add([a]), stream.add([256]), stream.add([b, 256]), stream.finish()] == ["a", "", "b", ""]


def test_spaces_between_pieces_survive_tokenizers_that_drop_the_first():
    tokenizer, ids = dropping_tokenizer(), [1, 2, 4, 3, 1, 1, 2]
    assert tokenizer.decode([2]) == "two"
    stream = TextStream(tokenizer)
    assert "".join(stream.add([i]) for i in ids) == tokenizer.decode(ids) == "one twos three one one two"


def test_the_window_stays_short():
    tokenizer, widths = bytes_tokenizer(), []
    stream, decode = TextStream(tokenizer), tokenizer.decode
    tokenizer.decode = lambda ids, **kwargs: widths.append(len(ids)) or decode(ids, **kwargs)
    for i in tokenizer("one two three " * 20, add_special_tokens=False)["input_ids"]:
        stream.add([i])
    assert stream.text == "one two three " * 20 and max(widths) <= 2


@pytest.mark.parametrize("system", [None, "sum of ten"])
def test_the_answer_is_the_targets_own_and_figures_are_said(system):
    target, drafter = pair()
    head = [{"role": "system", "content": system}] if system else []
    ids = rendered(target, *head, user("one two"))
    want = target.greedy([ids], 24, 1)[0]
    rounds = Decoder(target, drafter).decode([ids], 24)[0].rounds
    out, err = say("one two", system=system)
    assert out == target.tokenizer.decode(want, skip_special_tokens=True) + "\n"
    figure = sum(r.streak + 1 for r in rounds) / len(rounds)
    said = rf"{len(want)} tokens, {len(rounds)} rounds, accepted length {figure:.2f} \(bonus token included\), [\d.]+ "
    assert re.fullmatch(said + r"tokens/s after prefill\n", err)


def test_accepted_tokens_are_marked_round_by_round():
    target, drafter = pair()
    prompt = next(
        text
        for text in ("one", "two three", "four five six", "seven", "eight nine", "ten")
        if any(r.streak for r in Decoder(target, drafter).decode([rendered(target, user(text))], 24)[0].rounds)
    )
    decoded = Decoder(target, drafter).decode([rendered(target, user(prompt))], 24)[0]

    def text(tokens):
        return target.tokenizer.decode(tokens, skip_special_tokens=True)

    def want(left, right):
        parts = [text(decoded.tokens[:1])]
        for r in decoded.rounds:
            drafted = text(r.tokens[: r.streak])
            parts.append((f"{left}{drafted}{right}" if drafted else "") + text(r.tokens[r.streak :]))
        return "".join(parts) + "\n"

    plain, _ = say(prompt)
    brackets, _ = say(prompt, show_accepted=True)
    underlined, _ = say(prompt, show_accepted=True, out=Terminal())
    assert plain == text(decoded.tokens) + "\n" != brackets
    assert brackets == want("[", "]") and underlined == want("\x1b[4m", "\x1b[24m")


def test_standard_input_is_one_prompt_when_it_is_no_terminal():
    assert say(None, source="one\ntwo\n")[0] == say("one\ntwo")[0] != say("one")[0]


def test_template_settings_reach_the_template():
    target, drafter = pair()
    target.tokenizer.chat_template = "{{ 'one' if enable_thinking else 'two' }}{{ messages[-1]['content'] }}"
    outs = []
    for kwargs in ({"enable_thinking": True}, {"enable_thinking": False}):
        out = io.StringIO()
        generate(
            target, drafter, prompt="six", chat_template_kwargs=kwargs, max_new_tokens=12, source=io.StringIO(),
            out=out, err=io.StringIO(),
        )  # fmt: skip
        outs.append(out.getvalue())
    for text, word in zip(outs, ("one", "two"), strict=True):
        ids = target.tokenizer(word + "six", add_special_tokens=False)["input_ids"]
        assert text == target.tokenizer.decode(target.greedy([ids], 12, 1)[0], skip_special_tokens=True) + "\n"
    assert outs[0] != outs[1]


def test_an_answer_from_prefill_alone_has_no_accepted_length():
    assert say("one", max_new_tokens=1)[1] == "1 token, from prefill alone\n"


@pytest.mark.parametrize(("prompt", "source"), [("", ""), (" \n", ""), (None, "\n")])
def test_an_empty_prompt_is_refused(prompt, source):
    with pytest.raises(ChatError, match="the prompt is empty"):
        say(prompt, source=source)


def test_a_template_that_refuses_is_one_sentence():
    target, drafter = pair()
    target.tokenizer.chat_template = "{{ raise_exception('no system messages here') }}"
    with pytest.raises(ChatError, match="cannot be rendered: chat template: no system messages here"):
        generate(target, drafter, prompt="x", source=io.StringIO(), out=io.StringIO(), err=io.StringIO())


def test_answers_end_at_the_targets_last_position():
    target, _ = pair()
    prompt = "a" * (target.config.max_position_embeddings - len(rendered(target, user(""))) - 3)
    length = len(rendered(target, user(prompt)))
    _, err = say(prompt)
    assert int(re.match(r"(\d+) tokens?", err)[1]) <= target.config.max_position_embeddings - length == 3
    with pytest.raises(ChatError, match="515 tokens and leave no room for an answer within the target's 512 positions"):
        say(prompt + "a" * 6)


def test_the_command(tmp_path, capsys):
    target, drafter = pair()
    save_target(tmp_path / "target", target.module)
    drafter.save_pretrained(tmp_path / "drafter")
    command = ["generate", str(tmp_path / "drafter"), "--target", str(tmp_path / "target"), "--device", "cpu"]
    assert main([*command, "--prompt", "one two", "--max-new-tokens", "24", "--show-accepted"]) == 0
    out, err = capsys.readouterr()
    assert out == say("one two", show_accepted=True)[0] and "accepted length" in err.splitlines()[-1]
    assert main([*command, "--prompt", ""]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("dflash: error: the prompt is empty; give one with --prompt")


@contextmanager
def typed(monkeypatch, lines):
    """``lines`` at the prompt of a chat; an exception class is raised in its place."""
    left = list(lines)

    def line(shown):
        if isinstance(got := left.pop(0), str):
            return got
        raise got

    monkeypatch.setattr("builtins.input", line)
    yield left


@pytest.mark.parametrize("end", ["", EOFError])
def test_a_chat_remembers_what_was_said(monkeypatch, end):
    target, _ = pair()
    with typed(monkeypatch, ["one", KeyboardInterrupt, "two", end]) as left:
        out, err = say(None, source=Terminal(), system="three")
    assert left == []
    system = {"role": "system", "content": "three"}

    def answer(*messages):
        ids = rendered(target, system, *messages)
        return target.tokenizer.decode(target.greedy([ids], 24, 1)[0], skip_special_tokens=True)

    first = answer(user("one"))
    second = answer(user("one"), {"role": "assistant", "content": first}, user("two"))
    assert second != answer(user("two"))  # the history made a difference
    assert out.rstrip("\n") == f"{first}\n\n{second}".rstrip("\n") and err.count("tokens/s") == 2


CHAT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from tiny import tiny_llama, tiny_tokenizer
from dflash.decode.chat import generate
from dflash.model import DFlashConfig, DFlashDraftModel
from dflash.target.model import Target
module = tiny_llama(0, max_position_embeddings=1 << 20)
module.generation_config.eos_token_id = None
tokenizer = tiny_tokenizer()
target = Target(module, tokenizer, [0, 2])
target.eos_ids = []  # an answer without end
shape = DFlashConfig(
    block_size=4, mask_token_id=5, target_layer_ids=[0, 2], num_target_layers=4, vocab_size=192, hidden_size=32,
    intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    layer_types=["full_attention"],
)
drafter = DFlashDraftModel(shape).eval()
print("ready", flush=True)
generate(target, drafter, prompt=None, max_new_tokens=1 << 18, source=sys.stdin, out=sys.stdout, err=sys.stderr)
print("left of its own accord", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_stops_the_answer_and_not_the_chat():
    import fcntl
    import pty
    import termios

    def as_a_terminal_starts_it():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it, and hands that on

    master, slave = pty.openpty()
    env = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}
    process = subprocess.Popen(
        [sys.executable, "-c", CHAT, str(Path(__file__).parent)], stdin=slave, stdout=slave, stderr=slave, env=env,
        start_new_session=True, preexec_fn=as_a_terminal_starts_it,
    )  # fmt: skip
    os.close(slave)
    seen = b""

    def until(condition, seconds=60):
        nonlocal seen
        deadline = time.monotonic() + seconds
        while not condition(seen):
            assert time.monotonic() < deadline, seen[-500:]
            try:
                seen += os.read(master, 65536)
            except OSError:  # the other end is closed
                assert condition(seen), seen[-500:]

    try:
        until(lambda s: s.endswith(b"> "))
        for _ in range(2):
            os.write(master, b"one two\n")
            begin = len(seen)
            until(lambda s, begin=begin: len(s) > begin + 200)  # it is talking
            os.write(master, b"\x03")
            until(lambda s: s.endswith(b"\n> "))
        os.write(master, b"\x04")
        until(lambda s: b"left of its own accord" in s)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
