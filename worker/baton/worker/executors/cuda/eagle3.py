"""Drafts by an EAGLE-3 head on the device: from the model's hidden states of three layers, and the next token.

The head's token i is the model's token i + 1, whose hidden state is the model's i, or the head's own behind a draft.
Hidden states lie in a pool with the blocks of the head's KV. As on a CPU, a row's tokens are those that this worker
computed for it: a prefix from the cache has none, and the head counts positions from there on, as RoPE allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.worker.config import WorkerConfig
from baton.worker.core import Int32, Int64, RowInit
from baton.worker.executors.cuda.draft_steps import DraftNet, DraftRows, DraftSteps
from baton.worker.executors.cuda.inputs.uploads import PinnedRing
from baton.worker.executors.host.draft_models import DraftMemory
from baton.worker.executors.host.eagle3 import Eagle3Config, Eagle3Head
from baton.worker.executors.kv_dtype import dtype_name
from baton.worker.kv_spec import KvSpec, full_spec
from baton.worker.layers.attention import Attention, AttentionWeights
from baton.worker.layers.cuda.device import CudaDevice
from baton.worker.layers.cuda.latent_device import LatentDevice
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.layers.linear import Linear, LinearWeights
from baton.worker.layers.mlp import Mlp, MlpWeights
from baton.worker.layers.spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.decoder import SegmentGraphs
from baton.worker.models.hidden_states import HiddenStates
from baton.worker.quantization.neighbours import Norm, Stream
from baton.worker.quantization.registry import UNQUANTIZED
from baton.worker.speculation.proposer import Ask

_NOTHING = np.empty(0, np.int32)
_NEVER = -6e4  # the logit of a token that the head lacks; float16 has it
_USUAL_UPLOAD = 1 << 14  # numbers of a step
_UNKNOWN = -1


def head_model(head: Eagle3Config, model: ModelConfig, max_model_len: int) -> ModelConfig:
    """Returns a head's layer as a model, whose logits are over all tokens of the model that verifies."""
    attention = AttentionSpec(head.num_q_heads, head.num_kv_heads, head.head_dim, head.rope, head.head_dim**-0.5)
    return ModelConfig(
        "LlamaForCausalLMEagle3",
        model.vocab_size,
        head.hidden_size,
        (LayerSpec(attention, MlpSpec(head.inner_size)),),
        NormSpec(head.eps),
        max_model_len,
        tie_embeddings=False,
        initializer_range=0.0,
        dtype="",
        eos_token_ids=(),
    )


def head_kv_spec(head: Eagle3Config, block_size: int, dtype: torch.dtype) -> KvSpec:
    """Returns the spec of a head's KV."""
    name = dtype_name(dtype)
    return full_spec(b"", name, 1, head.num_kv_heads, head.head_dim, block_size)


def block_bytes(head: Eagle3Config, block_size: int, dtype: torch.dtype) -> int:
    """Returns the memory of a block's KV and hidden states."""
    return head_kv_spec(head, block_size, dtype).page_bytes + block_size * head.hidden_size * dtype.itemsize


