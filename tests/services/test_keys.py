"""`baton keys` on files and on a real Redis, as the gateway reads them."""

import asyncio
import json
import re
import tomllib
from pathlib import Path

import pytest
import redis

from baton.gateway.access.errors import Unauthenticated
from baton.gateway.access.identity import Scope
from baton.gateway.access.keys.api_key import digest_of, id_of
from baton.gateway.access.keys.file import read_key_file
from baton.gateway.access.keys.redis_store import KeyStore
from baton.services import cli

KEY = re.compile(r"bt-[a-z0-9]{10}-[A-Za-z0-9]{40}\n")


@pytest.fixture(params=["keys.toml", "keys.json", "redis"])
def place(request, tmp_path):
    """The flags that name where the keys are."""
    if request.param != "redis":
        return ["--api-keys", str(tmp_path / request.param)]
    server = request.getfixturevalue("redis_server")
    return ["--api-keys", "redis", "--redis-url", server.url]


def run(*words):
    return cli.main(["keys", *words], {})


def directory(place):
    return read_key_file(Path(place[1])) if place[1] != "redis" else asyncio.run(_in_redis(place[3]))


async def _in_redis(url):
    store = KeyStore(url)
    try:
        return await store.read_if_changed()
    finally:
        await store.close()


def created(capsys, *words):
    assert run("create", *words) == 0
    printed = capsys.readouterr()
    assert KEY.fullmatch(printed.out)
    key = printed.out.strip()
    assert key not in printed.err
    return key


def stored_text(place):
    if place[1] != "redis":
        return Path(place[1]).read_text()
    with redis.Redis.from_url(place[3]) as client:
        return repr(client.hgetall("baton:keys"))


def test_a_key_is_made_listed_and_revoked(place, capsys):
    key = created(
        capsys, *place, "--note", "for 'CI' and \"more\"", "--scopes", "inference,metrics", "--expires", "90d"
    )
    other = created(capsys, *place)
    assert key.rpartition("-")[2] not in stored_text(place)
    known = directory(place)
    identity = known.authenticate(key, 0.0)
    assert identity.key_id == id_of(key)
    assert set(identity.scopes) == {Scope.INFERENCE, Scope.METRICS}
    with pytest.raises(Unauthenticated, match="expired"):
        known.authenticate(key, 1e11)

    assert run("list", *place) == 0
    listed = capsys.readouterr().out
    assert id_of(key) in listed
    assert id_of(other) in listed
    assert "for 'CI' and" in listed
    assert key.rpartition("-")[2] not in listed
    assert digest_of(key).hex() not in listed

    assert run("revoke", id_of(key), *place) == 0
    assert run("revoke", id_of(key), *place) == 0
    capsys.readouterr()
    known = directory(place)
    with pytest.raises(Unauthenticated, match="revoked"):
        known.authenticate(key, 0.0)
    assert known.authenticate(other, 0.0)
    assert run("list", *place) == 0
    states = {line.split()[0]: line.split()[3] for line in capsys.readouterr().out.splitlines()[1:]}
    assert states == {id_of(key): "revoked", id_of(other): "good"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["create", "--tenant", "nobody"], "unknown tenant 'nobody'"),
        (["create", "--scopes", "root"], "give some of inference, metrics, admin"),
        (["create", "--scopes", ""], "has no scopes"),
        (["create", "--expires", "yesterday"], "is no time"),
        (["create", "--expires", "2001-01-01"], "is past"),
        (["revoke"], "needs the id of a key"),
        (["revoke", "aaaaaaaaaa"], "no key with the id 'aaaaaaaaaa'"),
        (["destroy"], "unknown command 'destroy'"),
        (["tenants"], "needs a file of tenants"),
        (["list", "--colour"], "unknown argument"),
    ],
)
def test_errors_are_reported_and_nothing_is_written(words, problem, tmp_path, capsys):
    path = tmp_path / "keys.toml"
    extra = [] if words[0] == "destroy" else ["--api-keys", str(path)]
    assert run(*words, *extra) == 2
    assert problem in capsys.readouterr().err
    assert not path.exists()


def test_an_unreachable_redis_is_reported(free_port, capsys):
    assert run("list", "--api-keys", "redis", "--redis-url", f"redis://127.0.0.1:{free_port}/0") == 1
    assert "cannot read API keys from Redis" in capsys.readouterr().err
    assert run("list", "--api-keys", "redis") == 2
    assert "--redis-url" in capsys.readouterr().err


def test_a_key_file_is_private_and_keeps_comments(tmp_path, capsys):
    path = tmp_path / "keys.toml"
    created(capsys, "--api-keys", str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    path.write_text("# ours\n[tenants.acme]\nweight = 2.0 # heavy\n\n" + path.read_text())
    key = created(capsys, "--api-keys", str(path), "--tenant", "acme")
    assert run("revoke", id_of(key), "--api-keys", str(path)) == 0
    text = path.read_text()
    assert text.startswith("# ours\n[tenants.acme]\nweight = 2.0 # heavy\n")
    assert path.stat().st_mode & 0o777 == 0o640
    assert [one.get("revoked") for one in tomllib.loads(text)["keys"]] == [None, True]
    assert [one.name for one in tmp_path.iterdir()] == ["keys.toml"]


def test_a_file_that_is_written_otherwise_is_left_alone(tmp_path, capsys):
    path = tmp_path / "keys.toml"
    text = f'keys = [{{ id = "aaaaaaaaaa", sha256 = "{"0" * 64}" }}]\n'
    path.write_text(text)
    for words in (["create"], ["revoke", "aaaaaaaaaa"]):
        assert run(*words, "--api-keys", str(path)) == 2
        assert "edit it by hand" in capsys.readouterr().err
    path.write_text("keys = 3")
    assert run("create", "--api-keys", str(path)) == 2
    assert "Expected `array`" in capsys.readouterr().err
    path.write_text(text)
    assert run("list", "--api-keys", str(path)) == 0


def test_tenants_go_from_a_file_into_redis(redis_server, tmp_path, capsys):
    place = ["--api-keys", "redis", "--redis-url", redis_server.url]
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": {"acme": {"requests_per_minute": 5, "models": ["m"]}}}))
    assert run("create", *place, "--tenant", "acme") == 2
    assert run("tenants", str(path), *place) == 0
    capsys.readouterr()
    key = created(capsys, *place, "--tenant", "acme")
    tenant = (directory(place)).authenticate(key, 0.0).tenant
    assert tenant.limits.requests_per_minute == 5
    assert not tenant.may_use("other")
    path.write_text("{}")
    assert run("tenants", str(path), *place) == 2
    assert "unknown tenant 'acme'" in capsys.readouterr().err
