"""The router of a mixture: each token's experts and their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.routing import RouterSpec

_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: functional.softplus(logits).sqrt(),
}


def route(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """Returns weights [num_tokens, top_k] fp32 and expert ids [num_tokens, top_k] for logits [num_tokens, num_experts].

    `bias` [num_experts] corrects the choice if spec.corrected.
    """
    logits = logits.float()
    if spec.score == "sparsemixer":
        return _sparsemixer(logits, spec)
    score = _SCORES[spec.score]
    scores = logits if spec.scores_chosen else score(logits)
    choice = scores if bias is None else scores + bias
    if spec.num_groups > 1:
        choice = _within_groups(choice, spec)
    ids = choice.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if spec.scores_chosen:
        weights = score(weights)
    if spec.renormalized:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=spec.smallest_sum)
    return weights * spec.scale, ids


def _within_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """Returns the scores of the best groups, and -inf elsewhere."""
    grouped = choice.view(len(choice), spec.num_groups, -1)
    sums = grouped.topk(min(spec.best_of_group, grouped.shape[-1]), dim=-1).values.sum(-1)
    best = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, sums.topk(spec.top_groups, dim=-1).indices, True)
    return grouped.masked_fill(~best.unsqueeze(-1), float("-inf")).flatten(-2)


def _sparsemixer(logits: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    left, weights, ids = logits, [], []
    for _ in range(spec.top_k):
        largest, chosen = left.max(-1, keepdim=True)
        distance = (largest - logits) / logits.abs().clamp(min=largest)
        close = left.masked_fill(distance > 2 * spec.jitter, float("-inf"))
        weights.append(close.softmax(-1).gather(-1, chosen))
        ids.append(chosen)
        left = left.scatter(-1, chosen, float("-inf"))
    return torch.cat(weights, -1), torch.cat(ids, -1)
