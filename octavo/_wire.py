"""Between the SDK's types and the wire: requests built, replies read, errors mapped.

Everything here is a function of its arguments, and both clients are thin shells over it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2

from octavo import types
from octavo._reconnect import Failure
from octavo.errors import InvalidArgumentError, OctavoError, class_of_code
from octavo.service.errors import DETAILS_KEY, REASONS, ServiceError
from octavo.v1 import inference_pb2, types_pb2

Prompt = str | Sequence[int]
Conversation = str | Sequence[types.Message]
Reply = TypeVar("Reply")

# What goes with a call, beside its message.
Metadata = tuple[tuple[str, str], ...]
AUTHORIZATION_KEY = "authorization"
SECRET_BYTES = 16
# In the metadata of NOT_LEADER: where the requests are.
HOLDER_ADDRESS_KEY = "holder_address"

# What each type of field can carry, in words. The server's ranges are narrower.
_CARRIES = {
    FieldDescriptor.TYPE_INT32: f"an integer in [{-(2**31)}, {2**31 - 1}]",
    FieldDescriptor.TYPE_UINT32: f"an integer in [0, {2**32 - 1}]",
    FieldDescriptor.TYPE_UINT64: f"an integer in [0, {2**64 - 1}]",
    FieldDescriptor.TYPE_DOUBLE: "a number",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "text that UTF-8 can encode",
}


@dataclass(frozen=True)
class UnaryCall(Generic[Reply]):
    """One unary call: `method` of the stub named `stub`, and how its reply reads."""

    stub: str
    method: str
    request: ProtoMessage
    read: Callable[[Any], Reply]
    # Whether no other server could have a better reply than this one.
    settles: Callable[[Reply], bool] = lambda _: True


# ---------------------------------------------------------------- requests


def generate_request(
    prompt: Prompt,
    params: types.SamplingParams | None,
    request_id: str,
    cache_salt: str = "",
    priority: int = 0,
) -> inference_pb2.GenerateRequest:
    """Raises InvalidArgumentError for what the wire cannot carry."""
    request = inference_pb2.GenerateRequest()
    _set(request, "request_id", request_id)
    _set(request, "cache_salt", cache_salt)
    _set(request, "priority", priority)
    if isinstance(prompt, str):
        _set(request, "prompt", prompt)
    else:
        request.prompt_token_ids.SetInParent()
        _extend(request.prompt_token_ids, "ids", prompt, "prompt token id")
    _set_params(request.params, params)
    return request


def chat_request(
    messages: Conversation,
    params: types.SamplingParams | None,
    request_id: str,
    cache_salt: str = "",
    priority: int = 0,
) -> inference_pb2.ChatRequest:
    """Raises InvalidArgumentError for what the wire cannot carry."""
    request = inference_pb2.ChatRequest()
    _set(request, "request_id", request_id)
    _set(request, "cache_salt", cache_salt)
    _set(request, "priority", priority)
    _add_messages(request.messages, messages)
    _set_params(request.params, params)
    return request


def attach(
    request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
    secret: bytes,
    detach_ttl_s: float,
) -> None:
    """Let its caller come back to `request`. Raises InvalidArgumentError for a bad TTL."""
    request.attachment.secret = secret
    if not 0 <= detach_ttl_s * 1000 < 2**32:
        raise InvalidArgumentError(
            f"detach_ttl_s is {detach_ttl_s!r}; it must be in [0, {(2**32 - 1) // 1000}]",
            reason="INVALID_PARAMETER",
        )
    request.attachment.detach_ttl_ms = round(detach_ttl_s * 1000)


def tokenize_call(text: str | Sequence[types.Message]) -> UnaryCall[tuple[int, ...]]:
    """Token ids of a text, or of a conversation put through the model's chat template."""
    request = inference_pb2.TokenizeRequest()
    if isinstance(text, str):
        _set(request, "text", text)
    else:
        request.chat.SetInParent()
        _add_messages(request.chat.messages, text)
    return UnaryCall("inference", "Tokenize", request, lambda reply: tuple(reply.token_ids))


def abort_call(request_id: str, attach_secret: bytes = b"") -> UnaryCall[bool]:
    """With a secret the call is for the one request that was made with it, and no namesake."""
    request = inference_pb2.AbortRequest(attach_secret=attach_secret)
    _set(request, "request_id", request_id)
    # A server that has it not may be one that does not own the requests.
    return UnaryCall("inference", "Abort", request, lambda reply: reply.aborted, bool)


def model_call() -> UnaryCall[types.ModelDescription]:
    return UnaryCall("inference", "GetModel", inference_pb2.GetModelRequest(), _read_model)


def list_requests_call() -> UnaryCall[tuple[types.RequestSummary, ...]]:
    request = inference_pb2.ListRequestsRequest()
    return UnaryCall("inference", "ListRequests", request, _read_requests)


def health_call() -> UnaryCall[types.Health]:
    request = health_pb2.HealthCheckRequest()
    return UnaryCall("health", "Check", request, _read_health, lambda health: health.serving)


def num_candidates(params: types.SamplingParams | None) -> int:
    """How many candidates a request with these parameters has."""
    return 1 if params is None or params.n is None else params.n


