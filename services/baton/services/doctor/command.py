"""`baton doctor [SERVICE] [the service's flags]`: examines this machine for a service with these settings.

Each topic is a file: its facts as a frozen dataclass, pure functions from facts to findings, and an observe function.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.services import extras, settings
from baton.services.doctor.examination import examine
from baton.services.doctor.finding import Finding, Level, failed, ok
from baton.services.doctor.redact import secrets_in, without_secrets, without_these
from baton.services.doctor.targets import service_of, targets_of
from baton.services.process.run import ProcessConfig

_KUBERNETES = "kubernetes"

EXIT_WELL = 0
EXIT_FAILED = 1
EXIT_MISUSED = 2

_MARKS = {Level.OK: "  ok  ", Level.UNKNOWN: "  ?   ", Level.WARNING: " warn ", Level.FAILED: " FAIL "}
_ABOUT = (
    "Examines this machine: baton doctor [gateway|router|kvstore|worker] [that service's flags]. With a service, its "
    "flags and BATON_* variables say what is looked at; exit code 1 means that something does not work. "
    "baton doctor kubernetes compares a live namespace with what deploy/README.md promises."
)


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """The settings of `baton doctor` itself."""

    json: bool = field(default=False, metadata={"help": "A JSON document instead of lines."})
    quiet: bool = field(default=False, metadata={"help": "Show only problems."})
    look_timeout: float = field(
        default=5.0, metadata={"help": "Seconds that one look may take.", "minimum": 0.1, "maximum": 300.0}
    )


def main(argv: Sequence[str], environ: Mapping[str, str], configs: Mapping[str, tuple[str, str]]) -> int:
    """Prints the report. `configs` names each service's config class: (module, class). Returns the exit code."""
    if argv and argv[0] == _KUBERNETES:
        return _kubernetes(argv[1:], environ)
    try:
        service, flags = service_of(tuple(argv), tuple(configs))
        # Without a service, other flags have no meaning.
        own, rest = _own_flags(flags) if service else (list(flags), [])
        (doctor,) = settings.load("doctor", (DoctorConfig,), own, environ, _ABOUT)
    except settings.SettingsError as error:
        print(f"baton doctor: {error}", file=sys.stderr)
        return EXIT_MISUSED
    config, findings = _config_of(service, configs, rest, environ)
    findings += asyncio.run(examine(targets_of(service, config), doctor.look_timeout))
    return _finish(service, findings, doctor, environ)


def _kubernetes(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs `baton doctor kubernetes`: examines a namespace instead of this machine."""
    from baton.services.doctor.cluster import command

    try:
        doctor, config = settings.load("doctor", (DoctorConfig, command.ClusterConfig), argv, environ, command.ABOUT)
        findings = command.findings_of(config, environ, doctor.look_timeout)
    except settings.SettingsError as error:
        print(f"baton doctor {_KUBERNETES}: {error}", file=sys.stderr)
        return EXIT_MISUSED
    return _finish(_KUBERNETES, findings, doctor, environ)


def _finish(service: str, findings: Sequence[Finding], doctor: DoctorConfig, environ: Mapping[str, str]) -> int:
    secrets = secrets_in(environ)
    print(_report(service, [_redacted(one, secrets) for one in findings], doctor))
    return EXIT_FAILED if any(one.level is Level.FAILED for one in findings) else EXIT_WELL


def _config_of(
    service: str, configs: Mapping[str, tuple[str, str]], flags: Sequence[str], environ: Mapping[str, str]
) -> tuple[Any, list[Finding]]:
    """Returns the config that the service would start with, or None with its errors."""
    if not service:
        return None, []
    module, name = configs[service]
    try:
        kind = getattr(importlib.import_module(module), name)
        config, _ = settings.load(service, (kind, ProcessConfig), flags, environ, _ABOUT)
    except settings.SettingsError as error:
        return None, [failed("settings", str(error), f"baton {service} --help lists what may be given")]
    except ImportError as error:
        return None, [failed("settings", f"{service} is not installed: {error}", extras.install_line(service))]
    return config, [ok("settings", f"flags and BATON_{service.upper()}_* variables fit together")]


def _own_flags(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the doctor's flags and the service's."""
    own: list[str] = []
    rest: list[str] = []
    names = {option.flag: option for option in settings.options_of("doctor", DoctorConfig)}
    waiting = iter(flags)
    for word in waiting:
        name = word.partition("=")[0]
        if word in ("--help", "-h", "--help-json"):
            own.append(word)
        elif name not in names:
            rest.append(word)
        elif names[name].kind is bool or "=" in word:
            own.append(word)
        else:
            own += [word, next(waiting, "")]
    return own, rest


def _redacted(finding: Finding, secrets: frozenset[str]) -> Finding:
    what = without_these(without_secrets(finding.what, keep_paths=True), secrets)
    return Finding(finding.topic, finding.level, what, without_these(finding.fix, secrets))


def _report(service: str, findings: Sequence[Finding], config: DoctorConfig) -> str:
    shown = [one for one in findings if not config.quiet or one.level is not Level.OK]
    counts = {level.value: sum(one.level is level for one in findings) for level in Level}
    if config.json:
        rows = [{**asdict(one), "level": one.level.value} for one in shown]
        return json.dumps({"service": service or None, "counts": counts, "findings": rows}, indent=1)
    lines = []
    for one in shown:
        lines.append(f"[{_MARKS[one.level]}] {one.topic:<12} {one.what}")
        if one.fix and one.level is not Level.OK:
            lines.append(f"{'':<22}-> {one.fix}")
    bad = counts[Level.FAILED.value]
    verdict = "nothing is wrong" if not bad else f"{bad} things do not work" if bad > 1 else "one thing does not work"
    return "\n".join([*lines, f"{verdict}; {counts['warning']} warnings, {counts['unknown']} not to be found out"])
