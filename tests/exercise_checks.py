"""What must hold for the exercises of every chapter: a test file subclasses `ExerciseChecks` and names its chapter."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import pytest

from minfer_lib.learn.exercises import Exercise, Mistake
from minfer_lib.learn.style import Picture


class ExerciseChecks:
    """Stubs fail, solutions pass, and every typical mistake is told apart from the others by its own hint.

    chapter: the module of `learn.checks`. solutions: name of an exercise -> how a learner might solve it.
    """

    chapter: ClassVar[ModuleType]
    solutions: ClassVar[dict[str, Callable[..., Any]]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        exercises = self.chapter.EXERCISES
        if "mistake" in metafunc.fixturenames:
            made = [
                (e, m, f, f"{e.name}: {number} {n}")
                for e in exercises
                for number, m in enumerate(e.mistakes)
                for n, f in enumerate(m.made_by)
            ]
            metafunc.parametrize(
                ("exercise", "mistake", "function"), [one[:3] for one in made], ids=[one[3] for one in made]
            )
        elif "exercise" in metafunc.fixturenames:
            metafunc.parametrize("exercise", exercises, ids=lambda e: e.name)

    def test_there_are_three_to_five(self):
        assert 3 <= len(self.chapter.EXERCISES) <= 5
        assert {exercise.name for exercise in self.chapter.EXERCISES} == set(self.solutions)
        assert all(getattr(self.chapter, f"check_{exercise.name}") is exercise for exercise in self.chapter.EXERCISES)

    def test_the_stub_fails_and_the_solution_passes(self, exercise: Exercise, capsys: pytest.CaptureFixture[str]):
        def stub(*args: Any): ...

        name = exercise.name
        assert exercise.check(stub) is False
        assert capsys.readouterr().out == (
            f"{name}: not solved yet. Replace the ... in it, then run the cell again. "
            f"For a hint: check_{name}(hint=1), then hint=2.\n"
        )
        for solution in (self.solutions[name], exercise.solution):
            assert exercise.check(solution) is True
            assert capsys.readouterr().out.startswith(f"{name}: right, in all ")

    def test_each_typical_mistake_fails_with_its_own_hint(
        self, exercise: Exercise, mistake: Mistake, function: Callable[..., Any], capsys: pytest.CaptureFixture[str]
    ):
        assert exercise.check(function) is False
        assert capsys.readouterr().out.rstrip().endswith(f"Hint: {mistake.hint}")

    def test_hints_are_different_and_lines_are_not_too_long(
        self, exercise: Exercise, capsys: pytest.CaptureFixture[str]
    ):
        hints = [*(mistake.hint for mistake in exercise.mistakes), *exercise.hints]
        assert len(set(hints)) == len(hints) and 3 <= len(exercise.mistakes) <= 5 and exercise.__doc__
        for mistake in exercise.mistakes:
            exercise.check(mistake.made_by[0])
            first_lines = capsys.readouterr().out.splitlines()[:4]
            assert max(map(len, first_lines)) <= 130

    def test_pictures_can_be_drawn_for_right_and_for_wrong_answers(self, exercise: Exercise):
        if exercise.draw is None:
            return
        picture = exercise.draw(self.solutions[exercise.name])
        assert isinstance(picture, Picture) and len(picture.png()) < 60_000
        drawn = 0
        for mistake in exercise.mistakes:
            for function in mistake.made_by:
                if all(exercise.outcome(function, case).error is None for case in exercise.cases):
                    try:
                        drawn += isinstance(exercise.draw(function), Picture)
                    except Exception:  # most must be drawable all the same
                        continue
        assert drawn >= 2
