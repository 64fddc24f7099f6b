"""The mirror of the block tables: folds event streams, and agrees with the real service."""

from __future__ import annotations

from octavo import admin_types as kv
from octavo.cli.block_mirror import BlockMirror, Copy, GivenBack, How, Placed, RequestStory, Slot
from octavo.types import FinishReason

LEVELS = kv.PoolLevels(8, 0, 0, 0, 0, 100)
NOTHING_SEEN = kv.BlockTables((), truncated=False)


def ok(op: kv.Op, outcome: kv.Outcome | None = None) -> kv.AppliedOp:
    return kv.AppliedOp(op, kv.OpStatus.OK, outcome)


def batch(
    *ops: kv.AppliedOp,
    step_id: int = 1,
    deltas: tuple[tuple[int, int, int], ...] = (),
    copies: tuple[tuple[int, int], ...] = (),
    num_free_blocks: int = 8,
) -> kv.AppliedBatch:
    return kv.AppliedBatch(
        step_id,
        step_id,
        step_id - 1,
        ops,
        tuple(kv.TableDelta(*row) for row in deltas),
        tuple(kv.BlockCopy(*row) for row in copies),
        kv.PoolLevels(num_free_blocks, 0, 8 - num_free_blocks, 0, 0, 100),
    )


def arrive(sequence_id: int, request_id: str = "r", num_prompt_tokens: int = 10) -> kv.AppliedOp:
    prompt = tuple(range(num_prompt_tokens))
    return ok(kv.Arrive(request_id, prompt, 2), kv.Arrived(sequence_id, sequence_id))


def admit(sequence_id: int, *block_ids: int) -> kv.AppliedOp:
    return ok(
        kv.Admit((kv.AdmitMember(sequence_id, 4 * len(block_ids), 0, 0),)),
        kv.Admitted((kv.SequenceTable(sequence_id, block_ids),)),
    )


def fork(parent: int, child: int, *block_ids: int) -> kv.AppliedOp:
    return ok(kv.Fork(parent, 1, (7, 8)), kv.Forked((child,), block_ids))


def free(*sequence_ids: int) -> kv.AppliedOp:
    return ok(kv.Free(sequence_ids, None))


def two_candidates() -> list[kv.Event]:
    """A prompt of 10 tokens in blocks of 4: two full blocks, and one half full that is copied."""
    return [
        NOTHING_SEEN,
        batch(arrive(1), step_id=1),
        batch(admit(1, 5, 6, 7), step_id=2, num_free_blocks=5),
        batch(fork(1, 2, 5, 6, 7), step_id=3, num_free_blocks=5),
        batch(step_id=4, deltas=((1, 2, 0),), copies=((7, 0),), num_free_blocks=4),
        batch(step_id=5, deltas=((1, 3, 1), (2, 3, 2)), num_free_blocks=2),
        batch(free(2), step_id=6, num_free_blocks=2),
        batch(free(1), step_id=7, num_free_blocks=4),
        batch(ok(kv.Confirm("r")), step_id=8),
    ]


def test_tables_follow_admit_fork_copy_and_growth() -> None:
    mirror = BlockMirror()
    for event in two_candidates()[:6]:
        mirror.apply(event)
    assert mirror.table(1) == (
        Slot(5, How.ADMITTED),
        Slot(6, How.ADMITTED),
        Slot(0, How.COPIED, src_block_id=7),
        Slot(1, How.ADDED),
    )
    assert mirror.table(2) == (
        Slot(5, How.SHARED),
        Slot(6, How.SHARED),
        Slot(7, How.SHARED),
        Slot(2, How.ADDED),
    )
    assert mirror.ref_counts() == {5: 2, 6: 2, 7: 1, 0: 1, 1: 1, 2: 1}
    assert mirror.sequences_of("r") == {0: 1, 1: 2}


