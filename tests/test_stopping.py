"""Stop strings: held back while they may come true, released when they do not, cut at the one that ends the text."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_lib.generation.stopping import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str, str | None]:
    """What each piece releases, what the end releases, and the stop string."""
    watch = StopStrings(stops)
    released = [watch.feed(piece) for piece in pieces]
    return released, watch.flush(), watch.hit


def test_without_stop_strings_everything_passes_at_once():
    assert run([], ["a", "", "bc"]) == (["a", "", "bc"], "", None)


def test_a_stop_string_that_spans_pieces_leaks_nothing():
    """vllm#3574: "DEFGHIJ" came as DEF, G, HI, J, and its beginning was streamed."""
    assert run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J"]) == (["ABC", "", "", "", ""], "", "DEFGHIJ")


def test_a_beginning_that_comes_to_nothing_is_released():
    assert run(["DEFG"], ["ABC", "DE", "X"]) == (["ABC", "", "DEX"], "", None)
    assert run(["DEFG"], ["ABC", "DE"]) == (["ABC", ""], "DE", None)


def test_only_what_may_still_be_a_stop_string_is_held():
    # of "aab" + "a" only the last "a" can begin "aac"; and "aa" stays held while more a's come
    assert run(["aac"], ["x", "a", "a", "a", "b", "a"])[0] == ["x", "", "", "a", "aab", ""]


def test_in_the_middle_of_a_piece():
    assert run(["stop"], ["let us stop here"]) == (["let us "], "", "stop")


def test_nothing_comes_after_a_hit():
    released, rest, hit = run(["b"], ["ab", "c", "b"])
    assert (released, rest, hit) == (["a", "", ""], "", "b")


def test_the_first_complete_one_wins():
    assert run(["wor", "longer"], ["a longer word"]) == (["a "], "", "longer")
    assert run(["cd", "b"], ["abcd"]) == (["a"], "", "b")  # complete one character earlier


def test_of_two_complete_at_the_same_character_the_longer_wins():
    assert run(["c", "abc"], ["xabc"]) == (["x"], "", "abc")
    assert run(["abc", "c"], ["xab", "c"]) == (["x", ""], "", "abc")


def test_one_that_overlaps_itself():
    assert run(["abab"], ["ab", "aab", "ab"]) == (["", "aba", ""], "", "abab")
    assert run(["aa"], ["aaa"]) == ([""], "", "aa")


def test_unarmed_text_is_no_hit_but_may_begin_one():
    watch = StopStrings(["end"])
    assert watch.feed("the end, ", armed=False) == "the end, " and watch.hit is None
    assert watch.feed("the en", armed=False) == "the "
    assert watch.feed("d") == "" and watch.hit == "end"


def test_the_hit_that_triggers_cuts_not_an_earlier_one():
    watch = StopStrings(["</a>"])
    assert watch.feed("x</a>y", armed=False) == "x</a>y"  # still within min_tokens
    assert watch.feed("z</a>more") == "z" and watch.hit == "</a>"


def test_an_unarmed_hit_still_held_does_not_trigger_later():
    watch = StopStrings(["aa"])
    assert watch.feed("aa", armed=False) == "a"
    assert watch.feed("b") == "ab" and watch.hit is None
    watch = StopStrings(["abc", "b"])
    assert watch.feed("ab", armed=False) == ""  # the whole of "b" is held, as part of what may become "abc"
    assert watch.feed("x") == "abx" and watch.hit is None


text = st.text("ab<|é", max_size=30)
stops = st.lists(st.text("ab<|é", min_size=1, max_size=5), max_size=4)


def cut(whole: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(whole)) for place in places} | {0, len(whole)})
    return [whole[a:b] for a, b in itertools.pairwise(ends)] or [whole]


def by_definition(stops: list[str], whole: str, free: int = 0) -> tuple[str, str | None]:
    """The shortest beginning of the text, over `free` characters, that ends with a stop string; the longest one."""
    for end in range(free + 1, len(whole) + 1):
        if hits := [stop for stop in stops if whole[:end].endswith(stop)]:
            hit = max(hits, key=len)
            return whole[: end - len(hit)], hit
    return whole, None


@settings(max_examples=400, deadline=None)
@given(stops=stops, whole=text, places=st.lists(st.integers(0, 30), max_size=8))
def test_how_a_text_is_cut_makes_no_difference(stops: list[str], whole: str, places: list[int]):
    released, rest, hit = run(stops, cut(whole, places))
    assert ("".join(released) + rest, hit) == by_definition(stops, whole)
    # at every moment what is out is a beginning of the final text: nothing had to be taken back
    letters, _, _ = run(stops, list(whole))
    assert "".join(letters) == "".join(released)


@settings(max_examples=200, deadline=None)
@given(stops=stops, whole=text, places=st.lists(st.integers(0, 30), max_size=8), armed_from=st.integers(0, 8))
def test_while_unarmed_only_what_ends_later_counts(stops: list[str], whole: str, places: list[int], armed_from: int):
    pieces, watch, out = cut(whole, places), StopStrings(stops), ""
    for number, piece in enumerate(pieces):
        out += watch.feed(piece, armed=number >= armed_from)
    out += watch.flush()
    free = len("".join(pieces[:armed_from]))  # characters that came while nothing counted
    assert (out, watch.hit) == by_definition(stops, whole, free)


@pytest.mark.parametrize("stops", [["ab"], ["ab", "b"], ["é"]])
def test_an_empty_piece_changes_nothing(stops: list[str]):
    first, second = run(stops, ["a", "x"])[0]
    assert run(stops, ["a", "", "x"])[0] == [first, "", second]


def test_what_is_held_is_handed_out_once():
    watch = StopStrings(["abc"])
    watch.feed("xab")
    assert (watch.flush(), watch.flush()) == ("ab", "")
