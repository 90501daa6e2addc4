"""A hook of MkDocs: the site's pages are README, CONTRIBUTING, CHANGELOG, the notes, and the public names.

Pages link to files of the repository by relative paths, which are right on a forge and in an editor.  The site has
another order: links are put right here, and what they lead to is copied.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import pagedopt

ROOT = Path(__file__).resolve().parents[1]
#: Files of the repository that have another name on the site; notes are pages of its root.
NAMES = {"README.md": "index.md", "notes/README.md": "notes.md"}
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Return the pages, and the files that they link to, in place of what MkDocs has found."""
    linked: dict[str, Path] = {}
    notes = sorted((ROOT / "notes").glob("*.md"))
    found = [
        File.generated(config, place_of(page), content=with_links_of_site(page, linked))
        for page in (*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *notes)
    ]
    found.append(File.generated(config, "api.md", content=api()))
    found += [File.generated(config, name, abs_src_path=str(path)) for name, path in linked.items()]
    return Files(found + [file for file in files if file.generated_by])


def place_of(path: Path) -> str:
    """Where a file of the repository is on the site."""
    name = path.relative_to(ROOT).as_posix()
    return NAMES.get(name, name.removeprefix("notes/"))


def with_links_of_site(page: Path, linked: dict[str, Path]) -> str:
    """A page's text with links between pages of the site; files that are no pages are added to ``linked``."""

    def link(match: re.Match[str]) -> str:
        target, anchor = Path(os.path.normpath(page.parent / match[1])), match[2] or ""
        if target.is_dir():  # the site lists no folders
            return f"]({place_of(ROOT / 'README.md')})"
        if target.suffix != ".md":
            linked[place_of(target)] = target
        return f"]({place_of(target)}{anchor})"

    text = LINK.sub(link, page.read_text())
    return text.replace("]['", "]\\['")  # an item of an item is no cross-reference


def api() -> str:
    """A page of all public names, with the methods that they inherit."""
    public = [name for name in dir(pagedopt) if not name.startswith("_")]
    names = sorted(public, key=lambda name: (not name.startswith("Paged"), name.lower()))
    return "# Public names\n\n" + "\n".join(map(entry, names))


def entry(name: str) -> str:
    """The place of a public name on its page.  It is looked up where it is written: the package imports when asked."""
    thing = getattr(pagedopt, name)
    return f"::: {thing.__module__}.{thing.__qualname__}\n    options:\n      heading: pagedopt.{name}\n"