def test_a_shared_block_is_given_back_by_its_last_holder_only() -> None:
    mirror = BlockMirror()
    changes = [mirror.apply(event) for event in two_candidates()]
    assert changes[6] == [GivenBack(6, 2, (7, 2))]
    assert changes[7] == [GivenBack(7, 1, (5, 6, 0, 1))]
    assert mirror.ref_counts() == {}
    assert mirror.sequences_of("r") == {}


def test_both_freed_in_one_op_give_each_block_back_once() -> None:
    mirror = BlockMirror()
    for event in two_candidates()[:6]:
        mirror.apply(event)
    given_back = [
        change.block_ids
        for change in mirror.apply(batch(free(1, 2), step_id=6))
        if isinstance(change, GivenBack)
    ]
    assert sorted(block for blocks in given_back for block in blocks) == [0, 1, 2, 5, 6, 7]


def arrive_again(candidates: dict[int, int]) -> kv.AppliedOp:
    """A request that another life of the service knew; the sequence id of each candidate."""
    sequence_ids = tuple(candidates.values())
    return ok(
        kv.Arrive("r", (1, 2, 3), 4, tuple(candidates)),
        kv.Arrived(sequence_ids[0], 1, sequence_ids),
    )


def test_a_request_that_arrives_with_its_candidates_has_them_all() -> None:
    mirror = BlockMirror()
    mirror.apply(batch(arrive_again({0: 4, 2: 5})))
    assert mirror.sequences_of("r") == {0: 4, 2: 5}
    mirror.apply(batch(admit(4, 0), admit(5, 1)))
    assert mirror.ref_counts() == {0: 1, 1: 1}
    # A child takes the lowest number that is free.
    mirror.apply(batch(fork(4, 6, 0)))
    assert mirror.sequences_of("r") == {0: 4, 2: 5, 1: 6}
    mirror.apply(batch(ok(kv.Confirm("r"))))
    assert mirror.sequences_of("r") == {}
    assert mirror.table(4) == ()


def test_the_number_of_a_pruned_candidate_is_given_again_and_that_of_a_finished_one_is_not() -> (
    None
):
    mirror = BlockMirror()
    mirror.apply(batch(arrive_again({0: 1, 1: 2, 2: 3}), admit(1, 0), admit(2, 1), admit(3, 2)))
    mirror.apply(batch(free(2), ok(kv.Free((3,), FinishReason.STOP))))
    mirror.apply(batch(fork(1, 7, 0)))
    assert mirror.sequences_of("r") == {0: 1, 1: 7, 2: 3}
    mirror.apply(batch(fork(1, 8, 0)))
    assert mirror.sequences_of("r")[3] == 8
    mirror.apply(batch(ok(kv.Confirm("r"))))
    assert mirror.ref_counts() == {}


def test_blocks_go_to_the_host_tier_and_others_come_back() -> None:
    mirror = BlockMirror()
    for event in two_candidates()[:4]:
        mirror.apply(event)
    given_back = mirror.apply(batch(ok(kv.SwapOut((1, 2)))))
    assert [change.block_ids for change in given_back if isinstance(change, GivenBack)] == [
        (),
        (5, 6, 7),
    ]
    tables = (kv.SequenceTable(1, (0, 1, 2)), kv.SequenceTable(2, (0, 1, 3)))
    mirror.apply(batch(ok(kv.SwapIn((1, 2)), kv.SwappedIn(tables))))
    assert mirror.table(2) == (Slot(0, How.SHARED), Slot(1, How.SHARED), Slot(3, How.ADMITTED))
    assert mirror.ref_counts() == {0: 2, 1: 2, 2: 1, 3: 1}


def test_an_op_that_was_refused_changes_nothing() -> None:
    mirror = BlockMirror()
    mirror.apply(batch(arrive(1)))
    refused = kv.AppliedOp(
        kv.Admit((kv.AdmitMember(1, 4, 0, 0),)), kv.OpStatus.NO_FREE_BLOCKS, None
    )
    assert mirror.apply(batch(refused)) == []
    assert mirror.table(1) == ()


