"""The block tables in words: what is drawn is what happened, and nothing else."""

from __future__ import annotations

import io

from rich.console import Console, Group

from octavo import admin_types as kv
from octavo.cli import render
from octavo.cli.block_mirror import RequestStory
from octavo.types import Candidate, FinishReason, PoolGeometry
from tests.cli.test_block_mirror import (
    NOTHING_SEEN,
    admit,
    arrive,
    batch,
    fork,
    free,
    ok,
    two_candidates,
)

GEOMETRY = PoolGeometry(8, 4, 64, 1024, "float32", 0)


def text_of(*renderables: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(Group(*renderables))  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def story_of(events: list[kv.Event]) -> RequestStory:
    story = RequestStory("r")
    for event in events:
        story.apply(event)
    return story


def rows(story: RequestStory) -> list[list[str]]:
    copied_from = frozenset(copy.src_block_id for copy in story.copies)
    drawn = text_of(render.block_tables(story.widest, 4, copied_from))
    cells = [line.strip("│").split("│") for line in drawn.splitlines() if "–" in line]
    return [[" ".join(cell.split()) for cell in row] for row in cells]


def words(story: RequestStory) -> str:
    return " ".join(text_of(*render.story_lines(story, 4), width=1000).split())


def stats(num_free_blocks: int) -> kv.PoolStats:
    levels = kv.PoolLevels(num_free_blocks, 0, 8 - num_free_blocks, 0, 0, 9)
    return kv.PoolStats(GEOMETRY, levels, 0, 0, 0, 0, 0, 0, 0, 0, "k", "w")


def test_two_answers_side_by_side() -> None:
    assert rows(story_of(two_candidates())) == [
        ["0 – 3", "block 5 shared, ref_count 2", "block 5 shared, ref_count 2"],
        ["4 – 7", "block 6 shared, ref_count 2", "block 6 shared, ref_count 2"],
        ["8 – 11", "block 0 copied from block 7", "block 7 the original"],
        ["12 – 15", "block 1 new", "block 2 new"],
    ]


def test_the_story_in_sentences() -> None:
    told = words(story_of(two_candidates()))
    assert "The prompt is 10 tokens long." in told
    assert "fills 2 blocks and 2 of the 4 places of one more" in told
    assert "2 blocks of it are shared: all 2 answers point at the same memory." in told
    assert "before answer A wrote there, it was copied on write: block 7 → block 0" in told
    assert "(step 4)" in told
    assert "new blocks were added one at a time: 1, 2" in told
    assert "6 physical blocks instead of 8" in told
    assert "preempted" not in told


def test_no_copy_is_explained_only_when_the_prompt_ends_with_its_block() -> None:
    def told(num_prompt_tokens: int) -> str:
        return words(
            story_of(
                [
                    NOTHING_SEEN,
                    batch(arrive(1, num_prompt_tokens=num_prompt_tokens), step_id=1),
                    batch(admit(1, 5, 6), step_id=2),
                    batch(fork(1, 2, 5, 6), step_id=3),
                    batch(step_id=4, deltas=((1, 2, 0), (2, 2, 1))),
                ]
            )
        )

    assert "No block was copied: the prompt ends exactly at a block's end" in told(8)
    assert "fills 2 blocks." in told(8)
    assert "No block was copied." in told(7)


def test_what_came_after_one_answer_had_ended() -> None:
    events = two_candidates()
    events[7:7] = [batch(step_id=7, deltas=((1, 4, 2),))]  # takes block 2, which B gave back
    story = story_of(events)
    assert "answer A went on and took block 2." in words(story)
    assert [row[0] for row in rows(story)] == ["0 – 3", "4 – 7", "8 – 11", "12 – 15"]
    assert "all 6 blocks went back to the pool: 0, 1, 2, 5, 6, 7." in text_of(
        render.given_back_line(story)
    )


def test_a_block_that_did_not_come_back_is_named() -> None:
    story = story_of(two_candidates()[:7])
    assert "Blocks 0, 1, 5, 6 were NOT given back." in text_of(render.given_back_line(story))


def test_a_preemption_is_told() -> None:
    events = two_candidates()[:6]
    events.append(batch(ok(kv.Preempt((1, 2))), step_id=6))
    assert "was preempted 1 time" in words(story_of(events))


def test_the_pool_before_at_its_fullest_and_after() -> None:
    drawn = text_of(render.pool_table(stats(8), story_of(two_candidates()), stats(8)))
    lines = [line.replace("│", " ").split() for line in drawn.splitlines()]
    assert ["before", "8", "0", "0", "0", "8"] in lines
    assert ["at", "its", "fullest", "2", "0", "6", "0", "8"] in lines
    assert ["after", "8", "0", "0", "0", "8"] in lines


def test_where_answers_part() -> None:
    def candidate(index: int, *token_ids: int) -> Candidate:
        return Candidate(index, "x", token_ids, FinishReason.STOP, None, 0.0)

    def told(*token_ids: tuple[int, ...]) -> str:
        answers = [candidate(index, *ids) for index, ids in enumerate(token_ids)]
        return text_of(render.parting_line(answers)).strip()

    assert told((1, 2), (3, 2)) == "They differ from their first token on."
    assert told((1, 2), (1, 3)) == "They begin with the same 1 token, then they part."
    assert told((1, 2, 3), (1, 2)) == "They begin with the same 2 tokens, then they part."
    assert told((1, 2), (1, 2)) == "They are the same, token for token."


def test_a_model_cannot_write_escape_sequences_to_the_terminal() -> None:
    answer = Candidate(0, "\x1b[2J[bold]x", (1,), FinishReason.STOP, None, 0.0)
    assert "␛[2J[bold]x" in text_of(render.answers([answer]))


def test_the_last_free_of_both_gives_every_block_back_once() -> None:
    events = [*two_candidates()[:6], batch(free(1, 2), step_id=6)]
    assert "all 6 blocks went back" in text_of(render.given_back_line(story_of(events)))
