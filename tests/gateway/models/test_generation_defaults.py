"""Where the sampling defaults of requests come from: the model, another file, nothing, and overrides."""

import json

import pytest
from support.gateway.rest_harness import SAMPLE, RawClient
from support.gateway.scripted_gateway import running

from baton.gateway.config import GatewayConfig
from baton.gateway.models.files import read_model_files
from baton.gateway.models.generation_defaults import GenerationFlags, read_defaults
from baton.gateway.server import served_model
from baton.rpc.errors import InvalidRequest
from baton.services import settings

OWN = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}  # of the sample model


def defaults(**flags):
    return read_defaults(read_model_files(str(SAMPLE)), GenerationFlags(**flags))


def test_by_default_the_model_s_own_apply():
    found = defaults()
    assert OWN.items() <= found.values.items()
    assert found.max_tokens == 512


def test_none_means_neutral_values():
    found = defaults(source="none")
    assert (found.values["temperature"], found.values["top_p"], found.values["top_k"]) == (1.0, 1.0, 0)
    assert found.max_tokens is None


@pytest.mark.parametrize("is_folder", [True, False])
def test_another_file_or_folder_replaces_the_model_s(tmp_path, is_folder):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.2, "eos_token_id": 7, "max_new_tokens": 9}))
    found = defaults(source=str(tmp_path if is_folder else path))
    assert (found.values["temperature"], found.values["top_p"], found.max_tokens) == (0.2, 1.0, 9)


def test_overrides_go_before_the_file_and_leave_the_rest():
    found = defaults(overrides={"temperature": 0.0, "max_new_tokens": 5})
    assert (found.values["temperature"], found.values["top_p"], found.max_tokens) == (0.0, 0.9, 5)
    assert defaults(source="none", overrides={"top_k": 3}).values["top_k"] == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("{", "--override-generation-config is not valid JSON"),
        ("[]", r"--override-generation-config is \[\]; it must be a JSON object"),
        ('{"temprature": 1}', "--override-generation-config has 'temprature'; did you mean temperature?"),
        ('{"xyz": 1}', "--override-generation-config has 'xyz'; give some of temperature, top_p"),
        ('{"temperature": 9}', "--override-generation-config: temperature is 9; it must be from 0 to 2"),
        ('{"top_p": "x"}', "--override-generation-config: top_p must be a number, not 'x'"),
        ('{"max_new_tokens": 0}', "--override-generation-config: max_new_tokens is 0; it must be at least 1"),
    ],
)
def test_wrong_overrides_are_named(overrides, message):
    with pytest.raises(settings.SettingsError, match=message):
        settings.load("gateway", (GatewayConfig,), ["--override-generation-config", overrides], {})


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_wrong_file_is_named(tmp_path, content):
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidRequest, match=r"generation_config: \S+mine.json ") as raised:
        served_model(GatewayConfig(model=str(SAMPLE), generation_config=str(path)))
    assert raised.value.field == "generation_config"


async def test_requests_get_the_defaults_and_may_override_them():
    seen = []

    def script(submit):
        seen.append((round(submit.sampling.temperature, 3), submit.stop.max_tokens))
        return [10, 4]

    async with running(script, override_generation_config='{"temperature": 0.25, "max_new_tokens": 7}') as gateway:
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        for fields in ({}, {"temperature": 1.5, "max_tokens": 9}):
            assert (await post(gateway, "/v1/chat/completions", chat | fields)).status == 200
    assert seen == [(0.25, 7), (1.5, 9)]


async def test_without_a_default_an_answer_has_what_the_context_holds():
    seen = []

    def script(submit):
        seen.append(submit.stop.max_tokens + len(submit.prompt_token_ids))
        return [10, 4]

    async with running(script, generation_config="none") as gateway:
        answer = await post(gateway, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
        assert answer.status == 200
        models = await gateway.get("/v1/models")
    assert seen == [json.loads(models.body)["data"][0]["max_model_len"]]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"])
async def test_every_stream_can_be_made_to_end_with_its_usage(path):
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi"},
        "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {}},
    }
    for forced in (False, True):
        async with running(lambda submit: [10, 4], enable_force_include_usage=forced) as gateway:
            answer = await post(gateway, path, bodies[path] | {"stream": True})
            assert answer.status == 200
            *_, last, done = [line for line in answer.body.decode().splitlines() if line.startswith("data: ")]
            assert done == "data: [DONE]"
            assert bool(json.loads(last.removeprefix("data: ")).get("usage")) is forced


async def post(gateway, path, body):
    async with RawClient.connect(gateway.port) as client:
        return await client.request("POST", path, body)
