"""`baton drain`, `pause`, `resume`, `sleep`, `wake-up` and `reload`: one call of ControlService to one worker."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor

from baton.rpc.address import split_address
from baton.rpc.channel import Dial
from baton.rpc.errors import InvalidRequest, error_from_rpc
from baton.rpc.identity.identity import OPERATOR, WORKER
from baton.rpc.tls import settings as tls_settings
from baton.rpc.tls.credentials import Tls
from baton.rpc.tls.files import TlsFiles, tls_files
from baton.services import settings
from baton.v1 import control_pb2 as pb
from baton.v1 import control_pb2_grpc, types_pb2

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2

_EXTRA_SECONDS = 660.0  # for weights that are read
_RUNNING = {
    "abort": pb.RUNNING_REQUESTS_ABORT,
    "wait": pb.RUNNING_REQUESTS_WAIT,
    "keep": pb.RUNNING_REQUESTS_KEEP,
}


@dataclass(frozen=True, slots=True)
class OperateConfig:
    """The service to call and its credentials."""

    timeout: float = field(
        default=60.0,
        metadata={"help": "Seconds that running requests get. 0: a drain waits for all.", "minimum": 0.0},
    )
    tls_certificate: str = field(default="", metadata=tls_settings.CERTIFICATE)
    tls_key: str = field(default="", metadata=tls_settings.KEY)
    tls_ca: str = field(default="", metadata=tls_settings.CA)

    @property
    def tls(self) -> TlsFiles | None:
        """An operator's certificate; None: plain text. Raises InvalidRequest if some but not all files are set."""
        return tls_files(self.tls_certificate, self.tls_key, self.tls_ca)


@dataclass(frozen=True, slots=True)
class HaltConfig:
    """What happens to running requests."""

    mode: str = field(
        default="abort",
        metadata={"help": "Running requests: moved to other workers, awaited, or kept.", "choices": tuple(_RUNNING)},
    )


@dataclass(frozen=True, slots=True)
class SleepConfig:
    """The level of sleep."""

    level: int = field(
        default=1, metadata={"help": "1 frees the KV cache, 2 drops the weights too.", "minimum": 1, "maximum": 2}
    )


@dataclass(frozen=True, slots=True)
class ReloadConfig:
    """The weights to load."""

    model: str = field(
        default="",
        metadata={"help": "A folder on the worker, or a hub id. Empty: the one loaded last.", "metavar": "MODEL"},
    )


_PARTS: Mapping[str, tuple[pb.MemoryPart.ValueType, ...]] = {
    "all": (),
    "weights": (pb.MEMORY_PART_WEIGHTS,),
    "kv_cache": (pb.MEMORY_PART_KV_CACHE,),
}


@dataclass(frozen=True, slots=True)
class WakeConfig:
    """The flags of `baton wake-up`."""

    part: str = field(default="all", metadata={"help": "What wakes up; the rest sleeps on.", "choices": tuple(_PARTS)})


_ROLES = {
    "prefill": types_pb2.WORKER_ROLE_PREFILL,
    "decode": types_pb2.WORKER_ROLE_DECODE,
    "both": types_pb2.WORKER_ROLE_BOTH,
}


@dataclass(frozen=True, slots=True)
class RoleConfig:
    """The role to take."""

    role: str = field(metadata={"help": "What the worker computes for others from now on.", "choices": tuple(_ROLES)})


@dataclass(frozen=True, slots=True)
class Verb:
    """One command: ControlService's method, and its request from the flags' values."""

    method: str
    summary: str
    make: Callable[..., Any]
    configs: tuple[type, ...] = ()


def _ms(config: OperateConfig) -> int:
    return round(config.timeout * 1000)


VERBS: Mapping[str, Verb] = {
    "drain": Verb(
        "Drain",
        "Stops a worker from accepting requests; running ones end or move.",
        lambda c: pb.DrainRequest(timeout_ms=_ms(c)),
    ),
    "pause": Verb(
        "Pause",
        "A worker stops between two steps.",
        lambda c, h: pb.PauseRequest(running_requests=_RUNNING[h.mode], timeout_ms=_ms(c)),
        (HaltConfig,),
    ),
    "resume": Verb("Resume", "Resumes a worker after a pause or drain.", lambda c: pb.ResumeRequest()),
    "sleep": Verb(
        "Sleep",
        "A worker frees its memory.",
        lambda c, h, s: pb.SleepRequest(level=s.level, running_requests=_RUNNING[h.mode], timeout_ms=_ms(c)),
        (HaltConfig, SleepConfig),
    ),
    "wake-up": Verb(
        "WakeUp", "A worker takes its memory back.", lambda c, w: pb.WakeUpRequest(parts=_PARTS[w.part]), (WakeConfig,)
    ),
    "reload": Verb(
        "ReloadWeights",
        "A worker loads weights in place.",
        lambda c, h, r: pb.ReloadWeightsRequest(model=r.model, running_requests=_RUNNING[h.mode], timeout_ms=_ms(c)),
        (HaltConfig, ReloadConfig),
    ),
    "switch-role": Verb(
        "SwitchRole",
        "A worker takes another role.",
        lambda c, h, r: pb.SwitchRoleRequest(role=_ROLES[r.role], running_requests=_RUNNING[h.mode], timeout_ms=_ms(c)),
        (HaltConfig, RoleConfig),
    ),
}


def main(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a verb: `baton drain HOST:PORT [flags]`. Prints the answer. Returns the process's exit code."""
    verb = VERBS[name]
    address, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("", argv)
    try:
        values = settings.load(name, (OperateConfig, *verb.configs), flags, environ, f"{verb.summary} {_USAGE}")
        if not address:
            print(f"baton {name}: give the worker's address: baton {name} HOST:PORT", file=sys.stderr)
            return EXIT_MISCONFIGURED
        split_address(address, "address")
        config: OperateConfig = values[0]
        dial = Dial(Tls(config.tls, OPERATOR) if config.tls else None, WORKER)
    except (settings.SettingsError, InvalidRequest) as error:
        print(f"baton {name}: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    return asyncio.run(_call(address, dial, verb.method, verb.make(*values), config.timeout + _EXTRA_SECONDS))


_USAGE = "The worker's address comes first: HOST:PORT."


async def _call(address: str, dial: Dial, method: str, request: Any, seconds: float) -> int:
    async with dial(address) as channel:
        try:
            answer = await getattr(control_pb2_grpc.ControlServiceStub(channel), method)(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            print(f"{address}: {error_from_rpc(error, 'the worker').message}", file=sys.stderr)
            return EXIT_FAILED
    for one in answer.DESCRIPTOR.fields:
        print(f"{one.name}: {_shown(one, getattr(answer, one.name))}")
    return EXIT_OK


def _shown(field: FieldDescriptor, value: Any) -> object:
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value.hex() if isinstance(value, bytes) else value
