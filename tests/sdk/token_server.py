"""An inference server to be killed: it goes on after what a caller has received.

    python -m tests.sdk.token_server SOCKET STALL_AFTER

A stream that has brought STALL_AFTER chunks brings no more, and does not end either. Token k of
candidate i is a function of seed, i and k, so every server makes the same ones.
"""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc, types_pb2
from tests.sdk.by_call import ByCall

NUM_PROMPT_TOKENS = 7
TOKEN_INTERVAL_S = 0.004


def token(seed: int, index: int, position: int) -> int:
    return (seed * 31 + index * 1009 + position * 7919) % 50_000


class TokenServer(ByCall):
    def __init__(self, stall_after: int) -> None:
        self._stall_after = stall_after

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateReply]:
        attachment, params = request.attachment, request.params
        seed = attachment.drawn_seed if attachment.HasField("drawn_seed") else secrets.randbits(40)
        yield pb.GenerateReply(
            request_id=request.request_id, seed=seed, num_prompt_tokens=NUM_PROMPT_TOKENS
        )
        received = {each.index: each for each in attachment.received}
        positions = {
            index: len(received[index].token_ids) if index in received else 0
            for index in range(params.n)
            if index not in received or not received[index].finish_reason
        }
        for _ in range(self._stall_after):
            if not positions:
                return
            time.sleep(TOKEN_INTERVAL_S)
            deltas = []
            for index, position in list(positions.items()):
                ends = position + 1 == params.max_tokens - 10 * index
                deltas.append(
                    pb.CandidateDelta(
                        index=index,
                        text=f"{position},",
                        token_ids=[token(seed, index, position)],
                        token_offset=position,
                        cumulative_logprob=-(position + 1.0),
                        finish_reason=types_pb2.FINISH_REASON_LENGTH if ends else None,
                    )
                )
                positions[index] += 1
                if ends:
                    del positions[index]
            yield pb.GenerateReply(deltas=deltas)
        time.sleep(3600)


def main(socket: str, stall_after: int) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    inference_pb2_grpc.add_InferenceServicer_to_server(TokenServer(stall_after), server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    print("listening", flush=True)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
