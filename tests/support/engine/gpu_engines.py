"""Engines on a GPU with small random models, and Transformers as the oracle of their output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.engine.gpu_state_models import STATE_MODELS
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoConfig,
    OlmoeConfig,
    OlmoeForCausalLM,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)

from baton.rpc.errors import ServiceError
from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions, TokenLogprobs
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.executors.cuda.executor import CudaExecutor
from baton.worker.executors.factory import make_executor
from baton.worker.executors.ranks import RankGroup
from baton.worker.scheduling.settings import EngineSettings

VOCAB_SIZE = 1000
LENGTHS = (3, 17, 40, 129, 300, 7, 16, 64, 200, 33, 90, 5, 8, 250, 500, 31, 77, 120, 11, 2)
GREEDY = SamplingParams(temperature=0.0)
_ROWS = len(LENGTHS)
_BUDGET = 400
_NAMESPACE = bytes(16)
_STEP_LIMIT = 5000


def _shape(head_dim: int, **more: Any) -> dict[str, Any]:
    num_heads = 512 // head_dim if 512 % head_dim == 0 else 4
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "attn_implementation": "eager",
        **more,
    }


_SCALES = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
}

_SMALL = {"vocab_size": VOCAB_SIZE, "n_positions": 1024, "attn_implementation": "eager"}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_SCALED_QUERIES = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.3,
}

_HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_WIDE = {"num_local_experts": 8, "num_experts_per_tok": 3}
_NARROW = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
_GLM = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
}

_LATENT = {
    "num_key_value_heads": 16,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "attn_implementation": "eager",
}
_LATENT_EXPERTS = {name: value for name, value in _GLM.items() if name != "use_qk_norm"}
_YARN_ALL = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-128": lambda: LlamaForCausalLM(LlamaConfig(**_shape(128))),
    "llama-biased-64": lambda: LlamaForCausalLM(
        LlamaConfig(**_shape(64, attention_bias=True, mlp_bias=True, tie_word_embeddings=True))
    ),
    "qwen2-64": lambda: Qwen2ForCausalLM(Qwen2Config(**_shape(64, hidden_size=512))),
    "qwen3-96": lambda: Qwen3ForCausalLM(Qwen3Config(**_shape(96))),
    "mistral-window-64": lambda: MistralForCausalLM(MistralConfig(**_shape(64, sliding_window=64))),
    "phi3-64": lambda: Phi3ForCausalLM(Phi3Config(**_shape(64, sliding_window=100, pad_token_id=0))),
    "granite-128": lambda: GraniteForCausalLM(GraniteConfig(**_shape(128, **_SCALES))),
    "olmo2-64": lambda: Olmo2ForCausalLM(Olmo2Config(**_shape(64))),
    "phi3-partial-64": lambda: Phi3ForCausalLM(Phi3Config(**_shape(64, partial_rotary_factor=0.5, pad_token_id=0))),
    "smollm3-64": lambda: SmolLM3ForCausalLM(SmolLM3Config(**_shape(64, no_rope_layer_interval=2, pad_token_id=0))),
    "glm4-128": lambda: Glm4ForCausalLM(Glm4Config(**_shape(128, pad_token_id=0))),
    "cohere-64": lambda: CohereForCausalLM(
        CohereConfig(**_shape(64, logit_scale=4.0, use_qk_norm=True, hidden_size=512))
    ),
    "cohere2-64": lambda: Cohere2ForCausalLM(
        Cohere2Config(**_shape(64, logit_scale=4.0, sliding_window=50, hidden_size=512, pad_token_id=0))
    ),
    "olmo-64": lambda: OlmoForCausalLM(OlmoConfig(**_shape(64, clip_qkv=0.5, hidden_size=512))),
    "gemma2-128": lambda: Gemma2ForCausalLM(Gemma2Config(**_shape(128, sliding_window=50, attn_logit_softcapping=0.5))),
    "gemma3-256": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**_shape(256, sliding_window=50, layer_types=_LAYER_TYPES))
    ),
    "ministral3-64": lambda: Ministral3ForCausalLM(Ministral3Config(**_shape(64, rope_parameters=_SCALED_QUERIES))),
    "gpt2-64": lambda: GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=3, n_head=4, **_SMALL)),
    "gpt_neox-64": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_shape(64, hidden_size=512, num_key_value_heads=8))),
    "mixtral-64": lambda: MixtralForCausalLM(MixtralConfig(**_shape(64, **_WIDE, sliding_window=50))),
    "qwen3_moe-128": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_shape(128, **_NARROW, norm_topk_prob=True, mlp_only_layers=[1]))
    ),
    "qwen2_moe-64": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**_shape(64, **_NARROW, hidden_size=512, shared_expert_intermediate_size=192))
    ),
    "glm4_moe-64": lambda: _corrected(Glm4MoeForCausalLM(Glm4MoeConfig(**_shape(64, **_GLM, pad_token_id=0)))),
    "ernie4_5_moe-64": lambda: _corrected(
        Ernie4_5_MoeForCausalLM(
            Ernie4_5_MoeConfig(
                **_shape(64, moe_num_experts=16, moe_k=4, moe_intermediate_size=128, hidden_size=512), use_bias=True
            )
        )
    ),
    "phimoe-64": lambda: PhimoeForCausalLM(
        PhimoeConfig(**_shape(64, num_local_experts=16, num_experts_per_tok=2, hidden_size=512, lm_head_bias=True))
    ),
    "olmoe-64": lambda: OlmoeForCausalLM(
        OlmoeConfig(**_shape(64, num_experts=16, num_experts_per_tok=4, hidden_size=512))
    ),
    "granitemoe-64": lambda: GraniteMoeForCausalLM(GraniteMoeConfig(**_shape(64, **_WIDE, **_SCALES, hidden_size=512))),
    "minimax_m2-64": lambda: _corrected(
        MiniMaxM2ForCausalLM(MiniMaxM2Config(**_shape(64, **_WIDE, rotary_dim=32, rope_parameters=_HALF_ROTATED)))
    ),
    "gpt_oss-64": lambda: GptOssForCausalLM(GptOssConfig(**_shape(64, **_WIDE, sliding_window=50, swiglu_limit=7.0))),
    "deepseek_v2-32": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(**_shape(32, **{**_LATENT, **_LATENT_EXPERTS, "q_lora_rank": None}))
    ),
    "deepseek_v3-32": lambda: _corrected(
        DeepseekV3ForCausalLM(DeepseekV3Config(**_shape(32, **_LATENT, **_LATENT_EXPERTS, rope_parameters=_YARN_ALL)))
    ),
    "youtu-64": lambda: YoutuForCausalLM(
        YoutuConfig(
            **_shape(
                64,
                **{
                    **_LATENT,
                    "num_key_value_heads": 8,
                    "kv_lora_rank": 512,
                    "qk_rope_head_dim": 64,
                    "qk_nope_head_dim": 128,
                },
            )
        )
    ),
    **STATE_MODELS,
    "starcoder2-64": lambda: Starcoder2ForCausalLM(Starcoder2Config(**_shape(64, sliding_window=50, hidden_size=512))),
}


def make_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Saves the named model with random weights in `dtype`, and returns it on the GPU, computing in fp32."""
    torch.manual_seed(sum(name.encode()))
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                # With large biases, a different expert due to rounding would change the token.
                parameter.normal_(0.0, 0.02 if ".experts." in key else 0.5)
            if key.endswith("sinks"):
                parameter.normal_(0.0, 1.0)
    model.to(dtype).save_pretrained(folder)
    return model.float().cuda()


