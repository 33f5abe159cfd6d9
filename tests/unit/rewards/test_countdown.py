from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlloop.rewards.countdown import MAX_DEPTH, MAX_LENGTH, compose, countdown_reward, evaluate, verify
from rlloop.types import Example

OPERATORS = "+-*/"


@st.composite
def expressions(draw: st.DrawFn) -> tuple[str, list[int], Fraction]:
    """A random valid expression with random spaces and spare parentheses, its numbers and its value."""

    def build(depth: int) -> tuple[str, list[int], Fraction, int]:
        """Text, numbers, value, and the precedence of its outermost operator (3: none)."""
        space = draw(st.sampled_from(["", "", " ", "  "]))
        if depth == 0 or draw(st.integers(0, 2)) == 0:
            number = draw(st.integers(0, 99))
            return f"{space}{number}{space}", [number], Fraction(number), 3
        left, left_numbers, a, left_binds = build(depth - 1)
        right, right_numbers, b, right_binds = build(depth - 1)
        operator = draw(st.sampled_from(OPERATORS if b != 0 else OPERATORS[:3]))
        binds = 1 if operator in "+-" else 2
        value = {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[operator]()
        if left_binds < binds or draw(st.booleans()):
            left = f"({left})"
        if right_binds <= binds or draw(st.booleans()):
            right = f"({right})"
        return f"{left}{operator}{space}{right}", left_numbers + right_numbers, value, binds

    text, numbers, value, _ = build(4)
    return text, numbers, value


@given(expressions(), st.randoms(use_true_random=False))
def test_a_valid_expression_is_accepted(made, random):
    text, numbers, value = made
    assert evaluate(text) == (value, numbers)
    random.shuffle(numbers)
    if value.denominator == 1:
        assert verify(text, numbers, int(value))
        assert not verify(text, numbers, int(value) + 1)
        assert not verify(text, [*numbers, 1], int(value))
        assert not verify(text, numbers[1:], int(value))
        assert not verify(text, [numbers[0] + 1, *numbers[1:]], int(value))
    else:
        assert not verify(text, numbers, round(value))


@given(expressions(), st.data())
def test_a_mutation_is_not_accepted_for_another_reason(made, data):
    """Every accepted mutation still is an arithmetic expression that Python itself values alike."""
    text, numbers, value = made
    position = data.draw(st.integers(0, len(text)))
    inserted = data.draw(
        st.sampled_from([*"+-*/() 0123456789", ".", "_", "e", "\t", "\n", "²", "٣", "−", "a", "//", "**"])
    )
    removed = data.draw(st.integers(0, 1))
    mutated = text[:position] + inserted + text[position + removed :]
    result = evaluate(mutated)
    if set(mutated) - set("0123456789+-*/() ") or "//" in mutated or "**" in mutated:
        assert result is None
    elif result is not None:
        # Python's own parser is the oracle; the text holds nothing but arithmetic here.
        assert Fraction(eval(_with_fractions(mutated), {"F": Fraction})) == result[0]
    assert verify(mutated, numbers, int(value)) == (
        value.denominator == 1 and result is not None and result[0] == value and sorted(result[1]) == sorted(numbers)
    )


def _with_fractions(text: str) -> str:
    out, digits = "", ""
    for character in text + " ":
        if character.isdigit():
            digits += character
        else:
            out, digits = out + (f"F({digits})" if digits else "") + character, ""
    return out


anything = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="0123456789+-*/() ", max_size=60),
    st.none(),
    st.integers(),
    st.floats(),
    st.binary(max_size=10),
    st.lists(st.one_of(st.integers(), st.floats(), st.booleans(), st.none()), max_size=5),
)


@settings(max_examples=300)
@given(anything, anything, anything)
@example("1" * 5000, [1], 1)
@example("(" * 100_000, [1], 1)
@example("1/(1-1)", [1, 1, 1], 0)
@example("9" * 400 + "*" + "9" * 400, [10**400 - 1] * 2, (10**400 - 1) ** 2)
@example("1", [10**5000], 10**6000)
def test_nothing_raises(expression, numbers, target):
    assert verify(expression, numbers, target) in (True, False)


@pytest.mark.parametrize(
    ("expression", "numbers", "target"),
    [
        ("3 + 4 * 5", [3, 4, 5], 23),
        ("(3+4)*5", [5, 4, 3], 35),
        ("  3 -4 ", [4, 3], -1),
        ("7 - 2 - 1", [7, 2, 1], 4),
        ("8 / 4 / 2", [8, 4, 2], 1),
        ("8 / (4 / 2)", [8, 4, 2], 4),
        ("(1 / 3) * 6", [6, 3, 1], 2),
        ("8 / (3 - 8 / 3)", [8, 8, 3, 3], 24),
        ("((((5))))", [5], 5),
        ("0 * 7", [0, 7], 0),
        ("(" * MAX_DEPTH + "5" + ")" * MAX_DEPTH, [5], 5),
        ("5" + " " * (MAX_LENGTH - 1), [5], 5),
    ],
)
def test_accepted(expression, numbers, target):
    assert verify(expression, numbers, target) is True


