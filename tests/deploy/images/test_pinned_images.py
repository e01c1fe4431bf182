"""Base images are pinned from a registry's answers, which are verified; without a registry nothing is written."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from support.kubernetes.deploy_tools import ROOT

_FILES = ("deploy/Dockerfile", "deploy/kubernetes/base/redis.yaml")
_INDEX = "application/vnd.oci.image.index.v1+json"
_PATHS = ("/v2/library/python/manifests/3.12-slim-bookworm", "/v2/library/redis/manifests/7.2")


class Registry(ThreadingHTTPServer):
    """Asks for a token, then gives an index of each image."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies = {path: json.dumps({"manifests": [path]}).encode() for path in _PATHS}
        self.content_type = _INDEX
        self.says = None  # a digest in place of the right one

    def digest(self, path) -> str:
        return "sha256:" + hashlib.sha256(self.bodies[path]).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        if self.path.startswith("/token?"):
            scope = self.path.partition("scope=")[2]
            self._answer(200, json.dumps({"token": scope}).encode(), {})
        elif self.path not in self.server.bodies:
            self._answer(404, b"", {})
        elif "Authorization" not in self.headers:
            challenge = f'Bearer realm="{self.server.url}/token",service="fake",scope="repository:x:pull"'
            self._answer(401, b"", {"WWW-Authenticate": challenge})
        else:
            assert self.headers["Authorization"] == "Bearer repository%3Ax%3Apull"
            digest = self.server.says or self.server.digest(self.path)
            headers = {"Content-Type": self.server.content_type, "Docker-Content-Digest": digest}
            self._answer(200, self.server.bodies[self.path], headers)

    def _answer(self, status, body, headers) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def registry():
    server = Registry()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def checkout(tmp_path):
    for name in _FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_images_get_the_digests_of_their_tags(registry, checkout):
    before = {name: (checkout / name).read_text() for name in _FILES}
    assert _run(checkout, "--registry", registry.url).returncode == 0
    python, redis = (registry.digest(path) for path in _PATHS)
    assert f"ARG PYTHON=python:3.12-slim-bookworm@{python}\n" in (checkout / _FILES[0]).read_text()
    assert _redis_image(checkout) == f"docker.io/library/redis:7.2@{redis}"
    assert _run(checkout, "--check").returncode == 0
    # Nothing but these two lines changed.
    for name in _FILES:
        pairs = zip(before[name].splitlines(), (checkout / name).read_text().splitlines(), strict=True)
        assert sum(old != new for old, new in pairs) == 1
    # A tag that moved is pinned again.
    registry.bodies[_PATHS[1]] = b"{}"
    assert _run(checkout, "--registry", registry.url).returncode == 0
    assert _redis_image(checkout).endswith(registry.digest(_PATHS[1]))


def test_check_lists_images_without_a_digest(checkout):
    text = (checkout / _FILES[1]).read_text()
    (checkout / _FILES[1]).write_text(text.partition("@sha256:")[0] if "@sha256:" in text else text)
    done = _run(checkout, "--check")
    assert done.returncode == 1
    assert "docker.io/library/redis:7.2 has no digest; make pin-images writes it" in done.stdout


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda registry: setattr(registry, "says", "sha256:" + "0" * 64), "and says sha256:000"),
        (lambda registry: setattr(registry, "content_type", "text/html"), "text/html, which is no index"),
        (lambda registry: registry.bodies.pop(_PATHS[1]), "HTTP Error 404"),
    ],
    ids=["another digest", "another page", "no such tag"],
)
def test_a_registry_that_fails_changes_nothing(registry, checkout, break_it, problem):
    before = [(checkout / name).read_text() for name in _FILES]
    break_it(registry)
    done = _run(checkout, "--registry", registry.url)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "nothing was written" in done.stderr
    assert [(checkout / name).read_text() for name in _FILES] == before


def test_a_registry_that_is_not_reached_is_named(checkout, free_port):
    done = _run(checkout, "--registry", f"http://127.0.0.1:{free_port}")
    assert done.returncode == 2
    assert f"http://127.0.0.1:{free_port}/v2/library/python" in done.stderr


def _redis_image(checkout) -> str:
    documents = yaml.safe_load_all((checkout / _FILES[1]).read_text())
    (workload,) = (one for one in documents if one["kind"] == "StatefulSet")
    return workload["spec"]["template"]["spec"]["containers"][0]["image"]


def _run(checkout, *words):
    command = [sys.executable, str(ROOT / "requirements" / "images.py"), "--root", str(checkout), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
