"""What stands behind every `check_...()` of the chapters: cases, typical mistakes with their own hints, a diagnosis.

A module of `checks` writes an exercise as its worked solution, an ordinary function, and what there is to say about it:

    check_pack = Exercise(pack, cases=..., mistakes=..., hints=(..., ...), solved=...)

The chapter calls `check_pack(pack)` with the reader's function, `check_pack(hint=1)` and `check_pack(hint=2)` for help,
and `yours("pack")` where the function is put to work: it is the reader's own once that has passed.

Invariant: a check prints what it found and never raises, whatever the reader's code does (an interrupt from the
keyboard apart), so that a chapter runs from top to bottom with no exercise solved; and what it prints about an unsolved
exercise is always the same. A wrong answer that gives what a known mistake gives, on every case that it gets wrong, is
given the hint of that mistake.
"""

from __future__ import annotations

import copy
import dis
import inspect
import linecache
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ..bench.settings import fast_mode
from .style import in_notebook
from .values import difference, shortened, shown

Function = Callable[..., Any]
CHAPTERS = ("ch01", "ch02", "ch03", "ch04", "ch05", "ch06", "ch07")


@dataclass(frozen=True)
class Case:
    """Arguments of a call and what it should return; `about` says in a few words what is special about it.

    also: other values that are right as well.
    """

    args: tuple[Any, ...]
    expected: Any
    about: str = ""
    also: tuple[Any, ...] = ()


class Mistake:
    """A typical wrong answer: the hint it deserves, and functions that make it (it can be written in several ways)."""

    def __init__(self, hint: str, *made_by: Function) -> None:
        self.hint, self.made_by = hint, made_by


@dataclass(frozen=True)
class Outcome:
    """What a call came to: a value, or the exception that it raised."""

    value: Any = None
    error: Exception | None = None

    def same_as(self, other: Outcome, tolerance: float) -> bool:
        """Equal values, or exceptions of the same type."""
        if self.error is not None or other.error is not None:
            return type(self.error) is type(other.error)
        return difference(self.value, other.value, tolerance) is None


def _call(function: Function, *args: Any) -> Any:
    return function(*args)


