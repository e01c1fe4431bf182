"""Batches on real services and a real Redis, through the official client, with services killed while one runs."""

from contextlib import ExitStack

import pytest
from openai import NotFoundError
from support.gateway.access_rig import key_file
from support.gateway.batch_files import begin, check_each_once, client_of, completion_lines, results, wait_end, wait_for
from support.processes import ports
from support.processes.stack import MODEL_NAME, RedisServer, start_stack

TENANTS = ("one", "small")
NUM_LINES = 240
# In the order of a request's way. The gateway is first: its lease must expire before the batch goes on.
KILLED = ("gateway", "router", "worker-both-0", "kvstore")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    tenants = {"one": {}, "small": {"concurrent_requests": 2}}
    keys, secrets = key_file(folder, [{"tenant": name} for name in TENANTS], tenants)
    with ExitStack() as cleanup:
        redis = RedisServer(folder, ports.free_ports(1)[0])
        cleanup.callback(redis.stop)
        redis.start()
        flags = {
            "gateway": ("--batch-store", str(folder / "store"), "--redis-url", redis.url, "--max-batch-streams", "16"),
            "worker": ("--sim-slowness", "1"),
        }
        stack = start_stack(folder, cleanup, flags, executor="sim", prefill_workers=0, api_keys=str(keys))
        yield stack, [cleanup.enter_context(client_of(stack.url, secret)) for secret in secrets]


def test_a_batch_survives_every_service_and_answers_each_line_once(fleet):
    stack, (client, _) = fleet
    batch = begin(client, completion_lines(NUM_LINES, MODEL_NAME, max_tokens=48, ignore_eos=True))
    done = 0
    for name in KILLED:
        before = done
        found = wait_for(client, batch, lambda one, before=before: one.request_counts.completed > before)
        done = found.request_counts.completed
        assert found.status == "in_progress"
        stack[name].kill()
        stack[name].start()
    end = wait_end(client, batch)
    assert end.status == "completed", end
    assert (end.request_counts.total, end.request_counts.completed) == (NUM_LINES, NUM_LINES)
    check_each_once(results(client, end.output_file_id), NUM_LINES)


def test_another_tenant_sees_nothing_of_it(fleet):
    _, (client, other) = fleet
    end = wait_end(client, begin(client, completion_lines(2, MODEL_NAME, max_tokens=2)))
    assert [one.id for one in other.files.list().data] == []
    assert [one.id for one in other.batches.list().data] == []
    for call in (
        lambda: other.batches.retrieve(end.id),
        lambda: other.batches.cancel(end.id),
        lambda: other.files.content(end.output_file_id),
        lambda: other.files.delete(end.input_file_id),
    ):
        with pytest.raises(NotFoundError):
            call()
    assert len(results(client, end.output_file_id)) == 2


def test_a_tenants_limits_hold_its_lines_back_and_no_line_fails(fleet):
    _, (_, client) = fleet
    end = wait_end(client, begin(client, completion_lines(12, MODEL_NAME, max_tokens=16)))
    assert (end.status, end.request_counts.completed) == ("completed", 12)