@pytest.mark.parametrize(
    ("expression", "numbers", "target"),
    [
        ("", [], 0),
        ("", [0], 0),
        ("   ", [5], 5),
        ("()", [], 0),
        ("3 + 4", [3, 4], 8),
        ("3 + 4", [3], 7),
        ("3", [3, 4], 3),
        ("3 + 3", [3, 4], 6),
        ("03 + 4", [3, 4], 7),
        ("00", [0], 0),
        ("3.0 + 4", [3, 4], 7),
        ("1_0", [10], 10),
        ("1 0", [10], 10),
        ("+3", [3], 3),
        ("-3 + 5", [3, 5], 2),
        ("3 * (-4)", [3, 4], -12),
        ("3 +", [3], 3),
        ("3 4", [3, 4], 7),
        ("3(4)", [3, 4], 12),
        ("(3)(4)", [3, 4], 12),
        ("(3 + 4", [3, 4], 7),
        ("3 + 4)", [3, 4], 7),
        (")3 + 4(", [3, 4], 7),
        ("2 ** 3", [2, 3], 8),
        ("7 // 2", [7, 2], 3),
        ("7 % 4", [7, 4], 3),
        ("1 / (2 - 2)", [1, 2, 2], 0),
        ("0 / 0", [0, 0], 0),
        ("1 / 3 * 3 + 1", [1, 3, 3], 2),
        ("3\t+ 4", [3, 4], 7),
        ("3 + 4\n", [3, 4], 7),
        ("٣ + 4", [3, 4], 7),
        ("3 − 4", [3, 4], -1),
        ("3 + 4 = 7", [3, 4], 7),
        ("__import__('os')", [], 0),
        ("1e1", [1, 1], 10),
        ("True + 4", [1, 4], 5),
        (b"3 + 4", [3, 4], 7),
        (7, [7], 7),
        ("7", "7", 7),
        ("7", [7.0], 7),
        ("7", ["7"], 7),
        ("7", [7], 7.0),
        ("7", [7], "7"),
        ("1", [True], 1),
        ("1", [1], True),
        ("7", None, 7),
        ("7", {7: 7}, 7),
        ("(" * (MAX_DEPTH + 1) + "5" + ")" * (MAX_DEPTH + 1), [5], 5),
        ("5" + " " * MAX_LENGTH, [5], 5),
    ],
)
def test_refused(expression, numbers, target):
    assert verify(expression, numbers, target) is False


@pytest.mark.parametrize(
    ("trace", "expression"),
    [
        ("3 + 4 = 7 , 7 * 5 = 35", "((3 + 4) * 5)"),
        ("4*5=20,20+3=23", "((4 * 5) + 3)"),
        ("5 - 3 = 2 , 4 / 2 = 2", "(4 / (5 - 3))"),
        ("3 + 4 = 8 , 8 * 5 = 40", None),  # false arithmetic
        ("3 + 4 = 7 , 8 * 5 = 40", None),  # 8 is not at hand
        ("3 + 3 = 6 , 6 * 5 = 30", None),  # 3 is there once
        ("3 - 5 = -2 , 4 - -2 = 6", None),  # no negative numbers
        ("5 / 3 = 1 , 4 * 1 = 4", None),
        ("3 / 0 = 0", None),
        ("3 + 4 = 7 , ", None),
        ("3 + 4 = 7 7 * 5 = 35", None),
        ("3 + 4 = 07", None),
        ("", None),
        ("3 + 4 = 7," * 200, None),
    ],
)
def test_compose(trace, expression):
    assert compose(trace, [5, 3, 4]) == expression


def test_a_result_equal_to_a_given_number_is_used_once():
    expression = compose("3 + 4 = 7 , 7 * 7 = 49", [3, 4, 7])
    assert expression is not None
    assert verify(expression, [3, 4, 7], 49)


def _reward(completion: str, **options: float):
    problem = Example(id="p", prompt_ids=[], prompt="3 4 5 : 35", data={"numbers": [3, 4, 5], "target": 35})
    return countdown_reward(problem.prompt, completion, problem, **options)


def test_the_reward_takes_traces_and_expressions():
    for completion in ("3 + 4 = 7 , 7 * 5 = 35", "(3 + 4) * 5"):
        result = _reward(completion)
        assert (result.reward, result.solved, result.components) == (1.0, True, {"well_formed": 1.0})


def test_the_reward_of_a_miss():
    for completion in ("3 + 4 = 7 , 7 + 5 = 12", "3 + 4 + 5", "3 + 4 = 7"):
        assert _reward(completion).reward == 0.0
        result = _reward(completion, format_credit=0.25)
        assert (result.reward, result.solved, result.components) == (0.25, False, {"well_formed": 1.0})
    for completion in ("3 + 4 = 9 , 9 * 5 = 35", "3 + + 4", "", "<pad>", "3 + 4 = 7 , 7 * 5 = 35 <unk>"):
        result = _reward(completion, format_credit=0.25)
        assert (result.reward, result.solved, result.components) == (0.0, False, {"well_formed": 0.0})
