import grpc
import pytest
from grpc_status import rpc_status
from support.processes.stack import MODEL_NAME

from baton.v1 import inference_pb2 as pb
from baton.v1 import types_pb2
from baton.v1.inference_pb2_grpc import InferenceServiceStub

CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
COMPLETION = {"model": MODEL_NAME, "prompt": "Hi", "max_tokens": 2}

CHATS = {
    "unknown model": ({**CHAT, "model": "gpt-17"}, 404, "model"),
    "no messages": ({"model": MODEL_NAME}, 400, "messages"),
    "empty messages": ({**CHAT, "messages": []}, 400, "messages"),
    "messages of a wrong type": ({**CHAT, "messages": "Hi"}, 400, "messages"),
    "message without a role": ({**CHAT, "messages": [{"content": "Hi"}]}, 400, "role"),
    "content of a wrong type": ({**CHAT, "messages": [{"role": "user", "content": 7}]}, 400, "content"),
    "temperature of a wrong type": ({**CHAT, "temperature": "hot"}, 400, "temperature"),
    "temperature too high": ({**CHAT, "temperature": 2.5}, 400, "temperature"),
    "temperature below zero": ({**CHAT, "temperature": -1}, 400, "temperature"),
    "top_p zero": ({**CHAT, "top_p": 0}, 400, "top_p"),
    "top_p above one": ({**CHAT, "top_p": 1.5}, 400, "top_p"),
    "min_p above one": ({**CHAT, "min_p": 1.5}, 400, "min_p"),
    "n zero": ({**CHAT, "n": 0}, 400, "n"),
    "max_tokens zero": ({**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    "max_tokens below zero": ({**CHAT, "max_tokens": -5}, 400, "max_tokens"),
    "max_tokens a fraction": ({**CHAT, "max_tokens": 1.5}, 400, "max_tokens"),
    "presence_penalty out of range": ({**CHAT, "presence_penalty": 3}, 400, "presence_penalty"),
    "repetition_penalty zero": ({**CHAT, "repetition_penalty": 0}, 400, "repetition_penalty"),
    "logit_bias out of range": ({**CHAT, "logit_bias": {"5": 101}}, 400, "logit_bias"),
    "logit_bias of no token": ({**CHAT, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    "top_logprobs without logprobs": ({**CHAT, "top_logprobs": 2}, 400, "logprobs"),
    "stream_options without stream": ({**CHAT, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    "prompt beyond the context": ({**CHAT, "messages": [{"role": "user", "content": "dog " * 70_000}]}, 400, "context"),
    "a tool without a name": ({**CHAT, "tools": [{"type": "function", "function": {}}]}, 400, "tools.0.function"),
}


@pytest.fixture(scope="module", autouse=True)
def undisturbed(tandem_stack):
    """Whatever is asked, nothing is lost for others."""
    yield
    assert tandem_stack.chat("Hi", max_tokens=2)["choices"]
    tandem_stack.wait_all_blocks_back()
    for name, service in tandem_stack.services.items():
        assert "Traceback" not in service.log(), f"{name}:\n{service.log_tail(60)}"


def check_error(answer, expected_status, word):
    status, body = answer
    assert status == expected_status, body
    assert set(body["error"]) >= {"message", "type", "param", "code"}
    assert word in f"{body['error']['message']} {body['error']['param']}", body
    assert "Traceback" not in body["error"]["message"]


@pytest.mark.parametrize("case", CHATS)
def test_a_wrong_chat_is_an_openai_error_that_names_the_field(tandem_stack, case):
    body, status, word = CHATS[case]
    check_error(tandem_stack.post("/v1/chat/completions", body, timeout=10), status, word)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"logprobs": -1}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
    ],
)
def test_a_wrong_completion_names_the_field(tandem_stack, fields, word):
    check_error(tandem_stack.post("/v1/completions", {**COMPLETION, **fields}, timeout=10), 400, word)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"hi"', b"\xff\xfe", b'{"model": "storyteller-7m",}', b"null"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object_is_a_400(tandem_stack, path, data):
    status, body = tandem_stack.post(path, data, timeout=10)
    assert status == 400
    assert body["error"]["message"]


def test_a_body_over_the_limit_is_a_413(tandem_stack):
    status, body = tandem_stack.post("/v1/chat/completions", b" " * (17 << 20))
    assert status == 413
    assert body["error"]["message"]


def test_an_unknown_path_is_a_404_and_a_wrong_method_a_405(tandem_stack):
    status, body = tandem_stack.get("/v1/nothing")
    assert status == 404
    assert body["error"]["message"]
    status, body = tandem_stack.get("/v1/completions")
    assert status == 405
    assert body["error"]["message"]


TEXT = {"model": MODEL_NAME, "text": "Hi"}
GRPC = {
    "unknown model": (pb.GenerateRequest(model="gpt-17", text="Hi"), grpc.StatusCode.NOT_FOUND, "model"),
    "no prompt": (pb.GenerateRequest(model=MODEL_NAME), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    "empty chat": (
        pb.GenerateRequest(model=MODEL_NAME, chat=pb.ChatPrompt()),
        grpc.StatusCode.INVALID_ARGUMENT,
        "messages",
    ),
    "no such token": (
        pb.GenerateRequest(token_ids=pb.TokenIds(token_ids=[4096])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt",
    ),
    "too hot": (
        pb.GenerateRequest(**TEXT, sampling=types_pb2.SamplingParams(temperature=3)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "temperature",
    ),
    "top_p zero": (
        pb.GenerateRequest(**TEXT, sampling=types_pb2.SamplingParams(top_p=0)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "top_p",
    ),
    "max_tokens zero": (
        pb.GenerateRequest(**TEXT, stop=types_pb2.StopConditions(max_tokens=0)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "max_tokens",
    ),
    "bias columns of different length": (
        pb.GenerateRequest(**TEXT, sampling=types_pb2.SamplingParams(logit_bias_token_ids=[1])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "logit_bias",
    ),
    "prompt beyond the context": (
        pb.GenerateRequest(token_ids=pb.TokenIds(token_ids=[5] * 65_537)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt",
    ),
}


@pytest.mark.parametrize("case", GRPC)
def test_a_wrong_grpc_request_is_a_status_with_the_field_in_its_details(tandem_stack, case):
    request, code, word = GRPC[case]
    with grpc.insecure_channel(tandem_stack.config.grpc_listen) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            list(InferenceServiceStub(channel).Generate(request, timeout=10))
        error = raised.value
        assert error.code() == code, error.details()
        detail = types_pb2.ErrorDetail()
        packed = [one for one in rpc_status.from_call(error).details if one.Is(detail.DESCRIPTOR)]
        assert packed[0].Unpack(detail)
        assert word in f"{error.details()} {detail.field}"
        assert word in detail.field or code == grpc.StatusCode.NOT_FOUND
