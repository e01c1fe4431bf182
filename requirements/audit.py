"""Looks the locked packages up among the known vulnerabilities, with pip-audit. Tells "none" from "could not look"."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_SECONDS = 900.0

NONE_KNOWN, VULNERABLE, NOT_LOOKED = 0, 1, 2  # exit codes


@dataclass(frozen=True, slots=True)
class Finding:
    """What an audit came to."""

    code: int
    lines: tuple[str, ...]


def finding_of(output: str, problem: str) -> Finding:
    """Returns the finding of pip-audit's JSON. `problem` is its standard error."""
    try:
        packages = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (problem.strip().splitlines() or ["it said nothing"])[-1]
        return Finding(NOT_LOOKED, ("the database of vulnerabilities could not be reached; nothing was checked:", last))
    # A registry without vulnerability data looks like one without the package.
    skipped = [package for package in packages if "skip_reason" in package]
    bad = [
        f"{package['name']} {package['version']}: {one['id']}, fixed in {', '.join(one['fix_versions']) or 'nothing'}"
        for package in packages
        for one in package.get("vulns", ())
    ]
    lines = [f"{package['name']}: {package['skip_reason']}" for package in skipped[:3]]
    if skipped:
        lines.insert(0, f"{len(skipped)} of {len(packages)} packages could not be looked up; they were not checked:")
    if bad:
        return Finding(VULNERABLE, (f"{len(bad)} known vulnerabilities:", *bad, *lines))
    if skipped or not packages:
        return Finding(NOT_LOOKED, tuple(lines) or ("there was nothing to look up",))
    return Finding(NONE_KNOWN, (f"{len(packages)} packages, no known vulnerability",))


def audit(lock: Path, service: str) -> Finding:
    """Asks the service ("pypi" or "osv") about each package of a lock file."""
    words = [sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--require-hashes", "--disable-pip"]
    words += ["--vulnerability-service", service, "--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding(NOT_LOOKED, (f"the database did not answer within {_SECONDS:.0f} s; nothing was checked",))
    return finding_of(done.stdout, done.stderr)


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0 without known vulnerabilities, 1 with some, 2 if the look-up failed."""
    parser = argparse.ArgumentParser(prog="audit.py", description=__doc__)
    parser.add_argument("--service", choices=("pypi", "osv"), default="pypi", help="whose database (pypi)")
    finding = audit(FOLDER / "all.lock", parser.parse_args(words).service)
    for line in finding.lines:
        print(line, file=sys.stdout if finding.code == NONE_KNOWN else sys.stderr)
    return finding.code


if __name__ == "__main__":
    sys.exit(main())
