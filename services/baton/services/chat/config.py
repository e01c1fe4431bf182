"""The settings of `baton chat` and `baton complete`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest
from baton.services.rest.client import RestClient

_SILENCE_SECONDS = 600.0  # a long prompt may wait that long for its first token
_NO_HISTORY = "none"


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """What both commands have."""

    url: str = field(
        default="http://127.0.0.1:8000",
        metadata={"help": "The REST API; a trailing /v1 may stay.", "metavar": "URL", "positional": True},
    )
    api_key: str = field(
        default="", metadata={"help": "An API key. Others on this machine see flags, not variables.", "metavar": "KEY"}
    )
    ca: str = field(
        default="", metadata={"help": "Certificates to trust, for https. Empty: the system's.", "metavar": "PATH"}
    )
    model: str = field(default="", metadata={"help": "The model's name. Empty: the server's first.", "metavar": "NAME"})
    quick: str | None = field(
        default=None,
        metadata={
            "help": "Answer this, print the answer alone, and end. -: read it from standard input, as is done where "
            "that is no terminal.",
            "metavar": "TEXT",
            "short": "-q",
        },
    )
    max_tokens: int | None = field(
        default=None, metadata={"help": "Tokens of an answer. None: the server's default.", "minimum": 1}
    )
    temperature: float | None = field(
        default=None, metadata={"help": "Sampling temperature. None: the server's default.", "minimum": 0.0}
    )
    seed: int | None = field(default=None, metadata={"help": "Seed of sampling. None: none."})
    fields: str = field(
        default="",
        metadata={"help": 'More fields of each request, a JSON object such as {"top_p": 0.9}.', "metavar": "JSON"},
    )
    history: str = field(
        default="",
        metadata={
            "help": "File of entered lines, for the arrow keys. none: keep none. Empty: baton/history in the user's "
            "state folder.",
            "metavar": "FILE",
        },
    )

    @property
    def client(self) -> RestClient:
        """Returns the client of the configured gateway."""
        advice = "Give a key: --api-key, or BATON_CHAT_API_KEY and BATON_COMPLETE_API_KEY."
        url = self.url.rstrip("/").removesuffix("/v1")
        return RestClient(url, self.api_key, self.ca, _SILENCE_SECONDS, advice)

    @property
    def request_fields(self) -> dict[str, Any]:
        """Returns the fields of every request but the model and the prompt. Raises InvalidRequest."""
        named = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        return {**_json_object(self.fields), **{name: value for name, value in named.items() if value is not None}}

    def history_path(self, environ: Mapping[str, str]) -> Path | None:
        """Returns the file of entered lines, or None."""
        if self.history == _NO_HISTORY:
            return None
        if self.history:
            return Path(self.history).expanduser()
        state = environ.get("XDG_STATE_HOME")
        return (Path(state) if state else Path("~/.local/state").expanduser()) / "baton" / "history"

    def validate(self) -> None:
        """Raises InvalidRequest for an invalid URL or fields that are no JSON object."""
        try:
            self.client.check()
        except InvalidRequest as error:
            raise InvalidRequest(f"{error.message}; a text to answer is given by -q", field="url") from error
        _ = self.request_fields


@dataclass(frozen=True, slots=True)
class ChatConfig(ClientConfig):
    """The settings of `baton chat`."""

    system: str = field(default="", metadata={"help": "The system message. Empty: none.", "metavar": "TEXT"})


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"fields is not valid JSON: {error}", field="fields") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f'fields is {text}; it must be a JSON object, such as {{"top_p": 0.9}}', field="fields")
    for name in ("stream", "messages", "prompt", "model", "n"):
        if name in value:
            raise InvalidRequest(f"fields has {name}, which this command sets itself", field="fields")
    return value
