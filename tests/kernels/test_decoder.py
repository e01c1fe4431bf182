"""A decoder on a GPU, in Triton's interpreter, equals the same decoder on a CPU, whatever its layers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.kernels.reference.attention.paged_attention import Scratch
from baton.worker.core import BlockId, Row, RowInit, SamplingParams, StepPlan
from baton.worker.executors.cpu.rows import Rows
from baton.worker.executors.cpu.step_inputs import make_step_inputs
from baton.worker.executors.cuda.steps.piecewise import Pieces
from baton.worker.layers.cpu.device import CpuDevice
from baton.worker.layers.cuda.attention import PagedAttention
from baton.worker.layers.cuda.device import CudaDevice
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.layers.rope import cos_sin_tables
from baton.worker.models.config import ModelConfig
from baton.worker.models.decoder import Decoder
from baton.worker.models.registry import parse_config
from baton.worker.models.weights import ModelWeights
from baton.worker.weights.build import dummy_weights

BLOCK_SIZE = 16
BLOCKS_A_ROW = 2
MAX_LEN = BLOCK_SIZE * BLOCKS_A_ROW
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.2,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
SCALES = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
# Configs that ask for every part that layers have.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": BIASED,
    "Phi3ForCausalLM": {"sliding_window": 6},
    "Qwen3ForCausalLM": {},
    "GraniteForCausalLM": SCALES,
    "Olmo2ForCausalLM": {},
    "Glm4ForCausalLM": {},
    "CohereForCausalLM": {"use_qk_norm": True},
    "OlmoForCausalLM": {"clip_qkv": 0.3},
    "Gemma2ForCausalLM": {"sliding_window": 6, "query_pre_attn_scalar": 2, "attn_logit_softcapping": 0.5},
    "Gemma3ForCausalLM": {"sliding_window": 6, "sliding_window_pattern": 2},
    "GPT2LMHeadModel": {"n_positions": 64},
    "Ministral3ForCausalLM": {
        "rope_parameters": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "GPTNeoXForCausalLM": {"num_attention_heads": 1},
}


class Chunk(NamedTuple):
    """Tokens of one row that a step computes."""

    row: int
    first: int
    last: int


# Two prompts; then one decodes beside the other's next chunk; then it decodes alone.
STEPS: list[tuple[int, list[Chunk]]] = [
    (0, [Chunk(0, 0, 9), Chunk(1, 0, 3)]),
    (1, [Chunk(0, 9, 10), Chunk(1, 3, 7)]),
    (1, [Chunk(0, 10, 11)]),
]
CASES = [
    *((architecture, "plain") for architecture in MODELS),
    *((architecture, "invariant") for architecture in ("LlamaForCausalLM", "GraniteForCausalLM", "Olmo2ForCausalLM")),
    *((architecture, "pieces") for architecture in ("LlamaForCausalLM", "Olmo2ForCausalLM")),
]


class Interpreted(Pieces):
    """Pieces that launch segments instead of replaying them."""

    def replay(self, index: int) -> None:
        self.launch(self._size, index)


class Cpu:
    def __init__(self, config: ModelConfig, weights: ModelWeights, tokens: Tensor) -> None:
        self.cache = torch.zeros(2, len(tokens) * BLOCKS_A_ROW + 1, 2, 1, BLOCK_SIZE, 16)
        tables = cos_sin_tables(config.ropes, config.head_dim, MAX_LEN)
        self.decoder = Decoder(config, weights, CpuDevice(self.cache, tables))
        self._config = config
        self._rows = Rows(len(tokens), MAX_LEN, BLOCK_SIZE, null_block=len(tokens) * BLOCKS_A_ROW)
        for row, token_ids in enumerate(tokens.numpy().astype(np.int32)):
            self._rows.admit(RowInit(Row(row), token_ids, MAX_LEN, SamplingParams()))
            first = row * BLOCKS_A_ROW
            self._rows.add_blocks(row, [BlockId(block) for block in range(first, first + BLOCKS_A_ROW)])

    def forward(self, num_decodes: int, chunks: Sequence[Chunk]) -> Tensor:
        plan = StepPlan(
            0,
            rows=np.array([chunk.row for chunk in chunks], np.int32),
            num_scheduled_tokens=np.array([chunk.last - chunk.first for chunk in chunks], np.int32),
            num_computed_tokens=np.array([chunk.first for chunk in chunks], np.int32),
            samples=np.ones(len(chunks), np.bool_),
            num_decodes=num_decodes,
        )
        inputs = make_step_inputs(plan, self._rows, self._config, self.cache[0], Scratch(self.cache))
        return self.decoder.forward(inputs)


class Gpu:
    def __init__(self, config: ModelConfig, weights: ModelWeights, tokens: Tensor, *, batch_invariant: bool) -> None:
        self.cache = torch.zeros(2, len(tokens) * BLOCKS_A_ROW, 2, 1, BLOCK_SIZE, 16)
        table = torch.arange(len(tokens) * BLOCKS_A_ROW, dtype=torch.int32).view(len(tokens), BLOCKS_A_ROW)
        attention = config.layers[0].attention
        invariant = batch_invariant
        self.paged = PagedAttention(
            attention, config.windows, self.cache, table, len(tokens), torch.float32, batch_invariant=invariant
        )
        tables = cos_sin_tables(config.ropes, config.head_dim, MAX_LEN)
        device = CudaDevice(self.paged, tables, batch_invariant=invariant)
        self.decoder = Decoder(config, weights, device)
        self.pieces = Interpreted(self.decoder, config, 64, torch.float32, CPU)
        self._tokens = tokens

    def forward(self, num_decodes: int, chunks: Sequence[Chunk], pieces: Pieces | None = None) -> Tensor:
        spans = [torch.arange(chunk.first, chunk.last) for chunk in chunks]
        counts = [len(span) for span in spans]
        rows, positions = torch.tensor([chunk.row for chunk in chunks]), torch.cat(spans)
        row_of_token = rows.repeat_interleave(torch.tensor(counts))
        slots = row_of_token * MAX_LEN + positions
        seq_lens = torch.tensor([chunk.last for chunk in chunks]).int()
        starts = torch.tensor([0, *np.cumsum(counts).tolist()])
        prompts = chunks[num_decodes:]
        step = StepInputs(
            self._tokens[row_of_token, positions].int(),
            positions.int(),
            slots.int(),
            rows.int(),
            seq_lens,
            starts.int(),
            num_decodes,
            self.paged.tiles(counts[num_decodes:], [chunk.first for chunk in prompts]) if prompts else None,
            self.paged.cut(seq_lens[:num_decodes]),
        )
        return self.decoder.forward(step, pieces if prompts else None)


def random_weights(config: ModelConfig) -> ModelWeights:
    """Vectors too: a norm that is left out shows."""
    weights = dummy_weights(config, torch.float32)
    return weights.mapped(lambda tensor: torch.randn_like(tensor) * 0.3 + 1 if tensor.dim() == 1 else tensor)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
@pytest.mark.parametrize(("architecture", "mode"), CASES)
def test_a_gpus_decoder_equals_a_cpus(architecture: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    config = parse_config({**SHAPE, **MODELS[architecture], "architectures": [architecture]}, architecture)
    weights, tokens = random_weights(config), torch.randint(24, (2, MAX_LEN))
    cpu, gpu = Cpu(config, weights, tokens), Gpu(config, weights, tokens, batch_invariant=mode == "invariant")
    with torch.inference_mode():
        for num_decodes, chunks in STEPS:
            expected = cpu.forward(num_decodes, chunks)
            found = gpu.forward(num_decodes, chunks, gpu.pieces if mode == "pieces" else None)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(gpu.decoder.logits(found), cpu.decoder.logits(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gpu.cache, cpu.cache[:, :-1], atol=1e-4, rtol=1e-4)
