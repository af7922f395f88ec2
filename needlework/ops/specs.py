"""The list that checks, benchmarks, docs and doctor iterate over. A new op adds its line here."""

from importlib import import_module

from needlework.ops.api import OpSpec

OPS = ("delta", "qdelta", "carve", "ccq", "lucid", "polar", "path", "paged", "mamba3")


def specs() -> tuple[OpSpec, ...]:
    """Every op's specs, in the order of OPS."""
    return tuple(spec for op in OPS for spec in import_module(f"needlework.ops.{op}.spec").SPECS)
