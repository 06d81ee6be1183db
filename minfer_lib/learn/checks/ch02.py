"""Exercises of chapter 2, the naive loop: temperature, top-p, the repetition penalty, stop strings, tokens run again.

Invariant: expected values were worked out by hand from the definitions in the chapter; none comes from the package or
the solution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..exercises import Case, Exercise, Function, Mistake
from ..values import difference

WORDS = ("mat", "sofa", "floor", "moon", "spoon")
LOGITS = (2.0, 1.5, 0.5, -0.5, -1.0)

# -- temperature ------------------------------------------------------------------------------------------------------


def distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Probabilities [vocab]; temperature 0 is greedy."""
    if temperature == 0:
        return _greedy(logits)
    exps = ((logits - logits.max()) / temperature).exp()
    return exps / exps.sum()


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)


def _or_greedy(warm: Function) -> Function:
    """What `warm` makes of logits and a temperature, and the right answer at temperature 0."""
    return lambda logits, t: _greedy(logits) if t == 0 else warm(logits, t)


def _in_python(logits: torch.Tensor, temperature: float, subtracted: float) -> list[float]:
    exps = [math.exp((x - subtracted) / temperature) for x in logits.tolist()]
    return [e / sum(exps) for e in exps]


def _draw_distribution(distribution: Function) -> Any:
    from .. import plots

    temperatures = [n / 20 for n in range(1, 61)]
    rows = [torch.as_tensor(distribution(torch.tensor(LOGITS), t)).tolist() for t in temperatures]
    return plots.curves(
        temperatures, {word: [row[n] for row in rows] for n, word in enumerate(WORDS)}, xlabel="temperature",
        ylabel="probability", y_range=(0, 1.05), title="Your distribution of the chapter's five words",
    )  # fmt: skip


check_distribution = Exercise(
    distribution,
    cases=(
        Case((torch.tensor([0.0, math.log(2), math.log(5)]), 1.0), [0.125, 0.25, 0.625], "temperature 1: the softmax"),
        Case((torch.tensor([0.0, math.log(4)]), 2.0), [1 / 3, 2 / 3], "warmer: 1 to 4 becomes 1 to 2"),
        Case((torch.tensor([0.0, math.log(2)]), 0.5), [0.2, 0.8], "colder: 1 to 2 becomes 1 to 4"),
        Case((torch.tensor([2.0, 1.5, -1.0]), 0.001), [1.0, 0.0, 0.0], "ordinary logits, a low temperature"),
        Case((torch.tensor([1.0, 3.0, 2.0]), 0.0), [0.0, 1.0, 0.0], "temperature 0: greedy"),
    ),
    mistakes=(
        Mistake(
            "2 / 0.001 is 2,000, and e to the power of 2,000 is more than any float can hold: infinity / infinity is "
            "not a number. Subtract the largest logit first; that changes no probability.",
            _or_greedy(lambda logits, t: (logits / t).exp() / (logits / t).exp().sum()),
            _or_greedy(lambda logits, t: _in_python(logits, t, 0.0)),
        ),
        Mistake(
            "Only temperature 0 is missing. Nothing can be divided by it: by convention it means greedy, with all "
            "probability on the largest logit. Check for it first.",
            lambda logits, t: ((logits - logits.max()) / t).softmax(-1),
            lambda logits, t: (logits / t).softmax(-1),
            lambda logits, t: _in_python(logits, t, float(logits.max())),
        ),
        Mistake(
            "You multiplied by the temperature. A low temperature has to make differences larger: divide.",
            lambda logits, t: (logits * t).softmax(-1),
            _or_greedy(lambda logits, t: (logits * t).softmax(-1)),
        ),
        Mistake(
            "The temperature has no effect. Dividing probabilities by it and normalising them again gives the same "
            "probabilities: it belongs to the logits, before the softmax.",
            lambda logits, t: logits.softmax(-1),
            _or_greedy(lambda logits, t: logits.softmax(-1)),
        ),
        Mistake(
            "These are not probabilities yet: divide them by their sum.",
            _or_greedy(lambda logits, t: ((logits - logits.max()) / t).exp()),
            _or_greedy(lambda logits, t: (logits / t).exp()),
        ),
    ),
    hints=(
        "What must happen to the differences between logits when the temperature is low? And what does 0 mean?",
        "Three steps: return early for temperature 0, then (logits - maximum) / temperature, then the softmax.",
    ),
    solved="With the maximum taken off first, every exponent is 0 or less, however low the temperature.",
    draw=_draw_distribution,
)

# -- top-p ------------------------------------------------------------------------------------------------------------


def top_p_filter(probs: torch.Tensor, p: float) -> list[int]:
    """The ids that stay, most likely first; `probs` is a tensor [vocab]."""
    kept, total = [], 0.0
    for token in probs.argsort(descending=True).tolist():
        kept.append(token)
        total += float(probs[token])
        if total >= p:
            break
    return kept


