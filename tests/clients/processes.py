"""Programs of clients as processes: with a home of their own and a deadline; their output is shown where they fail."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

# What programs get of this process's environment. Nothing else: an API key or a base URL in it would change a client.
_KEPT = ("LANG", "LC_ALL", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PATH", "TMPDIR")


def run(
    words: Sequence[str | Path], folder: Path, environ: Mapping[str, str], seconds: float, codes: Container[int] = (0,)
) -> str:
    """Returns standard output. Ends the whole process group afterwards; AssertionError with all output on failure."""
    with subprocess.Popen(
        list(map(str, words)), cwd=folder, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=seconds)
            end = "" if process.returncode in codes else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            _end_group(process)
            output, errors = process.communicate()
            end = f"no end within {seconds:.0f} s"
        finally:
            _end_group(process)
    assert not end, f"{words[0]}: {end}\n{output}\n{errors}"
    return output


def client_environ(home: Path, *folders: Path, **more: str) -> dict[str, str]:
    """The environment of a client: `home` is empty at first, programs are looked up in `folders` before the PATH."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    path = os.pathsep.join([*map(str, folders), kept.get("PATH", os.defpath)])
    return {**kept, "PATH": path, "HOME": str(home), "NO_COLOR": "1", **more}


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
