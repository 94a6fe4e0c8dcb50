"""Published metrics on cases made by hand."""

from __future__ import annotations

import pytest

from engine.evaluation.scorers import (
    contains_all,
    contains_any,
    degenerate,
    first_line,
    gold_number,
    gsm8k,
    label_match,
    rouge_l,
    token_f1,
)


def test_containment() -> None:
    assert contains_all("It is 12 and BLUE.", ["12", "blue", "red"]) == pytest.approx(2 / 3)
    assert contains_any("In Paris", ["London", "paris"]) == 1.0
    assert contains_any("In Rome", ["London", "paris"]) == 0.0
    with pytest.raises(ValueError, match="at least one"):
        contains_all("x", [])


def test_token_f1_strips_case_punctuation_and_articles() -> None:
    assert token_f1("The Eiffel Tower!", ["eiffel tower"]) == 1.0
    # One of three words right against two: precision 1/3, recall 1/2.
    assert token_f1("tall eiffel thing", ["eiffel tower"]) == pytest.approx(0.4)
    assert token_f1("red red", ["red"]) == pytest.approx(2 / 3)
    assert token_f1("", ["a thing"]) == 0.0
    assert token_f1("bees", ["wasps", "bees"]) == 1.0


def test_rouge_l_is_the_longest_common_subsequence() -> None:
    # "the cat sat" in both: 3 of 4 and 3 of 5 words.
    assert rouge_l("the cat sat down", ["the black cat sat there"]) == pytest.approx(2 * 0.75 * 0.6 / 1.35)
    assert rouge_l("b a", ["a b"]) == pytest.approx(0.5)
    assert rouge_l("", ["a"]) == 0.0


def test_labels_are_shared_by_ambiguity() -> None:
    classes = ["City", "Country", "Manner of an action"]
    assert label_match("City", ["City"], classes) == 1.0
    assert label_match("City or Country", ["City"], classes) == 0.5
    assert label_match("Country", ["City"], classes) == 0.0
    # "City" inside "City hall" is no second class.
    assert label_match("City hall", ["City hall"], ["City", "City hall"]) == 1.0


def test_first_line() -> None:
    assert first_line("\n\nParis\nBerlin") == "Paris"


@pytest.mark.parametrize(
    ("answer", "strict", "flexible", "robust", "marked", "fallback"),
    [
        ("4 * 3 = 12\n#### 12", True, True, True, True, False),
        ("so it is 12.", False, True, True, False, True),
        ("#### 12\n\nQuestion: Bob has 5", True, True, True, True, False),
        ("the answer is 12 apples, of 30", False, False, True, True, False),
        ("\\boxed{1,012}", False, False, False, True, False),
        ("no idea", False, False, False, False, False),
        ("#### 13", False, False, False, True, False),
    ],
)
def test_gsm8k(answer: str, strict: bool, flexible: bool, robust: bool, marked: bool, fallback: bool) -> None:
    found = gsm8k(answer, "Four times three.\n#### 12")
    assert (found.strict, found.flexible, found.robust, found.marked, found.fallback) == (
        strict,
        flexible,
        robust,
        marked,
        fallback,
    )


def test_gold_numbers_lose_their_commas() -> None:
    assert gold_number("a\n#### 1,234") == "1234"
    assert gsm8k("#### 1,234", "x #### 1234").strict
    with pytest.raises(ValueError, match="####"):
        gold_number("12")


def test_endless_repetition_is_seen() -> None:
    assert degenerate("well " + "go on " * 6)
    assert degenerate("no no no no")
    assert not degenerate("one two three four five six seven eight")
    assert not degenerate("")
