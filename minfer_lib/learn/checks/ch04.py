"""Exercises of chapter 4, continuous batching: what padding costs, the packed row, the scheduler, what a row gains.

Invariant: expected values were worked out by hand, as the comments say; none comes from the package or the solution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

Lengths = Sequence[int]
Chunks = Sequence[tuple[list[int], int]]
Queue = Sequence[tuple[str, int]]

# -- what nobody needed -----------------------------------------------------------------------------------------------


def _computed(prompts: Lengths, outputs: Lengths) -> int:
    return len(prompts) * (max(prompts) + max(outputs) - 1)


def _needed(prompts: Lengths, outputs: Lengths) -> int:
    return sum(p + o - 1 for p, o in zip(prompts, outputs, strict=True))


def padding_share(prompt_lens: Lengths, output_lens: Lengths) -> float:
    """Of what one padded static batch computes, the share that no request needed.

    Every row computes longest prompt + longest answer - 1 columns: the pass over the prompts gives the first token of
    each answer, and each later pass feeds one token back.
    """
    return 1 - _needed(prompt_lens, output_lens) / _computed(prompt_lens, output_lens)


def _longest_request(prompts: Lengths, outputs: Lengths) -> float:
    longest = max(p + o - 1 for p, o in zip(prompts, outputs, strict=True))
    return 1 - _needed(prompts, outputs) / (len(prompts) * longest)


def _draw_padding_share(padding_share: Function) -> Any:
    from .. import plots

    prompts, outputs = [12, 90, 31, 55], [60, 20, 110, 35]
    share = padding_share(prompts, outputs)
    return plots.static_batch_waste(prompts, outputs, title=f"Your function says: {share:.0%} of this was not needed")


check_padding_share = Exercise(
    padding_share,
    cases=(
        Case(([7], [9]), 0.0, "one request"),
        # 2 rows of 4 + 3 - 1 = 6 columns, needed 4 and 6
        Case(([2, 4], [3, 3]), 2 / 12, "prompts differ"),
        # 2 rows of 4 + 5 - 1 = 8 columns, needed 4 and 8
        Case(([4, 4], [1, 5]), 4 / 16, "answers differ"),
        # 2 rows of 128 + 128 - 1 = 255 columns, needed 143 twice
        Case(([16, 128], [128, 16]), 224 / 510, "short prompt, long answer and the reverse"),
        # 3 rows of 10 columns, needed 3, 5 and 10: there is no second pass
        Case(([3, 5, 10], [1, 1, 1]), 12 / 30, "one token each"),
    ),
    mistakes=(
        Mistake(
            "You counted a column for every token of an answer. The pass over the prompts gives the first one, and the "
            "last is never fed back: an answer of n tokens takes n - 1 columns.",
            lambda p, o: 1 - (sum(p) + sum(o)) / (len(p) * (max(p) + max(o))),
        ),
        Mistake(
            "You took the columns of the longest request. Prompts end in the same column, so the longest prompt and "
            "the longest answer count, even where they belong to two requests.",
            _longest_request,
        ),
        Mistake(
            "That is the padding before the prompts. Rows whose answer is done are computed on until the longest is.",
            lambda p, o: (len(p) * max(p) - sum(p)) / _computed(p, o),
        ),
        Mistake("That is the share that was needed. We want the rest.", lambda p, o: _needed(p, o) / _computed(p, o)),
    ),
    hints=(
        "Draw the batch as a rectangle: a row for each request. How wide is it, and how much of a row was asked for?",
        "Each row has longest prompt + longest answer - 1 columns. A request needs prompt + answer - 1 of them.",
    ),
    solved="More rows make it worse: the longest of many is longer. A packed row has no columns to fill.",
    draw=_draw_padding_share,
)


# -- the packed row ---------------------------------------------------------------------------------------------------


def pack(chunks: Chunks) -> tuple[list[int], list[int], list[int]]:
    """The packed row of a step: (input_ids, position_ids, last_rows), three flat lists.

    chunks: [(token_ids, num_computed)], the new tokens of each request and how many it has in the cache already.
    last_rows: where in the row each request's last token stands.
    """
    input_ids, position_ids, last_rows = [], [], []
    for token_ids, num_computed in chunks:
        input_ids += token_ids
        position_ids += range(num_computed, num_computed + len(token_ids))
        last_rows.append(len(input_ids) - 1)
    return input_ids, position_ids, last_rows


def _packed(
    position: Function = lambda computed, n, row: computed + n, last: Function = lambda b, e: e - 1
) -> Function:
    """Wrong rows. position: from (computed, n-th of the chunk, place in the row); last: from (begin, end)."""

    def wrong(chunks: Chunks) -> tuple[list[int], list[int], list[int]]:
        ids, positions, rows = [], [], []
        for tokens, computed in chunks:
            begin = len(ids)
            positions += [position(computed, n, begin + n) for n in range(len(tokens))]
            ids += tokens
            rows.append(last(begin, len(ids)))
        return ids, positions, rows

    return wrong


def _draw_pack(pack: Function) -> Any:
    from .. import plots

    chunks = [([504], 9), ([28], 4), ([11, 12, 13, 14, 15, 16], 0), ([7, 8, 9], 8)]
    ids, positions, rows = pack(chunks)
    return plots.packed_row(
        [len(tokens) for tokens, _ in chunks], ["A", "B", "C", "D"], position_ids=list(positions), last_rows=list(rows),
        title=f"Your row: {len(ids)} tokens with their positions, outlined those that get logits",
    )  # fmt: skip


check_pack = Exercise(
    pack,
    cases=(
        Case(([([5, 6, 7], 0)],), ([5, 6, 7], [0, 1, 2], [2]), "one prompt"),
        Case(([([9], 3)],), ([9], [3], [0]), "one decode step"),
        Case(([([9], 3), ([5, 6, 7], 0)],), ([9, 5, 6, 7], [3, 0, 1, 2], [0, 3]), "a decode step and a prompt"),
        Case(([([8, 8], 4), ([5, 6, 7], 2)],), ([8, 8, 5, 6, 7], [4, 5, 2, 3, 4], [1, 4]), "two later chunks"),
    ),
    mistakes=(
        Mistake(
            "Your positions count through the row. Each request has its own text: its first new token stands at "
            "num_computed, whatever stands left of it in the row.",
            _packed(lambda computed, n, row: row),
        ),
        Mistake(
            "Your positions begin at 0 in every chunk. A request that has num_computed tokens in the cache goes on "
            "there.",
            _packed(lambda computed, n, row: n),
        ),
        Mistake(
            "Your last_rows are one too far: they name where the next request begins.", _packed(last=lambda b, e: e)
        ),
        Mistake(
            "Your last_rows are counted inside each chunk. They are places in the row: add what stands left of it.",
            _packed(last=lambda begin, end: end - begin - 1),
        ),
        Mistake(
            "There is one last row for the whole step in yours. Each request needs the logits of its own last token.",
            lambda chunks: (*pack(chunks)[:2], pack(chunks)[2][-1:]),
        ),
    ),
    hints=(
        "One loop over the chunks, and three lists that grow. Which of the three depends on what stands in the row?",
        "Token n of a chunk has position num_computed + n; note len(input_ids) - 1 after you append a chunk.",
    ),
    solved="The model sees one row of T tokens. Which request each belongs to is the business of attention alone.",
    draw=_draw_pack,
)


# -- the scheduler ----------------------------------------------------------------------------------------------------


def schedule(running: Queue, waiting: Queue, budget: int, max_num_seqs: int) -> dict[str, int]:
    """One step of a scheduler: {request: tokens}.

    running: [(id, left)], where left is how much of its prompt is not computed yet; 0: it decodes. waiting: [(id,
    prompt_len)] in order of arrival. First one token for each that decodes; then running prompts, in order, as much of
    each as the budget has left; then the front of the queue, while budget is left and fewer than max_num_seqs run.
    """
    step: dict[str, int] = {}
    decodes = [(request, 1) for request, left in running if left == 0]
    prompts = [(request, left) for request, left in running if left > 0]
    free = max(0, max_num_seqs - len(running))
    for request, wanted in [*decodes, *prompts, *waiting[:free]]:
        if budget == 0:
            break
        step[request] = min(wanted, budget)
        budget -= step[request]
    return step


def _whole_prompts(running: Queue, waiting: Queue, budget: int, max_num_seqs: int) -> dict[str, int]:
    step: dict[str, int] = {}
    queue = sorted(running, key=lambda request: request[1] > 0)  # stable: who decodes comes first
    for request, left in [*queue, *waiting[: max(0, max_num_seqs - len(running))]]:
        if (left or 1) <= budget:
            step[request] = left or 1
            budget -= left or 1
    return step


def _in_order(running: Queue, waiting: Queue, budget: int, max_num_seqs: int) -> dict[str, int]:
    return schedule([(request, left or 1) for request, left in running], waiting, budget, max_num_seqs)


def _decodes_get_nothing(running: Queue, waiting: Queue, budget: int, max_num_seqs: int) -> dict[str, int]:
    decoding = sum(left == 0 for _, left in running)
    return schedule([request for request in running if request[1]], waiting, budget, max_num_seqs - decoding)


def _draw_schedule(schedule: Function) -> Any:
    """Steps of a toy run: four requests, a budget of 6 tokens, two at once."""
    from .. import plots

    prompts, answers = {"A": 5, "B": 9, "C": 4, "D": 3}, {"A": 4, "B": 3, "C": 2, "D": 2}
    left, generated, rows = dict(prompts), dict.fromkeys(prompts, 0), dict.fromkeys(prompts, "")
    running: list[str] = []
    waiting = list(prompts)
    for _ in range(24):
        step = schedule([(r, left[r]) for r in running], [(r, prompts[r]) for r in waiting], 6, 2)
        for request in prompts:
            state = "w" if not step.get(request) else "d" if left[request] == 0 else "p"
            rows[request] += state if request in running + waiting else " "
        for request, tokens in step.items():
            if request in waiting:
                waiting.remove(request)
                running.append(request)
            left[request] -= min(tokens, left[request])
            generated[request] += left[request] == 0
        running = [request for request in running if generated[request] < answers[request]]
    ended = "not all get done" if running or waiting else "all get done"
    rows = {request: row.rstrip() for request, row in rows.items()}
    return plots.iteration_timeline({"your scheduler": rows}, title=f"6 tokens a step, 2 requests at once: {ended}")


check_schedule = Exercise(
    schedule,
    cases=(
        Case(([("a", 0), ("b", 0)], [], 8, 4), {"a": 1, "b": 1}, "two decode"),
        Case(([], [("a", 20)], 8, 4), {"a": 8}, "a prompt larger than the budget"),
        # one token for b, then 7 of the 12 that a has left
        Case(([("a", 12), ("b", 0)], [("c", 3)], 8, 4), {"b": 1, "a": 7}, "a prompt under way and a decode step"),
        # one each for a and b, 6 left: 3 for c, 3 of the 9 of d, nothing for e
        Case(
            ([("a", 0), ("b", 0)], [("c", 3), ("d", 9), ("e", 2)], 8, 8),
            {"a": 1, "b": 1, "c": 3, "d": 3},
            "two decode, three wait",
        ),
        Case(
            ([("a", 0), ("b", 2)], [("c", 2), ("d", 2), ("e", 2)], 16, 3), {"a": 1, "b": 2, "c": 2}, "room for one more"
        ),
        Case(([("a", 0), ("b", 0), ("c", 0)], [("d", 2)], 2, 8), {"a": 1, "b": 1}, "more decode than the budget"),
    ),
    mistakes=(
        Mistake(
            "A prompt that is larger than what is left gets nothing in yours. Give it what is left: the rest of it "
            "comes in later steps, that is what a chunk is.",
            _whole_prompts,
        ),
        Mistake(
            "You go through `running` as it stands, and a prompt takes the budget from those that decode. They come "
            "first: somebody is reading along.",
            _in_order,
        ),
        Mistake(
            "You give more tokens than the budget. It bounds the sum over all requests of the step.",
            lambda running, waiting, budget, most: schedule(running, waiting, 10**9, most),
        ),
        Mistake(
            "A request that decodes has no prompt left, and computes one token all the same: the one sampled last.",
            _decodes_get_nothing,
        ),
        Mistake(
            "More than max_num_seqs run in yours. Those that run already count as well as those that join.",
            lambda running, waiting, budget, most: schedule(running, waiting, budget, 10**9),
            lambda running, waiting, budget, most: schedule(running, waiting, budget, most + len(running)),
        ),
    ),
    hints=(
        "Three groups in order, one budget for all of them: who decodes, who has prompt left, who waits.",
        "Each gets min(what it wants, budget), and the budget goes down by it. Of those that wait, at most "
        "max_num_seqs - len(running) may join.",
    ),
    solved="Nobody waits for a whole batch any more: this function is asked again before each step.",
    draw=_draw_schedule,
)


# -- who looks at whom ------------------------------------------------------------------------------------------------


def may_attend(owner: Sequence[Any], position: Sequence[int]) -> list[list[bool]]:
    """May token i of a packed row look at token j? Bools [T][T].

    owner, position: for each of the T tokens its request, and its place in the text of that request.
    """
    tokens = list(zip(owner, position, strict=True))
    return [[o == other and q <= p for other, q in tokens] for o, p in tokens]


def _mask(seen: Callable[[int, Any, int, int, Any, int], bool]) -> Function:
    """A mask from a rule: seen(i, owner of i, position of i, j, owner of j, position of j)."""

    def wrong(owner: Sequence[Any], position: Sequence[int]) -> list[list[bool]]:
        tokens = [(n, *token) for n, token in enumerate(zip(owner, position, strict=True))]
        return [[seen(*one, *other) for other in tokens] for one in tokens]

    return wrong


def _draw_may_attend(may_attend: Function) -> Any:
    from .. import plots

    owner, position = ["A", "B", "C", "C", "C", "C", "D", "D", "D"], [9, 4, 0, 1, 2, 3, 8, 9, 10]
    seen = may_attend(owner, position)
    names = [f"{o}{p}" for o, p in zip(owner, position, strict=True)]
    return plots.attention_mask([[bool(s) for s in row] for row in seen], query_labels=names, key_labels=names)


check_may_attend = Exercise(
    may_attend,
    cases=(
        Case(([0, 0], [0, 1]), [[True, False], [True, True]], "one prompt"),
        Case(([0, 1], [6, 2]), [[True, False], [False, True]], "two that decode"),
        Case(
            ([0, 1, 1], [5, 0, 1]),
            [[True, False, False], [False, True, False], [False, True, True]],
            "a decode step and a prompt",
        ),
        Case(
            ([7, 7, 3], [1, 0, 9]),
            [[True, True, False], [False, True, False], [False, False, True]],
            "tokens out of order",
        ),
    ),
    mistakes=(
        Mistake(
            "That is the triangle of a single text. In a packed row what stands to the left may be somebody else's: "
            "the owner has to be the same as well.",
            _mask(lambda i, o, p, j, other, q: j <= i),
            _mask(lambda i, o, p, j, other, q: q <= p),
        ),
        Mistake(
            "Tokens of a request see those that come after them. A token may look at itself and at earlier ones.",
            _mask(lambda i, o, p, j, other, q: o == other),
        ),
        Mistake(
            "A token may look at itself. In your mask each sees only what stands before it.",
            _mask(lambda i, o, p, j, other, q: o == other and q < p),
        ),
        Mistake(
            "You compared places in the row. That works while a request's tokens stand in order; what decides is their "
            "position.",
            _mask(lambda i, o, p, j, other, q: o == other and j <= i),
        ),
    ),
    hints=(
        "Two conditions decide about a pair of tokens. One is the causal mask that you know; which is the other?",
        "Row i, column j is True where the owners are equal and position[j] is at most position[i].",
    ),
    solved="A triangle for each request. Most of the square is False, so the engine never builds it whole.",
    draw=_draw_may_attend,
)


# -- tokens per second ------------------------------------------------------------------------------------------------


def throughput_bound(weight_bytes: float, kv_bytes_per_request: float, batch: int, bandwidth: float) -> float:
    """Tokens per second at most: a decode step reads all weights once and the cache of each of `batch` requests, at
    `bandwidth` bytes per second.
    """
    return batch / ((weight_bytes + batch * kv_bytes_per_request) / bandwidth)


def _draw_throughput_bound(throughput_bound: Function) -> Any:
    from .. import plots

    batches = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    rates = [throughput_bound(15e9, 60e6, batch, 4e12) for batch in batches]
    return plots.curves(
        batches, {"your function": rates}, xlabel="requests in the batch", ylabel="tokens per second", log_x=True,
        title=f"Your function: {rates[0]:,.0f} tokens/s alone, {rates[-1]:,.0f} with 256",
    )  # fmt: skip


check_throughput_bound = Exercise(
    throughput_bound,
    cases=(
        # 100 bytes a step at 1,000 bytes/s: 10 steps a second
        Case((100, 0, 1, 1000), 10.0, "no cache, one request"),
        Case((100, 0, 8, 1000), 80.0, "no cache: every row is free"),
        # 100 + 4 * 25 = 200 bytes a step: 5 steps a second of 4 tokens
        Case((100, 25, 4, 1000), 20.0, "as much cache as weights"),
        # 16e9 + 64 * 250e6 = 32e9 bytes at 4e12: 125 steps a second of 64 tokens
        Case((16e9, 250e6, 64, 4e12), 8000.0, "a model of 8 billion parameters, 64 requests"),
    ),
    mistakes=(
        Mistake(
            "You read the weights once for each request. One pass over them serves all rows: that is the whole gain.",
            lambda w, kv, n, bw: n / (n * (w + kv) / bw),
            lambda w, kv, n, bw: bw / (w + kv),
        ),
        Mistake(
            "You read the cache of one request. Nobody shares keys and values: each row reads its own.",
            lambda w, kv, n, bw: n / ((w + kv) / bw),
        ),
        Mistake(
            "The cache is missing. Every step reads it too, and with many or long requests it outgrows the weights.",
            lambda w, kv, n, bw: n / (w / bw),
        ),
        Mistake(
            "Those are steps per second. Each gives every request a token.", lambda w, kv, n, bw: bw / (w + n * kv)
        ),
        Mistake(
            "That is a time: seconds for one step. We want tokens per second.",
            lambda w, kv, n, bw: (w + n * kv) / bw,
            lambda w, kv, n, bw: (w + n * kv) / bw / n,
        ),
    ),
    hints=(
        "How many bytes does one step read? How long does that take, and how many tokens come out of it?",
        "A step reads weights + batch * cache of one request, and gives `batch` tokens.",
    ),
    solved="In proportion to the batch while weights are most of the bytes; never above bandwidth / cache of one.",
    draw=_draw_throughput_bound,
)


EXERCISES = (check_padding_share, check_pack, check_schedule, check_may_attend, check_throughput_bound)
