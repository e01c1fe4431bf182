"""The tensors of a checkpoint in Mistral's own format, in the names and the order of rows that Hugging Face has."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from baton.model_folder.mistral.names import SWAPPED, hugging_face_name, is_of_tower, mistral_name
from baton.model_folder.mistral.params import PARAMS_FILE
from baton.worker.models.fields import Fields, read_json
from baton.worker.weights.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from baton.worker.weights.files.safetensors_file import TensorEntry
from baton.worker.weights.layouts import pairs_of_halves
from baton.worker.weights.stream.pieces import Place

_SINGLE_FILE = "consolidated.safetensors"
_INDEX_FILE = "consolidated.safetensors.index.json"


def holds_mistral_weights(folder: Path) -> bool:
    """Returns whether a folder has weights in Mistral's format, and none in Hugging Face's."""
    if any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return False
    return any((folder / name).exists() for name in (_SINGLE_FILE, _INDEX_FILE))


class MistralTensors:
    """The weights of one folder, whose files are open within a `with` statement."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = Checkpoint(folder, _SINGLE_FILE, _INDEX_FILE)
        self._names: dict[str, str] = {}  # the files', by ours
        params = Fields(read_json(folder / PARAMS_FILE, f"{_SINGLE_FILE} comes with one"), str(folder / PARAMS_FILE))
        heads = params.positive_int("n_heads")
        self._heads = dict(zip(SWAPPED, (heads, params.positive_int("n_kv_heads", default=heads)), strict=True))

    def __enter__(self) -> Self:
        self._checkpoint.__enter__()
        names = [name for name in self._checkpoint.names if not is_of_tower(name)]
        self._names = {hugging_face_name(name) or name: name for name in names}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._checkpoint.close()

    @property
    def source(self) -> Path:
        """The folder."""
        return self._checkpoint.source

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def name_in_file(self, name: str) -> str:
        """Returns Mistral's name of a tensor, whether it is there or not."""
        return mistral_name(name)

    def entry(self, name: str) -> TensorEntry:
        """Returns the type, shape and position of a tensor."""
        return self._checkpoint.entry(self._names[name])

    def has_floats(self, name: str) -> bool:
        """Returns whether the tensor holds floats."""
        return self._checkpoint.has_floats(self._names[name])

    def place(self, name: str, shape: tuple[int, ...]) -> Place:
        """Returns where the named tensor lies. Raises WrongTensor if it is missing or has another shape or type."""
        return self._checkpoint.place(self._names.get(name, mistral_name(name)), shape)

    def in_file_order(self, name: str, into: Tensor) -> Tensor:
        """Returns a view with the rows of rotated neighbours next to each other, for queries and keys."""
        parts = self._names[name].split(".")
        heads = self._heads.get(".".join(parts[2:-1]))
        return into if heads is None else pairs_of_halves(into, heads)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns the named tensor, read now. Raises as `place`."""
        values = self._checkpoint.tensor(self._names.get(name, mistral_name(name)), shape)
        into = values.clone()
        ordered = self.in_file_order(name, into)
        ordered.copy_(values.view(ordered.shape))
        return into

    def sample(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Returns some bytes of a tensor."""
        return self._checkpoint.sample(self._names[name], offset, num_bytes)
