"""What a call can fail with.

    Exception
    └── OctavoError
        ├── InvalidArgumentError   a value is out of its range, a prompt does not fit
        ├── NotFoundError          another model is served here, no such request is live
        ├── AlreadyExistsError     a live request has this id; that one is unaffected
        ├── UnauthenticatedError   the server asks for an API key; there was none, or another
        ├── OverloadedError        queue, pool or quota is full: retry after `retry_after_ms`
        ├── UnavailableError       nobody answers there, or a service is starting or stopping,
        │                          and that lasted longer than the call was to be tried
        ├── DeadlineExceededError  the call's timeout_s passed; the server stops computing
        └── RpcError               anything else the call ended with (INTERNAL: a bug)

`reason` is the server's word for it (the keys of `octavo.service.errors.REASONS`), or the name
of the gRPC status code where the server sent none, as when there is no server.
"""

from __future__ import annotations

from typing import Final

import grpc


class OctavoError(Exception):
    """The base of everything the SDK raises for a call.

    reason: a constant word such as QUEUE_FULL; compare with it, not with the message.
    message: one sentence for a person.
    retry_after_ms: when to try again, if the server said so.
    """

    def __init__(self, message: str, *, reason: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message: Final = message
        self.reason: Final = reason
        self.retry_after_ms: Final = retry_after_ms

    def __str__(self) -> str:
        return f"{self.message} [{self.reason}]"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.reason, self.retry_after_ms))


class InvalidArgumentError(OctavoError):
    """The request cannot be served as asked; the message names the value and what is allowed."""


class NotFoundError(OctavoError):
    """Another model is served here, or no such request is live."""


class AlreadyExistsError(OctavoError):
    """A live request has this id."""


class UnauthenticatedError(OctavoError):
    """The server serves those with one of its API keys only, and the call's is none of them."""


class OverloadedError(OctavoError):
    """A queue, the KV pool or a quota is full."""


class UnavailableError(OctavoError):
    """Nobody answers at the address, or a service behind it is starting, gone or stopping."""


class DeadlineExceededError(OctavoError):
    """The call took longer than its timeout_s."""


class RpcError(OctavoError):
    """The call ended in a way no other class describes."""


_CLASS_OF_CODE: Final[dict[grpc.StatusCode, type[OctavoError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
}


def class_of_code(code: grpc.StatusCode) -> type[OctavoError]:
    """The class a gRPC status code is raised as."""
    return _CLASS_OF_CODE.get(code, RpcError)


def _rebuild(
    cls: type[OctavoError], message: str, reason: str, retry_after_ms: int | None
) -> OctavoError:
    return cls(message, reason=reason, retry_after_ms=retry_after_ms)
