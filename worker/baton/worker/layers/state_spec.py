"""The descriptions of layers whose memory of a sequence is a state of fixed size. Knows no tensors.

Each begins with a short convolution over the last tokens of some channels, whose last inputs are a part of the state.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.worker.state_pieces import StateMatrix


@dataclass(frozen=True, slots=True)
class _StateSpec:
    """What all kinds have in common."""

    kernel_size: int  # tokens that the convolution spans
    conv_bias: bool
    bias: bool  # of the linears

    @property
    def causal(self) -> bool:
        """True: a state is of earlier tokens only."""
        return True

    @property
    def window(self) -> int:
        """0: all earlier tokens are in the state."""
        return 0

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        raise NotImplementedError

    @property
    def conv_sizes(self) -> tuple[int, ...]:
        """Channels of the convolution's parts in checkpoints."""
        return (self.num_channels,)

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        """Widths of the parts that the linears before the convolution make."""
        raise NotImplementedError

    @property
    def first_sizes(self) -> tuple[int, ...]:
        """Widths of the parts of the first linear."""
        return self.projected_sizes

    @property
    def up_sizes(self) -> tuple[int, ...]:
        """Widths that further linears make, each of one of the first linear's last parts."""
        return ()

    @property
    def attended_size(self) -> int:
        """Width of what the last linear takes."""
        raise NotImplementedError

    @property
    def recurrence(self) -> tuple[StateMatrix, ...]:
        """The matrices behind the convolution's inputs; none of a convolution alone."""
        return ()

    @property
    def num_rates(self) -> int:
        """Heads with a decay rate of their own; 0: nothing decays."""
        return 0

    @property
    def rate_shape(self) -> tuple[int, ...]:
        """Shape of the decay rates in checkpoints."""
        return (self.num_rates,)

    @property
    def num_biases(self) -> int:
        """Decays, or step sizes, with a bias of their own."""
        return self.num_rates

    @property
    def norm_size(self) -> int:
        """Weights of the norm before the last linear; 0: there is none."""
        return 0

    @property
    def projected_size(self) -> int:
        """Width of what the linears before the convolution make."""
        return sum(self.projected_sizes)

    @property
    def up_ranks(self) -> tuple[int, ...]:
        """Widths of the parts that further linears read."""
        return self.first_sizes[len(self.first_sizes) - len(self.up_sizes) :]

    @property
    def matrices(self) -> tuple[StateMatrix, ...]:
        """The state: the convolution's last inputs, oldest first, then those of the recurrence."""
        return (StateMatrix(1, self.kernel_size - 1, self.num_channels), *self.recurrence)

    @property
    def state_values(self) -> int:
        """Values of the state."""
        return sum(matrix.num_values for matrix in self.matrices)

    def num_weights(self, hidden_size: int) -> int:
        """Returns the weights of all linears, without biases."""
        ups = sum(rank * size for rank, size in zip(self.up_ranks, self.up_sizes, strict=True))
        return hidden_size * (sum(self.first_sizes) + self.attended_size) + ups


@dataclass(frozen=True, slots=True)
class DeltaNetSpec(_StateSpec):
    """Gated DeltaNet (Yang et al., 2025): the gated delta rule behind a convolution, a gated norm behind it."""

    num_key_heads: int
    num_heads: int  # of values; each key head serves as many of them, one after another
    key_dim: int  # of a head
    value_dim: int
    norm_eps: float
    # The first linear has queries, keys, values and gates of each key head together, then its betas and decays. Else
    # it has all queries, keys and values, all gates, all betas, all decays.
    by_key_head: bool

    @property
    def q_size(self) -> int:
        """Width of the queries, and of the keys."""
        return self.num_key_heads * self.key_dim

    @property
    def num_channels(self) -> int:
        """Queries, keys and values."""
        return 2 * self.q_size + self.attended_size

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        if self.by_key_head:
            return self.num_channels + self.attended_size, 2 * self.num_heads
        return self.num_channels, self.attended_size, self.num_heads, self.num_heads

    @property
    def attended_size(self) -> int:
        """Width of the values."""
        return self.num_heads * self.value_dim

    @property
    def recurrence(self) -> tuple[StateMatrix, ...]:
        return (StateMatrix(self.num_heads, self.key_dim, self.value_dim),)

    @property
    def num_rates(self) -> int:
        return self.num_heads

    @property
    def norm_size(self) -> int:
        return self.value_dim


@dataclass(frozen=True, slots=True)
class KimiDeltaSpec(_StateSpec):
    """Kimi Delta Attention (Kimi Team, 2025): the gated delta rule with a decay of each key channel.

    The first linear has queries, keys and values, betas, then low-rank values of decays and of gates.
    """

    num_heads: int  # of queries, keys and values
    head_dim: int  # of all of them, and the rank of decays and gates
    norm_eps: float

    @property
    def num_key_heads(self) -> int:
        """Each head has its own keys."""
        return self.num_heads

    @property
    def value_dim(self) -> int:
        """Values of a head."""
        return self.head_dim

    @property
    def q_size(self) -> int:
        """Width of the queries, of the keys, of decays and of gates."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Queries, keys and values."""
        return 3 * self.q_size

    @property
    def conv_sizes(self) -> tuple[int, ...]:
        return (self.q_size,) * 3

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        """Queries, keys and values; betas; decays; gates."""
        return self.num_channels, self.num_heads, self.q_size, self.q_size

    @property
    def first_sizes(self) -> tuple[int, ...]:
        return *self.conv_sizes, self.num_heads, self.head_dim, self.head_dim

    @property
    def up_sizes(self) -> tuple[int, ...]:
        return self.q_size, self.q_size

    @property
    def attended_size(self) -> int:
        """Width of the values."""
        return self.q_size

    @property
    def recurrence(self) -> tuple[StateMatrix, ...]:
        return (StateMatrix(self.num_heads, self.head_dim, self.head_dim),)

    @property
    def num_rates(self) -> int:
        return self.num_heads

    @property
    def rate_shape(self) -> tuple[int, ...]:
        return 1, 1, self.num_heads, 1

    @property
    def num_biases(self) -> int:
        return self.q_size

    @property
    def norm_size(self) -> int:
        return self.head_dim


@dataclass(frozen=True, slots=True)
class StateSpaceSpec(_StateSpec):
    """Mamba-2 (Dao and Gu, 2024). The first linear has gates, then the convolution's x, B and C, then step sizes."""

    num_heads: int
    head_dim: int
    num_groups: int  # of B and C; each serves as many heads, one after another
    state_size: int
    norm_eps: float
    step_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def num_channels(self) -> int:
        """x, B and C."""
        return self.attended_size + 2 * self.num_groups * self.state_size

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        return (self.attended_size + self.num_channels + self.num_heads,)

    @property
    def attended_size(self) -> int:
        """Width of x."""
        return self.num_heads * self.head_dim

    @property
    def recurrence(self) -> tuple[StateMatrix, ...]:
        return (StateMatrix(self.num_heads, self.state_size, self.head_dim),)

    @property
    def num_rates(self) -> int:
        return self.num_heads

    @property
    def norm_size(self) -> int:
        return self.attended_size


@dataclass(frozen=True, slots=True)
class ShortConvSpec(_StateSpec):
    """C conv(B x) of the three parts B, C, x of the first linear: LFM2's."""

    channels: int

    @property
    def num_channels(self) -> int:
        return self.channels

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        return (3 * self.channels,)

    @property
    def attended_size(self) -> int:
        return self.channels


StateSpec = DeltaNetSpec | KimiDeltaSpec | StateSpaceSpec | ShortConvSpec
