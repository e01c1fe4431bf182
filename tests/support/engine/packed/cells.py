"""The matrix of architecture classes and ways of packing: what runs, and what is refused by which words.

The page of weight formats lists it, and tests run it: a cell's model is written here, and its logits are compared with
those of Transformers with the weights that the packed ones mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from support.engine.packed import bitsandbytes
from support.engine.packed.models import FORMATS, change_config, write, write_gpt_oss
from support.engine.packed.weights import Format
from support.engine.random_vectors import with_random_vectors
from support.engine.tiny_shape import SHAPE
from support.gguf.files import write_gguf
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

# Logits in fp32 differ by at most this part of the largest one: the order of sums is all that differs.
BOUND = 1e-5
_SIZE, _WIDE = 64, 256  # blocks of k-quants have 256 values
_LEGACY = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
_K_QUANTS = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)


@dataclass(frozen=True, slots=True)
class ModelClass:
    """Architectures whose weights are laid out alike."""

    summary: str
    make: Callable[[int], PreTrainedModel]  # of a width
    formats: tuple[str, ...]  # that run
    refused: Mapping[str, str]  # by format: words of the error


@dataclass(frozen=True, slots=True)
class Cell:
    """A class in a format."""

    model: str  # name in CLASSES
    form: str  # name in FORMATS, of bitsandbytes or of GGUF

    @property
    def name(self) -> str:
        return f"{self.model}-{self.form}"


def _dense(size: int) -> PreTrainedModel:
    config = LlamaConfig(**_shape(size))
    return with_random_vectors(lambda: LlamaForCausalLM(config), seed=5)


def _biased(size: int) -> PreTrainedModel:
    config = Qwen2Config(**_shape(size))
    return with_random_vectors(lambda: Qwen2ForCausalLM(config), seed=3)


def _sandwiched(size: int) -> PreTrainedModel:
    config = Gemma2Config(
        **_shape(size),
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=9,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    )
    return with_random_vectors(lambda: Gemma2ForCausalLM(config), seed=7)


def _experts(size: int) -> PreTrainedModel:
    config = MixtralConfig(**_shape(size), num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    return with_random_vectors(lambda: MixtralForCausalLM(config), seed=4)


def _shared(size: int) -> PreTrainedModel:
    config = Qwen2MoeConfig(
        **_shape(size),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=size,
        shared_expert_intermediate_size=size,
    )
    return with_random_vectors(lambda: Qwen2MoeForCausalLM(config), seed=8)


def _stacked(size: int) -> PreTrainedModel:
    config = GraniteMoeConfig(**_shape(size), num_local_experts=4, num_experts_per_tok=2, logits_scaling=5.0)
    return with_random_vectors(lambda: GraniteMoeForCausalLM(config), seed=9)


def _alternating(size: int) -> PreTrainedModel:
    config = GptOssConfig(**_shape(size), num_local_experts=4, num_experts_per_tok=2, head_dim=32, swiglu_limit=0.8)
    return with_random_vectors(lambda: GptOssForCausalLM(config), seed=10)


def _shape(size: int) -> dict[str, Any]:
    return {**SHAPE, "num_hidden_layers": 2, "hidden_size": size, "intermediate_size": size}


_BITSANDBYTES: Mapping[str, Format] = bitsandbytes.FORMATS
_GGUF: Mapping[str, Kind] = {f"gguf-{kind.name.lower()}": kind for kind in (*_LEGACY, *_K_QUANTS)}
_IN_FOLDERS = (*FORMATS, *_BITSANDBYTES)
# What writes files cannot round to k-quants; Transformers reads those of some architectures.
_ROUNDED = (*_IN_FOLDERS, *(name for name, kind in _GGUF.items() if kind in _LEGACY))
_ALL = (*_IN_FOLDERS, *_GGUF)
_STACKS_APART = {
    name: "experts in one tensor are not read in this format"
    for name in _IN_FOLDERS
    if name.startswith(("bitsandbytes-nf4", "bitsandbytes-fp4"))
}
CLASSES: Mapping[str, ModelClass] = {
    "dense": ModelClass("dense, without biases (Llama)", _dense, _ALL, {}),
    "biased": ModelClass("dense, with biases (Qwen2)", _biased, _ALL, {}),
    "sandwiched": ModelClass("norms on both sides, caps and windows (Gemma 2)", _sandwiched, _ROUNDED, {}),
    "experts": ModelClass("experts that are named one by one (Mixtral)", _experts, _ROUNDED, {}),
    "shared-experts": ModelClass("experts beside a shared one (Qwen2 MoE)", _shared, _ROUNDED, {}),
    "stacked-experts": ModelClass(
        "experts in stacks (Granite MoE)",
        _stacked,
        tuple(one for one in _ROUNDED if one not in _STACKS_APART),
        _STACKS_APART,
    ),
    "gpt-oss": ModelClass(
        "experts in stacks whose gates and ups alternate, with biases (gpt-oss)",
        _alternating,
        ("mxfp4",),
        dict.fromkeys(_IN_FOLDERS, "experts whose matrices are transposed or alternate are not read"),
    ),
}


def cells() -> list[Cell]:
    """Returns the cells whose models load and run."""
    return [Cell(name, form) for name, row in CLASSES.items() for form in row.formats]


def refused_cells() -> list[Cell]:
    """Returns the cells that a load refuses."""
    return [Cell(name, form) for name, row in CLASSES.items() for form in row.refused]


def settings_of(form: str) -> Mapping[str, Any]:
    """Returns the quantization_config of a way of packing."""
    if form == "mxfp4":
        return {"quant_method": "mxfp4"}
    return (FORMATS.get(form) or _BITSANDBYTES[form]).settings


def is_gguf(form: str) -> bool:
    """Returns whether a way of packing is that of GGUF files, which have no quantization_config."""
    return form in _GGUF


def write_cell(cell: Cell, folder: Path) -> tuple[Path, PreTrainedModel]:
    """Writes a cell's model. Returns where it lies, and the model of the weights that the packed ones mean."""
    kind = _GGUF.get(cell.form)
    model = CLASSES[cell.model].make(_WIDE if kind in _K_QUANTS else _SIZE)
    if cell.form == "mxfp4":
        return folder, write_gpt_oss(folder, model)
    if kind is None:
        return folder, write(folder, model, FORMATS.get(cell.form) or _BITSANDBYTES[cell.form])
    path = write_gguf(folder / "model.gguf", model, kind)
    return path, _read_by_transformers(path) if kind in _K_QUANTS else rounded(model, kind)


def write_unpacked(cell: Cell, folder: Path) -> None:
    """Writes a cell's model without packing its weights, though config.json says so."""
    CLASSES[cell.model].make(_SIZE).save_pretrained(folder)
    change_config(folder, quantization_config=dict(settings_of(cell.form)))


def _read_by_transformers(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def rounded(model: PreTrainedModel, kind: Kind) -> PreTrainedModel:
    """Replaces matrices of several rows by what the library makes of them: quantized and dequantized."""
    for parameter in model.parameters():
        if parameter.squeeze().dim() > 1:
            rows = parameter.data.reshape(-1, parameter.shape[-1])
            values = gguf.quants.dequantize(gguf.quants.quantize(rows.numpy(), kind), kind)
            parameter.data.copy_(torch.from_numpy(values).view(parameter.shape))
    return model
