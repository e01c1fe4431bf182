"""Conversion between constraints and their messages. Knows no grammar library."""

from __future__ import annotations

from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2
from baton.worker.core import Constraint, ConstraintForm

_MAX_REASONING_END = 64


def constraint_of(message: types_pb2.Constraint) -> Constraint:
    """Returns the constraint of a message. Raises InvalidRequest if no form is set."""
    name = message.WhichOneof("form")
    if name is None:
        raise InvalidRequest("constraint has no form: set one of its fields", field="constraint")
    if len(message.reasoning_end_token_ids) > _MAX_REASONING_END:
        field = "constraint.reasoning_end_token_ids"
        count = len(message.reasoning_end_token_ids)
        raise InvalidRequest(f"{field} has {count} tokens; at most {_MAX_REASONING_END} are taken", field=field)
    value = getattr(message, name)
    return Constraint(
        form=ConstraintForm(name),
        text=value if isinstance(value, str) else "",
        choices=tuple(message.choices.texts),
        no_whitespace=message.no_whitespace,
        whitespace_pattern=message.whitespace_pattern,
        no_additional_properties=message.no_additional_properties,
        lenient=message.lenient,
        reasoning_end_token_ids=tuple(message.reasoning_end_token_ids),
        reasoning_start_token_id=message.reasoning_start_token_id
        if message.HasField("reasoning_start_token_id")
        else None,
        may_end_in_reasoning=message.may_end_in_reasoning,
    )


def constraint_message(constraint: Constraint) -> types_pb2.Constraint:
    """Returns the message of a constraint."""
    message = types_pb2.Constraint(
        no_whitespace=constraint.no_whitespace,
        whitespace_pattern=constraint.whitespace_pattern,
        no_additional_properties=constraint.no_additional_properties,
        lenient=constraint.lenient,
        reasoning_end_token_ids=constraint.reasoning_end_token_ids,
        reasoning_start_token_id=constraint.reasoning_start_token_id,
        may_end_in_reasoning=constraint.may_end_in_reasoning,
    )
    if constraint.form is ConstraintForm.CHOICES:
        message.choices.SetInParent()
        message.choices.texts.extend(constraint.choices)
    elif constraint.form is ConstraintForm.JSON_OBJECT:
        message.json_object.SetInParent()
    else:
        setattr(message, constraint.form.value, constraint.text)
    return message
