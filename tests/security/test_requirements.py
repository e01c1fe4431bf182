"""The checks of lock files, and the audit's report of packages that it could not look up."""

from __future__ import annotations

import json
from pathlib import Path

import audit
import lock
import pytest

HASH = "    --hash=sha256:" + "0" * 64
PROJECT = {
    "name": "baton-inference",
    "requires-python": ">=3.11,<3.14",
    "dependencies": ["grpcio>=1.71"],
    "optional-dependencies": {
        "gateway": ["redis[hiredis]>=6.2"],
        "worker": ["torch>=2.11,<2.14"],
        "cuda": ["baton-inference[worker]", "nccl4py>=0.6"],
        "all": ["baton-inference[gateway,worker]"],
        "dev": ["baton-inference[all]", "pytest>=8"],
    },
}
ALL, CPU = lock.lock_files(PROJECT)


def text_of(file: lock.LockFile, *pins: str) -> str:
    head = f"# made for sha256:{lock.fingerprint(PROJECT, file.extras)}\n"
    return head + "".join(f"{pin} \\\n{HASH}\n    # via something\n" for pin in pins)


GOOD = ("grpcio==1.82.0", "redis[hiredis]==6.4.0 ; python_version < '4'", "torch==2.13.0", "nccl4py==0.6.0")


def test_the_files_are_of_all_that_is_shipped():
    assert ALL.extras == ("cuda", "gateway", "worker")
    assert CPU.extras == ("gateway", "worker")
    assert lock.requirements_of(PROJECT, ["cuda"]) == ["grpcio>=1.71", "nccl4py>=0.6", "torch>=2.11,<2.14"]


def test_a_good_file_has_no_problem():
    assert list(lock.problems_of(PROJECT, ALL, text_of(ALL, *GOOD))) == []
    assert list(lock.problems_of(PROJECT, CPU, text_of(CPU, *GOOD[:2]))) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "other requirements"),
        (text_of(CPU, *GOOD), "other requirements"),
        (text_of(ALL, *GOOD[1:]), "asks for grpcio>=1.71"),
        (text_of(ALL, "grpcio==1.60", *GOOD[1:]), "asks for grpcio>=1.71"),
        (text_of(ALL, "grpcio>=1.71", *GOOD[1:]), "not held to one version"),
        (text_of(ALL, *GOOD).replace(HASH, "", 1), "has no hash"),
        (text_of(ALL, *GOOD).replace("sha256:0", "md5:0", 1), "has no hash"),
        (text_of(ALL, *GOOD) + "--index-url somewhere\n", "is no pinned package"),
        (text_of(ALL, *GOOD) + "./a.whl\n", "is no pinned package"),
    ],
)
def test_a_wrong_file_is_reported(text: str, problem: str):
    assert any(problem in found for found in lock.problems_of(PROJECT, ALL, text))


def test_the_fingerprint_changes_with_the_request():
    changed = {**PROJECT, "dependencies": ["grpcio>=1.72"]}
    assert lock.fingerprint(changed, ALL.extras) != lock.fingerprint(PROJECT, ALL.extras)
    pythons = {**PROJECT, "requires-python": ">=3.12"}
    assert lock.fingerprint(pythons, ALL.extras) != lock.fingerprint(PROJECT, ALL.extras)


SKIPPED = {"name": "a", "skip_reason": "not found"}
FINE = {"name": "b", "version": "1", "vulns": []}
BAD = {"name": "c", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        (json.dumps({"dependencies": [FINE]}), audit.NONE_KNOWN, "no known vulnerability"),
        (json.dumps({"dependencies": [FINE, BAD]}), audit.VULNERABLE, "c 1: X-1, fixed in 2"),
        (json.dumps({"dependencies": [FINE, BAD, SKIPPED]}), audit.VULNERABLE, "1 of 3 packages could not be"),
        (json.dumps({"dependencies": [FINE, SKIPPED]}), audit.NOT_LOOKED, "1 of 2 packages could not be looked up"),
        (json.dumps({"dependencies": []}), audit.NOT_LOOKED, "nothing to look up"),
        ("", audit.NOT_LOOKED, "could not be reached"),
        ("[]", audit.NOT_LOOKED, "could not be reached"),
    ],
)
def test_an_audit_that_could_not_look_does_not_pass(output: str, code: int, said: str):
    finding = audit.finding_of(output, "ConnectionError: no such host")
    assert finding.code == code
    assert any(said in line for line in finding.lines)


def test_an_audit_without_its_tool_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit.sys, "executable", "/bin/false")
    assert audit.audit(tmp_path / "all.lock", "pypi").code == audit.NOT_LOOKED
