"""vLLM's arguments of an engine as an object, for scripts that pass it on."""

from __future__ import annotations

from typing import Any


class EngineArgs:
    """The model and the arguments of LLM as attributes: `LLM(**vars(args))`. LLM and AsyncLLM check them."""

    def __init__(self, model: str, **arguments: Any) -> None:
        self.model = model
        self.__dict__.update(arguments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class AsyncEngineArgs(EngineArgs):
    """The same for AsyncLLM."""
