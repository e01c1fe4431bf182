"""Settings that do not fit together are refused by name."""

import pytest

from baton.router.config import RouterConfig
from baton.rpc.errors import InvalidRequest


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "workers"),
        ({"workers": ("a:1",), "listen": "nowhere"}, "listen"),
        ({"workers": ("a:1",), "kvstore": "x"}, "kvstore"),
        ({"workers": ("a:1", "b")}, "workers"),
        ({"workers": ("a:1", "a:1")}, "workers"),
    ],
)
def test_wrong_settings_are_named(settings, field):
    with pytest.raises(InvalidRequest) as error:
        RouterConfig(**settings).validate()
    assert error.value.field == field


def test_right_settings_pass():
    RouterConfig(workers=("a:1", "[::1]:2"), kvstore="k:3").validate()