def _kept(probs: torch.Tensor, count: int) -> list[int]:
    return probs.argsort(descending=True)[:count].tolist()


def _before(probs: torch.Tensor) -> torch.Tensor:
    """What the tokens before each hold together, the likeliest first: [vocab]."""
    ordered = probs.sort(descending=True).values.double()
    return ordered.cumsum(0) - ordered


def _reaching(probs: torch.Tensor, p: float) -> int:
    """How many of the likeliest tokens it takes to reach p."""
    return int((_before(probs) < p - 1e-6).sum())


def _draw_top_p(top_p_filter: Function) -> Any:
    from .. import plots

    before = torch.tensor(LOGITS).softmax(-1)
    stay = [int(token) for token in top_p_filter(before.clone(), 0.9)]
    after = torch.zeros_like(before)
    after[stay] = before[stay]
    return plots.filtered_bars(WORDS, before.tolist(), (after / after.sum()).tolist(), cumulative=True)


check_top_p_filter = Exercise(
    top_p_filter,
    cases=(
        Case((torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]), 0.7), [0, 1], "0.5 is too little, 0.8 is enough"),
        Case((torch.tensor([0.1, 0.3, 0.06, 0.5, 0.04]), 0.85), [3, 1, 0], "the ids are not in order of probability"),
        Case((torch.tensor([0.6, 0.4]), 0.5), [0], "the first token is enough"),
        Case((torch.tensor([0.5, 0.3, 0.2]), 1.0), [0, 1, 2], "p = 1 keeps everything"),
        Case((torch.tensor([0.5, 0.25, 0.25]), 0.5), [0], "the first token reaches p exactly"),
    ),
    mistakes=(
        Mistake(
            "The token with which the sum reaches p stays in. Without it the rest holds less than p, and where the "
            "likeliest token alone exceeds p, nothing is left to draw from.",
            lambda probs, p: _kept(probs, int((probs.sort(descending=True).values.cumsum(0) <= p + 1e-6).sum())),
            lambda probs, p: _kept(probs, _reaching(probs, p) - (p < 1)),
            lambda probs, p: _kept(probs, max(1, _reaching(probs, p) - (p < 1))),
        ),
        Mistake(
            "You keep one token too many where the sum hits p exactly. Once the sum has reached p, the rest is "
            "out: ask for >= p, not > p.",
            lambda probs, p: _kept(probs, int((_before(probs) <= p + 1e-6).sum())),
        ),
        Mistake(
            "You add the probabilities in the order of the ids. The likeliest come first: sort before you add.",
            lambda probs, p: list(range(int((probs.cumsum(0) < p - 1e-6).sum()) + 1)),
        ),
        Mistake(
            "These are ranks, not ids: the likeliest token is rank 0, but its id is its place in `probs`. `sort` and "
            "`argsort` give the ids as well.",
            lambda probs, p: list(range(_reaching(probs, p))),
        ),
        Mistake(
            "You compare each probability with p by itself. It is the running sum of the sorted probabilities that has "
            "to reach p.",
            lambda probs, p: [i for i in probs.argsort(descending=True).tolist() if probs[i] >= p],
            lambda probs, p: [i for i in probs.argsort(descending=True).tolist() if probs[i] >= 1 - p],
            lambda probs, p: [i for i in probs.argsort(descending=True).tolist() if probs[i] <= p],
        ),
    ),
    hints=(
        "Which token comes first, and when do you have enough of them?",
        "Sort, add up, and stop at the first token with which the sum is at least p; that token is still in.",
    ),
    solved="The token that crosses the line stays, so at least one always does.",
    draw=_draw_top_p,
)

# -- the repetition penalty -------------------------------------------------------------------------------------------


def penalise(logits: torch.Tensor, seen: Sequence[int], penalty: float) -> torch.Tensor:
    """Logits [vocab] with the repetition penalty on the ids in `seen`; the logits that were given stay as they were."""
    logits = logits.clone()
    for token in set(seen):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return logits


def _on_seen(change: Function) -> tuple[Function, Function]:
    """A wrong penalty: `change(values of the seen tokens, penalty)`, on each of them once; on a copy, and in place."""

    def wrong(logits: torch.Tensor, seen: Sequence[int], penalty: float) -> torch.Tensor:
        ids = torch.tensor(sorted(set(seen)), dtype=torch.long)
        return logits.index_copy(0, ids, change(logits[ids], penalty))

    return wrong, lambda logits, seen, penalty: logits.copy_(wrong(logits, seen, penalty))


def _for_each_occurrence(logits: torch.Tensor, seen: Sequence[int], penalty: float) -> torch.Tensor:
    for token in seen:
        logits = penalise(logits, [token], penalty)
    return logits


