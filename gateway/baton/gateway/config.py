"""The gateway's settings."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.access.settings import FROM_REDIS, AccessSettings
from baton.gateway.config_storage import StorageSettings
from baton.gateway.http.cors import check_origins
from baton.gateway.mcp.settings import McpSettings
from baton.gateway.models.generation_defaults import GenerationFlags, parse_overrides
from baton.rpc.address import is_loopback
from baton.rpc.errors import InvalidRequest
from baton.rpc.model_names import check_names
from baton.rpc.server.hosts import check_allowed_hosts
from baton.rpc.tls.files import TlsFiles, edge_files, tls_files

_UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GatewayConfig(StorageSettings):
    """Settings of the gateway. Flags, environment variables and --help are derived from the fields."""

    max_streams: int = field(
        default=8192,
        metadata={"help": "Generations in flight, streaming or not; more are answered with 429.", "minimum": 1},
    )
    api_keys: str = field(
        default="",
        metadata={
            "help": "Who may use this gateway: a TOML or JSON file of keys and tenants, or redis, for those in "
            "redis_url. Empty: any client may use it, so it listens on loopback only.",
            "metavar": "PATH|redis",
        },
    )
    allow_anonymous: bool = field(
        default=False,
        metadata={"help": "Listen on any address without api_keys: every client that reaches this gateway may use it."},
    )
    cors_origins: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Origins (https://app.example.com) whose pages browsers let read the REST API's answers; *: all. "
            "Empty: none.",
            "metavar": "ORIGIN,..",
        },
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Host names that the REST API is reached by, beside IP addresses and localhost; *.NAME: its "
            "subdomains, *: every name. A gateway without api_keys refuses others; one with them only where this is "
            "set.",
            "metavar": "NAME,..",
        },
    )
    ext_authz_listen: str = field(
        default="",
        metadata={
            "help": "Address at which Envoy asks whether a request may pass (envoy.service.auth.v3.Authorization); "
            "with tls_certificate, only an Envoy of this fleet may. Empty: nowhere.",
            "metavar": "HOST:PORT",
        },
    )
    processes: int = field(
        default=1,
        metadata={
            "help": "Processes that share the addresses; each has limits of connections and streams of its own.",
            "minimum": 1,
            "maximum": 256,
        },
    )
    metrics_folder: str = field(
        default="",
        metadata={
            "help": "Where the processes of one gateway read each other's metrics; --processes sets it.",
            "metavar": "FOLDER",
        },
    )
    limit_replicas: int = field(
        default=1,
        metadata={
            "help": "Gateways that share tenants' limits: where Redis does not decide, each enforces its part.",
            "minimum": 1,
            "maximum": 4096,
        },
    )
    limit_timeout_ms: float = field(
        default=50.0,
        metadata={"help": "How long Redis may take to decide a request's limits.", "minimum": 1, "maximum": 5000},
    )
    redis_url: str = field(
        default="",
        metadata={
            "help": "Redis that all gateways share: responses (/v1/responses), tenants' limits, API keys. Empty: this "
            "process's memory.",
            "metavar": "URL",
        },
    )
    resumable_streams: bool = field(
        default=False,
        metadata={
            "help": "Streams that their clients name (X-Request-Id) can be resumed at any gateway of redis_url within "
            "a minute, by the id of the last event (Last-Event-ID)."
        },
    )
    otlp_endpoint: str = field(
        default="",
        metadata={
            "help": "OpenTelemetry collector of traced requests' spans: http://HOST:PORT for OTLP over gRPC, with "
            "/v1/traces for OTLP over HTTP. Empty: none.",
            "metavar": "URL",
        },
    )
    trace_sampling: float = field(
        default=0.0,
        metadata={
            "help": "The part of the requests without a trace context (traceparent) that are traced. Clients that "
            "send one decide themselves.",
            "minimum": 0.0,
            "maximum": 1.0,
        },
    )
    no_playground: bool = field(default=False, metadata={"help": "Do not serve the playground, the chat page at /."})
    log_requests: bool = field(
        default=False, metadata={"help": "Log every request's prompt and parameters. The log then has clients' texts."}
    )
    log_outputs: bool = field(
        default=False, metadata={"help": "Log every request's output. The log then has texts for clients."}
    )
    max_log_len: int = field(
        default=1024,
        metadata={
            "help": "The most characters of a text, and token ids, in a line of log_requests and log_outputs.",
            "minimum": 0,
            "maximum": 1 << 20,
        },
    )
    enable_per_request_metrics: bool = field(
        default=False,
        metadata={"help": "Answers of chats and completions, and the usage of their streams, have their times."},
    )
    no_docs: bool = field(
        default=False, metadata={"help": "Do not serve /docs, /redoc and /openapi.json, the description of the API."}
    )
    tokens_only: bool = field(
        default=False,
        metadata={
            "help": "Serve token ids in and out alone (/inference/v1/generate, /abort_requests), beside the models and "
            "the system's routes: no chats, no texts and no playground."
        },
    )
    no_console: bool = field(default=False, metadata={"help": "Do not serve the console, the fleet at /console."})
    no_access_log: bool = field(
        default=False, metadata={"help": "Do not log a line for each answer, of REST and of gRPC."}
    )
    max_connections: int = field(
        default=16384, metadata={"help": "Open REST connections; more are answered with 503.", "minimum": 1}
    )
    max_body_bytes: int = field(default=16 << 20, metadata={"help": "Largest request body, in bytes.", "minimum": 1024})
    max_header_bytes: int = field(
        default=32 << 10, metadata={"help": "Largest request line and headers, in bytes.", "minimum": 1024}
    )
    header_timeout: float = field(
        default=10.0, metadata={"help": "Seconds for a request's headers to arrive.", "minimum": 0.1}
    )
    body_timeout: float = field(
        default=30.0,
        metadata={"help": "Seconds for a request's body to arrive; large ones get more, at 64 KiB/s.", "minimum": 0.1},
    )
    idle_timeout: float = field(
        default=75.0, metadata={"help": "Seconds that a connection stays open between requests.", "minimum": 0.1}
    )
    stall_timeout: float = field(
        default=120.0,
        metadata={"help": "Seconds after which a client that reads nothing of its answer is cut off.", "minimum": 0.1},
    )
    request_timeout: float = field(
        default=3600.0, metadata={"help": "Seconds that one generation may take. 0: no limit.", "minimum": 0}
    )
    drain_timeout: float = field(
        default=30.0,
        metadata={
            "help": "Seconds that running requests get after SIGTERM; then they end with an error.",
            "minimum": 0,
        },
    )
    worker_silence_ms: int = field(
        default=300,
        metadata={
            "help": "Milliseconds without a message after which a worker's requests continue on another one; a "
            "worker sends heartbeats during every step. 0: never.",
            "minimum": 0,
            "maximum": 600_000,
        },
    )

    @property
    def template_variables(self) -> dict[str, Any]:
        """Returns default_chat_template_kwargs. Raises InvalidRequest if it is not a JSON object."""
        text, field = self.default_chat_template_kwargs, "default_chat_template_kwargs"
        try:
            value = json.loads(text) if text else {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field} is not valid JSON: {error}", field=field) from error
        if not isinstance(value, dict):
            raise InvalidRequest(f"{field} is {text}; it must be a JSON object, such as {{}}", field=field)
        return value

    @property
    def mcp(self) -> McpSettings:
        """Returns the settings of MCP servers."""
        return McpSettings(
            self.tool_server,
            self.allowed_mcp_servers,
            self.mcp_timeout,
            self.max_tool_rounds,
            self.max_tool_output_bytes,
        )

    @property
    def most_logprobs(self) -> int:
        """Returns max_logprobs as a number to compare with."""
        return _UNLIMITED if self.max_logprobs == -1 else self.max_logprobs

    @property
    def sampling_defaults(self) -> GenerationFlags:
        """Returns the settings of sampling defaults. Raises InvalidRequest for wrong overrides."""
        return GenerationFlags(self.generation_config, parse_overrides(self.override_generation_config))

    @property
    def tls(self) -> TlsFiles | None:
        """Returns the TLS files for connections between services, or None for plain text.

        Raises InvalidRequest for an incomplete set.
        """
        return tls_files(self.tls_certificate, self.tls_key, self.tls_ca)

    @property
    def rest_tls(self) -> TlsFiles | None:
        """Returns the TLS files of the REST API, or None for plain text.

        Raises InvalidRequest for an incomplete set.
        """
        return edge_files(self.rest_tls_certificate, self.rest_tls_key, "rest_tls", self.rest_tls_client_ca)

    @property
    def grpc_tls(self) -> TlsFiles | None:
        """Returns the TLS files of the public gRPC API, or None for plain text.

        Raises InvalidRequest for an incomplete set.
        """
        return edge_files(self.grpc_tls_certificate, self.grpc_tls_key, "grpc_tls", self.grpc_tls_client_ca)

    def validate(self) -> None:
        """Raises InvalidRequest for values that must be parsed or that contradict each other."""
        _ = self.tls, self.rest_tls, self.grpc_tls
        if self.processes > 1 and self.batch_store and not self.redis_url:
            raise InvalidRequest(
                f"processes={self.processes} with batch_store needs redis_url: they share files and batches",
                field="redis_url",
            )
        for name, address in (("rest_listen", self.rest_listen), ("grpc_listen", self.grpc_listen)):
            _check_address(name, address)
        for address in self.router:
            _check_address("router", address)
        _ = self.template_variables, self.sampling_defaults
        check_names(self.served_model_name)
        check_origins(self.cors_origins)
        check_allowed_hosts(self.allowed_hosts)
        self.mcp.validate()
        self._check_access()
        if self.resumable_streams and not self.redis_url:
            raise InvalidRequest("resumable_streams needs redis_url; give the Redis of all gateways", field="redis_url")
        self._check_ext_authz()
        if not self.router:
            raise InvalidRequest("router is empty; give at least one host:port", field="router")
        if self.rest_listen == self.grpc_listen and not self.rest_listen.endswith(":0"):
            raise InvalidRequest(
                f"rest_listen and grpc_listen are both {self.rest_listen}; give two addresses", field="grpc_listen"
            )

    @property
    def access(self) -> AccessSettings:
        """Returns the settings of access control."""
        return AccessSettings(self.api_keys, self.redis_url, self.limit_replicas, self.limit_timeout_ms / 1000)

    def _check_access(self) -> None:
        if self.api_keys == FROM_REDIS and not self.redis_url:
            raise InvalidRequest("api_keys=redis needs redis_url; give the Redis that holds them", field="redis_url")
        if self.api_keys or self.allow_anonymous:
            return
        for name, address in (("rest_listen", self.rest_listen), ("grpc_listen", self.grpc_listen)):
            if not is_loopback(address.rpartition(":")[0]):
                raise InvalidRequest(
                    f"{name}={address} can be reached from elsewhere, and there are no API keys: give api_keys (`baton "
                    "keys create` makes one), listen on 127.0.0.1, or set allow_anonymous to admit every client",
                    field=name,
                )

    def _check_ext_authz(self) -> None:
        address = self.ext_authz_listen
        if not address:
            return
        _check_address("ext_authz_listen", address)
        if address in (self.rest_listen, self.grpc_listen) and not address.endswith(":0"):
            message = f"ext_authz_listen={address} is the address of another port; give a different one"
            raise InvalidRequest(message, field="ext_authz_listen")
        if not self.api_keys:
            raise InvalidRequest(
                "ext_authz_listen without api_keys would let every client through Envoy; give api_keys",
                field="ext_authz_listen",
            )


def _check_address(name: str, address: str) -> None:
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidRequest(f"{name}: {address!r} is not allowed; give host:port, port 0 to 65535", field=name)
