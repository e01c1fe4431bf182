"""Integers over 64 bits, which a response cannot repeat, are refused by name."""

import pytest
from support.gateway.rest_harness import rest_side

LARGE = {"type": "object", "properties": {"a": {"const": 2**70}}}
FIELDS = {
    "tools": {"tools": [{"type": "function", "name": "f", "parameters": LARGE}]},
    "text": {"text": {"format": {"type": "json_schema", "name": "s", "schema": LARGE}}},
}


@pytest.mark.parametrize("name", FIELDS)
async def test_a_large_integer_in_a_repeated_field_is_refused(name):
    async with rest_side() as rest:
        answer = await rest.post("/v1/responses", {"input": "x", **FIELDS[name]})
    assert answer.status == 400
    assert answer.error["param"] == name
    assert "1180591620717411303424; integers must be from" in answer.error["message"]
