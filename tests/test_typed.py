"""What a user's type checker sees: the package says that it is typed, and its public functions say of what type everything is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import needlework

PACKAGE = Path(needlework.__file__).parent
FLOORS = (
    "cli",
    "data",
    "diagnostics",
    "eval",
    "experiment",
    "layers",
    "models",
    "ops",
    "recipes",
    "report",
    "serve",
    "testing",
    "train",
)


def unannotated(body: list[ast.stmt], method: bool = False) -> Iterator[str]:
    """The public functions and methods of a module that leave out the type of an argument or of what they return. Kernels have none:
    Triton compiles their text, and the types of their arguments are those of a launch."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (f"{node.name}.{name}" for name in unannotated(node.body, True))
        if not isinstance(node, ast.FunctionDef) or (node.name.startswith("_") and node.name != "__call__"):
            continue
        if any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list):
            continue
        of_the_class = method and not any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
        found = [*node.args.posonlyargs, *node.args.args][of_the_class:] + node.args.kwonlyargs
        found += [x for x in (node.args.vararg, node.args.kwarg) if x is not None]
        if node.returns is None or any(x.annotation is None for x in found):
            yield node.name


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("floor", FLOORS)
def test_public_functions_say_the_types_of_arguments_and_results(floor):
    files = sorted((PACKAGE / floor).rglob("*.py"))
    faults = [
        f"{path.relative_to(PACKAGE)}: {name}" for path in files for name in unannotated(ast.parse(path.read_text()).body)
    ]
    assert files and not faults
