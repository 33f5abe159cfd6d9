"""Groups whose prompt is computed once: logprobs have the bits of whole sequences, and gradients are those rounded
otherwise."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlloop import NumericsProfile
from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.models import load_model
from rlloop.models.adapter_weights import Adapter, choose_targets, fresh_weights
from rlloop.models.shared_prompts import Pieces, shared_tokens
from rlloop.trainer import Trainer, TrainSequence
from rlloop.trainer.batching import make_step_batch
from rlloop.trainer.update_result import UpdateResult
from rlloop.types import ContentSpan, ModelInput
from tests.support.checkpoints import RECURRENT, make_checkpoint
from tests.support.image_models import FAMILIES, make_image_checkpoint, make_picture_groups
from tests.support.train_sequences import VOCAB, gradients, make_groups

SHARED = 64 * (2 + 1 + 1)  # tokens of `GROUPS` that are not computed


def run(
    folder: Path, share: bool, batch: list[TrainSequence] | None = None, loss: str = "grpo", **settings
) -> tuple[UpdateResult, dict[str, torch.Tensor]]:
    trainer = Trainer(load_model(folder), TrainerConfig(share_prompts=share, **settings))
    result = trainer.forward_backward(make_groups() if batch is None else batch, get_loss(loss))
    return result, gradients(trainer)


def bits(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.detach().numpy().tobytes() for name, value in values.items()}


def logprob_bits(result: UpdateResult) -> list[bytes]:
    return [each.tobytes() for each in result.logprobs]


def assert_near(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, grad in mine.items():
        assert float(grad.abs().max()) > 0
        assert (grad - theirs[name]).norm() < 1e-5 * theirs[name].norm(), name


@pytest.mark.parametrize("budget", [10_000, 200, 90])
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_an_update_is_that_of_whole_sequences(folder: Path, loss: str, budget: int) -> None:
    whole, theirs = run(folder, False, loss=loss)
    result, mine = run(folder, True, loss=loss, max_batch_tokens=budget)
    assert logprob_bits(result) == logprob_bits(whole)
    assert result.metrics["loss/total"].value == pytest.approx(whole.metrics["loss/total"].value, abs=1e-7)
    assert result.forward_tokens == whole.forward_tokens
    share = result.metrics["trainer/shared_tokens"].value
    assert share == SHARED / result.forward_tokens if budget > 200 else share <= SHARED / result.forward_tokens
    assert "trainer/shared_tokens" not in whole.metrics
    assert_near(mine, theirs)
    if budget == 10_000:
        assert bits(mine) != bits(theirs)


def test_it_repeats_itself(folder: Path) -> None:
    _, once = run(folder, True, max_batch_tokens=200)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert bits(run(folder, True, max_batch_tokens=200)[1]) == bits(once)
    finally:
        torch.set_num_threads(before)
    assert bits(run(folder, True, max_batch_tokens=200, checkpoint_layers="all")[1]) == bits(once)


def test_without_a_common_prompt_the_gradient_has_the_same_bits(folder: Path) -> None:
    alone = make_groups([(1, 70), (1, 70), (3, 64), (1, 66)])
    assert bits(run(folder, True, alone)[1]) == bits(run(folder, False, alone)[1])


def test_budgets_are_of_computed_tokens() -> None:
    batch = [
        replace(item, token_ids=item.token_ids[:70] + [1] * 10, predict=range(70, 80))
        for item in make_groups([(6, 70)])
    ]
    batch = [replace(item, advantages=np.ones(10, np.float32), rollout_logprobs=None, mask=None) for item in batch]
    step = make_step_batch(batch, max_batch_tokens=120, share=True)
    assert [(micro.sequences.start, micro.sequences.stop) for micro in step.micro_batches] == [(0, 3), (3, 6)]
    assert step.shared == [0, 64, 64, 0, 64, 64]
    assert [micro.sequences.stop for micro in make_step_batch(batch, max_batch_tokens=120).micro_batches] == [
        *range(1, 7)
    ]
    even = make_step_batch(batch, max_batch_tokens=120, share=True, multiple=3)
    assert [micro.sequences.stop for micro in even.micro_batches] == [2, 4, 6]
    assert even.shared == [0, 64, 0, 64, 0, 64]
    with pytest.raises(ConfigError, match="a sequence of 80 tokens does not fit"):
        make_step_batch(batch, max_batch_tokens=79, share=True)


def test_only_equal_texts_are_shared() -> None:
    one, two, *_ = make_groups([(2, 130)])
    other = replace(two, token_ids=[*two.token_ids[:129], one.token_ids[129] % 60 + 1, *two.token_ids[130:]])
    placed, again = (replace(two, model_input=ModelInput(two.token_ids[:130], np.arange(3, 133))) for _ in range(2))
    silent = replace(two, predict=range(0))
    assert shared_tokens([one, two, two]) == [0, 128, 128]
    assert shared_tokens([one, other, one]) == [0, 0, 0]
    assert shared_tokens([one, placed, again]) == [0, 0, 128]
    pictures = [replace(two, model_input=ModelInput(two.token_ids[:130], None, (ContentSpan(2, 9, d),))) for d in "aab"]
    assert shared_tokens([two, *pictures]) == [0, 0, 128, 0]
    assert shared_tokens([one, silent, two]) == [0, 0, 0]
    pieces = Pieces.of([5, 130, 133, 70], [0, 0, 128, 0])
    assert pieces.families == [[5], [128, 2, 5], [70]]
    assert pieces.spans == [(0, 0, 5), (1, 0, 128), (1, 128, 130), (2, 128, 133), (3, 0, 70)]
    assert pieces.starts.tolist() == [0, 5, 7, 140]
    assert pieces.places[2].tolist() == [*range(5, 133), *range(135, 140)]


def test_recomputing_shares_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(load_model(folder), TrainerConfig())
    batch, counts, hidden = make_groups(), [], trainer.model.hidden
    monkeypatch.setattr(
        trainer.model,
        "hidden",
        lambda tokens, *args, **more: (counts.append(len(tokens)), hidden(tokens, *args, **more))[1],
    )
    trained = trainer.forward_backward(batch, get_loss("grpo"))
    again = trainer.recompute(batch)
    assert [each.tobytes() for each in again.logprobs] == logprob_bits(trained)
    assert counts == [counts[0], counts[0] - SHARED]


def test_an_adapter_trains_over_shared_prompts(folder: Path) -> None:
    def trained(share: bool) -> tuple[UpdateResult, dict[str, torch.Tensor]]:
        model = load_model(folder).requires_grad_(False)
        chosen = choose_targets(model.adapter_targets(), ("all-linear", "lm_head"))
        fresh = fresh_weights(chosen, 4, 6.0, seed=3)
        weights = replace(fresh, factors={name: (down, up + 0.02) for name, (down, up) in fresh.factors.items()})
        trainer = Trainer(model.with_adapter(Adapter(weights, chosen)), TrainerConfig(share_prompts=share))
        return trainer.forward_backward(make_groups(), get_loss("grpo")), gradients(trainer)

    (result, mine), (whole, theirs) = trained(True), trained(False)
    assert logprob_bits(result) == logprob_bits(whole)
    assert_near(mine, theirs)


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("budget", [10_000, 200])
def test_states_are_shared(tmp_path: Path, family: str, budget: int) -> None:
    make_checkpoint(tmp_path, family, vocab_size=VOCAB)
    (result, mine), (whole, theirs) = run(tmp_path, True, max_batch_tokens=budget), run(tmp_path, False)
    assert logprob_bits(result) == logprob_bits(whole)
    assert_near(mine, theirs)
    assert bits(mine) != bits(theirs)
    assert bits(run(tmp_path, True, max_batch_tokens=budget, checkpoint_layers="all")[1]) == bits(mine)


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_are_shared(tmp_path: Path, family: str) -> None:
    make_image_checkpoint(tmp_path, family)
    (result, mine), (whole, theirs) = (run(tmp_path, share, make_picture_groups()) for share in (True, False))
    assert result.metrics["trainer/shared_tokens"].value == 64 * 3 / result.forward_tokens
    assert logprob_bits(result) == logprob_bits(whole)
    assert_near(mine, theirs)


def test_balance_losses_count_a_prompt_for_each_sequence(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", vocab_size=VOCAB)
    (result, mine), (whole, theirs) = (run(tmp_path, share, balance_coef=0.1) for share in (True, False))
    assert logprob_bits(result) == logprob_bits(whole)
    assert_near(mine, theirs)


def test_replayed_sequences_stay_whole(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", vocab_size=VOCAB)
    rng = np.random.default_rng(0)
    batch = [
        replace(
            item,
            routed_experts=np.stack([rng.permutation(8)[:2] for _ in range(2 * len(item.token_ids))]).reshape(-1, 2, 2),
        )
        for item in make_groups()
    ]
    made = []
    for share in (True, False):
        trainer = Trainer(load_model(tmp_path), TrainerConfig(share_prompts=share))
        trainer.replay_experts(True)
        made.append((logprob_bits(trainer.forward_backward(batch, get_loss("grpo"))), bits(gradients(trainer))))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("family", "profile", "reason"),
    [
        ("qwen3_5_moe", NumericsProfile(recurrent="reference"), "the profile's operations do not promise"),
        ("deepseek_v32", NumericsProfile(), "sparse attention has gradients"),
        ("qwen3", NumericsProfile(attention="stock"), "the profile's operations do not promise the same bits"),
    ],
)
def test_models_that_cannot_are_refused(tmp_path: Path, family: str, profile: NumericsProfile, reason: str) -> None:
    make_checkpoint(tmp_path, family)
    model = load_model(tmp_path, profile=profile)
    with pytest.raises(ConfigError, match=f"trainer.share_prompts: {reason}.*set it to false"):
        Trainer(model, TrainerConfig(share_prompts=True))
    Trainer(model, TrainerConfig())
