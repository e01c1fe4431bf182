"""The families and weight formats of plugins. Each is chosen by what a model's config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from baton.plugins.kinds import MODEL_FAMILIES, WEIGHT_FORMATS
from baton.plugins.plugins import Plugins, instance_of, subclass_of
from baton.worker.layers.spec import ExpertsSpec
from baton.worker.models.config import ModelConfig, WeightsInFormat
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family
from baton.worker.models.supported.families import FAMILIES

if TYPE_CHECKING:
    from baton.worker.quantization.weight_format import WeightFormat

_KEY = "quantization_config"


@dataclass(frozen=True, slots=True)
class ModelPlugins:
    """What plugins add to the models that run."""

    families: Mapping[str, Family] = field(default_factory=dict)  # by architecture
    formats: Mapping[str, type[WeightFormat]] = field(default_factory=dict)  # by quant_method

    def family_of(self, fields: Fields) -> Family | None:
        """Returns the family of a config.json by its architecture, or by its model_type if it names none."""
        names = fields.raw.get("architectures")
        if isinstance(names, list) and names:
            return self.families.get(str(names[0]))
        return next((one for one in self.families.values() if one.model_type == fields.raw.get("model_type")), None)

    def without_format(self, fields: Fields) -> Fields:
        """Returns the fields without quantization_config, if a plugin reads it."""
        if self._format_of(fields) is None:
            return fields
        return Fields({key: value for key, value in fields.raw.items() if key != _KEY}, fields.source)

    def with_format(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Returns the config with the weight format of quantization_config. Raises InvalidRequest if that refuses."""
        found = self._format_of(fields)
        if found is None:
            return config
        if config.transformers is not None or any(isinstance(layer.mlp, ExpertsSpec) for layer in config.layers):
            raise fields.error(_KEY, "absent: weight formats of plugins cover linears of families, and no experts")
        settings = fields.raw[_KEY]
        try:
            made = found(settings)
        except ValueError as error:
            raise fields.error(_KEY, f"one that the weight format {settings['quant_method']} reads: {error}") from error
        return replace(config, weight_format=WeightsInFormat(str(settings["quant_method"]), made.method_of))

    def _format_of(self, fields: Fields) -> type[WeightFormat] | None:
        settings = fields.raw.get(_KEY)
        return self.formats.get(str(settings.get("quant_method"))) if isinstance(settings, Mapping) else None


NO_MODEL_PLUGINS = ModelPlugins()


def start_model_plugins(plugins: Plugins) -> ModelPlugins:
    """Loads the allowed families and formats. Raises PluginError for one that is wrong, or that Baton has."""
    families: dict[str, Family] = {}

    def add(found: Any) -> None:
        family = instance_of(Family)(found)
        if family.architecture in FAMILIES or family.architecture in families:
            raise ValueError(f"there is a family of the architecture {family.architecture} already")
        families[family.architecture] = family

    plugins.start(MODEL_FAMILIES, add)
    if not plugins.of(WEIGHT_FORMATS):
        return ModelPlugins(families)
    from baton.worker.quantization.weight_format import WeightFormat  # loads PyTorch

    return ModelPlugins(families, plugins.start(WEIGHT_FORMATS, subclass_of(WeightFormat)))
