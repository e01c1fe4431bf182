"""Embeds a few documents, and prints those that answer a question, the best first.

baton up --model sentence-transformers/all-MiniLM-L6-v2
python semantic_search.py 127.0.0.1:8001 "How can I sleep better?"
"""

import math
import sys
from collections.abc import Sequence

import grpc

from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub

DOCUMENTS = [
    "Photosynthesis turns sunlight, water and carbon dioxide into sugar.",
    "Avoid coffee after noon, and keep the bedroom dark and cool at night.",
    "Tectonic plates stick, bend and suddenly slip along faults.",
    "Simmer lentils, carrots and cumin in vegetable stock for half an hour.",
    "Items with defects can be sent back within 30 days for a refund.",
]
BEST = 3


def embed(stub: InferenceServiceStub, texts: Sequence[str]) -> list[Sequence[float]]:
    """The texts' embeddings, which come in one or more responses."""
    responses = stub.Embed(pb.EmbedRequest(texts=texts), timeout=60)
    return [vector.values for response in responses for vector in response.embeddings]


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(map(float.__mul__, one, other)) / (math.hypot(*one) * math.hypot(*other))


def main(address: str = "127.0.0.1:8001", question: str = "How can I sleep better?") -> None:
    with grpc.insecure_channel(address) as channel:
        *documents, query = embed(InferenceServiceStub(channel), [*DOCUMENTS, question])
    scores = [cosine(document, query) for document in documents]
    for score, text in sorted(zip(scores, DOCUMENTS, strict=True), reverse=True)[:BEST]:
        print(f"{score:.3f}  {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
