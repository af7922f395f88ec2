"""Marked-up text to plain text: HTML, Perl's pod, dictd's GCIDE, WordNet's data files, the verses of a Bible.

What a reader sees is kept, in its order: words, numbers, code as it is laid out. What is left out is markup and what a page repeats
around its text: navigation, headers, footers, scripts, the marks of sources.
"""

import re
from collections.abc import Iterator
from html.parser import HTMLParser

_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_UNSEEN = {"script", "style", "head", "nav", "form", "svg", "button", "title"}
_AROUND = {
    "related",
    "sphinxsidebar",
    "footer",
    "headerlink",
    "navheader",
    "navfooter",
    "book-navigation",
    "mobile-nav",
    "menu-wrapper",
}
_LINE = {"br", "li", "tr", "dt", "div", "section", "caption", "option"}
_CELL = {"td", "th"}
_PARAGRAPH = {"p", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "table", "ul", "ol", "dl", "dd"}


def html_text(page: str) -> str:
    """The text of a page: a paragraph, a heading or a block of code between blank lines, cells of a table between spaces."""
    parser = _Page()
    parser.feed(page)
    parser.close()
    return settled("".join(parser.parts))


class _Page(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.unseen: list[str] = []  # the open elements from the one on that is not shown
        self.pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = next((value or "" for name, value in attrs if name == "class"), "").split()
        if self.unseen or tag in _UNSEEN or _AROUND.intersection(classes):
            if tag not in _VOID:
                self.unseen.append(tag)
            return
        self.pre += tag == "pre"
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.unseen:
            if tag in self.unseen:  # what was left open inside ends with it
                del self.unseen[len(self.unseen) - 1 - self.unseen[::-1].index(tag) :]
            return
        self.pre -= tag == "pre" and self.pre > 0
        if tag not in _VOID and tag not in _CELL:
            self._break(tag)

    def handle_data(self, data: str) -> None:
        if self.unseen:
            return
        if not self.pre:
            data = re.sub(r"\s+", " ", data)
            data = data.lstrip() if self.parts and self.parts[-1].endswith("\n") else data
        if data:
            self.parts.append(data)

    def _break(self, tag: str) -> None:
        if tag in _PARAGRAPH:
            self.parts.append("\n\n")
        elif tag in _LINE:
            self.parts.append("\n")
        elif tag in _CELL:
            self.parts.append(" ")


def settled(text: str) -> str:
    """Without spaces at the ends of lines, one blank line at most in a row, and one line end at the end."""
    lines = (line.rstrip() for line in text.replace("\xa0", " ").split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


_LESS, _MORE = "\x01", "\x02"  # a bracket that is text, until no code is left to be read
_ENTITY = {"lt": _LESS, "gt": _MORE, "verbar": "|", "sol": "/"}


def pod_text(pod: str) -> str:
    """Perl's pod: paragraphs without their codes, headings and items as lines, verbatim paragraphs as they are.

    =for and =begin … =end, which are for other formats, are left out.
    """
    shown, hidden = [], False
    for paragraph in re.split(r"\n[ \t]*\n", pod):
        paragraph = paragraph.strip("\n")
        command, _, rest = paragraph.partition(" ") if paragraph.startswith("=") else ("", "", "")
        if command in ("=begin", "=end"):
            hidden = command == "=begin"
        elif hidden or not paragraph:
            continue
        elif re.match(r"[ \t]", paragraph):
            shown.append(paragraph)
        elif not command:
            shown.append(_codes(paragraph))
        elif re.match(r"=(head\d|item)$", command):
            shown.append(_codes(rest.strip()))
    return settled("\n\n".join(shown))


def _codes(text: str) -> str:
    """B<…>, C<< … >> and the like -> what they hold, from the inside out."""
    before = None
    while before != text:
        before = text
        text = re.sub(r"([A-Z])(?:<(?!<)([^<>]*)>|<{2,}\s((?:(?![A-Z]<).)*?)\s>{2,})", _code, text, flags=re.DOTALL)
    return text.replace(_LESS, "<").replace(_MORE, ">")


def _code(found: re.Match) -> str:
    letter, inner = found[1], found[2] if found[2] is not None else found[3]
    match letter:
        case "X" | "Z":
            return ""
        case "E":
            return _ENTITY.get(inner, chr(int(inner)) if inner.isdigit() else inner)
        case "L":
            label, _, target = inner.rpartition("|")
            return label or target
    return inner if found[3] is None else inner.replace("<", _LESS).replace(">", _MORE)


def gcide_entries(data: str) -> Iterator[tuple[str, str]]:
    """(headword, text) of each entry of dictd's GCIDE: paragraphs on a line each, without pronunciations and marks of sources."""
    _, _, body = data.partition("\n\nA \\")
    entry: list[str] = []
    head = "A"
    for paragraph in re.split(r"\n\s*\n", "A \\" + body):
        if paragraph and not paragraph[0].isspace() and entry:
            yield head, "\n".join(entry) + "\n"
            entry = []
        if not entry:
            head = re.split(r"[\\,\n]", paragraph, maxsplit=1)[0].strip()
        if line := _gcide_line(paragraph):
            entry.append(line)
    if entry:
        yield head, "\n".join(entry) + "\n"


_SOURCE = r"\s*\[(?:1913 Webster|Webster 1913 Suppl\.|WordNet [\d.]+|PJC|AS|JC|RH|MW10|Century Dict\. 1906)(?:\s*\+\s*[A-Za-z0-9 .]+)?\]"


def _gcide_line(paragraph: str) -> str:
    text = re.sub(_SOURCE, "", paragraph)
    text = re.sub(r"\\[^\\\n]{1,80}\\", "", text)  # Ab*jure"
    text = re.sub(r"\{([^{}]*)\}", r"\1", text)  # a reference to another entry
    return re.sub(r" ([,;.])", r"\1", re.sub(r"\s+", " ", text)).strip()


_KINDS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def wordnet_lines(data: str) -> Iterator[tuple[int, str]]:
    """(lexicographer file, line) of each synset of a data file: its words, what they are, its gloss."""
    for line in data.splitlines():
        if line.startswith("  "):  # the licence
            continue
        fields, _, gloss = line.partition(" | ")
        _, file, kind, count, *rest = fields.split(" ")
        words = [re.sub(r"\((?:a|p|ip)\)$", "", word).replace("_", " ") for word in rest[: 2 * int(count, 16) : 2]]
        yield int(file), f"{', '.join(words)} ({_KINDS[kind]}): {gloss.strip()}\n"


def verses(data: str) -> Iterator[tuple[str, str]]:
    """(book, text) of lines such as "Ge1:1 In the beginning…": a chapter is a paragraph."""
    book, chapter, text = "", "", ""
    for line in data.splitlines():
        if not (found := re.match(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line)):
            continue  # the title
        if found[1] != book and text:
            yield book, text.strip() + "\n"
            text, chapter = "", ""
        text += ("\n\n" if found[2] != chapter else " ") + found[3]
        book, chapter = found[1], found[2]
    if text:
        yield book, text.strip() + "\n"
