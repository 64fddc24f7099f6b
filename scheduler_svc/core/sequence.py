"""The scheduler's view of requests, sequence groups and sequences.

A view, not the record: kvmem holds the truth, and this can be rebuilt from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.stopping import FinishReason, StopChecker


@dataclass(frozen=True)
class Request:
    """A checked request. `spec` is what another scheduler would need to go on with it.

    request_id: unique among all tenants' live requests; what its caller calls it is the shell's.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    tenant: str = "default"
    spec: bytes = b""
    digest: bytes = b""
    traceparent: str = ""
    # Empty: nobody can come back to it.
    attach_secret_digest: bytes = b""
    # How long it is kept while no caller is attached.
    detach_ttl_ms: int = 0
    # Cached prefixes are shared among requests of one tenant with the same salt only.
    cache_salt: str = ""
    # Of one tenant's requests, those with more go first: see `scheduler_svc.core.policy`.
    priority: int = 0


@dataclass(frozen=True)
class ArrivingCandidate:
    """What a candidate had in another life of the memory service, or has at its caller."""

    candidate: int
    output_token_ids: tuple[int, ...]
    state_word: int
    finish_reason: FinishReason | None = None


class GroupStatus(Enum):
    ARRIVING = "arriving"
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


# Legal transitions, and what causes each. Everything else is a bug.
TRANSITIONS: dict[tuple[GroupStatus, GroupStatus], str] = {
    (GroupStatus.ARRIVING, GroupStatus.WAITING): "kvmem has the record",
    (GroupStatus.ARRIVING, GroupStatus.FINISHED): "refused by kvmem",
    (GroupStatus.WAITING, GroupStatus.RUNNING): "admitted: its blocks are allocated",
    (GroupStatus.WAITING, GroupStatus.FINISHED): "aborted in the queue, or re-entered with its end",
    (GroupStatus.RUNNING, GroupStatus.WAITING): "preempted: its blocks are taken back",
    (GroupStatus.RUNNING, GroupStatus.SWAPPED): "preempted: its blocks go to the host tier",
    (GroupStatus.SWAPPED, GroupStatus.RUNNING): "swapped in: its blocks are filled again",
    (GroupStatus.SWAPPED, GroupStatus.WAITING): "the host tier had no room: taken back instead",
    (GroupStatus.SWAPPED, GroupStatus.FINISHED): "aborted, or will not fit the pool again",
    (GroupStatus.RUNNING, GroupStatus.FINISHED): "all candidates ended, or aborted",
}


@dataclass(eq=False)
class Sequence:
    """One candidate. `num_computed_tokens`: KV present, from the start of the sequence."""

    sequence_id: int
    candidate: int
    group: SequenceGroup
    checker: StopChecker
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    # In steps that were issued and have not come back: tokens they compute, and draws.
    num_inflight_tokens: int = 0
    num_inflight_draws: int = 0
    block_table: list[int] = field(default_factory=list)
    table_version: int = 0
    # Slots, from the start of the sequence, that it may write without asking: those that an
    # Admit or a Reserve made. After a fork the last block is shared, and it must ask again.
    num_writable_slots: int = 0
    # The worker's mirror has this sequence's table (up to deltas on their way).
    on_worker: bool = False
    cumulative_logprob: float = 0.0
    # What each output token makes readable, and what the end adds without a token.
    pieces: list[str] = field(default_factory=list)
    tail: str = ""
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    # What the memory service has acknowledged: so much may be shown.
    num_committed_tokens: int = 0
    committed_logprob: float = 0.0
    end_committed: bool = False
    # After a resume: the sibling that computes the shared prefix, and how far it must be.
    prefix_source: Sequence | None = None
    prefix_source_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.group.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_scheduled_tokens(self) -> int:
        """KV that will be present once the issued steps are done: where its next row begins."""
        return self.num_computed_tokens + self.num_inflight_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens of which no issued step computes the KV; those being drawn count as there."""
        # Written out: it is asked of every sequence in every step.
        return (
            len(self.group.request.prompt_token_ids)
            + len(self.output_token_ids)
            + self.num_inflight_draws
            - self.num_computed_tokens
            - self.num_inflight_tokens
        )

    @property
    def waits_for_draw(self) -> bool:
        """Whether its next step depends on what the issued ones draw: it may end with that, or
        fork."""
        if not self.num_inflight_draws:
            return False
        params = self.group.request.params
        is_last = len(self.output_token_ids) + self.num_inflight_draws >= params.max_tokens
        return is_last or not self.group.forked

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, token_id: int, logprob: float) -> None:
        """Append an output token; the sequence may end with it."""
        judgement = self.checker.judge(token_id)
        self.output_token_ids.append(token_id)
        self.cumulative_logprob += logprob
        self.pieces.append(judgement.text)
        self.finish_reason = judgement.finish_reason
        self.matched_stop = judgement.matched_stop

    def end(self, reason: FinishReason) -> None:
        """End without a token."""
        self.finish_reason = reason
        self.tail = self.checker.end()

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Token ids at positions start .. end-1, prompt and output counted as one."""
        prompt = self.group.request.prompt_token_ids
        if start >= len(prompt):
            return self.output_token_ids[start - len(prompt) : end - len(prompt)]
        return [*prompt[start:end], *self.output_token_ids[: max(0, end - len(prompt))]]

    def forget_blocks(self) -> None:
        """The blocks were taken back: nothing is computed, the worker must be told anew."""
        self.leave_pool()
        self.num_computed_tokens = 0

    def leave_pool(self) -> None:
        """It has no blocks in the pool; the worker must be told anew when it has."""
        assert not self.num_inflight_tokens, f"{self.sequence_id} is in a step"
        self.block_table = []
        self.num_writable_slots = 0
        self.on_worker = False
        self.prefix_source = None
        self.prefix_source_tokens = 0


@dataclass(eq=False)
class SequenceGroup:
    """The candidates of one request: admitted, preempted and ended as one."""

    request: Request
    arrived_at_s: float
    status: GroupStatus = GroupStatus.ARRIVING
    arrival_number: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    first_scheduled_at_s: float | None = None
    first_token_at_s: float | None = None
    num_preemptions: int = 0
    # Of the prompt, when it was first admitted; None before.
    num_cached_tokens: int | None = None
    # While ARRIVING: what it arrives with, to be entered again if that is never answered.
    arriving: tuple[ArrivingCandidate, ...] = ()

    def take_times(self, former: SequenceGroup) -> None:
        """What the memory service does not keep of the same request's group."""
        self.arrived_at_s = former.arrived_at_s
        self.first_scheduled_at_s = former.first_scheduled_at_s
        self.first_token_at_s = former.first_token_at_s
        self.num_preemptions = former.num_preemptions
        self.num_cached_tokens = former.num_cached_tokens

    def move_to(self, status: GroupStatus) -> None:
        """Change the status; an illegal transition is a bug and raises AssertionError."""
        assert (self.status, status) in TRANSITIONS, (
            f"{self.request.request_id}: {self.status.value} -> {status.value}"
        )
        self.status = status

    @property
    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def forked(self) -> bool:
        return len(self.sequences) == self.request.params.n

    @property
    def num_seats(self) -> int:
        """Sequences it runs, or will run once it has forked."""
        return len(self.live) if self.forked else self.request.params.n
