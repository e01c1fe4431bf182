"""What Cohere's client reports of a running server, as one JSON document."""

import asyncio
import json
import sys

import cohere

URL, MODEL, *LISTS = sys.argv[1:]
TEXTS, QUESTIONS = map(json.loads, LISTS)

client = cohere.ClientV2("none", base_url=URL)


def failure(**fields: object) -> dict[str, object]:
    try:
        client.embed(**{"model": MODEL, "input_type": "search_document", **fields})
    except cohere.core.ApiError as error:
        return {"status": error.status_code, "message": error.body["error"]["message"]}
    return {}


async def at_once() -> list[list[float]]:
    async with cohere.AsyncClientV2("none", base_url=URL) as asynchronous:
        kinds = {"input_type": "search_query", "embedding_types": ["float"]}
        answers = await asyncio.gather(*(asynchronous.embed(model=MODEL, texts=[text], **kinds) for text in QUESTIONS))
    return [answer.embeddings.float_[0] for answer in answers]


kinds = ["float", "int8", "uint8", "binary", "ubinary"]
embedded = client.embed(model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=kinds)
ranked = client.rerank(model=MODEL, query=QUESTIONS[0], documents=TEXTS, top_n=3)
found = {
    "float": embedded.embeddings.float_,
    "int8": embedded.embeddings.int8,
    "uint8": embedded.embeddings.uint8,
    "binary": embedded.embeddings.binary,
    "ubinary": embedded.embeddings.ubinary,
    "tokens": embedded.meta.billed_units.input_tokens,
    "questions": asyncio.run(at_once()),
    "many": len(client.embed(
        model=MODEL, texts=TEXTS * 20, input_type="search_document", embedding_types=["float"]
    ).embeddings.float_),
    "ranked": [[one.index, one.relevance_score] for one in ranked.results],
    "unknown": failure(model="no-such-model", texts=["a"]),
    "empty": failure(texts=["a", ""]),
}  # fmt: skip
print(json.dumps(found))
