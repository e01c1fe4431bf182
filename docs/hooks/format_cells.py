"""The matrix of architecture classes and formats: what runs, the tests that show it, their bounds, and the kernels."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from markdown_text import cell, code, table

CPU_TEST = "tests/worker/quantization/test_logits_by_format.py"
LINEAR_TEST = "tests/kernels/linear/test_quantized.py"
EXPERTS_TEST = "tests/kernels/moe/test_packed_experts.py"
FOUR_BITS_TEST = "tests/kernels/linear/test_four_bits.py"
GGUF_TEST = "tests/kernels/linear/test_gguf_planes.py"
GPU_TEST = "tests/gpu/weights/test_quantized_gpu.py"
_SIZE = 4096  # rows and columns of a linear whose kernels are listed
_NUM_EXPERTS, _TOP_K, _MOST_TOKENS = 128, 8, 4096
_HEAD = ("format", "runs on", "tested by", "bound", "kernels on a CPU", "kernels on a GPU")
_KERNEL_HEAD = ("format", "linears on a GPU, from so many tokens on")
_EXPERTS_HEAD = ("experts", "on a Hopper GPU, 8 of 128 for each token")


def cells_section(root: Path) -> str:
    """Returns the tables of classes, and those of kernels."""
    rows = _cells_module(root)
    kernels = _linear_kernels(rows)
    return (
        "## Classes\n"
        f"`{CPU_TEST}` writes a small random model of each class in each format, and compares its logits, in chunks "
        "and batches, with those of Transformers with the weights that the packed ones mean, in float32. Its bound is "
        f"a part of the largest logit. `{LINEAR_TEST}` and `{EXPERTS_TEST}` compare the products of the GPU's kernels, "
        "with a weight that they read in the same way, in float32 and, on a GPU, in bfloat16: the second bound, which "
        "includes activations rounded to 8 bits, relative to a product's largest value. `make test` runs the first, "
        f"`make test-kernels` the others in Triton's interpreter, and `make test-gpu` `{GPU_TEST}` too.\n\n"
        + "".join(_class_table(root, rows, name, kernels) for name in rows.CLASSES)
        + f"## Kernels\n{table(_KERNEL_HEAD, _kernel_rows(kernels))}\n"
        "On Hopper, products of one token in bfloat16 with MXFP4, and with integers of 4 bits in groups of a multiple "
        "of 128 columns (`awq`, `gptq` and W4A16, also in the order of activations), are those of `packed.four_bits` "
        f"instead of `vector`: `{FOUR_BITS_TEST}`.\n\n"
        f"{table(_EXPERTS_HEAD, list(_experts_rows()))}"
    )


def _cells_module(root: Path) -> ModuleType:
    sys.path.insert(0, str(root / "tests"))
    try:
        return import_module("support.engine.packed.cells")
    finally:
        sys.path.remove(str(root / "tests"))


def _class_table(root: Path, rows: ModuleType, name: str, kernels: Mapping[str, Any]) -> str:
    row = rows.CLASSES[name]
    shown = [_cell(root, rows, name, form, kernels) for form in row.formats]
    shown += [
        (code(form), f"refused: {words}", code(f"{Path(CPU_TEST).stem}[{name}-{form}]"), "", "", "")
        for form, words in row.refused.items()
    ]
    return f"### {row.summary[0].upper()}{row.summary[1:]}\n{table(_HEAD, shown)}\n"


def _cell(root: Path, rows: ModuleType, name: str, form: str, kernels: Mapping[str, Any]) -> tuple[str, ...]:
    executors = executors_of_cell(rows, name, form)
    tests, bounds = [code(f"{Path(CPU_TEST).stem}[{name}-{form}]")], [f"{rows.BOUND:g}"]
    on_gpu = ""
    if "cuda" in executors:
        tests += map(code, _gpu_tests(root, rows, name, form))
        bounds.append(_gpu_bound(kernels.get(form)))
        on_gpu = ", ".join(_short(kernels, rows, name, form))
    return (code(form), ", ".join(executors), "<br>".join(tests), "; ".join(bounds), cpu_kernel(rows, form), on_gpu)


def executors_of_cell(rows: ModuleType, name: str, form: str) -> tuple[str, ...]:
    """Returns the executors that compute a class in a format."""
    formats = import_module("baton.worker.quantization.formats.table").FORMATS
    if rows.is_gguf(form):
        return tuple(formats["gguf"].executors)
    settings = rows.settings_of(form)
    executors = tuple(formats[settings["quant_method"]].executors)
    if "cuda" not in executors:
        return executors
    weights = _weights(rows, name, settings)
    return executors if _on_gpu(weights) else tuple(one for one in executors if one != "cuda")


def _weights(rows: ModuleType, name: str, settings: Mapping[str, Any]) -> Any:
    torch = import_module("torch")
    with torch.device("meta"):
        config = rows.CLASSES[name].make(64).config
    raw = {**config.to_dict(), "architectures": [_architecture(rows, name)], "quantization_config": dict(settings)}
    parsed = import_module("baton.worker.models.registry").parse_config(raw, "config.json")
    build = import_module("baton.worker.weights.build").build_weights
    return build(parsed, lambda name, shape, into: None, torch.float32, torch.device("meta"))


def _architecture(rows: ModuleType, name: str) -> str:
    torch = import_module("torch")
    with torch.device("meta"):
        return type(rows.CLASSES[name].make(64)).__name__


def _on_gpu(weights: Any) -> bool:
    """Returns whether the GPU's kernels read all packed weights of a tree."""
    packed = import_module("baton.worker.quantization.quantized.method").PackedMethod
    unsupported = import_module("baton.rpc.errors").Unsupported
    try:
        for method, params in import_module("baton.worker.layers.self_check").packed_parts(weights):
            if hasattr(method, "split"):  # experts
                linears = list(method.split(params, 0))
                if not all(isinstance(linear, packed) for linear, _ in linears):
                    return False
            else:
                linears = [(method, params)] if isinstance(method, packed) else []
            for linear, own in linears:
                linear.packed_weight(own)
    except unsupported:
        return False
    return True


