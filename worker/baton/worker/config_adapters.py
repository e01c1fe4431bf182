"""A worker's settings of LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.rpc.errors import InvalidRequest
from baton.worker.config_model import ModelSettings

MAX_RANK = 512


@dataclass(frozen=True, slots=True)
class AdapterSettings(ModelSettings):
    """Settings of a worker's adapters, beside those of its model."""

    enable_lora: bool = field(
        default=False, metadata={"help": "Serve LoRA adapters of the model, several in one batch."}
    )
    max_loras: int = field(
        default=8,
        metadata={"help": "Adapters on the device, and so in one step.", "minimum": 1, "maximum": 4096},
    )
    max_lora_rank: int = field(
        default=64,
        metadata={
            "help": "The largest rank of an adapter. Memory of the device is reserved for it.",
            "minimum": 1,
            "maximum": MAX_RANK,
        },
    )
    max_lora_expert_rank: int = field(
        default=0,
        metadata={
            "help": "The largest rank of an adapter at experts, for each of which memory of the device is reserved. 0: "
            "adapters change no experts.",
            "minimum": 0,
            "maximum": MAX_RANK,
        },
    )
    max_cpu_loras: int = field(
        default=0,
        metadata={"help": "Adapters kept in host memory. 0: four times --max-loras.", "minimum": 0, "maximum": 65536},
    )
    lora_modules: tuple[str, ...] = field(
        default=(),
        metadata={"help": "Adapters served from the start, by their names.", "metavar": "NAME=FOLDER,.."},
    )
    lora_pinned: tuple[str, ...] = field(
        default=(),
        metadata={"help": "Those of --lora-modules that are kept on the device.", "metavar": "NAME,.."},
    )
    lora_folders: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Folders in which adapters may lie that are loaded at run time. Empty: none is.",
            "metavar": "FOLDER,..",
        },
    )
    lora_resolver_folder: str = field(
        default="",
        metadata={
            "help": "A folder whose sub-folders are adapters, served under their names and loaded when first used; it "
            "is read again every second. Empty: none.",
            "metavar": "FOLDER",
        },
    )

    lora_resolvers: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Load adapters that are not served yet when a request first names them, with these resolvers, in "
            "their order: folder (a sub-folder of --lora-folders has the name), hub (the name is a repository in the "
            "local cache of huggingface_hub), a plugin's. Needs --lora-resolver-names. Empty: none.",
            "metavar": "NAME,..",
        },
    )
    lora_resolver_names: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "The names that resolvers are asked for, as shell patterns: our-org/*.",
            "metavar": "PATTERN,..",
        },
    )
    lora_hub_cache: str = field(
        default="",
        metadata={"help": "The cache that the resolver hub reads. Empty: huggingface_hub's own.", "metavar": "FOLDER"},
    )

    @property
    def num_host_loras(self) -> int:
        """Adapters kept in host memory."""
        return max(self.max_loras, self.max_cpu_loras or 4 * self.max_loras)

    @property
    def static_loras(self) -> Mapping[str, str]:
        """The folders of --lora-modules by name. Raises InvalidRequest for a wrong entry."""
        found: dict[str, str] = {}
        for entry in self.lora_modules:
            name, separator, folder = entry.partition("=")
            if not separator or not name or not folder or name in found:
                problem = f"gives {name} twice" if name in found else f"has {entry!r}"
                raise InvalidRequest(
                    f"lora_modules {problem}; it must be NAME=FOLDER, each name once", field="lora_modules"
                )
            found[name] = folder
        return found

    def check_adapters(self) -> None:
        """Raises InvalidRequest where the settings of adapters contradict each other."""
        _ = self.static_loras
        for name in ("lora_modules", "lora_folders", "lora_resolver_folder", "lora_resolvers"):
            if getattr(self, name) and not self.enable_lora:
                raise InvalidRequest(f"{name} needs enable_lora=true", field=name)
        self._check_pinned()
        if bool(self.lora_resolvers) != bool(self.lora_resolver_names):
            given, missing = ("lora_resolvers", "lora_resolver_names")[:: 1 if self.lora_resolvers else -1]
            why = "the names that may be loaded" if self.lora_resolvers else "what finds the names"
            raise InvalidRequest(f"{given} needs {missing}: {why}", field=missing)
        if len(set(self.lora_resolvers)) < len(self.lora_resolvers):
            raise InvalidRequest("lora_resolvers gives a name twice", field="lora_resolvers")
        if self.max_cpu_loras and self.max_cpu_loras < self.max_loras:
            raise InvalidRequest(
                f"max_cpu_loras={self.max_cpu_loras} must be at least max_loras={self.max_loras}: an adapter on the "
                "device is in host memory too",
                field="max_cpu_loras",
            )

    def _check_pinned(self) -> None:
        unknown = [name for name in self.lora_pinned if name not in self.static_loras]
        if unknown:
            raise InvalidRequest(
                f"lora_pinned has {unknown[0]!r}, which is not one of lora_modules", field="lora_pinned"
            )
        if self.lora_pinned and len(set(self.lora_pinned)) >= self.max_loras:
            raise InvalidRequest(
                f"lora_pinned has {len(set(self.lora_pinned))} names; at most {self.max_loras - 1}, one less than "
                "max_loras, so that others can be loaded",
                field="lora_pinned",
            )
