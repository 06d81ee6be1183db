"""What stands behind every `check_...()` of the chapters: cases, typical mistakes with their own hints, a diagnosis.

Invariant: a check prints what it found and returns True or False. It never raises, whatever the learner's code does
(an interrupt from the keyboard apart), so that a chapter runs from top to bottom with no exercise solved; and what it
prints about an unsolved exercise is always the same.

A typical mistake is written down as code: a function that makes it. A wrong answer that gives what the mistake gives,
on every case that it gets wrong, is given the hint of that mistake.
"""

from __future__ import annotations

import copy
import dis
import linecache
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .values import difference, shortened, shown

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """Arguments of a call and what it should return; `about` says in a few words what is special about it."""

    args: tuple[Any, ...]
    expected: Any
    about: str = ""


@dataclass(frozen=True)
class Mistake:
    """A typical wrong answer: functions that make it (it can be written in several ways), and the hint it deserves."""

    name: str
    hint: str
    made_by: tuple[Function, ...]


@dataclass(frozen=True)
class Outcome:
    """What a call came to: a value, or the exception that it raised."""

    value: Any = None
    error: Exception | None = None

    @classmethod
    def of(cls, function: Function, args: tuple[Any, ...]) -> Outcome:
        """Calls `function` on copies of `args`, so that a function that changes its arguments harms no other call."""
        try:
            return cls(value=function(*copy.deepcopy(args)))
        except Exception as error:
            return cls(error=error)

    def same_as(self, other: Outcome, tolerance: float) -> bool:
        """Equal values, or exceptions of the same type."""
        if self.error is not None or other.error is not None:
            return type(self.error) is type(other.error)
        return difference(self.value, other.value, tolerance) is None


