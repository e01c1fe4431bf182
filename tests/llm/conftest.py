"""One offline engine of the sample model, shared by the tests of a file, and the same model in Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.llm import LLM

MODEL = Path(__file__).resolve().parents[2] / "models" / "storyteller-7m"


@pytest.fixture(scope="module")
def llm():
    with LLM(str(MODEL), threads=1, max_num_seqs=8, max_model_len=512, num_blocks=256) as one:
        yield one


@pytest.fixture(scope="session")
def oracle():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
