"""The examples run, assert what they say, and use what any reader may: public names alone."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import needlework
from needlework.ops.specs import OPS

PACKAGE = Path(needlework.__file__).parent
FOLDER = Path(__file__).parents[1] / "examples"
FILES = sorted(FOLDER.glob("*.py"))
QUICK = ("packed_documents",)
PACKAGES = {f"needlework.{name}" for name in ("layers", "models", "data", "train", "eval", "diagnostics", "recipes")}
PACKAGES |= {f"needlework.ops.{op}" for op in OPS}
MODULES = {"needlework.ops.familiar", "needlework.experiment.recipe", "needlework.experiment.runner"}
MODULES |= {f"needlework.layers.{name}" for name in ("config", "gates", "write")}  # the bases of a rule of one's own


def marked(path: Path):
    return pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("path", [marked(path) for path in FILES])
def test_it_runs_and_what_it_says_holds(path, tmp_path):
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir(), temporary.mkdir()
    paths = {"TMPDIR": str(temporary), "PYTHONPATH": str(FOLDER.parent)}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | paths
    done = subprocess.run([sys.executable, path], cwd=here, env=environment, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 1 <= len(done.stdout.splitlines()) <= 12, done.stdout
    assert not any(here.iterdir()), "it left files behind"


def imported(path: Path):
    """(module, name) of all that a file imports of needlework; name None for `import module`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "needlework")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "needlework":
            yield from ((node.module, alias.name) for alias in node.names)


def exported(package: str) -> set[str]:
    """What a package's __init__ gives away by `x as x`, or defines without an underscore, and its own modules of recipes."""
    init = PACKAGE.parent.joinpath(*package.split("."), "__init__.py")
    tree = ast.parse(init.read_text(encoding="utf-8"))
    names = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname}
    names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    if package == "needlework.recipes":
        names |= {path.stem for path in init.parent.glob("*.py")}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_uses_public_names_alone(path):
    for module, name in imported(path):
        assert module in PACKAGES | MODULES, f"{module} is no public module"
        if name is not None and module in PACKAGES:
            assert name in exported(module), f"{module} does not export {name}"
        assert not (name or "").startswith("_"), f"{name} is private"
    private = [
        node.attr for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__") and node.attr != "_exit"
    ]  # fmt: skip
    assert not private


def test_the_table_names_each_of_them():
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"[{path.name}]({path.name})" in table for path in FILES)
    assert len(FILES) == table.count(".py](")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_begins_with_what_the_reader_learns(path):
    assert "You learn: " in (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
