"""`baton keys`: makes, lists and revokes the API keys of gateways, in a file or in Redis."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baton.rpc.errors import InvalidRequest, ServiceError
from baton.services import settings

if TYPE_CHECKING:
    from baton.gateway.access.keys.records import KeyEntry, TenantEntry

_USAGE = """usage: baton keys create|list|revoke|tenants [flags]

  create        Makes a key and prints it, once: only its SHA-256 is kept.
  list          Prints what is known of every key; keys themselves are known nowhere.
  revoke ID     The key with this id is good no more, at every gateway within seconds.
  tenants FILE  Replaces the tenants in Redis by those of a TOML or JSON file.

baton keys COMMAND --help lists a command's flags."""
_AGE = re.compile(r"(\d{1,6})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def _store_field() -> str:
    value: str = field(
        default="keys.toml",
        metadata={"help": "Where the keys are: a TOML or JSON file, or redis.", "metavar": "PATH|redis"},
    )
    return value


def _redis_field() -> str:
    value: str = field(default="", metadata={"help": "The Redis, where --api-keys is redis.", "metavar": "URL"})
    return value


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The place of the keys: the flags of every command."""

    api_keys: str = _store_field()
    redis_url: str = _redis_field()


@dataclass(frozen=True, slots=True)
class CreateConfig:
    """The settings of `baton keys create`."""

    api_keys: str = _store_field()
    redis_url: str = _redis_field()
    tenant: str = field(default="default", metadata={"help": "Whose key it is; the tenant must be there."})
    scopes: tuple[str, ...] = field(
        default=("inference",),
        metadata={
            "help": "Scopes: inference, metrics, admin (which includes the others).",
            "metavar": "A,B,..",
        },
    )
    expires: str = field(
        default="",
        metadata={
            "help": "When it ends: a date and time (2027-01-31, 2027-01-31T12:00:00Z) or a time from now (90d, 12h). "
            "Empty: never.",
            "metavar": "WHEN",
        },
    )
    note: str = field(default="", metadata={"help": "A description for people."})


class KeyKeeper(Protocol):
    """Returns the file or the Redis of keys. Raises ServiceError."""

    def read(self) -> tuple[dict[str, KeyEntry], dict[str, TenantEntry]]:
        """Returns keys by id, and tenants by name."""

    def add(self, entry: KeyEntry) -> None:
        """Adds a key."""

    def revoke(self, entry: KeyEntry) -> None:
        """Revokes a key."""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs one command. Returns the process's exit code."""
    command, rest = (argv[0], list(argv[1:])) if argv else ("--help", [])
    if command in ("--help", "-h", "help"):
        print(_USAGE)
        return 0
    commands = {"create": _create, "list": _list, "revoke": _revoke, "tenants": _put_tenants}
    if command not in commands:
        print(f"baton keys: unknown command {command!r}; the commands are {', '.join(commands)}", file=sys.stderr)
        return 2
    try:
        return commands[command](rest, environ)
    except (settings.SettingsError, InvalidRequest) as error:
        print(f"baton keys: {error}", file=sys.stderr)
        return 2
    except ServiceError as error:
        print(f"baton keys: {error.message}", file=sys.stderr)
        return 1


def _create(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from baton.gateway.access.identity import Scope
    from baton.gateway.access.keys.api_key import digest_of, new_key
    from baton.gateway.access.keys.records import KeyEntry, key_of, tenants_of

    (config,) = settings.load("keys", (CreateConfig,), argv, environ, "Makes an API key.")
    now = datetime.now(UTC).replace(microsecond=0)
    try:
        scopes = [Scope(name) for name in config.scopes]
    except ValueError:
        allowed = ", ".join(scope.value for scope in Scope)
        raise InvalidRequest(f"--scopes: {','.join(config.scopes)!r} is not allowed; give some of {allowed}") from None
    keeper = _keeper(config.api_keys, config.redis_url)
    _, tenants = keeper.read()
    key, key_id = new_key()
    entry = KeyEntry(
        id=key_id,
        sha256=digest_of(key).hex(),
        tenant=config.tenant,
        scopes=scopes,
        expires=_moment(config.expires, now),
        created=now,
        note=config.note,
    )
    key_of(entry, tenants_of(tenants))
    keeper.add(entry)
    print(key)
    print(
        f"This is the key {key_id} of tenant {config.tenant}. It is shown this once and kept nowhere.", file=sys.stderr
    )
    return 0


def _list(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from baton.gateway.access.keys.records import timestamp_of

    (config,) = settings.load("keys", (StoreConfig,), argv, environ, "Lists the API keys.")
    keys, _ = _keeper(config.api_keys, config.redis_url).read()
    now = datetime.now(UTC).timestamp()
    rows = [("id", "tenant", "scopes", "state", "created", "expires", "note")]
    for entry in keys.values():
        has_expired = entry.expires is not None and timestamp_of(entry.expires) <= now
        state = "revoked" if entry.revoked else "expired" if has_expired else "good"
        scopes = ",".join(scope.value for scope in entry.scopes)
        rows.append((entry.id, entry.tenant, scopes, state, _shown(entry.created), _shown(entry.expires), entry.note))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _revoke(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    key_id, rest = _operand(argv, "revoke", "the id of a key")
    (config,) = settings.load("keys", (StoreConfig,), rest, environ, "Revokes an API key.")
    keeper = _keeper(config.api_keys, config.redis_url)
    entry = keeper.read()[0].get(key_id)
    if entry is None:
        raise InvalidRequest(f"{config.api_keys} has no key with the id {key_id!r}; `baton keys list` shows them")
    if not entry.revoked:
        keeper.revoke(entry)
    print(f"{key_id} is revoked.")
    return 0


def _put_tenants(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from baton.gateway.access.keys.file import parse_key_file
    from baton.gateway.access.keys.records import document_of, key_of, tenants_of
    from baton.services.keys.key_redis import RedisKeys

    path, rest = _operand(argv, "tenants", "a file of tenants")
    (config,) = settings.load("keys", (StoreConfig,), rest, environ, "Replaces the tenants in Redis.")
    try:
        tenants = document_of(parse_key_file(Path(path))).tenants
        known = tenants_of(tenants)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}") from error
    if not config.redis_url:
        raise InvalidRequest("--redis-url is needed: a file's tenants are changed in the file itself")
    keeper = RedisKeys(config.redis_url)
    for entry in keeper.read()[0].values():
        if not entry.revoked:
            key_of(entry, known)
    asyncio.run(keeper.put_tenants(tenants))
    print(f"{len(tenants)} tenants: {', '.join(tenants) or 'none'}.")
    return 0


def _operand(argv: Sequence[str], command: str, what: str) -> tuple[str, list[str]]:
    if argv and argv[0] in ("--help", "-h", "--help-json"):
        return "", list(argv)
    if not argv or argv[0].startswith("-"):
        raise InvalidRequest(f"`baton keys {command}` needs {what} first")
    return argv[0], list(argv[1:])


def _keeper(api_keys: str, redis_url: str) -> KeyKeeper:
    if api_keys == "redis":
        from baton.services.keys.key_redis import RedisKeys

        if not redis_url:
            raise InvalidRequest("--api-keys redis needs --redis-url")
        return RedisKeys(redis_url)
    from baton.services.keys.key_file import FileKeys

    return FileKeys(Path(api_keys))


def _moment(text: str, now: datetime) -> datetime | None:
    """Parses --expires."""
    if not text:
        return None
    try:
        if match := _AGE.fullmatch(text):
            return now + timedelta(seconds=int(match[1]) * _SECONDS[match[2]])
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"--expires: {text!r} is no time; give 2027-01-31, or 90d from now") from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    if moment <= now:
        raise InvalidRequest(f"--expires: {text} is past; the key would never be good")
    return moment


def _shown(moment: datetime | None) -> str:
    return moment.strftime("%Y-%m-%d %H:%M") if moment is not None else "-"
