"""Keys: their format, the headers of requests, the key file, and reloads while a gateway runs."""

import asyncio
import json
import os
import time

import pytest
import redis
from support.gateway.access_rig import key_file
from support.gateway.scripted_services import until

from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.credential import keys_in_headers, keys_in_metadata
from baton.gateway.access.errors import Unauthenticated
from baton.gateway.access.factory import open_gate
from baton.gateway.access.gate import KeyGate, OpenGate
from baton.gateway.access.identity import MissingScope, Scope, Tenant
from baton.gateway.access.keys.api_key import MAX_LENGTH, digest_of, id_of, new_key
from baton.gateway.access.keys.directory import Directory, KeyRecord
from baton.gateway.access.keys.file import KeyFile, read_key_file
from baton.gateway.access.keys.redis_store import KEYS, TENANTS, VERSION, KeyStore
from baton.gateway.access.keys.ring import KeyRing
from baton.gateway.access.limits.ledger import Ledger
from baton.gateway.access.limits.limiter import LocalLimiter
from baton.gateway.access.settings import AccessSettings
from baton.rpc.errors import InvalidRequest, Unavailable
from baton.services import cli


def test_keys_are_unlike_and_have_their_id_in_them():
    keys = [new_key() for _ in range(1000)]
    assert len({key for key, _ in keys}) == 1000
    for key, key_id in keys:
        assert key.startswith(f"bt-{key_id}-")
        assert id_of(key) == key_id


@pytest.mark.parametrize("text", ["", "bt", "bt--", "sk-abc", "bt-abcdefghij-", "bt-abcdefghij-short", "x" * (1 << 20)])
def test_malformed_keys_have_no_id(text):
    assert id_of(text) == ""


@pytest.mark.parametrize(
    ("headers", "keys"),
    [
        ({}, ()),
        ({b"authorization": b"Bearer one"}, ("one",)),
        ({b"authorization": b"bearer  one "}, ("one",)),
        ({b"authorization": b"Basic b25l"}, ("",)),
        ({b"authorization": b"Bearer"}, ("",)),
        ({b"x-api-key": b"one"}, ("one",)),
        ({b"x-api-key": b"one", b"authorization": b"Bearer two"}, ("two", "one")),
        ({b"x-api-key": b"\xff\xc3\xa9"}, ("\xff\xc3\xa9",)),
        ({b"authorization": b"Bearer one, Bearer one"}, ("one, Bearer one",)),  # two headers, as HTTP joins them
    ],
)
def test_keys_are_found_in_headers(headers, keys):
    assert keys_in_headers(headers) == keys


def test_keys_are_found_in_metadata():
    metadata = (
        ("authorization", "Bearer one"),
        ("x-api-key", "two"),
        ("authorization", b"Bearer \xff"),
        ("other", "x"),
    )
    assert keys_in_metadata(metadata) == ("one", "two", "\xff")
    assert keys_in_metadata(None) == ()


@pytest.fixture
def gate():
    """Yields a gate with keys of every kind in `gate.keys`."""
    keys, records = {}, {}
    for name, fields in {
        "good": {},
        "admin": {"scopes": frozenset({Scope.ADMIN})},
        "metrics": {"scopes": frozenset({Scope.METRICS})},
        "expired": {"expires_at": 100.0},
        "revoked": {"revoked": True},
    }.items():
        keys[name], key_id = new_key()
        records[key_id] = KeyRecord(key_id, digest_of(keys[name]), **fields)

    class Ring(KeyRing):
        def __init__(self):
            self._directory = Directory(records, {"default": Tenant("default")})
            self._clock = lambda: 100.0

    counters = AccessCounters()
    made = KeyGate(Ring(), LocalLimiter(Ledger(), counters, 1), counters)
    made.keys, made.counters = keys, counters
    return made


