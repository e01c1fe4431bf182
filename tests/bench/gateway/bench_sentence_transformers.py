"""Times embeddings of texts: a running Baton over HTTP against sentence-transformers, in turns.

`python -m bench.gateway.bench_sentence_transformers --model FOLDER --url http://127.0.0.1:8000` in tests/. Needs the
package sentence-transformers. Each has the machine alone, because the other one waits.

sentence-transformers has its defaults: float32, SDPA, batches of up to 32 texts. It runs in this process without HTTP,
on the clients' own threads or one call at a time; and, as its users serve it, behind HTTP in a process of its own,
where FastAPI runs a function that calls `encode` on its threads. Baton is asked over HTTP in every row.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

Encode = Callable[[Sequence[str]], np.ndarray]
Loads = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]  # the library's run and Baton's, by name
_START_SECONDS = 120
_WORDS = "the fox ran home and a ship sailed over the sea while rain fell on old stone walls near the river"


class Server:
    """A client of POST /v1/embeddings, with a connection for each thread."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._own = threading.local()

    def forget(self) -> None:
        """Drops this thread's connection."""
        self._own.__dict__.pop("connection", None)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the embeddings of texts, of one request."""
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = http.client.HTTPConnection(self._host)
        body = json.dumps({"input": list(texts), "encoding_format": "base64"})
        connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise SystemExit(f"HTTP {response.status}: {answer[:500].decode(errors='replace')}")
        data = json.loads(answer)["data"]
        return np.stack([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in data])


@contextlib.contextmanager
def served(model: str, threads: int) -> Iterator[Server | None]:
    """Yields a client of sentence-transformers behind FastAPI, on a port of this machine. None: it is not installed."""
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        print("rows of sentence-transformers behind HTTP need the packages fastapi and uvicorn")
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(__file__).with_name("sentence_transformers_server.py")
    child = subprocess.Popen([sys.executable, str(program), model, str(port), str(threads)])
    try:
        client = Server(f"http://127.0.0.1:{port}")
        _wait_for(client, child)
        yield client
    finally:
        child.terminate()
        child.wait()


def _wait_for(client: Server, child: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_SECONDS
    while True:
        if child.poll() is not None:
            raise SystemExit(f"the server of sentence-transformers ended with {child.returncode}")
        try:
            client.encode(["a"])
        except OSError as error:
            if time.monotonic() > until:
                raise SystemExit(f"the server of sentence-transformers does not answer: {error}") from error
            client.forget()
            time.sleep(0.2)
        else:
            return


def texts_of(model: SentenceTransformer, count: int, num_tokens: int) -> list[str]:
    """Returns different texts of exactly this many tokens, special ones included."""
    source = np.random.default_rng(0)
    known, found = _WORDS.split(), list[str]()
    for _ in range(count):
        words = [str(word) for word in source.choice(known, num_tokens)]
        while len(model.tokenizer(" ".join(words))["input_ids"]) > num_tokens:
            words.pop()
        found.append(" ".join(words))
    return found


def one_by_one(encode: Encode, texts: Sequence[str]) -> None:
    for text in texts:
        encode([text])


def by_clients(encode: Encode, texts: Sequence[str], clients: int) -> None:
    """Embeds texts, with this number of clients that ask for one at a time."""
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda text: encode([text]), texts))


def timed(library: Callable[[], Any], baton: Callable[[], Any], passes: int) -> tuple[float, float]:
    """Returns the median seconds of both, which take turns, after one pass that does not count."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(passes + 1):
        for run, found in zip((library, baton), seconds, strict=True):
            started = time.perf_counter()
            run()
            if number:
                found.append(time.perf_counter() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2, help="of sentence-transformers")
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, baton = SentenceTransformer(options.model, device="cpu"), Server(options.url)
    lock = threading.Lock()

    def library(texts: Sequence[str]) -> np.ndarray:
        vectors: np.ndarray = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return vectors

    def in_turns(texts: Sequence[str]) -> np.ndarray:
        with lock:
            return library(texts)

    texts = texts_of(model, options.texts, options.tokens)
    cosines = (library(texts) * baton.encode(texts)).sum(-1)
    clients = f"{options.clients} clients at once"
    loads: Loads = {
        "one at a time": (lambda: one_by_one(library, texts), lambda: one_by_one(baton.encode, texts)),
        "one request": (lambda: library(texts), lambda: baton.encode(texts)),
        clients: (
            lambda: by_clients(library, texts, options.clients),
            lambda: by_clients(baton.encode, texts, options.clients),
        ),
        f"{clients}; the library one call at a time": (
            lambda: by_clients(in_turns, texts, options.clients),
            lambda: by_clients(baton.encode, texts, options.clients),
        ),
    }
    with served(options.model, options.threads) as server:
        if server is not None:
            _add_served(loads, server, baton, texts, options.clients)
        print(f"load {os.getloadavg()[0]:.1f} at the start")
        print(f"{options.texts} texts of {options.tokens} tokens, least cosine {cosines.min():.7f}")
        print("| load | sentence-transformers, s | Baton over HTTP, s | texts/s | ratio |")
        print("| --- | ---: | ---: | ---: | ---: |")
        # One load after the other: PyTorch is slow on one thread after it ran on many.
        for load, both in loads.items():
            theirs, ours = timed(*both, options.passes)
            print(f"| {load} | {theirs:.3f} | {ours:.3f} | {options.texts / ours:.0f} | {theirs / ours:.2f} |")
    print(f"load {os.getloadavg()[0]:.1f} at the end")


def _add_served(loads: Loads, server: Server, baton: Server, texts: Sequence[str], clients: int) -> None:
    loads["one at a time; the library behind HTTP"] = (
        lambda: one_by_one(server.encode, texts),
        lambda: one_by_one(baton.encode, texts),
    )
    loads[f"{clients} clients at once; the library behind HTTP"] = (
        lambda: by_clients(server.encode, texts, clients),
        lambda: by_clients(baton.encode, texts, clients),
    )


if __name__ == "__main__":
    main()