CHANGED = "the right logits, but those that were given have changed as well"


def _and_what_is_left(answer: Function, logits: torch.Tensor, seen: Sequence[int], penalty: float) -> Any:
    """What the answer returns, unless that is right and the logits that it was given have changed."""
    given = logits.clone()
    result = answer(given, seen, penalty)
    changed = not torch.equal(given, logits)
    return CHANGED if changed and difference(result, penalise(logits, seen, penalty)) is None else result


def _draw_penalise(penalise: Function) -> Any:
    from .. import plots

    before = torch.tensor(LOGITS)
    after = torch.as_tensor(penalise(before.clone(), [2, 3], 1.5)).softmax(-1).tolist()
    was = before.softmax(-1).tolist()
    change = ", ".join(f"{WORDS[n]} {'less' if after[n] < was[n] else 'MORE'} likely" for n in (2, 3))
    return plots.filtered_bars(WORDS, was, after, title=f"floor and moon were seen: {change}")


check_penalise = Exercise(
    penalise,
    cases=(
        Case((torch.tensor([2.0, 1.0, -1.0]), [0], 2.0), [1.0, 1.0, -1.0], "a positive logit"),
        Case((torch.tensor([2.0, 1.0, -1.0]), [2], 2.0), [2.0, 1.0, -2.0], "a negative logit"),
        Case((torch.tensor([3.0, 0.0, -1.0, 6.0]), [3, 3, 3], 1.5), [3.0, 0.0, -1.0, 4.0], "seen three times"),
        Case((torch.tensor([1.0, -2.0]), [], 1.3), [1.0, -2.0], "nothing was seen"),
    ),
    mistakes=(
        Mistake(
            "A negative logit divided by the penalty moves up: -1 / 2 is -0.5, and the token gets likelier. Multiply "
            "where the logit is negative.",
            *_on_seen(lambda values, penalty: values / penalty),
        ),
        Mistake(
            "You multiply positive logits: 2 becomes 4, and the token gets likelier. Divide where a logit is positive.",
            *_on_seen(lambda values, penalty: values * penalty),
            *_on_seen(lambda values, penalty: torch.where(values > 0, values * penalty, values / penalty)),
        ),
        Mistake(
            "A token that was seen three times is penalised three times here. The repetition penalty counts whether a "
            "token was seen, not how often (that is the frequency penalty): go through the set of ids.",
            _for_each_occurrence,
        ),
        Mistake(
            "You changed tokens that were not seen. Only the ids in `seen` are penalised.",
            lambda logits, seen, penalty: torch.where(logits > 0, logits / penalty, logits * penalty),
            lambda logits, seen, penalty: logits / penalty,
        ),
        Mistake(
            "The caller may still need the logits as they were. Begin with logits.clone(), and penalise the copy.",
            lambda logits, seen, penalty: logits.copy_(penalise(logits, seen, penalty)),
        ),
    ),
    hints=(
        "A penalty makes a token less likely: its logit goes down. Which way is down for a negative logit?",
        "On a copy, for every id in set(seen): divide a positive logit by the penalty, multiply a negative one.",
    ),
    solved="Both ways the logit goes down, once for each token that was seen, and the others stay as they are.",
    draw=_draw_penalise,
    run=_and_what_is_left,
)

# -- stop strings -----------------------------------------------------------------------------------------------------


def hold_back(text: str, stops: Sequence[str]) -> str:
    """The longest end of `text` that may be the beginning of a stop string."""
    for length in range(max(len(stop) for stop in stops) - 1, 0, -1):
        if any(length < len(stop) and text.endswith(stop[:length]) for stop in stops):
            return text[-length:]
    return ""


def _ends(text: str, stops: Sequence[str]) -> list[str]:
    """All ends of the text that begin one of the stop strings, the longest first, and an empty one."""
    ends = {stop[:n] for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])}
    return [*sorted(ends, key=len, reverse=True), ""]


def _from_the_first_letter(text: str, stops: Sequence[str]) -> str:
    begins = [text.index(stop[0]) for stop in stops if stop[0] in text]
    return text[min(begins) :] if begins else ""


def _draw_hold_back(hold_back: Function) -> Any:
    from .. import plots

    pieces, stops = ["It", " is", " the", " end", "less", " sea", ". The", " end", "."], ["the end."]
    text, arrived, released = "", [], []
    for piece in pieces:
        text += piece
        arrived.append(len(text))
        released.append(len(text) - len(hold_back(text, stops)))
    most = max(a - r for a, r in zip(arrived, released, strict=True))
    return plots.curves(
        list(range(1, len(pieces) + 1)), {"arrived": arrived, "released": released}, xlabel="pieces",
        ylabel="characters", title=f"'It is the endless sea. The end.': at most {most} characters held back",
    )  # fmt: skip


