"""How much of real prompts the prefix cache finds, against what LRU and a clairvoyant would.

    python -m benchmarks.prefix [--traces DIR] [--quick]

Replays the Mooncake traces (Qin et al., FAST '25) through the memory core's batches, request by
request in file order: Arrive, Admit, Commit of the whole prompt, Free, Confirm. Blocks have 512
tokens, as the traces' hash ids stand for; token ids are made from those. Output tokens are left
out, requests do not overlap.

The oracle is an LRU of hash ids, by the method that comes with the traces: the leading ids in the
cache count as hits, min(512 * n, input_length) tokens; then every id of the request is touched or
inserted front to back, the last used longest ago goes out. It caches partial last blocks, which
the memory service never does. The clairvoyant bound (Belady 1966) throws out what is needed
furthest in the future, and knows it from the trace.
Ends with one JSON line; hit ratios are percent of prompt tokens.
"""

from __future__ import annotations

import gzip
import heapq
import json
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvmem_svc.core import batch as b
from kvmem_svc.core.invariants import check_integrity
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import ApplyBatch, ConfirmPool, GrantSession

BLOCK_SIZE = 512
MAX_MODEL_LEN = 2**18
TRACES = ("conversation", "synthetic")
POOLS = {"1k": 1_000, "10k": 10_000, "50k": 50_000}
WHERE = (
    "mooncake_{0}.jsonl.gz is not in {1}: it is FAST25-release/traces/{0}_trace.jsonl of"
    " github.com/kvcache-ai/Mooncake, gzipped; give its folder with --traces or OCTAVO_TRACES"
)


@dataclass(frozen=True)
class Prompt:
    """hash_ids: one for each 512 tokens begun; equal ids, equal prefixes."""

    num_tokens: int
    hash_ids: tuple[int, ...]


def read(folder: Path, name: str) -> list[Prompt]:
    """The prompts of a trace, in order."""
    path = folder / f"mooncake_{name}.jsonl.gz"
    if not path.exists():
        sys.exit(WHERE.format(name, folder))
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [Prompt(row["input_length"], tuple(row["hash_ids"])) for row in rows]


# --- the memory service ----------------------------------------------------------------


class Replay:
    """One memory core with one pool; a prompt after the other."""

    def __init__(self, num_blocks: int) -> None:
        self.memory = KvMemory("bench", max_sequences=4)
        self.memory.commit(GrantSession("bench"))
        geometry = b.PoolGeometry(num_blocks, BLOCK_SIZE, MAX_MODEL_LEN)
        self.memory.commit(ConfirmPool("worker", geometry))
        self.num_prompts = 0

    def apply(self, *ops: b.Op) -> b.BatchResult:
        ledger, step = self.memory.ledger, self.memory.last_step_id + 1
        batch = b.Batch(ledger.fence(), ledger.next_batch_seq, step, step - 1, ops, b"")
        result = self.memory.commit(ApplyBatch(batch))
        assert isinstance(result, b.BatchResult)
        assert all(one.status == b.OpStatus.OK for one in result.results), result.results
        return result

    def serve(self, prompt: Prompt) -> int:
        """Tokens of the prompt that need not be computed."""
        self.num_prompts += 1
        name = f"r{self.num_prompts}"
        arrived = self.apply(b.Arrive(name, token_ids(prompt))).results[0].value
        assert isinstance(arrived, b.Arrived)
        sequence_id = arrived.sequence_id
        member = b.AdmitMember(sequence_id, prompt.num_tokens, use_prefix_cache=True)
        admitted = self.apply(b.Admit([member])).results[0].value
        assert isinstance(admitted, b.Admitted)
        ids, computed = np.array([sequence_id], np.uint64), np.array([prompt.num_tokens], np.int32)
        none = np.zeros(1, np.int32)
        self.apply(b.Commit(ids, b.NO_INT32, computed, none))
        self.apply(b.Free([sequence_id], b.FinishReason.LENGTH), b.Confirm(name))
        return admitted.tables[0].num_computed_tokens


def token_ids(prompt: Prompt) -> b.Column:
    """Equal for equal hash ids, and for no others; int32[num_tokens]."""
    offsets = np.arange(BLOCK_SIZE, dtype=np.int32)
    firsts = np.array(prompt.hash_ids, np.int32) * 1_009
    return (firsts[:, np.newaxis] + offsets).reshape(-1)[: prompt.num_tokens]


