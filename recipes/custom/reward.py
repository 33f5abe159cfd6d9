"""The reward that the recipe starts with: short enough to copy and change."""

from __future__ import annotations

from rlloop.rewards.examples import MissingField, field_of
from rlloop.types import Example, RewardResult


def exact_match(prompt: str, completion: str, example: Example, answer_key: str = "answer") -> RewardResult:
    """1 where the completion's last line is the row's answer, but for case and white space; else 0.

    Component: `answered`, whether there was anything but white space.
    """
    right = str(field_of(example, answer_key, "answer_key"))
    lines = completion.strip().splitlines()
    answer, expected = (" ".join(text.lower().split()) for text in (lines[-1] if lines else "", right))
    return RewardResult(float(answer == expected), answer == expected, {"answered": float(bool(lines))})


def _check_example(example: Example, answer_key: str = "answer") -> None:
    if answer_key in example.data:
        return
    key = f"{'+' if answer_key == 'answer' else ''}reward.answer_key"
    has = ", ".join(map(str, example.data)) or "none"
    other = next((name for name in example.data if name != "prompt"), "FIELD")
    raise MissingField(
        f"exact_match reads the row's field {answer_key!r}, and rows have {has}: set "
        f"{key}={other}, or your own reward by reward._target_=module.function"
    )


# A run asks it before it begins, so that rows without an answer are refused.
exact_match.check_example = _check_example  # pyright: ignore[reportFunctionMemberAccess]
