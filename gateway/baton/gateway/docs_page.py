"""GET /docs: one page that renders /openapi.json, self-contained."""

from __future__ import annotations

from importlib.resources import files

DOCS_PAGE = files("baton.gateway").joinpath("docs_page.html").read_bytes()