check_hold_back = Exercise(
    hold_back,
    cases=(
        Case(("It is the", ["the end"]), "the", "the stop string may have begun"),
        Case(("It is time", ["the end"]), "", "nothing to wait for"),
        Case(("banana", ["nanas"]), "nana", "two ends would do"),
        Case(("x </", ["/>", "</s>"]), "</", "two stop strings, of which the second holds back more"),
        Case(("one line\n", ["\nQ:", "\n\n"]), "\n", "both may have begun"),
    ),
    mistakes=(
        Mistake(
            'You return the shortest end that fits. After "banana" the stop string "nanas" is one letter away, and its '
            'first "na" would be out already. Try the longest end first.',
            lambda text, stops: _ends(text, stops)[-2:][0],
            lambda text, stops: next((s[:n] for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), ""),
        ),
        Mistake(
            "You look at one stop string, or stop at the first that fits. Any of them may be on its way: take the "
            "longest end over all of them.",
            lambda text, stops: _ends(text, stops[:1])[0],
            lambda text, stops: next((_ends(text, [s])[0] for s in stops if _ends(text, [s])[0]), ""),
        ),
        Mistake(
            "You always hold back the longest stop string's length minus one. No stop string would slip through, but "
            "the reader would always be behind. Hold back only what fits.",
            lambda text, stops: text[-(max(map(len, stops)) - 1) :],
        ),
        Mistake(
            "You hold back everything from the first letter that fits. What follows that letter has to fit as well, up "
            "to the end of the text.",
            _from_the_first_letter,
        ),
        Mistake(
            "You look for whole stop strings. When one is whole it is too late: its beginning has been shown already.",
            lambda text, stops: next((s for s in stops if text.endswith(s)), ""),
            lambda text, stops: next((s for s in stops if s in text), ""),
        ),
    ),
    hints=(
        "A stop string that has only begun stands at the very end of the text. How much of it could be there?",
        "For each stop string try its beginnings, the longest first, and ask text.endswith(beginning).",
    ),
    solved="Nothing of a stop string can slip out, and nothing else is late.",
    draw=_draw_hold_back,
)

# -- tokens processed -------------------------------------------------------------------------------------------------


def total_tokens(prompt: int, new: int) -> int:
    """Tokens that a loop without a cache runs through the model."""
    return sum(prompt + step for step in range(new))


def _draw_total_tokens(total_tokens: Function) -> Any:
    from .. import plots

    new = list(range(1, 513, 16))
    naive, once = [total_tokens(256, n) for n in new], [256 + n - 1 for n in new]
    return plots.curves(
        new, {"naive": naive, "each token once": once}, xlabel="new tokens after a prompt of 256",
        ylabel="tokens processed", title=f"{new[-1]} new tokens: {naive[-1]:,} processed, of {once[-1]:,} that differ",
    )  # fmt: skip


check_total_tokens = Exercise(
    total_tokens,
    cases=(
        Case((5, 1), 5, "one step over the prompt"),
        Case((5, 3), 18, "5 + 6 + 7"),
        Case((256, 100), 30_550, "the example of the chapter"),
        Case((10, 0), 0, "nothing generated, nothing computed"),
    ),
    mistakes=(
        Mistake(
            "You begin at prompt + 1. The first step runs over the prompt alone, and the last token is never run "
            "through the model at all: it is the result of the last step.",
            lambda prompt, new: sum(prompt + step for step in range(1, new + 1)),
            lambda prompt, new: sum(prompt + step for step in range(new + 1)),
        ),
        Mistake(
            "That counts each token once, which is what an engine with a cache will do. The naive loop runs all of "
            "them again in every step.",
            lambda prompt, new: prompt + new,
            lambda prompt, new: prompt + new - 1,
            lambda prompt, new: prompt + new - 1 if new else 0,
        ),
        Mistake(
            "You count the prompt in the first step only. It is part of every step.",
            lambda prompt, new: prompt + new * (new - 1) // 2,
            lambda prompt, new: prompt + new * (new - 1) // 2 if new else 0,
        ),
        Mistake(
            "You count every step as if it were the last and longest. The steps grow by one token each.",
            lambda prompt, new: new * (prompt + new),
            lambda prompt, new: new * (prompt + new - 1),
        ),
        Mistake(
            "You count the prompt in every step, but not the new tokens that were added to it.",
            lambda prompt, new: new * prompt,
        ),
    ),
    hints=(
        "Write down the length that each step runs over, for a prompt of 5 and 3 new tokens.",
        "The lengths are prompt, prompt + 1, ..., prompt + new - 1: add them.",
    ),
    solved="new x prompt + new x (new - 1) / 2: linear in the prompt, quadratic in the number of new tokens.",
    draw=_draw_total_tokens,
)


EXERCISES = (check_distribution, check_top_p_filter, check_penalise, check_hold_back, check_total_tokens)
