"""Small random models whose linears are packed, and the same models with the weights that the packed ones mean."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.engine.packed.weights import (
    Format,
    Packed,
    fp8,
    gptq,
    int8,
    int8_with_zeros,
    mxfp4,
    nvfp4,
    packed_integers,
    packed_mxfp4,
)
from support.engine.packed.weights import awq as packed_awq
from support.engine.random_vectors import with_random_vectors
from support.engine.tiny_shape import SHAPE
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

_WIDE = {**SHAPE, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "initializer_range": 0.1}
_ALL_CHOSEN = {"num_experts_per_tok": 4}
WHOLE, ROW = (10_000, 10_000), (1, 10_000)
LINEARS = re.compile(r".*(_proj|_with_mqa|_linear|\.w[123])\.weight")


def _compressed(form: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {**settings, "ignore": ["lm_head"], **more}


def _gptq(bits: int = 4, group: int = 32, *, zeros: bool = False, ordered: bool = False, version: int = 1) -> Format:
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": not zeros}
    named = {} if version == 1 else {"checkpoint_format": "gptq_v2"}
    return Format(gptq(bits, group, zeros=zeros, ordered=ordered, version=version), {**settings, **named})


def _packed(bits: int, group: int, *, zeros: bool = False, ordered: bool = False) -> Format:
    weights = {"num_bits": bits, "symmetric": not zeros, "actorder": "group" if ordered else None}
    shape = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return Format(
        packed_integers(bits, group, zeros=zeros, ordered=ordered), _compressed("pack-quantized", {**weights, **shape})
    )


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "group"}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
FORMATS: Mapping[str, Format] = {
    "fp8-tensor": Format(fp8(WHOLE, ".weight_scale", ()), {**_FP8, "activation_scheme": "static"}),
    "fp8-blocks": Format(fp8((32, 32), ".weight_scale_inv"), {**_FP8, "weight_block_size": [32, 32]}),
    "fp8-blocks-across-parts": Format(fp8((128, 128), ".weight_scale_inv"), {**_FP8, "weight_block_size": [128, 128]}),
    "compressed-fp8-tensor": Format(
        fp8(WHOLE, ".weight_scale", (1,)), _compressed("float-quantized", {**_FLOAT8, "strategy": "tensor"})
    ),
    "compressed-fp8-channel": Format(
        fp8(ROW, ".weight_scale"), _compressed("float-quantized", {**_FLOAT8, "strategy": "channel"})
    ),
    "compressed-fp8-block": Format(
        fp8((32, 16), ".weight_scale"),
        _compressed("float-quantized", {**_FLOAT8, "strategy": "block", "block_structure": [32, 16]}),
    ),
    "compressed-int8": Format(int8(ROW), _compressed("int-quantized", {"num_bits": 8, "strategy": "channel"})),
    "compressed-int8-zeros": Format(
        int8_with_zeros, _compressed("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False})
    ),
    "compressed-w4a16": _packed(4, 32),
    "compressed-w4a16-zeros": _packed(4, 16, zeros=True),
    "compressed-w4a16-order": _packed(4, 32, ordered=True),
    "compressed-w8a16-channel": _packed(8, 0),
    "compressed-nvfp4": Format(
        nvfp4(".weight_packed", ".weight_global_scale", divides=True),
        _compressed("nvfp4-pack-quantized", {**_FLOAT4, "group_size": 16}),
    ),
    "compressed-mxfp4": Format(packed_mxfp4, _compressed("mxfp4-pack-quantized", {**_FLOAT4, "group_size": 32})),
    "awq": Format(packed_awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq": _gptq(),
    "gptq-zeros": _gptq(zeros=True),
    "gptq-order": _gptq(ordered=True),
    "gptq-8-rows-v2": _gptq(8, -1, zeros=True, version=2),
    "gptq-2": _gptq(2, 16),
    "modelopt-fp8": Format(fp8(WHOLE, ".weight_scale", ()), {**_MODELOPT, "quant_algo": "FP8"}),
    "fbgemm-fp8": Format(fp8(ROW, ".weight_scale"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "auto-round": Format(
        gptq(4, 32, zeros=True, ordered=False, version=1), {**_AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}
    ),
    "auto-round-awq": Format(packed_awq(32), {**_AUTO_ROUND, "packing_format": "auto_round:auto_awq"}),
    "modelopt-nvfp4": Format(
        nvfp4(".weight", ".weight_scale_2", divides=False), {**_MODELOPT, "quant_algo": "NVFP4", "group_size": 16}
    ),
}


def dense(*, tied: bool = False) -> PreTrainedModel:
    """Returns a model with biases, whose linears are fused. `tied`: its head is the embedding."""
    config = Qwen2Config(**SHAPE, tie_word_embeddings=tied)
    return with_random_vectors(lambda: Qwen2ForCausalLM(config), seed=3)


def wide() -> PreTrainedModel:
    """As `dense`, with sizes that are multiples of bitsandbytes' blocks."""
    config = Qwen2Config(**{**SHAPE, "intermediate_size": 128})
    return with_random_vectors(lambda: Qwen2ForCausalLM(config), seed=3)


