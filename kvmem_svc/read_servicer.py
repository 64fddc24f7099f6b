"""What the KvMemory service tells of itself. Nothing here changes anything or needs a session."""

from __future__ import annotations

import grpc.aio

from kvmem_svc import convert
from kvmem_svc.core.errors import KvMemoryError
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.views import sequence_summaries, sequence_views
from kvmem_svc.ports import Journal
from octavo.service.errors import ServiceError, abort
from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import kvmem_pb2_grpc

DEFAULT_VIEWED_SEQUENCES = 1024
MAX_VIEWED_SEQUENCES = 65_536
DEFAULT_PAGE_SIZE = 1024
MAX_PAGE_SIZE = 4096


class ReadServicer(kvmem_pb2_grpc.KvMemoryServicer):
    """The RPCs that read. num_recorded_tokens: since this process started."""

    def __init__(self, gatekeeper: Gatekeeper, journal: Journal) -> None:
        self._gatekeeper = gatekeeper
        self._memory = gatekeeper.memory
        self._journal = journal
        self.num_recorded_tokens = 0

    async def GetBlockTables(
        self, request: pb.GetBlockTablesRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetBlockTablesReply:
        try:
            return self.block_tables(
                list(request.sequence_ids),
                request.request_id,
                min(request.max_sequences or DEFAULT_VIEWED_SEQUENCES, MAX_VIEWED_SEQUENCES),
            )
        except KvMemoryError as error:
            await abort(context, service_error(error))

    def block_tables(
        self, sequence_ids: list[int], request_id: str, max_sequences: int
    ) -> pb.GetBlockTablesReply:
        if self._memory.manager is None:
            return pb.GetBlockTablesReply()
        views, truncated = sequence_views(
            self._memory.manager, sequence_ids, request_id, max_sequences
        )
        return pb.GetBlockTablesReply(sequences=map(convert.view_to_pb, views), truncated=truncated)

    async def ListSequences(
        self, request: pb.ListSequencesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListSequencesReply:
        if request.page_size > MAX_PAGE_SIZE:
            message = f"page_size is {request.page_size}; it must be in [1, {MAX_PAGE_SIZE}], or 0"
            await abort(context, ServiceError("INVALID_PARAMETER", message))
        if self._memory.manager is None:
            return pb.ListSequencesReply()
        summaries, truncated = sequence_summaries(
            self._memory.manager,
            request.after_sequence_id,
            request.page_size or DEFAULT_PAGE_SIZE,
        )
        return pb.ListSequencesReply(
            sequences=map(convert.summary_to_pb, summaries), truncated=truncated
        )

    async def GetPoolStats(
        self,
        request: pb.GetPoolStatsRequest,
        context: grpc.aio.ServicerContext,
    ) -> pb.PoolStats:
        stats = convert.stats_to_pb(self._memory.stats(), self._memory.ledger)
        stats.mutations_open = self._gatekeeper.mutations_open
        stats.orphaned_ms = self._gatekeeper.leases.orphaned_ms
        stats.last_step_id = self._memory.last_step_id
        stats.num_recorded_tokens = self.num_recorded_tokens
        stats.journal_healthy = self._journal.healthy
        stats.prefix_cache_enabled = self._memory.configuration.use_prefix_cache
        return stats

    async def MatchPrefix(
        self, request: pb.MatchPrefixRequest, context: grpc.aio.ServicerContext
    ) -> pb.MatchPrefixReply:
        try:
            num_tokens = self._memory.num_cached_tokens(*convert.prefix_from_pb(request))
            return pb.MatchPrefixReply(num_cached_tokens=num_tokens)
        except KvMemoryError as error:
            await abort(context, service_error(error))


def service_error(error: KvMemoryError | ServiceError) -> ServiceError:
    """What a caller is told of `error`."""
    if isinstance(error, ServiceError):
        return error
    return ServiceError(error.reason, error.message, error.retry_after_ms, error.metadata)
