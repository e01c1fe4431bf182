"""The description of routers and of the gates of experts. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# sparsemixer: softmax over the logits close to the largest, for one expert after the other.
Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"]


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The mapping from logits to a token's experts and their weights."""

    num_experts: int
    top_k: int
    score: Score = "softmax"
    scores_chosen: bool = False  # of the chosen experts' logits only, after the choice
    corrected: bool = False  # a bias an expert is added to scores for the choice, and not to weights
    num_groups: int = 1  # equal runs of experts; a token chooses in those whose best scores have the largest sums
    top_groups: int = 1
    best_of_group: int = 2  # scores that such a sum has: 1 or 2
    renormalized: bool = False  # a token's weights sum to 1, before `scale`
    smallest_sum: float = 1e-20  # weights are divided by at least this
    scale: float = 1.0
    jitter: float = 0.0  # sparsemixer: logits that are further below the largest than 2 x this part of it count nothing


@dataclass(frozen=True, slots=True)
class Gate:
    """silu(gate) * up; with a limit: gate * sigmoid(alpha * gate) * (up + 1) of clamped gate and up; or relu(up)^2."""

    limit: float = 0.0  # gates are at most this, ups between this and its negative; 0: not clamped
    alpha: float = 1.702
    squares: bool = False  # there are no gates, and ups are relu(up)^2

    @property
    def num_parts(self) -> int:
        """Matrices of an expert before its gate: gates and ups, or ups alone."""
        return 1 if self.squares else 2
