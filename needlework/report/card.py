"""A checkpoint's model card: what the model is, the text that it read and its licence, what was measured, how to load it.

Everything comes from the folder and from what its run left beside it: result.json and manifest.json.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from needlework.data.licence import licence_of
from needlework.data.reading import text_read
from needlework.files import write_whole
from needlework.json_file import read_json

from .markdown import table
from .words import count, percent, size, task_title

CARD, MANIFEST, RESULTS = "README.md", "manifest.json", "results.json"
FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)

_USE = """```python
# pip install needlework
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "."  # this folder, or the model's name on the Hub
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
```

`trust_remote_code` runs one file of this folder, `modeling_needlework.py`, which imports the installed needlework and nothing else.
"""


def write_card(checkpoint: Path, *, source: str | None = None) -> None:
    """README.md in a checkpoint's folder, and beside it the manifest and the results of the run that left it, where there is one.

    source: what the checkpoint was converted from.
    """
    result, manifest = (_beside(checkpoint, name) for name in ("result.json", "manifest.json"))
    for found, name in ((manifest, MANIFEST), (result, RESULTS)):
        if found is not None:
            shutil.copyfile(found, checkpoint / name)
    config = read_json(checkpoint / "config.json")
    entry, text = (None if path is None else read_json(path) for path in (result, manifest))
    write_whole(checkpoint / CARD, card(config, entry, text, source))


def licensed(checkpoint: Path, licence: str) -> None:
    """The card with this licence of the model. ValueError for a card without the lines of YAML that hold it."""
    path = checkpoint / CARD
    content = path.read_text(encoding="utf-8")
    front = FRONT.match(content)
    if front is None:
        raise ValueError(f"{path}: expected a card that begins with --- and lines of YAML, which hold the licence")
    lines = [line for line in front[1].splitlines() if not line.startswith("license:")]
    write_whole(path, "\n".join(["---", *lines, f"license: {licence}", "---", ""]) + content[front.end() :])


def card(config: dict[str, Any], entry: Mapping[str, Any] | None, manifest: dict[str, Any] | None, source: str | None) -> str:
    """The card's text. config: config.json; entry: result.json of the run; manifest: of its text."""
    kinds = list(dict.fromkeys(kind for mixer in config["mixers"].values() for kind in _rules(mixer)))
    title = entry["title"] if entry else "A model of needlework" if source is None else Path(source).name
    sections = [_front(kinds, manifest, source), f"# {title}", _summary(config, entry, source), _USE]
    sections += ["## Model", table(("", ""), _facts(config, entry))]
    described = json.dumps({letter: config["mixers"][letter] for letter in dict.fromkeys(config["layout"])}, indent=1)
    sections.append(f"<details><summary>The mixers of the layout</summary>\n\n```json\n{described}\n```\n\n</details>")
    sections += ["## Text", *_text(manifest, source)]
    if entry is not None:
        sections += ["## Results", *_results(entry)]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _beside(checkpoint: Path, name: str) -> Path | None:
    """A file of the run that left the checkpoint's folder, or None: the folder may have been moved away from it."""
    path = checkpoint.resolve().parent / name
    return path if path.is_file() and checkpoint.resolve().name == "checkpoint" else None


def _rules(mixer: dict[str, Any]) -> Iterable[str]:
    """The kinds of the rules that make a mixer what it is: it writes, reads, attends, remembers."""
    parts = [mixer, *(mixer.get(part) for part in ("write", "read", "attend", "memory"))]
    return [part["kind"] for part in parts if part is not None and part["kind"] != "plain"]


def _front(kinds: list[str], manifest: dict[str, Any] | None, source: str | None) -> str:
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- needlework"]
    lines += [f"- {kind}" for kind in kinds]
    of_hub = (manifest or {}).get("source", {})
    if of_hub.get("kind") == "hub" and not of_hub.get("files"):
        lines += ["datasets:", f"- {of_hub['path']}"]
    if source is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        lines.append(f"base_model: {source}")
    return "\n".join([*lines, "---"])


def _summary(config: dict[str, Any], entry: Mapping[str, Any] | None, source: str | None) -> str:
    if source is not None:
        return f"Converted by needlework from {source}. The weights are its; config.json says what computes with them."
    if entry is None:
        return "A language model of needlework."
    tokens = count(entry["train"]["tokens"])
    return (
        f"A language model of {count(entry['parameters'])} parameters, trained by needlework on {tokens} tokens with rows of "
        f"{entry['train_length']:,}, seed {entry['seed']}. {entry['equation']}"
    )


def _facts(config: dict[str, Any], entry: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    layout = config["layout"]
    of = lambda letter: " + ".join(_rules(config["mixers"][letter]))
    facts = [
        ("layout", f"{layout}, {_layers(len(layout))}"),
        ("width", f"{config['hidden_size']:,}"),
        ("vocabulary", f"{config['vocab_size']:,}"),
    ]
    facts += [(f"mixer {letter}", f"{of(letter)}, {_layers(layout.count(letter))}") for letter in dict.fromkeys(layout)]
    facts.append(
        ("channel mixer", "none" if config["mlp"] is None else f"{config['mlp']['kind']}, {config['mlp']['hidden']:,} wide")
    )
    if entry is not None:
        held = ", ".join(f"{size(n)} after {int(T):,} tokens" for T, n in entry["state_bytes"].items())
        facts += [("parameters", f"{entry['parameters']:,}"), ("state of a sequence", held)]
        facts += [("trained on", f"{entry['machine']}, commit {(entry.get('commit') or 'unknown')[:10]}")]
    return facts


def _layers(number: int) -> str:
    return f"{number} layer{'' if number == 1 else 's'}"


def _text(manifest: dict[str, Any] | None, source: str | None) -> list[str]:
    if manifest is None:
        whose = "the source's: see its own card" if source else "not recorded beside this folder"
        return [f"The training text is {whose}."]
    totals = manifest["totals"]
    return [
        licence_of(manifest).says,
        f"{text_read(manifest)}: {totals['documents']:,} documents, {totals['train_tokens']:,} training tokens and "
        f"{totals['held_out_tokens']:,} held out. SHA-256 of the tokens {manifest['sha256']}. [{MANIFEST}]({MANIFEST}) lists every source.",
    ]


def _results(entry: Mapping[str, Any]) -> list[str]:
    lengths = [str(T) for T in entry["lengths"]]
    rows = [("loss on held-out text, nats", *(f"{entry['loss'][T]:.3f}" for T in lengths))]
    rows += [
        (f"digits found, {task_title(task)}", *(percent(entry[task][T]["accuracy"]) for T in lengths))
        for task in entry["tasks"]
    ]
    trained = f"Rows of {entry['train_length']:,} tokens were trained on; longer ones were not. One seed: another moves these numbers."
    return [trained, table(("tokens", *(f"{int(T):,}" for T in lengths)), rows), f"All numbers: [{RESULTS}]({RESULTS})."]
