"""Request ids of tenants, and what a request takes with it into the memory service and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.service.errors import ServiceError
from octavo.v1 import inference_pb2, kvmem_pb2, types_pb2
from scheduler_svc import convert, convert_records
from scheduler_svc.core import ops
from scheduler_svc.core.params import InvalidRequestError, SamplingParams
from scheduler_svc.core.sequence import Request
from scheduler_svc.tenants import NAME_PATTERN, checked_inner_id, inner_id, outer_id

NAMES = st.sampled_from(["default", "a", "b", "ab", "default.a"])
IDS = st.text(alphabet="ab/d", max_size=4) | st.sampled_from(
    ["default/a", "a/b", "/", "b/a/", "default/default/a"]
)


@given(NAMES, IDS, NAMES, IDS)
def test_two_tenants_never_share_an_id_and_each_gets_its_own_back(
    tenant: str, request_id: str, other: str, other_id: str
) -> None:
    inner = inner_id(tenant, request_id)
    same = (tenant, request_id) == (other, other_id)
    assert (inner == inner_id(other, other_id)) is same
    assert outer_id(Request(inner, (1,), SamplingParams(), tenant)) == request_id


def test_what_has_no_tenant_keeps_its_id() -> None:
    assert inner_id("default", "req-1") == "req-1"
    assert inner_id("acme", "req-1") == "acme/req-1"


def test_names_have_no_slash() -> None:
    """What the ids of two tenants rely on."""
    assert not NAME_PATTERN.fullmatch("a/b")
    assert not NAME_PATTERN.fullmatch("")


@pytest.mark.parametrize(("tenant", "allowed"), [("default", 256), ("acme", 251), ("a" * 64, 191)])
def test_how_long_an_id_may_be(tenant: str, allowed: int) -> None:
    assert len(checked_inner_id(tenant, "x" * allowed)) == 256
    with pytest.raises(ServiceError, match=rf"{allowed + 1} bytes; at most {allowed} are allowed"):
        checked_inner_id(tenant, "x" * (allowed + 1))


def request_of(message: convert_records.CallerMessage) -> Request:
    params = SamplingParams(max_tokens=4)
    return convert_records.request_of("acme", "acme/r", (1, 2), params, message, "")


@pytest.mark.parametrize("kind", [inference_pb2.GenerateRequest, inference_pb2.ChatRequest])
def test_tenant_and_salt_go_into_the_record_and_come_back_with_it(kind: type) -> None:
    request = request_of(kind(cache_salt="salt"))
    batch = convert.batch_message(ops.Batch(1, 1, 0, (ops.Arrive(request),)), types_pb2.Fence())
    arrive = batch.step.ops[0].arrive
    assert (arrive.tenant, arrive.cache_salt) == ("acme", "salt")
    record = kvmem_pb2.AdoptedRequest(
        request_id=arrive.request_id,
        tenant=arrive.tenant,
        cache_salt=arrive.cache_salt,
        prompt_token_ids=b"\1\0\0\0\2\0\0\0",
        request_spec=arrive.request_spec,
        request_digest=arrive.request_digest,
        num_candidates=1,
    )
    assert convert_records.adopted_of(record).request == request


def test_another_salt_is_another_request() -> None:
    one, other = (
        request_of(inference_pb2.GenerateRequest(prompt="p", cache_salt=salt)) for salt in ("", "s")
    )
    assert one.digest != other.digest


@pytest.mark.parametrize(("salt", "fits"), [("s" * 64, True), ("s" * 65, False), ("ü" * 33, False)])
def test_how_long_a_salt_may_be(salt: str, fits: bool) -> None:
    message = inference_pb2.GenerateRequest(cache_salt=salt)
    if fits:
        assert request_of(message).cache_salt == salt
        return
    with pytest.raises(InvalidRequestError, match=r"cache_salt has 6[56] bytes; at most 64"):
        request_of(message)
