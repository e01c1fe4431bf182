"""One row of the kernel benchmark: an op, a shape, its inputs, its oracle, and the times of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench.kernels.timing import Launch
from torch import Tensor

BYTES = "TB/s"
FLOPS = "TFLOP/s"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that determine the shapes of kernels."""

    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """Returns the sizes in a Hugging Face config."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            hidden=hidden,
            num_q_heads=heads,
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim", hidden // heads),
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
        )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case's launches on inputs on the device."""

    launches: Sequence[Launch]  # one per set of inputs
    error: Callable[[], float]  # error of the first set, compared with the oracle
    peer: Sequence[Launch] = ()  # the peer on the same inputs, if it can run here
    tolerance: float = 1e-2


@dataclass(frozen=True, slots=True)
class Case:
    """One row."""

    op: str
    shape: str
    unit: str  # BYTES or FLOPS
    work: float  # bytes or operations that one launch needs at least
    prepare: Callable[[torch.device], Prepared]
    peer: str = ""
    peer_us: float | None = None  # as published


def relative_error(out: Tensor, expected: Tensor) -> float:
    """|out - expected| / |expected|."""
    wide = expected.double()
    return float((out.double() - wide).norm() / wide.norm())
