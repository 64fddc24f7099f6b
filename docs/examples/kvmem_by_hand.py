"""The KV memory service by hand: allocate, append, fork, write (and see the copy), free.

python -m kvmem_svc --address unix:/tmp/kvmem.sock &
python docs/examples/kvmem_by_hand.py unix:/tmp/kvmem.sock
"""

import sys

import grpc
import numpy as np

from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import kvmem_pb2_grpc, types_pb2

kvmem = kvmem_pb2_grpc.KvMemoryStub(grpc.insecure_channel(sys.argv[1]))
opened = kvmem.OpenSession(pb.OpenSessionRequest(holder="by hand"), timeout=10)
fence, step_id = opened.fence, opened.last_step_id + 1


def apply(batch_seq: int, **op) -> pb.BatchResult:
    """One op; no worker runs, so every step counts as done the moment it is prepared."""
    step = pb.StepOps(step_id=step_id, acknowledged_step=step_id, ops=[pb.Op(**op)])
    batch = pb.Batch(fence=fence, batch_seq=batch_seq, step=step)
    reply = kvmem.Apply(batch, timeout=10)
    levels = reply.levels
    print(
        f"{next(iter(op)):8s}{pb.OpStatus.Name(reply.results[0].status)}"
        f"  in use {levels.num_in_use_blocks}, free {levels.num_free_blocks}"
    )
    return reply


def table(sequence_id: int) -> list[int]:
    request = pb.GetBlockTablesRequest(sequence_ids=[sequence_id])
    return list(kvmem.GetBlockTables(request, timeout=10).sequences[0].block_ids)


geometry = types_pb2.PoolGeometry(num_blocks=8, block_size=4, max_model_len=32)
attach = pb.AttachPoolRequest(fence=fence, worker_boot_id="by hand", geometry=geometry)
fence = kvmem.AttachPool(attach, timeout=10).fence

arrive = pb.Arrive(request_id="r1", prompt_token_ids=[11, 12, 13, 14, 15], num_candidates=2)
parent = apply(1, arrive=arrive).results[0].arrived.sequence_id
apply(2, admit=pb.Admit(members=[pb.AdmitMember(sequence_id=parent, num_slots=5)]))
apply(3, append=pb.Append(sequence_id=parent, token_ids=[16]))
fork = pb.Fork(sequence_id=parent, num_children=1)
child = apply(4, fork=fork).results[0].forked.child_sequence_ids[0]
print(f"both share blocks {table(parent)} = {table(child)}")

written = apply(5, append=pb.Append(sequence_id=child, token_ids=[17]))
source = np.frombuffer(written.copies.src_block_ids, "<i4")
copy = np.frombuffer(written.copies.dst_block_ids, "<i4")
print(f"the child's write copied block {source} to {copy}: {table(parent)} and {table(child)}")

apply(6, free=pb.Free(sequence_ids=[parent, child]))
twice = apply(7, free=pb.Free(sequence_ids=[child]))
print(f"a second free is refused: {twice.results[0].message}")
apply(8, confirm=pb.Confirm(request_id="r1"))
kvmem.CloseSession(pb.CloseSessionRequest(fence=fence), timeout=10)
