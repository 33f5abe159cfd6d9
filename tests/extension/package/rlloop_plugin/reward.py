"""A reward: prompt, completion and example to a number, or to a `RewardResult` with components that are logged."""

from rlloop.types import Example, RewardResult


def letters(prompt: str, completion: str, example: Example, *, letter: str = "a") -> RewardResult:
    """The fraction of `letter` in what was written, and what the conversation's environment gave."""
    share = completion.count(letter) / max(1, len(completion))
    return RewardResult(share + example.data["episode"]["reward"], components={"letters": share})
