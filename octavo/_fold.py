"""What was received of an answer: replies folded into chunks, and into a whole at the end.

It outlives the streams that bring the replies: after each break the next one goes on, and what
does not continue what is here already is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo import types
from octavo.errors import RpcError
from octavo.v1 import inference_pb2, types_pb2

FINISH_REASONS: dict[int, types.FinishReason] = {
    types_pb2.FINISH_REASON_STOP: types.FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: types.FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: types.FinishReason.ABORT,
    types_pb2.FINISH_REASON_KV_CAPACITY: types.FinishReason.KV_CAPACITY,
}


@dataclass
class _CandidateFold:
    """One candidate while its deltas come in."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    newest: types.CandidateChunk | None = None
    # As the wire has it; unspecified until it has ended.
    finish_reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_UNSPECIFIED


class GenerationFold:
    """Folds the replies to one request into chunks and, at the end, a Generation."""

    def __init__(self, request_id: str, num_candidates: int) -> None:
        self.request_id = request_id
        self.seed = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens: int | None = None
        # A server has said that the request's record is safe.
        self.accepted = False
        self._num_candidates = num_candidates
        self._candidates: dict[int, _CandidateFold] = {}
        self._expects_header = True

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all candidates so far."""
        return sum(len(candidate.token_ids) for candidate in self._candidates.values())

    @property
    def complete(self) -> bool:
        """Whether every candidate has ended."""
        ended = (candidate.finish_reason for candidate in self._candidates.values())
        return self.accepted and len(self._candidates) == self._num_candidates and all(ended)

    def begin_stream(self) -> None:
        """The replies from now on come over another stream, which begins with the header."""
        self._expects_header = True

    def add(self, reply: inference_pb2.GenerateReply) -> types.Chunk | None:
        """Take in the next reply; None when it says nothing new.

        Raises RpcError for a reply that does not continue what was received.
        """
        is_news = not self.accepted or bool(reply.deltas)
        if self._expects_header:
            self._take_header(reply)
        # What is said first stands: a request that was entered again finds its own KV as well.
        if self.num_cached_tokens is None and reply.HasField("num_cached_tokens"):
            self.num_cached_tokens = reply.num_cached_tokens
        chunks = tuple(self._take(delta) for delta in reply.deltas)
        if not is_news:
            return None
        return types.Chunk(
            self.request_id, self.seed, self.num_prompt_tokens, chunks, self.num_cached_tokens
        )

    def _take_header(self, reply: inference_pb2.GenerateReply) -> None:
        self._expects_header = False
        if not self.accepted:
            self.accepted = True
            self.request_id = reply.request_id
            self.seed = reply.seed
            self.num_prompt_tokens = reply.num_prompt_tokens
            return
        before = (self.request_id, self.seed, self.num_prompt_tokens)
        after = (reply.request_id, reply.seed, reply.num_prompt_tokens)
        if before != after:
            raise broken(
                "the server went on with another request: id, seed and prompt length were"
                f" {before} and are {after}"
            )

    def _take(self, delta: inference_pb2.CandidateDelta) -> types.CandidateChunk:
        chunk = _read_delta(delta)
        if chunk.index >= self._num_candidates:
            raise broken(f"the server sent candidate {chunk.index}, which nobody asked for")
        candidate = self._candidates.setdefault(chunk.index, _CandidateFold())
        if candidate.finish_reason:
            raise broken(f"the server went on with candidate {chunk.index} after its end")
        num_tokens = len(candidate.token_ids)
        if delta.HasField("token_offset") and delta.token_offset != num_tokens:
            raise broken(
                f"the server went on with candidate {chunk.index} at token {delta.token_offset},"
                f" but {num_tokens} were received"
            )
        candidate.texts.append(chunk.text)
        candidate.token_ids.extend(chunk.token_ids)
        candidate.newest = chunk
        candidate.finish_reason = delta.finish_reason
        return chunk

    def write_received(self, attachment: inference_pb2.Attachment) -> None:
        """Say in `attachment` what is here, so that a server goes on after it."""
        del attachment.received[:]
        for index, candidate in sorted(self._candidates.items()):
            attachment.received.add(
                index=index,
                token_ids=candidate.token_ids,
                finish_reason=candidate.finish_reason,
                cumulative_logprob=candidate.newest.cumulative_logprob if candidate.newest else 0,
            )
        if self.accepted:
            attachment.drawn_seed = self.seed

    def check_complete(self) -> None:
        """Raises RpcError, naming the candidate, when one has not finished."""
        for index in range(self._num_candidates):
            _finished(index, self._candidates.get(index))

    def generation(self) -> types.Generation:
        """The whole result. Raises RpcError when a candidate has not finished."""
        return types.Generation(
            self.request_id,
            self.seed,
            self.num_prompt_tokens,
            tuple(
                _finished(index, self._candidates.get(index))
                for index in range(self._num_candidates)
            ),
            self.num_cached_tokens,
        )


def broken(message: str) -> RpcError:
    """The server broke the contract."""
    return RpcError(message, reason="INTERNAL")


def _finished(index: int, candidate: _CandidateFold | None) -> types.Candidate:
    newest = None if candidate is None else candidate.newest
    if candidate is None or newest is None or newest.finish_reason is None:
        raise broken(f"the answer ended before candidate {index} had finished")
    return types.Candidate(
        index,
        "".join(candidate.texts),
        tuple(candidate.token_ids),
        newest.finish_reason,
        newest.matched_stop,
        newest.cumulative_logprob,
    )


def _read_delta(delta: inference_pb2.CandidateDelta) -> types.CandidateChunk:
    matched = delta.WhichOneof("matched")
    return types.CandidateChunk(
        delta.index,
        delta.text,
        tuple(delta.token_ids),
        FINISH_REASONS.get(delta.finish_reason),
        None if matched is None else getattr(delta, matched),
        delta.cumulative_logprob,
    )
