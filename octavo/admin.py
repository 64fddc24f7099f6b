"""Looking into the KV memory service: block tables, pool levels, and the stream of batches.

with KvMemoryInspector("unix:/run/octavo/kvmem.sock") as inspector:
    for event in inspector.watch():
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc

from octavo import _wire, _wire_kvmem
from octavo.admin_types import BlockTables, Event, PoolStats, SequencePage
from octavo.client import UNARY_TIMEOUT_S, checked_address
from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import kvmem_pb2, kvmem_pb2_grpc

WATCH_TIMEOUT_S = 3600.0


class EventStream(Iterator[Event]):
    """Events as they happen: a snapshot first, then every applied batch."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._ended = False

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        try:
            reply = next(self._call)
        except StopIteration:
            self._ended = True
            raise
        except grpc.RpcError as failure:
            if self._ended:  # closed by another thread meanwhile
                raise StopIteration from None
            self._ended = True
            raise _wire.error_of(failure) from failure
        return _wire_kvmem.read_event(reply)

    def close(self) -> None:
        """End the watch, also from another thread; the loop over it then ends."""
        if not self._ended:
            self._ended = True
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class KvMemoryInspector:
    """Reads, and never changes, a KV memory service. Errors are those of `octavo.errors`."""

    def __init__(self, address: str) -> None:
        self.address = checked_address(address)
        self._channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self._stub = kvmem_pb2_grpc.KvMemoryStub(self._channel)

    def pool_stats(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> PoolStats:
        """Levels and counters of the block pool."""
        reply = self._call(self._stub.GetPoolStats, kvmem_pb2.GetPoolStatsRequest(), timeout_s)
        return _wire_kvmem.read_stats(reply)

    def block_tables(
        self,
        request_id: str | None = None,
        *,
        max_sequences: int = 0,
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> BlockTables:
        """The tables of one request's sequences, or of all; at most max_sequences of them, 0 being
        the service's own limit. NotFoundError: no such request."""
        request = kvmem_pb2.GetBlockTablesRequest(
            request_id=request_id or "", max_sequences=max_sequences
        )
        return _wire_kvmem.read_tables(self._call(self._stub.GetBlockTables, request, timeout_s))

    def list_sequences(
        self,
        after_sequence_id: int = 0,
        page_size: int = 0,
        *,
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> SequencePage:
        """The sequences above `after_sequence_id`, without their tables. page_size: 1 .. 4096, or
        0 for the service's own."""
        request = kvmem_pb2.ListSequencesRequest(
            after_sequence_id=after_sequence_id, page_size=page_size
        )
        return _wire_kvmem.read_page(self._call(self._stub.ListSequences, request, timeout_s))

    def watch(self, *, timeout_s: float = WATCH_TIMEOUT_S) -> EventStream:
        """Everything from now on; nothing between the snapshot and the batches is left out."""
        return EventStream(
            self._stub.WatchEvents(kvmem_pb2.WatchEventsRequest(), timeout=timeout_s)
        )

    def close(self) -> None:
        """End what is open and close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @staticmethod
    def _call(method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as failure:
            raise _wire.error_of(failure) from failure
