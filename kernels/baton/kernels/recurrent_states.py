"""Where recurrent states lie, and the per-head weights of recurrences. Data only, shared by kernels and reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64  # tokens that chunked forms compute at once; splits at its multiples change nothing, bit for bit


@dataclass(frozen=True, slots=True)
class States:
    """The states of a step's sequences, cut into pieces of a pool.

    A state is a matrix [rows, columns] of each head: [key_dim, value_dim] of a recurrence, [kernel_size - 1, channels]
    of a convolution, which has one head. A head's pieces hold equal, consecutive parts of its columns. Different
    sequences must not write a piece that another one reads or writes.
    """

    # [num_pieces, rows, columns of a piece]. Each piece is contiguous; pieces may overlap, with a small stride, so that
    # ids count smaller units than a piece.
    pool: Tensor
    read: Tensor  # [num_seqs, num_heads * pieces per head] int32: initial states; negative: zeros
    write: Tensor  # the same shape: final states; negative: dropped

    def __post_init__(self) -> None:
        if self.pool.dim() != 3 or self.pool.stride()[1:] != (self.pool.shape[2], 1):
            raise ValueError(
                f"pieces [num_pieces, rows, columns] must be contiguous, they are {tuple(self.pool.shape)} with "
                f"strides {self.pool.stride()}"
            )
        for ids in (self.read, self.write):
            if ids.dtype != torch.int32 or ids.shape != self.read.shape or ids.dim() != 2 or not ids.is_contiguous():
                raise ValueError(
                    "ids of read and written pieces must be contiguous int32 [num_seqs, num_heads * pieces per head] "
                    f"of one shape, they are {self.read.dtype} {tuple(self.read.shape)} and {self.write.dtype} "
                    f"{tuple(self.write.shape)}"
                )

    def pieces_per_head(self, num_heads: int, rows: int, columns: int) -> int:
        """Returns the pieces of a head whose state is [rows, columns]. Raises ValueError for states of other shapes."""
        pieces, rest = divmod(self.read.shape[1], num_heads)
        if rest or self.pool.shape[1] != rows or pieces * self.pool.shape[2] != columns:
            raise ValueError(
                f"states of {num_heads} heads [{rows}, {columns}] do not fit {self.read.shape[1]} pieces "
                f"{list(self.pool.shape[1:])}"
            )
        return pieces


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """The gates of the gated delta rule before their nonlinearities.

    log decay = -exp(log_rate) softplus(decay + bias), beta = sigmoid(beta). Gated DeltaNet has one decay per head, Kimi
    Delta Attention one per head and key channel.
    """

    decay: Tensor  # [num_tokens, num_heads] or [num_tokens, num_heads, key_dim]
    beta: Tensor  # [num_tokens, num_heads]
    log_rate: Tensor  # [num_heads] fp32: `A_log` of checkpoints
    bias: Tensor  # [num_heads] or [num_heads, key_dim] fp32: `dt_bias` of checkpoints


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The step sizes of Mamba-2 before their nonlinearity.

    dt = clamp(softplus(step + bias), limits); log decay = -exp(log_rate) dt.
    """

    step: Tensor  # [num_tokens, num_heads]
    log_rate: Tensor  # [num_heads] fp32: `A_log` of checkpoints
    bias: Tensor  # [num_heads] fp32: `dt_bias` of checkpoints
    limits: tuple[float, float] = (0.0, float("inf"))
