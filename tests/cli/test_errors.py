"""What a user did wrong is one line on stderr, with exit status 1 or, for the shape of the command itself, 2; stdout is empty."""

import shutil
import sys

import pytest

from needlework import recipes
from needlework.data import byte_tokenizer
from needlework.models import NeedleworkForCausalLM, save_checkpoint
from needlework.recipes import demo

FILES = {
    "text.txt": "some words of text\n" * 400,
    "empty.txt": "",
    "binary.txt": "a\0b",
    "deep.jsonl": '{"text": ' + "[" * 100_000,
    "syntax.py": "import os\ndef run(:\n",
    "import.py": "import os\n\nimport nowhere_to_be_found\n",
    "name.py": "from needlework.train import NoSuchName\n",
    "undefined.py": "x = 1\ny = undefined\n",
    "missing.py": "from needlework.train import AdamW\n\ndef run():\n    return AdamW()\n",
    "own.py": (
        "from needlework.recipes import demo\n"
        "NUMBER = 3\n"
        "def some(size): return demo.qdelta()\n"
        "def three(): return 3\n"
        "def none(): pass\n"
        "def key(): return {}['k']\n"
        "def run(): return demo.qdelta()\n"
        "def several(): return (demo.qdelta(),)\n"
        "def outside():\n"
        "    import dataclasses\n"
        "    return dataclasses.replace(demo.qdelta(), name='../../x')\n"
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files above, an empty folder, a checkpoint and broken ones."""
    folder = tmp_path_factory.mktemp("place")
    for name, content in FILES.items():
        (folder / name).write_text(content)
    (folder / "nothing").mkdir()
    model = NeedleworkForCausalLM(demo.model("gated-deltanet"))
    for name in ("good", "torn-config", "torn-tokenizer", "torn-weights"):
        save_checkpoint(model, byte_tokenizer(), 256, folder / name)
    for name, file in (("config", "config.json"), ("tokenizer", "tokenizer.json"), ("weights", "model.safetensors")):
        path = folder / f"torn-{name}" / file
        path.write_bytes(path.read_bytes()[:100])
    return folder


@pytest.fixture
def said(place, monkeypatch, capfd):
    """What `needlework …`, run in that folder, says on stderr when it ends with one of these statuses."""
    from needlework import cli

    for where in ("runner.train", "compare.work", "sweep.work"):  # what is taken for right is not to run for minutes
        monkeypatch.setattr(f"needlework.experiment.{where}", lambda *_, **__: pytest.fail("it trains"))

    def run(arguments, statuses):
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", ["needlework", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capfd.readouterr()
        assert ended.value.code in statuses, printed.err
        assert "Traceback" not in printed.err and printed.out == ""
        return printed.err

    yield run
    shutil.rmtree(place / "runs", ignore_errors=True)


def train(recipe, *more):
    return ("train", recipe, *more)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        # recipes
        (train("demo"), "recipe 'demo': expected MODULE:FUNCTION"),
        (train(":run"), "expected MODULE:FUNCTION"),
        (train("own.py:"), "expected MODULE:FUNCTION"),
        (train("nowhere:run"), "there is no needlework/recipes/nowhere.py"),
        (train("nowhere.py:run"), "there is no file nowhere.py"),
        (train("demo.x:y"), "there is no needlework/recipes/demo/x.py"),
        (train("../demo:run"), "there is no needlework/recipes/../demo.py"),
        (train("text.txt:run"), "text.txt is no Python file, whose name ends in .py"),
        (train("demo:DIM"), "expected a function without arguments (64 is not a callable object); known: softmax, gated_deltanet,"),
        (train("demo:model"), "(missing a required argument: 'mixer'); known: softmax, gated_deltanet,"),
        (train("demo:partial"), "expected a function without arguments"),
        (train("own.py:NUMBER"), "(3 is not a callable object); known: three, none, key, run, several, outside"),
        (train("own.py:some"), "(missing a required argument: 'size'); known: three, none, key, run, several, outside"),
        (train("own.py:rum"), "unknown recipe of own.py 'rum' (did you mean 'run'?); known: three, none, key, run, several, outside\n"),
        (train("own.py:three"), "recipe 'own.py:three': returned int, expected a Recipe"),
        (train("own.py:none"), "returned NoneType, expected a Recipe"),
        (train("demo:compare"), "returned tuple, expected a Recipe"),
        (("sweep", "demo:qdelta"), "returned Recipe, expected a tuple of Recipes"),
        (("sweep", "own.py:several", "--only", "nobody"), "unknown recipe 'nobody'"),
        (train("own.py:key"), "own.py, line 6: KeyError: 'k'"),
        (train("syntax.py:run"), "syntax.py, line 2: SyntaxError: invalid syntax"),
        (train("import.py:run"), "import.py, line 3: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        (train("name.py:run"), "name.py, line 1: ImportError: cannot import name 'NoSuchName'"),
        (train("undefined.py:run"), "undefined.py, line 2: NameError: name 'undefined' is not defined"),
        (train("missing.py:run"), "missing.py, line 4: TypeError: "),
        # settings
        (train("demo:qdelta", "--set", "model.mixers.M.heads=-1"), "heads: got '-1', expected a whole number >= 1"),
        (train("demo:qdelta", "--set", "model.mixers.M.heads=0"), "heads: got '0', expected a whole number >= 1"),
        (train("demo:qdelta", "--set", "model.hidden_size=0"), "model.hidden_size: got '0'"),
        (train("demo:qdelta", "--set", "model.softcap=nan"), "model.softcap: got 'nan'"),
        (train("demo:qdelta", "--set", "train.optim.betas=(0.9,)"), "train.optim.betas: got '(0.9,)'"),
        (train("demo:qdelta", "--set", "train.optim.lr=-1"), "train.optim.lr: got '-1'"),
        (train("demo:qdelta", "--set", "train.schedule.warmup=-5"), "train.schedule.warmup: got '-5'"),
        (train("demo:qdelta", "--set", "train.checkpoint_every=0"), "train.checkpoint_every: got '0'"),
        (train("demo:qdelta", "--set", "phases.0.steps=-400"), "phases.0.steps: got '-400', expected a whole number >= 1"),
        (train("demo:qdelta", "--set", "start=nothing"), "start: nothing: expected a folder with config.json and model.safetensors"),
        (train("demo:qdelta", "--set", "start=torn-weights"), "start: torn-weights: model.safetensors, or a part of it, is torn"),
        (train("demo:qdelta", "--steps", "1"), "--steps 1: recipe qdelta has 2 phases"),
        (("compare", "--mixer", "qdleta"), "unknown mixer 'qdleta' (did you mean 'qdelta'?)"),
        # places
        *((train("demo:qdelta", "--name", name), "expected the name of a folder in runs") for name in ("../../x", "/x", "", ".", "..")),
        (train("demo:qdelta", "--name", "a\\b"), "expected the name of a folder in runs"),
        (train("demo:qdelta", "--name", "a\nb"), "expected the name of a folder in runs"),
        (train("demo:qdelta", "--name", "corpora"), "and not corpora"),
        (train("own.py:outside"), "../../x"),
        (train("own.py:outside", "--name", "inside"), "../../x"),
        (("compare", "--name", "../x"), "--name '../x': expected the name of a folder in runs"),
        (("sweep", "own.py:several", "--name", "a/b"), "--name 'a/b': expected the name of a folder in runs"),
        (train("demo:qdelta", "--runs", "text.txt"), "Not a directory: 'text.txt"),
        # texts
        *((command, "no such file or directory: nowhere.txt") for command in (
            train("demo:qdelta", "--corpus", "nowhere.txt"), ("compare", "--corpus", "nowhere.txt"), ("eval", "good", "--corpus", "nowhere.txt")
        )),
        *((train("demo:qdelta", "--corpus", name), "no readable text in " + name) for name in ("empty.txt", "binary.txt", "nothing")),
        (train("demo:qdelta", "--corpus", "deep.jsonl"), "deep.jsonl, line 1: no JSON"),
        # checkpoints
        *((("eval", name), f"{name}: expected a folder with config.json") for name in ("nowhere", "nothing", "text.txt")),
        (("generate", "nothing", "--prompt", "x"), "nothing: expected a folder with config.json"),
        (("eval", "torn-config"), "torn-config/config.json: torn, or no JSON"),
        (("eval", "torn-weights"), "torn-weights: model.safetensors, or a part of it, is torn"),
        (("eval", "torn-tokenizer"), "torn-tokenizer/tokenizer.json is not a `tokenizers` JSON file"),
        (("generate", "torn-weights", "--prompt", "x"), "torn-weights: model.safetensors, or a part of it, is torn"),
        (("eval", "good", "--task", "nothing"), "unknown task 'nothing'"),
        *((("generate", "good", "--prompt", "x", f"--temperature={t}"), f"--temperature: got {t}") for t in ("nan", "inf", "-1", "1e-40")),
        (("generate", "good", "--prompt", ""), "--prompt is empty"),
        # suites
        (("eval", "good", "--suite", "rulr"), "unknown suite 'rulr' (did you mean 'ruler'?); known: zeroshot-ccq, "),
        (("eval", "good", "--suite", "induction", "--task", "needle"), "suite induction: unknown task 'needle'; known: induction"),
        (("eval", "good", "--suite", "babilong", "--length", "1000"), "suite babilong: length is 1000, expected one of 0, 1024, 2048,"),
        (("eval", "good", "--suite", "induction", "--data", "nowhere"), "--data nowhere: expected a folder of data sets"),
        (("eval", "nothing", "--suite", "induction"), "nothing: AutoModelForCausalLM loads no model from there"),
        (("eval", "torn-tokenizer", "--suite", "perplexity"), "torn-tokenizer: AutoTokenizer reads no tokenizer there"),
        *((("eval", "good", *o), f"{o[0]} is a suite's: give --suite too") for o in (("--limit", "2"), ("--data", "."), ("--full-context",))),
        # pages
        (("report", "nowhere"), "nowhere: no runs there"),
        (("report", "nothing", "--of", "demo"), "demo has no MIXERS, FAMILIES, GLANCE, CLAIMS, LIMITS, which a page is made of"),
        (("report", "nothing", "--of", "syntax.py"), "syntax.py, line 2: SyntaxError"),
    ],
    ids=lambda value: " ".join(value)[:60].replace("\n", " ") if isinstance(value, tuple) else "",
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_which(said, arguments, says):
    told = said(arguments, {1})
    assert told.startswith("needlework: ") and told.count("\n") == 1 and says in told, told


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing",), ("train",), ("presets", "more"), ("mixers", "--length", "0"), ("train", "demo:qdelta", "--steps", "0"),
        ("eval", "good", "--length", "0"), ("eval", "good", "--length", "-5"), ("generate", "good", "--prompt", "x", "--tokens", "0"),
        ("generate", "good", "--prompt", "x", "--seed", "99999999999999999999"), ("sweep", "own.py:several", "--workers", "0"),
        ("sweep", "own.py:several", "--minutes=-1"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_command_of_the_wrong_shape_is_its_usage_on_stderr(said, arguments):
    assert "Usage: " in said(arguments, {2})


def test_what_is_neither_the_users_nor_the_machines_keeps_its_traceback(monkeypatch):
    """A mistake of ours, also where it happens below a recipe's file."""
    from needlework import cli

    monkeypatch.setattr(sys, "argv", ["needlework", "train", "demo:qdelta"])
    monkeypatch.setattr(demo, "model", lambda mixer: {}["ours"])
    with pytest.raises(KeyError, match="ours"):
        cli.main()


def test_a_folder_without_python_files_is_no_recipe(said, monkeypatch, tmp_path):
    (tmp_path / "__pycache__").mkdir()
    monkeypatch.setattr(recipes, "__path__", [str(tmp_path)])
    assert "there is no needlework/recipes/__pycache__.py" in said(train("__pycache__:run"), {1})


def test_doctor_without_triton_says_what_to_install(said, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert said(("doctor",), {1}).startswith("needlework: doctor: Triton is not installed; pip install triton")


def test_a_torn_result_is_named_by_the_sweep_that_reads_it(said, tmp_path):
    (tmp_path / "qdelta-0.json").write_text('{"name": "qde')
    told = said(("report", str(tmp_path)), {1})
    assert told.startswith(f"needlework: {tmp_path / 'qdelta-0.json'}: ") and told.count("\n") == 1


@pytest.mark.parametrize("name", ["config.json", "qdelta/result.json"])
def test_a_run_names_its_torn_file(said, tmp_path, name):
    file = tmp_path / "qdelta" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"half')
    if name != "config.json":
        import json

        (tmp_path / "qdelta" / "config.json").write_text(json.dumps({"qdelta": demo.qdelta().resume_fingerprint()}))
    assert f"{file}: torn" in said(("train", "demo:qdelta", "--runs", str(tmp_path)), {1})
