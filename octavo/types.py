"""What the SDK takes and gives: frozen dataclasses, with no trace of the wire in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a candidate ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's length
    ABORT = "abort"
    KV_CAPACITY = "kv_capacity"  # alone in the KV pool and still without room to grow


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to decode. None: the server's default. The server checks every range.

    temperature: 0 is greedy.
    top_k: 0 or -1 is all tokens.
    top_p, min_p: probabilities.
    seed: with it a request can be repeated; drawn by the server and reported when None.
    n: candidates for the one prompt.
    first_sample_index: candidate i draws with sample index first_sample_index + i, so that
        a run with n = 1 can repeat any single candidate of a larger one.
    max_tokens, min_tokens: output tokens of each candidate.
    stop: strings that end the text; they are not part of it. One string may stand alone.
    stop_token_ids: token ids that end it.
    ignore_eos: go on past the model's end-of-sequence tokens.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    first_sample_index: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; role is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class CandidateChunk:
    """What one candidate gained: new text and token ids, and how it ended once it has.

    cumulative_logprob: sum over all tokens so far, in nats.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    matched_stop: str | int | None
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a streamed answer. The first may hold no candidates: it says that the
    request is accepted, with its id, seed and prompt length; those stay the same after.

    num_cached_tokens: of the prompt, those whose KV was there already, since another prompt began
        alike; None until the first candidates, and where the server did not say.
    """

    request_id: str
    seed: int
    num_prompt_tokens: int
    candidates: tuple[CandidateChunk, ...]
    num_cached_tokens: int | None = None

    @property
    def text(self) -> str:
        """The new text of candidate 0."""
        return "".join(part.text for part in self.candidates if part.index == 0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One complete answer.

    matched_stop: the stop string or stop token id that ended it; None for an
        end-of-sequence token and every other reason.
    cumulative_logprob: sum over token_ids, in nats, under the unmodified logits.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete result: its candidates stand in the order of their index.

    num_cached_tokens: as in `Chunk`.
    """

    request_id: str
    seed: int
    num_prompt_tokens: int
    candidates: tuple[Candidate, ...]
    num_cached_tokens: int | None = None

    @property
    def text(self) -> str:
        """The text of the first candidate."""
        return self.candidates[0].text


@dataclass(frozen=True, slots=True)
class Health:
    """What a server says of itself: status is a name of `grpc.health.v1`'s, as SERVING."""

    serving: bool
    status: str


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The shape of the KV pool: num_blocks blocks of block_size tokens each."""

    num_blocks: int
    block_size: int
    max_model_len: int
    kv_bytes_per_block: int
    kv_dtype: str
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The served model. Lengths in tokens; geometry is None until a worker is attached."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    geometry: PoolGeometry | None
    attention_backend: str


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One live request as the scheduler sees it."""

    request_id: str
    status: str
    num_prompt_tokens: int
    num_candidates: int
    num_output_tokens: int
