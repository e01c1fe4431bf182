"""Measures each kernel on this GPU relative to the GPU's peak, after checking it against its oracle.

baton bench kernels [--only decode --only prefill ...] [--model llama-3.1-8b] [--json PATH]
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.extend(
    str(Path(__file__).resolve().parents[3] / name) for name in ("tests", "proto", "services", "worker", "kernels")
)

import torch
from bench.kernels.case import FLOPS, Case, ModelShape
from bench.kernels.timing import Ceilings, Timing, measure_ceilings, time_launches

from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.worker.models.presets import PRESETS

_GROUPS = ("decode", "prefill", "latent", "linear", "pointwise", "sampling", "experts", "quantized", "recurrence")
_PARTS = ("quantized_experts",)  # of groups


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a case."""

    case: Case
    timing: Timing | None  # None: `problem` has the reason
    error: float | None
    peer_us: float | None
    problem: str = ""

    @property
    def rate(self) -> float:
        """TB/s or TFLOP/s."""
        return self.case.work / self.timing.us / 1e6 if self.timing else 0.0

    def share(self, ceilings: Ceilings) -> float:
        """Returns the share of the GPU's measured peak."""
        best = ceilings.matmul_tflop_s if self.case.unit == FLOPS else ceilings.copy_tb_s
        return self.rate / best


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints one table, and writes JSON. Returns 1 without a GPU, or if a kernel is wrong or failed."""
    options = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        print(f"baton bench kernels: needs an NVIDIA GPU, and torch {torch.__version__} sees none", file=sys.stderr)
        return 1
    torch.manual_seed(options.seed)
    device = torch.device("cuda")
    with torch.inference_mode():
        ceilings = measure_ceilings(device)
        results = [_measure(case, device) for case in _cases(options)]
    _show(options, ceilings, results)
    return int(any(result.problem for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=(*_GROUPS, *_PARTS), help="groups of kernels to measure (default: all)"
    )
    parser.add_argument("--model", choices=tuple(PRESETS), default="llama-3.1-8b", help="model whose shapes are used")
    parser.add_argument("--block-size", type=int, choices=(16, 32, 64), default=16, help="tokens per KV block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path)
    return parser


def _cases(options: argparse.Namespace) -> list[Case]:
    shape = ModelShape.of(PRESETS[options.model])
    block_size = options.block_size

    def attention(kind: str) -> list[Case]:
        from bench.kernels.attention import attention_cases

        return [case for case in attention_cases(shape, block_size) if case.op.startswith(kind)]

    def latent() -> list[Case]:
        from bench.kernels.latent import latent_cases

        return latent_cases(block_size)

    def linear() -> list[Case]:
        from bench.kernels.linear import linear_cases

        return linear_cases(shape)

    def pointwise() -> list[Case]:
        from bench.kernels.pointwise import pointwise_cases

        return pointwise_cases(shape, block_size)

    def sampling() -> list[Case]:
        from bench.kernels.sampling import sampling_cases

        return sampling_cases(shape)

    def experts() -> list[Case]:
        from bench.kernels.experts import experts_cases

        return experts_cases()

    def recurrence() -> list[Case]:
        from bench.kernels.recurrence import recurrence_cases

        return recurrence_cases()

    def quantized() -> list[Case]:
        from bench.kernels.quantized import quantized_cases

        return [*quantized_cases(shape), *quantized_experts()]

    def quantized_experts() -> list[Case]:
        from bench.kernels.quantized_experts import quantized_experts_cases

        return quantized_experts_cases()

    groups: Mapping[str, Callable[[], list[Case]]] = {
        "decode": lambda: attention("decode"),
        "prefill": lambda: attention("prefill"),
        "latent": latent,
        "linear": linear,
        "pointwise": pointwise,
        "sampling": sampling,
        "experts": experts,
        "quantized": quantized,
        "recurrence": recurrence,
        "quantized_experts": quantized_experts,
    }
    return [case for name in options.only or _GROUPS for case in groups[name]()]


def _measure(case: Case, device: torch.device) -> Result:
    """Measures a case. A failure becomes a row, so that other cases still run."""
    print(f"{case.op}, {case.shape}", file=sys.stderr, flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    peer_us = case.peer_us
    try:
        prepared = case.prepare(device)
        error = prepared.error()
        if not error <= prepared.tolerance:
            return Result(
                case, None, _finite(error), peer_us, f"WRONG: error {error:.1e} over {prepared.tolerance:.0e}"
            )
        timing = time_launches(prepared.launches)
        if prepared.peer:
            peer_us = time_launches(prepared.peer).us
        return Result(case, timing, error, peer_us)
    except Exception as error:
        return Result(case, None, None, peer_us, f"{type(error).__name__}: {error}".partition("\n")[0])


def _finite(error: float) -> float | None:
    """Replaces NaN, which JSON does not have."""
    return error if math.isfinite(error) else None


def _show(options: argparse.Namespace, ceilings: Ceilings, results: Sequence[Result]) -> None:
    facts = machine_facts(("torch", "triton"), torch.cuda.get_device_name())
    print(f"kernels, shapes of {options.model}, block size {options.block_size}, bf16: {facts_line(facts)}")
    print(
        f"ceilings in this run: device copy {ceilings.copy_tb_s:.2f} TB/s (read + write), "
        f"bf16 matrix product {ceilings.matmul_tflop_s:.0f} TFLOP/s"
    )
    header = ("op", "shape", "us", "min..max", "rate", "of ceiling", "peer", "peer us", "x peer", "error")
    print(render_table(header, [_cells(result, ceilings) for result in results], options.markdown))
    for result in results:
        if result.problem:
            print(f"{result.case.op}, {result.case.shape}: {result.problem}")
    rows = [_record(result, ceilings) for result in results]
    shape = {"model": options.model, "block_size": options.block_size}
    write_json(options.json, {**facts, **shape, "ceilings": asdict(ceilings), "rows": rows})


def _cells(result: Result, ceilings: Ceilings) -> tuple[str, ...]:
    case, timing, peer_us = result.case, result.timing, result.peer_us
    peer = (case.peer or "-", "-" if peer_us is None else f"{peer_us:.1f}")
    wrong = "-" if result.error is None else f"{result.error:.1e}"
    if timing is None:
        return (case.op, case.shape, "failed", "-", "-", "-", *peer, "-", wrong)
    digits = 0 if case.unit == FLOPS else 2
    return (
        case.op,
        case.shape,
        f"{timing.us:.1f}",
        f"{timing.min_us:.1f}..{timing.max_us:.1f}",
        f"{result.rate:.{digits}f} {case.unit}",
        f"{100 * result.share(ceilings):.0f} %",
        *peer,
        "-" if peer_us is None else f"{peer_us / timing.us:.2f}",
        wrong,
    )


def _record(result: Result, ceilings: Ceilings) -> dict[str, object]:
    case, timing = result.case, result.timing
    return {
        "op": case.op,
        "shape": case.shape,
        "unit": case.unit,
        "work": case.work,
        "us": timing and timing.us,
        "min_us": timing and timing.min_us,
        "max_us": timing and timing.max_us,
        "rate": result.rate,
        "share_of_ceiling": result.share(ceilings),
        "peer": case.peer,
        "peer_us": result.peer_us,
        "error": result.error,
        "problem": result.problem,
    }


if __name__ == "__main__":
    sys.exit(main())
