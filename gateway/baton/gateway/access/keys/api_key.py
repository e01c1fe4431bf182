"""API keys of the form bt-<id>-<secret>: creation, parsing and digests.

A secret has 238 random bits, so a plain SHA-256 is safe to store; slow hashes are for passwords that people choose.
"""

from __future__ import annotations

import hashlib
import secrets
import string

PREFIX = "bt"
ID_LENGTH = 10
SECRET_LENGTH = 40
MAX_LENGTH = 128  # longer inputs are not parsed

_ID_ALPHABET = string.ascii_lowercase + string.digits
_SECRET_ALPHABET = string.ascii_letters + string.digits


def new_key() -> tuple[str, str]:
    """Returns a new key and its id."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(ID_LENGTH))
    secret = "".join(secrets.choice(_SECRET_ALPHABET) for _ in range(SECRET_LENGTH))
    return f"{PREFIX}-{key_id}-{secret}", key_id


def is_id(text: str) -> bool:
    """Returns whether the text has the form of a key id."""
    return len(text) == ID_LENGTH and all(letter in _ID_ALPHABET for letter in text)


def id_of(key: str) -> str:
    """Returns the id in a key, or an empty text for a malformed key."""
    if len(key) > MAX_LENGTH:
        return ""
    prefix, _, rest = key.partition("-")
    key_id, _, secret = rest.partition("-")
    return key_id if prefix == PREFIX and len(secret) == SECRET_LENGTH else ""


def digest_of(key: str) -> bytes:
    """Returns the SHA-256 of the whole key (32 bytes), which is stored and compared."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
