"""Streams a chat answer over Baton's gRPC API.

python grpc_chat.py 127.0.0.1:8001 "Tell me a story about a dog and a river."
"""

import sys

import grpc

from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub


def main(address: str = "127.0.0.1:8001", content: str = "Tell me a story about a dog and a river.") -> None:
    request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=content)]))
    request.sampling.temperature = 0
    request.stop.max_tokens = 64
    with grpc.insecure_channel(address) as channel:
        for response in InferenceServiceStub(channel).Generate(request, timeout=60):
            print(response.text, end="", flush=True)
            if response.HasField("usage"):
                print(f"\n{response.usage.completion_tokens} tokens", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
