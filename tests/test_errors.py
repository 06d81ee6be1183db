"""The kinds of errors: which is which, and what a caller may catch."""

import pytest

from minfer_lib import MinferError, errors
from minfer_lib.errors import GenerationFailed, one_of

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", KINDS)
def test_all_are_ours_and_explained(kind: type[Exception]):
    assert issubclass(kind, MinferError) and kind.__doc__


def test_bad_values_are_value_errors_and_the_others_are_not():
    bad_values = {errors.InvalidParameter, errors.InvalidPrompt, errors.PromptTooLong}
    assert {kind for kind in KINDS if issubclass(kind, ValueError)} == bad_values
    assert issubclass(errors.PromptTooLong, errors.InvalidPrompt)


def test_a_failed_generation_carries_what_there_is():
    assert GenerationFailed("broke").outputs == []
    assert GenerationFailed("broke", ("a", "b")).outputs == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "text"), [(["a"], "`a`"), (["a", "b"], "`a` or `b`"), (("a", "b", "c"), "`a`, `b` or `c`")]
)
def test_a_choice_in_a_sentence(names: list[str], text: str):
    assert one_of(names) == text
