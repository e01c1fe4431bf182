"""Rejects unknown query parameters, because a misspelled one would be ignored silently."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qs, parse_qsl

from baton.gateway.rest.routing import API_VERSION, Parameter, Route
from baton.rpc.errors import InvalidRequest

_MAX_PARAMETERS = 256
_SHOWN = 40  # characters of a name in an error


def check_query(route: Route, query: str) -> list[str]:
    """Returns the names of ignored parameters. Raises InvalidRequest."""
    if not query:
        return []
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_PARAMETERS)
    except ValueError:
        raise InvalidRequest(f"the query has more than {_MAX_PARAMETERS} parameters") from None
    known = [*(one for one in route.parameters if one.place == "query"), API_VERSION]
    found = [_named(name, known, route) for name, _ in pairs]
    return list(dict.fromkeys(one.name for one in found if one.ignored))


def last_value(query: str, name: str) -> str | None:
    """Returns the parameter's last value, or None."""
    return parse_qs(query, max_num_fields=_MAX_PARAMETERS).get(name, [None])[-1]


def _named(name: str, known: Sequence[Parameter], route: Route) -> Parameter:
    for parameter in known:
        # Clients write a list as a=1&a=2 or a[]=1&a[]=2, and an object as a[key]=1.
        if name == parameter.name or (parameter.nested and name.partition("[")[0] == parameter.name):
            return parameter
    taken = ", ".join(one.name for one in known if one is not API_VERSION)
    shown = name[:_SHOWN]
    what = f"its query parameters are {taken}" if taken else "it takes no query parameters"
    raise InvalidRequest(f"{route.method} {route.path} has no query parameter {shown!r}; {what}", field=shown)
