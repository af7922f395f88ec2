"""JSON that says which file it is when it is torn."""

import json
from pathlib import Path
from typing import Any


def read_json(path: str | Path) -> Any:
    """What the file holds; ValueError names it where that is no JSON: half of it, none, too deep. OSErrors name it themselves."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: torn, or no JSON ({error})") from None
