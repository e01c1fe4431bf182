"""Where a trainer and its engines meet: a store of keys that the trainer serves, with named errors.

Each engine has keys of its own, so that one that is lost leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any, Self

from baton.llm.parameters.names import InvalidParameter, check_known
from baton.rpc.errors import DeadlineExceeded, Unavailable

_SECONDS = 300.0
_NUMBERS: Mapping[str, tuple[int, int]] = {  # bounds
    "master_port": (1, 65535),
    "world_size": (2, 1 << 16),
    "rank_offset": (1, 1 << 16),
}
_KEYS = ("backend", "master_address", "timeout", *_NUMBERS)


@dataclass(frozen=True, slots=True)
class Place:
    """The trainer's address, and this engine's rank: the trainer has rank 0."""

    address: str
    port: int
    rank: int
    world_size: int
    seconds: float  # that a step of either end may take

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Self:
        """Reads vLLM's init_info. Raises InvalidParameter."""
        check_known(info, _KEYS, "init_info")
        address, seconds = info.get("master_address"), info.get("timeout", _SECONDS)
        if not isinstance(address, str) or not address:
            raise InvalidParameter(f"master_address is {address!r}; give the trainer's host", field="master_address")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise InvalidParameter(f"timeout is {seconds!r}; give seconds over 0", field="timeout")
        port, world_size, rank = (_number(info, name, *bounds) for name, bounds in _NUMBERS.items())
        if rank >= world_size:
            message = f"rank_offset is {rank} and world_size {world_size}; ranks are 1 to {world_size - 1}"
            raise InvalidParameter(message, field="rank_offset")
        return cls(address, port, rank, world_size, float(seconds))

    def __str__(self) -> str:
        return f"the trainer at {self.address}:{self.port}"


class Meeting:
    """The keys that a trainer and the engine of one rank share."""

    def __init__(self, store: Any, rank: int, other: str, seconds: float) -> None:
        self.store = distributed().PrefixStore(f"baton/{rank}", store)
        self.other = other  # the other end, in words
        self.seconds = seconds

    def write(self, key: str, value: str | bytes) -> None:
        """Sets a key. Raises Unavailable."""
        with self.named("to write"):
            self.store.set(key, value)

    def read(self, key: str, what: str) -> bytes:
        """Returns a key's value, for which it waits. Raises DeadlineExceeded or Unavailable."""
        with self.named(what):
            self.store.wait([key], timedelta(seconds=self.seconds))
            return bytes(self.store.get(key))

    def check(self) -> None:
        """Raises Unavailable if the trainer is gone."""
        with self.named("to answer"):
            self.store.check(["any"])

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Translates the errors of torch.distributed."""
        with translated(f"waited for {self.other} {what}", self.seconds):
            yield


@contextmanager
def translated(doing: str, seconds: float) -> Iterator[None]:
    """Raises DeadlineExceeded or Unavailable for the errors of torch.distributed."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, distributed().DistStoreError) or "imed out" in reason or "imeout" in reason:
            raise DeadlineExceeded(f"{doing}: nothing in {seconds:g} s") from error
        raise Unavailable(f"{doing}: {reason}") from error


def distributed() -> ModuleType:
    """Returns torch.distributed, most names of which have no types."""
    import torch.distributed

    return torch.distributed


def join(place: Place) -> Meeting:
    """Connects to the trainer's store. Raises DeadlineExceeded or Unavailable."""
    with translated(f"waited for {place} to listen", place.seconds):
        store = distributed().TCPStore(place.address, place.port, None, False, timedelta(seconds=place.seconds))
    return Meeting(store, place.rank, str(place), place.seconds)


def host(address: str, port: int, world_size: int, seconds: float) -> list[Meeting]:
    """Opens the trainer's store. Returns its meetings, one for each engine. Raises Unavailable."""
    with translated(f"tried to listen on {address}:{port}", seconds):
        store = distributed().TCPStore(address, port, None, True, timedelta(seconds=seconds), wait_for_workers=False)
    return [Meeting(store, rank, f"the engine of rank {rank}", seconds) for rank in range(1, world_size)]


def _number(info: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = info.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(f"{name} is {value!r}; give a number from {low} to {high}", field=name)
    return value
