"""External input is data: product code never unpickles, evaluates or loads it as code."""

from __future__ import annotations

import ast
import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.gateway.models.files import read_model_files
from baton.rpc.errors import InvalidRequest
from baton.worker.models.registry import load_config
from baton.worker.weights.checkpoint import Checkpoint

ROOT = Path(__file__).parents[2]
PRODUCT = ("proto", "services", "gateway", "router", "worker", "kvstore", "kernels")
MODEL = ROOT / "models" / "storyteller-7m"

# Modules that make objects of whatever class bytes name, or code of text.
UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "code",
    "codeop",
}
UNSAFE_MODULES |= {"yaml", "ruamel", "xmlrpc", "telnetlib", "transformers", "imp", "multiprocessing.managers"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
# Functions by their dotted names that unpickle, run a shell, or fetch code.
UNSAFE_FUNCTIONS = {
    "torch.load",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
    "numpy.load",
    "np.load",
    "os.system",
    "os.popen",
    "asyncio.create_subprocess_shell",
    "importlib.reload",
}
UNSAFE_KEYWORDS = {"trust_remote_code", "allow_pickle", "shell"}
# What the operator says at the command line, on their own machine, may name code; what else, is a mistake here.
ALLOWED = {
    ("gateway/baton/gateway/parsing/format_choice.py", "runpy"): "--tool-parser-plugin names a file of the operator's",
    (
        "gateway/baton/gateway/bodies/reading_process.py",
        "import_module",
    ): "the module of a request's type, which the gateway that started it names",
    (
        "gateway/baton/gateway/mcp/sessions.py",
        "import_module",
    ): "the product's own connection, which loads a large library",
    ("kernels/baton/kernels/table.py", "import_module"): "one of the implementations that the table lists",
    (
        "proto/baton/rpc/background.py",
        "runpy",
    ): "one of the product's own modules, which the service that starts it names",
    (
        "services/baton/services/settings/config_file.py",
        "yaml",
    ): "its safe loader's nodes, of which no objects are made",
    (
        "worker/baton/worker/weights/quantizing/auto_round.py",
        "transformers",
    ): "a local folder, from safetensors, without its code",
    ("services/baton/services/bench/command.py", "import_module"): "the program of one of the product's own benchmarks",
    ("services/baton/services/bench/sweep/command.py", "import_module"): "the same, once for each point of a grid",
    ("services/baton/services/evaluation/command.py", "import_module"): "offline inference, which loads torch",
    ("services/baton/services/evaluation/harness.py", "import_module"): "the same, and lm-eval, which is optional",
    ("services/baton/services/evaluation/scoring.py", "import_module"): "offline inference, which loads torch",
    ("services/baton/services/tools/quantize.py", "import_module"): "the product's own code that loads torch",
    ("services/baton/services/tools/run_batch.py", "import_module"): "offline inference, which loads torch",
    ("services/baton/services/up/command.py", "import_module"): "the settings of one of the product's own services",
    (
        "worker/baton/worker/weights/quantizing/scheme.py",
        "import_module",
    ): "one of the formats that the table lists",
    **{
        (
            f"worker/baton/worker/{path}.py",
            "transformers",
        ): "classes that Transformers itself has, never a folder's code"
        for path in (
            "models/transformers_backend/attention",
            "models/transformers_backend/experts",
            "models/transformers_backend/installed",
            "models/transformers_backend/reading",
            "models/transformers_backend/trial",
            "weights/transformers_loading",
        )
    },
    (
        "proto/baton/model_folder/tokenizers/conversion.py",
        "transformers",
    ): "converts tokenizers in a process of its own; it runs no code of a model folder",
    ("services/baton/services/simulate/cell.py", "multiprocessing"): "the simulator's own processes of one run",
    ("services/baton/services/simulate/cell.py", "concurrent.futures.ProcessPoolExecutor"): "as above",
    ("services/baton/services/simulate/cell.py", "import_module"): "--policies names a module of the operator's",
    ("services/baton/services/simulate/chaos/runs.py", "multiprocessing"): "the simulator's own processes of one run",
    ("services/baton/services/simulate/chaos/runs.py", "concurrent.futures.ProcessPoolExecutor"): "as above",
    ("services/baton/services/cli.py", "import_module"): "one of the product's own services",
    ("services/baton/services/doctor/command.py", "import_module"): "the settings of one of the product's own services",
    (
        "worker/baton/worker/executors/cuda/compilation/compiler.py",
        "import_module",
    ): "a module of baton.kernels, and no other",
    (
        "worker/baton/worker/models/supported/families.py",
        "import_module",
    ): "one of the families that the registry lists",
    ("worker/baton/worker/models/weight_formats.py", "import_module"): "one of the formats that the table lists",
    ("worker/baton/worker/transfer/kinds/rdma/nixl.py", "import_module"): "one of two names of one package",
}


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yields lines that could create code or objects from input, and the functions' names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((node.lineno, name) for name in (_unsafe_module(alias.name),) if name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = [f"{node.module}.{one.name}" for one in node.names]
            names = {_unsafe_module(one) for one in (node.module, *full)} | (UNSAFE_FUNCTIONS & set(full))
            yield from ((node.lineno, name) for name in names if name)
        elif isinstance(node, ast.Call):
            yield from _unsafe_call(node)


def _unsafe_module(module: str) -> str:
    top = module.partition(".")[0]
    if module == "concurrent.futures.ProcessPoolExecutor":
        return module
    if top in ("multiprocessing", "runpy"):
        return top
    return module if module in UNSAFE_MODULES else top if top in UNSAFE_MODULES else ""


def _unsafe_call(node: ast.Call) -> Iterator[tuple[int, str]]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in (*UNSAFE_CALLS, "import_module"):
        yield node.lineno, function.id
    if isinstance(function, ast.Attribute):
        if (dotted := ast.unparse(function)) in UNSAFE_FUNCTIONS:
            yield node.lineno, dotted
        if function.attr in ("import_module", "exec_module", "read_pickle"):
            yield node.lineno, function.attr
    for keyword in node.keywords:
        is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
        if keyword.arg in UNSAFE_KEYWORDS and not is_off:
            yield node.lineno, f"{keyword.arg}="


def product_files() -> list[Path]:
    files = [path for folder in PRODUCT for path in sorted((ROOT / folder / "baton").rglob("*.py"))]
    assert len(files) > 300, "this walks all of the product"
    return files


@functools.cache
def findings_in_product() -> list[tuple[str, int, str]]:
    """File, line and name."""
    return [
        (str(path.relative_to(ROOT)), line, name)
        for path in product_files()
        for line, name in findings(path.read_text())
    ]


def test_no_code_of_the_product_unpickles_evaluates_or_loads_code():
    assert not [one for one in findings_in_product() if (one[0], one[2]) not in ALLOWED]


def test_each_exception_is_still_needed():
    assert set(ALLOWED) <= {(path, name) for path, _, name in findings_in_product()}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "np.load(path)",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=flag)",
        "eval(text)",
        "exec(text)",
        "compile(text, 'x', 'exec')",
        "from yaml import load",
        "import marshal",
        "from torch import load",
        "model = torch.jit.load(path)",
        "await asyncio.create_subprocess_shell(text)",
        "from multiprocessing import connection",
        "from concurrent.futures import ProcessPoolExecutor",
        "import importlib\nimportlib.import_module(name)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "os.system(text)",
        "def later():\n    from transformers import AutoModel",
    ],
)
def test_the_walk_finds(source: str):
    assert list(findings(source))


