"""Times embeddings on a GPU: Baton's engine against Transformers with SDPA and sentence-transformers, in turns.

`python -m bench.engine.bench_encoders_gpu [--shape bge-base ...]` in tests/. Models have random weights. All get token
ids, and return the normalized mean (of causal models: last token) of each text's hidden states to the host. The matrix
products of the layers alone, by cuBLAS on as many tokens as a step has, are the limit of all of them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.engine.bench_encoders import EngineThread, by_clients, one_by_one, timed
from transformers import AutoModel, BertConfig, ModernBertConfig, PretrainedConfig, Qwen3Config

from baton.services.bench.report import facts_line, machine_facts
from baton.worker.config import WorkerConfig
from baton.worker.core import HeadKind, PoolingParams, PoolingTask, Row, RowInit, SamplingParams, StepPlan
from baton.worker.executors.base import Executor
from baton.worker.executors.factory import make_executor

Text = Sequence[int]
_EMBED = PoolingParams(PoolingTask.EMBED, reads_all=True)
_STEPS = 20
_CUDA = torch.device("cuda")
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


@dataclass(frozen=True)
class Shape:
    """A model's config, and whether its attention is causal."""

    make: Callable[[], PretrainedConfig]
    causal: bool = False


def _bert(hidden: int, layers: int, heads: int) -> PretrainedConfig:
    return BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden
    )


SHAPES = {
    "minilm": Shape(lambda: _bert(384, 6, 12)),
    "bge-base": Shape(lambda: _bert(768, 12, 12)),
    "bert-large": Shape(lambda: _bert(1024, 24, 16)),
    "modernbert-base": Shape(
        lambda: ModernBertConfig(vocab_size=50368, max_position_embeddings=8192, **_SPECIAL)  # the defaults are base's
    ),
    "qwen3-embedding-0.6b": Shape(
        lambda: Qwen3Config(
            vocab_size=151669, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=32768,
        ),
        causal=True,
    ),
}  # fmt: skip


