"""The object of --speculative-config, with vLLM's keys. Knows no tensors."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from baton.rpc.errors import InvalidRequest, Unsupported

_FIELD = "speculative_config"
METHODS = ("ngram", "suffix", "draft_model", "eagle3", "mtp")
_WITH_MODEL = ("draft_model", "eagle3")  # that need weights of a folder of their own
ON_CPUS = (*_WITH_MODEL, "mtp")  # that no other executor runs
# Methods of vLLM that Baton does not have.
_OTHERS = ("eagle", "medusa", "mlp_speculator")
_MTP = "mtp"  # and names that end with it, which vLLM has for each family
_MOST = 64


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """How tokens are guessed. A request has the same tokens with any of these."""

    method: str = "ngram"  # or the name of a plugin
    num_speculative_tokens: int = 8  # of a request in a step, at most; fewer are verified if more do not pay
    prompt_lookup_max: int = 4  # ngram: last tokens that are looked up, at most
    prompt_lookup_min: int = 2  # ngram: at least
    suffix_decoding_max_tree_depth: int = 24  # suffix: last tokens that are compared, at most
    suffix_decoding_max_cached_tokens: int = 1 << 20  # suffix: of earlier requests' outputs, which are kept
    model: str = ""  # draft_model, eagle3: the folder or hub id of what guesses
    revision: str = ""  # of a hub id

    def to_json(self) -> str:
        """Returns an object that `parse_speculation` reads."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)})


def parse_speculation(text: str, plugins: Sequence[str] = ()) -> SpeculationSettings | None:
    """Returns the settings of a JSON object; empty text: None. `plugins`: names that may be methods.

    Raises InvalidRequest with the wrong key, Unsupported for a method of vLLM that Baton does not have.
    """
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{_FIELD}={text} is not JSON: {error}", field=_FIELD) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{_FIELD}={text} is no object", field=_FIELD)
    value.setdefault("method", "draft_model" if "model" in value else "ngram")
    _use_one_name(value, plugins)
    _check_method(value, plugins)
    known = {field.name: field.default for field in fields(SpeculationSettings)}
    for key, given in value.items():
        _check(key, given, known)
    settings = SpeculationSettings(**value)
    if settings.prompt_lookup_min > settings.prompt_lookup_max:
        raise InvalidRequest(
            f"{_FIELD}: prompt_lookup_min is {settings.prompt_lookup_min}; it must be at most prompt_lookup_max, "
            f"{settings.prompt_lookup_max}",
            field=_FIELD,
        )
    return settings


def _use_one_name(value: dict[str, Any], plugins: Sequence[str]) -> None:
    method = value["method"]
    if isinstance(method, str) and method.split("_")[-1] == _MTP and method not in plugins:
        value["method"] = _MTP


def _check_method(value: dict[str, Any], plugins: Sequence[str]) -> None:
    method = value["method"]
    allowed = " or ".join((*METHODS, *plugins))
    if method in _OTHERS:
        raise Unsupported(f"{_FIELD}: method {method!r} is not supported; give {allowed}", field=_FIELD)
    if method not in METHODS and method not in plugins:
        raise InvalidRequest(
            f"{_FIELD}: method is {method!r}; give {allowed}, or the name of a plugin that --plugins loads",
            field=_FIELD,
        )
    if method in _WITH_MODEL and not value.get("model"):
        raise InvalidRequest(f"{_FIELD}: method {method!r} needs model, a folder or a hub id", field=_FIELD)
    if method not in _WITH_MODEL and value.get("model"):
        raise InvalidRequest(f"{_FIELD}: method {method!r} has no model; leave it out", field=_FIELD)


def _check(key: str, given: Any, known: dict[str, Any]) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise InvalidRequest(f"{_FIELD}: unknown key {key!r}; {hint}", field=_FIELD)
    if isinstance(known[key], str):
        if not isinstance(given, str):
            raise InvalidRequest(f"{_FIELD}: {key} is {given!r}; it must be a string", field=_FIELD)
        return
    if not isinstance(given, int) or isinstance(given, bool):
        raise InvalidRequest(f"{_FIELD}: {key} is {given!r}; it must be an integer", field=_FIELD)
    most = _MOST if key != "suffix_decoding_max_cached_tokens" else 1 << 26
    if not 1 <= given <= most:
        raise InvalidRequest(f"{_FIELD}: {key} is {given}; allowed are 1 to {most}", field=_FIELD)
