"""Routes tokens to experts in one launch: each program chooses one token's experts, one after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps
from baton.kernels.routing import RouterSpec
from baton.kernels.table import Case, find


@triton.jit
def _scored(logits, SCORE: tl.constexpr):
    """Returns scores of logits, -inf where there is no expert."""
    if SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORE == "sqrtsoftplus":
        # log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)
        scores = tl.sqrt_rn(tl.maximum(logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logits))))
    else:
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tl.sum(powers, 0)
    return scores


@triton.jit
def _within_groups(
    choice,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
):
    """Returns the scores in groups whose one or two best scores have the largest sums, and -inf elsewhere."""
    size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    groups = tl.arange(0, NUM_GROUPS)
    grouped = tl.reshape(choice, [NUM_GROUPS, size])
    best, place = tl.max(grouped, 1, return_indices=True)
    if size > 1 and BEST_OF_GROUP > 1:
        rest = tl.where(tl.arange(0, size)[None, :] == place[:, None], float("-inf"), grouped)
        best += tl.max(rest, 1)
    kept = tl.zeros([NUM_GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        chosen = tl.argmax(best, 0)
        kept = tl.where(groups == chosen, 1, kept)
        best = tl.where(groups == chosen, float("-inf"), best)
    return tl.reshape(tl.where(kept[:, None] > 0, grouped, float("-inf")), [NUM_EXPERTS])


@triton.jit
def _route_kernel(
    weights_ptr,  # [num_tokens, TOP_K] fp32
    ids_ptr,  # [num_tokens, TOP_K] int32
    logits_ptr,  # [num_tokens, NUM_EXPERTS]
    bias_ptr,  # [NUM_EXPERTS] fp32
    scale,
    smallest_sum,
    jitter,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    SCORE: tl.constexpr,
    SCORES_CHOSEN: tl.constexpr,
    CORRECTED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """weights, ids = top_k(score(logits) + bias), as RouterSpec specifies"""
    # grid: (num_tokens)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS_PAD)
    places = tl.arange(0, TOP_K_PAD)
    real = experts < NUM_EXPERTS
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + experts, mask=real, other=float("-inf")).to(tl.float32)
    scores = logits
    if SCORE != "sparsemixer" and not SCORES_CHOSEN:
        scores = _scored(logits, SCORE)
    choice = scores
    if CORRECTED:
        choice += tl.load(bias_ptr + experts, mask=real, other=0.0)
    if NUM_GROUPS > 1:
        choice = _within_groups(choice, NUM_EXPERTS, NUM_GROUPS, TOP_GROUPS, BEST_OF_GROUP)
    choice = tl.where(real, choice, float("-inf"))
    weights = tl.full([TOP_K_PAD], float("-inf"), tl.float32)
    ids = tl.zeros([TOP_K_PAD], tl.int32)
    for place in tl.static_range(TOP_K):
        largest, chosen = tl.max(choice, 0, return_indices=True)
        if SCORE == "sparsemixer":
            distance = (largest - logits) / tl.maximum(tl.abs(logits), largest)
            close = tl.where(distance > 2 * jitter, 0.0, tl.exp(choice - largest))
            weight = 1.0 / tl.sum(close, 0)
        elif CORRECTED:
            weight = tl.max(tl.where(experts == chosen, scores, float("-inf")), 0)
        else:
            weight = largest  # chosen by its score
        weights = tl.where(places == place, weight, weights)
        # Keeps ids in range if logits are NaN.
        ids = tl.where(places == place, tl.minimum(chosen, NUM_EXPERTS - 1), ids)
        choice = tl.where(experts == chosen, float("-inf"), choice)
    if SCORES_CHOSEN:
        weights = _scored(weights, SCORE)
    weights = tl.where(places < TOP_K, weights, 0.0)
    if RENORMALIZED:
        weights = weights / tl.maximum(tl.sum(weights, 0), smallest_sum)
    at = token * TOP_K + places
    tl.store(weights_ptr + at, weights * scale, mask=places < TOP_K)
    tl.store(ids_ptr + at, ids, mask=places < TOP_K)


def route(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """Returns weights [num_tokens, top_k] fp32 and expert ids [num_tokens, top_k] int32 for logits [num_tokens,
    num_experts].

    `bias` [num_experts] fp32 corrects the choice if spec.corrected. Of equal scores, that of the lowest expert id is
    chosen first.
    """
    num_tokens, num_experts = logits.shape
    if spec.num_groups > 1 and not _are_powers_of_2(num_experts, spec.num_groups):
        weights, ids = find("route", Case("cpu")).load()(logits, bias, spec)  # PyTorch's ops, on any device
        return weights, ids
    weights = torch.empty(num_tokens, spec.top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, spec.top_k, dtype=torch.int32, device=logits.device)
    padded = triton.next_power_of_2(num_experts)
    overlap = overlaps(logits)
    _route_kernel[(num_tokens,)](
        weights,
        ids,
        logits,
        weights if bias is None else bias,
        spec.scale,
        spec.smallest_sum,
        spec.jitter,
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=padded,
        TOP_K=spec.top_k,
        TOP_K_PAD=triton.next_power_of_2(spec.top_k),
        SCORE=spec.score,
        SCORES_CHOSEN=spec.scores_chosen,
        CORRECTED=bias is not None,
        NUM_GROUPS=spec.num_groups,
        TOP_GROUPS=spec.top_groups,
        BEST_OF_GROUP=spec.best_of_group,
        RENORMALIZED=spec.renormalized,
        OVERLAP=overlap,
        num_warps=1 if padded <= 512 else 4,
        launch_pdl=overlap,
    )
    return weights, ids


def _are_powers_of_2(*numbers: int) -> bool:
    return all(number & (number - 1) == 0 for number in numbers)
