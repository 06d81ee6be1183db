"""Exercises of chapter 1 about steps: logits to a token, TTFT and TPOT, and what a step waits for.

Invariant: expected values were worked out by hand from the formulas in the chapter, none comes from the package.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..exercises import Case, Exercise, Function, Mistake

# -- from logits to a token -------------------------------------------------------------------------------------------


def _naive_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.exp() / logits.exp().sum()


def _overflow_in_python(logits: torch.Tensor) -> tuple[int, float]:
    exps = [math.exp(x) for x in logits.tolist()]
    return int(logits.argmax()), max(exps) / sum(exps)


def _draw_first_token(first_token: Function) -> Any:
    from .. import plots

    shifts = list(range(-120, 121, 4))
    values = [first_token(torch.tensor([1.0, 2.0, 0.0]) + shift)[1] for shift in shifts]
    return plots.curves(
        shifts,
        {"the likeliest token": [float(v) for v in values]},
        xlabel="added to all three logits",
        ylabel="its probability",
        y_range=(0, 1.05),
        title="Adding the same to every logit must change nothing",
    )


FIRST_TOKEN = Exercise(
    name="first_token",
    parameters=("logits",),
    cases=(
        Case((torch.tensor([0.0, math.log(2), math.log(5)]),), (2, 0.625), "5 parts of 8"),
        Case((torch.tensor([1000.0, 1001.0, 999.0]),), (1, 0.665241), "large logits"),
        Case((torch.tensor([-1000.0, -1001.0]),), (0, 0.731059), "very negative logits"),
        Case((torch.tensor([3.0]),), (0, 1.0), "a vocabulary of one"),
    ),
    mistakes=(
        Mistake(
            "overflow",
            "exp(1000) is larger than any float can be, and exp(-1000) is 0: infinity / infinity and 0 / 0 are no "
            "numbers. Subtract the largest logit before exp; that changes no probability, since it cancels.",
            (
                lambda logits: (int(logits.argmax()), _naive_softmax(logits).max()),
                lambda logits: (int(_naive_softmax(logits).argmax()), _naive_softmax(logits).max()),
                _overflow_in_python,
            ),
        ),
        Mistake(
            "not normalised",
            "The largest comes out as 1 every time. Divide by the sum over all tokens, so that they add up to 1.",
            (lambda logits: (int(logits.argmax()), 1.0),),
        ),
        Mistake(
            "no exponential",
            "Logits may be negative and do not add up; a probability is exp(logit) / the sum of all exp(logit).",
            (lambda logits: (int(logits.argmax()), (logits / logits.sum()).max()),),
        ),
        Mistake(
            "a logit",
            "That is the logit of the token. Put the logits through a softmax to get probabilities.",
            (lambda logits: (int(logits.argmax()), logits.max()),),
        ),
        Mistake(
            "sigmoid",
            "A sigmoid looks at one logit alone. A softmax sets every token against all the others.",
            (lambda logits: (int(logits.argmax()), logits.sigmoid().max()),),
        ),
        Mistake(
            "log-probability",
            "That is the logarithm of the probability. Use exp, or softmax in place of log_softmax.",
            (lambda logits: (int(logits.argmax()), logits.log_softmax(-1).max()),),
        ),
        Mistake(
            "wrong order",
            "Both numbers are right, the other way round: the token's id comes first, its probability second.",
            (lambda logits: (logits.softmax(-1).max(), int(logits.argmax())),),
        ),
    ),
    hint="argmax gives the id; softmax, computed from logits minus their maximum, gives its probability.",
    solved="Subtracting the maximum keeps every exponent at 0 or below, and the largest probability never overflows.",
    draw=_draw_first_token,
)


# -- TTFT and TPOT ----------------------------------------------------------------------------------------------------


def _draw_split_latency(split_latency: Function) -> Any:
    from .. import plots

    ends = [0.35 + 0.018 * n for n in range(25)]
    ttft, tpot = split_latency(0.0, ends)
    steps = [("prefill", 256, ends[0])] + [("decode", 1, 0.018)] * 24
    return plots.prefill_decode_timeline(
        steps, title=f"Your function says: TTFT {1e3 * ttft:.0f} ms, TPOT {1e3 * tpot:.1f} ms"
    )


SPLIT_LATENCY = Exercise(
    name="split_latency",
    parameters=("arrival", "token_times"),
    cases=(
        Case((0.0, [0.35, 0.368, 0.386]), (0.35, 0.018)),
        Case((100.0, [100.5, 100.6, 100.7, 100.8]), (0.5, 0.1), "the clock did not start at 0"),
        Case((10.0, [10.25, 10.35, 10.75, 11.15]), (0.25, 0.3), "steps of unequal length"),
        Case((5.0, [5.2]), (0.2, None), "one token only"),
    ),
    mistakes=(
        Mistake(
            "arrival ignored",
            "TTFT counts from the arrival of the request, not from the zero of the clock.",
            (lambda arrival, times: (times[0], (times[-1] - times[0]) / (len(times) - 1) if times[1:] else None),),
        ),
        Mistake(
            "prefill counted in TPOT",
            "Your TPOT counts the first token too. TTFT covers that one; TPOT is the mean of the later ones.",
            (
                lambda arrival, times: (times[0] - arrival, (times[-1] - arrival) / len(times)),
                lambda arrival, times: (times[0] - arrival, (times[-1] - arrival) / max(1, len(times) - 1)),
            ),
        ),
        Mistake(
            "divided by the number of tokens",
            "Between n tokens lie n - 1 steps: three tokens arrive in two steps after the first.",
            (lambda arrival, times: (times[0] - arrival, (times[-1] - times[0]) / len(times)),),
        ),
        Mistake(
            "one token",
            "With one token there is no later one, and no mean time of later ones: return None for it.",
            (
                lambda arrival, times: (times[0] - arrival, (times[-1] - times[0]) / (len(times) - 1)),
                lambda arrival, times: (times[0] - arrival, (times[-1] - times[0]) / max(1, len(times) - 1)),
                lambda arrival, times: (
                    times[0] - arrival,
                    (times[-1] - times[0]) / (len(times) - 1) if times[1:] else math.nan,
                ),
            ),
        ),
        Mistake(
            "wrong order",
            "Both numbers are right, the other way round: TTFT first, TPOT second.",
            (
                lambda arrival, times: (
                    (times[-1] - times[0]) / (len(times) - 1) if times[1:] else None,
                    times[0] - arrival,
                ),
            ),
        ),
        Mistake(
            "last step only",
            "That is the time of the last step alone. TPOT is the mean over all steps after the first token.",
            (lambda arrival, times: (times[0] - arrival, times[-1] - times[-2] if times[1:] else None),),
        ),
    ),
    hint="Draw the times as dots on a line: TTFT is the gap before the first dot, TPOT the mean of the gaps after it.",
    solved="A user waits for TTFT once and for TPOT at every word, which is why the two are never mixed into one mean.",
    draw=_draw_split_latency,
)


# -- memory or arithmetic ---------------------------------------------------------------------------------------------


def _draw_step_time(step_time: Function) -> Any:
    from .. import plots

    batches = [2**n for n in range(11)]
    weights = 14e9
    ms = [1e3 * step_time(weights * batch, weights, 1e15, 4e12)[0] for batch in batches]
    return plots.curves(
        batches, {"step": ms}, xlabel="requests in the batch", ylabel="ms a step", log_x=True, log_y=True,
        title=f"One request: {ms[0]:.2f} ms a step; 1,024 requests: {ms[-1]:.2f} ms",
    )  # fmt: skip


STEP_TIME = Exercise(
    name="step_time",
    parameters=("flops", "bytes_moved", "peak_flops", "bandwidth"),
    cases=(
        Case((14e9, 14e9, 1e15, 4e12), (0.0035, "memory"), "a 7B decodes one token on a large GPU"),
        Case((448e9, 14e9, 1e15, 4e12), (0.0035, "memory"), "32 requests in one step"),
        Case((28_672e9, 14e9, 1e15, 4e12), (0.028672, "compute"), "a prompt of 2,048 tokens"),
        Case((0.27e9, 0.54e9, 300e9, 27e9), (0.02, "memory"), "SmolLM2 decodes on a CPU"),
    ),
    mistakes=(
        Mistake(
            "sum",
            "You added the two times. The machine reads and computes at the same time, so the longer one decides.",
            (lambda f, b, peak, bw: (f / peak + b / bw, "memory" if b / bw > f / peak else "compute"),),
        ),
        Mistake(
            "the shorter one",
            "You took the shorter time. The step is over when both are done: the longer one decides.",
            (
                lambda f, b, peak, bw: (min(f / peak, b / bw), "memory" if b / bw < f / peak else "compute"),
                lambda f, b, peak, bw: (min(f / peak, b / bw), "memory" if b / bw > f / peak else "compute"),
            ),
        ),
        Mistake(
            "FLOP against bytes",
            "You compared FLOP with bytes. A byte takes far longer than a FLOP; compare the two times in seconds.",
            (lambda f, b, peak, bw: (max(f / peak, b / bw), "compute" if f > b else "memory"),),
        ),
        Mistake(
            "names swapped",
            'The time is right and the name is the other one: if reading takes longer, the step waits for "memory".',
            (lambda f, b, peak, bw: (max(f / peak, b / bw), "compute" if b / bw > f / peak else "memory"),),
        ),
        Mistake(
            "upside down",
            "Divide the work by the speed: bytes / (bytes/s) gives seconds, not the other way round.",
            (lambda f, b, peak, bw: (max(peak / f, bw / b), "memory" if bw / b > peak / f else "compute"),),
        ),
    ),
    hint="Two times: flops / peak_flops and bytes_moved / bandwidth. Which one does the step have to wait for?",
    solved="On the large GPU, 250 requests could share a step that takes no longer than for one: hence batching.",
    draw=_draw_step_time,
)
