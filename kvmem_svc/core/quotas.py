"""Quotas of tenants: what an op is told that would give one of them too much."""

from __future__ import annotations

from collections.abc import Mapping

from kvmem_svc.core.batch import OpResult, OpStatus
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.sequences import SequenceTable
from kvmem_svc.core.slots import SlotPlan, blocks_by_tenant
from kvmem_svc.core.tenants import Quota, Tenants


def too_many_sequences(quota: Quota, tenants: Tenants, name: str, count: int) -> OpResult | None:
    """What an op is told that would make `count` more."""
    limit = quota.max_sequences
    number = tenants.numbers.get(name)
    current = tenants.tenant(number).num_sequences if number is not None else 0
    if not limit or current + count <= limit:
        return None
    return OpResult(
        OpStatus.TENANT_QUOTA,
        f"tenant {name!r} has {current} sequences and wants {count} more, its quota is {limit}",
    )


def too_long_a_prompt(quota: Quota, name: str, num_tokens: int, block_size: int) -> OpResult | None:
    """What an Arrive is told whose prompt would wait for blocks that its tenant never gets."""
    num_blocks = -(-num_tokens // block_size)
    if not quota.max_blocks or num_blocks <= quota.max_blocks:
        return None
    return OpResult(
        OpStatus.TENANT_QUOTA,
        f"the prompt needs {num_blocks} blocks, the quota of tenant {name!r} is {quota.max_blocks}",
    )


def too_many_blocks(
    quota: Quota, tenants: Tenants, pool: BlockPool, num_blocks_of: Mapping[int, int], op: str
) -> OpResult | None:
    """What an op is told that would take so many blocks more, by number of a tenant."""
    limit = quota.max_blocks
    if not limit:
        return None
    for number, count in num_blocks_of.items():
        current = int(pool.num_blocks_of[number])
        if count and current + count > limit:
            return OpResult(
                OpStatus.TENANT_QUOTA,
                f"{op}: tenant {tenants.tenant(number).name!r} has {current} blocks and needs"
                f" {count} more, its quota is {limit}",
            )
    return None


def exceeds(quota: Quota, sequences: SequenceTable, pool: BlockPool, plan: SlotPlan) -> bool:
    """Whether a plan is too much for the quota of any tenant."""
    limit = quota.max_blocks
    if not limit or not plan.num_blocks:
        return False
    needed = blocks_by_tenant(sequences, plan)
    current = pool.num_blocks_of[: needed.size]
    return bool(((current + needed > limit) & (needed > 0)).any())
