"""Removes keys, passwords and tokens from settings and environments. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

LEFT_OUT = "(left out)"

# Names of values that are secret, whole or as a part between underscores.
_SECRET_NAME = re.compile(
    r"(^|[_\-.])(key|keys|apikey|secret|secrets|token|tokens|password|passwd|passphrase|pass|pwd|credential|credentials|"
    r"authorization|auth|cookie|private|salt|headers|dsn|url|urls|endpoint|uri|proxy|connection|string)($|[_\-.\d])",
    re.IGNORECASE,
)
_SPLIT_NAMES = re.compile(r"(?<=[a-z])(?=[A-Z])")
# Variables with URLs, which are shown without their secrets.
_URL_NAME = re.compile(r"(^|_)(url|urls|endpoint|uri|proxy)($|_)", re.IGNORECASE)
# //user:password@host, //token@host. Everything before the last @ of an authority is removed.
_USERINFO = re.compile(r"(?<=//)[^/?#\s'\"]*@")
_QUERY = re.compile(r"(?<=[?&;])([^=&;#\s]+)=([^&;#\s'\"]*)")
_FRAGMENT = re.compile(r"(://[^\s#'\"]*)#[^\s'\"]+")
_WORDS = re.compile(
    r"-----BEGIN [^-]+-----.*?(-----END [^-]+-----|$)"
    r"|\b(?:bt|sk|pk|rk|hf|ghp|gho|ghs|github_pat|glpat|xox[abpr]|pypi|AKIA|ASIA|AIza)[-_]?[A-Za-z0-9_\-]{12,}"
    r"|\beyJ[A-Za-z0-9_\-]+\.[A-Za-z0-9_\-]+(?:\.[A-Za-z0-9_\-]+)?"
    r"|(?<=bearer )\S+|(?<=basic )\S+|(?<=requirepass )\S+",
    re.IGNORECASE | re.DOTALL,
)
_ASSIGNED = re.compile(
    r"(?i)((?:^|[^a-z])(?:password|passwd|passphrase|secret|token|api[_-]?key|credential|authorization)s?)"
    r"([\"']?\s*[=:]\s*)(?!\(left out\))(\"[^\"]*\"|'[^']*'|[^\s,;&'\"]+)"
)
_FLAG = re.compile(r"(?i)(--[\w-]*(?:password|passphrase|secret|token|key|credential)\s+)(?!--|\(left out\))(\S+)")
_PATH = re.compile(r"(/[\w.\-]+){2,}")
_LEAST_SECRET = 4  # characters: shorter values occur in other text
_NO_SECRETS = frozenset({"redis", "true", "false", "none", "auto", "default"})  # common values of settings


def without_secrets(text: str, keep_paths: bool = False) -> str:
    """Removes likely secrets: passwords in URLs, keys by their format, and values by their names.

    `keep_paths` keeps values that are paths of two parts or more, for messages about files.
    """
    text = _USERINFO.sub(f"{LEFT_OUT}@", text)
    text = _QUERY.sub(rf"\1={LEFT_OUT}", text)
    text = _FRAGMENT.sub(rf"\1#{LEFT_OUT}", text)
    text = _WORDS.sub(LEFT_OUT, text)
    text = _FLAG.sub(rf"\1{LEFT_OUT}", text)

    def assigned(found: re.Match[str]) -> str:
        if keep_paths and _PATH.fullmatch(found[3].rstrip(":")):
            return found[0]
        return f"{found[1]}{found[2]}{LEFT_OUT}"

    return _ASSIGNED.sub(assigned, text)


def is_secret(name: str) -> bool:
    """Returns whether a variable or setting of this name may hold a secret."""
    return _SECRET_NAME.search(_SPLIT_NAMES.sub("_", name)) is not None


def redacted_value(name: str, value: str) -> str:
    """Returns a setting's value without secrets."""
    if not value:
        return value
    if is_secret(name):
        return without_secrets(value) if _URL_NAME.search(name) and "://" in value else LEFT_OUT
    return without_secrets(value)


def secrets_in(values: Mapping[str, str]) -> frozenset[str]:
    """Returns the secrets among an environment's values, to remove them from other texts."""
    found: set[str] = set()
    for name, value in values.items():
        if _URL_NAME.search(name) or "://" in value:
            for userinfo in _USERINFO.findall(value):
                found.update(re.split(r"[:@]", userinfo))
            found.update(value for _, value in _QUERY.findall(value))
        elif is_secret(name):
            found.update((value, *value.split(",")))
    stripped = {secret.strip() for secret in found}
    return frozenset(one for one in stripped if len(one) >= _LEAST_SECRET and one.lower() not in _NO_SECRETS)


def without_these(text: str, secrets: Iterable[str]) -> str:
    """Removes all occurrences of these secrets from a text, the longest first."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, LEFT_OUT)
    return text