def _add_messages(target: Any, messages: Conversation) -> None:
    if isinstance(messages, str):
        messages = (types.Message("user", messages),)
    for message in messages:
        added = target.add()
        _set(added, "role", message.role)
        _set(added, "content", message.content)


def _set_params(target: types_pb2.SamplingParams, params: types.SamplingParams | None) -> None:
    if params is None:
        return
    for descriptor in types_pb2.SamplingParams.DESCRIPTOR.fields:
        value = getattr(params, descriptor.name)
        if descriptor.is_repeated:
            _extend(target, descriptor.name, value, descriptor.name)
        elif value is not None:
            _set(target, descriptor.name, value)


def _set(message: ProtoMessage, name: str, value: object) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _uncarriable(message, name, name, value) from error


def _extend(message: ProtoMessage, name: str, values: Iterable[object], called: str) -> None:
    items = list(values)
    column = getattr(message, name)
    try:
        column.extend(items)
    except (TypeError, ValueError, OverflowError):
        del column[:]
        for position, item in enumerate(items):
            try:
                column.append(item)
            except (TypeError, ValueError, OverflowError) as error:
                place = f"{called} at position {position}"
                raise _uncarriable(message, name, place, item) from error


def _uncarriable(
    message: ProtoMessage, name: str, called: str, value: object
) -> InvalidArgumentError:
    carries = _CARRIES[message.DESCRIPTOR.fields_by_name[name].type]
    return InvalidArgumentError(
        f"{called} is {reprlib.repr(value)}; it must be {carries}", reason="INVALID_PARAMETER"
    )


def authorization(api_key: str | None) -> Metadata:
    """The metadata that says who calls. Raises InvalidArgumentError, without the key, for one
    that metadata cannot carry."""
    if api_key is None:
        return ()
    if not (api_key and api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise InvalidArgumentError(
            f"api_key has {len(api_key)} characters; it must be printable ASCII without a space,"
            " and at least one",
            reason="INVALID_PARAMETER",
        )
    return ((AUTHORIZATION_KEY, f"Bearer {api_key}"),)


# ---------------------------------------------------------------- replies


def _read_health(reply: health_pb2.HealthCheckResponse) -> types.Health:
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return types.Health(reply.status == health_pb2.HealthCheckResponse.SERVING, name)


def _read_model(reply: inference_pb2.ModelDescription) -> types.ModelDescription:
    return types.ModelDescription(
        reply.name,
        reply.max_model_len,
        reply.vocab_size,
        tuple(reply.eos_token_ids),
        reply.has_chat_template,
        read_geometry(reply.geometry) if reply.HasField("geometry") else None,
        reply.attention_backend,
    )


def read_geometry(reply: types_pb2.PoolGeometry) -> types.PoolGeometry:
    return types.PoolGeometry(
        reply.num_blocks,
        reply.block_size,
        reply.max_model_len,
        reply.kv_bytes_per_block,
        reply.kv_dtype,
        reply.num_host_blocks,
    )


def _read_requests(reply: inference_pb2.ListRequestsReply) -> tuple[types.RequestSummary, ...]:
    return tuple(
        types.RequestSummary(
            request.request_id,
            request.status,
            request.num_prompt_tokens,
            request.num_candidates,
            request.num_output_tokens,
        )
        for request in reply.requests
    )


# ---------------------------------------------------------------- errors


_CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class CallFailed(grpc.RpcError):
    """A call of a Multiplex stream that did not end well; it reads as a failed RPC does."""

    def __init__(self, code: grpc.StatusCode, message: str, details: bytes = b"") -> None:
        """details: a google.rpc.Status, where the server told one."""
        super().__init__(f"{code.name}: {message}")
        self._code = code
        self._message = message
        self._trailing_metadata: Any = ((DETAILS_KEY, details),) if details else ()

    @classmethod
    def of(cls, error: inference_pb2.CallError) -> Self:
        """What the server told."""
        code = _CODES.get(error.code, grpc.StatusCode.UNKNOWN)
        return cls(code, error.message, error.details)

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._message

    def trailing_metadata(self) -> Any:
        return self._trailing_metadata


def error_of(failure: grpc.RpcError) -> OctavoError:
    """The SDK's error for a failed call: by the server's ErrorInfo, else by the status code."""
    return failure_of(failure).error


def failure_of(failure: grpc.RpcError) -> Failure:
    """`error_of`, with what the server tells about where else to go."""
    try:
        told = ServiceError.from_rpc_error(failure)
    except DecodeError:
        told = None  # another kind of server's details
    if told is not None:
        cls = class_of_code(REASONS[told.reason].code)
        error = cls(told.message, reason=told.reason, retry_after_ms=told.retry_after_ms)
        holder_address = told.metadata.get(HOLDER_ADDRESS_KEY, "")
        return Failure(error, told=True, holder_address=holder_address, cause=failure)
    code = code_of(failure)
    call: Any = failure
    error = class_of_code(code)(call.details() or code.value[1], reason=code.name)
    return Failure(error, cause=failure)


def code_of(failure: grpc.RpcError) -> grpc.StatusCode:
    """The status code of a failed call."""
    # All kinds of failed call have one; their common base class does not say so.
    call: Any = failure
    return call.code() or grpc.StatusCode.UNKNOWN
