"""Checks of chapter 4, continuous batching: each takes the learner's function and prints a diagnosis.

Invariant: a check returns True or False and never raises; an unsolved exercise prints the same line every time.
"""

from __future__ import annotations

from ..exercises import Function
from .ch04_batches import PADDING_SHARE, THROUGHPUT_BOUND
from .ch04_rows import MAY_ATTEND, PACK
from .ch04_schedule import SCHEDULE

EXERCISES = (PADDING_SHARE, PACK, SCHEDULE, MAY_ATTEND, THROUGHPUT_BOUND)


def check_padding_share(padding_share: Function) -> bool:
    """Checks `padding_share(prompt_lens, output_lens) -> float`: of what one padded static batch computes, the share
    that no request needed.

    Every row computes longest prompt + longest answer - 1 columns: the pass over the prompts gives the first token of
    each answer, and each later pass feeds one token back.
    """
    return PADDING_SHARE.check(padding_share)


def check_pack(pack: Function) -> bool:
    """Checks `pack(chunks) -> (input_ids, position_ids, last_rows)`, the packed row of a step as three flat lists.

    chunks: [(token_ids, num_computed)], the new tokens of each request and how many it has in the cache already.
    last_rows: where in the row each request's last token stands.
    """
    return PACK.check(pack)


def check_schedule(schedule: Function) -> bool:
    """Checks `schedule(running, waiting, budget, max_num_seqs) -> {id: tokens}`, one step of a scheduler.

    running: [(id, left)], where left is how much of its prompt is not computed yet; 0: it decodes. waiting: [(id,
    prompt_len)] in order of arrival. First one token for each that decodes; then running prompts, in order, as much of
    each as the budget has left; then the front of the queue, while budget is left and fewer than max_num_seqs run.
    """
    return SCHEDULE.check(schedule)


def check_may_attend(may_attend: Function) -> bool:
    """Checks `may_attend(owner, position) -> bools [T][T]`: may token i of a packed row look at token j?

    owner, position: for each of the T tokens its request, and its place in the text of that request.
    """
    return MAY_ATTEND.check(may_attend)


def check_throughput_bound(throughput_bound: Function) -> bool:
    """Checks `throughput_bound(weight_bytes, kv_bytes_per_request, batch, bandwidth) -> tokens per second`.

    A decode step reads all weights once and the cache of each of `batch` requests, at `bandwidth` bytes a second.
    """
    return THROUGHPUT_BOUND.check(throughput_bound)
