"""The machinery of the checks, on exercises made up here, and every exercise of every chapter's `EXERCISES`."""

import math
from importlib import import_module

import pytest
import torch

from minfer_lib.learn.checks import ch04
from minfer_lib.learn.exercises import CHAPTERS, Case, Exercise, Mistake, Outcome, _is_stub, claim, yours
from minfer_lib.learn.values import difference, shown


def double(x):
    """Twice x."""
    return 2 * x


DOUBLE = Exercise(
    double,
    cases=(Case((2,), 4), Case((5,), 10, "an odd number"), Case((0,), 0)),
    mistakes=(
        Mistake("You multiplied x with itself.", lambda x: x * x),
        Mistake("You added 2.", lambda x: x + 2, lambda x: 2 + x if x else 1),
        Mistake("x may be 0.", lambda x: 4 / x * x * x / 2),
    ),
    hints=("What is twice one?", "Add x to itself."),
    solved="Doubling is a shift by one bit.",
)


def check(answer, exercise=DOUBLE):
    return exercise.check(answer)


def test_right_answer(capsys):
    assert check(lambda x: 2 * x) is True
    assert capsys.readouterr().out == "double: right, in all 3 cases.\nDoubling is a shift by one bit.\n"


def stub_dots(x): ...


def stub_docstring(x):
    """Returns 2 x."""
    ...


def stub_pass(x):
    pass


def stub_raise(x):
    raise NotImplementedError


def stub_variable(x):
    result = ...  # your code
    return result


def stub_computed(x):
    factor = ...
    return x * factor


def stub_pair(x):
    return x, ...


STUBS = [stub_dots, stub_docstring, stub_pass, stub_raise, stub_variable, stub_computed, stub_pair, ..., None]


@pytest.mark.parametrize("stub", STUBS)
def test_unsolved_is_a_neutral_line_that_is_always_the_same(stub, capsys):
    assert check(stub) is False
    assert capsys.readouterr().out.startswith(
        "double: not solved yet. Replace the ... in it, then run the cell again. "
    )


def test_only_functions_that_do_nothing_are_stubs():
    assert all(_is_stub(stub) for stub in (stub_dots, stub_docstring, stub_pass))
    assert not any(_is_stub(f) for f in (stub_raise, lambda x: x, lambda x: 0, print, len, stub_computed))


def test_a_forgotten_return_is_no_stub(capsys):
    def forgot(x):
        x + x

    assert check(forgot) is False
    out = capsys.readouterr().out
    assert "not right yet" in out and "does every way through it end with `return`?" in out


def test_wrong_answers_show_the_first_case_and_the_hint_of_the_mistake(capsys):
    assert check(lambda x: x * x) is False
    assert capsys.readouterr().out == (
        "double: not right yet, 1 of 3 cases differs. It is this one (an odd number):\n"
        "    double(x=5)\n"
        "    gives    25\n"
        "    expected 10\n"
        "Hint: You multiplied x with itself.\n"
    )


def test_every_way_to_make_a_mistake_is_recognised(capsys):
    check(lambda x: x + 2)
    assert "You added 2." in capsys.readouterr().out
    check(lambda x: x + 2 if x else 1)
    assert "You added 2." in capsys.readouterr().out


def test_a_mistake_that_raises_is_recognised_by_what_it_raises(capsys):
    check(lambda x: {2: 4, 5: 10}[x] if x else 1 / x)
    out = capsys.readouterr().out
    assert "ZeroDivisionError" in out and "x may be 0." in out


def test_other_wrong_answers_get_the_general_hint(capsys):
    assert check(lambda x: x - 7) is False
    out = capsys.readouterr().out
    assert "    gives    -5\n    expected 4\nFor a hint: " in out  # and not the same again
    assert out.endswith("For a hint: check_double(hint=1), then hint=2.\n")


