"""The reward of countdown: reach a target from given numbers, each used exactly once, with + - * / and parentheses."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from fractions import Fraction

from rlloop.types import Example, RewardResult

MAX_LENGTH = 1000  # characters of an expression; bounds the digits of intermediate values too
MAX_DEPTH = 50  # nested parentheses

TOKEN = re.compile(r" *(?:(0|[1-9][0-9]*)|([-+*/()]))")
STEP = re.compile(r" *(0|[1-9][0-9]*) *([-+*/]) *(0|[1-9][0-9]*) *= *(0|[1-9][0-9]*) *")
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}

Exact = int | Fraction  # whole numbers stay int, which is far faster


def verify(expression: str, numbers: list[int], target: int) -> bool:
    """True if `expression` uses every one of `numbers` exactly once and equals `target`, in exact fractions.

    The language: decimal integers without leading zeros, binary `+ - * /` with the usual precedence, parentheses and
    spaces, all ASCII. There is no unary sign, so `-3+5` is refused. Anything else gives False and never raises: other
    characters, division by zero, other types (a bool is not a number here), over 1,000 characters, over 50 nested
    parentheses.

    >>> verify("(3 + 4) * 5", [5, 3, 4], 35)
    True
    >>> verify("3 * 5", [5, 3, 4], 15)
    False
    """
    if not isinstance(expression, str) or not isinstance(numbers, list | tuple) or not _is_int(target):
        return False
    if len(numbers) > MAX_LENGTH or not all(map(_is_int, numbers)):
        return False
    return _solves(evaluate(expression), numbers, target)


def _solves(evaluated: tuple[Exact, list[int]] | None, numbers: Sequence[int], target: int) -> bool:
    return evaluated is not None and evaluated[0] == target and sorted(evaluated[1]) == sorted(numbers)


def evaluate(expression: str) -> tuple[Exact, list[int]] | None:
    """The exact value of an expression and the integers in it; None if it has no value.

    Two stacks take the place of recursion, so that depth uses no interpreter stack.
    """
    if len(expression) > MAX_LENGTH:
        return None
    values: list[Exact] = []
    pending: list[str] = []  # operators and open parentheses, outermost first
    used: list[int] = []
    position, depth, operand_next = 0, 0, True
    expression = expression.rstrip(" ")
    while position < len(expression):
        match = TOKEN.match(expression, position)
        if match is None:
            return None
        position = match.end()
        digits, sign = match.groups()
        if (digits is not None or sign == "(") != operand_next:
            return None
        if digits is not None:
            used.append(int(digits))
            values.append(used[-1])
            operand_next = False
        elif sign == "(":
            pending.append(sign)
            depth += 1
            if depth > MAX_DEPTH:
                return None
        elif sign == ")":
            if depth == 0 or not _reduce(values, pending, 1):
                return None
            pending.pop()
            depth -= 1
        else:
            if not _reduce(values, pending, PRECEDENCE[sign]):
                return None
            pending.append(sign)
            operand_next = True
    if operand_next or depth or not _reduce(values, pending, 1):
        return None
    return values[0], used


def _reduce(values: list[Exact], pending: list[str], precedence: int) -> bool:
    """Apply pending operators of at least this precedence, back to the last open parenthesis. False: division by 0."""
    while pending and pending[-1] != "(" and PRECEDENCE[pending[-1]] >= precedence:
        operator, right, left = pending.pop(), values.pop(), values.pop()
        if operator == "/" and right == 0:
            return False
        values.append(_apply(operator, left, right))
    return True


def _apply(operator: str, left: Exact, right: Exact) -> Exact:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case _:
            exact = Fraction(left) / right
            return exact.numerator if exact.denominator == 1 else exact


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def compose(trace: str, numbers: Sequence[int]) -> str | None:
    """The expression behind a worked trace `3 + 4 = 7 , 7 * 5 = 35`; None if the text is not a correct trace.

    Each step uses up two of the values at hand (the numbers, and results of earlier steps) and must state its result
    correctly; the last step's expression is the answer.

    >>> compose("3 + 4 = 7 , 7 * 5 = 35", [5, 3, 4])
    '((3 + 4) * 5)'
    """
    if len(trace) > MAX_LENGTH:
        return None
    at_hand = [(number, str(number)) for number in numbers]
    expression = None
    for step in trace.split(","):
        match = STEP.fullmatch(step)
        if match is None:
            return None
        left, operator, right, result = match.groups()
        operands = []
        for operand in (left, right):
            index = next((i for i, (value, _) in enumerate(at_hand) if value == int(operand)), None)
            if index is None:
                return None
            operands.append(at_hand.pop(index)[1])
        if operator == "/" and int(right) == 0:
            return None
        if _apply(operator, int(left), int(right)) != int(result):
            return None
        expression = f"({operands[0]} {operator} {operands[1]})"
        at_hand.append((int(result), expression))
    return expression


def countdown_reward(prompt: str, completion: str, example: Example, *, format_credit: float = 0.0) -> RewardResult:
    """1 for a completion that solves `example.data`'s `numbers` and `target`, else 0.

    The completion is a worked trace (it contains an `=`; see `compose`) or a bare expression. One that does not solve
    the problem but is well-formed, with correct arithmetic, gets `format_credit`. Component: `well_formed`.
    """
    solved, well_formed = _score(completion, tuple(example.data["numbers"]), example.data["target"])
    return RewardResult(1.0 if solved else format_credit * well_formed, solved, {"well_formed": float(well_formed)})


@functools.lru_cache(4096)  # a trained policy gives most prompts of a group the same completion
def _score(completion: str, numbers: tuple[int, ...], target: int) -> tuple[bool, bool]:
    """(solves the problem, is well-formed with correct arithmetic)."""
    expression = compose(completion, numbers) if "=" in completion else completion
    evaluated = None if expression is None else evaluate(expression)
    return _solves(evaluated, numbers, target), evaluated is not None
