"""A process dies or stops in the middle of sixteen streams: nobody loses, repeats or changes a
token, and no block stays behind."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from octavo import Client, Generation
from tests.system.stack import STANDBY, Stack, wait_until
from tests.system.survival import LEASE_TTL_MS, Shape, make_whole, running


@pytest.fixture(autouse=True)
def whole(mortal: Stack) -> None:
    make_whole(mortal)


def both_schedulers(stack: Stack) -> list[str]:
    return [stack.address, stack.addresses[STANDBY]]


# ---- deaths ----


def test_b01_the_scheduler_is_killed_and_the_standby_takes_over(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    mortal.start_standby()
    with running(mortal, expected, both_schedulers(mortal)):
        before = mortal.session_stats()
        mortal.kill("scheduler")
    after = mortal.session_stats()
    assert after.holder_address == mortal.addresses[STANDBY]
    assert (after.epoch, after.kvmem_boot_id) == (before.epoch + 1, before.kvmem_boot_id)


def test_the_scheduler_is_killed_and_started_again(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    with running(mortal, expected):
        before = mortal.session_stats()
        mortal.kill("scheduler")
        mortal.start("scheduler")
    assert mortal.session_stats().epoch == before.epoch + 1


def test_the_scheduler_is_killed_again_and_again(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    """Also while it takes over, and before any caller has come back to it."""
    with running(mortal, expected) as streams:
        for pause_s in (0.0, 0.3, 0.6):
            mortal.kill("scheduler")
            mortal.start("scheduler")
            time.sleep(pause_s)
        streams.wait_until_they_go_on()
        mortal.kill("scheduler")
        mortal.start("scheduler")


def test_kvmem_is_killed_and_has_its_journal(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    with running(mortal, expected):
        before = mortal.session_stats()
        mortal.kill("kvmem")
        mortal.start("kvmem")
    after = mortal.session_stats()
    # The same state, and the same session went on with it: nothing was computed again.
    assert (after.kvmem_boot_id, after.epoch) == (before.kvmem_boot_id, before.epoch)
    assert after.num_preemptions == before.num_preemptions
    assert after.num_batches > before.num_batches


def test_kvmem_is_killed_and_its_journal_is_gone(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    with running(mortal, expected):
        before = mortal.session_stats()
        mortal.kill("kvmem")
        mortal.delete_journal()
        mortal.start("kvmem")
    assert mortal.session_stats().kvmem_boot_id != before.kvmem_boot_id


def test_the_worker_is_killed(mortal: Stack, expected: Mapping[Shape, Generation]) -> None:
    with running(mortal, expected):
        before = mortal.session_stats()
        mortal.kill("worker")
        mortal.start("worker")
    assert mortal.session_stats().worker_boot_id != before.worker_boot_id


def test_the_worker_is_killed_while_kvmem_is_down(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    with running(mortal, expected):
        mortal.kill("kvmem")
        mortal.kill("worker")
        mortal.start("kvmem", "worker")


def test_scheduler_and_kvmem_are_killed_together(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    with running(mortal, expected):
        before = mortal.session_stats()
        mortal.kill("scheduler")
        mortal.kill("kvmem")
        mortal.start("kvmem", "scheduler")
    after = mortal.session_stats()
    assert (after.kvmem_boot_id, after.epoch) == (before.kvmem_boot_id, before.epoch + 1)


def test_scheduler_and_kvmem_are_killed_and_the_journal_is_gone(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    """Only the callers know what they asked for, and what they have."""
    with running(mortal, expected):
        mortal.kill("scheduler")
        mortal.kill("kvmem")
        mortal.delete_journal()
        mortal.start("kvmem", "scheduler")


# ---- pauses ----


def wait_until_the_lease_is_over(stack: Stack) -> None:
    wait_until(lambda: stack.session_stats().orphaned_ms > 0, "the session's lease ends")


def test_the_scheduler_sleeps_past_its_lease(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    with running(mortal, expected):
        before = mortal.session_stats()
        mortal.pause("scheduler")
        wait_until_the_lease_is_over(mortal)
        mortal.go_on("scheduler")
    # It may not go on as if nothing had been: it has taken over from itself.
    assert mortal.session_stats().epoch > before.epoch


def test_b06_the_scheduler_wakes_up_and_another_one_has_taken_over(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    mortal.start_standby()
    with (
        running(mortal, expected, both_schedulers(mortal)),
        Client(mortal.addresses[STANDBY]) as other,
    ):
        mortal.pause("scheduler")
        wait_until(lambda: other.health().serving, "the standby takes over")
        # It wakes up with a batch and a step under way, which nobody may take from it any more.
        mortal.go_on("scheduler")
        wait_until(lambda: not mortal.is_serving(), "the former one has noticed")
    assert mortal.session_stats().holder_address == mortal.addresses[STANDBY]
    assert other_is_the_standby_now(mortal)


def other_is_the_standby_now(stack: Stack) -> bool:
    with Client(stack.addresses["scheduler"]) as client:
        return not client.health().serving


def test_kvmem_sleeps_for_longer_than_a_lease(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    with running(mortal, expected):
        before = mortal.session_stats()
        mortal.pause("kvmem")
        time.sleep(1.5 * LEASE_TTL_MS / 1000)
        mortal.go_on("kvmem")
    # Its own sleep is nobody's silence.
    assert mortal.session_stats().epoch == before.epoch
