"""The site's hooks: adds the pages that the code describes itself, and those that lie elsewhere in the repository."""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import commands_page
import formats_page
import grpc_pages
import metrics_page
import models_page
import rest_page
import settings_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from repository_pages import REPOSITORY_PAGES, rewrite_links

ROOT = Path(__file__).resolve().parents[2]

# Path in the site: what writes the page.
GENERATED: Mapping[str, Callable[[], str]] = {
    "reference/gateway.md": lambda: settings_pages.service_page("gateway"),
    "reference/router.md": lambda: settings_pages.service_page("router"),
    "reference/kvstore.md": lambda: settings_pages.service_page("kvstore"),
    "reference/worker.md": lambda: settings_pages.service_page("worker"),
    "reference/commands.md": commands_page.commands_page,
    "reference/models.md": lambda: models_page.models_page(ROOT),
    "reference/weight-formats.md": lambda: formats_page.formats_page(ROOT),
    "reference/metrics.md": metrics_page.metrics_page,
    "reference/rest.md": rest_page.rest_page,
    "reference/grpc.md": lambda: grpc_pages.public_page(ROOT),
    "reference/grpc-internal.md": lambda: grpc_pages.internal_page(ROOT),
}

_log = logging.getLogger("mkdocs.hooks.baton")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages and the repository's own."""
    for path, write in GENERATED.items():
        files.append(File.generated(config, path, content=write()))
    for path, source in REPOSITORY_PAGES.items():
        files.append(File.generated(config, path, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the repository into links to their pages, or into plain text."""
    path = page.file.src_uri
    source = REPOSITORY_PAGES.get(path, posixpath.join("docs", path))
    text, broken = rewrite_links(markdown, path, source, ROOT)
    for target in broken:
        _log.warning("%s links to %s, which is not in the repository", source, target)  # fails under --strict
    return re.sub(r"\A(# .*\n)(?!\n)", r"\1\n", text)
