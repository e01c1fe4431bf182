"""The interface of resolvers, which find adapters by their names, and which plugins implement. Version 1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResolverContext:
    """What a resolver knows of its worker."""

    model_name: str  # of the base model
    folders: tuple[str, ...] = ()  # of --lora-folders
    hub_cache: str = ""  # empty: the cache of huggingface_hub


class AdapterResolver(ABC):
    """Finds adapters that are loaded when a request first names them. An entry point names a subclass.

    It is made at start, and then called on a thread of its own, one name at a time: it may wait for a network, and
    delays other new names alone.
    """

    def __init__(self, context: ResolverContext) -> None:
        """Raises if it cannot work: the worker then does not start."""
        self.context = context

    @property
    @abstractmethod
    def roots(self) -> Sequence[str]:
        """The folders in which everything lies that `find` returns. Constant."""

    @abstractmethod
    def find(self, name: str) -> str | None:
        """Returns the folder with an adapter in PEFT's form; None: no adapter has the name.

        The name matches --lora-resolver-names. Any exception fails the requests that wait for the name.
        """
