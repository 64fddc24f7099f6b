"""Coverage marks: the situations a simulation is for. One that is never reached tests nothing."""

from __future__ import annotations

from collections.abc import Mapping

MARKS: Mapping[str, str] = {
    # The scheduler's life under pressure.
    "preempted": "a running group gave its blocks back and waited again",
    "forked": "the candidates of a request went separate ways",
    "copied on write": "the worker copied a block for a candidate that wrote into a shared one",
    "copy of a preempted group dropped": "kvmem planned a copy that the step no longer needed",
    "one step ahead": "a step was sent before the one before it had come back",
    "chunked prefill": "a prompt was computed in more than one step",
    "group resumed with shared prefix": "candidates came back sharing their prompt's blocks",
    "waited for a shared prefix": "a candidate sat out a step while a sibling computed for both",
    "overtaken by priority": "a request was admitted before one of its tenant that came earlier",
    "admission refused": "kvmem had fewer blocks than the planner thought",
    "quarantined block waited for": "no block was free, but some were coming: nobody preempted",
    "kv_capacity end": "a request outgrew the pool and was told so",
    "prompt exceeds pool": "a prompt that can never fit was refused at the door",
    "queue full": "one request too many was refused",
    # The prefix cache.
    "prefix found": "a request was given blocks that others had filled",
    "prefix found to its end": "only the last token was computed, in a copy of a shared block",
    "hit across turns": "a prompt went on from an answer that was still cached",
    "resumed from the cache": "a preempted request found what it had computed before",
    "another's prefix not found": "the same prompt was cached for another tenant or salt only",
    "evicted": "cached blocks were given to others",
    "cache switched off": "the memory service was started again without a cache, and had one",
    "prefix pinned": "an operator held a cached prefix",
    "hit on a pinned prefix": "a request found what its own tenant had pinned",
    "hit on a public pin": "a request found what was computed for another tenant",
    "quota refused": "kvmem had blocks, and a tenant had all that its quota allows",
    "tenant quota refused": "a request more than its tenant's quota was refused at the door",
    "pin expired": "a pin came to the end of its time",
    # The host tier.
    "swapped out": "a running group was moved to the host tier",
    "swapped in": "a group came back from the host tier",
    "pending swaps adopted": "swaps that a former session planned were left to the next",
    "host tier full": "a group was preempted by recomputation, where swapping was wanted",
    "swap under way when the scheduler died": "",
    "swap under way when the memory service died": "",
    "swap under way when the worker died": "",
    # Callers.
    "aborted before arrival": "an abort came before kvmem had the record",
    "aborted while waiting": "an abort came while the request waited for blocks",
    "aborted in flight": "an abort came while a step with the request was at the worker",
    "aborted a group": "an abort ended several candidates at once",
    "caller vanished": "a caller disappeared without a word",
    "same id again": "an id was used again after its first request was aborted or lost",
    "same id while live": "a second request with a live id was refused",
    "detached request resumed": "a caller came back in time to a request that nobody listened to",
    "detached request expired": "nobody came back in time, and the request was aborted",
    "attached twice, the last one wins": "a caller came back before its broken stream was noticed",
    "result delivered after its end": "a caller came back to a request that had ended meanwhile",
    "followed to the leader": "a caller went where NOT_LEADER said",
    "completed over a death": "a request that took more than one stream",
    "re-entered by its caller": "a caller entered what nobody knew any more, with what it had",
    "patience lost": "callers were told of a lost peer",
    # Takeover.
    "adopted while it ran": "a scheduler went on with a running request whose caller was not there",
    "takeover waited for a step": "the worker finished a step before it handed itself over",
    "retained result used": "the result of a step was committed by another session than began it",
    "pending copies adopted": "copies that a former session planned were left to the next",
    "new worker adopted": "requests went on at a worker that had nothing of them",
    "re-entered by its scheduler": "kvmem lost a record, and its scheduler entered it again",
    "stood down": "a scheduler with requests found that another one has them",
    "orphans expired": "kvmem dropped requests that no scheduler came for",
    # Sessions and fences.
    "session held": "kvmem refused a session because another one is open",
    "session resumed": "a scheduler went on with its session after the stream broke",
    "batch replayed": "a batch was sent again and answered from memory",
    "batch lost and sent again": "a batch was lost with its stream and applied at the second try",
    "session taken over": "another scheduler opened the next session",
    "lease expired": "a scheduler was silent for too long, and nobody else had come",
    "session resumed after a recovery": "kvmem came back from its journal to its holder",
    "torn tail": "kvmem died in the middle of a record",
    "died before it answered": "kvmem died after a record and before its answer",
    "journal lost": "kvmem came back as somebody else",
    "stale epoch refused at kvmem": "kvmem refused a process of a former epoch",
    "stale epoch refused at worker": "the worker refused a step of a former epoch",
    "stale boot id refused at kvmem": "kvmem refused a fence of its own former life",
    "stale boot id refused at worker": "the worker refused a step meant for its former life",
    "stream replaced at worker": "a newer session's step ended an older session's stream",
    # What was done to the processes and the network.
    "scheduler restarted": "",
    "kvmem restarted": "",
    "worker restarted": "",
    "scheduler paused": "",
    "kvmem paused": "",
    "worker paused": "",
    "scheduler cut off from kvmem": "",
    "scheduler cut off from worker": "",
    "callers cut off": "",
    "connection broken": "a connection broke with nobody dead",
    "message lost with its stream": "",
    "message delivered late": "it waited for a cut to heal",
    "unary request lost": "",
    "unary reply lost": "",
    "unary call carried out twice": "",
    "stream broke under its caller": "",
    "request lost with its stream": "a caller without a secret lost its request",
}


class Marks:
    """How often each mark was reached."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(MARKS, 0)

    def hit(self, mark: str, times: int = 1) -> None:
        """Raises KeyError for a mark that is not in the table."""
        self.counts[mark] += times
