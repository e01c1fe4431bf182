"""The model as training computes it: many documents in one row of tokens, attention by block masks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Attend = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """The values of a config.json that are used here."""

    vocab_size: int
    hidden: int
    inner: int
    num_layers: int
    num_q: int
    num_kv: int
    head_dim: int
    theta: float
    eps: float
    windows: tuple[int, ...]  # a layer: keys that a query sees; 0: all


def read_shape(folder: Path) -> Shape:
    """Returns the shape of a Llama or Qwen2 folder."""
    raw = json.loads((folder / "config.json").read_text())
    count = raw["num_hidden_layers"]
    kinds = raw.get("layer_types") or ["full_attention"] * count
    window = raw.get("sliding_window") or 0
    return Shape(
        raw["vocab_size"],
        raw["hidden_size"],
        raw["intermediate_size"],
        count,
        raw["num_attention_heads"],
        raw["num_key_value_heads"],
        raw["head_dim"],
        raw["rope_theta"],
        raw["rms_norm_eps"],
        tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
    )


class Layer(nn.Module):
    """The weights of one layer, under the names of the checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        q, kv = shape.num_q * shape.head_dim, shape.num_kv * shape.head_dim
        self.input_norm = nn.Parameter(torch.ones(shape.hidden))
        self.post_norm = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = nn.Parameter(torch.zeros(q + 2 * kv, shape.hidden))
        self.qkv_bias = nn.Parameter(torch.zeros(q + 2 * kv))
        self.o = nn.Parameter(torch.zeros(shape.hidden, q))
        self.gate_up = nn.Parameter(torch.zeros(2 * shape.inner, shape.hidden))
        self.down = nn.Parameter(torch.zeros(shape.hidden, shape.inner))


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMS norm."""
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)) * weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns [heads, tokens, head_dim] rotated by [tokens, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def project(
    x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, num_q: int, num_kv: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values, each [heads, tokens, head_dim]."""
    dtype = compute_dtype(x)
    qkv = functional.linear(normed(x, norm, eps).to(dtype), weight.to(dtype), bias.to(dtype))
    heads = qkv.view(len(x), num_q + 2 * num_kv, -1).transpose(0, 1).float()
    q, k, v = torch.split(heads, [num_q, num_kv, num_kv])
    return rotated(q, cos, sin).to(dtype), rotated(k, cos, sin).to(dtype), v.to(dtype).contiguous()


def finish(x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float) -> Tensor:
    """Returns the output of a layer after attention [heads, tokens, head_dim]."""
    dtype = compute_dtype(x)
    flat = attended.transpose(0, 1).reshape(len(x), -1)
    x = x + functional.linear(flat, o.to(dtype))
    gate, up = functional.linear(normed(x, norm, eps).to(dtype), gate_up.to(dtype)).chunk(2, dim=-1)
    return x + functional.linear(functional.silu(gate) * up, down.to(dtype))


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the type in which matrices are multiplied."""
    return torch.bfloat16 if x.is_cuda else torch.float32


def attend_densely(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    """Returns attention over a mask of all pairs, for short rows on a CPU, where flex_attention has no backward."""
    at = torch.arange(q.shape[2], device=q.device)
    mask = block_mask.mask_mod(at[:0], at[:0], at[:, None], at[None, :])
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The same functions, compiled or not."""

    project: Callable[..., tuple[Tensor, Tensor, Tensor]] = project
    finish: Callable[..., Tensor] = finish
    attend: Attend = attend_densely


def compiled_kernels() -> Kernels:
    """Returns kernels that are compiled for the first shape that they meet."""
    # Past its limit of variants torch.compile runs the plain function, which holds a matrix of all pairs of tokens.
    torch._dynamo.config.recompile_limit = 64
    return Kernels(
        torch.compile(project, dynamic=False),
        torch.compile(finish, dynamic=False),
        torch.compile(flex_attention, dynamic=False),
    )


