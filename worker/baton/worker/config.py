"""The settings of a worker, and which values are valid together. Knows no flag parser and no environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton.rpc.address import split_address, split_addresses
from baton.rpc.errors import InvalidRequest, Unsupported
from baton.rpc.model_names import default_name
from baton.rpc.tls.files import TlsFiles, tls_files
from baton.worker.config_adapters import AdapterSettings
from baton.worker.config_overrides import parse_overrides
from baton.worker.kv_events_settings import KvEventsSettings, parse_kv_events
from baton.worker.speculation_settings import ON_CPUS, SpeculationSettings, parse_speculation
from baton.worker.transport_kinds import parse_order

AUTO_MODEL_LEN = -1


@dataclass(frozen=True, slots=True)
class WorkerConfig(AdapterSettings):
    """The settings of one worker: its model, its addresses, its limits."""

    max_model_len: int = field(
        default=0,
        metadata={
            "help": "Tokens of prompt and output together. 0: the model's own limit. auto: the most that the KV pool "
            "holds, up to that limit.",
            "minimum": 0,
            "words": {"auto": AUTO_MODEL_LEN},
        },
    )
    max_num_requests: int = field(
        default=0,
        metadata={
            "help": "Requests in the running batch. 0: 1024 on GPUs of 70 GiB or more, A100 excepted; 256 elsewhere.",
            "minimum": 0,
            "maximum": 65536,
        },
    )
    max_num_batched_tokens: int = field(
        default=0,
        metadata={
            "help": "Tokens a step computes at most. 0: 8192 on GPUs of 70 GiB or more, A100 excepted; 2048 elsewhere.",
            "minimum": 0,
            "maximum": 1048576,
        },
    )
    max_background_prefill_tokens: int = field(
        default=64,
        metadata={
            "help": "Prompt tokens of one step for requests with a priority above 0, as batches have, while others use "
            "the worker. They also get an eighth of the rows then. 0: no limit.",
            "minimum": 0,
            "maximum": 1048576,
        },
    )
    max_shared_prefill_tokens: int = field(
        default=256,
        metadata={
            "help": "Prompt tokens of one step while several tenants use the worker, so that none waits for another's "
            "long step. 0: no limit.",
            "minimum": 0,
            "maximum": 1048576,
        },
    )
    long_prefill_token_threshold: int = field(
        default=0,
        metadata={
            "help": "Tokens of one prompt in a step; prompts with more uncomputed ones are long. 0: no limit, or 4 % "
            "of the model's length with --max-num-partial-prefills above 1.",
            "minimum": 0,
            "maximum": 1048576,
        },
    )
    max_num_partial_prefills: int = field(
        default=0,
        metadata={
            "help": "Prompts that are partly computed at a time. 0: no limit.",
            "minimum": 0,
            "maximum": 65536,
        },
    )
    max_long_partial_prefills: int = field(
        default=0,
        metadata={
            "help": "Long prompts that are partly computed at a time; short ones pass the others. 0: no limit.",
            "minimum": 0,
            "maximum": 65536,
        },
    )
    prefix_caching: bool = field(
        default=True,
        metadata={"help": "Keep computed KV blocks, and find them again for prompts that begin alike."},
    )
    dummy_kv: bool = field(
        default=False,
        metadata={
            "help": "For benchmarks of decoding alone: prompts count as computed, so that outputs mean nothing. Needs "
            "prefix_caching=false and role=both.",
        },
    )
    max_queue: int = field(
        default=1024, metadata={"help": "Requests that may wait; more are refused.", "minimum": 1, "maximum": 1048576}
    )

    min_remote_prefill_tokens: int = field(
        default=64,
        metadata={"help": "Uncached prompt tokens below which a prompt is always computed here.", "minimum": 1},
    )
    lease_ms: int = field(
        default=1000,
        metadata={"help": "Silence after which a KV transfer's lease ends.", "minimum": 100, "maximum": 60000},
    )
    verify_transfers: bool = field(default=False, metadata={"help": "Checksum every piece of transferred KV."})
    kv_load_failure_policy: str = field(
        default="recompute",
        metadata={
            "help": "What happens to a prompt whose KV does not arrive: it is computed here, or the request fails, so "
            "that another worker gets it.",
            "choices": ("recompute", "fail"),
        },
    )

    drain_timeout: float = field(
        default=30.0, metadata={"help": "Seconds that running requests get at shutdown.", "minimum": 0.0}
    )
    step_timeout: float = field(
        default=120.0,
        metadata={"help": "Seconds without a sign from the engine until it counts as hung. 0: never.", "minimum": 0.0},
    )
    engine_silence_ms: int = field(
        default=160,
        metadata={
            "help": "Milliseconds without an answer of the engine's process, while a gateway receives nothing, until "
            "a stopped process is killed. A long step does not count. 0: never.",
            "minimum": 0,
            "maximum": 60000,
        },
    )
    step_stall_ms: int = field(
        default=250,
        metadata={
            "help": "Milliseconds that any step may take. Beyond them, and ten times what steps of its shape take, "
            "the device counts as stalled, and streams leave until the step ends. 0: never.",
            "minimum": 0,
            "maximum": 600_000,
        },
    )
    sim_slowness: float = field(
        default=1.0, metadata={"help": "Factor on the simulator's step times. 0: steps take no time.", "minimum": 0.0}
    )
    sim_step_seconds: float = field(
        default=4.4e-3, metadata={"help": "A simulated step's seconds, before what is in it.", "minimum": 0.0}
    )
    sim_prefill_token_seconds: float = field(
        default=26e-6, metadata={"help": "Added for each prompt token of a simulated step.", "minimum": 0.0}
    )
    sim_decode_request_seconds: float = field(
        default=12e-6, metadata={"help": "Added for each decoding request of a simulated step.", "minimum": 0.0}
    )
    sim_eos_every: int = field(
        default=0, metadata={"help": "Tokens between simulated end-of-sequence tokens. 0: never.", "minimum": 0}
    )
    sim_step_tokens: int = field(
        default=1,
        metadata={"help": "Tokens that a simulated request gets in a step, at most.", "minimum": 1, "maximum": 64},
    )
    sim_acceptance: float = field(
        default=0.7,
        metadata={
            "help": "Chance of each token that --speculative-config guesses under executor=sim, whatever its method.",
            "minimum": 0.0,
            "maximum": 1.0,
        },
    )
    sim_adapter_seconds: float = field(
        default=0.1, metadata={"help": "A simulated read of an adapter from files, in seconds.", "minimum": 0.0}
    )
    sim_stall_file: str = field(
        default="",
        metadata={"help": "While it exists, no simulated step ends. Empty: none.", "metavar": "FILE"},
    )
    profile_dir: str = field(
        default="",
        metadata={"help": "Where ControlService.StartProfile writes its traces. Empty: refused.", "metavar": "FOLDER"},
    )
    trace_steps: str = field(
        default="",
        metadata={"help": "A JSON line for each engine step, and a summary at exit. Empty: off.", "metavar": "FILE"},
    )
    log_stats_interval: float = field(
        default=10.0,
        metadata={
            "help": "Seconds between two log lines of throughput, load and cache, while there are requests. 0: none.",
            "minimum": 0.0,
        },
    )
    nvtx: bool = field(
        default=False, metadata={"help": "NVTX ranges around steps, for Nsight Systems. Needs a PyTorch with CUDA."}
    )
    mfu_metrics: bool = field(
        default=False, metadata={"help": "Count the estimated FLOPs and bytes of steps, from the model's shapes."}
    )
    kv_cache_metrics_sample: float = field(
        default=0.0,
        metadata={
            "help": "Part of the cached blocks whose lifetime and gaps are measured. 0: none.",
            "minimum": 0.0,
            "maximum": 1.0,
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
    engine_process: bool = field(
        default=True, metadata={"help": "Run the engine in a process of its own. Only the simulator can do without."}
    )

    @property
    def tls(self) -> TlsFiles | None:
        """The TLS files of all services; None: plain text. Raises InvalidRequest if some are missing."""
        return tls_files(self.tls_certificate, self.tls_key, self.tls_ca)

    @property
    def config_overrides(self) -> dict[str, Any]:
        """The overrides of config.json. Raises InvalidRequest if they are no object."""
        return parse_overrides(self.hf_overrides)

    @property
    def kv_events(self) -> KvEventsSettings | None:
        """Where KV events are published. Raises InvalidRequest for a wrong key."""
        return parse_kv_events(self.kv_events_config)

    @property
    def speculation(self) -> SpeculationSettings | None:
        """How tokens are guessed; None: they are not. Raises InvalidRequest for a wrong key."""
        return parse_speculation(self.speculative_config, self.plugins)

    @property
    def invariant(self) -> bool:
        """Whether a token's bits do not depend on its batch: verified drafts must not change them either."""
        return self.batch_invariant or self.speculation is not None

    def validate(self) -> None:
        """Raises InvalidRequest where fields contradict each other."""
        _ = self.tls, self.config_overrides, self.kv_events
        if self.executor == "cuda" and self.speculation is not None and self.speculation.method in ON_CPUS:
            raise Unsupported(
                f"speculative_config: method {self.speculation.method!r} needs executor=cpu; give ngram, suffix or a "
                "plugin",
                field="speculative_config",
            )
        self.check_adapters()
        if self.enable_lora and self.invariant:
            raise InvalidRequest(
                "enable_lora=true needs batch_invariant=false and no speculation: the update of a row is summed in an "
                "order that depends on the other rows of its adapter",
                field="enable_lora",
            )
        if self.executor != "sim" and not self.engine_process:
            raise InvalidRequest(
                f"engine_process=false needs executor=sim, got executor={self.executor}", field="engine_process"
            )
        if self.executor == "sim" and self.batch_invariant:
            raise InvalidRequest(
                "batch_invariant=True needs executor=cpu or cuda, got executor=sim", field="batch_invariant"
            )
        if self.executor == "sim" and self.kv_cache_dtype != "auto":
            raise InvalidRequest(
                f"kv_cache_dtype={self.kv_cache_dtype} needs executor=cpu or cuda, got executor=sim",
                field="kv_cache_dtype",
            )
        if self.calculate_kv_scales and self.kv_cache_dtype == "auto":
            raise InvalidRequest(
                "calculate_kv_scales=true needs kv_cache_dtype=fp8_e4m3: other KV has no scales",
                field="calculate_kv_scales",
            )
        if self.executor == "sim" and self.logprobs_mode != "raw_logprobs":
            raise InvalidRequest(
                f"logprobs_mode={self.logprobs_mode} needs executor=cpu or cuda, got executor=sim",
                field="logprobs_mode",
            )
        if self.num_blocks and self.kv_cache_memory:
            raise InvalidRequest(
                f"num_blocks={self.num_blocks} and kv_cache_memory={self.kv_cache_memory} exclude each other: set one",
                field="num_blocks",
            )
        if self.dummy_kv and (self.prefix_caching or self.role != "both"):
            raise InvalidRequest(
                f"dummy_kv=true needs prefix_caching=false and role=both, got prefix_caching={self.prefix_caching} and "
                f"role={self.role}: nobody may find or receive KV that was not computed",
                field="dummy_kv",
            )
        if self.host_cache_min_uses > 1 and not self.host_cache_gb:
            raise InvalidRequest(
                f"host_cache_min_uses={self.host_cache_min_uses} needs host memory: set host_cache_gb too",
                field="host_cache_min_uses",
            )
        self._check_disk_cache()
        if self.host_cache_eviction_policy != "lru" and not self.host_cache_gb:
            raise InvalidRequest(
                f"host_cache_eviction_policy={self.host_cache_eviction_policy} needs host memory: set host_cache_gb "
                "too",
                field="host_cache_eviction_policy",
            )
        if 0 < self.max_num_batched_tokens < self.max_num_requests:
            raise InvalidRequest(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least"
                f" max_num_requests={self.max_num_requests}",
                field="max_num_batched_tokens",
            )
        parse_order(self.transports, self.plugins)
        for name in ("listen", "transfer_listen", "metrics_listen"):
            value: str = getattr(self, name)
            if value or name == "listen":
                split_address(value, name)
        split_addresses(self.kvstore, "kvstore")

    def _check_disk_cache(self) -> None:
        if bool(self.disk_cache_dir) != bool(self.disk_cache_gb):
            raise InvalidRequest(
                f"disk_cache_dir={self.disk_cache_dir!r} and disk_cache_gb={self.disk_cache_gb:g} go together: set "
                "both, or neither",
                field="disk_cache_dir",
            )
        if self.disk_cache_dir and not self.host_cache_gb:
            raise InvalidRequest(
                f"disk_cache_dir={self.disk_cache_dir!r} is below host memory: set host_cache_gb too",
                field="disk_cache_dir",
            )

    def num_host_blocks(self, bytes_per_block: int) -> int:
        """Blocks that host_cache_gb holds. Raises InvalidRequest where that is not one."""
        num_blocks = int(self.host_cache_gb * 1e9) // bytes_per_block
        if self.host_cache_gb and not num_blocks:
            raise InvalidRequest(
                f"host_cache_gb={self.host_cache_gb:g} holds no block: it must be at least {bytes_per_block / 1e9:g},"
                " or 0",
                field="host_cache_gb",
            )
        return num_blocks

    @property
    def model_name(self) -> str:
        """The name of the model for clients."""
        return self.served_model_name or default_name(self.model)
