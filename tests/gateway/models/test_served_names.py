"""A model under several names: every route and gRPC take any of them, and answers carry the first."""

from __future__ import annotations

from datetime import UTC, datetime

import anthropic
import grpc
import openai
import pytest
from support.gateway.access_rig import key_file
from support.gateway.scripted_gateway import SAMPLE, running

from baton.gateway.config import GatewayConfig
from baton.gateway.models.served import ModelCatalog, load_served_model
from baton.rpc.errors import InvalidRequest
from baton.services import settings
from baton.services.up.config import UpConfig
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub

NAME = "storyteller-7m"
NAMES = (NAME, "claude-sonnet-4-5", "gpt-5", "org/model")
ALIASES = NAMES[1:]
CONFIGS = {"gateway": GatewayConfig, "up": UpConfig}
MESSAGES = [{"role": "user", "content": "Hi"}]
STARTED = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
async def gateway():
    async with running(lambda submit: [10, 11, 12, 4], served_model_name=NAMES) as gateway:
        yield gateway


def openai_client(gateway, key="none"):
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key=key, max_retries=0)


def anthropic_client(gateway, key="none"):
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{gateway.port}", api_key=key, max_retries=0)


async def test_openais_client_lists_and_finds_every_name(gateway):
    async with openai_client(gateway) as client:
        listed = (await client.models.list()).data
        assert [model.id for model in listed] == list(NAMES)
        for name, model in zip(NAMES, listed, strict=True):
            fields = model.model_dump()
            assert fields == (await client.models.retrieve(name)).model_dump()
            assert (fields["root"], fields["parent"]) == (NAME, None)
            (permission,) = fields["permission"]
            assert permission["id"].startswith("modelperm-")
            assert (permission["object"], permission["created"]) == ("model_permission", fields["created"])
            allowed = {name for name, value in permission.items() if value is True}
            assert allowed == {"allow_sampling", "allow_logprobs", "allow_view"}
            assert (permission["organization"], permission["group"]) == ("*", None)
            assert fields["max_model_len"] == listed[0].model_dump()["max_model_len"] > 0
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-6")


async def test_anthropics_client_lists_and_finds_every_name(gateway):
    async with anthropic_client(gateway) as client:
        page = await client.models.list()
        assert [model.id for model in page.data] == list(NAMES)
        assert (page.has_more, page.first_id, page.last_id) == (False, NAMES[0], NAMES[-1])
        for name in NAMES:
            model = await client.models.retrieve(name)
            assert (model.type, model.id, model.display_name) == ("model", name, name)
            assert model.created_at > STARTED
            assert model.lifecycle == "active"
        assert [model.id async for model in client.models.list(limit=1)] == list(NAMES)
        beta = await client.beta.models.list()
        assert [model.id for model in beta.data] == list(NAMES)
        with pytest.raises(anthropic.NotFoundError) as error:
            await client.models.retrieve("claude-0")
        assert error.value.body["error"]["type"] == "not_found_error"


async def test_anthropics_pages_go_both_ways_and_wrong_queries_are_refused(gateway):
    async with anthropic_client(gateway) as client:
        page = await client.models.list(limit=2, before_id=NAMES[3])
        assert ([model.id for model in page.data], page.has_more) == ([NAMES[1], NAMES[2]], True)
        page = await client.models.list(limit=2, after_id=NAMES[2])
        assert ([model.id for model in page.data], page.has_more) == ([NAMES[3]], False)
        retired = await client.get("/v1/models?lifecycle=retired", cast_to=object)
        assert (retired["data"], retired["first_id"], retired["has_more"]) == ([], None, False)
        for query in ("limit=0", "limit=x", "after_id=none", "before_id=none", "lifecycle=no", "page=2"):
            with pytest.raises(anthropic.BadRequestError, match=query.partition("=")[0]):
                await client.get(f"/v1/models?{query}", cast_to=object)
    async with openai_client(gateway) as client:
        with pytest.raises(openai.BadRequestError, match="anthropic-version"):
            await client.get("/models?limit=1", cast_to=object)


@pytest.mark.filterwarnings("ignore:The model .* is deprecated:DeprecationWarning")  # says the client
@pytest.mark.parametrize("name", NAMES)
async def test_any_name_works_in_every_route_and_the_answer_carries_the_first(gateway, name):
    async with openai_client(gateway) as client, anthropic_client(gateway) as other:
        assert (await client.chat.completions.create(model=name, messages=MESSAGES)).model == NAME
        async for chunk in await client.chat.completions.create(model=name, messages=MESSAGES, stream=True):
            assert chunk.model == NAME
        assert (await client.completions.create(model=name, prompt="Hi")).model == NAME
        assert (await client.responses.create(model=name, input="Hi")).model == NAME
        tokens = await client.post("../tokenize", body={"model": name, "prompt": "Hi"}, cast_to=object)
        body = {"model": name, "tokens": tokens["tokens"]}
        assert (await client.post("../detokenize", body=body, cast_to=object))["prompt"]
        body = {"model": name, "token_ids": [5, 6]}
        assert (await client.post("../inference/v1/generate", body=body, cast_to=object))["choices"]
        message = await other.messages.create(model=name, messages=MESSAGES, max_tokens=8)
        assert message.model == NAME
        assert (await other.messages.count_tokens(model=name, messages=MESSAGES)).input_tokens > 0
    assert {submit.prompt_token_ids != [] for submit in gateway.worker.submits} == {True}