class Eagle3Net:
    """Implements Model.

    x = [norm(embed(token)), norm(h)];  r = h + attention(x);  r = r + mlp(norm(r));  logits = lm_head(norm(r))

    `pool` [num_blocks * block_size, hidden_size] has h of every token. In a step of decodes, the r of a row's last
    token becomes the h of its next one. The embedding is a copy, which stays where the model sleeps.
    """

    def __init__(self, head: Eagle3Head, pool: Tensor, rows: DraftRows, device: CudaDevice | LatentDevice) -> None:
        config, norms = head.config, NormSpec(head.config.eps)
        self.weights = {name: tensor.to(pool.device) for name, tensor in head.weights.items()}
        self._config, self._pool, self._rows, self._device = config, pool, rows, device
        self._token_ids = head.token_ids.to(pool.device)
        embed = head.embed.to(pool.device) if isinstance(head.embed, Tensor) else head.embed
        self._embed = device.taken(embed, torch.arange(len(embed), device=pool.device))
        spec = AttentionSpec(
            config.num_q_heads, config.num_kv_heads, config.head_dim, config.rope, config.head_dim**-0.5
        )
        qkv = self._linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        attention = AttentionWeights(None, qkv, None, None, self._linear("self_attn.o_proj"), None)
        self._attention: Attention[StepInputs] = Attention(0, spec, attention, norms, 1.0, device)
        inner = self.weights["midlayer.post_attention_layernorm.weight"]
        mlp = MlpWeights(inner, self._linear("mlp.gate_proj", "mlp.up_proj"), self._linear("mlp.down_proj"), None)
        self._mlp = Mlp(MlpSpec(config.inner_size), mlp, norms, 1.0, device)
        self._lm_head = Linear(LinearWeights(UNQUANTIZED, {"weight": self.weights["lm_head.weight"]}), device)

    def combined(self, joined: Tensor) -> Tensor:
        """Returns h [num_tokens, hidden_size] of the model's joined hidden states."""
        return joined @ self.weights["fc.weight"].t()

    def forward(
        self,
        step: StepInputs,
        graphs: SegmentGraphs[StepInputs] | None = None,
        on_written: Callable[[int], None] | None = None,
        hidden_states: HiddenStates | None = None,
    ) -> Tensor:
        """Writes the step's keys and values. Returns r [num_tokens, hidden_size]."""
        hidden = self._pool.index_select(0, step.slot_mapping.clamp(min=0))
        embedded = self._norm("midlayer.input_layernorm").apply(
            self._device.taken(self._embed, step.tokens), self._device.kernels
        )
        normed = self._norm("midlayer.hidden_norm").apply(hidden, self._device.kernels)
        query = self._attention.project(Stream(torch.cat((embedded, normed), dim=1)), step, None)
        attended = self._attention.attend(query, step, None)
        base = normed if self._config.residual_is_normed else hidden
        stream = Stream(base, fuse_norms=step.fuse_norms)
        self._attention.finish(stream, attended)
        self._mlp.add(stream)
        found = stream.settled()
        if step.tiles is None:
            self._carry(step, found)
        return found

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns logits [num_rows, vocab_size] over the model's tokens."""
        own = self._lm_head.project(Stream(hidden, fuse_norms=True), self._norm("norm"))
        found = hidden.new_empty(len(hidden), len(self._embed)) if out is None else out
        return found.fill_(_NEVER).index_copy_(1, self._token_ids, own)

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns the norm before the logits."""
        return self._norm("norm").apply(hidden, self._device.kernels)

    def pooled(self, vectors: Tensor) -> Tensor:
        """Returns the vectors: a head has no pooler."""
        return vectors

    def _carry(self, step: StepInputs, found: Tensor) -> None:
        """Keeps the hidden state of a row's last token for the next. Padding goes to a block that nobody reads."""
        rows, table, block_size = step.rows.clamp(min=0).long(), self._rows.block_table, self._rows.block_size
        positions = step.positions.long() + 1
        blocks = table[rows, (positions // block_size).clamp(max=table.shape[1] - 1)]
        last = torch.ones_like(step.rows, dtype=torch.bool)
        torch.ne(step.rows[1:], step.rows[:-1], out=last[:-1])
        slots = blocks * block_size + positions % block_size
        self._pool.index_copy_(0, torch.where(last & (step.rows >= 0), slots, 0), found)

    def _linear(self, *names: str) -> LinearWeights:
        """Returns the linear with the rows of these."""
        parts = [self.weights[f"midlayer.{name}.weight"] for name in names]
        return LinearWeights(UNQUANTIZED, {"weight": torch.cat(parts)})

    def _norm(self, name: str) -> Norm:
        return Norm(self.weights[f"{name}.weight"], self._config.eps)


class CudaEagle3:
    """Implements Proposer and HiddenReader."""

    costly = True

    def __init__(
        self,
        head: Eagle3Head,
        model: ModelConfig,
        dtype: torch.dtype,
        memory: DraftMemory,
        config: WorkerConfig,
        device: torch.device,
        *,
        most: int,
    ) -> None:
        """`most` drafts of a row at a time."""
        size = memory.num_blocks * memory.block_size
        self._pool = torch.zeros(size, head.config.hidden_size, dtype=dtype, device=device)
        self._net: Eagle3Net | None = None
        shape = head_model(head.config, model, memory.max_model_len)
        net = DraftNet(shape, head_kv_spec(head.config, memory.block_size, dtype), self._maker(head))
        # What a verified draft left is computed again, from the model's hidden state.
        self._steps = DraftSteps(net, dtype, memory, config, device, most=most, few=most + 1)
        self._uploads, self._device = PinnedRing(_USUAL_UPLOAD, torch.int64), device
        self._inits: dict[int, RowInit] = {}
        self._base = np.full(memory.num_rows, _UNKNOWN, np.int64)  # the model's token whose hidden state is the first
        self._known = np.zeros(memory.num_rows, np.int64)  # tokens of the model with hidden states

    def admit(self, init: RowInit) -> None:
        """Begins a row of which nothing is known."""
        self.free(int(init.row), _NOTHING)
        self._inits[int(init.row)] = init

    def free(self, row: int, token_ids: Int32) -> None:
        """Frees a row's blocks."""
        self._inits.pop(row, None)
        self._base[row] = _UNKNOWN
        self._steps.release(row)

    def propose(self, asked: Sequence[Ask]) -> list[Int32 | Exception]:
        own = []
        for ask in asked:
            base = int(self._base[ask.row])
            if base != _UNKNOWN and self._known[ask.row] >= len(ask.token_ids) - 1 > base:
                own.append(Ask(ask.row, ask.token_ids[base + 1 :], ask.most))
        found = self._steps.drafts(own) if own else {}
        return [found.get(ask.row, _NOTHING) for ask in asked]

    def take_hidden(self, rows: Int64, num_computed: Int64, counts: Int64, hidden: Tensor) -> None:
        """Stores hidden states, and has what follows them in their rows computed again."""
        starts = np.cumsum(counts) - counts
        ends = num_computed + counts
        fits = (rows >= 0) & (self._base[rows] != _UNKNOWN) & (num_computed <= self._known[rows])
        fits &= (num_computed >= self._base[rows]) & (ends - self._base[rows] <= self._steps.room[rows])
        self._store(rows[fits], num_computed[fits], ends[fits])
        for index in np.lexsort((num_computed, rows)).tolist() if not fits.all() else ():
            row = int(rows[index])
            if not fits[index] and row in self._inits:
                fits[index] = self._begin_or_grow(row, int(num_computed[index]), int(ends[index]))
                if fits[index]:
                    one = slice(index, index + 1)
                    self._store(rows[one], num_computed[one], ends[one])
        chosen = np.flatnonzero(fits)
        if not len(chosen):
            return
        assert self._net is not None, "the steps have made it"
        lengths = counts[chosen]
        offsets = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        of_rows = np.repeat(rows[chosen], lengths)
        positions = np.repeat(num_computed[chosen], lengths) + offsets - self._base[of_rows]
        places = np.repeat(starts[chosen], lengths) + offsets
        up = self._uploads.to_device(np.concatenate((self._steps.slots(of_rows, positions), places)), self._device)
        slots, index_of = up.chunk(2)
        self._pool.index_copy_(0, slots, self._net.combined(hidden.index_select(0, index_of)))

    def sleep(self) -> int:
        """Frees nothing: the weights and the KV of a head stay on the device. Returns 0."""
        return 0

    def close(self) -> None:
        """Does nothing: the memory of weights and KV ends with this object."""

    def _store(self, rows: Int64, firsts: Int64, ends: Int64) -> None:
        """Records that rows have hidden states of these tokens, ascending in each row."""
        self._known[rows] = ends
        self._steps.forget(rows, firsts - self._base[rows])

    def _begin_or_grow(self, row: int, first: int, end: int) -> bool:
        """Prepares a row for hidden states from `first` on. Returns whether it can have them."""
        if self._base[row] == _UNKNOWN or first > self._known[row] or first < self._base[row]:
            init = self._inits[row]
            before = init.num_prompt_tokens - first - 1
            if before < 0:
                return self._lose(row)
            self._base[row] = first  # what is before was computed elsewhere
            self._steps.begin(replace(init, num_prompt_tokens=before))
        return self._steps.reserve(row, end - int(self._base[row])) or self._lose(row)

    def _lose(self, row: int) -> bool:
        """Gives a row no drafts until it is admitted again. Returns False."""
        self.free(row, _NOTHING)
        return False

    def _maker(self, head: Eagle3Head) -> Callable[[Any, DraftRows], Eagle3Net]:
        def make(ops: CudaDevice | LatentDevice, rows: DraftRows) -> Eagle3Net:
            self._net = Eagle3Net(head, self._pool, rows, ops)
            return self._net

        return make
