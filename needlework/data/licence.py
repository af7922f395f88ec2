"""Under which licence a corpus's text is, as far as its manifest names it."""

from typing import Any, NamedTuple

# a data set of the Hub, and where Dolma's files lie: as their own pages say it
KNOWN = {"HuggingFaceFW/fineweb-edu": "odc-by", "https://olmo-data.org/dolma": "odc-by"}


class Licence(NamedTuple):
    """name: as the Hub writes it, None where it is not known or there are many. says: a sentence for a reader."""

    name: str | None
    says: str


def licence_of(manifest: dict[str, Any]) -> Licence:
    """Of the text that a corpus's manifest describes."""
    source = manifest.get("source", {})
    match source.get("kind", manifest["kind"]):
        case "stdlib":
            return Licence(
                "psf-2.0", f"The text is the standard library of Python {manifest['python']}, under the PSF licence."
            )
        case "packages":
            return Licence(None, "The text is installed Python packages, each under its own licence; manifest.json names them.")
        case "hub":
            place = source["files"][0] if source.get("files") else source["path"]
            name = next((licence for known, licence in KNOWN.items() if place.startswith(known)), None)
            said = f"under {name}" if name else "whose licence its page says; needlework does not know it"
            return Licence(name, f"The text is {place}{' …' if source.get('files') else ''}, {said}.")
        case _:
            return Licence(None, "The text is files of the author's; needlework does not know their licence.")
