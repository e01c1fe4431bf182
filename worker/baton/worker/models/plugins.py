"""The families and weight formats of plugins. Each is chosen by what a model's config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.plugins.kinds import MODEL_FAMILIES, WEIGHT_FORMATS
from baton.plugins.plugins import Plugins, instance_of, subclass_of
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family
from baton.worker.models.supported.families import FAMILIES
from baton.worker.models.weight_formats import KEY, in_format, settings_of, without_settings
from baton.worker.quantization.formats.table import FORMATS

if TYPE_CHECKING:
    from baton.worker.quantization.weight_format import WeightFormat

_EXECUTORS = ("cpu", "cuda")  # of formats, which refuse others themselves


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
        return fields if self._format_of(fields) is None else without_settings(fields)

    def with_format(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Returns the config with the weight format of quantization_config. Raises InvalidRequest if that refuses."""
        found, settings = self._format_of(fields), settings_of(fields)
        if found is None or settings is None:
            return config
        if config.transformers is not None:
            raise fields.error(KEY, "absent: weight formats of plugins cover linears of families")
        return in_format(config, fields, settings, _EXECUTORS, lambda: found)

    def _format_of(self, fields: Fields) -> type[WeightFormat] | None:
        settings = settings_of(fields)
        return None if settings is None else self.formats.get(str(settings.get("quant_method")))


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

    plugins.refuse_names(WEIGHT_FORMATS, FORMATS)
    return ModelPlugins(families, plugins.start(WEIGHT_FORMATS, subclass_of(WeightFormat)))
