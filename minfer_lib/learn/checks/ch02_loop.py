"""Exercises of chapter 2 about the loop: text that must be held back, and the tokens that are computed again.

Invariant: expected values were worked out by hand from the definitions in the chapter, none comes from the package.
"""

from __future__ import annotations

from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

# -- stop strings -----------------------------------------------------------------------------------------------------


def _ends(text: str, stops: list[str]) -> list[str]:
    """All ends of the text that begin one of the stop strings, the longest first."""
    ends = {stop[:n] for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])}
    return sorted(ends, key=len, reverse=True)


def _from_the_first_letter(text: str, stops: list[str]) -> str:
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


HOLD_BACK = Exercise(
    name="hold_back",
    parameters=("text", "stops"),
    cases=(
        Case(("It is the", ["the end"]), "the", "the stop string may have begun"),
        Case(("It is time", ["the end"]), "", "nothing to wait for"),
        Case(("banana", ["nanas"]), "nana", "two ends would do"),
        Case(("x </", ["/>", "</s>"]), "</", "two stop strings, of which the second holds back more"),
        Case(("one line\n", ["\nQ:", "\n\n"]), "\n", "both may have begun"),
    ),
    mistakes=(
        Mistake(
            "the shortest end",
            'You return the shortest end that fits. After "banana" the stop string "nanas" is one letter away, and its '
            'first "na" would be out already. Try the longest end first.',
            (
                lambda text, stops: (_ends(text, stops) or [""])[-1],
                lambda text, stops: next((s[:n] for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), ""),
            ),
        ),
        Mistake(
            "the first stop string only",
            "You look at one stop string, or stop at the first that fits. Any of them may be on its way: take the "
            "longest end over all of them.",
            (
                lambda text, stops: (_ends(text, stops[:1]) or [""])[0],
                lambda text, stops: next((_ends(text, [s])[0] for s in stops if _ends(text, [s])), ""),
            ),
        ),
        Mistake(
            "from the first letter on",
            "You hold back everything from the first letter that fits. What follows that letter has to fit as well, up "
            "to the end of the text.",
            (_from_the_first_letter,),
        ),
        Mistake(
            "always as much as could be needed",
            "You always hold back the longest stop string's length less one. No stop string would slip through, but "
            "the reader would always be behind. Hold back only what fits.",
            (lambda text, stops: text[-(max(map(len, stops)) - 1) :],),
        ),
        Mistake(
            "a number",
            "That is a number of characters. Return the text itself: text[len(text) - number:].",
            (lambda text, stops: len((_ends(text, stops) or [""])[0]),),
        ),
        Mistake(
            "what may be released",
            "You return the part that may be shown. Return what must be held back: the end of the text.",
            (lambda text, stops: text[: len(text) - len((_ends(text, stops) or [""])[0])],),
        ),
        Mistake(
            "complete stop strings only",
            "You look for whole stop strings. When one is whole it is too late: its beginning has been shown already.",
            (
                lambda text, stops: next((s for s in stops if text.endswith(s)), ""),
                lambda text, stops: next((s for s in stops if s in text), ""),
            ),
        ),
    ),
    hint="For each stop string try its beginnings, the longest first, and ask text.endswith(beginning).",
    solved="Nothing of a stop string can slip out, and nothing else is late.",
    draw=_draw_hold_back,
)

# -- tokens processed -------------------------------------------------------------------------------------------------


def _draw_total_tokens(total_tokens: Function) -> Any:
    from .. import plots

    new = list(range(1, 513, 16))
    naive, once = [total_tokens(256, n) for n in new], [256 + n - 1 for n in new]
    return plots.curves(
        new, {"naive": naive, "each token once": once}, xlabel="new tokens after a prompt of 256",
        ylabel="tokens processed", title=f"{new[-1]} new tokens: {naive[-1]:,} processed, of {once[-1]:,} that differ",
    )  # fmt: skip


TOTAL_TOKENS = Exercise(
    name="total_tokens",
    parameters=("prompt", "new"),
    cases=(
        Case((5, 1), 5, "one step over the prompt"),
        Case((5, 3), 18, "5 + 6 + 7"),
        Case((256, 100), 30_550, "the example of the chapter"),
        Case((10, 0), 0, "nothing generated, nothing computed"),
    ),
    mistakes=(
        Mistake(
            "the last token too",
            "You begin at prompt + 1. The first step runs over the prompt alone, and the last token is never run "
            "through the model at all: it is the result of the last step.",
            (
                lambda prompt, new: sum(prompt + step for step in range(1, new + 1)),
                lambda prompt, new: sum(prompt + step for step in range(new + 1)),
            ),
        ),
        Mistake(
            "each token once",
            "That counts each token once, which is what an engine with a cache will do. The naive loop runs all of "
            "them again in every step.",
            (
                lambda prompt, new: prompt + new,
                lambda prompt, new: prompt + new - 1,
                lambda prompt, new: prompt + new - 1 if new else 0,
            ),
        ),
        Mistake(
            "the prompt once",
            "You count the prompt in the first step only. It is part of every step.",
            (
                lambda prompt, new: prompt + new * (new - 1) // 2,
                lambda prompt, new: prompt + new * (new + 1) // 2,
                lambda prompt, new: prompt + new * (new - 1) // 2 if new else 0,
            ),
        ),
        Mistake(
            "always the whole length",
            "You count every step as if it were the last and longest. The steps grow by one token each.",
            (lambda prompt, new: new * (prompt + new), lambda prompt, new: new * (prompt + new - 1)),
        ),
        Mistake(
            "the prompt only",
            "You count the prompt in every step, but not the new tokens that were added to it.",
            (lambda prompt, new: new * prompt,),
        ),
    ),
    hint="Write down the length that each step runs over, for a prompt of 5 and 3 new tokens, and add.",
    solved="new x prompt + new x (new - 1) / 2: linear in the prompt, quadratic in the number of new tokens.",
    draw=_draw_total_tokens,
)
