"""The whole API fuzzed from its own OpenAPI document, on running services with a simulated engine.

FUZZED_EXAMPLES=40 sends more bodies to each operation.
"""

import json
import os
import re
from contextlib import ExitStack

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.gateway.rest_harness import FakeGenerator
from support.processes.stack import MODEL_NAME, start_stack

from baton.gateway.config import GatewayConfig
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.metrics.gateway import GatewayMetrics
from baton.gateway.models.served import ModelCatalog
from baton.gateway.responses.store import ResponseStore
from baton.gateway.rest_routes import rest_routes
from baton.gateway.serving.admission import ConcurrencyLimiter
from baton.gateway.serving.context import ServingContext
from baton.gateway.storage.store import MemoryRecordStore
from baton.gateway.system.openapi import openapi_document

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# What no field can be blamed for.
WHOLE = ("the body", "invalid HTTP/1.1 request", "Unknown path")
FEW = 3
NUM_EXAMPLES = int(os.environ.get("FUZZED_EXAMPLES", "15"))
# Every value at its bounds takes too long where there are many fields; test_odd_bodies.py sends some to each of them.
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RENDERING = [f"{CHAT}/render", f"{CHAT}/derender", f"{CHAT}/batch", f"{TEXT}/render", f"{TEXT}/derender"]
LARGE = [CHAT, TEXT, *RENDERING, "/v1/responses", "/v1/messages", "/inference/v1/generate"]
CONFIG = {"operations": [{"include-path": path, "phases": {"coverage": {"enabled": False}}} for path in LARGE]}


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """Steps take no time, and contexts are short."""
    store = str(tmp_path_factory.mktemp("files"))
    flags = {
        "worker": ("--sim-slowness", "0", "--max-model-len", "128"),
        "gateway": ("--batch-store", store),
    }
    with ExitStack() as cleanup:
        stack = start_stack(tmp_path_factory.mktemp("fuzz"), cleanup, flags, executor="sim", prefill_workers=0)
        yield stack
        assert stack.chat("Hi", max_tokens=2)["choices"]
        stack.wait_all_blocks_back(10)
        for name, service in stack.services.items():
            assert "Traceback" not in service.log(), f"{name}:\n{service.log_tail(60)}"


class NoPooler:
    """Only makes the routes for vectors part of the document."""


def openapi():
    """The gateway's document, made without running one."""
    metrics = GatewayMetrics(GenerationCounters(), lambda: 0, lambda: 0)
    serving = ServingContext(
        GatewayConfig(), ModelCatalog([]), FakeGenerator(), ConcurrencyLimiter(1), metrics, pooler=NoPooler()
    )
    responses = ResponseStore(MemoryRecordStore(1, 1))
    return json.loads(openapi_document(rest_routes(serving, responses, list)))


def field_names(document):
    schemas = document["components"]["schemas"].values()
    headers = ("anthropic-version", "content-type", "x-request-id")
    operations = (operation for path in document["paths"].values() for operation in path.values())
    queries = {one["name"] for operation in operations for one in operation["parameters"] if one.get("in") == "query"}
    return {*headers, *queries, *(name for one in schemas for name in one.get("properties", ()))}


DOCUMENT = openapi()
FIELDS = field_names(DOCUMENT)
schema = schemathesis.openapi.from_dict(DOCUMENT, config=schemathesis.Config.from_dict(CONFIG))


@pytest.fixture(scope="module")
def kept(services):
    """The id of a response that GET finds."""
    status, response = services.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "background": True})
    assert status == 200
    return response["id"]


@schema.parametrize()
@settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_no_request_is_a_defect(case, services, kept):
    if isinstance(case.body, dict):
        case.body = thinned(case.body)
        if case.path == "/v1/completions":
            case.body.setdefault("prompt", "Hi")
    if case.method == "GET" and "response_id" in case.path_parameters and case.query:
        case.path_parameters["response_id"] = kept
    answer = case.call(services.url, timeout=20)
    case.validate_response(answer, checks=CHECKS)
    if answer.status_code in (400, 404):
        assert names_a_field(answer.json()["error"]), answer.text


def thinned(body):
    """A few of the optional fields, so that not every body is refused for one of them; and the model that there is."""
    given = {name: value for name, value in body.items() if value is not None}
    needed = [name for name in ("messages", "prompt", "input", "token_ids", "tokens", "max_tokens") if name in given]
    others = sorted(set(given) - set(needed) - {"model"}, key=lambda name: repr((name, given[name]))[::-1])
    model = {"model": MODEL_NAME} if isinstance(given.get("model"), str) else {}
    return {**{name: given[name] for name in [*needed, *others[:FEW]]}, **model}


def names_a_field(error):
    """Anthropic's errors have no other place for it than the message."""
    words = re.findall(r"[\w-]+", error["message"].lower())
    return bool(error.get("param")) or error["message"].startswith(WHOLE) or not FIELDS.isdisjoint(words)