def _gpu_tests(root: Path, rows: ModuleType, name: str, form: str) -> Iterator[str]:
    """Yields the tests of kernels that read such a weight, and of whole models on a GPU."""
    sparse = "experts" in name or name == "gpt-oss"
    if rows.is_gguf(form):
        yield f"{Path(GGUF_TEST).stem}[{_same_gguf(root, rows, form)}]"
    elif form != "mxfp4":
        same = next((one for one in _names(root / LINEAR_TEST, "NAMES") if _sign(rows, one) == _sign(rows, form)), None)
        assert same is not None, f"{LINEAR_TEST} has a format of each way that kernels read, but none like {form}"
        yield f"{Path(LINEAR_TEST).stem}[{same}]"
    if sparse:
        yield Path(EXPERTS_TEST).stem
    listed = _names(root / GPU_TEST, "EXPERTS" if sparse else "NAMES")
    if form in listed and name in ("biased", "experts"):
        yield f"{Path(GPU_TEST).stem}[{form}]"


def _same_gguf(root: Path, rows: ModuleType, form: str) -> str:
    """Returns the tested type whose planes kernels read in the same way."""
    sign, listed = _sign(rows, form), _names(root / GGUF_TEST, "NAMES")
    same = next((one for one in listed if _sign(rows, f"gguf-{one.lower()}") == sign), None)
    assert same is not None, f"{GGUF_TEST} has a type of each way that kernels read, but none like {form}"
    return same


def _gpu_bound(kernels: Sequence[tuple[int, Any]] | None) -> str:
    """Returns the bounds of products, relative to their root mean square."""
    rounds = any("rounded" in kernel.value for _, kernel in kernels or ())
    return "1e-5" + (" \\| 5e-2" if rounds else " \\| 1e-2")


