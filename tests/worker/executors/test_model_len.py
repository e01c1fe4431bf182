"""The most tokens of a request: as set, the model's own limit, or, with `auto`, what the KV pool holds."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.engine.tiny_models import make_model

from baton.rpc.errors import InvalidRequest
from baton.services import settings
from baton.worker.config import AUTO_MODEL_LEN, WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.executors.factory import sim_settings
from baton.worker.executors.model_len import fitting_model_len, wanted_model_len


def test_a_request_may_have_fewer_tokens_than_the_model_allows_but_not_more() -> None:
    assert [wanted_model_len(wanted, 64) for wanted in (0, 1, 64, AUTO_MODEL_LEN)] == [64, 1, 64, 64]
    with pytest.raises(InvalidRequest, match=r"max_model_len=65 .*at most 64"):
        wanted_model_len(65, 64)


@pytest.mark.parametrize(
    ("wanted", "num_tokens", "longest", "why"),
    [
        (AUTO_MODEL_LEN, 4096, 4096, "auto is 4096, all that the KV pool holds; the model's own limit is 8192"),
        (AUTO_MODEL_LEN, 20480, 8192, "auto is 8192, the model's own limit; the KV pool holds 2.5 requests of that"),
        (0, 4096, 8192, ""),
        (100, 4096, 100, ""),
    ],
)
def test_auto_is_the_longest_that_fits_and_says_why(
    wanted: int, num_tokens: int, longest: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert fitting_model_len(wanted, 8192, num_tokens) == longest
    assert why in caplog.text
    assert bool(caplog.text) == bool(why)


def test_the_cpu_executor_serves_what_its_pool_holds(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    config = WorkerConfig(model=str(tmp_path), block_size=16, num_blocks=5, max_model_len=AUTO_MODEL_LEN, threads=1)
    assert CpuExecutor(config).model.max_model_len == 80


def test_the_simulator_serves_what_its_pool_holds() -> None:
    config = WorkerConfig(model="", executor="sim", block_size=16, num_blocks=5, max_model_len=AUTO_MODEL_LEN)
    assert sim_settings(config).max_model_len == 80


def test_the_flag_takes_a_number_or_the_word() -> None:
    def parsed(text: str) -> int:
        (config,) = settings.load("worker", (WorkerConfig,), ["--max-model-len", text], {})
        length: int = config.max_model_len
        return length

    assert (parsed("auto"), parsed("4096")) == (AUTO_MODEL_LEN, 4096)
    with pytest.raises(settings.SettingsError, match="'-1' is not allowed; give an integer, at least 0, or auto"):
        parsed("-1")
    with pytest.raises(settings.SettingsError, match="'atuo' is not allowed; give an integer, at least 0, or auto"):
        parsed("atuo")
