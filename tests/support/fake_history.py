"""Past versions of a fake trainer's weights, as `rlloop.trainer.history.WeightHistory` keeps real ones."""

import json

import numpy as np

from rlloop.testing import FakePolicy, FakeTrainer
from rlloop.types import Recomputed


class History:
    """The policy's distribution at each version."""

    def __init__(self, policy: FakePolicy) -> None:
        self.policy, self.logits = policy, {}

    def remember(self, version: int) -> None:
        self.logits[version] = self.policy.logits.tolist()

    def recompute(self, samples):
        found = []
        for sample in samples:
            by_token = []
            for version in sample.completion.token_versions:
                past = FakePolicy(self.policy.vocabulary)
                past.logits = np.array(self.logits[int(version)])
                each = FakeTrainer(past).recompute([sample])
                by_token.append((each.logprobs[0], each.raw_logprobs[0], each.redrawn[0]))
            fields = zip(*by_token, strict=True)
            found.append([np.array([row[at] for at, row in enumerate(rows)], rows[0].dtype) for rows in fields])
        return Recomputed(*zip(*found, strict=True))

    def save(self, folder) -> None:
        (folder / "history.json").write_text(json.dumps(self.logits))

    def restore(self, folder) -> None:
        self.logits = {int(key): value for key, value in json.loads((folder / "history.json").read_text()).items()}
