"""KV through files of a folder that two workers share, such as a volume in memory of two containers of one host.

BATON_SHARED_FOLDER names the folder. Baton's ipc needs one process namespace; this needs only the folder.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from baton.rpc.errors import DataLoss, InvalidRequest, Mismatch, Unavailable, Unsupported
from baton.worker.core import BlockId
from baton.worker.executors.base import Executor
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.bulk import Announce, EndedCopy, Slots, no_announcement
from baton.worker.transfer.piece_bytes import gather_piece, num_piece_bytes, write_piece
from baton.worker.transfer.transport_kind import TransportKind
from baton.worker.transfer.wire.checksum import checksum_of

_NUM_SLOTS = 4
_PREFIX = "slots-"


class SharedFolderPath:
    """Moves KV through files of the shared folder."""

    def __init__(self, executor: Executor, slot_bytes: int, folder: Path) -> None:
        self._executor, self._slot_bytes, self._folder = executor, slot_bytes, folder
        try:
            self._identity = _identity_of(folder)
            _remove_leftovers(folder)
        except OSError as error:
            raise Unsupported(f"the folder {folder} cannot be used: {error}") from error

    def offer(self) -> bytes:
        return self._identity

    def accept(self, offer: bytes) -> SharedFolderReceiver:
        if offer != self._identity:
            raise Mismatch(f"the sender does not share the folder {self._folder}")
        return SharedFolderReceiver(self._executor, self._slot_bytes, self._folder)

    def connect(self, slots: Slots) -> SharedFolderSender:
        return SharedFolderSender(self._executor, slots, self._folder)

    def close(self) -> None:
        """Does nothing: connections own the files."""


class SharedFolderReceiver:
    """Implements BulkReceiver. The file is the sender's alone, so late writes of a stopped sender are never read."""

    writes_ahead = False

    def __init__(self, executor: Executor, slot_bytes: int, folder: Path) -> None:
        self._executor = executor
        name = _PREFIX + secrets.token_hex(16)
        self._path = folder / name
        draft = folder / f"draft-{name}"
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # until this process ends, so that others see that the file is in use
        os.ftruncate(self._file, _NUM_SLOTS * slot_bytes)
        draft.rename(self._path)
        self.slots = Slots(_NUM_SLOTS, slot_bytes, name.encode())
        self._closed = False

    def announced(self, slot: int, num_bytes: int) -> None:
        """Does nothing: a piece is announced after it was written."""

    def take(self, slot: int, num_bytes: int) -> None:
        """Does nothing: a piece is announced after it was written."""

    def checksum(self, slot: int, num_bytes: int) -> int:
        return checksum_of(self._read(slot, num_bytes))

    def write(self, slot: int, layers: range, block_ids: Sequence[BlockId], heads: tuple[int, int] | None) -> EndedCopy:
        num_bytes = num_piece_bytes(self._executor.kv_spec, layers, len(block_ids), heads)
        write_piece(self._executor, self._read(slot, num_bytes), layers, block_ids, heads)
        return EndedCopy()

    def abort(self) -> None:
        """Does nothing: reads of a file end by themselves."""

    def close(self, sender_gone: bool) -> None:
        if not self._closed:
            self._closed = True
            self._path.unlink(missing_ok=True)
            os.close(self._file)

    def _read(self, slot: int, num_bytes: int) -> memoryview:
        data = os.pread(self._file, num_bytes, slot * self.slots.slot_bytes)
        if len(data) < num_bytes:
            raise DataLoss(f"{self._path} has {len(data)} of {num_bytes} bytes of slot {slot}")
        return memoryview(data)


class SharedFolderSender:
    """Implements BulkSender. The calling thread copies each piece."""

    announces_first = False

    def __init__(self, executor: Executor, slots: Slots, folder: Path) -> None:
        name = slots.blob.decode(errors="replace")
        if not (name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isalnum()):
            raise InvalidRequest(f"the receiver's slots are in {name!r}, which is no file of slots")
        try:
            self._file: int | None = os.open(folder / name, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"the receiver's slots cannot be opened: {error}") from error
        self._executor, self._slot_bytes = executor, slots.slot_bytes
        self._buffer = np.empty(slots.slot_bytes, np.uint8)

    def put(
        self, piece: Piece, slot: int, conversion: KvConversion | None, announce: Announce = no_announcement
    ) -> EndedCopy:
        assert self._file is not None, "the sender is open"
        gather_piece(self._executor, piece, conversion, self._buffer)
        layout = conversion or self._executor.kv_spec
        num_bytes = piece.num_blocks * piece.num_layers * layout.layer_bytes(piece.layer)
        if os.pwrite(self._file, self._buffer[:num_bytes].data, slot * self._slot_bytes) < num_bytes:
            raise Unavailable("the shared folder is full")
        return EndedCopy()

    def abort(self) -> None:
        """Does nothing: writes to a file end by themselves."""

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _identity_of(folder: Path) -> bytes:
    """Returns the random bytes that the first worker wrote into the folder."""
    path, draft = folder / "identity", folder / f"draft-{secrets.token_hex(16)}"
    if not path.exists():
        draft.write_bytes(secrets.token_bytes(16))
        try:
            os.link(draft, path)
        except FileExistsError:  # another worker was first
            pass
        finally:
            draft.unlink()
    return path.read_bytes()


def _remove_leftovers(folder: Path) -> None:
    """Removes the files of workers that were killed: no process holds their locks."""
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:  # in use
            pass
        finally:
            os.close(file)


def _make(executor: Executor, slot_bytes: int, kv: object) -> SharedFolderPath:
    folder = os.environ.get("BATON_SHARED_FOLDER", "")
    if not folder:
        raise Unsupported("BATON_SHARED_FOLDER is not set")
    return SharedFolderPath(executor, slot_bytes, Path(folder))


KIND = TransportKind(_make, is_private=True)