def test_of_two_mistakes_the_one_that_agrees_more_explains():
    outcomes = [Outcome(4), Outcome(25), Outcome(0)]
    assert DOUBLE.explain(outcomes, [1]).hint == "You multiplied x with itself."
    assert DOUBLE.explain([Outcome(4), Outcome(26), Outcome(0)], [1]) is None


def test_an_exception_is_reported_with_the_learners_own_line(capsys):
    def broken(x):
        table = {"a": 1}
        return table[str(x)]

    assert check(broken) is False
    out = capsys.readouterr().out
    line = broken.__code__.co_firstlineno + 2
    assert f"KeyError: '2'\n             in line {line} of your cell: return table[str(x)]" in out


def test_the_line_is_the_learners_even_if_a_library_raises(capsys):
    def broken(x):
        return torch.zeros(2) @ torch.zeros(3)

    assert check(broken) is False
    assert "of your cell: return torch.zeros(2) @ torch.zeros(3)" in capsys.readouterr().out


class Hostile:
    """Everything one may ask of a value raises."""

    def __eq__(self, other):
        raise RuntimeError("eq")

    __hash__ = None

    def __repr__(self):
        raise RuntimeError("repr")


class Multiline(Exception):
    def __str__(self):
        return "first\nsecond"


def raise_it(error):
    raise error


@pytest.mark.parametrize(
    "answer",
    [
        lambda: 1,  # takes no argument
        lambda x, y: 1,
        lambda x: Hostile(),
        lambda x: [Hostile()],
        lambda x: {"a": 1},
        lambda x: torch.zeros(3),
        lambda x: float("nan"),
        lambda x: float("inf"),
        lambda x: "text",
        lambda x: 2 * x + 1j,
        lambda x: x,
        lambda x: [x, x],
        lambda x: raise_it(Multiline()),
        lambda x: raise_it(RecursionError()),
        lambda x: raise_it(AssertionError()),
        lambda x: raise_it(StopIteration()),
        print,
        Hostile,
        4,
        "double",
        torch.zeros(2),
    ],
)
def test_a_check_never_raises(answer, capsys):
    assert check(answer) is False
    out = capsys.readouterr().out
    assert out.startswith("double: ") or print is answer
    assert "not solved yet" not in out


def test_a_function_called_too_early_is_explained(capsys):
    check(4)
    assert "without calling it: check_double(double)" in capsys.readouterr().out


def test_a_keyboard_interrupt_is_let_through():
    with pytest.raises(KeyboardInterrupt):
        check(lambda x: raise_it(KeyboardInterrupt()))


def append(items):
    items.append(3)
    return items


def test_a_function_may_change_its_arguments_without_harm():
    cases = (Case(([1, 2],), [1, 2, 3]), Case(([],), [3]))
    exercise = Exercise(append, cases=cases, mistakes=(Mistake("h", lambda i: i),), hints=("", ""), solved="")
    assert exercise.check(append) is True and exercise.check(append) is True


def test_an_exercise_can_look_at_more_than_a_result():
    """What became of an argument, or several calls of a class: `run`; and more than one answer may be right."""

    def state(answer, items):
        answer(items)
        return items

    cases = (Case(([1],), [1, 3], also=([3, 1],)),)
    exercise = Exercise(append, cases=cases, mistakes=(), hints=("", ""), solved="", run=state)
    assert exercise.check(append) and exercise.check(lambda items: items.insert(0, 3))
    assert not exercise.check(lambda items: items.append(4))


def test_hints_come_in_two_steps_and_nothing_is_shown_as_a_value(capsys):
    assert DOUBLE(hint=1) is None and DOUBLE(hint=2) is None and DOUBLE(lambda x: 2 * x) is None
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "double, hint 1 of 2: What is twice one?" and second == "double, hint 2 of 2: Add x to itself."
    DOUBLE(hint=3)
    assert "check_double(hint=1) and check_double(hint=2)" in capsys.readouterr().out


