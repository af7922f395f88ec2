"""The docstrings as reStructuredText: an indented block is an equation, `name [shape]: text` an item of a list, `>>>` an example."""

import re

ITEM = re.compile(
    r"(?:[A-Za-z_]\w*(?:, |(?= \[)|(?=:))|(?:, | or | )?\[[^\]]*\](?:, |(?=:)| (?=or)|(?= \w+:)))+(?: int64| int32)?: "
)
WIDTH = 80  # what fits beside the navigation
TERMS = {"Dtypes", "State", "Error", "Raises", "Returns", "Example", "Computes"}


def process(app, what, name, obj, options, lines: list[str]) -> None:
    """A docstring's lines, changed in place."""
    lines[:] = restructured("\n".join(lines)).splitlines()


def shorten(app, what, name, obj, options, signature: str | None, returns: str | None):
    """A signature without the ranges of its fields, which the docstring says, and without what transformers adds to a config."""
    if signature is not None:
        signature = re.sub(
            r"~?(?:typing\.)?Annotated\[(\w+), Range\(words='[^']*', holds=<function .*? at 0x\w+>\)\]", r"\1", signature
        )
        signature = signature.replace("<factory>", "...").replace("~typing.", "").replace("~", "")
        signature = re.sub(r"\b(torch|collections\.abc)\.(?=[A-Z])|\bneedlework\.layers\.\w+\.(?=\w+Config\b)", "", signature)
        if name == "needlework.models.NeedleworkConfig":
            signature = "(*, " + signature.partition("*, ")[2]
    return signature, returns


def restructured(text: str) -> str:
    blocks, example = [], False
    for block in filter(str.strip, re.split(r"\n[ \t]*\n", text.strip("\n"))):
        lines = block.splitlines()
        example = lines[0].startswith(">>>") or (example and lines[0].startswith("    "))
        if example:
            blocks.append(block)
        elif all(line.startswith("    ") for line in lines):
            blocks.append("::\n\n" + "\n".join(_broken(line, len(lines) > 1) for line in lines))
        else:
            blocks += _paragraphs(lines, summary=not blocks)
    return "\n\n".join(blocks) + "\n"


def _broken(line: str, of_several: bool) -> str:
    """A line of an equation that is too wide goes on in lines of its own, indented where the equation has other lines."""
    if len(line) - 4 <= WIDTH:
        return line
    return re.sub(r", {2,}", ",\n    " + "    " * of_several, line)


def _paragraphs(lines: list[str], summary: bool) -> list[str]:
    """A line that begins `name [shape]:` opens an item, a line that begins with one of TERMS a paragraph; others go on where they are.
    A summary's first line opens neither."""
    parts: list[str] = []
    for i, line in enumerate(lines):
        head = None if summary and i == 0 else ITEM.match(line)
        term = re.match(r"\w+", line)
        if term and term[0] in TERMS and (head or parts):
            rest = line[term.end() :].lstrip(":")
            parts.append(f"**{term[0]}**{':' if head else ''}{_plain(rest)}".rstrip())
        elif head:
            parts.append(f"- ``{head[0].removesuffix(': ')}``: {_plain(line[head.end() :])}")
        elif parts:
            parts[-1] += " " + _plain(line.strip())
        else:
            parts.append(_plain(line.strip()))
    return parts


def _plain(text: str) -> str:
    """Code in double backticks; what reStructuredText would read is escaped elsewhere."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([*_|\\])", r"\\\1", piece) for piece in pieces[::2]]
    return "``".join(pieces)
