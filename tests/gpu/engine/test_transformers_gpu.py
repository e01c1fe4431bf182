"""Models of Transformers over the CUDA executor: Transformers' own tokens, with and without graphs, after a sleep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from support.engine import gpu_engines
from support.engine.gpu_engines import check_greedy, engine_over, executor_for, generate, leader_of, tokens_of
from support.engine.tiny_models import prompts
from support.engine.tiny_transformers_models import TRANSFORMERS_MODELS, save_tiny

from baton.rpc.errors import InvalidRequest
from baton.worker.core import SamplingParams

pytestmark = pytest.mark.gpu

EVERY_MODEL_SINCE = Version("5.20")  # older ones compute the attention of some themselves, or wait for the device
FP32_ROUNDING = 1e-3
BF16_ROUNDING = 0.06
PROMPTS = prompts(20, 300, seed=7)
# With half precision, experts are computed by grouped products.
HALF = ("llama-128", "qwen3-96", "gemma2-128", "mistral-window-64", "mixtral-64", "gpt_oss-64")


def outputs(folder: Path, some: Sequence[Sequence[int]] = PROMPTS, **fields: object) -> list[list[int]]:
    executor = executor_for(folder, model_impl="transformers", **fields)
    try:
        return tokens_of(generate(engine_over(executor), some))
    finally:
        executor.close()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # Transformers' own, in gpt_bigcode
@pytest.mark.parametrize("model_type", TRANSFORMERS_MODELS)
def test_greedy_tokens_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, model_type).cuda()
    model.set_attn_implementation("eager")
    try:
        found = outputs(tmp_path)
    except InvalidRequest as error:
        if Version(transformers.__version__) >= EVERY_MODEL_SINCE:
            raise
        pytest.skip(f"Transformers {transformers.__version__}: {error.message}")
    assert check_greedy(model, PROMPTS, found, FP32_ROUNDING) > 300


@pytest.mark.parametrize("name", HALF)
def test_in_bfloat16_the_first_choice_is_the_same_beyond_rounding(name: str, tmp_path: Path) -> None:
    model = gpu_engines.make_model(name, tmp_path, torch.bfloat16)
    some = gpu_engines.make_prompts()
    assert check_greedy(model, some, outputs(tmp_path, some, dtype="bfloat16"), BF16_ROUNDING) > 100


@pytest.mark.parametrize("model_type", ["arcee", "mellum", "granite_swa"])
def test_graphs_change_no_token(model_type: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, model_type)
    assert outputs(tmp_path, cuda_graphs=False) == outputs(tmp_path, cuda_graphs=True)


def test_decodes_are_recorded_as_whole_steps(tmp_path: Path) -> None:
    save_tiny(tmp_path, "arcee")
    executor = executor_for(tmp_path, model_impl="transformers")
    leader = leader_of(executor)
    assert leader._graphs is not None
    assert leader._stepper.pieces is None
    executor.close()


def test_a_prefix_hit_and_other_weights_change_no_token(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "apertus").cuda()
    executor = executor_for(tmp_path, model_impl="transformers")
    shared = list(range(20, 90))
    some = [[*shared, *tail] for tail in ([5], [6, 7], [], [5, 9])]
    for level in (0, 1, 2):
        if level:
            leader = leader_of(executor)
            leader.sleep(level)
            leader.wake(leader.read_weights(str(tmp_path)) if level == 2 else None)
        engine = engine_over(executor)
        found = tokens_of(generate(engine, some, stagger=3))
        assert engine.counters().num_cached_tokens > 0
        assert check_greedy(model, some, found, FP32_ROUNDING) > 50
    executor.close()


def test_sampled_tokens_are_those_of_the_cpu_executor(tmp_path: Path) -> None:
    save_tiny(tmp_path, "seed_oss")
    sampling = [SamplingParams(temperature=0.8, top_p=0.9, seed=index, logprobs=1) for index in range(len(PROMPTS))]
    ours = generate(engine_over(executor_for(tmp_path, model_impl="transformers")), PROMPTS, sampling=sampling)
    cpu = executor_for(tmp_path, model_impl="transformers", executor="cpu")
    theirs = generate(engine_over(cpu), PROMPTS, sampling=sampling)
    same = sum(one == other for one, other in zip(tokens_of(ours), tokens_of(theirs), strict=True))
    assert same >= len(PROMPTS) - 2  # draws between two tokens whose probabilities round differently


def test_quantized_kv_runs(tmp_path: Path) -> None:
    gpu_engines.make_model("llama-128", tmp_path, torch.bfloat16)
    some = gpu_engines.make_prompts()
    found = outputs(tmp_path, some, dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    assert all(len(output) == 24 for output in found)


def test_batch_invariance_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "arcee")
    with pytest.raises(InvalidRequest, match="batch_invariant=True needs a family of Baton's"):
        executor_for(tmp_path, model_impl="transformers", batch_invariant=True)
