"""Pages made of files outside docs/ that a page links to: docs/source/ mirrors them, out of git. Links to them, and those to their
pictures, are moved there."""

import re
import shutil
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
MADE = DOCS / "source"
IMAGE = re.compile(r"!\[([^\[\]]*)\]\(([^)\s#:]+)\)")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml", ".sh": "bash", ".cff": "yaml"}


def make_pages(app, config) -> None:
    """A page for every file that the pages link to, and for what those link to."""
    shutil.rmtree(MADE, ignore_errors=True)
    waiting = [page for page in DOCS.rglob("*.md")]
    made = set()
    while waiting:
        page = waiting.pop()
        for match in LINK.finditer(page.read_text()):
            file = target(page, match[2])
            if file is not None and not file.is_relative_to(DOCS) and file not in made:
                made.add(file)
                copy = _copy(file)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(_page(file))
                if file.suffix == ".md":
                    waiting.append(file)


def move_links(app, docname: str, source: list[str]) -> None:
    """Links between pages, as they are in the repository, to where the pages lie in the site."""
    here = DOCS / f"{docname}.md"
    origin = ROOT / here.relative_to(MADE) if here.is_relative_to(MADE) else here
    if not origin.exists():
        return  # the page shows a file's text

    up = "../" * len(here.relative_to(DOCS).parent.parts)

    def moved(match: re.Match) -> str:
        file = target(origin, match[2])
        if file is None:
            return match[0]
        to = file if file.is_relative_to(DOCS) else _copy(file)
        return f"[{match[1]}]({up}{to.relative_to(DOCS).as_posix()}{match[3] or ''})"

    def shown(match: re.Match) -> str:
        """A picture lies in docs/; elsewhere there is none that a page could show."""
        file = target(origin, match[2])
        return match[0] if file is None else f"![{match[1]}]({up}{file.relative_to(DOCS).as_posix()})"

    source[0] = IMAGE.sub(shown, LINK.sub(moved, source[0]))


def target(page: Path, link: str) -> Path | None:
    """The file in the repository that a page's relative link points to; a folder's README.md for a folder; None where there is none."""
    file = (page.parent / link).resolve()
    file = file / "README.md" if file.is_dir() else file
    return file if file.is_file() and file.is_relative_to(ROOT) else None


def _copy(file: Path) -> Path:
    copy = MADE / file.relative_to(ROOT)
    return copy if file.suffix == ".md" else copy.with_name(copy.name + ".md")


def _page(file: Path) -> str:
    text = file.read_text()
    if file.suffix != ".md":
        text = f"# {file.relative_to(ROOT).as_posix()}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n````\n"
    return "---\norphan: true\n---\n\n" + text
