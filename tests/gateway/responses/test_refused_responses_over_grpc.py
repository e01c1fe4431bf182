"""What CreateResponse and its neighbours refuse, and by which name."""

import grpc
import pytest
from support.gateway.responses_rig import HI, both_sides, create, item, refused
from support.gateway.rest_harness import say

from baton.v1 import inference_pb2 as pb
from baton.v1 import response_pb2, types_pb2

TOOL = pb.Tool(name="f")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": []}, "input"),
        ({"input": [item()]}, "input.0"),
        ({"input": [HI, item(message=response_pb2.ItemMessage(role="robot"))]}, "input.1.message.role"),
        ({"sampling": types_pb2.SamplingParams(temperature=3)}, "sampling.temperature"),
        ({"sampling": types_pb2.SamplingParams(logprobs=21)}, "sampling.logprobs"),
        ({"sampling": types_pb2.SamplingParams(prompt_logprobs=1)}, "sampling.prompt_logprobs"),
        ({"sampling": types_pb2.SamplingParams(logit_bias_token_ids=[1])}, "sampling.logit_bias_values"),
        ({"stop": types_pb2.StopConditions(max_tokens=0)}, "stop.max_tokens"),
        ({"stop": types_pb2.StopConditions(stop=[""])}, "stop.stop.0"),
        ({"background": True, "do_not_store": True}, "background"),
        ({"metadata": {str(index): "x" for index in range(17)}}, "metadata"),
        ({"tool_choice": pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": pb.ToolChoice(function_name="g")}, "tool_choice.function_name"),
        ({"tools": [TOOL], "tool_choice": pb.ToolChoice(mode=9)}, "tool_choice.mode"),
        ({"tools": [pb.Tool()]}, "tools.0.name"),
        ({"tools": [pb.Tool(name="f", parameters_schema="[]")]}, "tools.0.parameters_schema"),
        ({"reasoning_effort": 99}, "reasoning_effort"),
        ({"template_variables": {str(index): pb.TemplateValue() for index in range(257)}}, "template_variables"),
        ({"constraint": types_pb2.Constraint()}, "constraint"),
        ({"request_id": "x y"}, "request_id"),
        ({"model": "none"}, "model"),
        ({"input": [item(message=response_pb2.ItemMessage(role="user", text="x " * 3000))]}, "input"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(fields, field):
    async with both_sides(say("x")) as (rest, stub):
        code = grpc.StatusCode.NOT_FOUND if field == "model" else grpc.StatusCode.INVALID_ARGUMENT
        with refused(code, field):
            request = pb.CreateResponseRequest(**{"input": [HI], **fields})
            _ = [answer async for answer in stub.CreateResponse(request, timeout=20)]
        assert rest.admission.in_use == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"limit": 101}, "limit"), ({"order": 9}, "order"), ({"after": "nothing"}, "after")],
)
async def test_a_wrong_page_is_refused_by_name(fields, field):
    async with both_sides(say("x")) as (_, stub):
        made = (await create(stub))[-1].response
        with refused(grpc.StatusCode.INVALID_ARGUMENT, field):
            await stub.ListResponseInput(response_pb2.ListResponseInputRequest(response_id=made.id, **fields))
