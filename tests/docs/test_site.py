"""The site builds strictly, and its generated pages have all that the code has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import baton_site
import grpc_pages
import pytest
from markdown_text import cell
from repository_pages import rewrite_links

from baton.services.cli import SERVICES, TOOLS
from baton.services.tools.metrics_table import all_metrics
from baton.v1 import (
    control_pb2,
    index_pb2,
    inference_pb2,
    kv_pb2,
    response_pb2,
    router_pb2,
    types_pb2,
    vectors_pb2,
    worker_pb2,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_strictly(site):
    assert (site / "index.html").exists()
    for path in (*baton_site.GENERATED, *baton_site.REPOSITORY_PAGES):
        assert (site / path.removesuffix(".md")).with_suffix(".html").exists(), path


def test_pages_load_nothing_from_other_hosts(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not [url for url in loaded if "canonical" not in url], f"{page.name} loads {loaded}"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_s_page_has_every_flag_of_its_help(service):
    done = subprocess.run(
        [sys.executable, "-m", "baton.services.cli", service, "--help"], capture_output=True, text=True, timeout=60
    )
    flags = set(re.findall(r"^  (--[a-z-]+)", done.stdout, re.MULTILINE))
    assert len(flags) > 10
    page = baton_site.GENERATED[f"reference/{service}.md"]()
    assert {flag for flag in flags if f"| `{flag}` |" not in page} == set()


def test_the_page_of_commands_has_every_tool():
    page = baton_site.GENERATED["reference/commands.md"]()
    for tool in TOOLS:
        assert re.search(rf"^## baton {tool}\n\n```text\nusage: baton", page, re.MULTILINE), tool
    assert "--tenant TEXT" in page


def test_the_page_of_metrics_has_every_metric():
    page = baton_site.GENERATED["reference/metrics.md"]()
    assert [row.name for row in all_metrics() if f"| `{row.name}` |" not in page] == []


def test_the_page_of_routes_has_every_path_and_links_to_its_bodies():
    page = baton_site.GENERATED["reference/rest.md"]()
    for route in (
        "POST /v1/chat/completions",
        "POST /v1/messages",
        "GET /v1/models/{model}",
        "POST /drain",
        "GET /ready",
    ):
        assert f"| `{route}` |" in page
    headings = {heading.lower() for heading in re.findall(r"^### (\w+)$", page, re.MULTILINE)}
    assert {"chatcompletionrequest", "responsesrequest"} <= headings
    assert set(re.findall(r"\]\(#(\w+)\)", page)) <= headings


def test_the_pages_of_grpc_have_every_service_and_message():
    public, internal = grpc_pages.public_page(ROOT), grpc_pages.internal_page(ROOT)
    for page, modules in (
        (public, (inference_pb2, response_pb2, types_pb2, vectors_pb2)),
        (internal, (control_pb2, index_pb2, kv_pb2, router_pb2, worker_pb2)),
    ):
        for module in modules:
            file = module.DESCRIPTOR
            for name in (*file.message_types_by_name, *file.services_by_name, *file.enum_types_by_name):
                assert f"### {name}\n" in page, name
    assert "Cancelling the call frees the request's blocks." in public


def test_links_are_turned_into_the_site_s():
    text, broken = rewrite_links(
        "[a](../SECURITY.md#x) [b](Dockerfile) [c](../docs/index.md) [d](nothing.md) [e](https://x.example)\n"
        "```\n[f](nothing.md)\n```\n",
        "guides/kubernetes.md",
        "deploy/README.md",
        ROOT,
    )
    assert text == (
        "[a](../reference/security.md#x) b [c](../index.md) d [e](https://x.example)\n```\n[f](nothing.md)\n```\n"
    )
    assert broken == ["nothing.md"]


def test_text_of_the_code_is_no_markup_in_a_cell():
    assert cell("a | b\n  <c> *d*") == "a \\| b &lt;c> \\*d\\*"
