"""A retrieval task in the form of BEIR and MTEB: the server ranks as sentence-transformers does."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from clients import processes
from clients.conftest import PROGRAMS
from clients.environments import PackageFiles
from clients.minilm import NAME
from support.processes.stack import Stack

PACKAGES = PackageFiles(
    "sentence-transformers",
    ("sentence-transformers==6.2.0", "scikit-learn==1.9.1", "scipy==1.17.1", "joblib==1.6.0", "narwhals==2.29.0",
     "threadpoolctl==3.8.0"),
)  # fmt: skip
DATASET = Path(__file__).parents[1] / "retrieval"

pytestmark = [pytest.mark.timeout(600), pytest.mark.clients]


@pytest.fixture(scope="module")
def found(minilm_stack: Stack, minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What its evaluator reports of the library's own model, and of the server."""
    made = tmp_path_factory.mktemp("retrieval")
    (packages,) = PACKAGES.folder().glob("lib/python*/site-packages")
    # Beside this interpreter's own torch and transformers.
    environ = processes.client_environ(made, PYTHONPATH=str(packages))
    words = [sys.executable, PROGRAMS / "retrieval_program.py", minilm_stack.url, NAME, minilm_folder, DATASET, made]
    report: dict[str, Any] = json.loads(processes.run(words, made, environ, 300).splitlines()[-1])
    return report


def test_ndcg_is_that_of_the_library(found: Mapping[str, Any]) -> None:
    library, served = found["library"], found["served"]
    assert served["ndcg"] == library["ndcg"]
    assert served["recall"] == library["recall"]
    assert 0.7 < served["ndcg"] < 1  # the set has documents that mislead


def test_documents_are_ranked_as_by_the_library(found: Mapping[str, Any]) -> None:
    for query, expected in found["library"]["ranks"].items():
        hits = found["served"]["ranks"][query]
        assert [name for name, _ in hits] == [name for name, _ in expected], query
        assert [score for _, score in hits] == pytest.approx([score for _, score in expected], abs=1e-5), query


def test_rerank_orders_the_whole_corpus_as_the_library_does(found: Mapping[str, Any], minilm_stack: Stack) -> None:
    queries, corpus = (
        {line["_id"]: line["text"] for line in map(json.loads, (DATASET / f"{name}.jsonl").read_text().splitlines())}
        for name in ("queries", "corpus")
    )
    names, gains = list(corpus), []
    relevant = {tuple(line.split("\t")[:2]) for line in (DATASET / "qrels.tsv").read_text().splitlines()[1:]}
    for query, text in queries.items():
        status, answer = minilm_stack.post(
            "/v1/rerank", {"query": text, "documents": list(corpus.values()), "top_n": 10}
        )
        assert status == 200, answer
        order = [names[one["index"]] for one in answer["results"]]
        assert order == [name for name, _ in found["library"]["ranks"][query][:10]], query
        ideal = sum(1 / math.log2(place + 2) for place in range(sum(one == query for one, _ in relevant)))
        gains.append(sum(1 / math.log2(at + 2) for at, name in enumerate(order) if (query, name) in relevant) / ideal)
    assert sum(gains) / len(gains) == pytest.approx(found["library"]["ndcg"])
