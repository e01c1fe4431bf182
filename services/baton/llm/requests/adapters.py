"""Adapters of offline requests: read when they are first used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.llm.engine.local_engine import LocalEngine, called
from baton.llm.parameters.names import InvalidParameter
from baton.rpc.errors import NotFound
from baton.v1 import control_pb2


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter in PEFT's form. One folder may have several names, which share their KV."""

    lora_name: str
    lora_int_id: int = 0  # vLLM's number of it; ignored: the name identifies it
    lora_path: str = ""
    load_inplace: bool = False  # reads the folder again, although the name is known


ManyAdapters = LoRARequest | Sequence[LoRARequest | None] | None


def adapters_of(given: ManyAdapters) -> list[LoRARequest | None]:
    """Returns the adapter of each request, or one for all. Raises InvalidParameter for another type."""
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for one in listed:
        if not isinstance(one, LoRARequest | None):
            raise InvalidParameter(f"lora_request is {one!r}; give a LoRARequest", field="lora_request")
    return listed


async def load_adapters(engine: LocalEngine, wanted: Sequence[LoRARequest | None]) -> list[str]:
    """Loads the adapters that are not there yet. Returns the name of each; empty: the model itself.

    Raises InvalidParameter without enable_lora, or a ServiceError that names what is wrong with the folder.
    """
    loaded: dict[LoRARequest, str] = {}
    for one in wanted:
        if one is not None and one not in loaded:
            loaded[one] = await _load(engine, one)
    return ["" if one is None else loaded[one] for one in wanted]


async def _load(engine: LocalEngine, request: LoRARequest) -> str:
    name, path = request.lora_name, request.lora_path
    if not engine.arguments.config.enable_lora:
        raise InvalidParameter("lora_request needs LLM(enable_lora=True)", field="lora_request")
    try:
        adapter = engine.catalog.get(name).adapter
    except NotFound:
        adapter = None
    if adapter is not None and not request.load_inplace and path in ("", adapter.path):
        return name
    message = control_pb2.LoadAdapterRequest(name=name, path=path, replace=True)
    answer: control_pb2.LoadAdapterResponse = await called(engine.control.LoadAdapter(message))
    engine.catalog.add_adapter(engine.model.name, answer.adapter)
    return name
