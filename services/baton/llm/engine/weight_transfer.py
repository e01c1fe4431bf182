"""New weights from a trainer: tensors of this process, handles of another one's, or sent by it. vLLM's four calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from baton.llm.engine.local_engine import LocalEngine
from baton.llm.engine.operations import Mode, running_requests
from baton.llm.engine.trainer.channels import BACKENDS as SENT
from baton.llm.engine.trainer.meeting import Place
from baton.llm.engine.trainer.receiver import Receiver
from baton.llm.parameters.names import InvalidParameter, check_known
from baton.v1 import control_pb2
from baton.worker.link.methods import Method
from baton.worker.process.weight_updates import NUMBER

if TYPE_CHECKING:
    from torch import Tensor

_WITHOUT_CONNECTION = ("local", "ipc")
_AUTO = "auto"  # of those that are sent: by the engine's device
_KEYS = ("tensors", "names", "dtype_names", "shapes", "ipc_handles", "is_checkpoint_format", "packed")
_HOST = "cpu"
_DEVICE_INDEX = 6  # of the arguments of PyTorch's rebuild_cuda_tensor
_CHANGE_SECONDS = 7 * 24 * 3600.0  # for running requests to end
_ADD_SECONDS = 600.0


class WeightTransfer:
    """Used on the engine's event loop. Raises ServiceErrors."""

    def __init__(self, engine: LocalEngine) -> None:
        self._client = engine.client
        self._engine = engine
        self._receiver: Receiver | None = None

    async def init(self, request: Any = None) -> None:
        """Chooses where tensors come from. For gloo and nccl, waits until the trainer has joined."""
        info = _unpacked(request, "init_info")
        if info and not isinstance(info, Mapping):
            info = vars(info) if hasattr(info, "__dict__") else {"backend": info}
        default = _AUTO if "master_address" in info else _WITHOUT_CONNECTION[0]
        backend = info.get("backend", default)
        known = (*_WITHOUT_CONNECTION, *SENT, _AUTO)
        if backend not in known:
            message = f"backend is {backend!r}; give {', '.join(known[:-1])} or {known[-1]}"
            raise InvalidParameter(message, field="backend")
        await self.close()
        if backend not in _WITHOUT_CONNECTION:
            if backend == _AUTO:
                backend = "nccl" if self._engine.arguments.config.executor == "cuda" else "gloo"
            self._receiver = await asyncio.to_thread(Receiver, Place.of(info), backend)

    async def close(self) -> None:
        """Leaves the trainer, if there is one."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await asyncio.to_thread(receiver.close)

    async def start(self, is_checkpoint_format: bool = True) -> None:
        """Begins an update. Requests run on with the present weights."""
        if not is_checkpoint_format:
            raise InvalidParameter(
                "is_checkpoint_format=False is not supported; give tensors as a checkpoint has them",
                field="is_checkpoint_format",
            )
        await self._client.call(Method.START_WEIGHT_UPDATE)

    async def update(self, request: Any) -> None:
        """Adds tensors by name. They are read at the end of the update, and must not change before it.

        With gloo or nccl, they are what the trainer sends, which `request` may describe.
        """
        info = _unpacked(request, "update_info")
        if self._receiver is None:
            tensors = tensors_of(info)
        else:
            tensors = await asyncio.to_thread(self._receiver.receive, _described(info))
        number = self._client.inbox.put(tensors)
        await self._client.call(Method.ADD_WEIGHTS, NUMBER.pack(number), timeout=_ADD_SECONDS)

    async def finish(self, mode: Mode = "keep") -> None:
        """Replaces the weights between two steps, and forgets every cached block: the cache has a new epoch."""
        request = control_pb2.ReloadWeightsRequest(
            running_requests=running_requests(mode), timeout_ms=int(_CHANGE_SECONDS * 1000)
        )
        payload = request.SerializeToString()
        await self._client.call(Method.FINISH_WEIGHT_UPDATE, payload, timeout=2 * _CHANGE_SECONDS)
        await self._engine.refresh()


def _described(info: Any) -> Mapping[str, Any]:
    if info and not isinstance(info, Mapping) and hasattr(info, "__dict__"):
        info = vars(info)
    if not isinstance(info, Mapping):
        message = f"update_info is of type {type(info).__name__}; give names, dtype_names and shapes, or nothing"
        raise InvalidParameter(message, field="update_info")
    check_known(info, _KEYS, "update_info")
    for name in ("tensors", "ipc_handles"):
        if info.get(name) is not None:
            raise InvalidParameter(f"{name}: the trainer sends the tensors; leave it out", field=name)
    return info


def tensors_of(info: Any) -> dict[str, Tensor]:
    """Returns an update's tensors, from a mapping, pairs, or vLLM's update_info. Raises InvalidParameter."""
    if isinstance(info, Mapping) and ("ipc_handles" in info or "tensors" in info or "names" in info):
        check_known(info, _KEYS, "update_info")
        return _opened(info) if info.get("ipc_handles") is not None else tensors_of(info.get("tensors"))
    if isinstance(info, Mapping):
        return dict(info)
    if isinstance(info, Iterable) and not isinstance(info, str | bytes):
        pairs = list(info)
        if all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
            return dict(pairs)
    raise InvalidParameter(
        "update_info is neither a mapping of names to tensors, nor pairs of them, nor names with ipc_handles",
        field="update_info",
    )


def _opened(info: Mapping[str, Any]) -> dict[str, Tensor]:
    """Opens handles of torch.multiprocessing.reductions.reduce_tensor, one mapping by device for each name."""
    names, handles = list(info.get("names") or ()), list(info["ipc_handles"])
    if len(names) != len(handles):
        raise InvalidParameter(f"there are {len(handles)} ipc_handles for {len(names)} names", field="ipc_handles")
    device, index = _present_device()
    opened: dict[str, Tensor] = {}
    for place, (name, by_device) in enumerate(zip(names, handles, strict=True)):
        tensor = _open(name, by_device, device, index)
        _check_described(name, tensor, info.get("shapes"), info.get("dtype_names"), place)
        opened[name] = tensor
    return opened


def _open(name: str, by_device: Any, device: str, index: int) -> Tensor:
    from torch.multiprocessing import reductions

    handle = by_device.get(device) if isinstance(by_device, Mapping) else by_device
    if handle is None:
        raise InvalidParameter(
            f"the handle of {name} is for {', '.join(by_device)}, not for {device}", field="ipc_handles"
        )
    rebuild, arguments = handle
    # A handle names the function that opens it: only those of PyTorch are called.
    if rebuild is reductions.rebuild_cuda_tensor:
        changed = list(arguments)
        changed[_DEVICE_INDEX] = index
        return rebuild(*changed)  # type: ignore[no-any-return, no-untyped-call]
    if rebuild is reductions.rebuild_tensor:
        return rebuild(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    raise InvalidParameter(
        f"the handle of {name} is not of torch.multiprocessing.reductions.reduce_tensor", field="ipc_handles"
    )


def _present_device() -> tuple[str, int]:
    """Returns the name by which handles are chosen, and the device's index."""
    import torch

    if not torch.cuda.is_available():
        return _HOST, 0
    index = torch.cuda.current_device()
    return str(torch.cuda.get_device_properties(index).uuid), index


def _check_described(
    name: str, tensor: Tensor, shapes: Sequence[Sequence[int]] | None, dtypes: Sequence[str] | None, place: int
) -> None:
    found = (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    for field, given, own in (("shapes", shapes, found[0]), ("dtype_names", dtypes, found[1])):
        if given is None:
            continue
        wanted = given[place] if place < len(given) else None
        if wanted != own and (isinstance(wanted, str | None) or list(wanted) != own):
            raise InvalidParameter(f"{field} of {name} is {wanted}, and its handle opens {own}", field=field)


def _unpacked(request: Any, name: str) -> Any:
    """Returns the part of vLLM's request objects or mappings that concerns this side."""
    if request is None:
        return {}
    if hasattr(request, name):
        return getattr(request, name)
    return request[name] if isinstance(request, Mapping) and name in request else request
