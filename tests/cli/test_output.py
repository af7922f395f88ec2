"""What goes where: results on stdout, and nothing else under --json; any terminal, any pipe."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch

from needlework import cli
from needlework.cli.app import console
from needlework.cli.stop import Stop
from needlework.data import byte_tokenizer
from needlework.models import NeedleworkForCausalLM, presets, save_checkpoint
from needlework.recipes import demo


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    save_checkpoint(NeedleworkForCausalLM(demo.model("gated-deltanet")), byte_tokenizer(), 256, folder)
    return folder


def ended(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["needlework", *map(str, arguments)])
    with pytest.raises(SystemExit) as status:
        cli.main()
    return status.value.code


def test_what_is_no_terminal_gets_no_control_characters_whatever_force_color_says():
    code = (
        "from needlework.cli.app import console, errors\n"
        "from rich.text import Text\n"
        "for c in (console, errors):\n"
        "    with c.status('at work'): c.print(Text('red', style='red'))\n"
    )
    environment = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == done.stderr == "red\n"


def test_json_is_all_that_stdout_has(checkpoint, small_text, monkeypatch, capfd):
    import warnings

    from needlework.experiment import evaluate

    def warned(*arguments, **named):
        warnings.warn("something of the model", stacklevel=1)
        return found(*arguments, **named)

    found = evaluate.measure
    monkeypatch.setattr(evaluate, "measure", warned)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.warns(UserWarning, match="something"):
        assert not ended(
            monkeypatch, "eval", checkpoint, "--length", 96, "--task", "needle", "--corpus", small_text.paths[0], "--json"
        )
    entry = json.loads(capfd.readouterr().out)
    assert entry["loss"].keys() == entry["needle"].keys() == {"96"}


@pytest.mark.parametrize("command", [("mixers",), ("--help",), ("train", "--help")], ids=" ".join)
def test_a_terminal_of_ascii_shows_what_it_can(monkeypatch, command):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", shown)
    assert not ended(monkeypatch, *command)
    assert len(shown.buffer.getvalue()) > 500


def test_an_error_is_told_on_a_terminal_of_ascii(monkeypatch):
    told = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stderr", told)
    assert ended(monkeypatch, "eval", "ναός") == 1
    assert told.buffer.getvalue() == b"needlework: ????: expected a folder with config.json and model.safetensors\n"


@pytest.mark.parametrize("command", [("mixers",), ("presets", "--json")], ids=" ".join)
def test_a_reader_that_has_read_enough_is_no_error(monkeypatch, capfd, command):
    """As `needlework mixers | head -1` is."""
    monkeypatch.setattr(presets, "PRESETS", {"atma-nope": presets.PRESETS["atma-nope"]})
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(console, "quiet", False)  # which it is from then on; put back by undo
        assert ended(monkeypatch, *command) == 130  # as after Ctrl-C
        monkeypatch.undo()
    assert capfd.readouterr().err == ""


def test_a_run_whose_reader_leaves_is_told_to_stop_and_saves(monkeypatch, capfd):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe, Stop() as stop:
        assert not stop()  # from here on who runs asks, and is not interrupted
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(console, "quiet", False)
        console.print("step 1 of 4")
        assert stop.signalled
        console.print("nobody reads this, and that is no error")
        monkeypatch.undo()
    assert capfd.readouterr().err == ""


def test_a_text_is_printed_as_its_tokens_come_in_whole_characters(monkeypatch):
    from needlework.cli.checkpoints import Shown

    printed = []
    monkeypatch.setattr(console, "print", lambda text, **how: printed.append(text))
    shown = Shown(byte_tokenizer())
    shown.put(torch.tensor([list("hé ".encode())]))
    for byte in "👍!".encode():
        shown.put(torch.tensor([byte]))
    shown.end()
    assert printed == ["hé ", "", "", "", "👍", "!", ""]
