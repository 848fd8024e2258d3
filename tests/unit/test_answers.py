"""The final answer of a completion, as a verifier and a majority vote read it."""

from __future__ import annotations

import pytest

from fourfold.answers import final_answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer> 7 </answer> so 8", "7"),
        ("<answer>1</answer> <answer>2</answer>", "2"),
        ("<answer>1</answer> <answer>2</answer> <answer>3", ""),
        (r"\boxed{\frac{1}{2}} or 3", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", ""),
        (r"\boxed{1} then \boxed {\left\{2\right.}", r"\left\{2\right."),
        (r"\boxed{a \boxed{b}", "b"),
        (r"text } \boxed{x}", "x"),
        (r"so \\boxed{x} or \boxed", "x"),
        (r"\boxed{a \\ b}", r"a \\ b"),
        ("so\n#### 1,200.50\nmore 3", "1200.5"),
        ("it is 007, or -12.0", "-12"),
        ("$-0.0$", "0"),
        ("it is 1.50e11", "150000000000"),
        ("#### 1.5 \u00d7 10^-3", "0.0015"),
        ("$- \uff11\uff12$", "-12"),
        ("1e5000", "1E5000"),
        (r"it is 1{,}234 or 10,\!080", "10080"),
        (r"it is 1\,234\,567", "1234567"),
        ("it is 1'234'567", "1234567"),
        ("it is 1\u202f234\u00a0m", "1234"),
        ("it is 1_000_000", "1000000"),
        ("it is 1.234.567 euros", "1234567"),
        ("it is \u20b912,34,567", "1234567"),
        ("at (10,20,30)", "30"),
        ("it is \u201312 or $x$-$12", "12"),
        ("it is \u201312", "-12"),
        (r"lost -\$1,200", "-1200"),
        ("#### \u20ac3.50", "3.5"),
        ("5\u20ac 3", "3"),
        ("it is 1.5 \u00d7 10\u207b\u00b3", "0.0015"),
        ('<think effort="high">7', ""),
        ("<|begin_of_thought|>7<|end_of_thought|>\n8", "8"),
        ("<think>7</think> so 8", "8"),
        ("7</think> so 8 <think> no, 9", "8"),
        ("[THINK]\\boxed{7}", ""),
        ("", ""),
        (r"\boxed{}", ""),
    ],
)
def test_the_answer_is_what_is_marked_or_the_last_number(completion: str, answer: str) -> None:
    assert final_answer(completion, "5") == answer


def test_a_text_is_compared_as_a_whole_if_the_reference_has_no_number() -> None:
    assert final_answer(" Paris, since 987 ", "Paris") == "Paris, since 987"
    assert final_answer("Paris, since 987") == "987"
    assert final_answer("no idea", "5") == "no idea"


def test_an_answer_in_a_block_that_the_prompt_opened_is_none() -> None:
    assert final_answer("it is 7", "5", prompt="<assistant><think>\n") == ""
    assert final_answer("it is 7 </think> 8", "5", prompt="<assistant><think>\n") == "8"
    assert final_answer("it is 7", "5", prompt="<assistant><think>\n\n</think>\n") == "7"


def test_marks_that_are_never_closed_take_no_time() -> None:
    assert final_answer("\\boxed{" * 50_000 + "<answer>" * 50_000 + "7") == ""
    assert final_answer("<think>" * 50_000 + "</think>" * 50_000 + "- " * 50_000 + "7") == "7"


@pytest.mark.parametrize("part", ["11,", "111,", "'111", "1.111", "\u221a("])
def test_groups_of_thousands_that_never_end_take_no_time(part: str) -> None:
    assert final_answer(part * 50_000 + "x 7") == "7"
