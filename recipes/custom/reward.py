"""The reward that the recipe starts with: short enough to copy and change."""

from __future__ import annotations

from rlloop.types import Example, RewardResult


def exact_match(prompt: str, completion: str, example: Example, answer_key: str = "answer") -> RewardResult:
    """1 where the completion's last line is the row's answer, but for case and white space; else 0.

    Component: `answered`, whether there was anything but white space.
    """
    if answer_key not in example.data:
        raise KeyError(f"row {example.id} has no field {answer_key!r}; it has {', '.join(example.data)}")
    lines = completion.strip().splitlines()
    answer, expected = (
        " ".join(text.lower().split()) for text in (lines[-1] if lines else "", str(example.data[answer_key]))
    )
    return RewardResult(float(answer == expected), answer == expected, {"answered": float(bool(lines))})
