"""Names of adapters on a fleet of simulated workers with two gateways: found on first use, by tenant, known to all."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from support.gateway.access_rig import key_file
from support.gateway.console_fleet import gateway_service
from support.plugins.packages import install_example
from support.processes import ports
from support.processes.stack import MODEL_NAME, Stack, metric, start_stack, wait_until

from baton.v1 import inference_pb2, inference_pb2_grpc

MISS_SECONDS = 2.0
TENANTS = {"ops": {}, "one": {"models": [MODEL_NAME, "team/one"]}, "two": {"models": [MODEL_NAME, "team/two"]}}


@dataclass(frozen=True)
class Fleet:
    stack: Stack
    other: str  # the URL of the second gateway
    keys: dict[str, str]  # by tenant
    folder: Path  # of adapters

    def client(self, tenant: str = "ops", url: str = "") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{url or self.stack.url}/v1", api_key=self.keys[tenant], max_retries=0)

    def post(self, path: str, body: object, tenant: str = "ops", url: str = "") -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.post(f"{url or self.stack.url}{path}", json=body, headers=headers, timeout=60)

    def resolved(self, outcome: str) -> float:
        headers = {"authorization": f"Bearer {self.keys['ops']}"}
        text = httpx.get(f"{self.stack.url}/metrics", headers=headers).text
        return metric(text, "baton_gateway_resolved_adapters_total", outcome=outcome)

    def names(self, url: str = "", tenant: str = "ops") -> set[str]:
        return {card.id for card in self.client(tenant, url).models.list()}


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def chat(client: openai.OpenAI, model: str) -> str:
    messages = [{"role": "user", "content": "Tell me a story."}]
    fields = {"max_tokens": 4, "temperature": 0, "seed": 1}
    answer = client.chat.completions.create(model=model, messages=messages, **fields)  # type: ignore[call-overload]
    assert answer.model == model
    return answer.choices[0].message.content or ""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("names")
    folder, hub, packages = root / "adapters", root / "hub", root / "packages"
    for name in ("team/one", "team/two", "team/shared", "private"):
        adapter(folder / name)
    repository = hub / "models--team--hubbed"
    adapter(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    packages.mkdir()
    (folder / "list.json").write_text(json.dumps({"listed-poet": "private"}))
    plugin = install_example(packages, "adapter_resolvers")
    scopes = ["inference", "metrics", "admin"]
    path, keys = key_file(root, [{"tenant": name, "scopes": scopes} for name in TENANTS], TENANTS)
    gateway = ("--api-keys", str(path), "--adapter-miss-seconds", str(MISS_SECONDS))
    worker = (
        *(
            "--enable-lora",
            "--lora-folders",
            str(folder),
            "--lora-hub-cache",
            str(hub),
            "--sim-adapter-seconds",
            "0.05",
        ),
        *("--plugins", plugin, "--lora-resolvers", f"folder,hub,{plugin}", "--lora-resolver-names", "team/*,listed-*"),
    )
    worker = (*worker, "--max-loras", "2")
    environ = {"PYTHONPATH": str(packages), "BATON_ADAPTER_LIST": str(folder / "list.json")}
    with ExitStack() as cleanup:
        stack = start_stack(root, cleanup, {"gateway": gateway, "worker": worker}, environ, executor="sim")
        rest, rpc = (f"127.0.0.1:{port}" for port in ports.free_ports(2))
        flags = ("--served-model-name", MODEL_NAME, *gateway)
        other = gateway_service(root / "other.log", rest, rpc, stack["router"].plan.address, flags)
        cleanup.callback(other.stop_by_force)
        other.start()
        yield Fleet(stack, f"http://{rest}", dict(zip(TENANTS, keys, strict=True)), folder)


@pytest.mark.parametrize("name", ["team/shared", "team/hubbed", "listed-poet"])
def test_an_unknown_name_is_loaded_when_it_is_first_used(fleet: Fleet, name: str) -> None:
    assert name not in fleet.names()
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda _: chat(fleet.client(), name), range(6)))
    assert all(texts)
    assert name in fleet.names()
    for worker in fleet.stack.workers:
        served = [one.name for one in fleet.stack.stats(worker).state.model.adapters]
        assert name in served, worker.plan.name


def test_grpc_loads_what_it_names(fleet: Fleet) -> None:
    metadata = (("authorization", f"Bearer {fleet.keys['ops']}"),)
    adapter(fleet.folder / "team" / "by-rpc")
    with grpc.insecure_channel(fleet.stack.config.grpc_listen) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(adapter="team/by-rpc", text="Once")
        request.stop.max_tokens = 2
        assert list(stub.Generate(request, metadata=metadata, timeout=60))
        request.adapter = "team/never"
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Generate(request, metadata=metadata, timeout=60))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert "team/by-rpc" in fleet.names()


def test_a_name_that_no_resolver_knows_is_asked_for_once_in_a_while(fleet: Fleet) -> None:
    before, remembered = fleet.resolved("missing"), fleet.resolved("remembered")
    for _ in range(4):
        with pytest.raises(openai.NotFoundError) as raised:
            chat(fleet.client(), "team/later")
        assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
    assert fleet.resolved("missing") == before + 1
    assert fleet.resolved("remembered") == remembered + 3
    adapter(fleet.folder / "team" / "later")
    wait_until(lambda: _served(fleet, "team/later"), "the miss is forgotten", 5 * MISS_SECONDS, 0.3)


def _served(fleet: Fleet, name: str) -> bool:
    body = {"model": name, "prompt": "Once", "max_tokens": 1}
    return fleet.post("/v1/completions", body).status_code == 200


def test_names_outside_the_allow_list_are_unknown_models(fleet: Fleet) -> None:
    missing = fleet.resolved("missing")
    for name in ("private", "../etc", "team", "team/../private", "team//one", "team/./one"):
        with pytest.raises(openai.NotFoundError):
            chat(fleet.client(), name)
    assert fleet.resolved("missing") == missing, "no worker was asked"


def test_tenants_load_and_see_their_own_adapters_alone(fleet: Fleet) -> None:
    with pytest.raises(openai.NotFoundError):
        chat(fleet.client("two"), "team/one")
    assert "team/one" not in fleet.names(), "a tenant that may not use a name loads nothing"
    assert chat(fleet.client("one"), "team/one")
    with pytest.raises(openai.NotFoundError):
        chat(fleet.client("two"), "team/one")
    assert fleet.names(tenant="one") == {MODEL_NAME, "team/one"}
    assert fleet.names(tenant="two") <= {MODEL_NAME, "team/two"}


@pytest.mark.parametrize("replace", [False, True])
def test_another_tenants_name_is_refused(fleet: Fleet, replace: bool) -> None:
    text = chat(fleet.client("one"), "team/one")
    body = {"lora_name": "team/one", "lora_path": str(fleet.folder / "private"), "load_inplace": replace}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = fleet.post(path, body, "two")
        assert answer.status_code == 403, answer.text
        error = answer.json()["error"]
        assert error["param"] == "lora_name"
        assert "the tenant 'two' may not use the name 'team/one'" in error["message"]
    assert chat(fleet.client("one"), "team/one") == text


def test_a_pinned_adapter_stays_on_the_device(fleet: Fleet) -> None:
    body = {"lora_name": "pinned", "lora_path": str(fleet.folder / "private"), "pinned": True}
    assert fleet.post("/v1/load_lora_adapter", body).status_code == 200
    try:
        other = {"lora_name": "second", "lora_path": str(fleet.folder / "team" / "two"), "pinned": True}
        answer = fleet.post("/v1/load_lora_adapter", other)
        assert (answer.status_code, answer.json()["error"]["param"]) == (429, "pinned"), answer.text
        for name in ("team/shared", "team/hubbed", "team/by-rpc", "team/shared"):
            chat(fleet.client(), name)
        for worker in fleet.stack.workers:
            stats = fleet.stack.stats(worker)
            assert stats.counters.adapters.num_pinned == 1
            assert "pinned" in stats.state.adapters, worker.plan.name
    finally:
        assert fleet.post("/v1/unload_lora_adapter", {"lora_name": "pinned"}).status_code == 200
    assert all(fleet.stack.stats(one).counters.adapters.num_pinned == 0 for one in fleet.stack.workers)


def test_all_gateways_know_a_change_within_a_second(fleet: Fleet) -> None:
    seconds = []
    for number in range(3):
        body = {"lora_name": f"fresh-{number}", "lora_path": str(fleet.folder / "private")}
        assert fleet.post("/v1/load_lora_adapter", body).status_code == 200
        began = time.monotonic()
        wait_until(lambda name=body["lora_name"]: name in fleet.names(fleet.other), "the other gateway knows", 5, 0.01)
        seconds.append(time.monotonic() - began)
        assert chat(fleet.client(url=fleet.other), body["lora_name"])
        assert fleet.post("/v1/unload_lora_adapter", body, url=fleet.other).status_code == 200
        began = time.monotonic()
        wait_until(lambda name=body["lora_name"]: name not in fleet.names(), "the first gateway knows", 5, 0.01)
        seconds.append(time.monotonic() - began)
    print("seconds until the other gateway knows:", ", ".join(f"{one:.2f}" for one in seconds))
    assert max(seconds) < 1.0
