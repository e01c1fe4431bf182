"""The folder of compiled kernels: one for each compiler version and GPU architecture. Imports no compiler."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, MutableMapping
from importlib import metadata
from pathlib import Path

from baton.rpc.errors import InvalidRequest

_log = logging.getLogger(__name__)

_VARIABLE = "TRITON_CACHE_DIR"
# Products are added with one rounding. Triton 3.9 warns where it is not set, and 3.10 will round twice by default.
FUSED_SUMS = ("TRITON_DEFAULT_FP_FUSION", "1")


def use_compile_cache(folder: str, environ: MutableMapping[str, str] = os.environ) -> Path:
    """Sets Triton's cache folder, and how kernels round; called at the start of a process. Keeps what is set already.

    Raises InvalidRequest if `folder` cannot be written. Falls back from the default folder to a temporary one.
    """
    environ.setdefault(*FUSED_SUMS)
    if not folder and environ.get(_VARIABLE):
        return Path(environ[_VARIABLE])
    path = (Path(folder) if folder else default_folder(environ)) / _key()
    try:
        _make(path)
    except OSError as error:
        if folder:
            raise InvalidRequest(
                f"compile_cache_dir={folder!r} cannot be written: {error.strerror}", field="compile_cache_dir"
            ) from error
        path = Path(tempfile.mkdtemp(prefix="baton-triton-"))
        _log.warning("compiled kernels are kept in %s only: %s", path, error)
    environ[_VARIABLE] = str(path)
    return path


def is_empty(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether Triton's cache folder is set and has nothing compiled yet."""
    folder = environ.get(_VARIABLE)
    if not folder:
        return False
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except OSError:  # it is created with its first file
        return True


def default_folder(environ: Mapping[str, str]) -> Path:
    """Returns the default folder by the XDG specification."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/nonexistent") / ".cache"
    return Path(base) / "baton" / "triton"


def _make(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied", str(path))


def _key() -> str:
    """Returns the compiler's version and the GPU's capability. Triton's own keys distinguish the rest."""
    import torch

    card = "none"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        card = f"sm{major}{minor}"
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        version = "none"
    return f"{version}-{card}"
