"""GET /docs: a self-contained page that renders /openapi.json."""

from __future__ import annotations

from pathlib import Path

DOCS_PAGE = Path(__file__).with_suffix(".html").read_bytes()
