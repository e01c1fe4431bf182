"""Samples texts from a network, thousands at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from train.networks.network import Network, finish, project

_SPAN = 64  # steps that attend over the same number of keys


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float
    top_p: float
    top_k: int  # 0: all tokens, and top_p is not used
    max_tokens: int  # of prompt and output together, a multiple of 64
    ends: tuple[int, ...] = (4, 2)


@torch.no_grad()
def sample(network: Network, prompts: Sequence[Sequence[int]], how: Sampling, seed: int) -> list[list[int]]:
    """Returns each prompt's output, its end token included. All rows advance together, prompts included."""
    torch.manual_seed(seed)
    batch = _Batch(network, prompts, how)
    for start in range(0, how.max_tokens - 1, _SPAN):
        width = start + _SPAN
        batch.advance(width)
        step = partial(batch.advance, width)
        replay = _captured(step) if batch.ids.is_cuda else step
        for _ in range(min(width, how.max_tokens - 1) - start - 1):
            replay()
        if batch.all_ended():
            break
    return batch.outputs()


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """Captures a step as a CUDA graph, because launching its kernels one by one takes longer than running them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class _Batch:
    """The rows' tokens, and their keys and values [layers, rows, heads, tokens, head_dim]."""

    def __init__(self, network: Network, prompts: Sequence[Sequence[int]], how: Sampling) -> None:
        shape, device = network.shape, network.embed.device
        self._network, self._how = network, how
        self._begins = [len(prompt) for prompt in prompts]
        padded = torch.zeros(len(prompts), how.max_tokens, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(prompt)
        self.ids = padded.to(device)
        self._lengths = torch.tensor(self._begins, device=device)
        self._step = torch.zeros(1, dtype=torch.long, device=device)
        self._ends = torch.tensor(how.ends, device=device)
        self._cos, self._sin = network.rotation(torch.arange(how.max_tokens, device=device))
        dtype = torch.bfloat16 if self.ids.is_cuda else torch.float32
        size = (shape.num_layers, len(prompts), shape.num_kv, how.max_tokens, shape.head_dim)
        self._keys, self._values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))

    def advance(self, width: int) -> None:
        """Computes one token of every row; at most `width` keys are there."""
        logits = self._logits(width)
        following = self._step + 1
        drawn = _draw(logits, self._how)
        kept = self.ids.index_select(1, following)[:, 0]
        chosen = torch.where(following < self._lengths, kept, drawn)
        self.ids.index_copy_(1, following, chosen[:, None])
        self._step += 1

    def all_ended(self) -> bool:
        past = torch.arange(self.ids.shape[1], device=self.ids.device) >= self._lengths[:, None]
        return bool((torch.isin(self.ids, self._ends) & past).any(1).all())

    def outputs(self) -> list[list[int]]:
        """Returns the continuation of each prompt, up to its end token."""
        made = []
        for text, begin in zip(self.ids.tolist(), self._begins, strict=True):
            stop = next((at + 1 for at in range(begin, len(text)) if text[at] in self._how.ends), len(text))
            made.append(text[begin:stop])
        return made

    def _logits(self, width: int) -> Tensor:
        network, shape, step = self._network, self._network.shape, self._step
        x = functional.embedding(self.ids.index_select(1, step)[:, 0], network.embed)
        cos, sin = self._cos.index_select(0, step), self._sin.index_select(0, step)
        distance = step - torch.arange(width, device=x.device)
        masks = {
            window: ((distance >= 0) & ((distance < window) | (window == 0))).view(1, 1, 1, -1)
            for window in shape.windows
        }
        for index, (layer, window) in enumerate(zip(network.layers, shape.windows, strict=True)):
            q, k, v = project(
                x, layer.input_norm, layer.qkv, layer.qkv_bias, cos, sin, shape.num_q, shape.num_kv, shape.eps
            )
            keys, values = self._keys[index], self._values[index]
            keys.index_copy_(2, step, k.transpose(0, 1)[:, :, None])
            values.index_copy_(2, step, v.transpose(0, 1)[:, :, None])
            # The queries of one KV head are its sequence, so that its keys are read once.
            grouped = q.transpose(0, 1).reshape(len(x), shape.num_kv, -1, shape.head_dim)
            attended = functional.scaled_dot_product_attention(
                grouped, keys[:, :, :width], values[:, :, :width], attn_mask=masks[window]
            )
            heads = attended.reshape(len(x), shape.num_q, shape.head_dim).transpose(0, 1)
            x = finish(x, heads, layer.o, layer.post_norm, layer.gate_up, layer.down, shape.eps)
        return network.logits(x)


def _draw(logits: Tensor, how: Sampling) -> Tensor:
    """Draws one token per row: the largest share over exponential noise is a draw by shares."""
    if not how.top_k:
        shares = (logits / how.temperature).softmax(-1)
        return (shares / torch.empty_like(shares).exponential_()).argmax(-1)
    top, ids = logits.topk(how.top_k, dim=-1)
    shares = (top / how.temperature).softmax(-1)
    shares = shares.masked_fill(shares.cumsum(-1) - shares >= how.top_p, 0.0)
    return ids.gather(-1, (shares / torch.empty_like(shares).exponential_()).argmax(-1, keepdim=True))[:, 0]
