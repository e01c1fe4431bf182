"""The description of a decoder layer: its attention, MLP, norms and scales. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.kernels.routing import Gate, RouterSpec
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.state_spec import StateSpec

# Norms of queries and keys: none, of each head, of each head with weights of its own, or of all heads of a token
# together.
QkNorm = Literal["none", "head", "each_head", "projection"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norm of all vectors of a model."""

    eps: float
    centered: bool = False  # LayerNorm, else RMSNorm
    weighted: bool = True
    bias: bool = False
    offset: float = 0.0  # added to the checkpoint's weights


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float  # of the scores
    # Keys that a query attends to, including its own; if not causal, on each side of it; 0: all.
    window: int = 0
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm = "none"
    qkv_clip: float = 0.0  # the largest magnitude of queries, keys and values; 0: any
    soft_cap: float = 0.0  # scores are soft_cap * tanh(score / soft_cap); 0: not capped
    output_gate: bool = False  # the output is scaled by the sigmoid of a linear, whose rows follow each query head's
    sinks: bool = False  # each query head has a learned score that belongs to no key
    relative_buckets: int = 0  # of distances between tokens, each with a learned score a head; 0: none
    causal: bool = (
        True  # a query attends to no later key; if not, keys of a token depend on later ones: none are cached
    )

    @property
    def num_qkv_heads(self) -> int:
        """Heads of the fused projection: queries, keys, values."""
        return self.num_q_heads + 2 * self.num_kv_heads

    @property
    def q_size(self) -> int:
        """Width of the queries, and of attention's output."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def rope_head_dim(self) -> int:
        """Values that RoPE's tables are for."""
        return self.head_dim

    @property
    def projected_size(self) -> int:
        """Width of what attention takes of a token: queries, keys, values."""
        return sum(self.qkv_sizes)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of the parts of the first linear: queries, each head's with its gate; keys; values."""
        return self.q_size * (2 if self.output_gate else 1), self.kv_size, self.kv_size

    @property
    def attended_size(self) -> int:
        """Width of attention's output."""
        return self.q_size

    def num_weights(self, hidden_size: int) -> int:
        """Returns the weights of all linears, without biases."""
        return hidden_size * (self.projected_size + self.attended_size)


# What mixes the tokens of a sequence in a layer.
MixerSpec = AttentionSpec | LatentSpec | StateSpec


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without gates"""

    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"
    gated: bool = True
    down_bias: bool = False  # of the last linear, where the others have none

    @property
    def token_width(self) -> int:
        """Intermediate values of one token."""
        return self.intermediate_size

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths between the linears."""
        return (self.intermediate_size,)


NO_MLP = MlpSpec(0)  # of a layer that mixes tokens alone


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The weighted sum of a token's experts, each an MLP; plus one that all tokens share, where there is one."""

    router: RouterSpec
    intermediate_size: int  # of one expert
    gate: Gate = Gate()  # noqa: RUF009 - frozen
    bias: bool = False  # of the experts' linears
    router_bias: bool = False  # of the logits
    router_in_fp32: bool = False  # logits are computed in fp32 whatever the model's dtype, by weights in fp32
    shared: MlpSpec | None = None
    shared_gate: bool = False  # the shared expert's output is scaled by the sigmoid of a linear of its own

    @property
    def token_width(self) -> int:
        """Intermediate values of one token."""
        return self.router.top_k * self.intermediate_size + (self.shared.intermediate_size if self.shared else 0)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths between the linears."""
        return (self.intermediate_size, *(() if self.shared is None else self.shared.widths))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """residual += attention, then residual += MLP; each may norm its input, its output, both, or the sum. In a parallel
    layer both read the same residual."""

    attention: MixerSpec
    mlp: MlpSpec | ExpertsSpec
    input_norms: bool = True
    output_norms: bool = False
    sum_norms: bool = False  # the residual is normed after each addition
    attention_input_norm: bool = True  # False: with input norms, the MLP alone has one
    residual_scale: float = 1.0  # of updates to the residual stream
    parallel: bool = False

    @property
    def grouped(self) -> AttentionSpec:
        """The attention of a layer with keys and values of heads."""
        assert isinstance(self.attention, AttentionSpec), "families have one kind of attention"
        return self.attention
