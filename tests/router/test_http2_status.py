"""Headers, trailers and timeouts as gRPC wants them, checked with another implementation of HPACK."""

import base64

import grpc
import hpack
import pytest
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.router.http2 import status
from baton.rpc.errors import NoCapacity


def decoded(block):
    return dict(hpack.Decoder(max_header_list_size=1 << 20).decode(block))


def test_response_headers_are_what_grpc_wants():
    assert decoded(status.RESPONSE_HEADERS) == {":status": "200", "content-type": "application/grpc"}
    assert decoded(status.OK_TRAILERS) == {"grpc-status": "0"}


@given(st.text(st.characters(min_codepoint=1, codec="utf-8"), max_size=300))
def test_any_message_can_be_told(message):
    fields = decoded(status.trailers(grpc.StatusCode.NOT_FOUND, message))
    assert fields["grpc-status"] == "5"
    if message:
        assert fields["grpc-message"].isascii()
        assert "\n" not in fields["grpc-message"]


def test_an_error_carries_its_details():
    fields = decoded(status.error_trailers(NoCapacity("full", retry_after_ms=700), alone=True))
    assert fields[":status"] == "200"
    packed = fields["grpc-status-details-bin"]
    told = status_pb2.Status.FromString(base64.b64decode(packed + "=" * (-len(packed) % 4)))
    assert (told.code, told.message) == (8, "full")


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 254, 255, 300, 16_000, 70_000])
def test_values_of_every_length_are_packed(size):
    assert decoded(status.header("x", "v" * size)) == {"x": "v" * size}


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("", None),
        ("1H", 3600),
        ("2M", 120),
        ("3S", 3),
        ("250m", 0.25),
        ("5u", 5e-6),
        ("7n", 7e-9),
        ("99999999S", 1e8 - 1),
    ],
)
def test_timeouts(value, seconds):
    assert status.timeout_seconds(value) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("value", ["1", "S", "1s", "-1S", "1.5S", "123456789S", "١S"])
def test_what_is_no_timeout_is_an_error(value):
    with pytest.raises(ValueError, match="grpc-timeout"):
        status.timeout_seconds(value)
