"""What each layer's rule was called with in one forward pass: the same call can then be made with other values."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from needlework.layers.softmax import AttendRule
from needlework.layers.write import WriteRule


class Call(NamedTuple):
    """layer: its number in the model. rule: the module; arguments and keywords: of its forward. A write rule is given its op before
    them."""

    layer: int
    rule: WriteRule | AttendRule
    arguments: tuple[Tensor, ...]
    keywords: dict[str, Any]


def calls(model: nn.Module, input_ids: Tensor) -> list[Call]:
    """Of every write rule and attend rule, in the order of layers, from input_ids [B T] in evaluation mode."""
    found: list[Call] = []

    def note(rule: Any, arguments: tuple[Tensor, ...], keywords: dict[str, Any]) -> None:
        own = {"output_final_state": False} if isinstance(rule, AttendRule) else {}
        found.append(Call(rule.width.layer, rule, arguments[isinstance(rule, WriteRule) :], keywords | own))

    with torch.no_grad(), _noting(model, note):
        model(input_ids.to(next(model.parameters()).device), use_cache=False, logits_to_keep=1)
    return found


class _noting:
    """Inside the `with`, `note` is called before every rule's forward, and the model is in evaluation mode."""

    def __init__(self, model: nn.Module, note):
        self.model, self.note, self.training = model, note, model.training

    def __enter__(self) -> None:
        self.model.eval()
        self.handles = [rule.register_forward_pre_hook(self.note, with_kwargs=True) for rule in _rules(self.model)]

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.model.train(self.training)


def _rules(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, WriteRule | AttendRule))
