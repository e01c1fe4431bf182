"""New values of a model's tensors, given by name as its checkpoint has them, until they are complete.

Tensors are kept as they are given, not copied: they must not change until the weights were replaced.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest, Mismatch, Unsupported
from baton.worker.models.config import ModelConfig
from baton.worker.models.weights import ModelWeights
from baton.worker.weights.build import build_weights

_META = torch.device("meta")
_SHOWN_NAMES = 4
_SAMPLES = 1024  # values of a tensor


class TensorUpdate:
    """Collects the tensors of one change. `is_redundant`: whether checkpoints may have a name besides those needed.

    Raises Unsupported for a model whose weights are not built from named tensors, or are quantized in its checkpoint.
    """

    def __init__(self, config: ModelConfig, is_redundant: Callable[[str], bool]) -> None:
        if config.transformers is not None:
            raise Unsupported(
                "weights of a model that Transformers computes are not updated from tensors", field="names"
            )
        if config.weight_format is not None and not config.weight_format.online:
            raise Unsupported(
                f"weights in the format {config.weight_format.name} are not updated from tensors", field="names"
            )
        self._config = config
        self._is_redundant = is_redundant
        self._shapes = _shapes_of(config)
        self._names = {other: name for name in self._shapes for other in config.names.spellings(name)}
        self._tensors: dict[str, Tensor] = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds tensors, all or none. A name that was given before gets the new value.

        Raises InvalidRequest for a name that the model does not have, or a tensor of another shape or kind.
        """
        needed = [name for name in tensors if name in self._names or not self._is_redundant(name)]
        known = {name: tensors[name] for name in needed}
        for name, tensor in known.items():
            self._check(name, tensor)
        self._tensors.update({self._names[name]: tensor.detach() for name, tensor in known.items()})

    def build(self, dtype: torch.dtype, device: torch.device) -> ModelWeights:
        """Returns weights with copies of the values. Raises Mismatch if tensors are missing."""
        missing = [name for name in self._shapes if name not in self._tensors]
        if missing:
            shown = ", ".join(missing[:_SHOWN_NAMES])
            more = f" and {len(missing) - _SHOWN_NAMES} more" if len(missing) > _SHOWN_NAMES else ""
            raise Mismatch(f"the update lacks {shown}{more}; give every tensor of the model", field="names")

        def source(name: str, shape: tuple[int, ...], into: Tensor) -> None:
            into.copy_(self._tensors[name].reshape(into.shape))

        return build_weights(self._config, source, dtype, device)

    def digest(self, before: bytes) -> bytes:
        """Returns the digest of the new weights: other than `before`, and equal where the same update follows it."""
        hasher = hashlib.blake2b(before, digest_size=16, person=b"baton-update")
        for name, tensor in sorted(self._tensors.items()):
            flat = tensor.reshape(-1)
            values = flat[:: max(1, flat.numel() // _SAMPLES)].to("cpu", torch.float32)
            hasher.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            hasher.update(values.numpy().tobytes())
        return hasher.digest()

    def _check(self, name: str, tensor: object) -> None:
        if name not in self._names:
            close = difflib.get_close_matches(name, list(self._names), 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InvalidRequest(f"the model has no tensor {name}{hint}", field="names")
        if not isinstance(tensor, Tensor):
            raise InvalidRequest(f"{name} is of type {type(tensor).__name__}; give a tensor", field="tensors")
        expected = self._shapes[self._names[name]]
        if tuple(tensor.shape) != expected:
            raise InvalidRequest(
                f"{name} has the shape {list(tensor.shape)}; it must be {list(expected)}", field="shapes"
            )
        if not tensor.is_floating_point():
            raise InvalidRequest(f"{name} is of {tensor.dtype}; give floating-point values", field="dtype_names")


def _shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors that the model needs, by name. Allocates nothing."""
    shapes: dict[str, tuple[int, ...]] = {}

    def source(name: str, shape: tuple[int, ...], into: Tensor) -> None:
        shapes[name] = shape

    build_weights(config, source, torch.float32, _META)
    return shapes
