"""The unquantized model folder that is rounded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from baton.model_folder.form import gguf_file_of
from baton.rpc.errors import InvalidRequest
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import Layout
from baton.worker.models.registry import load_config
from baton.worker.models.supported.families import CONFIG_FILE, read_folder
from baton.worker.models.weight_formats import KEY, settings_of, with_format
from baton.worker.weights.checkpoint import Checkpoint
from baton.worker.weights.files.mistral import holds_mistral_weights
from baton.worker.weights.heads import with_true_head
from baton.worker.weights.stored_experts import with_stored_experts

# Weights, and lists of their files.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_MODULES_FILE = "modules.json"


class UnquantizedFolder:
    """A folder with config.json and safetensors that one of Baton's families runs."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidRequest for another one, and for weights that are quantized already."""
        if folder.is_file() or gguf_file_of(folder) is not None:
            raise _refused(folder, "is a GGUF file, whose weights are packed already")
        if holds_mistral_weights(folder):
            raise _refused(folder, "is in Mistral's own format")
        self.folder = folder
        self.fields = read_folder(folder)
        if (settings := settings_of(self.fields)) is not None:
            raise _refused(folder, f"is quantized already: its quant_method is {settings.get('quant_method')}")
        config = load_config(folder)
        if config.transformers is not None:
            raise _refused(folder, f"is a {config.architecture}, of which Baton has no family")
        if config.names.layout is not Layout.ROWS:
            raise InvalidRequest(
                f"{folder}: {config.architecture} stores linears in another order than weight formats; it has no "
                "quantized form",
                field="model",
            )
        self._config = config

    def config(self, checkpoint: Checkpoint) -> ModelConfig:
        """Returns the config, with what the checkpoint's tensors say of it."""
        return with_stored_experts(with_true_head(self._config, checkpoint), checkpoint)

    def quantized_config(self, config: ModelConfig, settings: dict[str, Any]) -> ModelConfig:
        """Returns the config with weights in a format. Raises InvalidRequest if the family does not read it."""
        raw = {**self.fields.raw, KEY: settings}
        return with_format(config, Fields(raw, self.fields.source))

    def copy_rest(self, out: Path, settings: dict[str, Any]) -> None:
        """Writes config.json with the settings, and copies all other files but weights."""
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and path.name != CONFIG_FILE and not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, out / path.name)
        for module in self._modules():
            shutil.copytree(self.folder / module, out / module)
        raw = json.loads((self.folder / CONFIG_FILE).read_text(encoding="utf-8"))
        text = json.dumps({**raw, KEY: settings}, indent=2, ensure_ascii=False)
        (out / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")

    def _modules(self) -> list[str]:
        """Returns the folders of a model of sentence-transformers."""
        path = self.folder / _MODULES_FILE
        if not path.is_file():
            return []
        named = [str(one.get("path", "")) for one in json.loads(path.read_text(encoding="utf-8"))]
        return [name for name in named if name and Path(name).name == name and (self.folder / name).is_dir()]


def _refused(folder: Path, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{folder} {why}; give the unquantized model's folder, with config.json and safetensors", field="model"
    )
