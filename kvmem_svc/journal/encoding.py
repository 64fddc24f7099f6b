"""Between the core's mutations and the payloads of records."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any, NamedTuple

import msgpack
import numpy as np

from kvmem_svc import convert
from kvmem_svc.core import mutations as m
from kvmem_svc.core.batch import Fence, PoolGeometry
from kvmem_svc.core.prefix_cache import Domain
from kvmem_svc.core.tenants import Quota

_BATCH_SEQ = struct.Struct("<Q")


class Kind(NamedTuple):
    """How a mutation is written. `decode` also gets the fence of the open session, which is
    the one every recorded batch was checked against."""

    number: int
    name: str
    payload: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes, Callable[[], Fence]], m.Mutation]


def packed(value: object) -> bytes:
    """The msgpack of a plain value."""
    content = msgpack.packb(value)
    assert content is not None
    return content


def _encode_batch(mutation: m.ApplyBatch) -> bytes:
    batch = mutation.batch
    return _BATCH_SEQ.pack(batch.batch_seq) + batch.encoded


def _decode_batch(payload: bytes, fence: Callable[[], Fence]) -> m.Mutation:
    (batch_seq,) = _BATCH_SEQ.unpack_from(payload)
    encoded = payload[_BATCH_SEQ.size :]
    return m.ApplyBatch(convert.batch_from_encoded(fence(), batch_seq, encoded))


def _encode_confirm(mutation: m.ConfirmPool) -> bytes:
    geometry = list(astuple(mutation.geometry))
    return packed([mutation.worker_boot_id, geometry, mutation.last_executed_step])


def _decode_confirm(payload: bytes, _: Callable[[], Fence]) -> m.Mutation:
    worker_boot_id, geometry, last_executed_step = msgpack.unpackb(payload)
    return m.ConfirmPool(worker_boot_id, PoolGeometry(*geometry), last_executed_step)


def _encode_grant(mutation: m.GrantSession) -> bytes:
    return packed([mutation.holder, mutation.holder_address])


def _decode_configure(payload: bytes, _: Callable[[], Fence]) -> m.Mutation:
    use_prefix_cache, *quota = msgpack.unpackb(payload)
    return m.Configure(use_prefix_cache, Quota(*quota))


def _encode_pin(mutation: m.Pin) -> bytes:
    token_ids = mutation.token_ids.astype("<i4").tobytes()
    return packed([*astuple(mutation.domain), token_ids, mutation.ttl_ms, mutation.is_public])


def _decode_pin(payload: bytes, _: Callable[[], Fence]) -> m.Mutation:
    tenant, cache_salt, token_ids, ttl_ms, is_public = msgpack.unpackb(payload)
    tokens = np.frombuffer(token_ids, "<i4").astype(np.int32)
    return m.Pin(Domain(tenant, cache_salt), tokens, ttl_ms, is_public)


# Numbers are part of the format: never given to anything else.
KINDS: Mapping[type, Kind] = {
    m.GrantSession: Kind(
        1,
        "grant session",
        "msgpack [holder, holder_address]",
        _encode_grant,
        lambda payload, _: m.GrantSession(*msgpack.unpackb(payload)),
    ),
    m.ConfirmPool: Kind(
        2,
        "confirm pool",
        "msgpack [worker_boot_id, [geometry in the order of PoolGeometry], last_executed_step]",
        _encode_confirm,
        _decode_confirm,
    ),
    m.ApplyBatch: Kind(
        3,
        "batch",
        "batch_seq (8 bytes), then the batch's `StepOps` as its digest was made of",
        _encode_batch,
        _decode_batch,
    ),
    m.CloseSession: Kind(
        4, "close session", "empty", lambda _: b"", lambda _payload, _fence: m.CloseSession()
    ),
    m.Expire: Kind(
        5,
        "expire",
        "msgpack [request_id, ...]",
        lambda mutation: packed(list(mutation.request_ids)),
        lambda payload, _: m.Expire(msgpack.unpackb(payload)),
    ),
    m.Configure: Kind(
        6,
        "configure",
        "msgpack [use_prefix_cache, max_blocks and max_sequences of a tenant]",
        lambda mutation: packed([mutation.use_prefix_cache, *astuple(mutation.quota)]),
        _decode_configure,
    ),
    m.Pin: Kind(
        7,
        "pin",
        "msgpack [tenant, cache_salt, token ids (int32), ttl_ms, is_public]",
        _encode_pin,
        _decode_pin,
    ),
    m.Unpin: Kind(
        8,
        "unpin",
        "msgpack pin_id",
        lambda mutation: packed(mutation.pin_id),
        lambda payload, _: m.Unpin(msgpack.unpackb(payload)),
    ),
}
_BY_NUMBER = {kind.number: kind for kind in KINDS.values()}


def encode(mutation: m.Mutation) -> tuple[int, bytes]:
    """(kind, payload) of a mutation."""
    kind = KINDS[type(mutation)]
    return kind.number, kind.encode(mutation)


def decode(kind: int, payload: bytes, fence: Callable[[], Fence]) -> m.Mutation:
    """The mutation of a record. Raises ValueError for an unknown kind."""
    if kind not in _BY_NUMBER:
        raise ValueError(f"there is no kind of record {kind}")
    return _BY_NUMBER[kind].decode(payload, fence)


def kind_name(kind: int) -> str:
    return _BY_NUMBER[kind].name if kind in _BY_NUMBER else f"kind {kind}"