def test_a_good_key_is_its_tenants(gate):
    identity = gate.identify((gate.keys["good"],), Scope.INFERENCE)
    assert identity.tenant.name == "default"
    assert identity.key_id == id_of(gate.keys["good"])
    assert gate.identify((gate.keys["good"],) * 3)
    for keys, tenant in (((gate.keys["good"],) * 2, "default"), ((), ""), (("x",), "")):
        assert gate.tenant_of(keys) == tenant
    assert not gate.counters.refused


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda keys: (), "missing"),
        (lambda keys: ("",), "malformed"),
        (lambda keys: (keys["good"][:-1],), "malformed"),
        (lambda keys: (keys["good"] + "a",), "malformed"),
        (lambda keys: (keys["good"][:-1] + "é",), "incorrect"),
        (lambda keys: (keys["good"][:-1] + "\udcff",), "incorrect"),
        (lambda keys: ("bt-aaaaaaaaaa-" + keys["good"][-40:],), "incorrect"),
        (lambda keys: (keys["good"][:14] + keys["admin"][-40:],), "incorrect"),
        (lambda keys: ("bt-\x00" + "a" * 60,), "malformed"),
        (lambda keys: ("k" * (1 << 20),), "malformed"),
        (lambda keys: (keys["good"] * 30000,), "malformed"),
        (lambda keys: (keys["good"], keys["admin"]), "ambiguous"),
        (lambda keys: (keys["good"], ""), "ambiguous"),
        (lambda keys: (keys["expired"],), "expired"),
        (lambda keys: (keys["revoked"],), "revoked"),
    ],
)
def test_a_bad_key_is_refused_counted_and_never_logged(gate, make, reason):
    with pytest.raises(Unauthenticated) as refused:
        gate.identify(make(gate.keys))
    assert gate.counters.refused == {reason: 1}
    assert all(key[14:] not in refused.value.message for key in gate.keys.values())
    assert len(refused.value.message) < 200


def test_an_unknown_id_and_a_wrong_secret_look_alike(gate):
    good = gate.keys["good"]
    messages = set()
    for key in ("bt-aaaaaaaaaa-" + good[-40:], good[:-1] + ("x" if good[-1] != "x" else "y"), good[:20], "x"):
        with pytest.raises(Unauthenticated) as refused:
            gate.identify((key,))
        messages.add(refused.value.message)
    assert len(messages) == 1


def test_the_hashed_part_of_a_key_is_bounded():
    """A key of a megabyte costs as much as any key, because only its beginning is hashed."""
    directory = Directory({}, {})
    with pytest.raises(Unauthenticated):
        directory.authenticate("x" * (64 << 20), 0.0)
    assert MAX_LENGTH < 1000


