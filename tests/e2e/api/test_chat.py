import itertools
from concurrent.futures import ThreadPoolExecutor

import grpc
import openai
import pytest
from support.processes.stack import MODEL_NAME, wait_until

from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub

PROMPT = "Tell me a story about a dog and a river."
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def stub(tandem_stack):
    with grpc.insecure_channel(tandem_stack.config.grpc_listen) as channel:
        yield InferenceServiceStub(channel)


@pytest.fixture(scope="module")
def client(tandem_stack):
    with openai.OpenAI(base_url=f"{tandem_stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answer(tandem_stack):
    return tandem_stack.chat(PROMPT, temperature=0, max_tokens=80)


def test_the_model_answers_in_english(answer):
    text = answer["choices"][0]["message"]["content"]
    assert len(text.split()) > 20
    assert {"the", "a"} & set(text.lower().split())
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL_NAME
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_usage_counts_prompt_and_completion(answer):
    usage = answer["usage"]
    assert 0 < usage["completion_tokens"] <= 80
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_prompt_that_was_asked_before_is_found_in_the_cache(tandem_stack):
    prompt = "Once there was a queen who had many cats. " * 8
    first = tandem_stack.chat(prompt, temperature=0, max_tokens=4)["usage"]
    again = tandem_stack.chat(prompt, temperature=0, max_tokens=4)["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < 16 * 2
    assert again["prompt_tokens_details"]["cached_tokens"] >= again["prompt_tokens"] - 17


def test_a_stream_has_the_text_of_the_whole_answer(tandem_stack, answer):
    body = {"model": MODEL_NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 80}
    chunks = list(tandem_stack.stream("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}))
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == answer["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-2]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert len(chunks) > 10


def test_the_openai_client_chats_and_streams(client, answer):
    text = answer["choices"][0]["message"]["content"]
    fields = {"model": MODEL_NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 80}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content == text
    with client.chat.completions.create(**fields, stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_the_openai_client_completes_with_logprobs_and_choices(client):
    done = client.completions.create(
        model=MODEL_NAME, prompt="Once upon a time", max_tokens=8, n=2, logprobs=2, temperature=0.9, seed=5
    )
    assert [choice.index for choice in done.choices] == [0, 1]
    assert done.choices[0].text != done.choices[1].text
    logprobs = done.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 8
    assert "".join(logprobs.tokens) == done.choices[0].text
    assert all(value <= 0 for value in logprobs.token_logprobs)


def test_the_same_seed_gives_the_same_story_and_another_seed_another(tandem_stack):
    def story(seed):
        return tandem_stack.chat(PROMPT, temperature=1.0, seed=seed, max_tokens=32)["choices"][0]["message"]["content"]

    assert story(1) == story(1)
    assert story(1) != story(2)


def test_a_stop_string_ends_the_story_and_is_left_out(tandem_stack, answer):
    text = answer["choices"][0]["message"]["content"]
    word = text.split()[6]
    stopped = tandem_stack.chat(PROMPT, temperature=0, max_tokens=80, stop=[word])["choices"][0]
    assert stopped["message"]["content"] == text[: text.index(word)]
    assert stopped["finish_reason"] == "stop"


def test_grpc_chat_text_and_token_prompts_agree(tandem_stack, stub, answer):
    def generate(**prompt):
        request = pb.GenerateRequest(model=MODEL_NAME, **prompt)
        request.sampling.temperature = 0
        request.stop.max_tokens = 80
        responses = list(stub.Generate(request, timeout=60))
        assert responses[-1].HasField("usage")
        assert responses[-1].usage.completion_tokens == sum(len(response.token_ids) for response in responses)
        return "".join(response.text for response in responses)

    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=PROMPT)])
    tokens = stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=10).token_ids
    assert len(tokens) == answer["usage"]["prompt_tokens"]
    text = answer["choices"][0]["message"]["content"]
    assert generate(chat=chat) == text
    assert generate(token_ids=pb.TokenIds(token_ids=tokens)) == text


def test_tokenize_and_detokenize_are_each_others_inverse(tandem_stack, stub):
    status, body = tandem_stack.post("/tokenize", {"model": MODEL_NAME, "prompt": "Zoë ate 3 apples. 🍎"})
    assert status == 200
    status, text = tandem_stack.post("/detokenize", {"model": MODEL_NAME, "tokens": body["tokens"]})
    assert "Zoë ate 3 apples. 🍎" in text["prompt"]
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=body["tokens"]), timeout=10).text == text["prompt"]


def test_models_are_listed_over_rest_and_grpc(tandem_stack, stub):
    status, body = tandem_stack.get("/v1/models")
    assert status == 200
    assert [model["id"] for model in body["data"]] == [MODEL_NAME]
    (model,) = stub.ListModels(pb.ListModelsRequest(), timeout=10).models
    assert (model.name, model.max_model_len, len(model.digest)) == (MODEL_NAME, 65536, 16)


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/openapi.json"])
def test_operator_routes_are_served(tandem_stack, path):
    assert tandem_stack.get(path)[0] == 200


def test_a_request_id_is_the_same_in_every_service(tandem_stack, stub):
    """Of a request whose prompt the prefill worker computes, as some of many at once are."""
    services = {name: service for name, service in tandem_stack.services.items() if name != "kvstore"}
    ids = (f"letter-{number}-to-a-friend" for number in itertools.count())

    def ask(request_id):
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=f"To {request_id}, a long letter. " * 8)])
        request = pb.GenerateRequest(chat=chat, request_id=request_id)
        request.stop.max_tokens = 2
        list(stub.Generate(request, timeout=60))
        return request_id

    def handed_over():
        with ThreadPoolExecutor(16) as pool:
            asked = list(pool.map(ask, itertools.islice(ids, 16)))
        log = services["worker-prefill-0"].log()
        return next((request_id for request_id in asked if request_id in log), None)

    request_id = wait_until(handed_over, "a prompt goes to the prefill worker", 60)
    for name, service in services.items():  # all but the kvstore, which hears of blocks, never of requests
        wait_until(lambda service=service: request_id in service.log(), f"{name} logs the request")
