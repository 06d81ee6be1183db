"""How paged attention is cut up among the programs of a GPU.

Invariant: a plan follows from shapes and from numbers that the host knows, never from a clock or from what a tensor on
the device holds; any plan is correct, it decides about speed alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import triton


@dataclass(frozen=True)
class AttentionPlan:
    """How attention is cut up: a program has `rows` queries and walks the keys by `tile`."""

    rows: int
    tile: int
    warps: int
    stages: int  # of the pipeline: tables, keys and values of some tiles are on their way while one is worked on
    padded_key: int  # head sizes as tiles have them: powers of 2, and at least the 16 that tensor cores take
    padded_value: int


@functools.lru_cache(maxsize=256)
def plan_decode(group: int, key_dim: int, value_dim: int, itemsize: int, memory: int) -> AttentionPlan:
    """For `group` query heads on a key head; itemsize: bytes of a number in the pools.

    memory: bytes of shared memory that a program may take. Of more than 32 heads several programs take 32 each. The
    tiles were the fastest on an H200; all others are as correct.
    """
    rows = min(32, _padded(group))
    plan = AttentionPlan(rows, 128 if itemsize == 2 else 64, 4, 3, _padded(key_dim), _padded(value_dim))
    return _fitting(plan, itemsize, memory)


@functools.lru_cache(maxsize=256)
def plan_prefill(key_dim: int, value_dim: int, itemsize: int, memory: int) -> AttentionPlan:
    """As `plan_decode`, for chunks of prompts."""
    padded = _padded(key_dim), _padded(value_dim)
    dims = sum(padded)
    if itemsize == 4:
        plan = AttentionPlan(32, 32, 4, 2, *padded)
    elif 128 < dims <= 256 and 128 * dims * itemsize <= memory // 2:
        plan = AttentionPlan(128, 128, 8, 3, *padded)
    else:
        plan = AttentionPlan(64, 128 if dims <= 128 else 64, 4, 3 if dims <= 128 else 2, *padded)
    return _fitting(plan, itemsize, memory)


def _padded(number: int) -> int:
    return max(16, triton.next_power_of_2(number))


def _fitting(plan: AttentionPlan, itemsize: int, memory: int) -> AttentionPlan:
    """`plan`, with as many stages, and tiles as large, as fit into shared memory beside the queries."""
    dims = plan.padded_key + plan.padded_value
    while plan.rows > 16 and plan.rows * dims * itemsize > memory // 2:
        plan = replace(plan, rows=plan.rows // 2)
    memory -= plan.rows * plan.padded_key * itemsize + 1024
    while plan.stages * plan.tile * dims * itemsize > memory:
        if plan.stages > 2 or (plan.tile == 16 and plan.stages > 1):
            plan = replace(plan, stages=plan.stages - 1)
        elif plan.tile > 16:
            plan = replace(plan, tile=plan.tile // 2)
        else:
            break
    return plan


FEW_PARTS = 8  # that the last program of a request merges by itself; of more a kernel of its own is faster


@functools.lru_cache(maxsize=65536)
def plan_splits(requests: int, kv_heads: int, longest: int, sms: int) -> tuple[int, int]:
    """(splits, keys in each): the parts that each request's keys are cut into, from shapes alone.

    All parts have the same size whatever a request's length, so that no program works for much longer than others.
    """
    programs = requests * kv_heads
    splits = round(2 * sms / programs)  # two for each SM: while one waits, the other reads
    # Lengths differ as a rule, and the longest is over last: a limit to what one program does, unless all have plenty.
    splits = max(1, splits, min(triton.cdiv(longest, 2048), triton.cdiv(4 * sms, programs)))
    keys = triton.cdiv(triton.cdiv(longest, splits), 128) * 128
    if longest <= 256 * FEW_PARTS:  # a part of fewer keys costs more to merge than it saves
        keys = max(keys, 256)
    return triton.cdiv(longest, keys), keys
