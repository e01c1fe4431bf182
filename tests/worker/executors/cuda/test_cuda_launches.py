"""The CUDA decoder's launches for steps of every shape equal a record: which kernels, on which tensors, in order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from support.kernels.launch_recorder import recorded

from baton.worker.executors.cuda.steps.piecewise import Pieces
from baton.worker.layers.cuda.attention import PagedAttention
from baton.worker.layers.cuda.device import CudaDevice
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.layers.rope import cos_sin_tables
from baton.worker.models.decoder import Decoder
from baton.worker.models.registry import parse_config
from baton.worker.models.weights import ModelWeights
from baton.worker.weights.build import dummy_weights

RECORD = Path(__file__).with_suffix(".json")
CPU = torch.device("cpu")
MAX_SEQS = 48
BLOCK_SIZE = 16
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 80,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
WINDOW = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
SCALES = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.5,
    "logits_scaling": 8.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, all biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama, biases of attention": {"attention_bias": True},
    "llama, biases of the mlp": {"mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 32},
    "qwen2": QWEN2,
    "qwen2, a window in layer 1": {**QWEN2, **WINDOW},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "phi3": {"architectures": ["Phi3ForCausalLM"]},
    "granite": {"architectures": ["GraniteForCausalLM"], **SCALES},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hopper": {"capability": 9},
    "fp8": {"kv_dtype": torch.float8_e4m3fn},
    "invariant": {"batch_invariant": True},
}
# Rows that decode, and chunks of prompts behind them.
STEPS: list[tuple[int, list[int]]] = [
    *((count, []) for count in (1, 2, 16, 17, 64, 65, 1024)),
    *((0, chunks) for chunks in ([1], [16], [17], [64], [65], [1023], [1024], [600, 700])),
    (3, [10]),
    (20, [40, 100]),
    (60, [1000]),
]
FEW_STEPS: list[tuple[int, list[int]]] = [(1, []), (16, []), (64, []), (65, []), (0, [9]), (2, [70]), (0, [1100])]
PIECES = (16, 64, 128, 1024)


CASES = [
    (model, mode, f"{model}; {mode}")
    for model in MODELS
    for mode in MODES
    if model == "llama" or mode in ("plain", "invariant")
]


class Subject:
    """A decoder in host memory, on a card with the given compute capability."""

    def __init__(
        self,
        model: str,
        monkeypatch: pytest.MonkeyPatch,
        capability: int = 8,
        kv_dtype: torch.dtype = torch.bfloat16,
        batch_invariant: bool = False,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
        config = parse_config({**SHAPE, **MODELS[model]}, model)
        self.config, self.weights = config, dummy_weights(config, torch.bfloat16)
        self.cache = torch.zeros(2, 3, 2, 1, BLOCK_SIZE, 64, dtype=kv_dtype)
        self._zeros = torch.zeros(2048, dtype=torch.int32)
        scale = torch.ones(2, 2, 1) if kv_dtype != torch.bfloat16 else None
        self.paged = PagedAttention(
            config.layers[0].attention,
            config.windows,
            self.cache,
            torch.zeros(MAX_SEQS, 8, dtype=torch.int32),
            MAX_SEQS,
            torch.bfloat16,
            kv_scale=scale,
            batch_invariant=batch_invariant,
        )
        cos_sin = cos_sin_tables(config.ropes, config.head_dim, 4096)
        self.device = CudaDevice(self.paged, cos_sin, batch_invariant=batch_invariant)
        self.decoder = Decoder(config, self.weights, self.device)

    def names(self) -> dict[int, str]:
        """Maps addresses of weights and caches to names."""
        named = {**names_of(self.weights), "cache of 0": self.cache[0], "cache of 1": self.cache[1]}
        return {tensor.data_ptr(): name for name, tensor in named.items()}

    def forward(self, num_decodes: int, chunks: Sequence[int], pieces: Pieces | None = None) -> Tensor:
        """Runs a step of rows that decode and chunks of prompts."""
        zeros = self._zeros
        num_seqs = num_decodes + len(chunks)
        numbers, seqs, starts = zeros[: num_decodes + sum(chunks)], zeros[:num_seqs], zeros[: num_seqs + 1]
        tiles = self.paged.tiles(list(chunks), [7] * len(chunks)) if chunks else None
        cuts = self.paged.cut(seqs[:num_decodes])
        step = StepInputs(numbers, numbers, numbers, seqs, seqs, starts, num_decodes, tiles, cuts)
        return self.decoder.forward(step, pieces)


def names_of(weights: ModelWeights) -> Mapping[str, Tensor]:
    named = {"norm": weights.norm, "lm_head": weights.lm_head.params["weight"], "embed": weights.embed}
    for index, layer in enumerate(weights.layers):
        attention, mlp = layer.attention, layer.mlp
        linears = {"qkv": attention.qkv, "o": attention.o, "gate_up": mlp.gate_up, "down": mlp.down}
        of_layer = {
            "input_norm": attention.input_norm,
            "q_norm": attention.q_norm,
            "k_norm": attention.k_norm,
            "post_norm": mlp.input_norm,
            "attention_output_norm": attention.output_norm,
            "mlp_output_norm": mlp.output_norm,
            **{name: linear.params["weight"] for name, linear in linears.items()},
            **{f"{name}_bias": linear.params.get("bias") for name, linear in linears.items()},
        }
        named |= {f"{index}.{name}": tensor for name, tensor in of_layer.items() if tensor is not None}
    return named


class RecordedPieces(Pieces):
    """Pieces without graphs: a replay writes a line."""

    lines: list[str]

    def replay(self, index: int) -> None:
        self.lines.append(f"replay {index} of {self._size}")


def launches(model: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Returns the launches of each run."""
    subject = Subject(model, monkeypatch, **MODES[mode])
    found: dict[str, list[str]] = {}
    names = subject.names()
    for num_decodes, chunks in STEPS if model == "llama" else FEW_STEPS:
        with recorded(names) as found[f"{num_decodes} decodes, chunks {chunks}"]:
            subject.forward(num_decodes, chunks)
    for rows in (1, 16, 17, 64, 100):
        hidden, out = torch.zeros(rows, 96, dtype=torch.bfloat16), torch.zeros(rows, 80, dtype=torch.bfloat16)
        with recorded(names) as found[f"logits of {rows} rows"]:
            subject.decoder.logits(hidden)
        with recorded(names) as found[f"logits of {rows} rows into memory"]:
            subject.decoder.logits(hidden, out)
    with recorded(names) as found["warm-up"]:
        subject.device.warm_up()
    if mode != "invariant":
        pieces = RecordedPieces(subject.decoder, subject.config, 1024, torch.bfloat16, CPU)
        for size in PIECES:
            for index in range(3):
                with recorded(names) as found[f"piece {index} of {size}"]:
                    pieces.launch(size, index)
        with recorded(names) as pieces.lines:
            subject.forward(2, [100], pieces)
        found["a step in pieces"] = pieces.lines
    return found


