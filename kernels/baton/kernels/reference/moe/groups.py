"""Pairs of tokens and experts, sorted by expert: the products of each expert's rows, and the sums of each token's."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.reference.linear.packed import beats_blas, is_large, packed_linear

_FEW_ROWS = 2
_VERY_LARGE = 1 << 21  # values of a matrix


class Groups:
    """The pairs of `ids` [num_tokens, top_k]: one row each, those of an expert side by side."""

    def __init__(self, ids: Tensor) -> None:
        self._shape = ids.shape
        self._experts, self._order = ids.flatten().sort(stable=True)
        hit, counts = self._experts.unique_consecutive(return_counts=True)
        self.runs: list[tuple[int, slice]] = []  # experts, and their rows
        start = 0
        for expert, count in zip(hit.tolist(), counts.tolist(), strict=True):
            self.runs.append((expert, slice(start, start + count)))
            start += count

    def rows(self, x: Tensor) -> Tensor:
        """Returns the rows [num_pairs, hidden_size] of tokens x [num_tokens, hidden_size]."""
        return x.index_select(0, self._order.div(self._shape[1], rounding_mode="floor"))

    def sorted(self, pairs: Tensor) -> Tensor:
        """Returns pairs [num_pairs, width], which are in the order of the ids, as rows."""
        return pairs.index_select(0, self._order)

    def unsorted(self, rows: Tensor) -> Tensor:
        """Returns rows in the order of the ids."""
        return torch.empty_like(rows).index_copy_(0, self._order, rows)

    def products(self, rows: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
        """Returns each row times its expert's matrix of [num_experts, out, in], plus its bias of [num_experts, out]."""
        out = torch.empty(len(rows), matrices.shape[1], dtype=rows.dtype, device=rows.device)
        for expert, mine in self.runs:
            matrix, part = matrices[expert], rows[mine]
            if _takes_onednn(matrix) and not _are_few(part, matrix):
                out[mine] = packed_linear(part, matrix, None)
            else:
                torch.mm(part, matrix.t(), out=out[mine])
        return out if bias is None else out.add_(bias.index_select(0, self._experts))

    def sums(self, out: Tensor, weights: Tensor) -> Tensor:
        """Returns the sum of each token's rows by `weights` [num_tokens, top_k], [num_tokens, out].

        It is in the order of the token's choice, independent of other tokens.
        """
        pairs = self.unsorted(out).view(*self._shape, -1)
        return torch.bmm(weights.to(out.dtype).unsqueeze(1), pairs).squeeze(1)


def _are_few(rows: Tensor, matrix: Tensor) -> bool:
    """Returns whether the BLAS multiplies so few rows faster than oneDNN. It multiplies one row by a single thread."""
    return 1 < len(rows) <= _FEW_ROWS and matrix.numel() < _VERY_LARGE


def _takes_onednn(matrix: Tensor) -> bool:
    return is_large(matrix) and matrix.device.type == "cpu" and matrix.is_contiguous() and beats_blas()
