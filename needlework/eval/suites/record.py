"""ReCoRD as lm-eval words it: the passage, its highlights as a list, and as one more line of it the query with an entity in its gap.

The likeliest entity is the answer; it is right if it is one of the answers, letter case, articles and punctuation aside.
"""

import re
import string
from typing import Any

Row = dict[str, Any]


def documents(rows: Any) -> Any:
    """The rows with each entity and answer once, in order."""
    once = lambda row: {name: sorted(set(row[name])) for name in ("entities", "answers")}
    return rows.map(lambda row: {"passage": row["passage"], "query": row["query"]} | once(row))


def text(row: Row) -> str:
    first, *highlights = row["passage"].strip().split("\n@highlight\n")
    return f"{first}\n\n" + "".join(f"  - {highlight}.\n" for highlight in highlights)


def choices(row: Row) -> list[str]:
    return [_filled(row["query"], entity) for entity in row["entities"]]


def target(row: Row) -> str:
    return _filled(row["query"], row["answers"][0])


def exact(row: Row, results: list[tuple[float, bool]]) -> dict[str, float]:
    """{"em": 1.0 or 0.0} from each entity's log-likelihood."""
    likeliest = max(range(len(results)), key=lambda i: results[i][0])
    return {"em": float(plain(row["entities"][likeliest]) in map(plain, row["answers"]))}


def plain(answer: str) -> str:
    """SQuAD's normal form of an answer."""
    kept = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def _filled(query: str, entity: str) -> str:
    return f"  - {query}".replace("@placeholder", entity)
