"""Two tenants at one scheduler, each known by its API key: what is one's is not there for the
other, and whoever has no key is served nothing but health."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import octavo
from octavo import Client
from octavo.service.errors import ServiceError
from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc, kvmem_pb2, kvmem_pb2_grpc
from tests.system.models import TINY_WORKER
from tests.system.requests import greedy, token_prompt
from tests.system.stack import REPOSITORY, Stack, wait_until

ACME, OTHER, LATER = "key-of-acme-0123456789", "key-of-other-0123456789", "key-of-acme-later-01"
PROMPT = token_prompt(20)
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Inference"].methods]


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.touch(mode=0o600)
    path.write_text(f"acme {ACME}\nother {OTHER}\n")
    return path


@pytest.fixture(scope="module")
def guarded(tiny_model: Path, keys_file: Path) -> Iterator[Stack]:
    with Stack(
        model=tiny_model,
        num_blocks=256,
        worker=TINY_WORKER,
        scheduler=(f"--api-keys={keys_file}",),
        journal=True,
    ) as stack:
        yield stack


def client_of(stack: Stack, key: str | None) -> Client:
    return Client(stack.address, api_key=key)


# ---- without a key ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("key", [None, "Bearer not-one-of-the-keys", f"Basic {ACME}"])
def test_no_method_serves_a_stranger(guarded: Stack, method: str, key: str | None) -> None:
    descriptor = pb.DESCRIPTOR.services_by_name["Inference"].methods_by_name[method]
    with grpc.insecure_channel(guarded.address, CHANNEL_OPTIONS) as channel:
        call = getattr(inference_pb2_grpc.InferenceStub(channel), method)
        metadata = () if key is None else (("authorization", key),)
        request = getattr(pb, descriptor.input_type.name)()
        if method == "Multiplex":
            request = iter([request])
        with pytest.raises(grpc.RpcError) as raised:
            list(call(request, metadata=metadata, timeout=30))  # a unary one raises before
    refused = ServiceError.from_rpc_error(raised.value)
    assert refused is not None
    assert refused.reason == "UNAUTHENTICATED"
    assert refused.code is grpc.StatusCode.UNAUTHENTICATED
    assert "authorization: Bearer KEY" in refused.message


def test_health_and_reflection_are_open(guarded: Stack) -> None:
    with client_of(guarded, None) as client:
        assert client.health().serving
    with grpc.insecure_channel(guarded.address, CHANNEL_OPTIONS) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = stub.ServerReflectionInfo(iter([asked]), timeout=30)
    names = {service.name for service in reply.list_services_response.service}
    assert "octavo.v1.Inference" in names


def test_a_file_that_others_may_read_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"acme {ACME}\n")
    path.chmod(0o644)
    started = subprocess.run(
        [
            *(sys.executable, "-m", "scheduler_svc", f"--address=unix:{tmp_path}/s.sock"),
            *("--kvmem=unix:/nobody", "--worker=unix:/nobody", f"--api-keys={path}"),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert started.returncode == 2
    assert "chmod 600" in "".join(started.stderr.split("│")).replace("\n", "")


# ---- two tenants ----


def test_one_id_two_tenants_two_requests(guarded: Stack) -> None:
    params = greedy(450)
    with (
        client_of(guarded, ACME) as acme,
        client_of(guarded, OTHER) as other,
        acme.stream(PROMPT, params, request_id="same") as mine,
        other.stream(token_prompt(30, salt=3), params, request_id="same") as theirs,
    ):
        assert next(mine).request_id == next(theirs).request_id == "same"
        for client, num_prompt_tokens in ((acme, 20), (other, 30)):
            (summary,) = client.list_requests()
            assert summary.request_id == "same"
            assert summary.num_prompt_tokens == num_prompt_tokens
        assert tenants_in_kvmem(guarded) == {
            ("acme/same", "acme"),
            ("other/same", "other"),
        }
        # Nor does it help to know what it is called inside.
        for name in ("acme/same", "/same", "default/same"):
            assert not other.abort(name)
        assert other.abort("same")
        with pytest.raises(octavo.NotFoundError):
            list(theirs)
        assert next(mine).candidates
        assert not other.abort("same")
        assert acme.abort("same")
    guarded.wait_until_empty()


def tenants_in_kvmem(stack: Stack) -> set[tuple[str, str]]:
    with grpc.insecure_channel(stack.addresses["kvmem"], CHANNEL_OPTIONS) as channel:
        stub = kvmem_pb2_grpc.KvMemoryStub(channel)
        listed = stub.ListSequences(kvmem_pb2.ListSequencesRequest(), timeout=30)
    return {(sequence.request_id, sequence.tenant) for sequence in listed.sequences}


def test_nobody_attaches_to_another_tenants_request(guarded: Stack) -> None:
    """Not even with all that its caller knows: the same words are a request of their own."""
    request = pb.GenerateRequest(request_id="mine")
    request.prompt_token_ids.ids.extend(PROMPT)
    request.params.max_tokens = 300
    request.params.ignore_eos = True
    request.attachment.secret = b"known to both"
    request.attachment.detach_ttl_ms = 10_000
    with grpc.insecure_channel(guarded.address, CHANNEL_OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        mine, theirs = (
            stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),), timeout=60)
            for key in (ACME, OTHER)
        )
        seeds = next(mine).seed, next(theirs).seed
        assert seeds[0] != seeds[1]
        assert next(mine).deltas
        mine.cancel()
        theirs.cancel()
    with client_of(guarded, ACME) as acme, client_of(guarded, OTHER) as other:
        assert acme.abort("mine")
        assert other.abort("mine")
    guarded.wait_until_empty()


def test_a_request_stays_its_tenants_when_the_scheduler_dies(guarded: Stack) -> None:
    with client_of(guarded, ACME) as acme, client_of(guarded, OTHER) as other:
        alone = acme.generate(PROMPT, greedy(300)).candidates[0].token_ids
        with acme.stream(PROMPT, greedy(300), request_id="survivor", cache_salt="s") as chunks:
            token_ids = [token for _ in range(3) for token in tokens_of(next(chunks))]
            guarded.kill("scheduler")
            guarded.start("scheduler")
            guarded.wait_until_serving()
            assert other.list_requests() == ()
            assert not other.abort("survivor")
            token_ids += [token for chunk in chunks for token in tokens_of(chunk)]
    assert tuple(token_ids) == alone
    guarded.wait_until_empty()


def tokens_of(chunk: octavo.Chunk) -> tuple[int, ...]:
    return tuple(token for part in chunk.candidates for token in part.token_ids)


# ---- the file again ----


def test_the_keys_are_read_again_when_told_and_a_bad_file_changes_nothing(
    guarded: Stack, keys_file: Path
) -> None:
    def reload(text: str, until: str) -> None:
        count = guarded.log_path("scheduler").read_text().count(until)
        keys_file.write_text(text)
        os.kill(guarded.processes["scheduler"].pid, signal.SIGHUP)
        wait_until(lambda: guarded.log_path("scheduler").read_text().count(until) > count, until)

    with client_of(guarded, ACME) as former, client_of(guarded, LATER) as later:
        with former.stream(PROMPT, greedy(150), detach_ttl_s=0) as chunks:
            next(chunks)
            reload(f"acme {LATER}\nother {OTHER}\n", "API keys read again")
            assert tokens_of(list(chunks)[-1])  # what was begun goes on
        with pytest.raises(octavo.UnauthenticatedError):
            former.model()
        assert later.model().name
        reload("acme oops", "the API keys stay as they were")
        assert later.model().name
        reload(f"acme {ACME}\nother {OTHER}\n", "API keys read again")
        assert former.model().name


def test_no_key_is_in_any_log(guarded: Stack) -> None:
    with client_of(guarded, ACME) as acme:
        acme.generate(PROMPT, greedy(2))
    with pytest.raises(octavo.UnauthenticatedError), client_of(guarded, "a-wrong-key") as wrong:
        wrong.generate(PROMPT, greedy(2))
    logs = "".join(guarded.log_path(name).read_text() for name in guarded.processes)
    assert "attached" in logs
    for key in (ACME, OTHER, LATER, "a-wrong-key"):
        assert key not in logs


# ---- quotas ----


@pytest.fixture(scope="module")
def limited(tiny_model: Path, keys_file: Path) -> Iterator[Stack]:
    with Stack(
        model=tiny_model,
        num_blocks=256,
        worker=TINY_WORKER,
        kvmem=("--tenant-max-blocks=24", "--tenant-max-sequences=3"),
        scheduler=(f"--api-keys={keys_file}",),
    ) as stack:
        yield stack


def test_what_can_never_fit_a_quota_is_refused_and_nobody_else_notices(limited: Stack) -> None:
    too_long, too_many = token_prompt(24 * 16 + 1), greedy(20, n=4)
    with (
        client_of(limited, ACME) as acme,
        client_of(limited, OTHER) as other,
        other.stream(PROMPT, greedy(100)) as theirs,
    ):
        next(theirs)
        with pytest.raises(octavo.OverloadedError, match="needs 25 blocks, the quota") as refused:
            acme.generate(too_long, greedy(20))
        assert refused.value.reason == "TENANT_QUOTA"
        with pytest.raises(octavo.OverloadedError, match="wants 4 more, its quota is 3") as refused:
            acme.generate(PROMPT, too_many)
        assert refused.value.reason == "TENANT_QUOTA"
        assert len(acme.generate(PROMPT, greedy(20, n=3)).candidates) == 3
        assert sum(len(tokens_of(chunk)) for chunk in theirs) == 100
    limited.wait_until_empty()


def test_what_does_not_fit_a_quota_now_waits_for_its_own_tenant(limited: Stack) -> None:
    """They need 5 and 20 of the 24 blocks their tenant may have. The pool has room for both, and
    the second one would begin long before the first one ends."""
    small, large, params = token_prompt(80, salt=7), token_prompt(310, salt=8), greedy(16)
    with (
        client_of(limited, ACME) as acme,
        client_of(limited, OTHER) as other,
        acme.stream(small, greedy(300), request_id="first") as first,
    ):
        next(first)
        assert next(first).candidates
        with acme.stream(large, params, request_id="second") as second:
            assert len(other.generate(PROMPT, params).candidates[0].token_ids) == 16
            next(second)
            num_tokens = len(tokens_of(next(second)))
            statuses = {each.request_id: each.status for each in acme.list_requests()}
            assert statuses.get("first", "finished") == "finished"
            assert num_tokens + sum(len(tokens_of(chunk)) for chunk in second) == 16
        assert sum(len(tokens_of(chunk)) for chunk in first) > 0
    limited.wait_until_empty()
