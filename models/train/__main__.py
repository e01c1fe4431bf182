"""Trains the model further. See README.md beside this file.

python -m train --before FOLDER --shape FOLDER --out FOLDER [--total 420] [--stories 24000]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from train import evaluation
from train.corpus import AS_SERVED, AS_TRAINED, continued, sample_corpus
from train.network import Kernels, compiled_kernels, load, read_shape, save
from train.pools import make_pools
from train.training import Plan, check_compiles, train


def main() -> None:
    """Samples the corpus, makes the conversations, trains, evaluates and saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the model that the training starts from")
    parser.add_argument("--shape", type=Path, required=True, help="folder of the new config.json and tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--total", type=float, default=420, help="seconds until the training ends")
    parser.add_argument("--stories", type=int, default=24_000)
    parser.add_argument("--chats", type=int, default=90_000)
    parser.add_argument("--agents", type=int, default=2_000)
    parser.add_argument("--held-out", type=int, default=1_000)
    parser.add_argument("--length", type=int, default=65_536, help="tokens of a row")
    parser.add_argument("--peak", type=float, default=1.5e-3, help="learning rate")
    parser.add_argument("--steps", type=int, default=1_000_000, help="at most")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    started = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - started:.0f} s] {text}", flush=True)

    kernels = compiled_kernels() if device.type == "cuda" else Kernels()
    teacher = load(options.before, read_shape(options.before), kernels).to(device).requires_grad_(False)
    network = load(options.before, read_shape(options.shape), kernels).to(device)
    tokenizer_file = options.shape / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    check_compiles(network, teacher, options.length)
    tell("kernels are compiled")
    held_out = sample_corpus(teacher, tokenizer, options.held_out, 900_000_000, AS_SERVED).documents
    held_out_plain = sample_corpus(teacher, tokenizer, options.held_out, 910_000_000, AS_TRAINED).documents
    tell("held-out stories are sampled")
    corpus = sample_corpus(teacher, tokenizer, options.stories, 1)
    more = continued(teacher, tokenizer, corpus.documents[: len(corpus.documents) // 5], 2)
    documents = corpus.documents + more
    tell(f"{len(documents)} documents of {sum(map(len, documents))} tokens are sampled, {len(corpus.stories)} stories")
    pools = make_pools(str(tokenizer_file), corpus.stories, options.chats, options.agents, 3)
    tell(f"{sum(map(len, pools.short))} tokens of short chats, {sum(map(len, pools.agents))} of agents' chats")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    plan = Plan(
        options.total - (time.monotonic() - started), options.length, options.peak, 4, options.out, options.steps
    )
    train(network, teacher, documents, pools, plan)
    save(network, options.out / "model.safetensors")
    tell("trained and saved")
    report: dict[str, object] = {}
    for name, one in (("before", teacher), ("after", network.eval().requires_grad_(False))):
        report[name] = {
            "perplexity, sampled as served": evaluation.perplexity(one, held_out, options.length),
            "perplexity, sampled as trained": evaluation.perplexity(one, held_out_plain, options.length),
            **evaluation.behaviour(one, tokenizer),
        }
        tell(f"{name}: {json.dumps(report[name])}")
    report["skills"] = evaluation.skills(network, tokenizer, pools.parts, corpus.stories, options.length)
    tell(json.dumps(report["skills"]))
    (options.out / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
