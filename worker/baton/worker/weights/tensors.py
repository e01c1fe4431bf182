"""What a load needs of the weights of a model folder, whichever format they have."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from baton.worker.weights.files.safetensors_file import TensorEntry
from baton.worker.weights.stream.pieces import Place


class Tensors(Protocol):
    """Tensors by the names that Hugging Face checkpoints have for them, open within a `with` statement."""

    @property
    def source(self) -> Path:
        """The folder or file that errors name."""

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""

    def __contains__(self, name: str) -> bool: ...

    def name_in_file(self, name: str) -> str:
        """Returns the file's name of a tensor, whether it is there or not."""

    def entry(self, name: str) -> TensorEntry:
        """Returns the type and shape of a tensor, and its position in a file."""

    def has_floats(self, name: str) -> bool:
        """Returns whether the tensor holds floats, or what becomes floats."""

    def place(self, name: str, shape: tuple[int, ...]) -> Place:
        """Returns where the named tensor lies. Raises WrongTensor if it is missing or has another shape or type."""

    def in_file_order(self, name: str, into: Tensor) -> Tensor:
        """Returns a view of a tensor that the named one fills, with the elements in the order that the file has."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns the named tensor, read now. Raises as `place`."""

    def sample(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Returns some bytes of a tensor, as the file holds them."""
