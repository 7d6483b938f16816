"""Prepares pages for the site: files from outside docs/, and links that leave it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_MORE = (
    "examples/*/README.md",
    "examples/*/*.png",
    "benchmarks/*/README.md",
    "benchmarks/*/*.png",
)


def _on_site() -> dict[str, str]:
    """Returns the files from outside docs/ on the site, and their names there."""
    paths = [path for pattern in _MORE for path in sorted(ROOT.glob(pattern))]
    names = [str(path.relative_to(ROOT)) for path in paths]
    return {"CHANGELOG.md": "changelog.md", **{name: name for name in names}}


_ON_SITE = _on_site()
_SOURCES = {name: source for source, name in _ON_SITE.items()}


def on_files(files: Files, config: Any) -> Files:
    """Adds the changelog, and the pages and pictures of the benchmarks and examples."""
    for source, name in _ON_SITE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links, which are valid in the repository, to the pages of the site.

    Files that are not on the site are named instead.
    """
    here = page.file.src_uri
    source = ROOT / _SOURCES.get(here, f"docs/{here}")

    def on_site(link: re.Match[str]) -> str:
        picture, text, path, anchor = link.groups()
        target = (source.parent / path).resolve()
        if not target.exists():  # mkdocs reports it
            return link[0]
        name = str(target.relative_to(ROOT))
        name = _ON_SITE.get(name, name)
        if name not in _SOURCES and not name.startswith("docs/"):
            return f"{text} (`{name}`)"
        relative = os.path.relpath(name.removeprefix("docs/"), os.path.dirname(here))
        return f"{picture}[{text}]({relative}{anchor or ''})"

    return _LINK.sub(on_site, markdown)
