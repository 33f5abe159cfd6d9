import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlloop.errors import ConfigError
from rlloop.trainer import TrainSequence
from rlloop.trainer.batching import make_step_batch
from rlloop.trainer.leaves import Leaf, recomputed
from rlloop.types import Completion, Example, ModelInput, RewardResult, Sample, SamplingParams
from tests.support.train_sequences import make_batch


def sample(prompt: list[int], made: list[int], advantage: float) -> Sample:
    sampling = SamplingParams(max_tokens=8, temperature=0.5, seed=1)
    logprobs = -np.arange(1, len(made) + 1, dtype=np.float32)
    completion = Completion(prompt, made, logprobs, logprobs, 0, "stop", sampling)
    example = Example(id="e", prompt_ids=prompt, prompt="", data={})
    return Sample("u", example, completion, "", RewardResult(0.0), group=0, advantage=advantage)


@pytest.mark.parametrize("advantage", [0.25, -0.25, 0.0])
def test_a_sample_becomes_a_sequence(advantage) -> None:
    item = TrainSequence.of_sample(sample([5, 6], [7, 8, 9], advantage))
    assert item.token_ids == [5, 6, 7, 8, 9]
    assert list(item.predict) == [2, 3, 4]
    assert item.advantages.tolist() == [advantage] * 3
    assert item.rollout_logprobs is not None
    assert item.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert item.sampling is not None
    assert item.sampling.temperature == 0.5


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_demonstration_is_trained_on_its_target_alone(kind) -> None:
    item = TrainSequence.supervised(kind([5, 6, 7]), kind([8, 9]))
    assert item.token_ids == [5, 6, 7, 8, 9]
    assert list(item.predict) == [3, 4]
    assert item.advantages.tolist() == [1.0, 1.0]


def test_tokens_carry_float32_on_the_device_asked_for() -> None:
    made, demonstration = sample([5], [6, 7], 0.1), TrainSequence.supervised([5], [6])
    assert TrainSequence.of_sample(made).advantages.dtype == demonstration.advantages.dtype == np.float32
    wide = replace(TrainSequence.of_sample(made), advantages=np.array([0.1, 0.2]))
    step = make_step_batch([wide], max_batch_tokens=9, old_logprobs=[np.array([-1.0, -2.0])], device="meta")
    floats = (step.advantages, step.rollout_logprobs, step.old_logprobs)
    assert [values.dtype for values in floats if values is not None] == [torch.float32] * 3
    assert {values.device.type for values in (*floats, step.sequence, step.mask) if values is not None} == {"meta"}


@pytest.mark.parametrize("multiple", [1, 2, 3, 4, 8])
def test_even_micro_batches(multiple: int) -> None:
    """A multiple of so many where there are the sequences, in order, none above the largest of the fewest."""
    generator = np.random.default_rng(multiple)
    for _ in range(60):
        lengths = generator.integers(2, 40, generator.integers(1, 60)).tolist()
        batch = [TrainSequence.supervised([1], [2] * (length - 1)) for length in lengths]

        def cut(lengths: list[int] = lengths, batch: list[TrainSequence] = batch, **settings: int) -> list[list[int]]:
            parts = make_step_batch(batch, max_batch_tokens=80, **settings).micro_batches
            found = [lengths[part.sequences] for part in parts]
            assert [length for part in found for length in part] == lengths
            assert all(found)
            return found

        fewest, even = cut(), cut(multiple=multiple)
        assert len(even) == min(-(-len(fewest) // multiple) * multiple, len(lengths))
        assert max(map(sum, even)) <= max(map(sum, fewest))
        if multiple == 1:
            assert even == fewest


def test_512_sequences_make_16_even_micro_batches() -> None:
    batch = [TrainSequence.supervised([1], [2] * 383)] * 512
    for multiple, counts in ((1, [42] * 12 + [8]), (4, [32] * 16), (3, [35] * 14 + [22]), (5, [35] * 14 + [22])):
        parts = make_step_batch(batch, max_batch_tokens=16384, multiple=multiple).micro_batches
        assert [part.sequences.stop - part.sequences.start for part in parts] == counts


def test_micro_batches_hold_whole_sequences_in_order_under_the_budget() -> None:
    batch = [sample([1] * prompt, [2] * made, 1.0) for prompt, made in [(2, 3), (4, 1), (1, 5), (3, 3), (1, 1)]]
    step = make_step_batch(batch, max_batch_tokens=10)
    assert [(part.sequences.start, part.sequences.stop) for part in step.micro_batches] == [(0, 2), (2, 3), (3, 5)]
    assert [(part.tokens.start, part.tokens.stop) for part in step.micro_batches] == [(0, 4), (4, 9), (9, 13)]
    assert step.sequence.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3, 3, 4]
    part = step.micro_batches[2]
    flat = torch.zeros(4)
    seen = step.loss_batch(part, flat, flat, None)
    assert seen.sequence.tolist() == [0, 0, 0, 1]
    assert seen.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0, -1.0]
    assert (seen.total_tokens, seen.total_sequences) == (13, 5)