def _corrected(model: PreTrainedModel) -> PreTrainedModel:
    """Fills the routers' correction biases, which are zeros in a new model."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            tensor.data.normal_(0.0, 0.2)
    return model


def make_prompts(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(5, VOCAB_SIZE, size=length).tolist() for length in lengths]


def leader_of(executor: Executor) -> CudaExecutor:
    """Returns the executor of the only rank."""
    assert isinstance(executor, RankGroup)
    assert isinstance(executor.leader, CudaExecutor)
    return executor.leader


def executor_for(folder: Path, **fields: Any) -> Executor:
    defaults: dict[str, Any] = {
        "model": str(folder),
        "executor": "cuda",
        "dtype": "float32",
        "num_blocks": 600,
        "max_num_requests": _ROWS,
        "max_num_batched_tokens": _BUDGET,
        "threads": 2,
    }
    return make_executor(WorkerConfig(**{**defaults, **fields}))


def engine_over(executor: Executor, budget: int = _BUDGET, **settings: Any) -> Engine:
    """Returns a new engine. An executor serves one engine at a time."""
    return Engine(executor, EngineSettings(_ROWS, budget, **settings), epoch=1)


@dataclass
class Generated:
    """The result of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: ServiceError | None = None


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    count: int = 24,
    sampling: Sequence[SamplingParams] | SamplingParams = GREEDY,
    stagger: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
) -> list[Generated]:
    """Runs all prompts to their end. Submits one every `stagger` steps, or all at once."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    stop = StopConditions(count, stop_token_ids=stop_token_ids)
    waiting = [
        Request(str(index), list(prompt), len(prompt), params, stop, _NAMESPACE)
        for index, (prompt, params) in enumerate(zip(prompts, each, strict=True))
    ]
    found = [Generated() for _ in waiting]
    for step in range(_STEP_LIMIT):
        if waiting and (not stagger or step % stagger == 0):
            entering, waiting = (waiting, []) if not stagger else (waiting[:1], waiting[1:])
            for request in entering:
                engine.submit(request)
        if not waiting and not engine.has_work():
            engine.audit()
            return found
        outputs = engine.step()
        for request, token_id, logprobs in outputs.tokens():
            one = found[int(request.request_id)]
            one.token_ids.append(token_id)
            if logprobs is not None:
                one.logprobs.append(logprobs)
        for failure in outputs.failures:
            found[int(failure.request_id)].error = failure.error
    raise AssertionError(f"still work after {_STEP_LIMIT} steps")


def tokens_of(found: Sequence[Generated]) -> list[list[int]]:
    return [one.token_ids for one in found]


def check_greedy(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], rounding: float
) -> int:
    """Asserts that each token is the model's first choice, unless its top two are closer than `rounding`.

    Returns the number of tokens that were compared.
    """
    checked = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        best, sure = _first_choices(model, prompt, output, rounding)
        wrong = ((torch.tensor(output, device=best.device) != best) & sure).nonzero().flatten().tolist()
        assert not wrong, f"tokens {wrong} behind {len(prompt)} of prompt"
        checked += int(sure.sum())
    return checked


def other_choices(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], rounding: float
) -> tuple[int, int]:
    """Returns how many tokens are not the model's first choice beyond `rounding`, and how many of its bf16 copy's."""
    ours = own = 0
    copy = deepcopy(model).to(torch.bfloat16)
    for prompt, output in zip(prompts, outputs, strict=True):
        best, sure = _first_choices(model, prompt, output, rounding)
        ours += int(((torch.tensor(output, device=best.device) != best) & sure).sum())
        own += int(((_first_choices(copy, prompt, output, 0.0)[0] != best) & sure).sum())
    return ours, own


def _first_choices(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], rounding: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the model's choice for each token of the output, and whether the next one is farther than `rounding`."""
    token_ids = torch.tensor([[*prompt, *output]], device=model.device)
    with torch.no_grad():
        top = model(token_ids).logits[0, len(prompt) - 1 : -1].float().topk(2)
    return top.indices[:, 0], top.values[:, 0] - top.values[:, 1] > rounding