@dataclass(frozen=True)
class Exercise:
    """One exercise: a function to write, called `name(*parameters)`.

    hint: for wrong answers that no known mistake explains. solved: printed after a right answer.
    draw: takes the learner's function and returns a figure, shown with right and with wrong answers.
    tolerance: relative error up to which two numbers count as equal.
    """

    name: str
    parameters: tuple[str, ...]
    cases: tuple[Case, ...]
    mistakes: tuple[Mistake, ...]
    hint: str
    solved: str
    draw: Callable[[Function], Any] | None = None
    tolerance: float = 1e-5

    def check(self, answer: Any) -> bool:
        """Prints a diagnosis of `answer`, the learner's function; True if it is right."""
        if answer is not None and answer is not ... and not callable(answer):
            print(
                f"{self.name}: the check takes the function itself, without calling it: check_{self.name}({self.name})."
            )
            return False
        outcomes = [Outcome.of(answer, case.args) for case in self.cases] if callable(answer) else []
        if not outcomes or any(_unfinished(outcome) for outcome in outcomes) or _is_stub(answer):
            print(f"{self.name}: not solved yet. Replace the ... in it, then run the cell again.")
            return False
        wrong = [n for n, (o, c) in enumerate(zip(outcomes, self.cases, strict=True)) if not self._right(o, c)]
        if wrong:
            print(self._diagnosis(answer, outcomes, wrong))
        else:
            print(f"{self.name}: right, in all {len(self.cases)} cases.\n{self.solved}")
        if self.draw is not None and all(outcome.error is None for outcome in outcomes):
            self._show_figure(answer)
        return not wrong

    def _right(self, outcome: Outcome, case: Case) -> bool:
        return outcome.same_as(Outcome(case.expected), self.tolerance)

    def explain(self, outcomes: Sequence[Outcome], wrong: Sequence[int]) -> Mistake | None:
        """The mistake that gives the learner's outcome on all cases in `wrong`; of several the one that agrees most."""
        best, most = None, 0
        for mistake in self.mistakes:
            for function in mistake.made_by:
                made = [Outcome.of(function, case.args) for case in self.cases]
                agrees = [o.same_as(m, self.tolerance) for o, m in zip(outcomes, made, strict=True)]
                if all(agrees[n] for n in wrong) and sum(agrees) > most:
                    best, most = mistake, sum(agrees)
        return best

    def call_lines(self, case: Case) -> list[str]:
        """A case as a diagnosis shows it; exercises about larger structures have their own way."""
        arguments = ", ".join(f"{p}={shown(a)}" for p, a in zip(self.parameters, case.args, strict=True))
        return [f"{self.name}({arguments})"]

    def value_line(self, value: Any) -> str:
        """What came, or was expected, as a diagnosis shows it."""
        return shown(value)

    def _diagnosis(self, answer: Function, outcomes: Sequence[Outcome], wrong: Sequence[int]) -> str:
        case, outcome = self.cases[wrong[0]], outcomes[wrong[0]]
        about = f" ({case.about})" if case.about else ""
        first = f" The first of them{about}:" if len(wrong) > 1 else f" It is this one{about}:"
        count = f"{len(wrong)} of {len(self.cases)} cases {'differ' if len(wrong) > 1 else 'differs'}."
        lines = [
            f"{self.name}: not right yet, {count}{first}",
            *(f"    {line}" for line in self.call_lines(case)),
            f"    gives    {_raised(outcome.error, answer) if outcome.error else self.value_line(outcome.value)}",
            f"    expected {self.value_line(case.expected)}",
        ]
        mistake = self.explain(outcomes, wrong)
        if mistake is not None:
            return "\n".join([*lines, f"Hint: {mistake.hint}"])
        what = difference(outcome.value, case.expected, self.tolerance) if outcome.error is None else None
        if outcome.error is None and all(outcomes[n].value is None for n in wrong):
            what = "your function returned None: does every way through it end with `return`?"
        return "\n".join([*lines, f"Hint: {what[0].upper() + what[1:]} {self.hint}" if what else f"Hint: {self.hint}"])

    def _show_figure(self, answer: Function) -> None:
        from .style import in_notebook

        if not in_notebook():
            return
        from IPython.display import display

        try:
            figure = self.draw(answer)
        except Exception as error:  # a wrong answer may give what cannot be drawn
            print(f"(No picture: what your function gives could not be drawn, {type(error).__name__}.)")
        else:
            display(figure)


# -- the learner's function -----------------------------------------------------------------------------------------


def _unfinished(outcome: Outcome) -> bool:
    """Whether a `...` of the stub is still in the result, or was what the code fell over."""
    if isinstance(outcome.error, NotImplementedError):
        return True
    if outcome.error is not None:
        return isinstance(outcome.error, TypeError | AttributeError) and "ellipsis" in str(outcome.error).lower()
    value = outcome.value
    return value is ... or (isinstance(value, tuple | list) and any(part is ... for part in value))


def _is_stub(function: Function) -> bool:
    """Whether a function does nothing at all: `...` or `pass`, with or without a docstring."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    instructions = [
        i for i in dis.get_instructions(code) if i.opname not in ("RESUME", "NOP", "CACHE", "COPY_FREE_VARS")
    ]
    names = [i.opname for i in instructions]
    returns_none = all(i.argval is None for i in instructions if i.opname in ("LOAD_CONST", "RETURN_CONST"))
    return returns_none and names in (["LOAD_CONST", "RETURN_VALUE"], ["RETURN_CONST"])


def _raised(error: Exception, answer: Function) -> str:
    """An exception, and the place in the learner's own code where it happened, in at most two lines."""
    message = str(error).splitlines()[0] if str(error) else "no message"
    text = shortened(f"{type(error).__name__}: {message}")
    code = getattr(answer, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    if not own:
        return f"{text} (your function could not be called like this)" if isinstance(error, TypeError) else text
    line = linecache.getline(own[-1].filename, own[-1].lineno).strip()
    return f"{text}\n             in line {own[-1].lineno} of your cell" + (f": {shortened(line)}" if line else "")
