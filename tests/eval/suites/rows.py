"""What a made-up data set has."""

from typing import Any, NamedTuple


class Data(NamedTuple):
    """One config of a data set. fields: name -> dtype, [dtype] for a list, {name: …} for a struct, ("a", "b") for class labels."""

    path: str
    config: str
    fields: dict[str, Any]
    splits: dict[str, list[dict[str, Any]]]
