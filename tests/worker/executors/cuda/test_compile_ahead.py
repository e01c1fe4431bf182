"""Kernels that are collected without being launched and compiled by processes, for a card that is not there."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from baton.kernels.attention.decode_cuts import DecodeCuts, _cut_kernel, cut_sequences  # noqa: E402
from baton.kernels.attention.decode_hopper import _decode_kernel, split_decode  # noqa: E402
from baton.kernels.attention.prefill import TILE_ROWS, make_tiles  # noqa: E402
from baton.kernels.attention.prefill_hopper import _prefill_kernel, prefill_attention_hopper  # noqa: E402
from baton.kernels.attention.whole import make_whole_tiles, whole_attention  # noqa: E402
from baton.kernels.linear.quantized import vector  # noqa: E402
from baton.kernels.linear.quantized.linear import quantized_linear  # noqa: E402
from baton.kernels.moe.align import Alignment  # noqa: E402
from baton.kernels.moe.experts import Rows, down_and_sum, gate_and_up, run_rounded_experts  # noqa: E402
from baton.kernels.moe.experts_fp8 import run_few_rounded_experts, run_split_experts  # noqa: E402
from baton.kernels.moe.experts_hopper import multiply  # noqa: E402
from baton.kernels.moe.experts_hopper_fp8 import run_rounded_experts_hopper  # noqa: E402
from baton.kernels.moe.few_packed import run_few_packed  # noqa: E402
from baton.kernels.moe.grouped_hopper import grouped_kernel  # noqa: E402
from baton.kernels.norm.rms_norm import _rms_norm_kernel, rms_norm  # noqa: E402
from baton.kernels.packed.four_bits import choose_four_bit_tiling  # noqa: E402
from baton.kernels.packed.weight import Numbers, PackedWeight  # noqa: E402
from baton.kernels.pooling.finish import finish_vectors  # noqa: E402
from baton.kernels.pooling.pick import pick_vectors  # noqa: E402
from baton.kernels.pooling_spec import ACTIVATIONS, PICKS, Activation, Pick  # noqa: E402
from baton.kernels.rope.rope_cache import rope_in_place  # noqa: E402
from baton.kernels.routing import Gate  # noqa: E402
from baton.kernels.sampling import SamplingState, sample_special, score_tokens  # noqa: E402
from baton.kernels.step_inputs import _step_inputs_kernel, step_inputs  # noqa: E402
from baton.worker.executors.base import DeviceLost  # noqa: E402
from baton.worker.executors.cuda.compilation import compiler, compilers  # noqa: E402
from baton.worker.executors.cuda.compilation.ahead import KernelCollector, compilers_of_start  # noqa: E402
from baton.worker.executors.cuda.compilation.ahead import collect_and_compile as collect_and_compile_with  # noqa: E402
from baton.worker.executors.cuda.compilation.compiler import is_compiled, read_job  # noqa: E402
from baton.worker.executors.cuda.compilation.compilers import Compilers  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
HOPPER_SHARED = 227 * 1024
FP8 = torch.float8_e4m3fn


class Card:
    """What Triton asks a driver before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilers, "_FEW", 0)
    before = driver._active
    driver.set_active(Card())
    for kernel in (_rms_norm_kernel, _decode_kernel, _prefill_kernel, _cut_kernel, _step_inputs_kernel, grouped_kernel):
        kernel.device_caches.clear()  # what the tests before have loaded
    yield tmp_path
    driver._active = before


def norms() -> None:
    for width in (64, 128):
        x = torch.zeros(2, width, dtype=torch.bfloat16)
        rms_norm(x, x[0], 1e-5)


def decode_on_hopper() -> None:
    query, cache = torch.zeros(1, 8, 64, dtype=torch.bfloat16), torch.zeros(2, 2, 2, 16, 64, dtype=torch.bfloat16)
    numbers = torch.zeros(1, 2, dtype=torch.int32)
    pieces, arrived = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    scratch = (torch.zeros(2 * 8 * 64), torch.zeros(2 * 8), arrived)
    split_decode(torch.empty_like(query), query, cache, numbers, numbers[0], pieces, *scratch, 1.0)


def prefill_on_hopper() -> None:
    query, cache = torch.zeros(9, 8, 64, dtype=torch.bfloat16), torch.zeros(2, 2, 2, 16, 64, dtype=torch.bfloat16)
    numbers = torch.zeros(1, 2, dtype=torch.int32)
    row = numbers[0]
    tiles = make_tiles([9], [0], TILE_ROWS, query.device)
    prefill_attention_hopper(query, cache, numbers, row, row, row, tiles, 1.0)


