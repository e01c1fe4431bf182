"""The rules of proto/README.md, checked on the descriptors and the sources."""

import importlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

FOLDER = Path(__file__).parents[2] / "proto"
SOURCES = sorted(path.relative_to(FOLDER) for path in FOLDER.glob("baton/v1/*.proto"))


def load(source: Path) -> FileDescriptor:
    module = importlib.import_module(f"baton.v1.{source.stem}_pb2")
    descriptor: FileDescriptor = module.DESCRIPTOR
    return descriptor


FILES = [load(source) for source in SOURCES]
SERVICES = [service for file in FILES for service in file.services_by_name.values()]
METHODS = [method for service in SERVICES for method in service.methods]


def nested(message: Descriptor) -> list[Descriptor]:
    return [message, *(inner for child in message.nested_types for inner in nested(child))]


MESSAGES = [one for file in FILES for message in file.message_types_by_name.values() for one in nested(message)]
ENUMS = [enum for file in FILES for enum in file.enum_types_by_name.values()]
ENUMS += [enum for message in MESSAGES for enum in message.enum_types]
FIELDS = [field for message in MESSAGES for field in message.fields]


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def full_name(descriptor) -> str:
    return descriptor.full_name


def test_there_are_contracts():
    names = {service.name for service in SERVICES}
    routers = {"RouterService", "RouterPeerService"}
    assert names == routers | {"InferenceService", "WorkerService", "ControlService", "IndexService"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_files_folder_matches_its_package(file):
    assert file.package == "baton.v1"
    assert file.name == f"baton/v1/{Path(file.name).name}"
    assert re.fullmatch(r"[a-z][a-z0-9_]*\.proto", Path(file.name).name)


@pytest.mark.parametrize("enum", ENUMS, ids=full_name)
def test_an_enum_starts_unspecified_and_prefixes_its_values(enum):
    prefix = snake(enum.name).upper()
    assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"
    assert all(re.fullmatch(rf"{prefix}_[A-Z0-9_]+", value.name) for value in enum.values)
    assert len(enum.values_by_number) == len(enum.values), "aliases"


@pytest.mark.parametrize("service", SERVICES, ids=full_name)
def test_a_service_is_named_as_one_and_its_methods_have_messages_of_their_own(service):
    assert service.name.endswith("Service")
    for method in service.methods:
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]+", method.name)
        assert method.input_type.name == f"{method.name}Request"
        assert method.output_type.name == f"{method.name}Response"


def test_no_two_methods_share_a_message():
    used = [message.full_name for method in METHODS for message in (method.input_type, method.output_type)]
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("message", MESSAGES, ids=full_name)
def test_names_have_the_usual_case(message):
    assert re.fullmatch(r"[A-Z][A-Za-z0-9]+", message.name)
    for field in message.fields:
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name), field.full_name
    for oneof in message.oneofs:
        assert re.fullmatch(r"_?[a-z][a-z0-9]*(_[a-z0-9]+)*", oneof.name), oneof.full_name


# JSON Schema is a language of its own, whose text clients send; the other says only that JSON is wanted.
JSON_BY_NATURE = {
    "baton.v1.Constraint.json_object",
    "baton.v1.Constraint.json_schema",
}


def test_every_value_has_a_type_of_its_own():
    untyped = {"google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.Any", "google.protobuf.ListValue"}
    for field in FIELDS:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            assert field.message_type.full_name not in untyped, field.full_name
        assert "json" not in field.name or field.full_name in JSON_BY_NATURE, f"{field.full_name} holds structured text"


def test_success_is_a_status_code_and_no_field():
    for field in FIELDS:
        assert field.name not in ("success", "ok", "is_error", "error_message"), field.full_name


def test_ids_of_tokens_are_packed_uint32_and_hashes_are_bytes():
    for field in FIELDS:
        if field.name.endswith("token_ids") and field.message_type is None:
            assert field.type == FieldDescriptor.TYPE_UINT32, field.full_name
            assert field.is_repeated, field.full_name
        if field.name == "block_hashes":
            assert (field.type, field.is_repeated) == (FieldDescriptor.TYPE_BYTES, False), field.full_name


def test_durations_name_their_unit():
    for field in FIELDS:
        if re.search(r"timeout|deadline|interval|delay|retry_after|lease_", field.name):
            assert re.search(r"_(ms|us|seconds|steps)$", field.name), field.full_name


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_service_and_method_has_a_comment(source):
    lines = (FOLDER / source).read_text(encoding="utf-8").splitlines()
    for above, line in itertools.pairwise(lines):
        if re.match(r"\s*(service|rpc) ", line):
            assert above.strip().startswith("//"), f"{source}: {line.strip()} has no comment"


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_contracts_are_proto3(source):
    text = (FOLDER / source).read_text(encoding="utf-8")
    assert text.lstrip().startswith('syntax = "proto3";')


def test_messages_that_a_restart_could_confuse_have_an_epoch():
    by_name = {message.name: message for message in MESSAGES}
    for name in ("Endpoint", "PeerHello", "KvEventBatch", "KvSnapshot", "PublishHello", "WorkerState"):
        assert "epoch" in by_name[name].fields_by_name, name
    assert {"sender_epoch", "receiver_epoch", "generation", "lease_ms"} <= set(
        by_name["TransferDescriptor"].fields_by_name
    )


def test_resume_state_is_part_of_a_submit():
    by_name = {message.name: message for message in MESSAGES}
    assert by_name["SubmitRequest"].fields_by_name["resume"].message_type is by_name["ResumeState"]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_generated_code_loads_alone(source):
    program = f"import baton.v1.{source.stem}_pb2_grpc"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True)