def test_a_delta_of_a_sequence_that_the_same_batch_gives_back_is_dropped() -> None:
    mirror = BlockMirror()
    mirror.apply(batch(arrive(1), admit(1, 3)))
    mirror.apply(batch(free(1), deltas=((1, 1, 4),)))
    assert mirror.table(1) == ()
    assert mirror.ref_counts() == {}


def test_preempted_sequences_hold_nothing_and_come_back_sharing() -> None:
    mirror = BlockMirror()
    for event in two_candidates()[:6]:
        mirror.apply(event)
    mirror.apply(batch(ok(kv.Preempt((1, 2))), step_id=6))
    assert mirror.ref_counts() == {}
    members = (kv.AdmitMember(1, 12, 0, 0), kv.AdmitMember(2, 12, 1, 2))
    tables = (kv.SequenceTable(1, (3, 4, 5)), kv.SequenceTable(2, (3, 4, 6)))
    changes = mirror.apply(batch(ok(kv.Admit(members), kv.Admitted(tables)), step_id=7))
    assert [slot.how for slot in mirror.table(2)] == [How.SHARED, How.SHARED, How.ADMITTED]
    assert Placed(7, 2, 2, Slot(6, How.ADMITTED)) in changes


def test_a_snapshot_starts_it_over() -> None:
    view = kv.SequenceView(9, "old", 0, kv.SequenceStatus.RUNNING, 5, 5, 5, 1, (2, 3), (1, 1), None)
    mirror = BlockMirror()
    mirror.apply(batch(arrive(1), admit(1, 3)))
    mirror.apply(kv.BlockTables((view,), truncated=True))
    assert not mirror.complete
    assert mirror.table(1) == ()
    assert mirror.table(9) == (Slot(2, How.SEEN), Slot(3, How.SEEN))


def test_the_story_of_a_request() -> None:
    story = RequestStory("r")
    for event in two_candidates():
        story.apply(event)
    assert story.num_prompt_tokens == 10
    assert story.copies == [Copy(4, candidate=0, table_index=2, src_block_id=7, dst_block_id=0)]
    assert [[e.slot.block_id for e in table] for table in story.widest.tables] == [
        [5, 6, 0, 1],
        [5, 6, 7, 2],
    ]
    assert [[e.ref_count for e in table] for table in story.widest.tables] == [
        [2, 2, 1, 1],
        [2, 2, 1, 1],
    ]
    assert story.widest.num_logical_blocks == 8
    assert story.widest.num_shared_blocks == 2
    assert len(story.widest.block_ids) == 6
    assert sorted(story.given_back) == [0, 1, 2, 5, 6, 7]
    assert story.blocks_used == {0, 1, 2, 5, 6, 7}
    assert story.lowest_levels is not None
    assert story.lowest_levels.num_free_blocks == 2
    assert story.last_levels is not None
    assert story.last_levels.num_free_blocks == 8
    assert story.confirmed


def test_the_story_leaves_other_requests_out() -> None:
    story = RequestStory("r")
    other = [
        batch(arrive(11, "other"), step_id=2),
        batch(admit(11, 3, 4), step_id=2),
        batch(free(11), step_id=9),
    ]
    events = two_candidates()
    for event in (*events[:3], *other[:2], *events[3:7], other[2], *events[7:]):
        story.apply(event)
    assert story.blocks_used == {0, 1, 2, 5, 6, 7}
    assert len(story.widest.tables) == 2


def test_a_prompt_of_whole_blocks_is_never_copied() -> None:
    story = RequestStory("r")
    for event in (
        NOTHING_SEEN,
        batch(arrive(1, num_prompt_tokens=8), step_id=1),
        batch(admit(1, 5, 6), step_id=2),
        batch(fork(1, 2, 5, 6), step_id=3),
        batch(step_id=4, deltas=((1, 2, 0), (2, 2, 1))),
    ):
        story.apply(event)
    assert story.copies == []
    assert story.widest.num_shared_blocks == 2
