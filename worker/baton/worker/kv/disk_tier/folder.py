"""Files of KV blocks in a folder: their names, their form and its checks. Knows no requests; threads may share it.

A file holds one block of a KV group in all its layers, or one state: a header, and the bytes of its host slots.

    8 bytes   "BATONKV1"
    16 bytes  of the layout: model, dtype, groups, scales and what else changes the meaning of the bytes
    17 bytes  the key of the block: its chained hash, and its group
    4 bytes   slots, little-endian
    16 bytes  xxh3_128 of all of the above and of what follows

It is written under another name and renamed, so that a name stands for a whole file; a machine that loses its power may
still leave a torn one, which the checksum finds. A file that is not exactly what was asked for is never used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from baton.rpc.block_hash import HASH_BYTES
from baton.rpc.errors import DataLoss, InvalidRequest
from baton.worker.core import BlockHash
from baton.worker.kv.group_keys import is_key

_MAGIC = b"BATONKV1"
_HEAD = struct.Struct(f"<8s16s{HASH_BYTES + 1}sI")
_SUM_BYTES = 16
HEADER_BYTES = _HEAD.size + _SUM_BYTES
_SUFFIX, _PARTIAL = ".kv", ".kv.part"
_LOCK = "lock"

Buffers = Sequence[memoryview]  # the bytes of each host slot


@dataclass(slots=True)
class Found:
    """What a folder holds when it is opened."""

    sizes: dict[BlockHash, int] = field(default_factory=dict)  # bytes of each file, the least recently used first
    num_foreign: int = 0  # files that this layout did not write; they are left alone
    num_torn: int = 0  # files of another size than a block's, or not renamed; they are removed


class BlockFolder:
    """The files of one layout, in a folder of their own. One process has it at a time."""

    def __init__(self, root: Path, layout: bytes, slot_bytes: int) -> None:
        """Raises InvalidRequest for a folder that cannot be written, or that another worker has."""
        self.layout = layout  # in headers; another one once weights were loaded in place
        self._slot_bytes = slot_bytes
        self._path = root / layout.hex()
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidRequest(
                f"disk_cache_dir={root}: {error.strerror}; give a folder that this worker may write",
                field="disk_cache_dir",
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise InvalidRequest(
                f"disk_cache_dir={root}: another worker of the same model has it; give each one a folder of its own",
                field="disk_cache_dir",
            ) from error

    def close(self) -> None:
        """Lets another process have the folder."""
        os.close(self._lock)

    def find(self) -> Found:
        """Lists the files, without reading them. Removes what an interrupted write left."""
        found, listed = Found(), []
        with os.scandir(self._path) as entries:
            for entry in entries:
                key = _key_of(entry.name)
                if entry.name == _LOCK:
                    continue
                if key is None or not entry.is_file(follow_symlinks=False):
                    found.num_foreign += 1
                    continue
                status = entry.stat(follow_symlinks=False)
                payload = status.st_size - HEADER_BYTES
                if entry.name.endswith(_PARTIAL) or payload <= 0 or payload % self._slot_bytes:
                    found.num_torn += 1
                    self._unlink(entry.name)
                else:
                    listed.append((status.st_mtime_ns, key, status.st_size))
        found.sizes = {key: size for _, key, size in sorted(listed)}
        return found

    def size_of(self, num_slots: int) -> int:
        """Returns the bytes of a file."""
        return HEADER_BYTES + num_slots * self._slot_bytes

    def num_slots_of(self, size: int) -> int:
        """Returns the host slots of a block by the bytes of its file."""
        return (size - HEADER_BYTES) // self._slot_bytes

    def write(self, key: BlockHash, slots: Buffers) -> Path:
        """Writes a file that has no final name yet, for `publish`. Raises OSError, and leaves no file then."""
        head = self._head(key, len(slots))
        path = self._path / f"{key.hex()}{_PARTIAL}"
        try:
            with path.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                checksum = xxhash.xxh3_128(head)
                file.write(head + bytes(_SUM_BYTES))
                for slot in slots:
                    checksum.update(slot)
                    file.write(slot)
                file.seek(len(head))
                file.write(checksum.digest())
        except OSError:
            self._unlink(path.name)
            raise
        return path

    def publish(self, written: Path) -> None:
        """Gives a written file its name. Raises OSError."""
        written.rename(written.with_suffix(""))

    def drop(self, written: Path) -> None:
        """Removes a written file that is not wanted any more."""
        self._unlink(written.name)

    def read(self, key: BlockHash, slots: Buffers) -> None:
        """Fills the slots with a block. Raises OSError, or DataLoss for a file that is not this block, whole.

        The slots may hold anything then.
        """
        path = self._path / f"{key.hex()}{_SUFFIX}"
        with path.open("rb", buffering=0) as file:
            header = file.read(HEADER_BYTES)
            expected = self._head(key, len(slots))
            if header[: len(expected)] != expected:
                raise DataLoss(f"{path} is not the block that its name says")
            checksum = xxhash.xxh3_128(expected)
            for slot in slots:
                _fill(file, slot, path)
                checksum.update(slot)
            if file.read(1) or checksum.digest() != header[len(expected) :]:
                raise DataLoss(f"{path} is damaged: its checksum differs")
        with contextlib.suppress(OSError):
            os.utime(path)

    def remove(self, keys: Iterable[BlockHash]) -> None:
        """Removes files; those that are gone are ignored."""
        for key in keys:
            self._unlink(f"{key.hex()}{_SUFFIX}")

    def _head(self, key: BlockHash, num_slots: int) -> bytes:
        return _HEAD.pack(_MAGIC, self.layout, key.ljust(HASH_BYTES + 1, b"\0"), num_slots)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._path / name).unlink()


def _fill(file: object, slot: memoryview, path: Path) -> None:
    filled = 0
    while filled < len(slot):
        count = file.readinto(slot[filled:])  # type: ignore[attr-defined]
        if not count:
            raise DataLoss(f"{path} is torn: it ends early")
        filled += count


def _key_of(name: str) -> BlockHash | None:
    """Returns the key in a file's name; None for another name."""
    stem, dot, rest = name.partition(".")
    if f"{dot}{rest}" not in (_SUFFIX, _PARTIAL):
        return None
    try:
        key = BlockHash(bytes.fromhex(stem))
    except ValueError:
        return None
    return key if is_key(key) and key.hex() == stem else None