@pytest.mark.parametrize("source", ["import json", "re.compile(x)", "f(shell=False)", "model.eval()", "torch.empty(3)"])
def test_the_walk_lets_pass(source: str):
    assert not list(findings(source))


# A model folder of a stranger.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt", "pytorch_model.bin.index.json"]
)
def test_weights_that_are_no_safetensors_are_refused_and_not_read(folder: Path, name: str):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(InvalidRequest) as caught, Checkpoint(folder):
        pass
    assert "model.safetensors" in caught.value.message
    assert name in caught.value.message
    assert "only safetensors are loaded" in caught.value.message


def test_a_pickle_that_is_called_safetensors_is_refused(folder: Path):
    import pickle

    (folder / "model.safetensors").write_bytes(pickle.dumps({"weight": list(range(1000))}))
    with pytest.raises(InvalidRequest) as caught, Checkpoint(folder):
        pass
    assert "model.safetensors" in caught.value.message


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_folder_that_brings_code_is_refused(folder: Path, name: str):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoModel": "modeling.Model"}}))
    (folder / "modeling.py").write_text("raise SystemExit('code of a model folder ran')")
    with pytest.raises(InvalidRequest) as caught:
        load_config(folder) if name == "config.json" else read_model_files(str(folder))
    assert "auto_map" in caught.value.message
    assert name in caught.value.message


def test_a_python_file_in_a_folder_is_never_run(folder: Path, tmp_path: Path):
    for name in ("modeling.py", "tokenization.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    load_config(folder)
    read_model_files(str(folder))
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.names
    assert not (tmp_path / "ran").exists()


def test_downloads_take_no_code_and_no_pickles():
    from baton.gateway.models import files as model_files
    from baton.worker.weights import resolve

    allowed = {*model_files._HUB_PATTERNS, *resolve._FILES}
    # Of sentencepiece, tiktoken and byte-level BPE: protocol buffers and texts.
    tokenizers = {"tokenizer.model", "tokenizer.model.v*", "spiece.model", "tiktoken.model", "merges.txt"}
    assert all(pattern.endswith((".json", ".jinja", ".safetensors")) for pattern in allowed - tokenizers)


# The dependencies.


def test_the_lock_files_are_those_of_pyproject_and_name_no_host():
    import lock

    project = lock.read_project()
    for file in (*lock.lock_files(project), *lock.image_files()):
        text = file.path.read_text()
        assert list(lock.problems_of(project, file, text)) == []
        assert "://" not in text
        assert "--index" not in text
        assert "--find-links" not in text
