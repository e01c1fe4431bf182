"""Errors in OpenAI's form."""

import json

import grpc
import pytest

from baton.gateway.errors.http import ContextTooLong, HttpError, http_error_of, reason_phrase
from baton.rpc import errors


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidRequest("m", field="n"), 400, "invalid_request_error", None),
        (ContextTooLong("m", field="messages"), 400, "invalid_request_error", "context_length_exceeded"),
        (errors.NotFound("m", field="model"), 404, "invalid_request_error", "model_not_found"),
        (errors.NoCapacity("m"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.Unavailable("m"), 503, "service_unavailable_error", "service_unavailable"),
        (errors.DeadlineExceeded("m"), 504, "timeout_error", "timeout"),
        (errors.Unsupported("m"), 501, "not_implemented_error", None),
        (errors.Unsupported("m", field="n"), 400, "invalid_request_error", None),
        (errors.InternalError("m"), 500, "server_error", None),
        (errors.DataLoss("m"), 500, "server_error", None),
    ],
)
def test_each_service_error_has_its_status_type_and_code(error, status, kind, code):
    answer = http_error_of(error)
    assert answer.status == status
    assert json.loads(answer.body) == {
        "error": {"message": "m", "type": kind, "param": error.field or None, "code": code}
    }


@pytest.mark.parametrize(("milliseconds", "seconds"), [(None, "1"), (0, "1"), (1, "1"), (1001, "2"), (90_000, "90")])
def test_retry_after_is_whole_seconds_rounded_up(milliseconds, seconds):
    for kind in (errors.NoCapacity, errors.Unavailable):
        assert http_error_of(kind("m", retry_after_ms=milliseconds)).headers == {"retry-after": seconds}
    assert http_error_of(errors.InvalidRequest("m", retry_after_ms=milliseconds)).headers == {}


def test_the_error_of_a_defect_has_no_details():
    answer = http_error_of(ValueError("/secret/path"))
    assert answer.status == 500
    assert b"secret" not in answer.body


def test_every_status_has_its_phrase():
    for status in {*errors.HTTP_STATUS.values(), 408, 413, 417, 431, 505}:
        assert reason_phrase(status)
    assert errors.HTTP_STATUS[grpc.StatusCode.CANCELLED] == 499


def test_an_http_error_of_our_own_stays_as_it_is():
    error = HttpError(413, "big", code="request_too_large")
    assert http_error_of(error) is error
