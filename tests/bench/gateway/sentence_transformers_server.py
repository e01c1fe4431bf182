"""Serves sentence-transformers over HTTP as its users do: FastAPI calls `encode` on threads.

`python sentence_transformers_server.py MODEL PORT THREADS`
"""

from __future__ import annotations

import base64
import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from sentence_transformers import SentenceTransformer


def app_of(folder: str) -> FastAPI:
    """Returns an app with POST /v1/embeddings, which takes a list of texts and returns base64."""
    model, app = SentenceTransformer(folder, device="cpu"), FastAPI()

    @app.post("/v1/embeddings")
    def embed(body: dict[str, Any]) -> dict[str, Any]:
        vectors = model.encode(body["input"], normalize_embeddings=True, show_progress_bar=False)
        return {"data": [{"embedding": base64.b64encode(vector.tobytes()).decode()} for vector in vectors]}

    return app


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    # Connections of clients that wait while other loads run stay open.
    quiet = {"log_level": "warning", "timeout_keep_alive": 3600}
    uvicorn.run(app_of(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), **quiet)
