"""The planted bugs are still planted, and the command that runs them distinguishes killed, surviving and not judged."""

import pytest

from .run import INTERPRETED, ROOT, mutants, mutated, run, verdict

MUTANTS = mutants()
PROGRAM = "def double(x):\n    return x * 2\n\n\ndef triple(x):\n    return x * 3\n"
TEST = "from program import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
TREE = {"program.py": PROGRAM, "test_program.py": TEST}
MUTANT = """
[[mutant]]
name = "{name}"
breaks = "{name} breaks."
tests = ["test_program.py"]
[[mutant.edit]]
file = "program.py"
old = "{old}"
new = "{new}"
"""


@pytest.fixture
def tree(tmp_path):
    """A program, its test, and no mutant yet."""
    for name, text in TREE.items():
        (tmp_path / name).write_text(text)

    def plant(*edits):
        entries = (MUTANT.format(name=name, old=old, new=new) for name, old, new in edits)
        (tmp_path / "area.toml").write_text("".join(entries))
        return mutants(tmp_path)

    return tmp_path, plant


def test_every_mutant_finds_what_it_breaks_exactly_once_and_changes_the_program():
    for mutant in MUTANTS:
        mutated(mutant)


def test_every_mutant_has_a_name_of_its_own_a_sentence_and_tests_that_are_there():
    names = [mutant.name for mutant in MUTANTS]
    assert not [name for name in names if names.count(name) > 1] and len(names) >= 80
    for mutant in MUTANTS:
        assert mutant.breaks.endswith("."), mutant.name
        assert mutant.tests.paths, mutant.name
        for path in mutant.tests.paths:
            assert (ROOT / path.partition("::")[0]).exists(), f"{mutant.name}: {path}"


def test_tests_of_kernels_are_run_in_the_interpreter_and_no_others():
    kernels = ("tests/ops/test_kernels.py", "tests/ops/test_launch.py", "tests/ops/test_triton_")
    for mutant in MUTANTS:
        assert {path.startswith(kernels) for path in mutant.tests.paths} == {mutant.area == INTERPRETED}, mutant.name


def test_killed_surviving_and_not_judged_are_told_apart(tree, capsys):
    root, plant = tree
    chosen = plant(
        ("killed", "x * 2", "x * 4"),
        ("surviving", "x * 3", "x * 5"),
        ("crashing", "def triple", "import nothing_of_that_name\\ndef triple"),
    )
    assert not run(chosen, 2, root)
    printed = capsys.readouterr().out
    for line in ("killed: area/killed: killed breaks.", "SURVIVES: area/surviving: surviving", "NOT JUDGED: area/crashing"):
        assert line in printed
    assert "1 killed, 1 survive, 1 not judged, 0 whose" in printed.splitlines()[-1]
    assert {name: (root / name).read_text() for name in TREE} == TREE
    assert run(chosen[:1], 1, root)


def test_a_test_that_fails_by_itself_kills_nothing(tree, capsys):
    root, plant = tree
    (root / "test_program.py").write_text(TEST.replace("== 6", "== 7"))
    assert not run(plant(("killed", "x * 2", "x * 4")), 1, root)
    assert "0 killed, 0 survive, 0 not judged, 1 whose tests fail without them" in capsys.readouterr().out


def test_an_edit_that_plants_nothing_is_refused(tree):
    root, plant = tree
    for old, new, why in (("x * 7", "x", "0 times"), ("return", "yield", "2 times"), ("x * 2", "x *  2", "same program")):
        with pytest.raises(ValueError, match=why):
            mutated(*plant(("idle", old, new)), root)
    with pytest.raises(SyntaxError):
        mutated(*plant(("torn", "x * 2", "x *")), root)


def test_no_test_at_all_is_no_verdict(tree):
    root, plant = tree
    (mutant,) = plant(("killed", "x * 2", "x * 4"))
    assert verdict(mutant.tests._replace(select="nothing"), root)[0] == "error"
