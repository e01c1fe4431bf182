"""Has the model call a function, calls it, and prints what the model says to the result.

python grpc_tools.py 127.0.0.1:8001
"""

import json
import sys

import grpc

from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = pb.Tool(
    name="get_weather", description="The weather of the next days.", parameters_schema=json.dumps(PARAMETERS)
)


def get_weather(city: str, days: int) -> str:
    return f"{days} sunny days in {city}"


def ask(stub: InferenceServiceStub, messages: list[pb.ChatMessage], choice: pb.ToolChoice) -> pb.ChatMessage:
    """The assistant's message, put together from its pieces."""
    request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages, tools=[TOOL], tool_choice=choice))
    request.sampling.temperature = 0
    request.stop.max_tokens = 100
    answer = pb.ChatMessage(role="assistant")
    for response in stub.Generate(request, timeout=60):
        answer.content += response.text
        for piece in response.tool_calls:
            if piece.id:
                answer.tool_calls.add(id=piece.id, name=piece.name)
            answer.tool_calls[piece.index].arguments += piece.arguments
    return answer


def main(address: str = "127.0.0.1:8001") -> None:
    messages = [pb.ChatMessage(role="user", content="What is the weather in Paris?")]
    with grpc.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        messages.append(ask(stub, messages, pb.ToolChoice(function_name="get_weather")))
        for call in messages[-1].tool_calls:
            result = get_weather(**json.loads(call.arguments))
            print(f"{call.name}{call.arguments} = {result}")
            messages.append(pb.ChatMessage(role="tool", tool_call_id=call.id, content=result))
        print(ask(stub, messages, pb.ToolChoice(mode=pb.TOOL_MODE_NONE)).content)


if __name__ == "__main__":
    main(*sys.argv[1:])
