"""The formats of weights that a model folder may hold. Each has one reader."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from baton.model_folder.form import gguf_file_of
from baton.rpc.errors import InvalidRequest
from baton.worker.weights.checkpoint import Checkpoint
from baton.worker.weights.files.gguf import GgufTensors
from baton.worker.weights.files.mistral import MistralTensors, holds_mistral_weights
from baton.worker.weights.tensors import Tensors


def open_tensors(folder: Path, modules: Sequence[str] = ()) -> AbstractContextManager[Tensors]:
    """Returns the reader of a folder's weights, to be used in a `with` statement.

    `modules`: folders in it whose tensors belong to the model too, under names that begin with the folder's.
    """
    gguf = gguf_file_of(folder)
    if gguf is None and not holds_mistral_weights(folder):
        return Checkpoint(folder, modules=modules)
    if modules:
        raise InvalidRequest(
            f"{folder}: {modules[0]} has weights of its own, which go with safetensors in Hugging Face form alone",
            field="model",
        )
    return MistralTensors(folder) if gguf is None else GgufTensors(gguf)
