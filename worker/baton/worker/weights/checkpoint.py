"""The tensors of a model folder by name, in one or several files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.models.fields import read_json
from baton.worker.weights.files.safetensors_file import DTYPES, QUANTIZED_DTYPES, SafetensorsFile, TensorEntry
from baton.worker.weights.files.shapes import without_ones
from baton.worker.weights.stream.pieces import Coding, Place

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Pickles or containers of pickles. Reading one may run code of its author.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".bin.index.json")


class WrongTensor(InvalidRequest):
    """A tensor that the model needs is missing, misshapen or of an unknown type."""


class Checkpoint:
    """The weights of one folder, whose files are open within a `with` statement."""

    def __init__(
        self,
        folder: Path,
        single_file: str = SINGLE_FILE,
        index_file: str = INDEX_FILE,
        modules: Sequence[str] = (),  # folders in it with a single file each
    ) -> None:
        self.folder = folder
        self._single_file = single_file
        self._index_file = index_file
        self._files: dict[str, SafetensorsFile] = {}
        self._modules = modules
        self._file_of: dict[str, SafetensorsFile] = {}  # by tensor
        self._own_names: dict[str, str] = {}  # of tensors in modules, in their files

    def __enter__(self) -> Self:
        try:
            index_path = self.folder / self._index_file
            if index_path.exists():
                self._open_index(index_path)
            else:
                self._open_single()
            for module in self._modules:
                self._open_module(module)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes every file."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._file_of.clear()
        self._own_names.clear()

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def entry(self, name: str) -> TensorEntry:
        """Returns the position of a tensor."""
        return self._file_of[name].entries[self._own_names.get(name, name)]

    def path_of(self, name: str) -> Path:
        """Returns the file that holds a tensor."""
        return self._file_of[name].path

    @property
    def source(self) -> Path:
        """The folder."""
        return self.folder

    def name_in_file(self, name: str) -> str:
        """Returns the name itself."""
        return name

    def in_file_order(self, name: str, into: Tensor) -> Tensor:
        """Returns the tensor itself."""
        return into

    def has_floats(self, name: str) -> bool:
        """Returns whether the tensor holds floats."""
        return self.entry(name).dtype in DTYPES

    def place(self, name: str, shape: tuple[int, ...]) -> Place:
        """Returns where the named tensor lies. Raises WrongTensor if it is missing or has another shape or type."""
        file = self._file_of.get(name)
        if file is None:
            raise WrongTensor(f"{self.folder}: no file holds the tensor {name} {list(shape)}", field="model")
        entry = self.entry(name)
        if without_ones(entry.shape) != without_ones(shape):
            raise WrongTensor(
                f"{file.path}: {name} has shape {list(entry.shape)}; by config.json it must be {list(shape)}",
                field="model",
            )
        dtype = DTYPES.get(entry.dtype) or QUANTIZED_DTYPES.get(entry.dtype)
        if dtype is None:
            raise WrongTensor(
                f"{file.path}: {name} has dtype {entry.dtype}; it must be one of {', '.join(DTYPES)}", field="model"
            )
        return Place(file.path, entry.start, Coding(dtype))

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns the named tensor, read now. Raises as `place`."""
        place = self.place(name, shape)
        data = bytearray(self._file_of[name].read(place.start, self.entry(name).num_bytes))
        if not data:
            return torch.empty(shape, dtype=place.coding.dtype)
        return torch.frombuffer(data, dtype=place.coding.dtype).view(shape)

    def sample(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Returns some bytes of a tensor."""
        entry = self.entry(name)
        return self._file_of[name].read(entry.start + offset, min(num_bytes, entry.num_bytes - offset))

    def _open_single(self) -> None:
        path = self.folder / self._single_file
        if not path.exists():
            raise InvalidRequest(
                f"{self.folder} holds neither {self._single_file} nor {self._index_file}"
                f" ({_other_weights(self.folder)}); use --load-format dummy to run without weights",
                field="model",
            )
        file = self._open(self._single_file)
        self._file_of = dict.fromkeys(file.entries, file)

    def _open_index(self, index_path: Path) -> None:
        weight_map = read_json(index_path, "").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InvalidRequest(f"{index_path}: weight_map is missing; it must name a file a tensor", field="model")
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise InvalidRequest(
                    f"{index_path}: {name} lies in {file_name!r}; it must be a file name", field="model"
                )
            if not (self.folder / file_name).exists():
                raise InvalidRequest(f"{self.folder / file_name} is missing: {index_path.name} names it", field="model")
            file = self._open(file_name)
            if name not in file.entries:
                raise InvalidRequest(
                    f"{file.path} does not hold {name}, although {index_path.name} lists it", field="model"
                )
            self._file_of[name] = file

    def _open_module(self, module: str) -> None:
        folder = self.folder / module
        if not (folder / self._single_file).exists():
            found = _other_weights(folder) if folder.is_dir() else "there is no such folder"
            raise InvalidRequest(f"{folder} does not hold {self._single_file} ({found})", field="model")
        file = self._open(f"{module}/{self._single_file}")
        for name in file.entries:
            self._file_of[f"{module}/{name}"] = file
            self._own_names[f"{module}/{name}"] = name

    def _open(self, file_name: str) -> SafetensorsFile:
        file = self._files.get(file_name)
        if file is None:
            file = self._files[file_name] = SafetensorsFile(self.folder / file_name)
        return file


def _other_weights(folder: Path) -> str:
    """Returns a description of the folder's other weight files."""
    names = sorted(found.name for found in folder.iterdir())
    if others := [name for name in names if name.endswith(".safetensors")]:
        return "it holds " + ", ".join(others[:4])
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        return f"it holds {', '.join(pickles[:4])}: pickles, which can run code; only safetensors are loaded"
    return "and no other safetensors file"
