"""What counts as a right answer to a mathematical task."""

import contextlib

import pytest

from reward.errors import UnparsableAnswer
from reward.verifiers.math import verify


def success(gold: str, answer: str) -> float:
    return verify({"id": "t", "data": {"answer": gold}}, answer)["success"]


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("8", "8"),
        ("8", " 8.0\n"),
        ("8", "+8"),
        ("8", "16/2"),
        ("8", "x=8"),
        ("8", "3+5=8"),
        ("8", "So 3+5 = 8."),
        ("8", "The answer is 8 apples"),
        ("8", r"\boxed{8}"),
        ("8", r"First 3+5, hence $x = 8$"),
        ("72", "48+24 = <<48+24=72>>72 clips.\n#### 72"),
        ("#### 72", "72"),
        ("1234", "1,234"),
        ("-3", "- 3"),
        ("1/2", "0.5"),
        ("0.5", r"\frac{1}{2}"),
        (r"\frac{7}{2}", "3.5"),
        ("0.5", "50%"),
        ("x+1", "1 + x"),
        ("x^2+2x+1", "$(x+1)^2$"),
        (r"\sqrt{2}", "sqrt(2)"),
        ("(1,2)", "(1,2)"),
    ],
)
def test_equal_values_are_right(gold, answer):
    assert success(gold, answer) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("8", "9"),
        ("8", "-8"),
        ("8", "8 9"),
        ("8", r"\boxed{7,8}"),
        ("8", "7, 8"),
        ("x+1", "x+2"),
        ("x+1", "1"),
        ("1/3", "0.3"),
    ],
)
def test_other_values_are_wrong(gold, answer):
    assert success(gold, answer) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "3+5",
        "3+5=",
        "$3+5$",
        r"\boxed{3+5}",
        "The answer is: 3+5",
        "3 5",
        "$3 5$",
        r"\boxed{3 5}",
        "2*4",
        "2^3",
        "$3{}5$",
    ],
)
def test_repeating_the_question_is_no_answer(answer):
    assert success("8", answer) == 0.0


@pytest.mark.parametrize(
    "answer", ["", "   ", "eight", "I do not know", "\x00\x01", "=", "(" * 500, "((((((((((1))))))))))"]
)
def test_an_answer_without_mathematics_is_unparsable(answer):
    with pytest.raises(UnparsableAnswer):
        success("8", answer)


@pytest.mark.parametrize("answer", ["9^{9^{9^9}}", "(10^10)!", "9" * 900, "$" * 900, "-" * 900, "1+" * 450 + "1"])
def test_an_explosive_answer_is_graded_all_the_same(answer):
    with contextlib.suppress(UnparsableAnswer):
        assert success("8", answer) == 0.0


def test_only_the_end_of_a_long_answer_is_read():
    assert success("8", "reasoning 7 " * 10_000 + "so 8") == 1.0


def test_an_expected_answer_that_is_no_mathematics_is_the_tasks_fault():
    with pytest.raises(ValueError, match="'north' of task 't' is no mathematics"):
        success("north", "8")
