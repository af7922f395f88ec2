"""The server as clients meet it: OpenAI's own over HTTP, many at once; wrong keys, bodies and paths; clients that go away; the end."""

import asyncio
import json
import multiprocessing
import random
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
httpx = pytest.importorskip("httpx", reason="the extra `test` is not installed")
openai = pytest.importorskip("openai", reason="the extra `test` is not installed")

from needlework.serve import http  # noqa: E402
from needlework.serve.choice import Choice  # noqa: E402
from needlework.serve.courier import COMPILERS, Courier  # noqa: E402
from needlework.serve.front import Front  # noqa: E402
from needlework.serve.interface import GrammarError  # noqa: E402
from needlework.serve.messages import Order, Ready  # noqa: E402
from needlework.serve.remote import RemoteEngine  # noqa: E402
from needlework.serve.request import Event  # noqa: E402

from .engine import FakeEngine, echo, says  # noqa: E402
from .texts import END, byte_text  # noqa: E402


@contextmanager
def served(engine, key=None):
    """The address of a front over the engine, which hears of it by messages, as from another process: the front is in a thread of this
    one."""
    bound, (ours, theirs) = http.listen("127.0.0.1", 0), multiprocessing.Pipe()
    remote = RemoteEngine(theirs, engine.length, engine.vocabulary)
    front = Front(remote, byte_text(), name="tiny", key=key)
    thread = threading.Thread(target=lambda: asyncio.run(http.answer(remote, front, bound)))
    thread.start()
    assert ours.recv() == Ready()
    courier = Courier(engine, ours)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        engine.close()
        courier.order(Order.END)
        thread.join()
        theirs.close()
        courier.close()


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def url(engine):
    with served(engine) as address:
        yield address


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one:
        yield one


def text_of(stream):
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_a_completion_whole_and_streamed(client):
    whole = client.completions.create(model="tiny", prompt="a héllo", max_tokens=9)
    assert (whole.choices[0].text, whole.choices[0].finish_reason, whole.object) == ("a héllo", "length", "text_completion")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (8, 8, 16)
    options = {"include_usage": True}
    *chunks, last = client.completions.create(model="tiny", prompt="a héllo", max_tokens=9, stream=True, stream_options=options)
    assert text_of(chunks) == "a héllo" and [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert last.choices == [] and last.usage == whole.usage and {c.usage for c in chunks} == {None}


def test_a_chat_whole_and_streamed(client):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == "user: hi\n" and whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "user: hi\n"
    assert chunks[-1].choices[0].finish_reason == "length" and len({c.id for c in chunks}) == 1


def test_32_clients_at_once_have_each_their_own_answer(engine, client):
    def ask(i):
        said = f"client {i} é " * (1 + i % 3)
        if i % 4 == 0:
            return said, client.completions.create(model="tiny", prompt=said, max_tokens=200).choices[0].text
        if i % 4 == 1:
            return said, text_of(client.completions.create(model="tiny", prompt=said, max_tokens=200, stream=True))
        chat = {"model": "tiny", "messages": [{"role": "user", "content": said}]}
        if i % 4 == 2:
            return f"user: {said}\n", client.chat.completions.create(**chat).choices[0].message.content
        chunks = client.chat.completions.create(**chat, stream=True)
        return f"user: {said}\n", "".join(c.choices[0].delta.content or "" for c in chunks)

    together = threading.Thread(target=lambda: answer_when_all_are_there(engine))
    engine.answer = lambda request: None
    together.start()
    with ThreadPoolExecutor(32) as pool:
        for said, heard in pool.map(ask, range(32)):
            assert heard == said
    together.join()
    assert engine.running == 0


def answer_when_all_are_there(engine):
    """A token of each in turn, as an engine's steps give them."""
    engine.until(lambda e: e.running == 32)
    left = [(stream, list(says(bytes(stream.request.prompt).decode()))) for stream in engine.streams]
    while left:
        for stream, events in left:
            stream.put(events.pop(0))
        left = [(stream, events) for stream, events in left if events]


def test_an_async_client_is_answered_too(url):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one:
            return await asyncio.gather(*(one.completions.create(model="tiny", prompt=f"{i}") for i in range(8)))

    assert [answer.choices[0].text for answer in asyncio.run(ask())] == [str(i) for i in range(8)]


def test_several_prompts_have_n_answers_each_in_order(engine, client):
    found = client.completions.create(model="tiny", prompt=["one", "two"], n=2, seed=5)
    assert [(c.index, c.text) for c in found.choices] == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
    assert found.usage.prompt_tokens == 6 and [s.request.sampling.seed for s in engine.streams] == [5, 6, 5, 6]
    said = ["", ""]
    for chunk in client.completions.create(model="tiny", prompt="both", n=2, stream=True):
        said[chunk.choices[0].index] += chunk.choices[0].text
    assert said == ["both", "both"]


def test_logprobs_are_in_openais_form(client):
    plain = client.completions.create(model="tiny", prompt="é!", logprobs=3).choices[0].logprobs
    assert plain.tokens == ["\ufffd", "\ufffd", "!"] and plain.token_logprobs == [-0.25] * 3 and plain.text_offset == [0, 0, 1]
    assert plain.top_logprobs[0] == {"A": -1.0, "B": -2.0, "C": -3.0, "\ufffd": -0.25}
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "é"}], "logprobs": True, "top_logprobs": 3}
    for content in (
        client.chat.completions.create(**asked).choices[0].logprobs.content,
        [
            s
            for c in client.chat.completions.create(**asked, stream=True)
            if c.choices[0].logprobs
            for s in c.choices[0].logprobs.content
        ],
    ):
        assert bytes(byte for s in content for byte in s.bytes).decode() == "user: é\n"
        assert content[0].logprob == -0.25 and [t.token for t in content[0].top_logprobs] == ["A", "B", "C"]