class Network(nn.Module):
    """The decoder. Tokens of all documents lie in one row; positions start anew with each document."""

    def __init__(self, shape: Shape, kernels: Kernels) -> None:
        super().__init__()
        self.shape = shape
        self.kernels = kernels
        self.embed = nn.Parameter(torch.zeros(shape.vocab_size, shape.hidden))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.layers = [Layer(shape) for _ in range(shape.num_layers)]
        self._registered = nn.ModuleList(self.layers)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, each [tokens, head_dim / 2]."""
        steps = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float32, device=positions.device)
        angles = positions.float()[:, None] / self.shape.theta ** (steps / self.shape.head_dim)
        return angles.cos(), angles.sin()

    def forward(self, ids: Tensor, positions: Tensor, masks: Mapping[int, BlockMask]) -> Tensor:
        """Returns [tokens, hidden] before the last norm. Takes a mask for each window."""
        shape, run = self.shape, self.kernels
        x = functional.embedding(ids, self.embed)
        cos, sin = self.rotation(positions)
        for layer, window in zip(self.layers, shape.windows, strict=True):
            q, k, v = run.project(
                x, layer.input_norm, layer.qkv, layer.qkv_bias, cos, sin, shape.num_q, shape.num_kv, shape.eps
            )
            attended = run.attend(q[None], k[None], v[None], block_mask=masks[window], enable_gqa=True)[0]
            x = run.finish(x, attended, layer.o, layer.post_norm, layer.gate_up, layer.down, shape.eps)
        return x

    def logits(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        return functional.linear(normed(x, self.norm, self.shape.eps).to(dtype), self.embed.to(dtype)).float()


def load(folder: Path, shape: Shape, kernels: Kernels) -> Network:
    """Returns the network with a checkpoint's weights; biases that it lacks stay zero."""
    raw = {
        name.removeprefix("model."): tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    network = Network(shape, kernels)
    with torch.no_grad():
        network.embed.copy_(raw["embed_tokens.weight"])
        network.norm.copy_(raw["norm.weight"])
        for index, layer in enumerate(network.layers):
            own = {
                name.removeprefix(f"layers.{index}."): t
                for name, t in raw.items()
                if name.startswith(f"layers.{index}.")
            }
            layer.input_norm.copy_(own["input_layernorm.weight"])
            layer.post_norm.copy_(own["post_attention_layernorm.weight"])
            layer.qkv.copy_(torch.cat([own[f"self_attn.{one}_proj.weight"] for one in "qkv"]))
            if "self_attn.q_proj.bias" in own:
                layer.qkv_bias.copy_(torch.cat([own[f"self_attn.{one}_proj.bias"] for one in "qkv"]))
            layer.o.copy_(own["self_attn.o_proj.weight"])
            layer.gate_up.copy_(torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]))
            layer.down.copy_(own["mlp.down_proj.weight"])
    return network


def save(network: Network, path: Path) -> None:
    """Writes the weights as bf16, under the names of Qwen2."""
    shape = network.shape
    made: dict[str, Tensor] = {"model.embed_tokens.weight": network.embed, "model.norm.weight": network.norm}
    sizes = [shape.num_q * shape.head_dim, shape.num_kv * shape.head_dim, shape.num_kv * shape.head_dim]
    for index, layer in enumerate(network.layers):
        prefix = f"model.layers.{index}"
        made[f"{prefix}.input_layernorm.weight"] = layer.input_norm
        made[f"{prefix}.post_attention_layernorm.weight"] = layer.post_norm
        for one, weight, bias in zip(
            "qkv", torch.split(layer.qkv, sizes), torch.split(layer.qkv_bias, sizes), strict=True
        ):
            made[f"{prefix}.self_attn.{one}_proj.weight"] = weight
            made[f"{prefix}.self_attn.{one}_proj.bias"] = bias
        made[f"{prefix}.self_attn.o_proj.weight"] = layer.o
        gate, up = layer.gate_up.chunk(2)
        made[f"{prefix}.mlp.gate_proj.weight"] = gate
        made[f"{prefix}.mlp.up_proj.weight"] = up
        made[f"{prefix}.mlp.down_proj.weight"] = layer.down
    save_file(
        {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in made.items()},
        path,
        metadata={"format": "pt"},
    )