class Peer:
    """A function from token ids to hidden states, and the pooling of sentence-transformers."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._compute = compute

    @torch.inference_mode()
    def encode_all(self, texts: Sequence[Text]) -> np.ndarray:
        """Returns the embeddings of texts of one length, as one batch."""
        ids = torch.tensor(np.array(texts), device="cuda")
        vectors = torch.nn.functional.normalize(self._compute(ids).float(), dim=-1)
        found: np.ndarray = vectors.cpu().numpy()
        return found

    def encode(self, text: Text) -> np.ndarray:
        """Returns the embedding of one text."""
        vector: np.ndarray = self.encode_all([text])[0]
        return vector


def peers_of(folder: str, dtype: torch.dtype, causal: bool) -> dict[str, Peer]:
    """Returns Transformers, and of encoders sentence-transformers, where it is installed."""
    peers = {"Transformers SDPA": transformers_peer(folder, dtype, causal)}
    if not causal:
        try:
            peers["sentence-transformers"] = sentence_transformers_peer(folder, dtype)
        except Exception as error:  # another version of it must not hide the other rows
            print(f"sentence-transformers: {type(error).__name__}: {error}")
    return peers


def transformers_peer(folder: str, dtype: torch.dtype, causal: bool) -> Peer:
    model = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").cuda().eval()

    def compute(ids: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        return states[:, -1] if causal else states.mean(1)

    return Peer(compute)


def sentence_transformers_peer(folder: str, dtype: torch.dtype) -> Peer:
    """Returns its Transformer and Pooling modules. The folder gets a tokenizer, which is not called."""
    from sentence_transformers import SentenceTransformer

    write_tokenizer(folder)
    made = SentenceTransformer(folder, device="cuda", model_kwargs={"dtype": dtype, "attn_implementation": "sdpa"})

    def compute(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = made({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"]
        return found

    return Peer(compute)


def write_tokenizer(folder: str, words: Sequence[str] = ()) -> None:
    """Writes a tokenizer whose tokens are these words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(("[PAD]", "[UNK]", *words))}
    made = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def device_seconds(executor: Executor, texts: Sequence[Text]) -> float:
    """Returns the median time of a step over whole texts on the device, without the engine."""

    def plan(step: int) -> StepPlan:
        lengths = np.array([len(text) for text in texts], np.int32)
        return StepPlan(
            step,
            admitted=[
                RowInit(Row(row), np.array(text, np.int32), len(text), SamplingParams(), _EMBED)
                for row, text in enumerate(texts)
            ],
            rows=np.arange(len(texts)),
            num_scheduled_tokens=lengths,
            num_computed_tokens=np.zeros(len(texts), np.int32),
            samples=np.ones(len(texts), np.bool_),
            head=HeadKind.POOL,
        )

    seconds = []
    for step in range(_STEPS):
        executor.launch(plan(step))
        seconds.append(executor.collect().seconds)
    return statistics.median(seconds[_STEPS // 4 :])


def product_shapes(config: Any) -> list[tuple[int, int]]:
    """Returns the in and out features of a layer's linears."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    up = 2 if config.model_type in ("modernbert", "qwen3") else 1
    attention = [(hidden, head_dim * (heads + 2 * kv_heads)), (head_dim * heads, hidden)]
    return [*attention, (hidden, up * ffn), (ffn, hidden)]


def products_seconds(
    config: Any, num_tokens: int, budget: int, dtype: torch.dtype, device: torch.device = _CUDA
) -> float:
    """Returns the time of the layers' matrix products alone, in steps of at most `budget` tokens."""
    weights = [
        [torch.randn(rows, columns, device=device, dtype=dtype).t() for columns, rows in product_shapes(config)]
        for _ in range(config.num_hidden_layers)
    ]
    rows = min(budget, num_tokens)
    inputs = {size: torch.randn(rows, size, device=device, dtype=dtype) for size, _ in product_shapes(config)}
    outputs = {size: torch.empty(rows, size, device=device, dtype=dtype) for _, size in product_shapes(config)}
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def step() -> None:
        for weight in itertools.chain.from_iterable(weights):
            torch.mm(inputs[weight.shape[0]], weight, out=outputs[weight.shape[1]])

    step()
    wait()
    began = time.perf_counter()
    for _ in range(-(-num_tokens // rows)):
        step()
    wait()
    return time.perf_counter() - began


def matrix_flops(config: Any, num_tokens: int) -> float:
    """Returns the operations of the layers' linears."""
    width = sum(rows * columns for rows, columns in product_shapes(config))
    return 2.0 * config.num_hidden_layers * width * num_tokens


def measure(name: str, options: argparse.Namespace) -> None:
    """Measures one shape, and prints its table."""
    shape, dtype = SHAPES[name], getattr(torch, options.dtype)
    config = shape.make()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModel.from_config(config, dtype=dtype).save_pretrained(folder)
        random = np.random.default_rng(0)
        texts = list(random.integers(3, config.vocab_size, (options.texts, options.tokens), np.int32))
        num_tokens = options.texts * options.tokens
        budget = min(options.budget, num_tokens)
        a_step = max(1, budget // options.tokens)
        rows = 4 * a_step  # a step is prepared while another runs, so it needs rows of its own
        products = products_seconds(config, num_tokens, budget, dtype)
        executor = make_executor(
            WorkerConfig(
                model=folder, executor="cuda", dtype=options.dtype, max_num_requests=rows,
                max_num_batched_tokens=budget, gpu_memory_utilization=0.5, max_model_len=max(512, options.tokens),
            )
        )  # fmt: skip
        step = None if shape.causal else device_seconds(executor, texts[:a_step])
        engine = EngineThread(executor, rows, budget)
        peers = {} if options.alone else peers_of(folder, dtype, shape.causal)
        try:
            found = engine.encode_all(texts[:64])
            cosines = [float((peer.encode_all(texts[:64]) * found).sum(-1).min()) for peer in peers.values()]
            singles = texts[: options.singles]
            cases: dict[str, Callable[[], Any]] = {}
            for who, encoder in {**peers, "Baton": engine}.items():
                cases[f"one batch: {who}"] = partial(encoder.encode_all, texts)
                cases[f"one at a time: {who}"] = partial(one_by_one, encoder.encode, singles)
            cases["32 clients: Baton"] = partial(by_clients, engine.encode, texts, 32)
            seconds = timed(cases, options.passes)
        finally:
            engine.close()
            executor.close()
    print(f"\n{name}, {options.dtype}, {options.texts} texts of {options.tokens} tokens")
    if cosines:
        print(f"least cosine with {', '.join(peers)}: {min(cosines):.6f}")
    tflop_s = matrix_flops(config, num_tokens) / products / 1e12
    part = products / seconds["one batch: Baton"]
    print(f"matrix products alone: {1e3 * products:.2f} ms, {tflop_s:.0f} TFLOP/s; {part:.2f} of Baton's time")
    if step is not None:
        print(f"a step of {a_step} texts: {1e3 * step:.2f} ms on the device")
    print("| load | who | ms | texts/s |\n| --- | --- | ---: | ---: |")
    for case, taken in seconds.items():
        load, _, who = case.partition(": ")
        count = len(singles) if load == "one at a time" else options.texts
        print(f"| {load} | {who} | {1e3 * taken:.2f} | {count / taken:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", choices=tuple(SHAPES), help="default: minilm and bge-base")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--budget", type=int, default=8192, help="the most tokens of a step of Baton's (%(default)s)")
    parser.add_argument("--singles", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="float16")
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    print(facts_line(machine_facts(("torch", "triton", "transformers"), torch.cuda.get_device_name())))
    for name in options.shape or ("minilm", "bge-base"):
        measure(name, options)


if __name__ == "__main__":
    assert Path("bench").is_dir(), "run this in tests/"
    main()
