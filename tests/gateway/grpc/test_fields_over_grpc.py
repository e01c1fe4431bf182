"""What REST clients can ask for and gRPC clients too: a real client, a whole gateway, an engine that is scripted."""

import grpc
import pytest
from grpc_status import rpc_status
from support.gateway.scripted_gateway import model_folder, model_info, running

from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from baton.v1 import types_pb2
from baton.v1.inference_pb2_grpc import InferenceServiceStub

TEMPLATE = """{% for message in messages %}{{ message.content }}{% endfor %}
{%- if tools %}{{ tools | tojson }}<tool_call>{% endif %} {# </think> #}"""
MARKS = ("<think>", "</think>")
CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")])
TOOL = pb.Tool(name="get_time")


@pytest.fixture
async def service(tmp_path):
    folder = model_folder(tmp_path / "thinker", TEMPLATE, MARKS)
    story = [5, 6, 7, 7, 7, 8, 9]
    gateway_running = running(
        lambda submit: story, model=folder, served_model_name=("storyteller-7m",), info=model_info(len(MARKS))
    )
    async with gateway_running as gateway, grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel:
        yield gateway, InferenceServiceStub(channel)


async def generate(service, **fields):
    gateway, stub = service
    responses = [response async for response in stub.Generate(pb.GenerateRequest(**fields), timeout=20)]
    return gateway.worker.submits[-1], responses


def sampling(**fields):
    return types_pb2.SamplingParams(**fields)


async def test_words_become_sequences(service, tmp_path):
    own = types_pb2.TokenSequence(token_ids=[7, 8])
    asked = sampling(bad_words=["dog"], forbidden_sequences=[own])
    submit, _ = await generate(service, text="Hi", sampling=asked)
    tokenizer = Tokenizer(tmp_path / "thinker" / "tokenizer.json")
    first, *words = submit.sampling.forbidden_sequences
    assert first == own
    assert [tokenizer.decode(list(word.token_ids)) for word in words] == ["dog", " dog"]
    assert not submit.sampling.bad_words
    tokenizer.close()


async def test_an_output_that_repeats_itself_ends(service):
    wanted = types_pb2.RepetitionDetection(max_pattern_size=2, min_count=3)
    stop = types_pb2.StopConditions(repetition_detection=wanted)
    _, responses = await generate(service, text="Hi", stop=stop)
    assert [token_id for response in responses for token_id in response.token_ids] == [5, 6, 7, 7, 7]
    (last,) = (response for response in responses if response.finish_reason)
    assert last.finish_reason == types_pb2.FINISH_REASON_REPETITION
    assert last.WhichOneof("stop_reason") is None


async def test_the_prompts_token_ids_come_once(service):
    submit, responses = await generate(service, chat=CHAT, n=2, return_prompt=True)
    told = [list(response.prompt_token_ids) for response in responses if response.prompt_token_ids]
    assert told == [list(submit.prompt_token_ids)]


async def test_a_reasoning_budget_uses_the_models_tags(service):
    chat = pb.ChatPrompt(messages=CHAT.messages, thinking_token_budget=9)
    submit, _ = await generate(service, chat=chat)
    limit = submit.sampling.reasoning_limit
    assert (limit.max_tokens, list(limit.end_token_ids), limit.start_token_id) == (9, [4097], 4096)


async def test_tools_go_with_a_form(service):
    constraint = types_pb2.Constraint(regex="[0-9]+")
    chat = pb.ChatPrompt(messages=CHAT.messages, tools=[TOOL])
    submit, _ = await generate(service, chat=chat, constraint=constraint)
    assert submit.constraint.WhichOneof("form") == "structural_tag"
    required = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)
    chat = pb.ChatPrompt(messages=CHAT.messages, tools=[TOOL], tool_choice=required)
    submit, _ = await generate(service, chat=chat, constraint=constraint)
    assert "get_time" in submit.constraint.json_schema


async def test_a_prompt_keeps_its_end(service):
    submit, _ = await generate(service, token_ids=pb.TokenIds(token_ids=[5, 6, 7, 8]), max_prompt_tokens=2)
    assert list(submit.prompt_token_ids) == [7, 8]
    submit, _ = await generate(service, token_ids=pb.TokenIds(token_ids=[5, 6]), max_prompt_tokens=4)
    assert list(submit.prompt_token_ids) == [5, 6]


def prompt_of(gateway, submit):
    tokenizer = Tokenizer(gateway.config.model + "/tokenizer.json")
    text = tokenizer.decode(list(submit.prompt_token_ids))
    tokenizer.close()
    return text


DOCUMENTED = """{% for document in documents %}[{{ document.title }}: {{ document.text }}]{% endfor %}
{{- facts.list | join(",") }}{{ facts.deep.flag }}{% if add_generation_prompt %} answer:{% endif %}"""


def text_value(text):
    return pb.TemplateValue(text=text)


