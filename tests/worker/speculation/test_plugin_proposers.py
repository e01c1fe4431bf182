"""A proposer of a plugin changes no token; one that raises or hangs costs its requests' drafts alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.engine.spec_runs import VOCAB_SIZE, always, make_engine, make_executor, random_requests, run
from support.plugins.packages import install, install_example

from baton.plugins.kinds import LOGITS_PROCESSORS, PROPOSERS
from baton.plugins.plugins import PluginError, Plugins
from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.core import Int32, Request, Row, RowInit, SamplingParams
from baton.worker.speculation.interface import ProposerContext, TokenProposer
from baton.worker.speculation.proposer import Ask
from baton.worker.speculation.threaded import ThreadedProposer

_SOURCE = """
from baton.worker.sampling.processors.interface import LogitsProcessor
from baton.worker.speculation.interface import TokenProposer

class Faulty(TokenProposer):
    def propose(self, row, token_ids, most):
        if row % 3 == 0:
            raise RuntimeError("no guess")
        if row % 3 == 1:
            return ["a", None]
        return [-1, 1 << 40, 2.5]

class Unready(TokenProposer):
    def __init__(self, context):
        raise OSError("no table")

    def propose(self, row, token_ids, most):
        return []

class Quiet(LogitsProcessor):
    arguments = ("quiet",)

    def new_row(self, arguments, prompt_token_ids):
        return None

    def apply(self, logits, rows):
        pass
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("packages")
    proposers = {"faulty": "Faulty", "unready": "Unready", "no-proposer": "Quiet"}
    install(
        folder, "test-proposers", _SOURCE, {PROPOSERS.group: proposers, LOGITS_PROCESSORS.group: {"quiet": "Quiet"}}
    )
    assert install_example(folder, "proposers") == "bigrams"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def test_the_examples_guesses_change_no_bit(packages: Path, small: Path) -> None:
    def requests() -> list[Request]:
        """Returns requests that repeat tokens, since they have few to choose from."""
        made = random_requests(24, seed=1)
        for request in made:
            request.sampling = replace(request.sampling, allowed_token_ids=tuple(range(5, 25)))
        return made

    plain = run(make_engine(make_executor(model=small)), requests())
    engine = make_engine(always(make_executor("bigrams", plugins=Plugins.named(["bigrams"], "worker"), model=small)))
    assert run(engine, requests(), seed=8) == plain
    counters = engine.counters()
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert counters.num_proposer_failures == 0


def test_one_that_raises_or_answers_nonsense_changes_no_bit(packages: Path, small: Path) -> None:
    plain = run(make_engine(make_executor(model=small)), random_requests(12, seed=1))
    engine = make_engine(make_executor("faulty", model=small, plugins=Plugins.named(["faulty"], "worker")))
    assert run(engine, random_requests(12, seed=1), seed=8) == plain
    assert engine.counters().num_proposer_failures >= 4
    assert engine.counters().num_draft_tokens == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unready", "'unready' cannot be started .*: OSError: no table"),
        ("no-proposer", "it must be a subclass of TokenProposer"),
    ],
)
def test_one_that_cannot_start_ends_the_start(packages: Path, name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make_executor(name, plugins=Plugins.named([name], "worker"))


def test_a_plugin_of_another_kind_is_no_method(packages: Path) -> None:
    from baton.worker.executors.cpu.executor import CpuExecutor

    config = WorkerConfig(executor="cpu", speculative_config='{"method": "quiet"}', plugins=("quiet",))
    with pytest.raises(InvalidRequest, match="the plugin of this name is no proposer; give ngram"):
        CpuExecutor(config, Plugins.named(["quiet"], "worker"))


class Slow(TokenProposer):
    """Hangs at one row until it is let go."""

    def __init__(self, context: ProposerContext) -> None:
        super().__init__(context)
        self.go = threading.Event()
        self.rows: list[int] = []

    def admit(self, row: int, prompt_token_ids: Int32, namespace: bytes) -> None:
        if row == 5:
            raise ValueError("not this one")

    def propose(self, row: int, token_ids: Int32, most: int) -> list[int]:
        self.rows.append(row)
        if row == 1:
            assert self.go.wait(20)
        return [row] * most


def asks(*rows: int) -> list[Ask]:
    return [Ask(row, np.array([7, 8], np.int32), 2) for row in rows]


def answers(found: list[Int32 | Exception]) -> list[object]:
    return [type(each) if isinstance(each, Exception) else each.tolist() for each in found]


@pytest.fixture
def slow() -> Iterator[tuple[ThreadedProposer, Slow]]:
    inner: list[Slow] = []

    def make() -> Slow:
        inner.append(Slow(ProposerContext(VOCAB_SIZE, 100, 8)))
        return inner[0]

    proposer = ThreadedProposer(make, "slow", patience=0.2)
    yield proposer, inner[0]
    inner[0].go.set()
    proposer.close()


def test_a_row_at_which_it_hangs_gets_an_error_and_others_come_back(slow: tuple[ThreadedProposer, Slow]) -> None:
    proposer, inner = slow
    assert answers(proposer.propose(asks(0, 2))) == [[0, 0], [2, 2]]
    began = time.monotonic()
    assert answers(proposer.propose(asks(3, 1, 2))) == [[3, 3], TimeoutError, []]
    assert time.monotonic() - began < 2
    # While it hangs, no step waits for it.
    began = time.monotonic()
    for _ in range(50):
        assert answers(proposer.propose(asks(0))) == [[]]
    assert time.monotonic() - began < 0.1
    inner.go.set()
    deadline = time.monotonic() + 10
    while answers(proposer.propose(asks(0))) != [[0, 0]]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert inner.rows[:5] == [0, 2, 3, 1, 2]


def test_a_row_whose_begin_raised_gets_an_error_until_it_begins_again(slow: tuple[ThreadedProposer, Slow]) -> None:
    proposer, _ = slow
    init = RowInit(Row(5), np.array([7], np.int32), 1, SamplingParams())
    proposer.admit(init)
    assert answers(proposer.propose(asks(5, 2))) == [ValueError, [2, 2]]
    proposer.close()
