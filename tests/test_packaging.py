"""The wheel, and the wheel that the source distribution makes, installed where neither the checkout nor its metadata can be seen."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

OWN = """
import dataclasses
from needlework.data import CorpusConfig, NeedleMix
from needlework.experiment.recipe import Phase
from needlework.experiment.evaluate import Evaluation
from needlework.recipes import demo

def one():
    recipe = demo.recipe("qdelta", CorpusConfig(kind="files", paths=(__file__, *TEXT), held_out=0.4))
    return dataclasses.replace(
        recipe, train=dataclasses.replace(recipe.train, steps=1),
        phases=(Phase(steps=1, batch=2, length=64, task=NeedleMix(dense_pairs=(1, 2), sparse_pairs=(1, 1))),),
        evaluate=Evaluation(lengths=(96,), tokens=96, rows=1))
"""


def run(*command, cwd, ok=True):
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    )
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """{"wheel": the wheel of a copy of the checkout, "sdist": the wheel of its source distribution}, and that distribution."""
    folder = tmp_path_factory.mktemp("built")
    checkout = folder / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    run(sys.executable, "-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})", cwd=checkout)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.rmtree(checkout / "needlework.egg-info")
    wheels = {"sdist": sdist}
    for kind, source in (("wheel", checkout), ("sdist", sdist)):
        to = folder / kind
        run(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-w",
            to,
            source,
            cwd=folder,
        )
        (wheels[kind],) = to.glob("*.whl")
    return wheels, sdist


@pytest.fixture(scope="module", params=("wheel", "sdist"))
def installed(request, built, tmp_path_factory):
    """The interpreter of an environment with the wheel, and of all else the packages that this one has, and no other's .pth."""
    folder = tmp_path_factory.mktemp(request.param)
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        built[0][request.param],
        cwd=folder,
    )
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "third_parties.pth").write_text(
        "\n".join(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
    )
    return python, site


def test_the_wheel_holds_the_package_whole_and_nothing_beside_it(built):
    ours = {p.relative_to(ROOT).as_posix() for p in (ROOT / "needlework").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    for wheel in built[0].values():
        names = zipfile.ZipFile(wheel).namelist()
        assert {name.partition("/")[0] for name in names} == {"needlework", f"{wheel.stem.rsplit('-', 3)[0]}.dist-info"}
        assert {name for name in names if name.startswith("needlework/")} == ours  # modules, cards, configs, the page's frame
        assert f"{wheel.stem.rsplit('-', 3)[0]}.dist-info/licenses/LICENSE" in names


def test_the_source_distribution_holds_no_half_of_the_tests(built):
    with tarfile.open(built[1]) as archive:
        names = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"needlework", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert not names & {"tests", "examples", "recipes", "runs", "docs"}


def test_what_is_installed_is_the_wheel(installed):
    python, site = installed
    seen = run(python, "-c", "import needlework; print(needlework.__file__)", cwd=site.parents[2])
    assert Path(seen.strip()).is_relative_to(site)


def test_no_user_is_kept_from_a_new_numpy(installed):
    python, site = installed
    wanted = run(python, "-c", "from importlib.metadata import requires; print(*requires('needlework'), sep='\\n')", cwd=site)
    (users,) = (line for line in wanted.splitlines() if line.startswith("numpy") and "all" in line)
    assert "<" not in users.partition(";")[0]


@pytest.mark.parametrize("command, says", [("--help", "compare"), ("mixers", "Q-Delta"), ("presets", "carve-1.3b")])
def test_the_command_answers(installed, tmp_path, command, says):
    python, _ = installed
    assert says in run(python.with_name("needlework"), command, cwd=tmp_path)


def test_cards_and_launch_plans_are_read_where_they_are_installed(installed, tmp_path):
    python, _ = installed
    code = (
        "from needlework.ops.runtime.launch_configs import rows; from needlework.ops.specs import OPS; from needlework.testing.cards import card\n"
        "print(len(rows('delta/scalar')), all(card(op).is_file() for op in OPS))"
    )
    number, cards = run(python, "-c", code, cwd=tmp_path).split()
    assert int(number) > 0 and cards == "True"


def test_it_trains_and_measures_beside_a_users_own_recipes(installed, tmp_path):
    python, site = installed
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text("raise RuntimeError('the user has this for other things')")
    text = [str(p) for p in sorted((site / "needlework" / "data").glob("*.py"))]
    (tmp_path / "own.py").write_text(OWN.replace("*TEXT", ", ".join(map(repr, text))))
    run(python.with_name("needlework"), "train", "own.py:one", cwd=tmp_path)
    assert list(tmp_path.glob("runs/**/model.safetensors"))
    said = run(python.with_name("needlework"), "train", "demo:nothing", cwd=tmp_path, ok=False)
    assert "qdelta" in said  # its own recipes are found by name