def experts_on_hopper() -> None:
    x, ids = torch.zeros(256, 64, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.int32)
    aligned = Alignment(ids, ids[:2], ids, ids[:8].view(4, 2), 128)
    weight = torch.zeros(4, 128, 64, dtype=torch.bfloat16)
    multiply(torch.empty_like(x), x, weight, None, aligned, 9, Gate())


def whole_attention_on_hopper(head_dim: int, longest: int, window: int = 0) -> None:
    qkv = torch.zeros(longest, 6, head_dim, dtype=torch.bfloat16)
    whole_attention(qkv, make_whole_tiles([longest], qkv.device), 2, 1.0, window)


def relative_attention_on_hopper() -> None:
    qkv, buckets = torch.zeros(99, 6, 64, dtype=torch.bfloat16), torch.zeros(199, dtype=torch.int32)
    tiles = make_whole_tiles([99], qkv.device)
    whole_attention(qkv, tiles, 2, 1.0, relative=torch.zeros(32, 2, dtype=torch.bfloat16), buckets=buckets)


def rotation_on_hopper() -> None:
    qkv, positions = torch.zeros(2, 6 * 64, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    rope_in_place(qkv, positions, torch.zeros(4, 64), 2)


def pooling_on_hopper(pick: Pick) -> None:
    hidden = torch.zeros(9, 384, dtype=torch.bfloat16)
    pick_vectors(hidden, torch.zeros(4, 2, dtype=torch.int64), pick, torch.zeros(3, 384), torch.float32)


def finish_on_hopper(activation: Activation) -> None:
    finish_vectors(torch.zeros(2, 384), torch.zeros(2, 2, dtype=torch.int64), activation)


def processed_logprobs() -> None:
    state = SamplingState(2, 5000, 100, torch.device("cpu"), keeps_processed=True)
    logits, row = torch.zeros(2, 5000, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    sample_special(logits, row, state, row, row, torch.zeros(2, 100, dtype=torch.int32))
    score_tokens(state.scored(logits), row, state, row, normalized=False)


def quantized(numbers: Numbers, num_tokens: int) -> None:
    n, k = 128, 256
    x = torch.zeros(num_tokens, k, dtype=torch.bfloat16)
    if numbers == "e4m3":
        scale = torch.zeros(1, 2)
        weight = PackedWeight(numbers, x.new_zeros(n, k).to(FP8), n, scale=scale, scale_rows=128, group=128)
    else:
        stored, scale = torch.zeros(n * k // 8, dtype=torch.int32), torch.zeros(n, k // 128)
        weight = PackedWeight(numbers, stored, n, 4, scale, group=128)
    quantized_linear(x, weight, None)


def packed_experts(numbers: Numbers, tile: int, ordered: bool = False) -> None:
    hidden, size = 256, 256
    ids = torch.zeros(4 * tile, dtype=torch.int32)
    aligned = Alignment(ids, ids[:4], ids, ids[:4].view(2, 2), tile)
    up, down = (_expert(numbers, n, k) for n, k in ((2 * size, hidden), (hidden, size)))
    if ordered:
        up, down = (
            one._replace(order=torch.zeros(2, parts, 256, dtype=torch.int32)[0]) for one, parts in ((up, 2), (down, 1))
        )
    rows = Rows(torch.zeros(32, hidden, dtype=torch.bfloat16))
    down_and_sum(gate_and_up(rows, aligned, 2, up, Gate()), aligned, torch.zeros(32, 2), down, torch.bfloat16)


def few_packed_experts(numbers: Numbers) -> None:
    up, down = (_expert(numbers, n, k) for n, k in ((512, 256), (256, 256)))
    x, ids = torch.zeros(1, 256, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.int32)
    run_few_packed(x, torch.zeros(1, 2), ids, up, down, Gate(7.0))


def _expert(numbers: Numbers, n: int, k: int) -> PackedWeight:
    if numbers == "e4m3":
        scale = torch.zeros(n // 128, k // 128)
        stored = torch.zeros(2 * n, k).to(FP8)[:n]
        return PackedWeight(numbers, stored, n, scale=scale, scale_rows=128, group=128, num_experts=2)
    if numbers == "e2m1":
        stored, scale = torch.zeros(n, k // 2, dtype=torch.uint8), torch.zeros(n, k // 32, dtype=torch.uint8)
        bias = torch.zeros(n, dtype=torch.bfloat16)
        return PackedWeight(numbers, stored, n, 4, scale, group=32, bias=bias, num_experts=2)
    stored, scale = torch.zeros(n * k // 8, dtype=torch.int32), torch.zeros(n, k // 128)
    return PackedWeight(numbers, stored, n, 4, scale, group=128, num_experts=2)


def inputs() -> None:
    numbers = torch.zeros(2, 2, dtype=torch.int32)
    row = numbers[0]
    step_inputs(row, row, row, row, numbers, numbers, row[:1], row[:1], row, 16, 1)


def cuts() -> DecodeCuts:
    return cut_sequences(torch.zeros(2, dtype=torch.int32), 2, 132)


def collected(run: Callable[[], None]) -> set[str]:
    specializations: set[str] = set()
    with KernelCollector(specializations.add).instead_of_launching():
        run()
    return specializations


def compile_missing(specializations: Iterable[str], target: GPUTarget, num_processes: int = 0) -> int:
    with Compilers(target, num_processes) as processes:
        for each in sorted(specializations):
            processes.add(each)
        return processes.wait()


def collect_and_compile(run: Callable[[], None], synchronize: Callable[[], None]) -> int:
    with Compilers(HOPPER, 2) as processes:
        return collect_and_compile_with(run, synchronize, processes)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each kernel that this process compiles: whether it was in the cache folder."""
    found: list[bool] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **said: found.append(said["cache_hit"]))
    return found


def test_collected_kernels_are_compiled_and_found_by_the_launch(cache: Path, found: list[bool]) -> None:
    wanted = collected(norms) | collected(norms) | collected(decode_on_hopper)
    jobs = [read_job(said, HOPPER) for said in wanted]
    assert len(jobs) == 3
    assert not any(is_compiled(job, HOPPER) for job in jobs)
    assert compile_missing(wanted, HOPPER, 2) == 3
    assert all(is_compiled(job, HOPPER) for job in jobs)
    assert compile_missing(wanted, HOPPER, 2) == 0
    for launch in (norms, decode_on_hopper):
        with pytest.raises(AttributeError):  # where the card would load it
            launch()
    assert found == [True, True]


@pytest.mark.parametrize(
    "launch",
    [
        decode_on_hopper,
        prefill_on_hopper,
        experts_on_hopper,
        rotation_on_hopper,
        relative_attention_on_hopper,
        *(partial(whole_attention_on_hopper, *shape) for shape in ((32, 128), (64, 64), (128, 128), (64, 128, 65))),
        *(partial(pooling_on_hopper, pick) for pick in PICKS),
        *(partial(finish_on_hopper, activation) for activation in ACTIVATIONS),
    ],
)
def test_hoppers_kernels_compile_with_this_triton(cache: Path, launch: Callable[[], None]) -> None:
    (said,) = collected(launch)
    job = read_job(said, HOPPER)
    assert triton.compile(job.source, target=HOPPER, options=job.options.__dict__).asm["cubin"]


def test_kernels_of_processed_log_probabilities_compile_with_this_triton(cache: Path) -> None:
    names = {"_keep_kernel", "_score_parts_kernel", "_score_rows_kernel"}
    jobs = [read_job(said, HOPPER) for said in collected(processed_logprobs) if _name_of(said) in names]
    assert len(jobs) == len(names)
    for job in jobs:
        assert triton.compile(job.source, target=HOPPER, options=job.options.__dict__).asm["cubin"]


def _name_of(said: str) -> str:
    return str(json.loads(said)["name"]).rpartition(".")[2]


@pytest.mark.parametrize("numbers", ["words", "nf4"])
def test_few_tokens_are_multiplied_by_hoppers_matrix_unit_without_a_copy_of_the_weight(
    cache: Path, numbers: Numbers
) -> None:
    (said,) = collected(partial(quantized, numbers, 16))
    job = read_job(said, HOPPER)
    asm = triton.compile(job.source, target=HOPPER, options=job.options.__dict__).asm
    assert "wgmma.mma_async" in asm["ptx"]
    # The operand of the matrix unit that is dequantized stays in registers.
    assert re.search(r"ttng.warp_group_dot %\S+, %\S+, %\S+ \{.*: tensor<", asm["ttgir"])


@pytest.mark.parametrize("num_tokens", [16, 128, 512])
def test_tokens_are_multiplied_in_8_bits_with_weights_in_8_bits(cache: Path, num_tokens: int) -> None:
    jobs = [read_job(said, HOPPER) for said in collected(partial(quantized, "e4m3", num_tokens))]
    compiled = [triton.compile(job.source, target=HOPPER, options=job.options.__dict__).asm["ptx"] for job in jobs]
    assert len(compiled) == 2  # the other one rounds or splits the tokens
    assert any(".f32.e4m3.e4m3" in ptx for ptx in compiled)


@pytest.mark.parametrize("numbers", ["e4m3", "e2m1", "words", "nf4"])
def test_experts_are_multiplied_by_hoppers_matrix_unit_as_they_are_packed(cache: Path, numbers: Numbers) -> None:
    jobs = [read_job(said, HOPPER) for said in collected(partial(packed_experts, numbers, 16))]
    compiled = [triton.compile(job.source, target=HOPPER, options=job.options.__dict__).asm for job in jobs]
    products = [asm for asm in compiled if "wgmma.mma_async" in asm["ptx"]]
    assert len(products) == 2  # the third one sums
    for asm in products:
        assert re.search(r"ttng.warp_group_dot %\S+, %\S+, %\S+ \{.*: tensor<", asm["ttgir"])


def test_experts_whose_columns_have_orders_fit_shared_memory(cache: Path) -> None:
    jobs = [read_job(said, HOPPER) for said in collected(partial(packed_experts, "words", 128, ordered=True))]
    compiled = [triton.compile(job.source, target=HOPPER, options=job.options.__dict__) for job in jobs]
    assert max(one.metadata.shared for one in compiled) <= HOPPER_SHARED


@pytest.mark.parametrize("numbers", ["e4m3", "e2m1"])
def test_packed_experts_of_few_tokens_compile(cache: Path, numbers: Numbers) -> None:
    jobs = [read_job(said, HOPPER) for said in collected(partial(few_packed_experts, numbers))]
    assert len(jobs) == 2
    for job in jobs:
        assert triton.compile(job.source, target=HOPPER, options=job.options.__dict__).asm["cubin"]


def test_products_of_one_token_with_4_bits_compile_with_their_registers(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector, "reads_four_bits", lambda weight, x, k: True)

    def launch() -> None:
        stored, scale = torch.zeros(256, 9216 // 8, dtype=torch.int32), torch.zeros(256, 9216 // 128)
        weight = PackedWeight("words", stored, 256, 4, scale, group=128)
        x, out = torch.zeros(1, 9216, dtype=torch.bfloat16), torch.zeros(1, 256, dtype=torch.bfloat16)
        vector.vector_linear(x, weight, out)

    (job,) = [read_job(said, HOPPER) for said in collected(launch)]
    assert job.options.maxnreg == choose_four_bit_tiling(256, 9216, is_gated=False).most_registers
    compiled = triton.compile(job.source, target=HOPPER, options=job.options.__dict__)
    assert "mma.sync" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    "run", [run_split_experts, run_few_rounded_experts, run_rounded_experts, run_rounded_experts_hopper]
)
def test_pairs_are_multiplied_with_experts_in_8_bits(cache: Path, run: Callable[..., Tensor]) -> None:
    def launch() -> None:
        x, ids = torch.zeros(32, 256, dtype=torch.bfloat16), torch.zeros(32, 2, dtype=torch.int32)
        run(x, torch.zeros(32, 2), ids, _expert("e4m3", 512, 256), _expert("e4m3", 256, 256), Gate())

    jobs = [read_job(said, HOPPER) for said in collected(launch)]
    compiled = [triton.compile(job.source, target=HOPPER, options=job.options.__dict__) for job in jobs]
    assert sum(".f32.e4m3.e4m3" in one.asm["ptx"] for one in compiled) == 2
    assert max(one.metadata.shared for one in compiled) <= HOPPER_SHARED


def test_without_collecting_kernels_are_compiled_where_they_are_launched(cache: Path, found: list[bool]) -> None:
    assert collected(norms)
    with pytest.raises(AttributeError):
        norms()
    assert found == [False]


def test_a_kernel_that_does_not_compile_is_left_to_its_launch(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = collected(norms)
    broken = json.loads(min(good))
    broken["constant_vals"] = [
        3 if value not in (True, False) else value for value in broken["constant_vals"]
    ]  # no power of two
    with caplog.at_level("WARNING"):
        assert compile_missing(good | {json.dumps(broken)}, HOPPER, 1) == 2
    assert "left to its first launch: CompilationError" in caplog.text


def test_words_of_another_triton_are_no_reason_not_to_start(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers.kernel_compiler, "read_job", lambda said, target: json.loads(said)["changed"])
    with caplog.at_level("WARNING"):
        assert collect_and_compile(norms, lambda: None) == 0
    assert "one by one, at their first launch" in caplog.text


def test_only_kernels_of_ours_are_imported(cache: Path) -> None:
    said = json.loads(min(collected(norms)))
    for name in ("os.system", "baton.worker.main.main", "baton.kernelsx.run"):
        with pytest.raises(ValueError, match="is no kernel of"):
            read_job(json.dumps(said | {"name": name}), HOPPER)


def test_compilers_that_die_leave_the_rest_to_the_launches(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers.sys, "executable", "/bin/false")
    with caplog.at_level("WARNING"):
        assert compile_missing(collected(norms), HOPPER, 2) == 0
    assert "the compiler's process ended" in caplog.text


def test_compilers_have_a_deadline(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(compilers.sys, "executable", str(sleeper))
    monkeypatch.setattr(compilers, "_DEADLINE_SECONDS", 0.2)
    assert compile_missing(collected(norms), HOPPER, 2) == 0


def test_few_kernels_are_not_worth_processes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "_FEW", 2)
    monkeypatch.setattr(compilers.sys, "executable", "/nonexistent")
    assert compile_missing(collected(norms), HOPPER, 2) == 0


def test_a_run_that_fails_is_not_the_end_of_a_start(cache: Path) -> None:
    def run() -> None:
        norms()
        raise torch.OutOfMemoryError("a step does not fit")

    assert collect_and_compile(run, lambda: None) == 2


def test_a_lost_device_is(cache: Path) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(DeviceLost):
        collect_and_compile(lost, lost)


@pytest.mark.parametrize("launch", [inputs, cuts])
def test_kernels_that_write_indices_are_collected_too(cache: Path, launch: Callable[[], object]) -> None:
    assert len(collected(launch)) == 1


def test_memory_that_collected_kernels_would_write_is_zeros(cache: Path) -> None:
    """torch reads indices from it."""
    given = torch.zeros(3)
    with KernelCollector(lambda _: None).instead_of_launching(), torch.inference_mode():
        made = [
            torch.empty(1 << 10),
            torch.empty_like(given),
            given.new_empty(1 << 10, dtype=torch.int32),
            torch.empty_strided((8, 8), (1, 8)),
        ]
    assert not any(each.any() for each in made)


def test_a_process_that_has_loaded_kernels_collects_none(cache: Path) -> None:
    """It would launch loaded kernels on uninitialized memory."""
    _cut_kernel.device_caches[0][0]["a form of it"] = object()
    assert collect_and_compile(norms, lambda: None) == 0
    _cut_kernel.device_caches.clear()
    assert collect_and_compile(norms, lambda: None) == 2


def test_processes_compile_while_the_start_still_collects(cache: Path) -> None:
    job, *_ = collected(norms)
    with Compilers(HOPPER, 1) as processes:
        processes.start()
        processes.add(job)
        deadline = time.monotonic() + 120
        while not is_compiled(read_job(job, HOPPER), HOPPER):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert processes.wait() == 1


@pytest.mark.parametrize("is_cold", [True, False])
def test_processes_start_early_where_nothing_is_compiled(
    cache: Path, is_cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_cold:
        (cache / "a kernel").mkdir()
    started: list[Compilers] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(Compilers, "start", lambda self: started.append(self))
    with compilers_of_start(torch.device("cuda")) as processes:
        assert started == ([processes] if is_cold else [])


def test_processes_end_with_a_start_that_fails(cache: Path) -> None:
    with Compilers(HOPPER, 2) as processes:
        processes.start()
        running = list(processes._processes)
    assert len(running) == 2
    assert all(process.returncode is not None for process in running)


def test_the_compiler_builds_the_launchers_of_a_triton_that_has_one_for_each_signature(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the engine's process would run a C compiler for each, one after the other."""
    (launch,) = collected(cuts)
    built: list[str] = []
    monkeypatch.setattr(compiler.nvidia, "make_launcher", None, raising=False)
    monkeypatch.setattr(compiler.nvidia, "CudaLauncher", lambda source, metadata: built.append(metadata.name))
    answers = io.StringIO()
    assert compiler.main(["cuda", "90", "32"], io.StringIO(launch + "\n"), answers) == 0
    assert (answers.getvalue(), built) == ("ok\n", ["_cut_kernel"])


def test_a_launcher_that_cannot_be_built_is_left_to_the_launch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: object, metadata: object) -> None:
        raise AssertionError("libcuda.so cannot found!")

    (launch,) = collected(cuts)
    monkeypatch.setattr(compiler.nvidia, "make_launcher", None, raising=False)
    monkeypatch.setattr(compiler.nvidia, "CudaLauncher", fail)
    answers = io.StringIO()
    compiler.main(["cuda", "90", "32"], io.StringIO(launch + "\n"), answers)
    assert answers.getvalue() == "ok\n"
