"""Times embeddings of an encoder on CPUs: Baton's engine against a plain loop over Transformers, in turns.

`python -m bench.engine.bench_encoders [--model FOLDER]` in tests/. Without a folder the model has MiniLM's shape and
random weights. Both get token ids, and return the normalized mean of each text's hidden states.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, BertConfig

from baton.worker.config import WorkerConfig
from baton.worker.core import HeadKind, PoolingParams, PoolingTask, Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.scheduling.settings import EngineSettings

Text = Sequence[int]
Encode = Callable[[Text], np.ndarray]
_EMBED = PoolingParams(PoolingTask.EMBED, reads_all=True)


class PlainLoop:
    """A model of Transformers, called for one text or for several of one length."""

    def __init__(self, folder: str) -> None:
        self._model = AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def encode_all(self, texts: Sequence[Text]) -> np.ndarray:
        """Returns the embeddings of texts as one batch."""
        ids = torch.tensor(np.array(texts))
        states = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        vectors: np.ndarray = torch.nn.functional.normalize(states.mean(1), dim=-1).numpy()
        return vectors

    def encode(self, text: Text) -> np.ndarray:
        """Returns the embedding of one text."""
        vector: np.ndarray = self.encode_all([text])[0]
        return vector


@dataclass(slots=True)
class _Batch:
    """Texts that are submitted together."""

    texts: Sequence[Text]
    found: Future[np.ndarray]
    vectors: list[np.ndarray | None]
    missing: int


class EngineThread:
    """Baton's engine on a thread of its own, as a worker runs it."""

    def __init__(self, executor: Executor, rows: int, budget: int) -> None:
        settings = EngineSettings(max_num_requests=rows, max_num_batched_tokens=budget)
        self._engine = Engine(executor, settings, epoch=1)
        self._submitted: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._at_once = max(1, rows // 4)  # texts that are submitted between two steps
        self._waiting: deque[tuple[_Batch, int]] = deque()
        self._places: dict[str, tuple[_Batch, int]] = {}  # of submitted texts
        self._count = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def encode(self, text: Text) -> np.ndarray:
        """Returns the embedding of one text."""
        vector: np.ndarray = self.encode_all([text])[0]
        return vector

    def encode_all(self, texts: Sequence[Text]) -> np.ndarray:
        """Returns the embeddings of texts that are submitted together."""
        batch = _Batch(texts, Future(), [None] * len(texts), len(texts))
        self._submitted.put(batch)
        return batch.found.result()

    def close(self) -> None:
        self._submitted.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take():
            for _ in range(min(self._at_once, len(self._waiting))):
                self._submit(*self._waiting.popleft())
            self._step()

    def _take(self) -> bool:
        """Takes what was submitted, and waits for it where there is nothing else to do. Returns False at the end."""
        idle = not (self._places or self._waiting)
        while True:
            try:
                batch = self._submitted.get(block=idle)
            except queue.Empty:
                return True
            if batch is None:
                return False
            self._waiting.extend((batch, place) for place in range(len(batch.texts)))
            idle = False

    def _submit(self, batch: _Batch, place: int) -> None:
        self._count += 1
        text = batch.texts[place]
        request = Request(
            f"{self._count}", text, len(text), SamplingParams(), StopConditions(max_tokens=1), bytes(16),
            head=HeadKind.POOL, pooling=_EMBED,
        )  # fmt: skip
        self._places[request.request_id] = batch, place
        self._engine.submit(request)

    def _step(self) -> None:
        for request, vectors in self._engine.step().pooled:
            batch, place = self._places.pop(request.request_id)
            batch.vectors[place] = vectors[0]
            batch.missing -= 1
            if not batch.missing:
                batch.found.set_result(np.stack(batch.vectors))


@contextmanager
def model_folder(given: str) -> Iterator[str]:
    """Yields the given folder, or one with a random model."""
    if given:
        yield given
        return
    with tempfile.TemporaryDirectory() as made:
        torch.manual_seed(0)
        shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        AutoModel.from_config(BertConfig(**shape)).save_pretrained(made)
        yield made


def one_by_one(encode: Encode, texts: Sequence[Text]) -> None:
    for text in texts:
        encode(text)


def by_clients(encode: Encode, texts: Sequence[Text], clients: int) -> None:
    """Embeds texts, with this number of clients that ask for one at a time."""
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(encode, texts))


def locked(encode: Encode) -> Encode:
    """Returns a function that runs one call at a time."""
    lock = threading.Lock()

    def run(text: Text) -> np.ndarray:
        with lock:
            return encode(text)

    return run


def timed(cases: dict[str, Callable[[], Any]], passes: int) -> dict[str, float]:
    """Returns the median seconds of each case; the cases take turns, after one pass that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(passes + 1):
        for name, run in cases.items():
            started = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) for name, each in seconds.items()}


def table(seconds: dict[str, float], num_texts: int) -> str:
    """Returns rows of pairs: a plain loop's case, and Baton's behind it."""
    lines = ["| load | plain loop, s | Baton, s | texts/s | ratio |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, theirs in seconds.items():
        load, _, who = name.partition(": ")
        if who == "Baton":
            continue
        ours = seconds[f"{load}: Baton"]
        label = load if who == "plain" else f"{load}; {who}"
        lines.append(f"| {label} | {theirs:.3f} | {ours:.3f} | {num_texts / ours:.0f} | {theirs / ours:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", help="Baton's; the plain loop computes in float32")
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with model_folder(options.model) as folder:
        vocabulary = AutoConfig.from_pretrained(folder).vocab_size
        shape = (options.texts, options.tokens)
        texts = np.random.default_rng(0).integers(1000, vocabulary, shape).tolist()
        plain = PlainLoop(folder)
        rows = max(options.texts, options.clients)
        config = WorkerConfig(
            model=folder,
            threads=options.threads,
            max_num_requests=rows,
            max_num_batched_tokens=options.budget,
            dtype=options.dtype,
        )
        engine = EngineThread(CpuExecutor(config), rows, options.budget)
        try:
            cosines = (plain.encode_all(texts) * engine.encode_all(texts)).sum(-1)
            clients = f"{options.clients} clients at once"
            seconds = timed(
                {
                    "one at a time: plain": lambda: one_by_one(plain.encode, texts),
                    "one at a time: Baton": lambda: one_by_one(engine.encode, texts),
                    f"{clients}: plain": lambda: by_clients(plain.encode, texts, options.clients),
                    f"{clients}: one call at a time": lambda: by_clients(locked(plain.encode), texts, options.clients),
                    f"{clients}: Baton": lambda: by_clients(engine.encode, texts, options.clients),
                    "one batch: plain": lambda: plain.encode_all(texts),
                    "one batch: Baton": lambda: engine.encode_all(texts),
                },
                options.passes,
            )
        finally:
            engine.close()
    load = f"{options.texts} texts of {options.tokens} tokens, {options.threads} threads, {options.dtype}"
    print(f"{load}, least cosine {cosines.min():.7f}")
    print(table(seconds, options.texts))


if __name__ == "__main__":
    main()