def _names(path: Path, constant: str) -> list[str]:
    """Returns a list of strings that a test's module defines."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == constant:
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise LookupError(f"{path} defines no {constant}")


def _method(rows: ModuleType, form: str) -> Any:
    """Returns how a format stores one linear."""
    base = import_module("baton.worker.quantization.base")
    part = base.Part("model.layers.0.mlp.down_proj", _SIZE)
    settings, name = {"tensors": {part.name: _gguf_type(form)}, "planes": True}, "gguf"
    if not rows.is_gguf(form):
        settings = rows.settings_of(form)
        name = settings["quant_method"]
    formats = import_module("baton.worker.quantization.formats.table").FORMATS
    module = import_module(f"baton.worker.quantization.formats.{formats[name].module}")
    shape = base.LinearShape([part], _SIZE)
    return module.FORMAT(settings).method_of(shape), shape


def _gguf_type(form: str) -> str:
    return form.removeprefix("gguf-").upper()


def _packed(rows: ModuleType, form: str) -> Any:
    """Returns such a linear as kernels read it; None if they do not."""
    torch = import_module("torch")
    method, shape = _method(rows, form)
    try:
        return method.packed_weight(method.create(shape, torch.bfloat16, torch.device("meta")))
    except import_module("baton.rpc.errors").Unsupported:
        return None


def _sign(rows: ModuleType, form: str) -> tuple[Any, ...]:
    """Returns what kernels are compiled for."""
    weight = _packed(rows, form)
    scale = None if weight.scale is None else (weight.scale.dtype, weight.group > 0, weight.scale_rows > 1)
    flags = (weight.zero is None, weight.order is None, weight.row_scale is None, weight.divides)
    rounds = import_module("baton.kernels.packed.weight").rounds
    return weight.numbers, weight.bits, scale, rounds(weight), *flags


def _linear_kernels(rows: ModuleType) -> dict[str, list[tuple[int, Any]]]:
    """Returns the kernels of a linear by format, with the tokens from which on they compute."""
    ranges = import_module("baton.kernels.linear.quantized.choice").kernel_ranges
    weights = {form: _packed(rows, form) for form in rows.CLASSES["dense"].formats}
    return {
        form: list(ranges(weight, _SIZE, has_scaled_mm=True)) for form, weight in weights.items() if weight is not None
    }


def _kernel_rows(kernels: Mapping[str, Sequence[tuple[int, Any]]]) -> list[tuple[str, str]]:
    by_text: dict[str, list[str]] = {}
    for form, ranges in kernels.items():
        by_text.setdefault("<br>".join(f"{first}: {kernel.value}" for first, kernel in ranges), []).append(form)
    return [(", ".join(map(code, forms)), text) for text, forms in by_text.items()]


def _experts_rows() -> Iterator[tuple[str, str]]:
    for kind, words in (("rounding", "e4m3 with scales of rows, tensors or blocks of 128"), ("packed", "all others")):
        yield cell(words), "<br>".join(_experts_kernels(kind))


def _experts_kernels(kind: str) -> Iterator[str]:
    kernels = import_module("baton.kernels.table")
    last = None
    for tokens in range(1, _MOST_TOKENS):
        case = kernels.Case("cuda", 9, num_pairs=tokens * _TOP_K, num_experts=_NUM_EXPERTS, weights=kind)
        row = kernels.find("run_experts", case)
        if row is not last:
            yield f"{tokens}: {row.path.removeprefix('baton.kernels.')}"
        last = row


def _short(kernels: Mapping[str, Any], rows: ModuleType, name: str, form: str) -> list[str]:
    """Returns the modules of the kernels of linears, and those of experts."""
    linears = [kernel.value.split(",")[0].rpartition(".")[2] for _, kernel in kernels.get(form, ())]
    experts = []
    if "experts" in name or name == "gpt-oss":
        rounds = import_module("baton.kernels.packed.weight").rounds
        weight = None if form == "mxfp4" else _packed(rows, form)
        kind = "rounding" if weight is not None and rounds(weight) else "packed"
        experts = [one.split(": ")[1].partition(":")[0] for one in _experts_kernels(kind)]
    return list(dict.fromkeys(code(one) for one in (*linears, *experts)))


def cpu_kernel(rows: ModuleType, form: str) -> str:
    """Returns what multiplies on a CPU."""
    if rows.is_gguf(form) or form == "mxfp4":
        kinds = import_module("baton.worker.quantization.quantized.gguf_blocks").BLOCK_TYPES
        kind = kinds.get(_gguf_type(form))
        blocks = import_module("baton.worker.quantization.quantized.gguf").GgufBlocks
        method = None if kind is None else blocks("", kind)
    else:
        method, _ = _method(rows, form)
    has_kernel = False
    if method is not None:
        ops = method.on_bfloat16(import_module("baton.worker.layers.cpu.device").CpuKernels())
        has_kernel = type(ops) is not import_module("baton.worker.quantization.quantized.method").PackedOps
    return "some rows dequantized" + ("; few tokens in bfloat16 by PyTorch's int4 or int8" if has_kernel else "")
