"""Small random models with an MTP layer in the form of published checkpoints, and what one guesses plainly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.engine.spec_runs import MODEL, VOCAB_SIZE
from support.engine.tiny_moe_models import LATENT_SHAPE
from support.engine.tiny_shape import SHAPE
from support.engine.tiny_state_models import DELTA, STATE_EXPERTS, decaying
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

APART = ("qwen3_next", "qwen3_5_text")  # models whose checkpoints keep the layer apart from their own
NUM_LAYERS = 2  # of the model; the MTP layer comes after them
_SIZES = {
    "max_position_embeddings": 2048,
    "num_hidden_layers": NUM_LAYERS + 1,
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
}
_EXPERTS = {
    **_SIZES,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
LAYER = f"model.layers.{NUM_LAYERS}."
_QUIET = 0.02  # of what a layer of `agreeing` models adds to the stream


def _deepseek() -> PreTrainedModel:
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**LATENT_SHAPE, **_EXPERTS, "first_k_dense_replace": 1}))


def _glm() -> PreTrainedModel:
    more = {"head_dim": 24, "use_qk_norm": True, "first_k_dense_replace": 1}
    return Glm4MoeForCausalLM(Glm4MoeConfig(**{**SHAPE, **_EXPERTS, **more}))


def _qwen3_next() -> PreTrainedModel:
    kinds = ["linear_attention", "full_attention", "full_attention"]
    more = {**DELTA, **STATE_EXPERTS, "layer_types": kinds}
    return decaying(Qwen3NextForCausalLM(Qwen3NextConfig(**{**SHAPE, **_SIZES, **more})))


def _qwen3_5() -> PreTrainedModel:
    kinds = ["linear_attention", "full_attention", "full_attention"]
    return decaying(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SHAPE, **_SIZES, **DELTA, "layer_types": kinds})))


def _glm_lite() -> PreTrainedModel:
    kinds = ["dense", "sparse", "sparse"]
    return Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**{**LATENT_SHAPE, **_EXPERTS, "mlp_layer_types": kinds}))


MTP_MODELS = {
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm,
    "glm4_moe_lite": _glm_lite,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
}
# Of models that keep the layer apart from their own: names by those of the others.
_NAMES_APART = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
    "shared_head.head": "lm_head",
}


def write_mtp_model(
    folder: Path, name: str = "deepseek_v3", *, agreeing: bool = False, copies: bool = True
) -> PreTrainedModel:
    """Writes a model with the sample model's tokenizer. Returns one whose last layer is the MTP layer's.

    `agreeing`: the next token depends on the last one most of all, and the MTP layer says so too. `copies`: the layer
    has the embedding and the head again, as published checkpoints have.
    """
    torch.manual_seed(sum(name.encode()))
    whole = MTP_MODELS[name]().eval()
    for key, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        if key.endswith("e_score_correction_bias"):
            tensor.data.normal_(0.0, 0.2)
        if tensor.dim() == 1 and key.endswith("norm.weight") and not agreeing:
            tensor.data.normal_(1.0, 0.2)
        if agreeing and ("o_proj" in key or "down_proj" in key or "out_proj" in key):
            tensor.data.mul_(_QUIET)
    whole.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    if config.get("mlp_layer_types"):
        config["mlp_layer_types"] = config["mlp_layer_types"][:NUM_LAYERS]
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    if name in APART:
        tensors = load_file(folder / "model.safetensors")
        moved = {own: one for own, one in tensors.items() if own.startswith(LAYER)}
        change_tensors(folder, dict.fromkeys(moved))
        change_tensors(folder, {"mtp.layers.0." + own.removeprefix(LAYER): one for own, one in moved.items()})
    change_tensors(folder, _mtp_tensors(whole, name, agreeing=agreeing, copies=copies))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, folder)
    return whole


def change_tensors(folder: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Adds tensors to a folder's checkpoint, or takes them out."""
    path = folder / "model.safetensors"
    tensors: dict[str, Any] = {**load_file(path), **changes}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, {"format": "pt"})


def _name(model: str, tensor: str) -> str:
    """Returns the name of an MTP layer's tensor, which is that of other models'."""
    return (_NAMES_APART[tensor] if model in APART else LAYER + tensor) + ".weight"


def _mtp_tensors(whole: PreTrainedModel, name: str, *, agreeing: bool, copies: bool) -> dict[str, Tensor]:
    hidden, generator = whole.config.hidden_size, torch.Generator().manual_seed(7)
    least = 0.0 if name in APART else 1.0  # weights of norms that add 1 to them

    def norm() -> Tensor:
        return least + (0.0 if agreeing else 0.1) * torch.randn(hidden, generator=generator)

    proj = 0.1 * torch.randn(hidden, 2 * hidden, generator=generator)
    if agreeing:  # the embedding alone
        proj = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    tensors = {own: norm() for own in ("enorm", "hnorm", "shared_head.norm")}
    tensors["eh_proj"] = proj
    if copies and name not in APART:
        tensors["embed_tokens"] = whole.get_input_embeddings().weight.detach().clone()
        tensors["shared_head.head"] = whole.get_output_embeddings().weight.detach().clone()
    return {_name(name, own): tensor for own, tensor in tensors.items()}


class PlainMtp:
    """A model and its MTP layer without a cache: computes the whole text for each guess, in fp32."""

    def __init__(self, folder: Path, whole: PreTrainedModel, name: str = "deepseek_v3") -> None:
        self._name = name
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._weights = load_file(folder / "model.safetensors")
        self._eps = whole.config.rms_norm_eps
        self._body = whole.model
        self._body.layers = nn.ModuleList([self._body.layers[NUM_LAYERS]])
        self._body.norm = nn.Identity()

    def guess(self, text: Sequence[int], most: int, first: int = 0) -> list[int]:
        """Returns the most likely tokens behind a text. It sees the hidden states from position `first` on."""
        with torch.inference_mode():
            hidden = self._model.model(torch.tensor([text])).last_hidden_state[0][first:-1]
            tokens = list(text[first + 1 :])
            for _ in range(most):
                embedded = self._model.get_input_embeddings()(torch.tensor(tokens))
                joined = torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), 1)
                x = functional.linear(joined, self._own("eh_proj"))
                last = self._body(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1]
                normed = self._norm(last, "shared_head.norm")
                tokens.append(int(functional.linear(normed, self._own("shared_head.head")).argmax()))
                hidden = torch.cat((hidden, (normed if self._name in APART else last)[None]))
        return tokens[-most:]

    def _own(self, name: str) -> Tensor:
        return self._weights[_name(self._name, name)]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._own(name) + (1.0 if self._name in APART else 0.0)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * weight
