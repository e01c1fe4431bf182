import pytest
import torch
from bench.kernels import bench_kernels
from bench.kernels.attention import FA3_DECODE_US, FA3_PREFILL_TFLOP_S
from bench.kernels.case import BYTES, FLOPS


def cases(*flags):
    return bench_kernels._cases(bench_kernels._parser().parse_args(flags))


def test_without_a_gpu_there_is_one_clear_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_kernels.main([]) == 1
    shown = capsys.readouterr().err
    assert "needs an NVIDIA GPU" in shown
    assert shown.count("\n") == 1


def test_every_kernel_has_rows():
    ops = {case.op for case in cases()}
    wanted = {"decode attention", "prefill attention, generic", "small linear", "rms_norm + residual", "rope_cache",
              "silu_mul", "sampling, greedy", "gated_delta_step", "gated_delta_chunks", "state_space_step",
              "state_space_chunks", "causal_conv", "gated_rms_norm",
              "latent decode attention", "latent prefill attention"}  # fmt: skip
    assert wanted <= ops


def test_attention_rows_are_those_that_fa3_was_measured_on():
    decode = {case.shape: case for case in cases("--only", "decode")}
    measured = [shape for shape, case in decode.items() if case.peer_us is not None]
    assert measured == [f"{count} x {length}" for count, length in FA3_DECODE_US]
    # 1.33 TB/s in the published table.
    assert decode["1 x 8192"].work / decode["1 x 8192"].peer_us / 1e6 == pytest.approx(1.33, abs=0.01)
    for case in cases("--only", "prefill"):
        assert case.unit == FLOPS
        assert case.work / case.peer_us / 1e6 == pytest.approx(FA3_PREFILL_TFLOP_S[int(case.shape)])


def test_one_long_sequence_among_short_ones_is_a_row_of_its_own():
    mixed = [case for case in cases("--only", "decode") if case.peer_us is None]
    assert [case.shape for case in mixed] == [f"1 x 32768 and {others} x 640" for others in (15, 63, 255)]
    assert all(case.work > 0 for case in mixed)


def test_figures_for_other_shapes_are_not_compared_with():
    assert {case.peer_us for case in cases("--only", "decode", "--model", "qwen3-0.6b")} == {None}


def test_decodes_of_latents_with_many_heads_are_compute_bound():
    units = {case.shape: case.unit for case in cases("--only", "latent") if case.op == "latent decode attention"}
    assert units["16 heads, 64 x 4096"] == BYTES
    assert units["128 heads, 64 x 4096"] == FLOPS


def test_a_step_of_recurrences_counts_one_read_and_one_write_of_each_state():
    steps = [case for case in cases("--only", "recurrence") if case.peer_us is not None]
    assert [case.peer_us for case in steps] == [60.3]
    states = 2 * 256 * 8 * 128 * 128 * 4
    assert states < steps[0].work < 1.02 * states