async def test_grpc_takes_and_lists_any_name(gateway):
    async with grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel:
        stub = InferenceServiceStub(channel)
        listed = (await stub.ListModels(pb.ListModelsRequest())).models
        assert [model.name for model in listed] == list(NAMES)
        assert len({model.max_model_len for model in listed}) == len({model.digest for model in listed}) == 1
        for name in NAMES:
            tokens = await stub.Tokenize(pb.TokenizeRequest(model=name, text="Hi"))
            assert tokens.token_ids
            chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")])
            request = pb.GenerateRequest(model=name, chat=chat)
            assert [response async for response in stub.Generate(request)]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Tokenize(pb.TokenizeRequest(model="gpt-6", text="Hi"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_chats_that_are_kept_are_found_by_any_name(gateway):
    async with openai_client(gateway) as client:
        made = await client.chat.completions.create(model="gpt-5", messages=MESSAGES, store=True)
        for name in NAMES:
            found = await client.chat.completions.list(model=name)
            assert [chat.id for chat in found.data] == [made.id]
        assert not (await client.chat.completions.list(model="gpt-6")).data


async def test_a_tenants_list_names_a_model_by_any_of_its_names(tmp_path):
    tenants = {"by-first": {"models": [NAME]}, "by-alias": {"models": ["gpt-5"]}, "none": {"models": ["gpt-6"]}}
    path, (first, alias, none) = key_file(tmp_path, [{"tenant": name} for name in tenants], tenants)
    settings = {"served_model_name": NAMES, "api_keys": str(path)}
    async with running(lambda submit: [10, 4], **settings) as gateway:
        for key in (first, alias):
            async with openai_client(gateway, key) as client:
                assert [model.id for model in (await client.models.list()).data] == list(NAMES)
                for name in NAMES:
                    await client.chat.completions.create(model=name, messages=MESSAGES)
        async with openai_client(gateway, none) as client:
            assert not (await client.models.list()).data
            for name in NAMES:
                with pytest.raises(openai.NotFoundError):
                    await client.chat.completions.create(model=name, messages=MESSAGES)


def test_a_name_of_two_models_is_refused_at_start():
    source = str(SAMPLE)
    one, other = load_served_model(source, ("a", "b")), load_served_model(source, ("c", "b"))
    with pytest.raises(InvalidRequest, match="'b' is there twice"):
        ModelCatalog([one, other])


@pytest.mark.parametrize("command", ["gateway", "up"])
@pytest.mark.parametrize(
    ("argv", "environ", "names"),
    [
        (["--served-model-name", "a"], {}, ("a",)),
        (["--served-model-name", "a", "b"], {}, ("a", "b")),
        (["--served-model-name", "a", "b", "c", "--model", "m"], {}, ("a", "b", "c")),
        (["--served-model-name=a", "b", "--model=m"], {}, ("a", "b")),
        (["--served-model-name", "a,b", "c"], {}, ("a", "b", "c")),
        (["--served-model-name", "a", "b", "--served-model-name", "c"], {}, ("c",)),
        (["--served-model-name", "a b"], {}, ("a", "b")),
        ([], {"SERVED_MODEL_NAME": "a, b"}, ("a", "b")),
        ([], {"SERVED_MODEL_NAME": "a b  c,"}, ("a", "b", "c")),
        (["--served-model-name", "a"], {"SERVED_MODEL_NAME": "b,c"}, ("a",)),
        ([], {}, ()),
    ],
)
def test_names_are_given_as_for_vllm_or_with_commas(command, argv, environ, names):
    variables = {f"BATON_{command.upper()}_{name}": value for name, value in environ.items()}
    (config,) = settings.load(command, (CONFIGS[command],), argv, variables)
    assert config.served_model_name == names


@pytest.mark.parametrize("command", ["gateway", "up"])
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--served-model-name", "a", "b", "a"], "--served-model-name: 'a' is there twice"),
        (["--model", "m", "n"], "unknown argument 'n'"),
        (["--served-model-name"], "expected one argument"),
    ],
)
def test_wrong_names_are_refused(command, argv, message):
    with pytest.raises(settings.SettingsError, match=message):
        settings.load(command, (CONFIGS[command],), argv, {})
