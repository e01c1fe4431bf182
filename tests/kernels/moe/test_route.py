"""The choice of experts against the routers of Transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kernels.harness import cases
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from baton.kernels.moe import route as kernel
from baton.kernels.reference import route
from baton.kernels.routing import RouterSpec

NUM_EXPERTS, TOP_K, NUM_TOKENS = 16, 5, 60
SPEC = RouterSpec(NUM_EXPERTS, TOP_K)
BIASED: dict[str, Any] = {"score": "sigmoid", "corrected": True, "renormalized": True}


def config(**more: Any) -> Any:
    """What any of the routers reads, for logits that are the hidden states."""
    sizes = {"num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "hidden_size": NUM_EXPERTS}
    return SimpleNamespace(**{**sizes, "num_experts_per_tok": TOP_K, **more})


def plain(kind: Callable[..., Any], **more: Any) -> tuple[Any, None]:
    router = kind(config(**more))
    router.weight.data = torch.eye(NUM_EXPERTS)
    return router, None


def corrected(kind: Callable[..., Any], **more: Any) -> tuple[Any, Tensor]:
    router, bias = plain(kind, **more)[0], 0.3 * torch.randn(NUM_EXPERTS)
    owner = router.moe_statics if kind is Ernie4_5_MoeTopKRouter else router
    getattr(owner, "e_score_correction_bias", torch.empty(NUM_EXPERTS)).data.copy_(bias)
    return router, bias


def glm(groups: int, chosen: int, *, norm: bool = True) -> tuple[Any, Tensor]:
    return corrected(
        Glm4MoeTopkRouter, n_group=groups, topk_group=chosen, norm_topk_prob=norm, routed_scaling_factor=2.5
    )


def phimoe() -> tuple[Any, None]:
    router = plain(PhimoeTopKRouter, num_experts_per_tok=2, router_jitter_noise=0.3, input_jitter_noise=0.0)[0]
    return router.eval(), None


def ernie(smallest_sum: float) -> tuple[Any, Tensor]:
    return corrected(Ernie4_5_MoeTopKRouter, moe_norm_min=smallest_sum)


def deepseek_v2(method: str) -> tuple[Any, None]:
    groups = {"n_group": 4, "topk_group": 2, "topk_method": method}
    return plain(DeepseekV2TopkRouter, **groups, norm_topk_prob=False, routed_scaling_factor=2.5)


def deepseek_v3() -> tuple[Any, Tensor]:
    groups = {"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc"}
    return corrected(DeepseekV3TopkRouter, **groups, norm_topk_prob=True, routed_scaling_factor=2.5)


def deepseek() -> tuple[Any, Tensor]:
    return corrected(DeepseekV4TopKRouter, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5)


GROUPS = {**BIASED, "scale": 2.5, "num_groups": 4, "top_groups": 2}
ERNIE = {"corrected": True, "renormalized": True}
ROUTERS: dict[str, tuple[Callable[[], tuple[Any, Tensor | None]], dict[str, Any]]] = {
    "mixtral": (lambda: plain(MixtralTopKRouter), {"renormalized": True}),
    "qwen2_moe": (lambda: plain(Qwen2MoeTopKRouter, norm_topk_prob=False), {}),
    "qwen3_moe": (lambda: plain(Qwen3MoeTopKRouter, norm_topk_prob=True), {"renormalized": True}),
    "olmoe": (lambda: plain(OlmoeTopKRouter, norm_topk_prob=False), {}),
    "granitemoe": (lambda: plain(GraniteMoeTopKRouter), {"scores_chosen": True}),
    "gpt_oss": (lambda: plain(GptOssTopKRouter), {"scores_chosen": True}),
    "phimoe": (phimoe, {"score": "sparsemixer", "jitter": 0.3, "top_k": 2}),
    "glm4_moe": (lambda: glm(1, 1), {**BIASED, "scale": 2.5}),
    "glm4_moe, groups": (lambda: glm(4, 2), GROUPS),
    "glm4_moe, sums": (lambda: glm(4, 2, norm=False), {**GROUPS, "renormalized": False}),
    "ernie4_5_moe": (lambda: ernie(1e-12), {**ERNIE, "smallest_sum": 1e-12}),
    "ernie4_5_moe, large sum": (lambda: ernie(0.4), {**ERNIE, "smallest_sum": 0.4}),
    "minimax_m2": (lambda: corrected(MiniMaxM2TopKRouter), BIASED),
    "deepseek_v2": (lambda: deepseek_v2("greedy"), {"scale": 2.5}),
    "deepseek_v2, groups": (
        lambda: deepseek_v2("group_limited_greedy"),
        {"scale": 2.5, "num_groups": 4, "top_groups": 2, "best_of_group": 1},
    ),
    "deepseek_v3": (deepseek_v3, GROUPS),
    "deepseek_v4": (deepseek, {**BIASED, "score": "sqrtsoftplus", "scale": 1.5}),
}


def spec_of(name: str) -> RouterSpec:
    return RouterSpec(**{"num_experts": NUM_EXPERTS, "top_k": TOP_K, **ROUTERS[name][1]})


def by_expert(weights: Tensor, ids: Tensor) -> Tensor:
    """Whatever the order of the chosen ones."""
    return torch.zeros(NUM_TOKENS, NUM_EXPERTS).scatter_(-1, ids.long(), weights)


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_weights_are_those_of_transformers(name: str) -> None:
    torch.manual_seed(7)
    router, bias = ROUTERS[name][0]()
    logits = 2 * torch.randn(NUM_TOKENS, NUM_EXPERTS)
    with torch.no_grad():
        found = router(logits, bias) if name == "minimax_m2" else router(logits)
        weights, ids = route(logits, bias, spec_of(name))
    torch.testing.assert_close(by_expert(weights, ids), by_expert(found[1].float(), found[2]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "device"), cases(ROUTERS, ROUTERS))
def test_the_kernels_experts_and_weights_are_the_references(name: str, device: str) -> None:
    spec = spec_of(name)
    bias = 0.3 * torch.randn(NUM_EXPERTS, device=device) if spec.corrected else None
    logits = 2 * torch.randn(NUM_TOKENS, NUM_EXPERTS, device=device)
    weights, ids = kernel.route(logits, bias, spec)
    expected = route(logits, bias, spec)
    assert torch.equal(ids.long(), expected[1])
    torch.testing.assert_close(weights, expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.interpreted)])
def test_the_kernel_takes_any_number_of_experts_and_groups(device: str) -> None:
    logits, bias = torch.randn(7, 60, device=device), 0.1 * torch.randn(60, device=device)
    for spec in (RouterSpec(60, 6, renormalized=True), RouterSpec(60, 6, "sigmoid", num_groups=5, top_groups=2)):
        weights, ids = kernel.route(logits, bias, spec)
        expected = route(logits, bias, spec)
        assert torch.equal(ids.long(), expected[1])
        torch.testing.assert_close(weights, expected[0])


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    spec = RouterSpec(4, 2, "sigmoid", corrected=True)
    weights, ids = route(logits, torch.tensor([0.0, 0.0, 0.0, 9.0]), spec)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.0, 3.0]]).sigmoid())


def test_a_token_routes_alike_in_any_company() -> None:
    logits = torch.randn(50, NUM_EXPERTS)
    weights, ids = route(logits, None, SPEC)
    alone = [route(row.unsqueeze(0), None, SPEC) for row in logits]
    assert torch.equal(torch.cat([one for one, _ in alone]), weights)
    assert torch.equal(torch.cat([one for _, one in alone]), ids)
