"""What was received, over any number of streams."""

from __future__ import annotations

import pytest

from octavo import RpcError
from octavo._fold import GenerationFold
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import types_pb2
from tests.sdk.scripted_peer import accepted, delta

STOP = types_pb2.FINISH_REASON_STOP


def fold_of(*replies: pb.GenerateReply, n: int = 1) -> GenerationFold:
    fold = GenerationFold("r1", n)
    for reply in replies:
        fold.add(reply)
    return fold


def test_the_header_of_a_later_stream_is_no_chunk() -> None:
    fold = fold_of(accepted(), delta(0, "a", 1))
    fold.begin_stream()
    assert fold.add(accepted()) is None
    chunk = fold.add(delta(0, "b", 2, finish_reason=STOP))
    assert chunk is not None
    assert chunk.text == "b"
    assert fold.generation().candidates[0].token_ids == (1, 2)
    assert fold.generation().text == "ab"


def test_a_header_may_bring_output_with_it() -> None:
    fold = fold_of(accepted(), delta(0, "a", 1))
    fold.begin_stream()
    header = accepted()
    header.MergeFrom(delta(0, "b", 2))
    chunk = fold.add(header)
    assert chunk is not None
    assert chunk.text == "b"


@pytest.mark.parametrize(
    "other", [accepted("r2"), accepted(seed=43), accepted(num_prompt_tokens=8)]
)
def test_another_request_is_refused(other: pb.GenerateReply) -> None:
    fold = fold_of(accepted())
    fold.begin_stream()
    with pytest.raises(RpcError, match="another request"):
        fold.add(other)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_tokens_that_repeat_or_skip_are_refused(offset: int) -> None:
    fold = fold_of(accepted(), delta(0, "ab", 1, 2, token_offset=0))
    with pytest.raises(RpcError, match=f"at token {offset}, but 2 were received"):
        fold.add(delta(0, "c", 3, token_offset=offset))


def test_tokens_that_continue_are_taken() -> None:
    fold = fold_of(
        accepted(), delta(0, "ab", 1, 2, token_offset=0), delta(1, "", 5, token_offset=0), n=2
    )
    fold.add(delta(0, "c", 3, token_offset=2))
    fold.add(delta(1, "d", 6, token_offset=1))
    assert fold.num_output_tokens == 5


def test_an_end_that_comes_twice_is_refused() -> None:
    fold = fold_of(accepted(), delta(0, "a", 1, finish_reason=STOP))
    with pytest.raises(RpcError, match="after its end"):
        fold.add(delta(0, "", finish_reason=STOP, token_offset=1))


def test_what_was_received_is_told_candidate_by_candidate() -> None:
    attachment = pb.Attachment(secret=b"s")
    fold = fold_of(
        accepted(seed=9),
        delta(1, "x", 5, 6, cumulative_logprob=-0.5),
        delta(0, "a", 1, finish_reason=STOP, cumulative_logprob=-2.0),
        n=3,
    )
    for _ in range(2):  # it replaces what it said before
        fold.write_received(attachment)
    assert attachment == pb.Attachment(
        secret=b"s",
        drawn_seed=9,
        received=[
            pb.ReceivedCandidate(
                index=0, token_ids=[1], finish_reason=STOP, cumulative_logprob=-2.0
            ),
            pb.ReceivedCandidate(index=1, token_ids=[5, 6], cumulative_logprob=-0.5),
        ],
    )


def test_before_the_first_reply_nothing_is_told() -> None:
    attachment = pb.Attachment()
    fold_of().write_received(attachment)
    assert not attachment.HasField("drawn_seed")


def test_complete_is_when_every_candidate_has_ended() -> None:
    fold = fold_of(n=2)
    assert not fold.complete
    steps = [
        (accepted(), False),
        (delta(1, "a", 1, finish_reason=STOP), False),
        (delta(0, "b", 1), False),
        (delta(0, "", finish_reason=STOP), True),
    ]
    for reply, complete in steps:
        fold.add(reply)
        assert fold.complete is complete


def test_no_candidates_are_not_all_of_them() -> None:
    assert not fold_of(n=0).complete
