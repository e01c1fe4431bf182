"""A few hostile requests of every family keep the bounds, against real services."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from attack import usage
from attack.cases.case import BODY_LIMIT, CHATS, Case
from attack.cases.corpus import FAMILIES, make_case
from attack.client import Answer
from attack.fleet import Attacked, Cost
from attack.siege import Siege
from attack.verdict import misses, rows

pytestmark = pytest.mark.timeout(240)

SEED = 20
PER_FAMILY = 4
WARM_UP_SECONDS = 5.0
NOISE = 2.0  # a busy machine computes more slowly, and its probe comes late


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with ExitStack() as cleanup:
        made = Attacked(tmp_path_factory.mktemp("attack"), cleanup, "sim")
        made.warm_up([make_case(SEED + 1, number) for number in range(2 * len(FAMILIES))], WARM_UP_SECONDS)
        made.rest(1.0)
        yield made


@pytest.mark.long  # a busy machine adds stalls of its own; `make hostile` is the whole search
@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_requests_keep_the_bounds(fleet, family):
    first = list(FAMILIES).index(family)
    numbers = range(first, PER_FAMILY * len(FAMILIES), len(FAMILIES))
    costs = [fleet.cost(make_case(SEED, number)) for number in numbers]
    wrong = {cost.case.name: misses(cost, NOISE) for cost in costs}
    assert not {name: found for name, found in wrong.items() if found}


def test_the_fleet_serves_after_all_of_it(fleet):
    body = b'{"messages":[{"role":"user","content":"Hello"}],"max_tokens":2,"stream":true}'
    assert fleet.cost(Case(0, "plain", CHATS, body)).answer.accepted


def test_a_case_is_made_again_by_its_number_and_stays_within_the_body_limit():
    for number in range(3 * len(FAMILIES)):
        case = make_case(1, number)
        assert case == make_case(1, number)
        assert len(case.body) <= BODY_LIMIT


def cost(status=400, cpu=0.0, grown=0, stall=0.0, counted=True, path=CHATS):
    return Cost(Case(1, "x", path, b""), Answer(status, {}, 0.0), cpu, grown, stall, stall, counted)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (cost(cpu=0.6), "0.60 CPU-s"),
        (cost(200, cpu=1.1), "1.10 CPU-s"),
        (cost(grown=21_000_000), "21 MB stay"),
        (cost(stall=0.06), "stall of 60 ms"),
        (cost(200, counted=False), "not counted"),
        (cost(0), "status 0"),
        (cost(500), "status 500"),
    ],
)
def test_each_bound_is_reported_where_it_is_missed(found, words):
    assert misses(found) == [words]
    assert any(not row.good for row in rows([found], None))


def test_valid_values_within_the_bounds_are_accepted():
    kept = [cost(cpu=0.4), cost(200, cpu=0.9, grown=19_000_000, stall=0.04), cost(200, counted=False, path="/tokenize")]
    assert not any(misses(one) for one in kept)
    assert all(row.good for row in rows(kept, Siege(0.1, 0.1, 0.19)))
    assert not all(row.good for row in rows(kept, Siege(0.1, 0.1, 0.21)))


def test_cpu_of_reaped_children_counts():
    before = usage.cpu_seconds([os.getpid()])
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass"], check=True)
    assert usage.cpu_seconds([os.getpid()]) - before >= 0.3


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="Linux alone groups sessions")
def test_attackers_have_the_least_share_of_the_cpus():
    program = Path(__file__).with_name("attackers.py")
    with subprocess.Popen(
        [sys.executable, str(program), "--compute"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "computing\n"
        group = Path(f"/proc/{process.pid}/autogroup").read_text()
        nice = os.getpriority(os.PRIO_PROCESS, process.pid)
        process.stdin.close()
    assert group.endswith("nice 19\n")
    assert nice == 19
