"""The API key and the cache salt: what of them a server sees, and what nobody else does."""

from __future__ import annotations

from typing import Any

import pytest

import octavo
from octavo.v1 import types_pb2
from tests.sdk.scripted_peer import Act, Hang, ScriptedPeer, accepted, delta

KEY = "kWq3vX9mT2bR8nLs"
WHOLE: list[Act] = [
    accepted(),
    delta(0, "a", 1, finish_reason=types_pb2.FINISH_REASON_STOP),
]


def test_every_call_carries_the_key(client_class: Any, peer: ScriptedPeer, address: str) -> None:
    peer.script = WHOLE
    with client_class(address, api_key=KEY) as client:
        client.generate("p")
        client.chat("p")
        client.tokenize("p")
        client.model()
        client.list_requests()
        client.abort("live")
        peer.script = [accepted(), Hang()]
        with client.stream("p") as chunks:
            next(chunks)
    assert [call.method for call in peer.calls].count("Abort") == 2
    assert {call.metadata.get("authorization") for call in peer.calls} == {f"Bearer {KEY}"}


def test_without_a_key_there_is_no_such_metadata(client: Any, peer: ScriptedPeer) -> None:
    peer.script = WHOLE
    client.generate("p")
    client.model()
    assert all("authorization" not in call.metadata for call in peer.calls)


@pytest.mark.parametrize("key", ["", "two words", "ümlaut-in-the-key", "line\nbreak-in-the-key"])
def test_a_key_that_cannot_be_sent_is_not_shown(client_class: Any, key: str) -> None:
    with pytest.raises(octavo.InvalidArgumentError, match="printable ASCII") as raised:
        client_class("unix:/nobody", api_key=key)
    assert not key or key not in str(raised.value)


def test_the_salt_goes_with_the_request_also_when_it_comes_back(
    client: Any, peer: ScriptedPeer
) -> None:
    peer.earlier = [[accepted()]]  # cut short
    peer.script = WHOLE
    client.generate("p", cache_salt="mine")
    client.chat("p", cache_salt="mine")
    assert [call.request.cache_salt for call in peer.calls] == ["mine"] * 3
    client.generate("p")
    assert peer.calls[-1].request.cache_salt == ""


def test_the_priority_goes_with_the_request(client: Any, peer: ScriptedPeer) -> None:
    peer.script = WHOLE
    client.generate("p", priority=3)
    client.chat("p", priority=-2)
    client.generate("p")
    assert [call.request.priority for call in peer.calls] == [3, -2, 0]
    with pytest.raises(octavo.InvalidArgumentError, match="priority"):
        client.generate("p", priority=2**40)


def test_what_was_cached_is_part_of_the_answer(client: Any, peer: ScriptedPeer) -> None:
    first = delta(0, "a", 1)
    first.num_cached_tokens = 0
    peer.script = [accepted(), first, delta(0, "b", 2, finish_reason=2)]
    with client.stream("p") as chunks:
        assert [chunk.num_cached_tokens for chunk in chunks] == [None, 0, 0]
    assert chunks.generation().num_cached_tokens == 0
    peer.script = WHOLE
    assert client.generate("p").num_cached_tokens is None


def test_what_was_said_of_the_cache_first_stands(client: Any, peer: ScriptedPeer) -> None:
    """Entered again at another server, a request finds what it computed itself before."""
    first, second = delta(0, "a", 1), delta(0, "b", 2, token_offset=1, finish_reason=2)
    first.num_cached_tokens, second.num_cached_tokens = 3, 6
    peer.earlier = [[accepted(), first]]
    peer.script = [accepted(), second]
    assert client.generate("p").num_cached_tokens == 3
