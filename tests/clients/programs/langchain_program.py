"""What LangChain's embeddings and its vector store report of a running server, as one JSON document."""

import asyncio
import json
import sys

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from openai import APIStatusError

URL, MODEL, *LISTS = sys.argv[1:]
TEXTS, QUESTIONS = map(json.loads, LISTS)


def embeddings(name: str = MODEL) -> OpenAIEmbeddings:
    # Texts are sent as they are: otherwise they are sent as tokens of OpenAI's models.
    return OpenAIEmbeddings(
        model=name, base_url=f"{URL}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
    )


def failure() -> dict[str, object]:
    try:
        embeddings("no-such-model").embed_query("a")
    except APIStatusError as error:
        return {"status": error.status_code, "code": error.code}
    return {}


store = InMemoryVectorStore(embeddings())
store.add_texts(TEXTS)
found = {
    "documents": embeddings().embed_documents(TEXTS),
    "question": asyncio.run(embeddings().aembed_query(QUESTIONS[0])),
    "first": [store.similarity_search(question, k=1)[0].page_content for question in QUESTIONS],
    "failure": failure(),
}
print(json.dumps(found))
