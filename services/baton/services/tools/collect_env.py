"""`baton collect-env`: what a bug report needs of this machine. No keys, passwords or tokens, and no host name."""

from __future__ import annotations

import asyncio
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from baton.services import extras, settings
from baton.services.doctor.examination import examine
from baton.services.doctor.machine import fabric, limits, versions
from baton.services.doctor.redact import redacted_value, secrets_in, without_secrets, without_these
from baton.services.doctor.targets import Targets
from baton.services.machine.gpus import observe_gpus

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_MISUSED = 2

_TOLD_PREFIXES = (
    "BATON_", "NCCL_", "CUDA_", "NVIDIA_", "UCX_", "NIXL_", "OTEL_", "GRPC_", "OMP_", "MKL_", "PYTORCH_", "TORCH_",
    "TRITON_", "HF_", "KUBERNETES_", "LD_LIBRARY_PATH", "PYTHON",
)  # fmt: skip
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")


@dataclass(frozen=True, slots=True)
class CollectConfig:
    """The settings of `baton collect-env`."""

    output: str = field(default="", metadata={"help": "Where to write it. Empty: standard output.", "metavar": "FILE"})
    look_timeout: float = field(
        default=5.0, metadata={"help": "Seconds that one look may take.", "minimum": 0.1, "maximum": 300.0}
    )


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Prints a JSON document. Returns the exit code."""
    about = "Prints this machine's facts for a bug report, without secrets."
    try:
        (config,) = settings.load("collect_env", (CollectConfig,), argv, environ, about)
    except settings.SettingsError as error:
        print(f"baton collect-env: {error}", file=sys.stderr)
        return EXIT_MISUSED
    text = json.dumps(redacted(collect(environ, config.look_timeout), environ), indent=1)
    if not config.output:
        print(text)
        return EXIT_OK
    try:
        Path(config.output).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        print(f"baton collect-env: {config.output} cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def collect(environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Returns the whole report before `redacted`. Variables are already limited by name."""
    device = observe_gpus(seconds, extras.installed("torch") is not None)
    findings = asyncio.run(examine(Targets(), seconds))
    return {
        "baton": {"version": versions.observe_versions("").baton, "python": sys.version, "command": sys.argv[:2]},
        "machine": _machine(),
        "limits": asdict(limits.observe_limits()),
        "gpu": asdict(device),
        "fabric": asdict(fabric.observe_fabric(seconds, bool(device.gpus))),
        "environment": {
            name: redacted_value(name, value)
            for name, value in sorted(environ.items())
            if name.startswith(_TOLD_PREFIXES)
        },
        "doctor": [{**asdict(one), "level": one.level.value} for one in findings],
        "packages": sorted(f"{one.name}=={one.version}" for one in metadata.distributions() if one.name),
    }


def redacted(value: Any, environ: Mapping[str, str]) -> Any:
    """Removes everything that looks like a secret, and the environment's secrets wherever they are."""
    secrets = secrets_in(environ)
    home = environ.get("HOME", "").rstrip("/")

    def clean(part: Any) -> Any:
        if isinstance(part, str):
            text = without_these(without_secrets(part), secrets)
            return text.replace(home, "~") if len(home) > 1 else text
        if isinstance(part, Mapping):
            return {clean(key): clean(one) for key, one in part.items()}
        if is_dataclass(part) and not isinstance(part, type):
            return clean(asdict(part))
        return [clean(one) for one in part] if isinstance(part, list | tuple) else part

    return clean(value)


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "release": _os_name(),
        "processor": _processor(),
        "container": [path for path in _CONTAINER_FILES if Path(path).exists()],
    }


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