def test_micro_batches_are_filled_to_the_last_token() -> None:
    batch = [sample([1] * (length - 1), [2], 1.0) for length in (10, 4, 6, 3, 3, 3, 3)]
    step = make_step_batch(batch, max_batch_tokens=10)
    assert [(part.sequences.start, part.sequences.stop) for part in step.micro_batches] == [
        (0, 1),
        (1, 3),
        (3, 6),
        (6, 7),
    ]


def test_all_that_a_sample_recorded_reaches_scoring_and_the_loss() -> None:
    experts, selected = np.zeros((4, 1, 2), np.int16), np.ones((4, 1), np.int32)
    made = sample([5, 6], [7, 8], 0.25)
    prompt = ModelInput([5, 6], np.array([0, 4]))
    made = replace(
        made, completion=replace(made.completion, routed_experts=experts, selected=selected, model_input=prompt)
    )
    step = make_step_batch([made], max_batch_tokens=9)
    row = step.rows[0]
    assert row.token_ids == [5, 6, 7, 8]
    assert list(row.predict) == [2, 3]
    assert row.sampling == made.completion.sampling
    assert row.routed_experts is experts
    assert row.selected is selected
    assert row.positions(4).tolist() == [0, 4, 5, 6]
    logprobs, entropy, ref = torch.full((2,), -1.0), torch.full((2,), 0.5), torch.full((2,), -2.0)
    seen = step.loss_batch(step.whole, logprobs, entropy, ref)
    assert (seen.logprobs is logprobs, seen.entropy is entropy, seen.ref_logprobs is ref) == (True, True, True)
    assert seen.advantages.tolist() == [0.25, 0.25]
    assert seen.mask.dtype == torch.bool
    assert seen.mask.tolist() == [True, True]


def test_what_is_masked_is_not_counted() -> None:
    batch = make_batch()
    silent = TrainSequence([1, 2, 3], [1, 2], np.ones(2, np.float32), np.zeros(2, np.float32), mask=np.zeros(2, bool))
    step = make_step_batch([*batch, silent], max_batch_tokens=1000)
    masks = [item.mask for item in batch if item.mask is not None]
    assert step.total_tokens == sum(int(mask.sum()) for mask in masks) == int(step.mask.sum())
    assert step.total_sequences == sum(bool(mask.any()) for mask in masks)


def test_split_undoes_the_flattening() -> None:
    batch = make_batch()
    step = make_step_batch(batch, max_batch_tokens=30)
    assert step.rollout_logprobs is not None
    for part, item in zip(step.split(step.rollout_logprobs), batch, strict=True):
        assert (part == item.rollout_logprobs).all()


def test_anchors() -> None:
    here = torch.tensor([-1.0, -2.0], requires_grad=True)
    unknown = make_step_batch([TrainSequence.supervised([1], [2, 3])], max_batch_tokens=9)
    seen = unknown.loss_batch(unknown.whole, here, here, None)
    assert torch.equal(seen.old_logprobs, here)
    assert torch.equal(seen.rollout_logprobs, here)
    assert not seen.old_logprobs.requires_grad
    given = make_step_batch(
        [sample([1], [2, 3], 1.0)], max_batch_tokens=9, old_logprobs=[np.array([-7.0, -8.0], np.float32)]
    )
    seen = given.loss_batch(given.whole, here, here, None)
    assert seen.old_logprobs.tolist() == [-7.0, -8.0]
    assert seen.rollout_logprobs.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("redraws", [True, False])
