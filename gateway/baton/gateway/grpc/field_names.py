"""Names fields and methods in errors as the public messages do."""

from __future__ import annotations

from collections.abc import Mapping

from baton.gateway.models.tasks import WrongTask
from baton.rpc.errors import ServiceError
from baton.v1 import types_pb2

# Maps the generator's field names to those of GenerateRequest.
_FIELDS: Mapping[str, str] = {
    **{
        name: f"sampling.{name}"
        for name in types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
        if not name.startswith("logit_bias")
    },
    "chat_template_kwargs": "chat.template_variables",
    "chat_template": "chat.chat_template",
    "documents": "chat.documents",
    "logit_bias": "sampling.logit_bias_token_ids",
    "vllm_xargs": "sampling.extra_args",
    **{name: f"stop.{name}" for name in types_pb2.StopConditions.DESCRIPTOR.fields_by_name},
}


def public_field(field: str) -> str:
    """Returns the name in the public messages of the generator's field."""
    if field.startswith(("messages", "continue_final_message", "tools", "tool_choice")):
        return f"chat.{field.replace('.function.', '.')}"
    name, dot, rest = field.partition(".")
    return _FIELDS.get(name, name) + dot + rest


def name_fields(error: ServiceError) -> None:
    """Names the field of a generator's error, and methods in place of REST's routes."""
    error.field = public_field(error.field)
    name_methods(error)


def name_methods(error: ServiceError) -> None:
    """Names methods in place of REST's routes."""
    if isinstance(error, WrongTask):
        error.name_methods()
