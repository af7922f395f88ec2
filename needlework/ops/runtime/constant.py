"""What torch.compile may take as a constant of its graph: answers about the machine and the launch tables."""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def constant(f: F) -> F:
    """torch.compiler.assume_constant_result, which would load all of torch._dynamo, and Triton, when this is imported. A tuple from it
    can be unpacked there, not compared: torch 2.11 raises for != and >=."""
    f._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute] (what torch._dynamo looks for)
    return f
