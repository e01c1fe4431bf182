"""Other programs' answers: run for a bounded time, never raising."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Output:
    """A program's output. code 0: success; otherwise `problem` is the reason, in a line."""

    code: int
    text: str = ""
    problem: str = ""


def run(words: Sequence[str], seconds: float) -> Output:
    """Runs a program."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError:
        return Output(127, problem=f"{words[0]} is not installed")
    except subprocess.TimeoutExpired:
        return Output(124, problem=f"{words[0]} gave no answer within {seconds:.0f} s: the driver may hang (dmesg)")
    except OSError as error:
        return Output(126, problem=f"{words[0]}: {error.strerror}")
    if done.returncode == 0:
        return Output(0, done.stdout)
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return Output(done.returncode, done.stdout, lines[-1] if lines else f"{words[0]} ended with {done.returncode}")


def python(code: str, seconds: float) -> Output:
    """Runs code in an interpreter of its own, so that what it loads stays out of this one."""
    return run([sys.executable, "-c", code], seconds)
