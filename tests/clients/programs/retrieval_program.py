"""Prints what the evaluator of sentence-transformers finds, with its own model and with a running server, as JSON."""

import csv
import json
import sys
from pathlib import Path

import openai
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

URL, MODEL, FOLDER, DATASET, RESULTS = sys.argv[1:]


class Served:
    """The parts of SentenceTransformer that the evaluator uses, over POST /v1/embeddings."""

    similarity_fn_name = "cosine"

    def __init__(self, url, model):
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._model = model

    def encode_query(self, texts, **_):
        answer = self._client.embeddings.create(model=self._model, input=list(texts))
        return torch.tensor([one.embedding for one in answer.data])

    encode_document = encode_query

    def similarity(self, queries, documents):
        return queries @ documents.T


def texts(name):
    lines = map(json.loads, (Path(DATASET) / name).read_text().splitlines())
    return {line["_id"]: line["text"] for line in lines}


def found_by(model, evaluator, folder):
    metrics = evaluator.compute_all_metrics(model, output_path=folder)
    (file,) = Path(folder).glob("*_predictions_cosine.jsonl")
    predictions = map(json.loads, file.read_text().splitlines())
    ranks = {one["query_id"]: [[hit["corpus_id"], hit["score"]] for hit in one["results"]] for one in predictions}
    return {"ndcg": metrics["cosine"]["ndcg@k"][10], "recall": metrics["cosine"]["recall@k"][10], "ranks": ranks}


relevant = {}
with (Path(DATASET) / "qrels.tsv").open() as file:
    for row in csv.DictReader(file, delimiter="\t"):
        relevant.setdefault(row["query-id"], set()).add(row["corpus-id"])
library, served = SentenceTransformer(FOLDER, device="cpu"), Served(URL, MODEL)
found = {}
for name, model in (("library", library), ("served", served)):
    folder = Path(RESULTS) / name
    folder.mkdir()
    evaluator = InformationRetrievalEvaluator(
        texts("queries.jsonl"), texts("corpus.jsonl"), relevant,
        score_functions={"cosine": model.similarity}, write_predictions=True,
    )  # fmt: skip
    found[name] = found_by(model, evaluator, str(folder))
print(json.dumps(found))
