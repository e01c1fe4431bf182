"""Where a request carries its key: Authorization: Bearer, or x-api-key as Anthropic's clients do. Raises nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_SCHEME = "bearer "
NOT_BEARER = ""  # stands for an Authorization of another scheme


def keys_in_headers(headers: Mapping[bytes, bytes]) -> tuple[str, ...]:
    """Every key that HTTP headers, by lower-case name, present."""
    authorization, key = headers.get(b"authorization"), headers.get(b"x-api-key")
    if key is None:
        return () if authorization is None else (_bearer(authorization.decode("latin-1")),)
    own = key.decode("latin-1").strip()
    return (own,) if authorization is None else (_bearer(authorization.decode("latin-1")), own)


def keys_in_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[str, ...]:
    """Every key that a gRPC call's metadata presents."""
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