@pytest.mark.parametrize("stream", (False, True))
def test_a_stop_string_ends_the_answer_and_the_engines_work(engine, client, stream):
    engine.answer = lambda request: [Event(token=token) for token in b"one, two"]  # it would go on
    asked = {"model": "tiny", "prompt": "x", "stop": [", ", "three"], "max_tokens": 200}
    if stream:
        chunks = list(client.completions.create(**asked, stream=True))
        text, finish = text_of(chunks), chunks[-1].choices[0].finish_reason
    else:
        whole = client.completions.create(**asked)
        text, finish = whole.choices[0].text, whole.choices[0].finish_reason
    assert (text, finish) == ("one", "stop")
    engine.until(lambda e: e.running == 0)
    assert engine.streams[0].cancelled.is_set()


def test_a_character_is_never_torn_over_the_events_of_a_stream(engine, url):
    engine.answer = lambda request: None
    events, lines = says("👍 é"), []
    feeder = threading.Thread(target=lambda: [engine.until(lambda e: e.streams), *(engine.streams[0].put(e) for e in events)])
    feeder.start()
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    feeder.join()
    assert lines.pop() == "[DONE]" and answer.headers["content-type"].startswith("text/event-stream")
    texts = [json.loads(line)["choices"][0]["text"] for line in lines]
    assert "".join(texts) == "👍 é" and not any("\ufffd" in text for text in texts)


def test_the_token_that_ends_a_text_is_not_shown(engine, client):
    engine.answer = lambda request: [Event(token=72), Event(token=END, finish="stop")]
    found = client.completions.create(model="tiny", prompt="x")
    assert (found.choices[0].text, found.choices[0].finish_reason, found.usage.completion_tokens) == ("H", "stop", 2)


def test_what_is_refused_says_the_field_in_openais_error(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", temperature=3)
    assert caught.value.param == "temperature" and "from 0 to 2" in caught.value.message
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"


def test_no_request_is_left_where_one_of_several_was_refused(engine, client):
    engine.most, engine.answer = 2, lambda request: None
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="tiny", prompt="x", n=3)
    assert caught.value.response.headers["retry-after"] == "2" and caught.value.code == "queue_full"
    engine.until(lambda e: e.running == 0)
    assert not engine.streams


