"""The texts of a sweep's runs: one text, or several that measure the same.

Two machines, or one machine on two days, rarely have the same packages to the last version. `corpora/<sha256>.json` (or .json.xz)
beside the results is the manifest of each text. Runs on two texts belong to one sweep if the held-out sides are the same packages, each of
as many tokens, and if the packages that differ are less than a hundredth of the training side.
"""

from pathlib import Path
from typing import Any

from needlework.json_file import json_files, read_json

MOST = 0.01  # of the training side's bytes


def manifests(directory: Path) -> dict[str, dict[str, Any]]:
    """Digest -> manifest, of a sweep's results; ValueError names a file that is none."""
    found = {}
    for path in json_files(directory / "corpora"):
        try:
            manifest = read_json(path)
            found[manifest["sha256"]] = manifest
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: expected a corpus's manifest, with its sha256 ({error})") from None
    return found


def apart(one: dict[str, Any] | None, other: dict[str, Any] | None) -> str | None:
    """Why runs on the one text cannot be compared with runs on the other; None if they can."""
    if one is None or other is None:
        return "corpora/ has no manifest that says what differs"
    if not all("stores" in m and all("held_out" in p for p in m["files"]) for m in (one, other)):
        return "they are not packages"
    held = [{(p["name"], p["sha256"]) for p in m["files"] if p["held_out"]} for m in (one, other)]
    if held[0] != held[1] or one["stores"]["held_out"]["offsets_sha256"] != other["stores"]["held_out"]["offsets_sha256"]:
        return "their held-out sides differ"
    share = _share(one, other)
    return None if share <= MOST else f"{share:.1%} of their training sides differ"


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """In words: the packages of `other` that replace packages of `one`."""
    a, b = ({p["name"]: p for p in m["files"]} for m in (one, other))
    changed = [n for n in sorted(a.keys() | b.keys()) if a.get(n, {}).get("sha256") != b.get(n, {}).get("sha256")]
    of = lambda packages, name: packages[name].get("of", name) if name in packages else f"no {name}"
    pairs = ", ".join(dict.fromkeys(f"{of(b, name)} for {of(a, name)}" for name in changed))
    return f"{pairs}, {_share(one, other):.2%} of its training side; the same held-out text"


def _share(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The share of the training side's bytes in packages that differ, of the text where it is larger."""
    sides = [{p["name"]: p for p in m["files"] if not p["held_out"]} for m in (one, other)]
    differs = lambda a, b: sum(p["bytes"] for n, p in a.items() if b.get(n, {}).get("sha256") != p["sha256"])
    return max(differs(*sides), differs(*reversed(sides))) / max(sum(p["bytes"] for p in side.values()) for side in sides)
