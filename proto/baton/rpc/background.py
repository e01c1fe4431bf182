"""Runs a module as a process that leaves the CPUs to its service, from its first import on. Knows no module.

`python -m baton.rpc.background NICE MODULE ARGUMENT...` in a session of its own: Linux shares CPUs between sessions
before it looks at the processes of one.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")  # the session's own nice


def command(nice: int, module: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command line. Start it with `start_new_session`."""
    return (sys.executable, "-m", "baton.rpc.background", str(nice), module, *arguments)


def main(argv: Sequence[str]) -> None:
    """Lowers the priority of the process and of its session, and runs the module."""
    os.nice(int(argv[0]))
    with contextlib.suppress(OSError):  # the system shares no CPUs between sessions
        _AUTOGROUP.write_text(argv[0])
    sys.argv[:] = argv[1:]
    runpy.run_module(argv[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
