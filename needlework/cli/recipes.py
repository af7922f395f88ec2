"""Recipes by name: MODULE:FUNCTION of needlework.recipes, or of a Python file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from needlework.extras import extra

if TYPE_CHECKING:
    from needlework.experiment.jobs import Job
    from needlework.experiment.recipe import Recipe


def known(names: Iterable[str], there: Iterable[str], what: str) -> None:
    from needlework.layers.config import nearest

    for name in names:
        if name not in there:
            raise ValueError(f"unknown {what} {name!r}{nearest(name, list(there))}; known: {', '.join(there) or 'none'}")


def load_recipe(name: str) -> Recipe:
    """demo:qdelta is what needlework/recipes/demo.py's function qdelta returns; a module that ends in .py is a file."""
    from needlework.experiment.recipe import Recipe

    recipe = _returned(name)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe {name!r}: returned {_kind(recipe)}, expected a Recipe")
    return recipe


def load_recipes(name: str) -> tuple[Job, ...]:
    """comparison:small is what needlework/recipes/comparison.py's function small returns: several recipes, forks or capacity runs."""
    from needlework.experiment.jobs import Job

    found = _returned(name)
    if not isinstance(found, tuple) or not found or not all(isinstance(recipe, Job) for recipe in found):
        raise ValueError(f"recipes {name!r}: returned {_kind(found)}, expected a tuple of Recipes")
    return found


def _kind(returned: Any) -> str:
    return "an empty tuple" if returned == () else type(returned).__name__


def split(name: str) -> tuple[str, str]:
    """MODULE, FUNCTION of MODULE:FUNCTION."""
    module, _, function = name.rpartition(":")
    if not module or not function:
        raise ValueError(f"recipe {name!r}: expected MODULE:FUNCTION, e.g. demo:qdelta or my.py:run")
    return module, function


def load_module(name: str) -> ModuleType:
    """needlework/recipes/NAME.py, dots for its folders, or the Python file NAME; ValueError says where it is wrong, or that there is
    none."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ValueError(f"recipe {name!r}: there is no file {name}")
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert spec is not None and spec.loader is not None and spec.origin is not None  # the name ends in .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses of the file look up their module there
        with _blamed(Path(spec.origin)):
            spec.loader.exec_module(module)
        return module
    if Path(name).is_file():
        raise ValueError(f"recipe {name!r}: {name} is no Python file, whose name ends in .py")
    # study.pilot is needlework/recipes/study/pilot.py
    dotted = all(part.isidentifier() for part in name.split("."))
    spec = _found("needlework.recipes", name.split(".")) if dotted else None
    if spec is None or spec.origin is None:
        raise ValueError(f"recipe {name!r}: there is no needlework/recipes/{name.replace('.', '/') if dotted else name}.py")
    with _blamed(Path(spec.origin)):
        return importlib.import_module(f"needlework.recipes.{name}")


def _found(package: str, names: list[str]) -> ModuleSpec | None:
    """The module of a package, one folder after another; None where there is none."""
    spec = importlib.util.find_spec(f"{package}.{names[0]}")
    if len(names) == 1 or spec is None:
        return spec
    return _found(spec.name, names[1:]) if spec.submodule_search_locations else None


def _returned(name: str) -> Any:
    """What the function returns that MODULE:FUNCTION names."""
    module_name, function_name = split(name)
    module = load_module(module_name)
    recipes = [there for there, value in vars(module).items() if not there.startswith("_") and _makes_recipes(value, module)]
    if function_name not in vars(module):
        known([function_name], recipes, f"recipe of {module_name}")
    function = vars(module)[function_name]
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:  # no function, one that needs arguments, one that says nothing of them
        there = ", ".join(recipes) or "none"
        raise ValueError(f"recipe {name!r}: expected a function without arguments ({error}); known: {there}") from None
    with _blamed(Path(inspect.getfile(module))):
        return function()


def _makes_recipes(value: Any, module: ModuleType) -> bool:
    """Whether `value` is a function of the module that takes no arguments and is not annotated as returning something else."""
    function = getattr(value, "func", value)  # a partial's
    if not isinstance(function, FunctionType) or function.__module__ != module.__name__:
        return False
    signature = inspect.signature(value)
    needed = [
        p for p in signature.parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    returns = signature.return_annotation
    kinds = ("Recipe", "Fork", "Capacity")
    return not needed and (returns is signature.empty or any(kind in inspect.formatannotation(returns) for kind in kinds))


@contextmanager
def _blamed(file: Path) -> Iterator[None]:
    """Turns an error raised by a recipe's file into a ValueError with its line; an error of ours keeps its traceback."""
    try:
        yield
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ValueError(f"{error.filename or file}{line}: {type(error).__name__}: {error.msg}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename) == file]
        if isinstance(error, ModuleNotFoundError) and extra(error.name):
            raise  # the entry point says what to install
        if not own or not (isinstance(error, ImportError) or frames[-1] is own[-1]):
            raise
        raise ValueError(f"{file}, line {own[-1].lineno}: {type(error).__name__}: {error}") from error
