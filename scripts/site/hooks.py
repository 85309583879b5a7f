"""What mkdocs does not know: pages from outside of docs/, the API reference, and how links look in the repository.

Documents link to each other as they lie in the repository, so that they can be read there, too. Pages that are no files
of docs/ are made while the site is built.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import reference
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# documents outside of docs/ -> their page
ADOPTED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
_SOURCES = {page: source for source, page in ADOPTED.items()}
_FENCES = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in ADOPTED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page, text in reference.pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    parts = _FENCES.split(markdown)
    for number, part in enumerate(parts):
        if part.startswith("```"):
            parts[number] = re.sub(r"^```(\w+)[^\n]*", r"```\1", part)  # without what tells tests how to run it
        elif not part.startswith("`"):
            parts[number] = _LINK.sub(lambda link: _follow(link, here), part)
    text = "".join(parts)
    return text.replace('"docs/pictures/', '"pictures/') if here == "index.md" else text


def place_in_repository(page: str) -> str:
    """The file that a page of the site is made from."""
    return _SOURCES.get(page, f"docs/{page}")


def page_of(path: str) -> str | None:
    """The page, or the file below docs/, that a path of the repository has in the site; None if it has none."""
    if path in ADOPTED:
        return ADOPTED[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def _follow(link: re.Match[str], here: str) -> str:
    mark, words, target = link.groups()
    path, hash_, anchor = target.partition("#")
    if re.match(r"\w+:", target) or not path:
        return link[0]
    there = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(place_in_repository(here)), path)))
    if there is None:
        return f"{words}"  # a file that is not part of the site
    return f"{mark}[{words}]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{hash_}{anchor})"
