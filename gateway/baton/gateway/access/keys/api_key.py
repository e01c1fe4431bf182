"""API keys: bt-<id>-<secret>. How they are made, taken apart and compared.

A secret has 238 random bits, so its SHA-256 can be stored as it is: slow hashes are for what people choose themselves.
"""

from __future__ import annotations

import hashlib
import secrets
import string

PREFIX = "bt"
ID_LENGTH = 10
SECRET_LENGTH = 40
MAX_LENGTH = 128  # of anything that is looked at

_ID_ALPHABET = string.ascii_lowercase + string.digits
_SECRET_ALPHABET = string.ascii_letters + string.digits


def new_key() -> tuple[str, str]:
    """A new key and its id."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(ID_LENGTH))
    secret = "".join(secrets.choice(_SECRET_ALPHABET) for _ in range(SECRET_LENGTH))
    return f"{PREFIX}-{key_id}-{secret}", key_id


def is_id(text: str) -> bool:
    """Whether this can be a key's id."""
    return len(text) == ID_LENGTH and all(letter in _ID_ALPHABET for letter in text)


def id_of(key: str) -> str:
    """The id in a key; empty where this is no key."""
    if len(key) > MAX_LENGTH:
        return ""
    prefix, _, rest = key.partition("-")
    key_id, _, secret = rest.partition("-")
    return key_id if prefix == PREFIX and len(secret) == SECRET_LENGTH else ""


def digest_of(key: str) -> bytes:
    """What is stored of a key, and compared: SHA-256 of all of it, 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