def test_bodies_paths_and_methods_that_are_wrong(url):
    post = lambda **options: httpx.post(f"{url}/v1/completions", **options)
    assert post(content=b"{").status_code == 400 and post(content=b"\xff").status_code == 400
    large = post(content=b" " * ((4 << 20) + 1))
    assert large.status_code == 413 and large.json()["error"]["code"] == "request_too_large"
    assert post(json={"prompt": "x", "user": "y" * ((4 << 20) - 100)}).status_code == 200
    for answer, status in ((httpx.get(f"{url}/v1/completions"), 405), (httpx.get(f"{url}/nothing"), 404)):
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_grammar_that_the_engine_does_not_take_is_the_response_format(engine, client):
    def refuse(request):
        raise GrammarError("grammar: invalid regex")

    engine.answer = refuse
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", extra_body={"response_format": {"type": "regex", "pattern": "(a"}})
    assert caught.value.param == "response_format" and "invalid regex" in caught.value.message


def test_what_meets_a_grammars_limits_on_its_way_is_the_clients(engine, client):
    engine.answer = lambda request: [Event(token=65), Event(finish="refused", error="grammar: too deep")]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x")
    assert caught.value.param == "response_format" and "response_format: grammar: too deep" in caught.value.message


def test_clients_whose_grammars_are_compiled_keep_no_other_waiting(engine, client, url):
    """As many as there are threads for all others, and more."""
    over, many = threading.Event(), 36
    engine.answer = lambda request: echo(request) if request.grammar is None else over.wait(30) and echo(request)
    strict = {"prompt": "a", "response_format": {"type": "regex", "pattern": "a"}}
    with httpx.Client(timeout=60) as others, ThreadPoolExecutor(many) as pool:
        asked = [pool.submit(others.post, f"{url}/v1/completions", json=strict) for _ in range(many)]
        engine.until(lambda e: e.running == COMPILERS)
        assert client.completions.create(model="tiny", prompt="x").choices[0].text == "x"
        assert engine.running == COMPILERS
        over.set()
        assert {one.result().status_code for one in asked} == {200}


def test_a_key_is_asked_for_where_there_is_one():
    with served(FakeEngine(), key="sécret") as url:
        sent = {"Authorization": "Bearer sécret".encode()}
        for path in ("/v1/models", "/v1/models/tiny"):
            assert httpx.get(url + path).status_code == 401 and httpx.get(url + path, headers=sent).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sécret".encode()}):
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert httpx.post(f"{url}/v1/chat/completions", json={}, headers=sent).status_code == 400
        assert httpx.get(f"{url}/health").status_code == 200


def test_models_health_and_readiness(client, url):
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny").id == "tiny" and model.max_model_len == 256
    assert httpx.get(f"{url}/v1/models/other").status_code == 404
    assert httpx.get(f"{url}/health").json() == httpx.get(f"{url}/ready").json() == {"status": "ok"}


@pytest.mark.parametrize("stream", (False, True))
def test_out_of_memory_before_the_first_token_is_a_503(engine, client, stream):
    engine.answer = lambda request: [Event(finish="error", error="out of memory: 3 GiB")]
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="tiny", prompt="x", stream=stream)
    assert caught.value.status_code == 503 and "out of memory" in caught.value.message


def test_what_fails_in_the_middle_of_a_stream_is_an_error_event(engine, client):
    engine.answer = lambda request: None
    feeder = threading.Thread(target=lambda: [engine.until(lambda e: e.streams), engine.streams[0].put(Event(token=65))])
    feeder.start()
    chunks = client.completions.create(model="tiny", prompt="x", stream=True)
    assert next(chunks).choices[0].text == "A"
    engine.streams[0].put(Event(finish="error", error="out of memory"))
    with pytest.raises(openai.APIError, match="out of memory"):
        next(chunks)
    feeder.join()


