"""Models with packed weights on the CUDA executor, in Triton's interpreter, have the tokens of Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from support.engine.interpreted_card import use_interpreted_card
from support.engine.packed import bitsandbytes
from support.engine.packed import models as packed_models
from support.engine.packed.cells import rounded
from support.engine.packed.models import FORMATS, change_config, write, write_gpt_oss
from support.engine.step_harness import StepHarness
from support.engine.tiny_models import generate_greedily
from support.gguf.files import write_gguf

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.executors.cuda.start import start_cuda_executor
from baton.worker.quantization.quantized.cuda_experts import CudaPackedExperts

pytestmark = pytest.mark.interpreted

COUNT = 2
PROMPT = [7, 8, 9, 10, 11]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    use_interpreted_card(monkeypatch)


def config(folder: Path) -> WorkerConfig:
    return WorkerConfig(
        model=str(folder), executor="cuda", dtype="float32", max_num_requests=4, num_blocks=32, cuda_graphs=False
    )


# The parts of the fused linears of the first share a matrix, those of the second are kept apart.
@pytest.mark.parametrize("name", ["awq", "fp8-blocks-across-parts", "gptq-order"])
def test_a_packed_model_has_the_tokens_of_its_dequantized_weights(name: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, packed_models.dense(), FORMATS[name])
    executor = start_cuda_executor(config(tmp_path))
    harness = StepHarness(executor)
    running = harness.admit(PROMPT)
    harness.run(COUNT, chunk=8)
    assert running.output[:COUNT] == generate_greedily(oracle, PROMPT, COUNT)
    assert "unquantized" not in executor.facts.weight_format


def test_a_model_of_bitsandbytes_has_the_tokens_of_its_dequantized_weights(tmp_path: Path) -> None:
    oracle = write(tmp_path, packed_models.wide(), bitsandbytes.FORMATS["bitsandbytes-nf4"])
    harness = StepHarness(start_cuda_executor(config(tmp_path)))
    running = harness.admit(PROMPT)
    harness.run(COUNT, chunk=8)
    assert running.output[:COUNT] == generate_greedily(oracle, PROMPT, COUNT)


def test_a_gguf_file_has_the_tokens_of_its_dequantized_weights(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", packed_models.dense(), Kind.Q4_1)
    executor = start_cuda_executor(config(path))
    harness = StepHarness(executor)
    running = harness.admit(PROMPT)
    harness.run(COUNT, chunk=8)
    assert running.output[:COUNT] == generate_greedily(rounded(packed_models.dense(), Kind.Q4_1), PROMPT, COUNT)
    assert executor.facts.weight_format == "gguf Q4_1"


@pytest.mark.parametrize(("name", "setting"), [("gptq-zeros", {"lm_head": True}), ("modelopt-fp8", {"ignore": []})])
def test_a_packed_head_has_the_tokens_of_its_dequantized_weights(
    name: str, setting: dict[str, object], tmp_path: Path
) -> None:
    oracle = write(tmp_path, packed_models.dense(), FORMATS[name], heads=True)
    change_config(tmp_path, quantization_config={**FORMATS[name].settings, **setting})
    harness = StepHarness(start_cuda_executor(config(tmp_path)))
    running = harness.admit(PROMPT)
    harness.run(COUNT, chunk=8)
    assert running.output[:COUNT] == generate_greedily(oracle, PROMPT, COUNT)


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-order"])
def test_packed_experts_have_the_tokens_of_their_dequantized_weights(name: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, packed_models.with_experts(), FORMATS[name])
    harness = StepHarness(start_cuda_executor(config(tmp_path)))
    running = harness.admit(PROMPT)
    harness.run(COUNT, chunk=8)
    assert running.output[:COUNT] == generate_greedily(oracle, PROMPT, COUNT)


def test_experts_of_gpt_oss_have_the_tokens_of_their_dequantized_weights(tmp_path: Path) -> None:
    oracle = write_gpt_oss(tmp_path, packed_models.gpt_oss())
    harness = StepHarness(start_cuda_executor(config(tmp_path)))
    running = harness.admit(PROMPT)
    harness.run(COUNT, chunk=8)
    assert running.output[:COUNT] == generate_greedily(oracle, PROMPT, COUNT)


def test_a_start_refuses_sums_of_experts_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, packed_models.with_experts(), FORMATS["awq"])
    right = CudaPackedExperts.run
    monkeypatch.setattr(CudaPackedExperts, "run", lambda *given: right(*given) * 1.01)
    with pytest.raises(InvalidRequest, match=r"a sum of experts in awq, .* differs from that of the dequantized"):
        start_cuda_executor(config(tmp_path))


def test_experts_whose_gates_and_ups_share_no_matrix_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, packed_models.with_experts(), FORMATS["fp8-blocks-across-parts"])
    with pytest.raises(Unsupported, match=r"no kernels for experts in fp8_e4m3 .* whose gates and ups share no"):
        start_cuda_executor(config(tmp_path))
