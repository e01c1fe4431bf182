"""Reads API keys from requests: Authorization: Bearer, or x-api-key as Anthropic's clients send it. Raises nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_SCHEME = "bearer "
NOT_BEARER = ""  # returned for an Authorization header with another scheme


def keys_in_headers(headers: Mapping[bytes, bytes]) -> tuple[str, ...]:
    """Returns every key in HTTP headers. Header names are lower-case."""
    authorization, key = headers.get(b"authorization"), headers.get(b"x-api-key")
    if key is None:
        return () if authorization is None else (_bearer(authorization.decode("latin-1")),)
    own = key.decode("latin-1").strip()
    return (own,) if authorization is None else (_bearer(authorization.decode("latin-1")), own)


def keys_in_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[str, ...]:
    """Returns every key in a gRPC call's metadata."""
    found = []
    for name, value in metadata or ():
        text = value if isinstance(value, str) else value.decode("latin-1")
        if name == "authorization":
            found.append(_bearer(text))
        elif name == "x-api-key":
            found.append(text.strip())
    return tuple(found)


def _bearer(value: str) -> str:
    return value[len(_SCHEME) :].strip() if value[: len(_SCHEME)].lower() == _SCHEME else NOT_BEARER
