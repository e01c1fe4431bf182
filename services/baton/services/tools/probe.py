"""`baton probe`: one question to a service's gRPC health, for probes that must show a certificate."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.address import split_address
from baton.rpc.channel import Dial
from baton.rpc.errors import InvalidRequest
from baton.rpc.identity.identity import SERVICES
from baton.rpc.tls import settings as tls_settings
from baton.rpc.tls.credentials import Tls
from baton.rpc.tls.files import TlsFiles, tls_files
from baton.services import settings

EXIT_SERVING = 0
EXIT_NOT_SERVING = 1
EXIT_MISCONFIGURED = 2


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """The settings of `baton probe`."""

    address: str = field(metadata={"help": "Address to probe.", "metavar": "HOST:PORT"})
    service: str = field(
        default="",
        metadata={
            "help": "A name of grpc.health.v1. Empty: whether work is taken; liveness: whether the process answers.",
            "metavar": "NAME",
        },
    )
    of: str = field(
        default="",
        metadata={"help": "Which service it is, and whose certificate is shown.", "choices": ("", *SERVICES)},
    )
    tls_certificate: str = field(default="", metadata=tls_settings.CERTIFICATE)
    tls_key: str = field(default="", metadata=tls_settings.KEY)
    tls_ca: str = field(default="", metadata=tls_settings.CA)
    timeout: float = field(default=3.0, metadata={"help": "Seconds that the answer may take.", "minimum": 0.1})

    @property
    def tls(self) -> TlsFiles | None:
        """The certificate files; None: plain text. Raises InvalidRequest if some but not all are set."""
        return tls_files(self.tls_certificate, self.tls_key, self.tls_ca)

    def validate(self) -> None:
        """Raises InvalidRequest where fields contradict each other."""
        split_address(self.address, "address")
        if self.tls and not self.of:
            raise InvalidRequest(f"tls_certificate needs of: one of {', '.join(SERVICES)}", field="of")


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs the probe. Returns 0: SERVING; 1: anything else, with a line on standard error; 2: a wrong setting."""
    try:
        (config,) = settings.load("probe", (ProbeConfig,), argv, environ, "Asks a service's gRPC health once.")
        dial = Dial(Tls(config.tls, config.of), config.of) if config.tls else Dial()
    except settings.SettingsError as error:
        print(f"baton probe: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    except InvalidRequest as error:
        print(f"baton probe: {error.message}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    problem = asyncio.run(_ask(config, dial))
    if problem:
        print(f"baton probe: {config.address}: {problem}", file=sys.stderr)
    return EXIT_NOT_SERVING if problem else EXIT_SERVING


async def _ask(config: ProbeConfig, dial: Dial) -> str:
    """Returns what is wrong; empty: SERVING."""
    async with dial(config.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
        try:
            answer = await check(health_pb2.HealthCheckRequest(service=config.service), timeout=config.timeout)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"{health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"
