"""Run by a Python that has xds-protos: Envoy's own messages, for the tests of Baton's part of them.

`describe` prints every message, enum and method under the packages; `parse NAME` prints as JSON the message that
standard input holds; `build NAME` writes the bytes of the JSON that it holds.
"""

import json
import sys

from envoy.config.core.v3 import base_pb2
from envoy.service.auth.v3 import attribute_context_pb2, external_auth_pb2
from envoy.type.v3 import http_status_pb2
from google.protobuf import json_format

FILES = (base_pb2, attribute_context_pb2, external_auth_pb2, http_status_pb2)


def messages_of(messages):
    for message in messages:
        yield message
        yield from messages_of(message.nested_types)


def describe():
    found = {"fields": {}, "values": {}, "methods": {}}
    for file in (module.DESCRIPTOR for module in FILES):
        enums = list(file.enum_types_by_name.values())
        for message in messages_of(file.message_types_by_name.values()):
            enums += message.enum_types
            for field in message.fields:
                kind = field.message_type or field.enum_type
                name = kind.full_name if kind else ""
                found["fields"][field.full_name] = [field.number, field.type, field.is_repeated, name]
        for enum in enums:
            for value in enum.values:
                found["values"][f"{enum.full_name}.{value.name}"] = value.number
        for service in file.services_by_name.values():
            for method in service.methods:
                found["methods"][method.full_name] = [method.input_type.full_name, method.output_type.full_name]
    return found


def main(command, name=""):
    if command == "describe":
        print(json.dumps(describe()))
        return
    message = getattr(external_auth_pb2, name)()
    if command == "parse":
        message.ParseFromString(sys.stdin.buffer.read())
        print(json_format.MessageToJson(message, preserving_proto_field_name=True))
    else:
        json_format.Parse(sys.stdin.read(), message)
        sys.stdout.buffer.write(message.SerializeToString())


if __name__ == "__main__":
    main(*sys.argv[1:])
