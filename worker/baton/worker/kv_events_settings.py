"""The object of --kv-events-config, with vLLM's keys. Knows no socket."""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from typing import Any

from baton.rpc.errors import InvalidRequest

_FIELD = "kv_events_config"
_CHOICES = {"publisher": ("zmq", "null"), "event_format": ("map", "array"), "hash_format": ("int64", "bytes")}
_SCHEMES = ("tcp://", "ipc://", "inproc://")


@dataclass(frozen=True, slots=True)
class KvEventsSettings:
    """Where the cache's changes are published, and in which form."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"  # of the PUB socket, which binds if it has *, ::, ipc or inproc, and connects else
    replay_endpoint: str | None = None  # of the ROUTER socket; None: nothing is replayed
    buffer_steps: int = 10_000  # batches kept for replays
    hwm: int = 100_000  # batches that ZeroMQ keeps for a slow subscriber
    max_queue_size: int = 100_000  # batches that wait to be encoded; more are dropped
    topic: str = ""
    event_format: str = "map"  # of one event; array: that of vLLM before 0.24
    hash_format: str = "int64"  # the last 8 of a hash's 16 bytes as an integer, or all

    @property
    def enabled(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


def parse_kv_events(text: str) -> KvEventsSettings | None:
    """Returns the settings of a JSON object; empty text: None. Raises InvalidRequest with the wrong key."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{_FIELD}={text} is not JSON: {error}", field=_FIELD) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{_FIELD}={text} is no object", field=_FIELD)
    fields = {field.name: field.default for field in dataclasses.fields(KvEventsSettings)}
    for key, given in value.items():
        _check(key, given, fields)
    return KvEventsSettings(**value)


def _check(key: str, given: Any, fields: dict[str, Any]) -> None:
    if key not in fields:
        near = difflib.get_close_matches(key, fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(fields)}"
        raise InvalidRequest(f"{_FIELD}: unknown key {key!r}; {hint}", field=_FIELD)
    if key == "replay_endpoint" and given is None:
        return
    kind = str if key == "replay_endpoint" else type(fields[key])
    if not isinstance(given, kind) or (kind is int and isinstance(given, bool)):
        raise InvalidRequest(f"{_FIELD}: {key} is {given!r}; it must be {_name(kind)}", field=_FIELD)
    if key in _CHOICES and given not in _CHOICES[key]:
        raise InvalidRequest(f"{_FIELD}: {key} is {given!r}; give {' or '.join(_CHOICES[key])}", field=_FIELD)
    if isinstance(given, int) and kind is int and given < 1:
        raise InvalidRequest(f"{_FIELD}: {key} is {given}; it must be at least 1", field=_FIELD)
    if key.endswith("endpoint") and not given.startswith(_SCHEMES):
        raise InvalidRequest(f"{_FIELD}: {key} is {given!r}; it must begin with {', '.join(_SCHEMES)}", field=_FIELD)


def _name(kind: type) -> str:
    return {bool: "true or false", int: "an integer", str: "text"}[kind]
