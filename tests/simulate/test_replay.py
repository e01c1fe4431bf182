"""A run is a function of its inputs; taking many steps at once changes nothing."""

import subprocess
import sys

import pytest
from support.fleet.simulate_harness import run, transcript

CLUSTERS = {
    "local": {"roles": ("decode",) * 3},
    "mixed": {"roles": ("both",) * 3},
    "apart": {"roles": ("prefill", "decode", "decode")},
    "short of memory": {"roles": ("decode",) * 2, "num_blocks": 160, "max_model_len": 4096},
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_equal_seeds_give_equal_runs(cluster):
    assert transcript(run(**cluster)) == transcript(run(**cluster))


def test_another_seed_gives_another_run():
    assert transcript(run(seed=1)) != transcript(run(seed=2))


@pytest.mark.parametrize("workload", ["chat", "bursty"])
@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_coasting_decides_what_single_steps_decide(cluster, workload):
    coasting = run(workload, exact=True, **cluster)
    stepping = run(workload, exact=True, coast=False, **cluster)
    assert transcript(coasting) == transcript(stepping)
    assert coasting.timeline.num_events < stepping.timeline.num_events
    for name, worker in coasting.workers.items():
        assert worker.engine.counters() == stepping.workers[name].engine.counters()


def test_memory_that_is_short_is_fought_for():
    simulation = run("poisson", rate=20.0, **CLUSTERS["short of memory"])
    totals = [worker.engine.counters() for worker in simulation.workers.values()]
    assert sum(one.num_preemptions for one in totals) > 0
    assert sum(one.num_evicted_blocks for one in totals) > 0


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_every_request_ends_and_leaves_no_block_behind(cluster):
    simulation = run(**cluster)
    for record in simulation.gateway.records:
        assert record.error == ""
        assert record.arrived < record.first_token <= record.finished
    for worker in simulation.workers.values():
        audit = worker.engine.audit()
        assert (audit.num_held_blocks, audit.num_leased_blocks) == (0, 0)


def test_prompts_are_handed_over_where_workers_are_apart():
    simulation = run("poisson", **CLUSTERS["apart"])
    assert any(record.prefill_worker_id for record in simulation.gateway.records)


def test_no_module_imports_torch():
    code = "import sys, baton.services.simulate.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
