"""What `needlework look` found inside a model: the numbers, of which look_page.py makes a page and look_figures.py the figures."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class ByLayer(NamedTuple):
    """layers: their numbers in the model. values: a list for each measure, one number a layer."""

    layers: list[int]
    values: dict[str, list[float]]


class Map(NamedTuple):
    """layer, rule: whose. weights: an array [H T T] of numbers."""

    layer: int
    rule: str
    weights: Any


class Look(NamedTuple):
    """name: of the checkpoint. layers: what each layer is, in words. text: where the tokens are from, and how many.

    rules: a rule's diagnosis by its name. norms, overwrite, chunks: curves, each measure a place on the axis (tokens read, keys as a share
    of K, tokens of a chunk); None where no layer has them. maps: of the tokens of `words`. notes: what was left out, and why.
    """

    name: str
    layers: list[str]
    text: str
    rules: dict[str, ByLayer]
    norms: ByLayer | None
    overwrite: ByLayer | None
    chunks: ByLayer | None
    maps: list[Map]
    words: str
    notes: list[str]


def number(value: float) -> str:
    """Three digits: 0.0434, −12.3, 1,230."""
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}").replace("-", "−")


def shown(layers: Sequence[int], most: int) -> list[int]:
    """At most `most` of the layers, the first and the last among them, the others evenly between."""
    if len(layers) <= most:
        return list(layers)
    return [layers[round(i * (len(layers) - 1) / (most - 1))] for i in range(most)]