def test_what_an_engine_made_is_witnessed_and_split_by_sequence(redraws: bool) -> None:
    step = make_step_batch([sample([1], [2, 3], 1.0), sample([1], [4], 1.0)], max_batch_tokens=9)
    record = step.redraw_record(redraws)
    assert record is not None
    assert record.draws is redraws
    logprobs, raw, ids = torch.tensor([-4.0, -5.0, -6.0]), torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([2, 3, 4])
    parts = [t.split([2, 1]) for t in (logprobs, raw, ids)]
    found = recomputed(step, [Leaf(x, x, y, z) for x, y, z in zip(*parts, strict=True)])
    assert [part.tolist() for part in found.logprobs] == [[-4.0, -5.0], [-6.0]]
    assert [part.tolist() for part in found.raw_logprobs or []] == [[-1.0, -2.0], [-3.0]]
    assert [part.tolist() for part in found.redrawn or []] == [[2, 3], [4]]


def test_a_demonstration_has_nothing_to_be_compared_with() -> None:
    step = make_step_batch([TrainSequence.supervised([1], [2, 3])], max_batch_tokens=9)
    assert step.redraw_record(True) is None
    found = recomputed(step, [Leaf(torch.tensor([-4.0, -5.0]), torch.zeros(2))])
    assert [part.tolist() for part in found.logprobs] == [[-4.0, -5.0]]
    assert (found.raw_logprobs, found.redrawn) == (None, None)


@pytest.mark.parametrize("share", [False, True])
def test_a_token_with_nothing_before_it_is_refused(share: bool) -> None:
    """It would be scored from the sequence before its own."""
    others = [TrainSequence.supervised([9], [8, 4])] * 3
    for item in (TrainSequence.supervised([], [5, 6]), TrainSequence([5, 6, 7], [-1], np.ones(1))):
        with pytest.raises(ConfigError, match=r"sequence 3 of .*: a prompt has at least one token"):
            make_step_batch([*others, item], max_batch_tokens=4, share=share)


@pytest.mark.parametrize("name", ["advantages", "mask", "rollout_logprobs", "old_logprobs"])
@pytest.mark.parametrize(("first", "second"), [([1], [0, 1]), ([1, 1], []), ([1, 1], [[1]]), ([1, 1], 1)])
def test_what_goes_with_tokens_has_one_number_for_each(name: str, first: list[int], second: list[int]) -> None:
    """Also where the numbers are as many as the tokens together: they would move to the neighbouring sequence."""
    rows = [([5, 6, 7], [1, 2], first), ([8, 9, 3], [2], second)]
    given = [{"advantages": np.ones(len(at)), name: np.array(values)} for _, at, values in rows]
    old = [each.pop("old_logprobs") for each in given] if name == "old_logprobs" else None
    batch = [TrainSequence(ids, at, **each) for (ids, at, _), each in zip(rows, given, strict=True)]
    wrong, count, shape = (0, 2, [1]) if len(first) == 1 else (1, 1, list(np.shape(second)))
    named = f"predicts {count} tokens, so its {name} must be of shape [{count}], one each; given is {shape}"
    with pytest.raises(ConfigError, match=re.escape(f"sequence {wrong} {named}")):
        make_step_batch(batch, max_batch_tokens=9, old_logprobs=old)


def test_masks_may_be_lists_and_old_logprobs_are_as_many_as_sequences() -> None:
    item = TrainSequence([5, 6, 7], [1, 2], np.ones(2), mask=[True, False])  # pyright: ignore[reportArgumentType]
    assert make_step_batch([item], max_batch_tokens=9).mask.tolist() == [True, False]
    with pytest.raises(ConfigError, match="old_logprobs has 2 entries for 1 sequences"):
        make_step_batch([item], max_batch_tokens=9, old_logprobs=[np.ones(2)] * 2)


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_tokens is 4, and a sequence of 5 tokens.*at least 5"):
        make_step_batch([sample([1, 2], [3, 4, 5], 1.0)], max_batch_tokens=4)
    with pytest.raises(ConfigError, match="no token to train"):
        make_step_batch([TrainSequence([1, 2], [1], np.ones(1), mask=np.zeros(1, bool))], max_batch_tokens=4)
    with pytest.raises(ConfigError, match="no token to train"):
        make_step_batch([], max_batch_tokens=4)
    with pytest.raises(ConfigError, match="1 of 2 sequences carry rollout logprobs"):
        make_step_batch([sample([1], [2], 1.0), TrainSequence.supervised([1], [2])], max_batch_tokens=9)