def read_record() -> dict[str, dict[str, list[str]]]:
    """Reads the record, which holds each line once; runs refer to lines by number."""
    content = json.loads(RECORD.read_text())
    lines = content["lines"]
    return {
        case: {run: [lines[number] for number in numbers] for run, numbers in runs.items()}
        for case, runs in content["cases"].items()
    }


@pytest.mark.parametrize(("model", "mode", "case"), CASES, ids=[case for _, _, case in CASES])
def test_every_step_launches_the_recorded_kernels(
    model: str, mode: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = launches(model, mode, monkeypatch)
    expected = read_record()[case]
    assert found.keys() == expected.keys()
    for run, lines in found.items():
        assert lines == expected[run], run


def write_record() -> None:
    """Rewrites the record after an intended change: python tests/worker/executors/cuda/test_cuda_launches.py"""
    numbers: dict[str, int] = {}
    written: dict[str, dict[str, list[int]]] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for model, mode, case in CASES:
            runs = launches(model, mode, monkeypatch)
            written[case] = {
                run: [numbers.setdefault(line, len(numbers)) for line in lines] for run, lines in runs.items()
            }
    lines = ",\n".join(json.dumps(line) for line in numbers)
    of_cases = ",\n".join(
        f"{json.dumps(case)}: {{\n" + ",\n".join(f"{json.dumps(run)}: {used}" for run, used in runs.items()) + "\n}"
        for case, runs in written.items()
    )
    RECORD.write_text(f'{{"lines": [\n{lines}\n],\n"cases": {{\n{of_cases}\n}}}}\n')


if __name__ == "__main__":
    write_record()
