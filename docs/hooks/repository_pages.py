"""Pages of the site that lie elsewhere in the repository, and links between the two."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

# Path in the site: path in the repository.
REPOSITORY_PAGES: Mapping[str, str] = {
    "guides/kubernetes.md": "deploy/README.md",
    "guides/envoy.md": "deploy/envoy/README.md",
    "guides/tried-clients.md": "tests/clients/README.md",
    "guides/examples.md": "examples/README.md",
    "reference/contracts.md": "proto/README.md",
    "reference/security.md": "SECURITY.md",
    "contributing/index.md": "CONTRIBUTING.md",
    "contributing/changelog.md": "CHANGELOG.md",
}

_PAGE_OF = {source: page for page, source in REPOSITORY_PAGES.items()}
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def rewrite_links(markdown: str, page: str, source: str, root: Path) -> tuple[str, list[str]]:
    """Returns the text with the site's links, and targets that are nowhere.

    `page` is the path in the site, `source` the path in the repository, to which the text's links are relative.
    """
    broken: list[str] = []

    def replace(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        inside = path.removeprefix("docs/") if path.startswith("docs/") else _PAGE_OF.get(path)
        if inside is not None:
            return f"[{match['text']}]({_relative(inside, page)}{hash_sign}{anchor})"
        if not (root / path).exists():
            broken.append(target)
        return match["text"]

    parts = _FENCE.split(markdown)  # odd ones are code
    return "".join(part if index % 2 else _LINK.sub(replace, part) for index, part in enumerate(parts)), broken


def _relative(target: str, page: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")
