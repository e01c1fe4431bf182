"""What families with experts read from config.json in one way."""

from __future__ import annotations

from dataclasses import replace

from baton.kernels.routing import RouterSpec
from baton.worker.models.fields import Fields
from baton.worker.quantization.expert_names import ExpertNames

# Mixtral's names, which others took over.
W_NAMES = ExpertNames(
    gate_up=("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    down="block_sparse_moe.experts.{}.w2.weight",
)

_MLP_KINDS = ("dense", "sparse")


def read_router(
    fields: Fields,
    num_experts_keys: tuple[str, ...] = ("num_experts", "num_local_experts"),
    top_k_key: str = "num_experts_per_tok",
) -> RouterSpec:
    """Reads how many experts there are and how many a token has: the best by softmax. The first key present counts."""
    key = next((key for key in num_experts_keys if fields.raw.get(key) is not None), num_experts_keys[0])
    num_experts, top_k = fields.positive_int(key), fields.positive_int(top_k_key)
    if top_k > num_experts:
        raise fields.error(top_k_key, f"at most {key} ({num_experts})")
    return RouterSpec(num_experts, top_k)


def read_grouped_router(fields: Fields, num_experts_keys: tuple[str, ...]) -> RouterSpec:
    """Reads the choice by sigmoid and a bias among the experts of the best groups, as DeepSeek-V3 has it."""
    router = replace(
        read_router(fields, num_experts_keys),
        score="sigmoid",
        corrected=True,
        renormalized=fields.flag("norm_topk_prob", default=True),
        scale=fields.positive_float("routed_scaling_factor", default=1.0),
    )
    return with_groups(fields, router)


def with_groups(fields: Fields, router: RouterSpec, num_groups_key: str = "n_group") -> RouterSpec:
    """Reads in how many groups experts are, and in how many of them a token has some."""
    num_groups = fields.positive_int(num_groups_key, default=1)
    top_groups = fields.positive_int("topk_group", default=1)
    if router.num_experts % num_groups:
        raise fields.error(num_groups_key, f"a divisor of the number of experts ({router.num_experts})")
    if not router.top_k * num_groups <= top_groups * router.num_experts:
        raise fields.error("topk_group", f"so many groups that they hold a token's {router.top_k} experts")
    return replace(router, num_groups=num_groups, top_groups=top_groups)


def check_silu(fields: Fields) -> None:
    """Raises InvalidRequest if experts have another activation."""
    if fields.text("hidden_act", default="silu") != "silu":
        raise fields.error("hidden_act", "silu")


def read_sparse_kinds(fields: Fields, num_layers: int) -> list[bool]:
    """Reads which layers have experts: those that mlp_layer_types lists as sparse, else those after the first ones."""
    kinds = fields.raw.get("mlp_layer_types")
    if kinds is None:
        num_dense = fields.number("first_k_dense_replace", default=1)
        return [layer >= num_dense for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(_MLP_KINDS):
        raise fields.error("mlp_layer_types", f"a list of {num_layers} x {' or '.join(_MLP_KINDS)}")
    return [kind == "sparse" for kind in kinds]


def read_sparse_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Reads which layers have experts: those that mlp_only_layers does not list, every decoder_sparse_step of them."""
    step = fields.positive_int("decoder_sparse_step", default=1)
    dense = fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.error("mlp_only_layers", "a list of layers")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
