"""The installed version of Baton."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("baton-inference")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0.0.0"


VERSION = _installed()
