"""--set and --steps: a recipe with other values.

    --set a.b=value     a is a field of the recipe, b one of what it holds; of a dict a key, of a tuple a place (0 is the first)

A value is a Python literal, or text, of the type that its field is declared with. All settings are applied at once, so two that
depend on each other may be given together.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from needlework.experiment.recipe import Recipe


def changed(recipe: Any, settings: list[str]) -> Any:
    """The job, a recipe for one, with every "a.b=value". Where phases change and train.steps does not, train.steps is their sum."""
    tree = _tree(settings)
    new = _changes(recipe, type(recipe), tree, "")
    if "phases" in new and "steps" not in tree.get("train", {}):
        train = new.get("train", recipe.train)
        new["train"] = dataclasses.replace(train, steps=sum(phase.steps for phase in new["phases"]))
    elif "train" in new and hasattr(recipe, "phases") and "phases" not in new and new["train"].steps != recipe.train.steps:
        raise ValueError(
            f"--set train.steps={new['train'].steps}: the recipe's phases have {recipe.train.steps} steps; "
            "set phases.0.steps and so on, or shorten them all: train --steps"
        )
    return dataclasses.replace(recipe, **new)


def of_steps(recipe: Recipe, steps: int) -> tuple[Recipe, str]:
    """The recipe in `steps` steps, and a sentence about it. Phases keep their shares of the run, at least a step each. A warm-up keeps its
    share of a shorter run, and its steps in a longer one."""
    if steps < len(recipe.phases):
        raise ValueError(f"--steps {steps}: recipe {recipe.name} has {len(recipe.phases)} phases, expected a step for each")
    phases, left, of = [], steps, recipe.train.steps
    for after, phase in enumerate(reversed(recipe.phases)):
        rest = len(recipe.phases) - 1 - after  # phases that are to get a step still
        share = min(max(1, round(left * phase.steps / of)), left - rest)
        phases.insert(0, dataclasses.replace(phase, steps=share))
        left, of = left - share, of - phase.steps
    schedule = recipe.train.schedule
    warmup = min(schedule.warmup, -(-schedule.warmup * steps // recipe.train.steps))
    train = dataclasses.replace(recipe.train, steps=steps, schedule=dataclasses.replace(schedule, warmup=warmup))
    each = " + ".join(str(phase.steps) for phase in phases)
    note = f"{recipe.name}: {steps} steps instead of {recipe.train.steps}: phases {each}, warm-up {warmup}"
    return dataclasses.replace(recipe, phases=tuple(phases), train=train), note


def _tree(settings: list[str]) -> dict[str, Any]:
    """{"a": {"b": "value"}} of "a.b=value". The last setting of a field wins."""
    tree: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting!r}: expected FIELD=VALUE")
        *outer, last = path.split(".")
        node = tree
        for name in outer:
            node = node.setdefault(name, {}) if isinstance(node, dict) else node
        if not isinstance(node, dict) or isinstance(node.get(last), dict):
            raise ValueError(f"--set {path}: another --set says what is in it, or what it is in; one of them is meant")
        node[last] = text
    return tree


def _changes(config: Any, hint: Any, tree: dict[str, Any], where: str) -> dict[str, Any]:
    """The new values of the fields that the tree names, in a config of a declared type."""
    from needlework.layers.config import nearest

    there, new = _fields(config, hint), {}
    for name, change in tree.items():
        path = f"{where}.{name}" if where else name
        if not there:
            raise ValueError(f"--set {path}: {where} is {config!r}, which has no fields that can be set")
        if name not in there:
            raise ValueError(f"--set {path}: no field {name!r}{nearest(name, list(there))}; known: {', '.join(there)}")
        old, inner = there[name]
        if isinstance(change, dict):
            new[name] = _built(old, _changes(old, inner, change, path))
        else:
            new[name] = _value(change, inner, old, path)
    return new


def _fields(config: Any, hint: Any) -> dict[str, tuple[Any, Any]]:
    """name -> (value, declared type) of all that can be set; of a model's config its own fields, none of transformers'."""
    from needlework.fields import types
    from needlework.layers import KINDS
    from needlework.models import NeedleworkConfig

    match config:
        case NeedleworkConfig():
            hints = inspect.get_annotations(NeedleworkConfig)
            return {name: (getattr(config, name), hint) for name, hint in hints.items()}
        case dict():
            component = next((kind for kind in KINDS if kind.kind == config.get("kind")), None)
            hints = types(component) if component else {}
            return {name: (value, str if name == "kind" else hints.get(name, Any)) for name, value in config.items()}
        case tuple() | list():
            arms = get_args(hint) or (Any, ...)
            each = (arms[0],) * len(config) if arms[-1] is ... else arms
            return {str(i): field for i, field in enumerate(zip(config, each, strict=True))}
    if not dataclasses.is_dataclass(config):
        return {}
    hints = types(type(config))
    return {field.name: (getattr(config, field.name), hints[field.name]) for field in dataclasses.fields(config)}


def _built(config: Any, new: dict[str, Any]) -> Any:
    from needlework.models import NeedleworkConfig

    match config:
        case NeedleworkConfig():
            return config.replaced(**new)
        case dict():
            return config | new
        case tuple() | list():
            return type(config)(new.get(str(i), value) for i, value in enumerate(config))
    return dataclasses.replace(config, **new)


def _value(text: str, hint: Any, old: Any, where: str) -> Any:
    from needlework.fields import expected, fitted
    from needlework.layers import KINDS, from_dict

    value = _literal(text)
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind is not None and (isinstance(old, dict) or kind in [component.kind for component in KINDS]):
        value = from_dict(value)  # a component, written as config.json has it
    if hint is Any and old is not None:
        hint = type(old) | None
    for attempt in (value, text):  # 5 is text where text is declared
        try:
            return fitted("--set", where, attempt, hint)
        except ValueError:
            continue
    such = f" such as {old!r}" if old is not None else ""
    raise ValueError(f"--set {where}: got {text!r}, expected {expected(hint)}{such}")


def _literal(text: str) -> Any:
    """The Python literal, infinity too; the text itself if it is none."""
    if text == "inf":
        return math.inf
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # all that it raises for what is no literal, or a deep one
        return text
