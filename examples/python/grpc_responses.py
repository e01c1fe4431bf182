"""Has a response made in the background, watches it, and goes on with its conversation. Both are kept.

python grpc_responses.py 127.0.0.1:8001
"""

import sys

import grpc

from baton.v1 import inference_pb2 as pb
from baton.v1 import response_pb2
from baton.v1.inference_pb2_grpc import InferenceServiceStub


def request_for(question: str) -> pb.CreateResponseRequest:
    request = pb.CreateResponseRequest()
    request.input.add().message.CopyFrom(response_pb2.ItemMessage(role="user", text=question))
    request.sampling.temperature = 0
    request.stop.max_tokens = 32
    return request


def main(address: str = "127.0.0.1:8001") -> None:
    with grpc.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)

        request = request_for("Tell me a story about a dog and a river.")
        request.background = True
        call = stub.CreateResponse(request, timeout=60)
        response_id = next(call).event.response.id
        call.cancel()  # the response goes on

        for answer in stub.WatchResponse(response_pb2.WatchResponseRequest(response_id=response_id), timeout=60):
            print(answer.event.text.text, end="", flush=True)
        print()

        request = request_for("And then?")
        request.previous_response_id = response_id
        for answer in stub.CreateResponse(request, timeout=60):
            print(answer.event.text.text, end="", flush=True)
        print(f"\n{answer.event.response.id}")


if __name__ == "__main__":
    main(*sys.argv[1:])
