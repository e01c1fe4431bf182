"""The errors that cross a service's border, and the one table that maps them to gRPC and HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NoReturn, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from baton.v1 import types_pb2

# https://cloud.google.com/apis/design/errors, with 499 for a caller that went away.
HTTP_STATUS: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNKNOWN: 500,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DATA_LOSS: 500,
    grpc.StatusCode.UNAUTHENTICATED: 401,
}

# Codes of errors whose messages may hold what a client sent.
_QUOTING = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)

# Errors travel in headers, of which gRPC's clients take 8 KiB, and repeat a message up to three times.
_MAX_MESSAGE_BYTES = 1024
_MAX_FIELD_BYTES = 256

_CODE_BY_NUMBER: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class ServiceError(Exception):
    """An error that is reported to a caller. Subclasses set the code; instances carry the numbers."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        phase: types_pb2.Phase.ValueType = types_pb2.PHASE_UNSPECIFIED,
        worker_id: str = "",
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.phase = phase
        self.worker_id = worker_id
        self.retry_after_ms = retry_after_ms

    @property
    def log_text(self) -> str:
        """Returns the text for logs: only the field for errors that quote a client's input, otherwise the message."""
        if self.code in _QUOTING:
            return f"{self.code.name} in {self.field or 'the request'}"
        return self.message

    @property
    def http_status(self) -> int:
        """The equivalent HTTP status."""
        return HTTP_STATUS[self.code]

    @property
    def detail(self) -> types_pb2.ErrorDetail:
        """The machine-readable details."""
        return types_pb2.ErrorDetail(
            phase=self.phase,
            worker_id=self.worker_id,
            retryable=self.retryable,
            retry_after_ms=self.retry_after_ms,
            field=shortened(self.field, _MAX_FIELD_BYTES),
        )


class InvalidRequest(ServiceError):
    """A field is missing, malformed or out of range."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(ServiceError):
    """No such model, worker or placement."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(ServiceError):
    """The name is in use."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Mismatch(ServiceError):
    """Two services do not fit together: other model, other layout, other version."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class NoCapacity(ServiceError):
    """Everything that could do it is full. Retry later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True


class Unavailable(ServiceError):
    """A service that is needed cannot be reached, drains or died. Retry."""

    code = grpc.StatusCode.UNAVAILABLE
    retryable = True


class DeadlineExceeded(ServiceError):
    """The caller's time limit passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(ServiceError):
    """The caller went away."""

    code = grpc.StatusCode.CANCELLED


class Unsupported(ServiceError):
    """A known feature that this deployment does not have."""

    code = grpc.StatusCode.UNIMPLEMENTED


class DataLoss(ServiceError):
    """The state is inconsistent."""

    code = grpc.StatusCode.DATA_LOSS


class PermissionDenied(ServiceError):
    """The caller is known, and lacks the permission."""

    code = grpc.StatusCode.PERMISSION_DENIED


class InternalError(ServiceError):
    """A defect of ours. The message never has a stack trace."""


_BY_CODE: Mapping[grpc.StatusCode, type[ServiceError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        NotFound,
        Mismatch,
        NoCapacity,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        Unsupported,
        DataLoss,
        PermissionDenied,
        AlreadyExists,
        InternalError,
    )
}


# How gRPC's details begin where no connection came about, and what they mean where TLS is the reason.
_NOT_CONNECTED = "failed to connect to all addresses"
_CLOSED = (
    "it closed the connection at the first bytes: it wants TLS and got plain text, or does not accept the certificate "
    "shown; its log says which"
)
_HANDSHAKE_PROBLEMS: Mapping[str, str] = {
    "Hostname Verification Check failed": "its certificate is of another service or another fleet than expected",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not accepted here, for that reason",
    "WRONG_VERSION_NUMBER": "it serves plain text, but TLS is required here",
    "Socket closed": _CLOSED,
    "Connection reset": _CLOSED,
}


def error_from_detail(code: int, message: str, detail: types_pb2.ErrorDetail) -> ServiceError:
    """Returns the error of an in-stream failure record. `code` is a google.rpc.Code number."""
    status = _CODE_BY_NUMBER.get(code, grpc.StatusCode.INTERNAL)
    return _BY_CODE.get(status, InternalError)(
        message,
        field=detail.field,
        phase=detail.phase,
        worker_id=detail.worker_id,
        retry_after_ms=detail.retry_after_ms if detail.HasField("retry_after_ms") else None,
    )


def error_from_rpc(rpc_error: grpc.aio.AioRpcError, what: str) -> ServiceError:
    """Translates a failed call. `what` names the peer and its address in the message."""
    code = rpc_error.code()
    detail = types_pb2.ErrorDetail()
    status = rpc_status.from_call(cast(grpc.Call, rpc_error))
    for packed in status.details if status is not None else ():
        packed.Unpack(detail)
    if status is not None and status.message:
        return error_from_detail(code.value[0], status.message, detail)
    return error_from_detail(code.value[0], f"{what}: {problem_of(rpc_error)}", detail)


def problem_of(rpc_error: grpc.aio.AioRpcError) -> str:
    """Describes why a call failed: the code, gRPC's own details, and the cause of a failed TLS handshake."""
    details = rpc_error.details() or ""
    if details.startswith(_NOT_CONNECTED):
        details += next((f" ({meaning})" for sign, meaning in _HANDSHAKE_PROBLEMS.items() if sign in details), "")
    return f"{rpc_error.code().name} {details}".rstrip()


def shortened(text: str, most: int = _MAX_MESSAGE_BYTES) -> str:
    """Returns a text of at most so many bytes: messages and fields quote what clients sent, whatever its size."""
    if len(text) <= most // 4 or len(text.encode(errors="replace")) <= most:
        return text
    return text[:most].encode(errors="replace")[: most - 4].decode(errors="ignore") + " ..."


def status_of(error: ServiceError) -> status_pb2.Status:
    """Returns the google.rpc.Status of an error, with details. Long messages are cut."""
    detail, message = error.detail, shortened(error.message)
    details: list[any_pb2.Any] = [_packed(detail)]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=detail.field, description=message)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    code = code_pb2.Code.ValueType(error.code.value[0])
    return status_pb2.Status(code=code, message=message, details=details)


async def abort_with(context: grpc.aio.ServicerContext, error: ServiceError) -> NoReturn:  # type: ignore[type-arg]
    """Ends a call with the error's status and details."""
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("context.abort always raises")


def _packed(
    message: types_pb2.ErrorDetail | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
