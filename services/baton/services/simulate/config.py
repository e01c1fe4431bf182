"""The settings of a simulation. Knows no flag parser and no environment."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.rpc.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class SimulateConfig:
    """A sweep over loads, or one run of a trace."""

    workload: str = field(
        default="chat",
        metadata={
            "help": "poisson, bursty, chat, agents, rag or adapters; or a trace: Mooncake's .jsonl, or a .csv with"
            " time, input_length, output_length."
        },
    )
    policies: tuple[str, ...] = field(
        default=("baton",),
        metadata={
            "help": "baton, baton-shed (with the router's --shed), baton-adapter-blind, or module:attribute of other "
            "policies.",
            "metavar": "NAME,..",
        },
    )
    workers: int = field(
        default=8,
        metadata={"help": "Workers, each for both phases, unless roles are given.", "minimum": 1, "maximum": 4096},
    )
    prefill_workers: int = field(default=0, metadata={"help": "Workers that only prefill.", "minimum": 0})
    decode_workers: int = field(default=0, metadata={"help": "Workers that prefill for no other.", "minimum": 0})
    loads: tuple[str, ...] = field(
        default=("0.3", "0.5", "0.7", "0.8", "0.9", "1.0", "1.1", "1.2"),
        metadata={
            "help": "Offered loads; 1: what the fleet could serve at best. Of a trace: how many times as fast.",
            "metavar": "X,..",
        },
    )
    rate: float = field(default=0.0, metadata={"help": "Requests a second, instead of loads.", "minimum": 0.0})
    seconds: float = field(
        default=120.0, metadata={"help": "Simulated seconds of arrivals. 0, of a trace: all of it.", "minimum": 0.0}
    )
    max_requests: int = field(default=0, metadata={"help": "Of a trace at most. 0: all.", "minimum": 0})
    seed: int = field(default=0, metadata={"help": "Equal seeds give equal runs, bit by bit."})
    ttft_limit: float = field(default=1.0, metadata={"help": "Seconds to the first token of a good request."})
    ttft_limit_per_token: float = field(default=0.0, metadata={"help": "Added to it for each prompt token."})
    itl_limit: float = field(default=0.05, metadata={"help": "Mean seconds between tokens of a good request."})
    block_size: int = field(default=64, metadata={"help": "Tokens a KV block.", "minimum": 1, "maximum": 1024})
    num_blocks: int = field(default=12_288, metadata={"help": "KV blocks of each worker.", "minimum": 8})
    state_blocks: int = field(
        default=0,
        metadata={"help": "KV blocks that a state of recurrent layers takes. 0: the model has none.", "minimum": 0},
    )
    drafts: int = field(
        default=0,
        metadata={
            "help": "Tokens that a worker guesses for a request in a step, at most. 0: no speculation.",
            "minimum": 0,
            "maximum": 64,
        },
    )
    acceptance: float = field(
        default=0.7, metadata={"help": "Chance of each guessed token.", "minimum": 0.0, "maximum": 1.0}
    )
    max_num_requests: int = field(default=256, metadata={"help": "Requests in a worker's batch.", "minimum": 1})
    max_num_batched_tokens: int = field(default=8192, metadata={"help": "Tokens of one step at most.", "minimum": 1})
    max_queue: int = field(default=1024, metadata={"help": "Requests that may wait at a worker.", "minimum": 1})
    max_queue_depth: int = field(default=256, metadata={"help": "As the router's flag.", "minimum": 1})
    calibration: str = field(
        default="",
        metadata={"help": "JSON of `baton bench engine`: the device's speeds. Empty: an H200's.", "metavar": "FILE"},
    )
    calibration_model: str = field(default="", metadata={"help": "Which of its models. Empty: the first."})
    transfer_bytes_per_second: float = field(
        default=50e9, metadata={"help": "Of one worker's port, each way.", "minimum": 1.0}
    )
    kv_bytes_per_token: int = field(default=131_072, metadata={"help": "Of all layers.", "minimum": 32})
    jobs: int = field(default=0, metadata={"help": "Processes. 0: one a core.", "minimum": 0})
    json: str = field(default="", metadata={"help": "File for all figures.", "metavar": "FILE"})
    plot: str = field(default="", metadata={"help": "File for the curves, as PNG.", "metavar": "FILE"})
    chaos: int | None = field(
        default=None,
        metadata={"help": "Run faults of this seed instead, and report them.", "metavar": "SEED"},
    )
    chaos_seeds: int = field(default=1, metadata={"help": "With --chaos: number of seeds from it on.", "minimum": 1})
    chaos_seconds: float = field(
        default=5.0, metadata={"help": "With --chaos: simulated seconds of a seed's traffic.", "minimum": 3.0}
    )

    def validate(self) -> None:
        """Raises InvalidRequest for values that cannot be."""
        for text in self.loads:
            try:
                is_wrong = not 0 < float(text) < 1000
            except ValueError:
                is_wrong = True
            if is_wrong:
                raise InvalidRequest(f"loads has {text!r}; give numbers above 0", field="loads")
        if not self.loads:
            raise InvalidRequest("loads is empty; give at least one number", field="loads")
        if self.max_num_batched_tokens < self.max_num_requests:
            raise InvalidRequest(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least"
                f" max_num_requests={self.max_num_requests}",
                field="max_num_batched_tokens",
            )

    @property
    def roles(self) -> tuple[str, ...]:
        """One role for each worker."""
        apart = ("prefill",) * self.prefill_workers + ("decode",) * self.decode_workers
        return apart if self.prefill_workers or self.decode_workers else ("both",) * self.workers