async def test_documents_templates_and_nested_variables_reach_the_template(tmp_path):
    folder = model_folder(tmp_path / "plain", TEMPLATE)
    facts = pb.TemplateMap(
        values={
            "list": pb.TemplateValue(list=pb.TemplateList(values=[text_value("a"), pb.TemplateValue(integer=-1)])),
            "deep": pb.TemplateValue(entries=pb.TemplateMap(values={"flag": pb.TemplateValue(flag=True)})),
        }
    )
    chat = pb.ChatPrompt(
        messages=CHAT.messages,
        documents=[pb.Document(title="Rome", text="Sunny.")],
        chat_template=DOCUMENTED,
        template_variables={"facts": pb.TemplateValue(entries=facts)},
    )
    bare = pb.ChatPrompt(omit_generation_prompt=True, add_special_tokens=True)
    bare.MergeFrom(chat)
    settings = {"served_model_name": ("storyteller-7m",), "trust_request_chat_template": True}
    gateway_running = running(lambda submit: [5], model=folder, **settings)
    async with gateway_running as gateway, grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel:
        service = gateway, InferenceServiceStub(channel)
        opened, _ = await generate(service, chat=chat)
        closed, _ = await generate(service, chat=bare)
        assert prompt_of(gateway, opened) == "[Rome: Sunny.]a,-1True answer:"
        assert prompt_of(gateway, closed) == "<|bos|>[Rome: Sunny.]a,-1True"


async def test_a_clients_template_is_refused_where_it_is_not_trusted(service):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(service, chat=pb.ChatPrompt(messages=CHAT.messages, chat_template="{{ 1 }}"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "chat.chat_template" in str(rpc_status.from_call(caught.value))


async def test_prompts_are_cut_at_either_end_and_go_bare(service):
    submit, _ = await generate(service, text="Once upon a time")
    whole = list(submit.prompt_token_ids)
    bare, _ = await generate(service, text="Once upon a time", omit_special_tokens=True)
    assert list(bare.prompt_token_ids) == whole[1:]
    end, _ = await generate(service, text="Once upon a time", max_prompt_tokens=2)
    start, _ = await generate(service, text="Once upon a time", max_prompt_tokens=2, keep_prompt_start=True)
    assert (list(end.prompt_token_ids), list(start.prompt_token_ids)) == (whole[-2:], whole[:2])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": sampling(bad_words=["a", ""])}, "sampling.bad_words.1"),
        ({"sampling": sampling(logprob_token_ids=[5])}, "sampling.logprob_token_ids"),
        ({"sampling": sampling(logprobs=0, logprob_token_ids=[99999])}, "sampling.logprob_token_ids"),
        (
            {"stop": types_pb2.StopConditions(repetition_detection={"max_pattern_size": 3, "min_count": 1})},
            "stop.repetition_detection.min_count",
        ),
        ({"beam_search": pb.BeamSearch(), "sampling": sampling(logprobs=1)}, "sampling.logprobs"),
        ({"beam_search": pb.BeamSearch(), "constraint": types_pb2.Constraint(regex="a")}, "constraint"),
        ({"beam_search": pb.BeamSearch(), "stop": types_pb2.StopConditions(min_tokens=1)}, "stop.min_tokens"),
        ({"beam_search": pb.BeamSearch(length_penalty=11)}, "beam_search.length_penalty"),
        ({"beam_search": pb.BeamSearch(), "n": 11}, "n is 11"),
    ],
)
async def test_invalid_values_are_refused_by_name(service, fields, field):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(service, text="Hi", **fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)
    assert field in str(status)


def test_beams_are_the_same_over_both_apis(tandem_stack):
    prompt = "Once upon a time there was a"
    status, answer = tandem_stack.post(
        "/v1/completions", {"prompt": prompt, "n": 3, "max_tokens": 5, "use_beam_search": True, "length_penalty": 0.5}
    )
    assert status == 200, answer
    with grpc.insecure_channel(tandem_stack["gateway"].plan.address) as channel:
        request = pb.GenerateRequest(
            text=prompt,
            n=3,
            stop=types_pb2.StopConditions(max_tokens=5),
            beam_search=pb.BeamSearch(length_penalty=0.5),
        )
        texts = [""] * 3
        for response in InferenceServiceStub(channel).Generate(request, timeout=60):
            texts[response.index] += response.text
    assert texts == [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 3


def test_the_prompts_log_probabilities_come_first(tandem_stack):
    status, answer = tandem_stack.post(
        "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 3, "prompt_logprobs": 2, "temperature": 0}
    )
    assert status == 200, answer
    expected = answer["choices"][0]["prompt_logprobs"]
    with grpc.insecure_channel(tandem_stack["gateway"].plan.address) as channel:
        request = pb.GenerateRequest(
            text="Once upon a time",
            n=2,
            sampling=sampling(prompt_logprobs=2, temperature=0),
            stop=types_pb2.StopConditions(max_tokens=3),
            return_prompt=True,
        )
        responses = list(InferenceServiceStub(channel).Generate(request, timeout=60))
    (told,) = (response for response in responses if response.prompt_logprobs)
    assert told.index == 0
    assert len(told.prompt_logprobs) == len(told.prompt_token_ids) - 1 == len(expected) - 1
    for token_id, entry, one in zip(told.prompt_token_ids[1:], told.prompt_logprobs, expected[1:], strict=True):
        assert entry.logprob == pytest.approx(one[str(token_id)]["logprob"], abs=1e-4)
        assert len(entry.top_token_ids) == 2