def replay(prompts: list[Prompt], num_blocks: int) -> float:
    memory = Replay(num_blocks)
    num_hit = sum(map(memory.serve, prompts))
    assert memory.memory.manager is not None
    check_integrity(memory.memory.manager)
    return hit_ratio(prompts, num_hit)


# --- oracles ---------------------------------------------------------------------------


def hit_ratio(prompts: list[Prompt], num_hit_tokens: int) -> float:
    """Percent of prompt tokens."""
    return 100 * num_hit_tokens / sum(prompt.num_tokens for prompt in prompts)


def num_leading(prompt: Prompt, cached: OrderedDict[int, None] | dict[int, int]) -> int:
    """Tokens of the leading ids that are in the cache."""
    num_blocks = 0
    for hash_id in prompt.hash_ids:
        if hash_id not in cached:
            break
        num_blocks += 1
    return min(BLOCK_SIZE * num_blocks, prompt.num_tokens)


def lru(prompts: list[Prompt], num_blocks: int) -> float:
    cached: OrderedDict[int, None] = OrderedDict()
    num_hit = 0
    for prompt in prompts:
        num_hit += num_leading(prompt, cached)
        for hash_id in prompt.hash_ids:
            if hash_id in cached:
                cached.move_to_end(hash_id)
            else:
                if len(cached) == num_blocks:
                    cached.popitem(last=False)
                cached[hash_id] = None
    return hit_ratio(prompts, num_hit)


def next_uses(prompts: list[Prompt]) -> list[list[int]]:
    """For every id of every prompt the number of the next prompt that has it."""
    never = len(prompts)
    seen: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(prompts) - 1, -1, -1):
        uses.append([seen.get(hash_id, never) for hash_id in prompts[number].hash_ids])
        seen |= dict.fromkeys(prompts[number].hash_ids, number)
    return uses[::-1]


def belady(prompts: list[Prompt], num_blocks: int) -> float:
    """Of ids needed equally late the one further back in its prompt goes out: a prefix is worth
    nothing without its beginning. What nobody needs again is not kept."""
    cached: dict[int, int] = {}
    order: list[tuple[int, int, int]] = []
    num_hit = 0
    for prompt, uses in zip(prompts, next_uses(prompts), strict=True):
        num_hit += num_leading(prompt, cached)
        for position, (hash_id, use) in enumerate(zip(prompt.hash_ids, uses, strict=True)):
            cached[hash_id] = use
            heapq.heappush(order, (-use, -position, hash_id))
        for hash_id in furthest(order, cached, num_blocks):
            del cached[hash_id]
    return hit_ratio(prompts, num_hit)


def furthest(
    order: list[tuple[int, int, int]], cached: dict[int, int], num_blocks: int
) -> Iterator[int]:
    """Ids to throw out until the rest fits."""
    while len(cached) > num_blocks:
        use, _, hash_id = heapq.heappop(order)
        if cached.get(hash_id) == -use:
            yield hash_id


# --- the report ------------------------------------------------------------------------


def main(
    traces: Annotated[
        Path, typer.Option(envvar="OCTAVO_TRACES", help="Folder of the Mooncake traces.")
    ] = Path("../shared/traces"),
    quick: Annotated[bool, typer.Option(help="The first thousand prompts of each.")] = False,
) -> None:
    """Measure the prefix cache's hit ratio."""
    report: dict[str, float] = {"block_size": BLOCK_SIZE}
    for name in TRACES:
        prompts = read(traces, name)[: 1000 if quick else None]
        report[f"{name}_prompts"] = len(prompts)
        for pool, num_blocks in POOLS.items():
            ours = replay(prompts, num_blocks)
            by_lru, bound = lru(prompts, num_blocks), belady(prompts, num_blocks)
            print(f"{name} {pool}: {ours:.2f} %, LRU {by_lru:.2f} %, clairvoyant {bound:.2f} %")
            report |= {
                f"{name}_{pool}_hit_pct": round(ours, 2),
                f"{name}_{pool}_lru_pct": round(by_lru, 2),
                f"{name}_{pool}_vs_lru": round(ours / by_lru, 4),
                f"{name}_{pool}_vs_belady": round(ours / bound, 4),
            }
    print(json.dumps(report))


if __name__ == "__main__":
    typer.run(main)
