"""Two steps at the worker at a time: the second goes on with what the first draws."""

from __future__ import annotations

import numpy as np

from octavo.service.columns import I32, unpack
from octavo.v1 import worker_pb2
from tests.worker.process import request, start
from tests.worker.stage import DEADLINE_S, Stage, failure_of


def drawn(reply: worker_pb2.ExecuteReply) -> list[int]:
    return unpack(reply.sampled_token_ids, I32).tolist()


def test_the_second_is_there_before_the_first_has_ended(on_stage):
    async def act(stage: Stage) -> None:
        stream = stage.stub.Execute(timeout=DEADLINE_S)
        await stage.hold()
        prompt = request(stage.fence(1), 1, [(1, 1, 0, [5, 6, 7], 1)], starts=[start(1, [0, 1])])
        await stream.write(prompt)
        await stage.until_began()
        # The model works on the prompt; what it will draw is not known to anybody.
        await stream.write(request(stage.fence(1), 2, [(1, 1, 3, [-1], 1)]))
        await stream.write(request(stage.fence(1), 3, [(1, 1, 4, [-1], 1)]))
        stage.gate.set()
        ahead = [await stream.read() for _ in range(3)]
        assert [reply.step_id for reply in ahead] == [1, 2, 3]

        one_by_one = stage.stub.Execute(timeout=DEADLINE_S)
        tokens, position = [5, 6, 7], 0
        for number, reply in enumerate(ahead):
            starts = [] if number else [start(1, [2, 3])]
            rows = [(1, 1, position, tokens, 1)]
            await one_by_one.write(request(stage.fence(2), 4 + number, rows, starts=starts))
            alone = await one_by_one.read()
            assert drawn(alone) == drawn(reply)
            assert np.allclose(
                np.frombuffer(alone.logprobs, "<f4"), np.frombuffer(reply.logprobs, "<f4")
            )
            position += len(tokens)
            tokens = drawn(alone)

    on_stage(act)


def test_a_step_that_fails_ends_the_stream_and_those_behind_it(on_stage):
    async def act(stage: Stage) -> None:
        stream = stage.stub.Execute(timeout=DEADLINE_S)
        await stage.hold()
        await stream.write(stage.one_token(1, 1))
        await stage.until_began()
        # It goes on from a position at which nothing was drawn.
        await stream.write(request(stage.fence(1), 2, [(1, 1, 2, [-1], 1)]))
        stage.gate.set()
        assert (await stream.read()).step_id == 1
        assert await failure_of(stream) == "INVALID_BATCH"
        again = stage.stub.Execute(timeout=DEADLINE_S)
        await again.write(stage.one_token(1, 3))
        assert (await again.read()).step_id == 3

    on_stage(act)