def test_scopes_are_held_and_admin_has_them_all(gate):
    for scope in Scope:
        assert gate.identify((gate.keys["admin"],), scope)
    assert gate.identify((gate.keys["metrics"],), Scope.METRICS)
    for name, scope in (("good", Scope.ADMIN), ("good", Scope.METRICS), ("metrics", Scope.INFERENCE)):
        with pytest.raises(MissingScope, match=scope.value):
            gate.identify((gate.keys[name],), scope)
    assert gate.counters.refused == {"scope": 3}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "invalid JSON"),
        ("[]", "must be an object"),
        ('{"key": []}', "unknown field `key`"),
        ('{"keys": [{"id": "short", "sha256": "%s"}]}' % ("0" * 64), "give 10 lower-case letters"),
        ('{"keys": [{"id": "aaaaaaaaaa"}]}', "missing required field `sha256`"),
        ('{"keys": [{"id": "aaaaaaaaaa", "sha256": "xyz"}]}', "regex"),
        ('{"keys": [{"id": "aaaaaaaaaa", "sha256": "%s", "tenant": "x"}]}' % ("0" * 64), "unknown tenant 'x'"),
        ('{"keys": [{"id": "aaaaaaaaaa", "sha256": "%s", "scopes": ["root"]}]}' % ("0" * 64), "root"),
        ('{"keys": [{"id": "aaaaaaaaaa", "sha256": "%s", "expires": "soon"}]}' % ("0" * 64), "expires"),
        ('{"tenants": {"a b": {}}}', "1 to 64 letters"),
        ('{"tenants": {"a": {"requests_per_minute": -1}}}', "requests_per_minute"),
        ('{"tenants": {"a": {"request_per_minute": 1}}}', "request_per_minute"),
        ('{"tenants": {"a": {"weight": 0}}}', "weight"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_place(text, problem, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        read_key_file(path)
    assert problem in refused.value.message
    assert refused.value.message.startswith(f"api_keys={path}: ")


async def test_a_missing_or_broken_file_stops_the_start(tmp_path):
    for path, problem in ((tmp_path / "none.toml", "baton keys create"), (tmp_path, "cannot read the file")):
        with pytest.raises(InvalidRequest, match=problem):
            async with open_gate(AccessSettings(str(path)), AccessCounters()):
                raise AssertionError("it started")


async def test_without_keys_all_clients_may_use_everything():
    async with open_gate(AccessSettings(), AccessCounters()) as gate:
        assert isinstance(gate, OpenGate)
        assert gate.identify((), Scope.ADMIN).tenant.name == ""


async def test_a_changed_file_is_read_and_a_broken_one_leaves_the_old_state(tmp_path, caplog):
    path, (first, second) = key_file(tmp_path, [{}, {}])
    counters = AccessCounters()
    ring = KeyRing(KeyFile(str(path)), counters)
    async with ring.watching(3600):
        assert ring.authenticate(first)
        content = json.loads(path.read_text())

        def write(text):
            path.with_suffix(".new").write_text(text)
            os.replace(path.with_suffix(".new"), path)

        content["keys"][0]["revoked"] = True
        write(json.dumps(content))
        await ring.poll()
        with pytest.raises(Unauthenticated, match="revoked"):
            ring.authenticate(first)
        assert ring.authenticate(second)
        for broken in ("{", json.dumps({**content, "tenants": 3})):
            write(broken)
            await ring.poll()
            await ring.poll()
        path.unlink()
        await ring.poll()
        assert ring.authenticate(second)
        assert counters.source_errors == 3
        assert counters.reloads == 2
        del content["keys"][1]
        write(json.dumps(content))
        await ring.poll()
        with pytest.raises(Unauthenticated, match="Incorrect"):
            ring.authenticate(second)
    assert "the previous keys stay in force" in caplog.text
    assert first[14:] not in caplog.text


@pytest.fixture
def store(redis_server):
    client = redis.Redis.from_url(redis_server.url)
    yield client
    client.close()


async def made(redis_server, capsys, *words):
    """A key that `baton keys create` made in Redis."""
    place = ("--api-keys", "redis", "--redis-url", redis_server.url)
    assert await asyncio.to_thread(cli.main, ["keys", "create", *words, *place], {}) == 0
    return capsys.readouterr().out.strip()


async def test_keys_in_redis_are_read_again_when_they_change(redis_server, capsys):
    first = await made(redis_server, capsys)
    ring = KeyRing(KeyStore(redis_server.url), AccessCounters())
    async with ring.watching(0.01):
        assert ring.authenticate(first).tenant.name == "default"
        second = await made(redis_server, capsys)
        await until(lambda: _is_good(ring, second))
        words = ["keys", "revoke", id_of(first), "--api-keys", "redis", "--redis-url", redis_server.url]
        await asyncio.to_thread(cli.main, words, {})
        await until(lambda: not _is_good(ring, first))


async def test_a_redis_that_is_away_wiped_or_wrong_leaves_the_old_keys(redis_server, store, capsys):
    key = await made(redis_server, capsys)
    counters = AccessCounters()
    ring = KeyRing(KeyStore(redis_server.url, counters), counters)
    async with ring.watching(3600):
        for harm in (store.flushall, lambda: _wrong_type(store), redis_server.stop):
            before = counters.source_errors
            harm()
            began = time.monotonic()
            await ring.poll()
            assert time.monotonic() - began < 10
            assert counters.source_errors == before + 1
            assert ring.authenticate(key)


async def test_a_wrong_record_in_redis_holds_up_no_other(redis_server, store, capsys):
    good, bad, lost = [await made(redis_server, capsys) for _ in range(3)]
    store.hset(KEYS, id_of(bad), b"{\xff")
    store.hset(KEYS, id_of(lost), json.dumps({"id": id_of(lost), "sha256": "0" * 64, "tenant": "nobody"}))
    counters = AccessCounters()
    ring = KeyRing(KeyStore(redis_server.url, counters), counters)
    async with ring.watching(3600):
        assert _is_good(ring, good)
        assert not _is_good(ring, bad)
        assert not _is_good(ring, lost)
        # A tenant that cannot be read takes its limits along: its keys are refused.
        store.hset(TENANTS, "default", "{}}")
        store.incr(VERSION)
        await ring.poll()
        assert not _is_good(ring, good)
    assert counters.source_errors == 6


async def test_until_keys_are_read_all_clients_are_refused(free_port, redis_server):
    for url in (f"redis://127.0.0.1:{free_port}/0", redis_server.url):
        async with open_gate(AccessSettings("redis", url), AccessCounters()) as gate:
            assert not gate.ready
            with pytest.raises(Unavailable):
                gate.identify((new_key()[0],))


def _is_good(ring, key):
    try:
        return ring.authenticate(key)
    except Unauthenticated:
        return None


def _wrong_type(store):
    store.set(KEYS, "x")
    store.set(VERSION, "another")
