"""Answers from a server, against a small one that is late, fails, stalls, refuses and talks nonsense."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from tiny import EOS, tiny_tokenizer

from dflash.data import served
from dflash.data.served import ServedAnswer, ServedError, as_finished, served_answers
from dflash.data.tokenize import Prompt


class Api:
    """A server whose ``reply(body, times)`` gives (status, text, headers, seconds to wait first)."""

    def __init__(self, reply, models='{"data": [{"id": "first"}, {"id": "second"}]}'):
        self.seen, self.under_way, self.most, self.headers = [], 0, 0, []
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def answer(self, status, text, headers):
                payload = text if isinstance(text, bytes) else text.encode()
                try:
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(payload)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(payload)
                except OSError:
                    pass  # the client gave up, as some tests want it to

            def do_GET(handler):
                self.seen.append((handler.path, None))
                handler.answer(200, models, {})

            def do_POST(handler):
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                with lock:
                    self.headers.append(dict(handler.headers))
                    times = sum(1 for _, b in self.seen if b == body)
                    self.seen.append((handler.path, body))
                    self.under_way += 1
                    self.most = max(self.most, self.under_way)
                status, text, headers, wait = reply(body, times)
                time.sleep(wait)
                with lock:
                    self.under_way -= 1
                handler.answer(status, text, headers)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def posts(self):
        return [body for path, body in self.seen if body is not None]


def completion(finish="stop", **choice):
    return json.dumps({"choices": [{"index": 0, "finish_reason": finish, **choice}]})


def prompts(n):
    return [Prompt(np.array([20 + i, 30 + i], dtype=np.int32), f"file.jsonl:{i + 1}", None, None) for i in range(n)]


def ask(api, n=1, **over):
    return served_answers(api.url, prompts(n), tiny_tokenizer(), **({"max_new_tokens": 9} | over))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(served, "FIRST_WAIT_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_answers_come_back_in_the_order_of_the_prompts_and_few_are_under_way_at_once():
    def reply(body, times):
        first = body["prompt"][0]
        return 200, completion(token_ids=[first, EOS]), {}, 0.02 * ((first * 7) % 5)

    with Api(reply) as api:
        got = ask(api, 12, concurrency=3)
        assert got == [ServedAnswer(i, [20 + i, EOS], False) for i in range(12)]
        finished = [body["prompt"] for body in api.posts()]
        assert 2 <= api.most <= 3 and len(finished) == 12
        body = api.posts()[0]
    assert body == {
        "model": "first", "max_tokens": 9, "temperature": 0.0, "return_token_ids": True, "prompt": body["prompt"],
    }  # fmt: skip
    assert api.seen[0][0] == "/v1/models" and api.seen[1][0] == "/v1/completions"


def test_results_are_handed_on_as_they_finish():
    received = [threading.Event() for _ in range(4)]
    received[3].set()

    def after_the_next(item, stop):
        assert received[item + 1].wait(30)
        return item

    order = []
    for item in as_finished(after_the_next, range(3), 3):
        order.append(item)
        received[item].set()
    assert order == [2, 1, 0]
    taken, before = [], threading.active_count()
    results = as_finished(lambda item, stop: item, (taken.append(i) or i for i in range(1000)), 2)
    assert next(results) in (0, 1)
    time.sleep(0.1)
    assert len(taken) < 20  # bounded: items wait for their turn, results for their reader
    results.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before  # no thread is left waiting for a reader


def test_text_is_tokenised_and_ends_as_it_was_generated():
    texts = {20: ("one two", "stop"), 21: ("three", "length"), 22: ("", "stop")}

    def reply(body, times):
        text, finish = texts[body["prompt"][0]]
        return 200, completion(finish, text=text), {}, 0

    tokenizer = tiny_tokenizer()
    with Api(reply) as api:
        got = ask(api, 3, model="mine")
    assert api.posts()[0]["model"] == "mine" and all(path == "/v1/completions" for path, _ in api.seen)
    one_two, three = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("one two", "three"))
    assert got == [ServedAnswer(0, [*one_two, EOS], False), ServedAnswer(1, three, True), ServedAnswer(2, [], False)]


def test_an_empty_list_of_ids_beside_text_is_no_empty_answer():
    with Api(lambda body, times: (200, completion(token_ids=[], text=" two"), {}, 0)) as api:
        (answer,) = ask(api)
    assert tiny_tokenizer().decode(answer.ids) == " two<|im_end|>" and answer.text == " two"


def test_empty_answers_are_counted(caplog):
    with Api(lambda body, times: (200, completion(token_ids=[]), {}, 0)) as api, caplog.at_level(logging.WARNING):
        assert [answer.ids for answer in ask(api, 3)] == [[], [], []]
    assert "3 of 3 answers are empty (first: file.jsonl:1)" in caplog.text


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_fails_for_a_while_is_asked_again(status):
    def reply(body, times):
        return (status, "busy", {}, 0) if times < 3 else (200, completion(token_ids=[7]), {}, 0)

    with Api(reply) as api:
        assert ask(api, 2) == [ServedAnswer(0, [7], False), ServedAnswer(1, [7], False)]
        assert len(api.posts()) == 8


def test_retry_after_is_honoured():
    def reply(body, times):
        return (503, "", {"Retry-After": "1"}, 0) if times < 1 else (200, completion(token_ids=[7]), {}, 0)

    start = time.monotonic()
    with Api(reply) as api:
        ask(api)
    assert time.monotonic() - start >= 1.0
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert served._retry_after_s(in_a_minute) == pytest.approx(60, abs=3)
    assert served._retry_after_s("1000000") == served.LONGEST_RETRY_AFTER_S
    assert [served._retry_after_s(x) for x in (None, "soon", "-3")] == [0.0, 0.0, 0.0]


def test_waits_double_and_are_never_all_alike(monkeypatch):
    waits = []

    class Stop(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            return False

    monkeypatch.setattr(served, "FIRST_WAIT_S", 0.5)
    with Api(lambda body, times: (500, "", {}, 0)) as api, pytest.raises(ServedError):
        served.Server(api.url, 5).request("completions", {}, "p:1", Stop())
    longest = [min(0.5 * 2**i, served.LONGEST_WAIT_S) for i in range(served.ATTEMPTS - 1)]
    assert len(waits) == len(longest) and all(b / 2 <= w <= b for w, b in zip(waits, longest, strict=True))
    assert any(w != b for w, b in zip(waits, longest, strict=True))


def test_a_stalled_request_is_given_up_and_asked_again():
    def reply(body, times):
        return 200, completion(token_ids=[7]), {}, 8 if times == 0 else 0

    start = time.monotonic()
    with Api(reply) as api:
        assert ask(api, timeout_s=0.2)[0].ids == [7]
        assert len(api.posts()) == 2
    assert time.monotonic() - start < 6


def test_a_server_that_stays_down_is_one_sentence():
    with Api(lambda body, times: (503, '{"error": {"message": "loading the model"}}', {}, 0)) as api:
        url = api.url
        with pytest.raises(
            ServedError, match=r"completions: file.jsonl:1: the server says 503: loading the model, 8 times"
        ):
            ask(api)
    with pytest.raises(ServedError, match=r"/v1/models: models: no answer \(.*refused.*\), 3 times; see whether"):
        served_answers(url, prompts(1), tiny_tokenizer(), max_new_tokens=3)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"error": {"message": "prompt is too long:\\n 5 tokens"}}', "prompt is too long: 5 tokens"),
        ('{"detail": "no such model"}', "no such model"),
        ("<html>nginx</html>", "<html>nginx</html>"),
        ("", "Bad Request"),
    ],
)
def test_a_refusal_is_the_servers_own_sentence_and_not_repeated(body, said):
    with Api(lambda b, times: (400, body, {}, 0)) as api, pytest.raises(ServedError) as caught:
        ask(api, 5, concurrency=1)
    assert str(caught.value) == f"{api.url}/v1/completions: file.jsonl:1: the server says 400: {said}"
    assert len(api.posts()) == 1  # and the prompts after it are not asked any more


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<html>", "no JSON but '<html>'"),
        (b"\xff\xfe", "no JSON"),
        ("[]", "no choices"),
        ('{"choices": []}', "no choices"),
        ('{"choices": [7]}', "no choices"),
        (completion(text=None), "neither text nor token_ids"),
        (completion(token_ids=["a"]), "neither text nor token_ids"),
    ],
)
def test_nonsense_is_refused_naming_server_and_prompt(text, said):
    with Api(lambda body, times: (200, text, {}, 0)) as api, pytest.raises(ServedError) as caught:
        ask(api)
    assert said in str(caught.value) and "file.jsonl:1" in str(caught.value) and api.url in str(caught.value)


@pytest.mark.parametrize("models", ['{"data": []}', "[]", '{"data": [{"id": 3}]}'])
def test_a_server_without_models_wants_one_named(models):
    with Api(None, models) as api, pytest.raises(ServedError, match="lists no model; name the one to ask"):
        ask(api)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "http:///v1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ServedError, match="is no address of a server"):
        served_answers(url, prompts(1), tiny_tokenizer(), max_new_tokens=3)


def test_a_path_is_kept_and_the_key_is_sent(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "abc")
    with Api(lambda body, times: (200, completion(token_ids=[7]), {}, 0)) as api:
        served_answers(f"{api.url}/proxy/v1/", prompts(1), tiny_tokenizer(), max_new_tokens=3)
    assert [path for path, _ in api.seen] == ["/proxy/v1/models", "/proxy/v1/completions"]
    assert api.headers[0]["Authorization"] == "Bearer abc"


def test_what_a_worker_raises_reaches_the_caller():
    def broken(item, stop):
        raise ZeroDivisionError("of the worker")

    with pytest.raises(ZeroDivisionError, match="of the worker"):
        list(as_finished(broken, range(10), 3))


def test_ctrl_c_ends_at_once_though_answers_are_awaited():
    with Api(lambda body, times: (200, completion(token_ids=[7]), {}, 20)) as api:
        code = (
            "import sys; sys.path[:0] = sys.argv[2:]\n"
            "import numpy as np\nfrom tiny import tiny_tokenizer\n"
            "from dflash.data.served import served_answers\nfrom dflash.data.tokenize import Prompt\n"
            "asked = [Prompt(np.array([5, i]), f'p:{i}', None, None) for i in range(9)]\n"
            "served_answers(sys.argv[1], asked, tiny_tokenizer(), max_new_tokens=3)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, api.url, os.path.dirname(__file__)], stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while len(api.posts()) < 8 and time.monotonic() < deadline:
            time.sleep(0.05)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert len(api.posts()) == 8 and "KeyboardInterrupt" in err
        assert time.monotonic() - start < 10  # each answer would have taken 20 s
