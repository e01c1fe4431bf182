"""For which steps there are graphs between attentions."""

import pytest

from baton.worker.executors.cuda.steps.piecewise import SIZES, piece_size, piece_sizes
from baton.worker.models.presets import PRESETS
from baton.worker.models.registry import parse_config


@pytest.mark.parametrize(
    ("preset", "budget", "extra"),
    [
        ("qwen3-0.6b", 8192, (8192,)),
        ("qwen3-0.6b", 2000, (2000,)),
        ("qwen3-0.6b", 1024, ()),
        ("llama-3.1-8b", 8192, ()),
        ("qwen3-30b-a3b", 8192, ()),
    ],
)
def test_steps_that_fill_the_budget_of_a_small_model_have_graphs(
    preset: str, budget: int, extra: tuple[int, ...]
) -> None:
    assert piece_sizes(parse_config(PRESETS[preset], "preset"), budget) == (*SIZES, *extra)


def test_a_small_budget_leaves_the_larger_sizes_out() -> None:
    assert piece_sizes(parse_config(PRESETS["qwen3-0.6b"], "preset"), 100) == (16, 32, 64)


@pytest.mark.parametrize(
    ("num_tokens", "size"), [(1, 16), (17, 32), (1024, 1024), (1025, None), (7679, None), (7680, 8192), (8192, 8192)]
)
def test_a_long_step_is_padded_by_a_sixteenth_at_most(num_tokens: int, size: int | None) -> None:
    assert piece_size((*SIZES, 8192), num_tokens) == size


def test_a_step_beyond_all_sizes_is_launched_as_it_is() -> None:
    assert piece_size(SIZES, 1025) is None
    assert piece_size((), 1) is None
