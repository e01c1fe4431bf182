"""The formats of weights that a model folder may hold. Each has one reader."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from baton.model_folder.form import gguf_file_of
from baton.worker.weights.checkpoint import Checkpoint
from baton.worker.weights.files.gguf import GgufTensors
from baton.worker.weights.files.mistral import MistralTensors, holds_mistral_weights
from baton.worker.weights.tensors import Tensors


def open_tensors(folder: Path) -> AbstractContextManager[Tensors]:
    """Returns the reader of a folder's weights, to be used in a `with` statement."""
    gguf = gguf_file_of(folder)
    if gguf is not None:
        return GgufTensors(gguf)
    return MistralTensors(folder) if holds_mistral_weights(folder) else Checkpoint(folder)
