"""The names of experts' tensors in a checkpoint. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of experts' tensors in a checkpoint. A name with {} is of one expert, one without of all, stacked."""

    gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")  # or one, fused
    down: str = "mlp.experts.{}.down_proj.weight"
    gate_up_bias: tuple[str, ...] = ()
    down_bias: str = ""
    transposed: bool = False  # matrices are [in_features, out_features]
    interleaved: bool = False  # gates and ups alternate; else gates come first
    other: ExpertNames | None = None  # names in other checkpoints
