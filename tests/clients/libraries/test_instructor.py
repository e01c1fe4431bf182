"""instructor: objects of a class by tools and by schema, validated by instructor at the first try."""

import pytest
from clients.environments import PythonEnvironment

ENVIRONMENT = PythonEnvironment("instructor", ("instructor==1.17.0",))

pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def found(report):
    return report(ENVIRONMENT, "instructor_program.py")


@pytest.mark.parametrize("mode", ["tool_call", "tools_strict", "json_schema_mode"])
def test_objects_are_valid_at_the_first_try(found, mode):
    answer = found["modes"][mode]
    assert answer["hero"]["name"] in ("Tom", "Mia")
    assert 1 <= answer["hero"]["age"] <= 9
    assert answer["usage"]["completion_tokens"] < 100


def test_objects_grow_while_they_are_streamed(found):
    first, *_, last = found["partials"]
    assert len(found["partials"]) > 3
    assert first == {"name": None, "kind": None, "age": None}
    assert None not in last.values()


def test_a_wrong_model_is_reported_with_its_name(found):
    assert "The model `no-such-model` does not exist." in found["failure"]
