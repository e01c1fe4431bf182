"""Prompts computed with wider KV continue with KV of 8 bits in other blocks, as in Transformers with such a cache.

The oracle's cache is rounded to e4m3 where the prompt ends, and what it gets after that too. In bfloat16, where a
router may choose another expert after sums in another order, the bits that arrive are compared instead. States keep
their fp32.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.engine_harness import make_request
from support.engine.tiny_models import MODELS, make_model
from support.engine.tiny_shape import VOCAB_SIZE
from support.transfer.handover_harness import Network, Node, finished, idle, make_node, run_until
from transformers import DynamicCache, PreTrainedModel

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.handover.settings import HandoverSettings
from baton.worker.kv_spec import KvKind

SIZES = [(16, 64), (64, 16)]  # of the prefill worker, of the decode worker
LENGTHS = (5, 64, 101)
COUNT = 10
# Of a chosen token's logit below the largest, as a part of the largest magnitude: a value between two numbers of 8 bits
# may be rounded either way after sums in another order.
ROUNDING = 0.02
LATENT = ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu", "glm4_moe_lite", "kimi_linear")
ROWS = [name for name in MODELS if "-" not in name and name not in LATENT]
_BITS = {"wide": torch.int16, "narrow": torch.uint8}


class HandedOverCache(DynamicCache):
    """Keeps keys and values as they are up to `hand_over`, and in e4m3 from then on."""

    _narrow = False

    def hand_over(self) -> None:
        self._narrow = True
        for layer in self.layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = _rounded(layer.keys), _rounded(layer.values)

    def update(self, keys: torch.Tensor, values: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if self._narrow:
            keys, values = _rounded(keys), _rounded(values)
        return super().update(keys, values, *rest, **more)


def _rounded(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def logits_of(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Returns the logits before each token of the answer, [num_tokens, vocab_size]."""
    text = model.config.get_text_config()
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = HandedOverCache(config=text)
    rows = []
    with torch.no_grad():
        out = model(torch.tensor([list(prompt)]), **{argument: cache, "use_cache": True})
        rows.append(out.logits[0, -1])
        cache.hand_over()
        for token_id in answer[:-1]:
            out = model(torch.tensor([[token_id]]), **{argument: cache, "use_cache": True})
            rows.append(out.logits[0, -1])
    return torch.stack(rows)


def pair_of(network: Network, folder: Path, dtype: str, sizes: tuple[int, int]) -> tuple[Node, Node]:
    """Returns a prefill worker with KV of the dtype, and a decode worker with KV in e4m3."""
    nodes = []
    for role, size, kv in zip(("prefill", "decode"), sizes, ("auto", "fp8_e4m3"), strict=True):
        config = WorkerConfig(
            model=str(folder), dtype=dtype, threads=1, block_size=size, num_blocks=8192 // size, kv_cache_dtype=kv
        )
        node = make_node(network, role, CpuExecutor(config), HandoverSettings(verify=True), max_num_batched_tokens=48)
        nodes.append(node)
    return nodes[0], nodes[1]


def hand_over(pair: tuple[Node, Node], prompt: list[int]) -> tuple[list[int], dict[str, list[BlockId]]]:
    """Returns the answer, and the blocks of each worker's first group."""
    prefill, decode = pair
    request = make_request(prompt, COUNT)
    tables: dict[str, list[BlockId]] = {}

    def done() -> bool:
        for node in pair:
            for name in node.engine._states:
                tables[node.name] = node.engine.block_ids(name)
        return finished(decode, request)()

    decode.submit(request, prefill)
    run_until(pair, done, 60)
    run_until(pair, idle(*pair), 60)
    assert decode.seen.finishes[request.request_id].num_transferred_tokens == len(prompt)
    for node in pair:
        node.assert_nothing_held()
    counters = decode.handover.counters()
    assert counters.num_mismatches == counters.num_failed_transfers == decode.engine.counters().num_local_fallbacks == 0
    return decode.seen.tokens[request.request_id], tables


def prompt_of(length: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ROWS)
def test_answers_are_those_of_transformers_with_a_cache_of_8_bits(
    network: Network, name: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    model = make_model(name, tmp_path)
    pair = _, decode = pair_of(network, tmp_path, "float32", sizes)
    for group in decode.executor.kv_spec.groups:
        assert group.dtype == ("float32" if group.kind is KvKind.STATE else "float8_e4m3")
    for length in LENGTHS:
        answer, _ = hand_over(pair, prompt_of(length))
        logits = logits_of(model, prompt_of(length), answer)
        below = logits.amax(1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert float((below / logits.abs().amax(1)).max()) <= ROUNDING


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ROWS)
def test_keys_and_values_of_16_bits_arrive_as_pytorch_rounds_them(
    network: Network, name: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    make_model(name, tmp_path)
    pair = pair_of(network, tmp_path, "bfloat16", sizes)
    _, tables = hand_over(pair, prompt_of(101))
    sent, arrived = (
        torch.cat(
            [node.executor._memory.groups[0].tensor[:, block].view(_BITS[size]) for block in tables[node.name]], 3
        )[:, :, :, :101]
        for node, size in zip(pair, ("wide", "narrow"), strict=True)
    )
    assert torch.equal(sent.view(torch.bfloat16).to(torch.float8_e4m3fn).view(torch.uint8), arrived)
    assert arrived.count_nonzero() > arrived.numel() // 2


@pytest.mark.parametrize("name", LATENT)
def test_latents_are_not_rounded(network: Network, name: str, tmp_path: Path) -> None:
    """They are refused by name at a start; between workers, `check_convertible` refuses them."""
    make_model(name, tmp_path)
    with pytest.raises(InvalidRequest, match=r"kv_cache_dtype=fp8_e4m3: .* keeps one vector a token"):
        pair_of(network, tmp_path, "bfloat16", (16, 64))


def test_each_architecture_has_a_row() -> None:
    assert sorted([*ROWS, *LATENT]) == sorted(name for name in MODELS if "-" not in name)
