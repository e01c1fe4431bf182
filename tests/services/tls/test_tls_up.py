"""`baton certs` and `baton up --tls-dir` as a user types them."""

from __future__ import annotations

import os
import re
import shlex
import ssl
import subprocess
import sys
import urllib.request

import pytest
from support.processes.stack import ROOT, wait_until

BATON = (sys.executable, "-m", "baton.services.cli")


def baton(*words):
    return subprocess.run([*BATON, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def up(tmp_path):
    """`up(flags)` starts one; its output grows in `tmp_path`."""
    running = []

    def start(*flags):
        words = (
            *BATON,
            "up",
            "--executor",
            "sim",
            "--rest-listen",
            "127.0.0.1:0",
            "--grpc-listen",
            "127.0.0.1:0",
            *flags,
        )
        with (tmp_path / "output").open("wb") as output:
            process = subprocess.Popen(
                words, stdout=output, stderr=output, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}
            )
        running.append(process)
        return process

    yield start
    for process in running:
        process.terminate()
        process.wait(60)


def test_a_tandem_over_tls_is_ready_answers_and_stops(tmp_path, up):
    folder = tmp_path / "certs"
    assert baton("certs", "--dir", str(folder)).returncode == 0
    process = up("--tls-dir", str(folder), "--tls-edge")

    def welcome():
        text = (tmp_path / "output").read_text()
        assert process.poll() is None, text
        return text if "Ctrl-C stops it" in text else ""

    text = wait_until(welcome, "ready", 90)
    url = re.search(r"Baton is ready: (https://\S+) \(REST\)", text)[1]
    (typed,) = [shlex.split(line) for line in text.splitlines() if line.startswith("  curl ")]
    assert typed[typed.index("--cacert") + 1] == str(folder / "ca.crt")
    body = typed[-1].replace('"stream": true', '"max_tokens": 4').encode()
    request = urllib.request.Request(typed[typed.index("--cacert") + 2], body, {"content-type": "application/json"})
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        assert request.full_url.startswith(url)
        assert answer.status == 200
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--tls-edge",), "--tls-edge needs --tls-dir FOLDER, made by `baton certs`"),
        (("--tls-dir", "/nowhere"), "tls_certificate=/nowhere/operator.crt cannot be read: No such file"),
    ],
)
def test_missing_files_are_reported_before_anything_starts(flags, told):
    ended = baton("up", *flags)
    assert ended.returncode == 2
    assert told in ended.stderr


@pytest.mark.parametrize("service", ["gateway", "router", "worker", "kvstore"])
def test_an_incomplete_set_is_reported_by_every_service(service):
    ended = baton(service, "--tls-certificate", "c.pem", "--tls-ca", "ca.pem")
    assert ended.returncode == 2
    assert f"baton {service}: --tls-certificate, --tls-ca given without --tls-key" in ended.stderr
