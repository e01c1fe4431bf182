"""The page of models: what runs, and the tests that compare it with Transformers, read from the tests' sources."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from markdown_text import GENERATED_NOTE, cell, code, table

from baton.model_folder.gguf.architectures import ARCHITECTURES
from baton.worker.models.supported import catalog

CPU_TEST = "tests/worker/executors/cpu/test_cpu_executor.py"
ENCODER_TEST = "tests/worker/pooling/test_encoders.py"
GPU_TEST = "tests/gpu/engine/test_cuda_engine.py"
GGUF_TEST = "tests/worker/weights/test_gguf_architectures.py"
# What these tests take their models from: dictionaries by the names of rows.
CPU_ROWS = tuple(f"tests/support/engine/tiny_{name}.py" for name in ("models", "moe_models", "state_models"))
ENCODER_ROWS = ("tests/support/engine/encoder_models.py",)
GPU_ROWS = tuple(f"tests/support/engine/gpu_{name}.py" for name in ("engines", "state_models"))
_HEAD = ("architecture", "what it is", "executors", "rows on a CPU", "rows on a GPU")
_GGUF_HEAD = ("`general.architecture`", "architectures")
_FORMAT_HEAD = ("name", "what it is", "executors")


def models_page(root: Path) -> str:
    """Returns the tables of families, formats and limits."""
    on_cpu, on_gpu = rows_by_architecture(root, CPU_ROWS + ENCODER_ROWS), rows_by_architecture(root, GPU_ROWS)
    families = [
        (
            "<br>".join(code(name) for name in (family.architecture, family.former_name) if name),
            cell(family.summary),
            ", ".join(family.executors),
            _codes(on_cpu.get(family.architecture, ())),
            _codes(on_gpu.get(family.architecture, ())),
        )
        for family in catalog.families()
    ]
    return (
        f"# Models that run\n\n{GENERATED_NOTE}\n"
        "`baton models` prints these lists, and `baton models FOLDER` says whether a model runs and what fits into "
        "memory.\n\n## Families\n"
        "Each row makes a small random model with Hugging Face Transformers; the test compares Baton's tokens with "
        f"those of Transformers. Rows on a CPU are those of `{CPU_TEST}`, which `make test` runs: one request, "
        "batches in chunks, prefix hits, preemption, KV that moved; of encoders, their vectors in "
        f"`{ENCODER_TEST}`. Rows on a GPU are those of "
        f"`{GPU_TEST}`, which `make test-gpu` runs.\n\n{table(_HEAD, families)}\n"
        f"## Weight formats\n\n{_formats(catalog.WEIGHT_FORMATS)}\n"
        f"## GGUF files\nThe models of `{GGUF_TEST}` are written as llama.cpp's converter does, and compared with "
        f"Transformers.\n\n{table(_GGUF_HEAD, _gguf_rows())}\n"
        f"## KV dtypes\n\n{_formats(catalog.KV_DTYPES)}\n"
        f"## Limits\n\n{_formats(catalog.LIMITS)}"
    )


def _gguf_rows() -> list[tuple[str, str]]:
    return [
        (code(name), _codes(dict.fromkeys(one.architecture for one in several)))
        for name, several in ARCHITECTURES.items()
    ]


def rows_by_architecture(root: Path, sources: Iterable[str]) -> Mapping[str, list[str]]:
    """Returns the rows of each architecture."""
    architectures = {family.architecture for family in catalog.families()}
    found: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for row, names in _rows_of((root / source).read_text(encoding="utf-8")).items():
            for architecture in sorted(names & architectures):
                found[architecture].append(row)
    return found


def _rows_of(text: str) -> Mapping[str, set[str]]:
    """Returns the names that each row uses, itself or through a function of its module."""
    module = ast.parse(text)
    functions = {node.name: _names_in(node) for node in module.body if isinstance(node, ast.FunctionDef)}
    rows: dict[str, set[str]] = {}
    for dictionary in _dictionaries(module):
        for key, value in zip(dictionary.keys, dictionary.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                names = _names_in(value)
                rows[key.value] = names.union(*(functions.get(name, set()) for name in names))
    return rows


def _dictionaries(module: ast.Module) -> Iterator[ast.Dict]:
    for node in module.body:
        match node:
            case ast.AnnAssign(
                target=ast.Name(id="MODELS" | "MOE_MODELS" | "STATE_MODELS" | "ENCODERS"),
                value=ast.Dict() as dictionary,
            ):
                yield dictionary


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _codes(names: Iterable[str]) -> str:
    return ", ".join(map(code, names)) or "none"


def _formats(listed: Iterable[catalog.ListedFormat]) -> str:
    return table(_FORMAT_HEAD, [(code(one.name), cell(one.summary), ", ".join(one.executors)) for one in listed])
