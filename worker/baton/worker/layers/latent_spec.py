"""The description of multi-head latent attention (MLA). Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from baton.worker.layers.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Attention over one vector a token, from which all heads make their keys and values (DeepSeek-V2, section 2.1).

    The vector holds `kv_rank` values that are normed, and one rotated key of `rope_dim` values. A head's key is
    `nope_dim` values of a linear of the former, then the latter; its value is another linear of the former.
    """

    num_q_heads: int
    q_rank: int  # values between the two linears of queries; 0: there is one linear
    kv_rank: int
    nope_dim: int  # values of a head's queries and keys that are not rotated
    rope_dim: int  # and those that are
    value_dim: int  # of a head
    rope: RopeConfig  # of heads of `rope_dim` values
    scale: float  # of the scores
    bias: bool = False  # of the linears that make low-rank values, and of the last one
    norm_eps: float = 1e-6  # of the norms of low-rank values

    @property
    def causal(self) -> bool:
        """True: a query attends to no later token."""
        return True

    @property
    def window(self) -> int:
        """0: a query attends to all tokens before it."""
        return 0

    @property
    def num_kv_heads(self) -> int:
        """1: all heads read the same vector."""
        return 1

    @property
    def head_dim(self) -> int:
        """Values that are cached of a token."""
        return self.kv_rank + self.rope_dim

    @property
    def qk_dim(self) -> int:
        """Values of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def rope_head_dim(self) -> int:
        """Values that RoPE's tables are for."""
        return self.rope_dim

    @property
    def projected_size(self) -> int:
        """Width of what attention takes of a token: the queries."""
        return self.num_q_heads * self.qk_dim

    @property
    def attended_size(self) -> int:
        """Width of attention's output."""
        return self.num_q_heads * self.value_dim

    @property
    def down_sizes(self) -> tuple[int, int]:
        """Widths of the linear that reads the stream: queries or their low-rank values, then what is cached."""
        return self.q_rank or self.projected_size, self.head_dim

    @property
    def up_size(self) -> int:
        """Width of the linear that makes the heads' keys and values."""
        return self.num_q_heads * (self.nope_dim + self.value_dim)

    def num_weights(self, hidden_size: int) -> int:
        """Returns the weights of all linears, without biases."""
        low_rank = self.up_size * self.kv_rank + self.q_rank * self.projected_size
        return low_rank + hidden_size * (sum(self.down_sizes) + self.attended_size)
