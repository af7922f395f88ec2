"""Floors: imports point down, or sideways inside one package. docs/explanation/tree.md draws the tree. And no function nests deeply."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import needlework

PACKAGE = Path(needlework.__file__).parent
FLOORS = {
    "notation": 0, "probe": 0, "files": 0, "json_file": 0, "fields": 0, "extras": 0, "explained": 0, "ops": 1, "layers": 2, "models": 3, "data": 3,
    "train": 4, "eval": 4, "diagnostics": 4, "serve": 4, "testing": 4, "report": 5, "experiment": 6, "recipes": 7, "cli": 8, "__main__": 9,
}  # fmt: skip
ONLY = {"triton": "ops", "transformers": "models"}  # who alone may import it
FILES = sorted(PACKAGE.rglob("*.py"))


def module(path: Path) -> str:
    return ".".join(["needlework", *path.relative_to(PACKAGE).with_suffix("").parts])


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Absolute names of all that a file imports, also inside functions: modules, and what is taken from them."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["needlework", *path.relative_to(PACKAGE).parent.parts]
            of = base[: len(base) - node.level + 1] if node.level else []
            module = ".".join(of + ([node.module] if node.module else []))
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return tuple(found)


def ours(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "needlework" and len(parts) > 1 and parts[1] in FLOORS else None


def faults(path: Path):
    """What a file imports that its floor may not, in words."""
    here = room(path)
    for name in imports(path):
        there = ours(name)
        if there is not None and there != here:
            if FLOORS[there] >= FLOORS[here]:
                yield f"{path}: {here} (floor {FLOORS[here]}) imports {name}"
        library = name.split(".")[0]
        if library in ONLY and here != ONLY[library]:
            yield f"{path}: {here} imports {library}: only {ONLY[library]} may"


def test_imports_point_down_or_sideways_inside_one_package():
    files = [path for path in FILES if room(path) != "__init__"]
    assert {room(path) for path in files} <= FLOORS.keys(), "a file has no floor"
    assert not [fault for path in files for fault in faults(path)]


def edges() -> dict[str, set[str]]:
    """Module of ours -> those that it imports, also inside functions. Packages' `__init__` are no modules here: they list names."""
    modules = {module(path): path for path in FILES if path.name != "__init__.py"}
    return {name: {*imports(path)} & modules.keys() for name, path in modules.items()}


def test_the_scheduler_and_what_it_needs_import_no_torch():
    graph, modules = edges(), {module(path): path for path in FILES}
    needed = ["needlework.serve.scheduler"]
    for name in needed:
        needed += sorted(graph[name] - {*needed})
    assert {f"needlework.serve.{name}" for name in ("prefix", "pools", "request", "step")} <= {*needed}
    assert not [name for name in needed if "torch" in {found.split(".")[0] for found in imports(modules[name])}]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, the first again at the end; none: []."""
    done, trail = set(), []

    def visit(name: str) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        trail.append(name)
        found = next(filter(None, map(visit, sorted(graph[name]))), [])
        trail.pop()
        done.add(name)
        return found

    return next(filter(None, map(visit, graph)), [])


def test_no_modules_import_one_another_in_a_circle():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"] and circle({"a": {"a"}}) == ["a", "a"]
    assert not circle(edges())


def test_import_needlework_loads_torch_and_nothing_else_of_ours_or_theirs():
    code = (
        "import sys, torch; before = set(sys.modules); import needlework, needlework.ops.delta; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new & {'transformers', 'triton', 'datasets', 'tokenizers', 'matplotlib', 'typer', 'numpy'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


DEEPEST = 4
NESTS = ast.For | ast.AsyncFor | ast.While | ast.If | ast.With | ast.AsyncWith | ast.Try | ast.Match


def depth(statements: list[ast.stmt]) -> int:
    """Levels of blocks in them, without functions inside; `elif` is no level of its own."""
    return max((_levels(statement) for statement in statements), default=0)


def _levels(statement: ast.stmt) -> int:
    if not isinstance(statement, NESTS):
        return 0
    parts = [getattr(statement, "body", []), getattr(statement, "finalbody", [])]
    parts += [part.body for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", []))]
    other = getattr(statement, "orelse", [])
    elif_ = isinstance(statement, ast.If) and len(other) == 1 and isinstance(other[0], ast.If)
    return max(1 + max(map(depth, parts)), depth(other) if elif_ else 1 + depth(other))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_function_nests_deeper_than_four_levels():
    nested = "for a in b:\n if a:\n  pass\n elif b:\n  with c:\n   try:\n    pass\n   except d:\n    while e: pass"
    assert depth(ast.parse(nested).body) == 5
    files = [*FILES, *(path for folder in ("benchmarks", "examples") for path in PACKAGE.with_name(folder).rglob("*.py"))]
    deep = [f"{path}: {f.name}: {depth(f.body)}" for path in files for f in functions(path) if depth(f.body) > DEEPEST]
    assert not deep
