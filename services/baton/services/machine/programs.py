"""Runs other programs with a time limit. Never raises."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a program. With a code other than 0, `problem` is the reason, in one line."""

    code: int
    text: str = ""
    problem: str = ""


def run(words: Sequence[str], seconds: float) -> Output:
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
    """Runs code in a separate interpreter, so that its imports do not affect this one."""
    return run([sys.executable, "-c", code], seconds)
