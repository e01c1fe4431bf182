"""Asks for an answer that a JSON schema describes; every answer that ends is such a document.

python grpc_structured_output.py 127.0.0.1:8001
"""

import json
import sys

import grpc

from baton.v1 import inference_pb2 as pb
from baton.v1 import types_pb2
from baton.v1.inference_pb2_grpc import InferenceServiceStub

SCHEMA = {
    "type": "object",
    "properties": {
        "hero": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "friend": {"enum": ["cat", "dog", "bird"]},
    },
    "required": ["hero", "age", "friend"],
    "additionalProperties": False,
}


def main(address: str = "127.0.0.1:8001") -> None:
    request = pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Who is in the story?")]),
        constraint=types_pb2.Constraint(json_schema=json.dumps(SCHEMA), no_whitespace=True),
    )
    request.sampling.temperature = 0
    request.stop.max_tokens = 200
    with grpc.insecure_channel(address) as channel:
        responses = InferenceServiceStub(channel).Generate(request, timeout=60)
        print("".join(response.text for response in responses))


if __name__ == "__main__":
    main(*sys.argv[1:])
