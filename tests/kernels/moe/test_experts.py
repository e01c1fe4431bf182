"""Experts over sorted tokens against a sum over tokens and their experts, and against Transformers' experts."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import GptOssConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from baton.kernels.reference import run_experts
from baton.kernels.reference.linear.packed import is_large
from baton.kernels.routing import Gate

NUM_EXPERTS, HIDDEN, SIZE = 6, 24, 40


class Case(NamedTuple):
    x: Tensor
    weights: Tensor
    ids: Tensor
    gate_up: Tensor
    down: Tensor

    def expected(self) -> Tensor:
        """Token by token."""
        out = torch.zeros_like(self.x)
        for token, (weights, ids) in enumerate(zip(self.weights, self.ids, strict=True)):
            for weight, expert in zip(weights, ids.tolist(), strict=True):
                gate, up = (self.gate_up[expert] @ self.x[token]).chunk(2)
                out[token] += weight * (self.down[expert] @ (functional.silu(gate) * up))
        return out


def case(num_tokens: int, top_k: int, spread: int = NUM_EXPERTS) -> Case:
    """Of tokens that choose among `spread` experts."""
    torch.manual_seed(num_tokens)
    ids = torch.stack([torch.randperm(spread)[:top_k] for _ in range(num_tokens)])
    gate_up, down = torch.randn(NUM_EXPERTS, 2 * SIZE, HIDDEN), torch.randn(NUM_EXPERTS, HIDDEN, SIZE)
    return Case(torch.randn(num_tokens, HIDDEN), torch.rand(num_tokens, top_k), ids, gate_up / 4, down / 4)


@pytest.mark.parametrize(("num_tokens", "top_k", "spread"), [(1, 2, 6), (33, 3, 6), (20, 2, 2), (9, 6, 6)])
def test_the_sum_is_that_of_each_tokens_experts(num_tokens: int, top_k: int, spread: int) -> None:
    one = case(num_tokens, top_k, spread)
    torch.testing.assert_close(run_experts(*one, Gate()), one.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 40])
def test_large_matrices_have_the_same_sums(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    hidden, size, num_experts = 512, 512, 3
    ids = torch.stack([torch.randperm(num_experts)[:2] for _ in range(num_tokens)])
    gate_up, down = torch.randn(num_experts, 2 * size, hidden) / 16, torch.randn(num_experts, 2 * hidden, size) / 16
    one = Case(torch.randn(num_tokens, hidden), torch.rand(num_tokens, 2), ids, gate_up, down[:, ::2])
    assert is_large(gate_up[0])
    torch.testing.assert_close(run_experts(*one, Gate()), one.expected(), rtol=1e-4, atol=1e-4)
    whole = one._replace(down=down[:, :hidden].contiguous())
    torch.testing.assert_close(run_experts(*whole, Gate()), whole.expected(), rtol=1e-4, atol=1e-4)


def test_biases_and_clamped_gates_are_those_of_transformers() -> None:
    one = case(30, 3)
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=SIZE, num_local_experts=NUM_EXPERTS, swiglu_limit=1.2, swiglu_alpha=1.5
    )
    theirs = GptOssExperts(config)
    up_bias, down_bias = torch.randn(NUM_EXPERTS, 2 * SIZE), torch.randn(NUM_EXPERTS, HIDDEN)
    with torch.no_grad():
        gates, ups = one.gate_up.chunk(2, dim=1)
        theirs.gate_up_proj.copy_(torch.stack((gates, ups), 2).flatten(1, 2).transpose(1, 2))
        theirs.gate_up_proj_bias.copy_(torch.stack(up_bias.chunk(2, dim=1), 2).flatten(1))
        theirs.down_proj.copy_(one.down.transpose(1, 2))
        theirs.down_proj_bias.copy_(down_bias)
        expected = theirs(one.x, one.ids, one.weights)
    out = run_experts(*one, Gate(1.2, 1.5), up_bias, down_bias)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_close_to_fp32(dtype: torch.dtype) -> None:
    one = case(40, 3)
    narrow = Case(*(part.to(dtype) if part.is_floating_point() else part for part in one))
    wide = Case(*(part.float() if part.is_floating_point() else part for part in narrow))
    out = run_experts(*narrow._replace(weights=wide.weights), Gate())
    assert out.dtype == dtype
    assert (out.float() - wide.expected()).norm() / wide.expected().norm() < 1e-2


def test_a_tokens_sum_does_not_depend_on_the_order_of_others() -> None:
    one, order = case(40, 3), torch.randperm(40)
    shuffled = one._replace(x=one.x[order], weights=one.weights[order], ids=one.ids[order])
    torch.testing.assert_close(run_experts(*shuffled, Gate()), run_experts(*one, Gate())[order])


def test_experts_without_gates_square_their_ups_as_in_transformers() -> None:
    one = case(17, 3)
    config = NemotronHConfig(n_routed_experts=NUM_EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=SIZE)
    theirs = NemotronHExperts(config)
    ups = one.gate_up[:, :SIZE].contiguous()
    theirs.load_state_dict({"up_proj": ups, "down_proj": one.down})
    with torch.no_grad():
        expected = theirs(one.x, one.ids, one.weights)
    out = run_experts(*one._replace(gate_up=ups), Gate(squares=True))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