@dataclass
class Exercise:
    """One exercise: something to write that does what `solution` does, which also gives its name and parameters.

    mistakes: at most five. hints: two, from a nudge to all but the answer. solved: printed after a right answer.
    draw: takes the reader's function and returns a figure, shown with right and with wrong answers.
    tolerance: relative error up to which two numbers count as equal.
    run: how the answer is put to a case, `run(answer, *args) -> value`, where it is more than a call.
    call_lines, value_line: how a diagnosis shows a case, and a value.
    """

    solution: Function
    cases: tuple[Case, ...]
    mistakes: tuple[Mistake, ...]
    hints: tuple[str, str]
    solved: str
    draw: Function | None = None
    tolerance: float = 1e-5
    run: Function = _call
    call_lines: Callable[[Case], list[str]] | None = None
    value_line: Callable[[Any], str] = shown
    accepted: Function | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.name: str = self.solution.__name__
        self.__doc__ = self.solution.__doc__

    def __call__(self, answer: Any = None, *, hint: int | None = None) -> None:
        """Prints what is to be said about `answer`, the reader's function, or one of the two hints."""
        if hint is None:
            self.check(answer)
        elif type(hint) is int and hint in (1, 2):
            print(f"{self.name}, hint {hint} of 2: {self.hints[hint - 1]}")
        else:
            print(f"{self.name} has two hints: check_{self.name}(hint=1) and check_{self.name}(hint=2).")

    def check(self, answer: Any) -> bool:
        """Prints a diagnosis of `answer`; True if it is right."""
        if answer is not None and answer is not ... and not callable(answer):
            print(f"{self.name}: the check takes what you wrote, without calling it: check_{self.name}({self.name}).")
            return False
        outcomes = [self.outcome(answer, case) for case in self.cases] if callable(answer) else []
        if not outcomes or any(_unfinished(outcome) for outcome in outcomes) or _is_stub(answer):
            print(
                f"{self.name}: not solved yet. Replace the ... in it, then run the cell again. "
                f"For a hint: check_{self.name}(hint=1), then hint=2."
            )
            return False
        wrong = [n for n, (o, c) in enumerate(zip(outcomes, self.cases, strict=True)) if not self._right(o, c)]
        if wrong:
            self.accepted = None
            print(self._diagnosis(answer, outcomes, wrong))
        else:
            print(f"{self.name}: right, in all {len(self.cases)} cases.\n{self.solved}")
            self.accepted = answer
        if self.draw is not None and all(outcome.error is None for outcome in outcomes):
            self._show_figure(answer)
        return not wrong

    def outcome(self, answer: Function, case: Case) -> Outcome:
        """Runs `answer` on copies of the arguments, so that one that changes them harms no other case."""
        try:
            return Outcome(self.run(answer, *copy.deepcopy(case.args)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # exit() too ends the reader's function, and not the chapter
            return Outcome(error=error)

    def _right(self, outcome: Outcome, case: Case) -> bool:
        return any(outcome.same_as(Outcome(value), self.tolerance) for value in (case.expected, *case.also))

    def explain(self, outcomes: Sequence[Outcome], wrong: Sequence[int]) -> Mistake | None:
        """The mistake that gives the reader's outcome on all cases in `wrong`; of several the one that agrees most."""
        best, most = None, 0
        for mistake in self.mistakes:
            for function in mistake.made_by:
                made = [self.outcome(function, case) for case in self.cases]
                agrees = [o.same_as(m, self.tolerance) for o, m in zip(outcomes, made, strict=True)]
                if all(agrees[n] for n in wrong) and sum(agrees) > most:
                    best, most = mistake, sum(agrees)
        return best

    def _call_lines(self, case: Case) -> list[str]:
        if self.call_lines is not None:
            return self.call_lines(case)
        names = inspect.signature(self.solution).parameters
        return [f"{self.name}({', '.join(f'{p}={shown(a)}' for p, a in zip(names, case.args, strict=True))})"]

    def _diagnosis(self, answer: Function, outcomes: Sequence[Outcome], wrong: Sequence[int]) -> str:
        case, outcome = self.cases[wrong[0]], outcomes[wrong[0]]
        about = f" ({case.about})" if case.about else ""
        first = f" The first of them{about}:" if len(wrong) > 1 else f" It is this one{about}:"
        count = f"{len(wrong)} of {len(self.cases)} cases {'differ' if len(wrong) > 1 else 'differs'}."
        lines = [
            f"{self.name}: not right yet, {count}{first}",
            *(f"    {line}" for line in self._call_lines(case)),
            f"    gives    {_raised(outcome.error, answer) if outcome.error else self.value_line(outcome.value)}",
            f"    expected {self.value_line(case.expected)}",
        ]
        mistake = self.explain(outcomes, wrong)
        if mistake is not None:
            return "\n".join([*lines, f"Hint: {mistake.hint}"])
        told = outcome.error is not None or isinstance(case.expected, int | float | str)  # all that there is to tell
        what = None if told else difference(outcome.value, case.expected, self.tolerance)
        if outcome.error is None and all(outcomes[n].value is None for n in wrong):
            what = "your function returned None: does every way through it end with `return`?"
        if what:
            lines.append(f"    {what[0].upper() + what[1:]}")
        return "\n".join([*lines, f"For a hint: check_{self.name}(hint=1), then hint=2."])

    def _show_figure(self, answer: Function) -> None:
        if not in_notebook():
            return
        from IPython.display import display

        try:
            figure = self.draw(answer)
        except Exception:  # a wrong answer may give what cannot be drawn, and the text has said what is wrong with it
            return
        display(figure)


def yours(name: str) -> Function:
    """What the reader wrote for the exercise `name`, if its check passed; else the worked solution. Says which."""
    modules = (import_module(f".checks.{chapter}", __package__) for chapter in CHAPTERS)
    known = {exercise.name: exercise for module in modules for exercise in module.EXERCISES}
    if name not in known:
        raise KeyError(f"there is no exercise called {name!r}; there are {', '.join(known)}")
    exercise = known[name]
    if exercise.accepted is None:
        print(f"{name}: the worked solution runs here, until check_{name} has accepted yours.")
    else:
        print(f"{name}: this is your own.")
    return exercise.accepted or exercise.solution


def claim(condition: bool, text: str) -> None:
    """Prints what the chapter states and this run has shown; where the run does not show it, says that instead.

    Under CI (`CI` or `MINFER_FAST` is set) an AssertionError, so that no chapter states what is not so.
    """
    if condition and condition == condition:  # NaN shows nothing
        print(text)
        return
    if fast_mode() or os.environ.get("CI"):
        raise AssertionError(f"not shown by this run: {text}")
    print(f"Not on this machine, in this run: {text}")


# -- the reader's function -----------------------------------------------------------------------------------------


def _unfinished(outcome: Outcome) -> bool:
    """Whether a `...` of the stub is still in the result, or was what the code fell over."""
    if isinstance(outcome.error, NotImplementedError) and not outcome.error.args:  # torch's own have something to say
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
    """An exception, and the place in the reader's own code where it happened, in at most two lines."""
    message = str(error).splitlines()[0] if str(error) else "no message"
    text = shortened(f"{type(error).__name__}: {message}")
    code = getattr(answer, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    if not own:
        return f"{text} (your function could not be called like this)" if isinstance(error, TypeError) else text
    line = linecache.getline(own[-1].filename, own[-1].lineno).strip()
    return f"{text}\n             in line {own[-1].lineno} of your cell" + (f": {shortened(line)}" if line else "")
