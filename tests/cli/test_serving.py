"""serve and chat as a user meets them: a server that a client finds, an answer in the terminal, mistakes in one line."""

import io
import os
import re
import signal
import subprocess
import sys

import pytest

from needlework.cli import serving
from needlework.cli.entry import status_of
from needlework.data import byte_tokenizer
from needlework.models import NeedleworkForCausalLM, save_checkpoint
from needlework.recipes import demo
from tests.serve.engine import FakeEngine, says
from tests.serve.test_http import served
from tests.serve.texts import TEMPLATE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny" / "checkpoint"
    save_checkpoint(NeedleworkForCausalLM(demo.model("gated-deltanet")), byte_tokenizer(), 256, folder)
    return folder


@pytest.fixture
def run(capfd):
    """A command's exit status, and what it wrote."""

    def one(*arguments, asked=""):
        before, sys.stdin = sys.stdin, io.StringIO(asked)
        handler = signal.getsignal(signal.SIGINT)
        try:
            status = status_of([*map(str, arguments)])
        finally:
            sys.stdin = before
            signal.signal(signal.SIGINT, handler)
        return status or 0, *capfd.readouterr()

    return one


def test_a_conversation_with_a_server_goes_on_and_begins_anew(run):
    engine = FakeEngine(lambda request: says(f"{bytes(request.prompt).decode().count('user:')}?"))
    with served(engine) as url:
        status, out, err = run("chat", url, "--system", "be short", "--temperature", "0", asked="one\n\ntwo\n/new\nthree\n")
    assert (status, out, err) == (0, "1?\n2?\n1?\n", "")
    prompts = [bytes(stream.request.prompt).decode() for stream in engine.streams]
    assert prompts[1] == "system: be short\nuser: one\nassistant: 1?\nuser: two\n" and prompts[2].endswith(
        "short\nuser: three\n"
    )
    assert {stream.request.sampling.temperature for stream in engine.streams} == {0}


def test_a_question_that_is_refused_leaves_the_conversation_as_it_was(run):
    answers = iter((None, "yes"))
    engine = FakeEngine()

    def answer(request):
        if (said := next(answers)) is None:
            raise ValueError("too much")
        return says(said)

    engine.answer = answer
    with served(engine) as url:
        status, out, err = run("chat", url, asked="one\ntwo\n")
    assert status == 0 and out == "\nyes\n" and err.endswith("too much\n")
    assert bytes(engine.streams[-1].request.prompt).decode() == "user: two\n"


def test_a_key_is_read_from_a_file(run, tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\nnot this\n")
    with served(FakeEngine(), key="secret") as url:
        assert run("chat", url, "--key-file", key, asked="hi\n") == (0, "user: hi\n\n", "")
        assert "API key" in run("chat", url, asked="hi\n")[2]
    key.write_text("\n")
    assert run("chat", "http://127.0.0.1:1", "--key-file", key)[2] == (
        f"needlework: --key-file {key}: its first line is empty, expected an API key\n"
    )


def test_a_checkpoint_without_a_chat_template_says_so(run, checkpoint):
    status, out, err = run("chat", checkpoint, "--length", 64)
    assert status == 1 and out == "" and err.startswith("needlework: this checkpoint has no chat template")


def test_a_checkpoint_with_one_chats(run, checkpoint):
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    try:
        status, out, err = run("chat", checkpoint, "--length", 128, "--tokens", 4, "--temperature", 0, asked="hi\nyou\n")
    finally:
        (checkpoint / "chat_template.jinja").unlink()
    assert status == 0 and err == "" and out.count("\n") >= 2


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("serve", "--port", "0", "nowhere"), "nowhere: expected a checkpoint's folder"),
        (("serve", "--port", "0", "{checkpoint}", "--dtype", "int8"), "--dtype: got 'int8', expected one of bfloat16, float16, float32"),
        (("serve", "--port", "0", "{checkpoint}", "--", "--enforce-eager"), "--enforce-eager: arguments after -- are vLLM's, and go with --engine vllm"),
        (("serve", "--port", "0", "{checkpoint}", "--memory", "0"), "one request of 8192 tokens needs .* bytes"),
        (("serve", "--port", "0", "{checkpoint}", "--engine", "vllm"), r"--engine vllm: vLLM is not installed; pip install vllm==0\.32\.0"),
        (("chat", "nowhere"), "nowhere: expected a checkpoint's folder"),
        (("chat", "http://127.0.0.1:1"), "http://127.0.0.1:1/v1: .*refused"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(run, checkpoint, arguments, said):
    status, out, err = run(*(argument.format(checkpoint=checkpoint) for argument in arguments))
    assert status == 1 and out == "" and err.count("\n") == 1 and re.match(f"needlework: {said}", err), err


def test_vllms_server_gets_the_same_and_what_follows_the_dashes(run, checkpoint, monkeypatch, tmp_path):
    became, key = [], tmp_path / "key"
    key.write_text("secret")
    monkeypatch.setattr(serving, "find_spec", lambda name: object())
    monkeypatch.setattr(serving.os, "execve", lambda *what: became.append(what) or sys.exit(0))
    run("serve", checkpoint, "--engine", "vllm", "--length", 999, "--key-file", key, "--", "--data-parallel-size", "2")
    ((program, arguments, environment),) = became
    assert program == sys.executable and arguments[-2:] == ["--data-parallel-size", "2"] and "secret" not in arguments
    given = dict(zip(arguments[4:-2:2], arguments[5:-2:2], strict=True))
    assert given["--model"] == str(checkpoint) and given["--served-model-name"] == "tiny" and given["--max-model-len"] == "999"
    assert environment["VLLM_API_KEY"] == "secret" and given["--host"] == "127.0.0.1"


@pytest.mark.slow
def test_a_client_finds_the_server_and_ctrl_c_ends_it_with_its_answers(checkpoint):
    """In a terminal Ctrl-C reaches every process of the command."""
    openai = pytest.importorskip("openai", reason="the extra `test` is not installed")
    command = [sys.executable, "-m", "needlework", "serve", checkpoint, "--port", "0", "--length", "256", "--batch", "4"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([*map(str, command)], **pipes) as process:
        first, second = process.stdout.readline(), process.stdout.readline()
        assert re.match(r"tiny: 4 sequences at once of up to 256 tokens; 8 slots: .* of states", first), process.stderr.read()
        url = second.split()[0]
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked = {"model": "tiny", "prompt": "ab", "max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}
            whole = client.completions.create(**asked)
            assert whole.usage.completion_tokens == 200
            running = client.completions.create(**asked, stream=True)
            begun = [next(running)]
            os.killpg(process.pid, signal.SIGINT)
            assert "".join(chunk.choices[0].text for chunk in [*begun, *running]) == whole.choices[0].text
        assert (process.wait(30), process.stderr.read()) == (0, "")
