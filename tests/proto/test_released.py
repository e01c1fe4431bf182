"""Two versions side by side: the released contracts against today's, by Buf's rules and over real services."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from support.fleet.released import IMAGES, RELEASES, old, old_messages
from support.processes import stack

from baton.v1 import control_pb2, index_pb2, inference_pb2, kv_pb2, router_pb2, types_pb2, worker_pb2

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).parent / "buf"
TODAY = (control_pb2, index_pb2, inference_pb2, kv_pb2, router_pb2, types_pb2, worker_pb2)


def today(name: str) -> Any:
    return next(getattr(module, name) for module in TODAY if hasattr(module, name))


def filled(descriptor: Descriptor, depth: int = 3) -> Any:
    """A message with every field set, of a oneof the last one."""
    message = message_factory.GetMessageClass(descriptor)()
    for number, field in enumerate(descriptor.fields, 1):
        value = _value(field, number, depth)
        if value is None:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if _is_repeated(field):
            getattr(message, field.name).extend([value, value])
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(value)
        else:
            setattr(message, field.name, value)
    return message


def _is_repeated(field: FieldDescriptor) -> bool:
    known = getattr(field, "is_repeated", None)  # of newer protobuf
    return bool(field.label == FieldDescriptor.LABEL_REPEATED) if known is None else bool(known)


def _value(field: FieldDescriptor, number: int, depth: int) -> Any:
    if field.message_type is not None:
        return filled(field.message_type, depth - 1) if depth else None
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return b"bytes %d" % number if field.type == FieldDescriptor.TYPE_BYTES else f"text {number}"
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return True
    return number / 2 if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE) else number


def breaks(folder: Path, image: Path) -> str:
    """Returns Buf's breaking changes in a copy of the sources; empty without any."""
    words = [str(BUF), "breaking", "--against", str(image)]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode in (0, 100), ended.stderr
    return ended.stdout


def test_a_release_is_kept():
    assert IMAGES


@RELEASES
def test_todays_contract_breaks_no_release(image):
    assert breaks(ROOT, image) == ""


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("control", "uint32 timeout_ms = 1;", "uint32 timeout_ms = 7;", "timeout_ms"),
        ("worker", "uint64 epoch = 2;", "string epoch = 2;", "epoch"),
        ("router", "  string model = 2;\n", "", "model"),
        ("types", "FINISH_REASON_STOP = 1", "FINISH_REASON_STOP = 9", "FinishReason"),
        ("control", "  rpc Drain(DrainRequest) returns (DrainResponse);\n", "", "Drain"),
    ],
    ids=["renumbered", "retyped", "removed", "enum", "method"],
)
def test_a_breaking_change_is_refused(tmp_path, file, before, after, said):
    shutil.copytree(ROOT / "proto" / "baton", tmp_path / "proto" / "baton", ignore=shutil.ignore_patterns("*.py*"))
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    path = tmp_path / "proto" / "baton" / "v1" / f"{file}.proto"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    assert said in breaks(tmp_path, IMAGES[-1])


@RELEASES
def test_every_message_of_a_release_survives_todays_code(image):
    for descriptor in old_messages(image):
        sent = filled(descriptor)
        heard = today(descriptor.name).FromString(sent.SerializeToString())
        again = type(sent).FromString(heard.SerializeToString())
        assert again == sent, descriptor.name


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[stack.Stack]:
    with ExitStack() as cleanup:
        folder = tmp_path_factory.mktemp("released")
        yield stack.start_stack(folder, cleanup, executor="sim", prefill_workers=0)


def call(image: Path, address: str, method: str, request: Any, answer: str, *, streams: bool = False) -> list[Any]:
    """A call as a client of the release makes it: encoded and decoded by its descriptors. The first three answers."""
    with grpc.insecure_channel(address) as channel:
        codec = {
            "request_serializer": lambda message: message.SerializeToString(),
            "response_deserializer": old(image, answer).FromString,
        }
        if not streams:
            return [channel.unary_unary(f"/baton.v1.{method}", **codec)(request, timeout=20)]
        if isinstance(request, list):
            running = channel.stream_stream(f"/baton.v1.{method}", **codec)(_then_wait(request), timeout=20)
        else:
            running = channel.unary_stream(f"/baton.v1.{method}", **codec)(request, timeout=20)
        answers = []
        for one in running:
            answers.append(one)
            if len(answers) == 3:
                break
        running.cancel()
        return answers


def _then_wait(requests: list[Any]) -> Iterator[Any]:
    """A stream that stays open until its call ends."""
    yield from requests
    threading.Event().wait(20)


@RELEASES
def test_services_of_today_serve_a_client_of_the_release(fleet, image):
    worker = fleet.workers[0].plan.address
    router = fleet["router"].plan.address

    (stats,) = call(
        image, worker, "ControlService/GetStats", old(image, "GetStatsRequest")(audit=True), "GetStatsResponse"
    )
    assert stats.state.worker_id
    (state, *_) = call(
        image, worker, "WorkerService/WatchState", old(image, "WatchStateRequest")(max_interval_ms=100),
        "WatchStateResponse", streams=True,
    )  # fmt: skip
    assert state.state.model.digest == stats.state.model.digest
    (listed,) = call(
        image, router, "RouterService/ListWorkers", old(image, "ListWorkersRequest")(), "ListWorkersResponse"
    )
    assert [one.address for one in listed.workers] == [worker]
    place = old(image, "PlaceRequest")(request_id="r", model=stack.MODEL_NAME, num_prompt_tokens=20, max_tokens=4)
    (placed,) = call(image, router, "RouterService/Place", place, "PlaceResponse")
    assert placed.decode.worker_id == stats.state.worker_id


@RELEASES
def test_a_worker_of_today_generates_for_a_gateway_of_the_release(fleet, image):
    submit = old(image, "SubmitRequest")(
        slot=3, request_id="r", prompt_token_ids=range(5, 40), cache_namespace=bytes(16),
        sampling={
            "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        },
        stop={"max_tokens": 3, "ignore_eos": True},
    )  # fmt: skip
    request = old(image, "GenerateStreamRequest")(submits=[submit])
    worker = fleet.workers[0].plan.address
    frames = call(image, worker, "WorkerService/GenerateStream", [request], "GenerateStreamResponse", streams=True)
    assert sum(len(frame.token_ids) for frame in frames) == 3
    assert not any(frame.failures for frame in frames)


@RELEASES
def test_a_kvstore_of_today_takes_a_worker_of_the_release(fleet, image):
    hello = old(image, "PublishRequest")(hello={"worker_id": "old", "epoch": 7, "sequence": 0, "term": 1})
    address = fleet["kvstore"].plan.address
    with grpc.insecure_channel(address) as channel:
        running = channel.stream_stream(
            "/baton.v1.IndexService/Publish",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=old(image, "PublishResponse").FromString,
        )(_then_wait([hello]), timeout=20)
        answer = next(iter(running))
        running.cancel()
    assert answer.acknowledged_sequence == 0
