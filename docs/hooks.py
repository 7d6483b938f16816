"""Prepares pages for the site: links that leave docs/, and files from outside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# [text](../path) and ![text](../path): valid in the repository, not on the site
_OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)\s]+)\)")
_PAGES = {"CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: Any) -> Files:
    """Adds the changelog and the pictures of the benchmarks and examples to the site."""
    pictures = sorted([*ROOT.glob("benchmarks/*/results.png"), *ROOT.glob("examples/*/*.png")])
    names = {str(path.relative_to(ROOT)): str(path.relative_to(ROOT)) for path in pictures}
    for source, name in {**names, **_PAGES}.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces links to files that are not pages by the names of the files."""
    if page.file.src_uri in _PAGES.values():  # written for the root of the repository
        markdown = markdown.replace("](docs/", "](").replace("](examples/", "](../examples/")
    return _OUTSIDE.sub(_inside, markdown)


def _inside(link: re.Match[str]) -> str:
    picture, text, path = link.groups()
    if picture:
        return f"![{text}]({path})"
    if path in _PAGES:
        return f"[{text}]({_PAGES[path]})"
    return f"{text} (`{path}`)"
