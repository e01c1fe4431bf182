"""Settings that do not fit together are refused by name."""

import pytest

from baton.kvstore.config import KvstoreConfig
from baton.rpc.errors import InvalidRequest


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"listen": "nowhere"}, "listen"),
        ({"metrics_listen": "host:99999"}, "metrics_listen"),
        ({"advertise": "nowhere"}, "advertise"),
        ({"redis_url": "http://x"}, "redis_url"),
        ({"redis_url": "redis://x:port/0"}, "redis_url"),
        ({"redis_url": "redis://x:1/zero"}, "redis_url"),
        ({"redis_url": "redis:///0"}, "redis_url"),
        ({"redis_url": "redis://x", "store": "memory"}, "store"),
        ({"store": "redis"}, "redis_url"),
        ({"data_dir": "/x", "store": "memory"}, "data_dir"),
        ({"redis_namespace": "a{b}"}, "redis_namespace"),
        ({"redis_namespace": ""}, "redis_namespace"),
    ],
)
def test_wrong_settings_are_named(settings, field):
    with pytest.raises(InvalidRequest) as error:
        KvstoreConfig(**settings).validate()
    assert error.value.field == field


@pytest.mark.parametrize(
    "settings", [{}, {"redis_url": "redis://:secret@x:1/0"}, {"redis_url": "unix:///x.sock", "store": "redis"}]
)
def test_right_settings_pass(settings):
    KvstoreConfig(**settings).validate()