def without_biases() -> PreTrainedModel:
    return with_random_vectors(lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)), seed=5)


def with_experts() -> PreTrainedModel:
    config = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    return with_random_vectors(lambda: MixtralForCausalLM(config), seed=4)


def qwen3_moe() -> PreTrainedModel:
    """Returns a model whose tokens choose all experts, so that rounding changes no choice."""
    config = Qwen3MoeConfig(**_WIDE, **_ALL_CHOSEN, num_experts=4, moe_intermediate_size=128, norm_topk_prob=True)
    return with_random_vectors(lambda: Qwen3MoeForCausalLM(config), seed=6)


def gpt_oss() -> GptOssForCausalLM:
    """As `qwen3_moe`, with biases and clamped gates."""
    config = GptOssConfig(**_WIDE, **_ALL_CHOSEN, num_local_experts=4, sliding_window=16, swiglu_limit=1.5)
    torch.manual_seed(8)
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("proj_bias", "sinks")):
                parameter.normal_(0.0, 0.2)
    return model


def write(
    folder: Path,
    model: PreTrainedModel,
    form: Format,
    left_out: str = "$^",
    *,
    heads: bool = False,
    tables: bool = False,
) -> PreTrainedModel:
    """Writes the model with packed linears. Returns it with the weights that these mean.

    `left_out`: a pattern of names of weights that stay as they are. `heads`: the head is packed too; `tables`: the
    embedding.
    """
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    meant: dict[str, torch.Tensor] = {}
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        packs = LINEARS.fullmatch(name) or (heads and name == "lm_head.weight")
        packs = packs or (tables and name == "model.embed_tokens.weight")
        if not packs or re.fullmatch(left_out, name):
            meant[name] = packed[name] = tensor
            continue
        found = _packed_stack(form, tensor) if tensor.dim() == 3 else form.pack(tensor)
        meant[name] = found.weight.contiguous()
        packed |= {name.removesuffix(".weight") + ending: one.contiguous() for ending, one in found.tensors.items()}
    save_file(meant, folder / "model.safetensors", {"format": "pt"})
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    save_file(packed, folder / "model.safetensors")
    change_config(folder, quantization_config=dict(form.settings))
    return oracle


def _packed_stack(form: Format, stack: torch.Tensor) -> Packed:
    each = [form.pack(one) for one in stack.contiguous()]
    tensors = {ending: torch.stack([one.tensors[ending] for one in each]) for ending in each[0].tensors}
    return Packed(tensors, torch.stack([one.weight for one in each]))


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_gpt_oss(folder: Path, model: GptOssForCausalLM) -> GptOssForCausalLM:
    """Writes a gpt-oss with its experts in MXFP4. Returns it with the weights that these mean."""
    packed = {}
    for name, parameter in list(model.named_parameters()):
        if re.fullmatch(r".*experts\.(gate_up|down)_proj", name):
            blocks, scales, _ = mxfp4(parameter.detach().transpose(1, 2).contiguous())
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    save_file({**kept, **packed}, folder / "model.safetensors")
    change_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model