def test_an_engine_that_has_failed_is_not_healthy(engine, client, url):
    engine.broken = "the engine has failed: illegal memory access"
    with pytest.raises(openai.InternalServerError, match="illegal memory access"):
        client.completions.create(model="tiny", prompt="x")
    assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/ready").status_code == 503


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("tokens", (0, 1))
def test_a_client_that_goes_away_cancels_its_requests(engine, url, stream, tokens):
    engine.answer = lambda request: [Event(token=65)] * tokens
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "n": 3, "stream": stream}).encode()
    with socket.create_connection((host, int(port))) as one:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        engine.until(lambda e: len(e.streams) == 3)
    engine.until(lambda e: e.running == 0)
    assert all(stream.cancelled.is_set() for stream in engine.streams)


def test_a_client_that_goes_away_in_the_middle_of_its_body_leaves_nothing(engine, url):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as one:
        one.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{"prompt": "x"')
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200
    assert len(engine.streams) == 1


@pytest.mark.parametrize("grammar", (None, {"type": "regex", "pattern": "a"}))
def test_a_mistake_of_ours_is_a_500_and_is_counted(engine, url, grammar):
    engine.answer = lambda request: 1 / 0
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "response_format": grammar})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert 'path="/v1/completions",status="500"} 1.0' in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize("stream", (False, True))
def test_a_mistake_of_ours_while_it_answers_ends_its_requests_and_is_a_500(engine, url, monkeypatch, stream):
    engine.answer = lambda request: [Event(token=65)]
    monkeypatch.setattr(Choice, "push", lambda self, events: 1 / 0)
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "n": 2, "stream": stream})
    assert answer.status_code == 500
    engine.until(lambda e: e.running == 0)
    assert 'path="/v1/completions",status="500"} 1.0' in httpx.get(f"{url}/metrics").text


def test_numbers_that_the_engine_does_not_give_are_a_503(engine, url, monkeypatch):
    def fail():
        raise RuntimeError("the engine has failed: illegal memory access")

    monkeypatch.setattr(engine, "stats", fail)
    answer = httpx.get(f"{url}/metrics")
    assert answer.status_code == 503 and "illegal memory access" in answer.json()["error"]["message"]


def test_metrics_are_prometheus_own(engine, client, url):
    client.completions.create(model="tiny", prompt="x")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="x", n=9)
    numbers = dict(re.findall(r"^(needlework_\S+) (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE))
    assert numbers["needlework_slots_free"] == "3.0" and numbers['needlework_pages_free{window="all"}'] == "7.0"
    assert numbers["needlework_tokens_total"] == "11.0" and numbers['needlework_pages_free{window="64"}'] == "5.0"
    for status in (200, 400):
        assert numbers[f'needlework_requests_total{{path="/v1/completions",status="{status}"}}'] == "1.0"
    assert numbers["needlework_first_token_seconds_count"] == numbers["needlework_request_seconds_count"] == "1.0"


def test_an_address_that_is_taken_is_named():
    with http.listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}: .*in use"):
            http.listen("127.0.0.1", port)


def test_answers_with_a_schema_are_json_of_it(engine, client):
    pytest.importorskip("llguidance", reason="the extra `serve` is not installed")
    from needlework.serve.grammar import Grammar

    from .test_grammar import PERSON, V, walk

    grammar, rng = Grammar(byte_text(), V), random.Random(0)
    engine.answer = lambda request: says(bytes(walk(grammar(request.grammar), rng)).decode(), "stop")
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "response_format": schema}
    for choice in client.chat.completions.create(**asked, n=4).choices:
        assert json.loads(choice.message.content)["kind"] in ("user", "é中")
    for wrong, field in (({"type": "nothing"}, "response_format"), ("x", "response_format.json_schema.schema")):
        asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**asked)
        assert caught.value.param == field