def test_yours_is_the_readers_once_its_check_has_passed(monkeypatch, capsys):
    monkeypatch.setattr(ch04.check_pack, "accepted", None)
    assert yours("pack") is ch04.pack
    assert "the worked solution runs here, until check_pack has accepted yours" in capsys.readouterr().out
    ch04.check_pack(lambda chunks: ([], [], []))
    assert yours("pack") is ch04.pack

    def pack(chunks):
        return ch04.pack(chunks)

    ch04.check_pack(pack)
    assert yours("pack") is pack and "this is your own" in capsys.readouterr().out
    with pytest.raises(KeyError, match=r"no exercise called 'pak'; there are .*pack"):
        yours("pak")


def test_every_exercise_has_a_name_of_its_own():
    names = [
        exercise.name
        for chapter in CHAPTERS
        for exercise in import_module(f"minfer_lib.learn.checks.{chapter}").EXERCISES
    ]
    assert len(set(names)) == len(names) > 20


def test_a_claim_is_printed_where_it_holds_and_raises_under_ci(monkeypatch, capsys):
    claim(True, "paged is faster")
    assert capsys.readouterr().out == "paged is faster\n"
    monkeypatch.setenv("CI", "1")
    with pytest.raises(AssertionError, match="not shown by this run: paged is faster"):
        claim(False, "paged is faster")
    monkeypatch.delenv("CI")
    monkeypatch.delenv("MINFER_FAST", raising=False)
    claim(False, "paged is faster")
    assert capsys.readouterr().out == "Not on this machine, in this run: paged is faster\n"


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (1, 1.0, True),
        (1.0, 1, True),
        (0.1 + 0.2, 0.3, True),
        (1_073_741_825, 1_073_741_824, False),  # integers are exact
        (torch.tensor(0.5), 0.5, True),
        (torch.tensor([0.5, 1.0]), [0.5, 1.0], True),
        ([0.5, 1.0], (0.5, 1.0), True),
        ((torch.tensor(2), torch.tensor(0.25)), (2, 0.25), True),
        ((1, 2), (1, 2, 3), False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (math.inf, math.inf, True),
        (None, 0, False),
        (0, None, False),
        (True, True, True),
        (True, 1, False),
        ("memory", "memory", True),
        ("Memory", "memory", False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1}, {"a": 2}, False),
        (torch.zeros(2, requires_grad=True), [0.0, 0.0], True),
    ],
)
def test_values_are_compared_by_what_they_mean(got, expected, same):
    assert (difference(got, expected) is None) is same


def test_differences_say_where_they_are():
    assert difference((1, 2.5), (1, 2.0)) == "at position 1: 2 was expected and 2.5 came."
    assert difference(1, (1, 2)) == "a tuple of 2 values was expected and one int came."
    assert difference({"a": 1}, {"a": 2}) == "at key 'a': 2 was expected and 1 came."


def test_values_are_shown_short():
    assert shown(1_073_741_824) == "1,073,741,824" and shown(0.1 + 0.2) == "0.3" and shown(7e9) == "7,000,000,000"
    assert shown(torch.tensor([1.0, 2.5])) == "[1, 2.5]" and shown((1,)) == "(1,)" and shown(None) == "None"
    assert shown("x" * 500).endswith("…") and len(shown("x" * 500)) == 90
    assert shown(Hostile()) == "something of type Hostile"


def test_exit_ends_the_readers_function_and_not_the_chapter(capsys):
    assert check(lambda x: exit()) is False
    assert "SystemExit" in capsys.readouterr().out


def test_torchs_own_not_implemented_is_no_stub(capsys):
    def answer(x):
        raise NotImplementedError("\"softmax\" not implemented for 'Long'")

    assert check(answer) is False
    out = capsys.readouterr().out
    assert "not solved yet" not in out and "not implemented for" in out


def test_hints_have_whole_numbers(capsys):
    for hint in (True, 1.0, 3, "1"):
        DOUBLE(hint=hint)
        assert "has two hints" in capsys.readouterr().out
