"""Identities of the host and namespaces of a process, which decide who can share memory."""

from __future__ import annotations

import os
from pathlib import Path


def host_identity() -> str:
    """Returns a string that is equal for two processes of one boot and one IPC namespace. Empty if it is unknown."""
    return _identity("ipc")


def process_identity() -> str:
    """Returns a string that is equal for two processes of one boot and one PID namespace. Empty if it is unknown."""
    return _identity("pid")


def _identity(namespace: str) -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}.{os.stat(f'/proc/self/ns/{namespace}').st_ino}"
    except OSError:
        return ""
