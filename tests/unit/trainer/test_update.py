"""The update on a small model: what it must equal, and what must not change it."""

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlloop.algorithms import LossBatch, LossOutput, entropy_term, get_loss, whole_step
from rlloop.config.trainer import Schedule, TrainerConfig
from rlloop.errors import ConfigError, ModelError, RunError
from rlloop.metrics import Mean, merge
from rlloop.models import load_model, new_model
from rlloop.models.checkpoint_names import EMBEDDING, HEAD
from rlloop.numerics.kernels.cpu import backend
from rlloop.numerics.tree import TreeSum
from rlloop.trainer import Trainer, TrainSequence
from rlloop.types import SamplingParams
from tests.support.train_sequences import gradients, make_batch


def make_trainer(folder: Path, dtype: str = "float32", **settings) -> Trainer:
    return Trainer(load_model(folder, dtype=dtype), TrainerConfig(**{"lr": 1e-2, **settings}))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.masters.items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)) for name in a)


def policy_gradient(batch: LossBatch) -> LossOutput:
    kept = (batch.logprobs * batch.advantages)[batch.mask]
    return LossOutput(-kept.sum() / batch.total_tokens, {"loss/policy": Mean(-kept.sum().item(), len(kept))})


def test_gradient_and_updates_equal_a_plain_torch_loop(folder: Path) -> None:
    trainer = make_trainer(folder, weight_decay=0.1, grad_clip=0.5, schedule=Schedule.linear, num_steps=4)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step, lr in enumerate([1e-2, 7.5e-3, 5e-3]):
        batch = make_batch(seed=step)
        trained = sum(int(item.mask.sum()) for item in batch if item.mask is not None)
        loss = torch.zeros(())
        for item in batch:
            logits = theirs(torch.tensor([item.token_ids])).logits[0]
            at = torch.tensor(list(item.predict))
            logprobs = logits.log_softmax(-1)[at - 1, torch.tensor(item.token_ids)[at]]
            loss = loss - (logprobs * torch.tensor(item.advantages))[torch.tensor(item.mask)].sum() / trained
        loss.backward()
        result = trainer.forward_backward(batch, policy_gradient)
        assert result.metrics["loss/total"].value == pytest.approx(loss.item(), abs=1e-6)
        if step == 0:
            for name, parameter in theirs.named_parameters():
                torch.testing.assert_close(gradients(trainer)[name], parameter.grad, atol=1e-6, rtol=1e-4)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        metrics = trainer.optim_step()
        assert metrics == {
            "loss/grad_norm": pytest.approx(norm.item(), rel=1e-4),
            "trainer/lr": lr,
            "trainer/refused": 0.0,
        }
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(trainer.masters[name].detach(), parameter.detach(), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "gspo", "sft"])
def test_packing_changes_neither_logprobs_nor_gradient(folder: Path, loss: str) -> None:
    batch = make_batch()
    results = []
    for budget in (10_000, 60, 25):
        trainer = make_trainer(folder, max_batch_tokens=budget)
        results.append((trainer.forward_backward(batch, get_loss(loss)), gradients(trainer)))
    (whole, grads), *others = results
    assert [result.micro_batches for result, _ in results] == [1, 3, 9]
    for result, other in others:
        assert all(
            (a.view(np.int32) == b.view(np.int32)).all() for a, b in zip(whole.logprobs, result.logprobs, strict=True)
        )
        for name, metric in whole.metrics.items():
            assert result.metrics[name].value == pytest.approx(metric.value, rel=1e-6, abs=1e-9)
        for name, grad in grads.items():
            assert float(grad.abs().max()) > 0
            torch.testing.assert_close(other[name], grad, atol=1e-7, rtol=1e-5)


def test_the_same_update_twice_is_the_same_bits(folder: Path) -> None:
    def run() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        trainer = make_trainer(folder, max_batch_tokens=60)
        for step in range(3):
            trainer.forward_backward(make_batch(seed=step), get_loss("grpo"))
            before = gradients(trainer)
            trainer.optim_step()
        return before, weights(trainer)

    (grads, masters), (grads_again, masters_again) = run(), run()
    assert same_bits(grads, grads_again)
    assert same_bits(masters, masters_again)
    assert not same_bits(masters, weights(make_trainer(folder)))


def test_a_loss_sees_the_totals_of_the_whole_step(folder: Path) -> None:
    seen: list[LossBatch] = []

    def spy(batch: LossBatch) -> LossOutput:
        seen.append(batch)
        return policy_gradient(batch)

    batch = make_batch()
    result = make_trainer(folder, max_batch_tokens=25).forward_backward(batch, spy)
    masks = [item.mask for item in batch if item.mask is not None]
    trained = sum(int(mask.sum()) for mask in masks)
    assert sum(not mask.any() for mask in masks) == 1  # a sequence without a trained token does not count
    assert {(part.total_tokens, part.total_sequences) for part in seen} == {(trained, 8)}
    assert (result.tokens, result.sequences) == (trained, 8)
    assert result.forward_tokens == sum(len(item.token_ids) for item in batch)
    assert sum(int(part.mask.sum()) for part in seen) == trained
    assert all(torch.equal(part.old_logprobs, part.logprobs) for part in seen)


@pytest.mark.parametrize("budget", [10_000, 25])
@pytest.mark.parametrize("loss", ["grpo", "gspo", "sft"])
def test_custom_equals_fused(folder: Path, loss: str, budget: int) -> None:
    batch = make_batch()
    old = [item.rollout_logprobs for item in batch if item.rollout_logprobs is not None]
    fused, custom = (make_trainer(folder, max_batch_tokens=budget) for _ in range(2))
    first = fused.forward_backward(batch, get_loss(loss), old_logprobs=old)
    second = custom.forward_backward_custom(batch, get_loss(loss), old_logprobs=old)
    assert all((a == b).all() for a, b in zip(first.logprobs, second.logprobs, strict=True))
    assert same_bits(gradients(fused), gradients(custom))
    assert first.metrics["loss/total"].value == pytest.approx(second.metrics["loss/total"].value, rel=1e-9)


def test_custom_takes_any_function_of_all_logprobs_and_entropies(folder: Path) -> None:
    batch = make_batch()

    def pairwise(seen: LossBatch) -> LossOutput:  # a preference between neighbours: no micro-batch could compute it
        scores = seen.sequence_sum(seen.logprobs.double()) + seen.sequence_sum(seen.entropy.double())
        return LossOutput(-torch.nn.functional.logsigmoid(scores[:-1] - scores[1:]).mean(), {})

    batch = [dataclasses.replace(item, mask=None) for item in batch]
    whole, cut = make_trainer(folder), make_trainer(folder, max_batch_tokens=25)
    fused = whole.forward_backward(batch, pairwise)
    custom = cut.forward_backward_custom(batch, pairwise)
    assert custom.micro_batches > fused.micro_batches == 1
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(gradients(cut)[name], grad, atol=1e-6, rtol=1e-4)


def test_logprobs_are_those_of_the_update_and_leave_no_gradient(folder: Path) -> None:
    batch = [
        dataclasses.replace(item, sampling=SamplingParams(max_tokens=20, temperature=0.7)) for item in make_batch()
    ]
    trainer = make_trainer(folder, max_batch_tokens=60)
    before = trainer.logprobs(batch)
    assert not gradients(trainer)
    after = trainer.forward_backward(batch, policy_gradient).logprobs
    assert all(a.dtype == np.float32 and (a == b).all() for a, b in zip(before, after, strict=True))
    plain = trainer.logprobs(make_batch())
    assert not any((a == b).all() for a, b in zip(before, plain, strict=True))  # the temperature is in them


def test_clipping_scales_the_gradient_and_reports_the_norm_before(folder: Path) -> None:
    norms, moments = [], []
    for clip in (0.0, 0.05):
        trainer = make_trainer(folder, grad_clip=clip, betas=(0.0, 0.0))
        trainer.forward_backward(make_batch(), policy_gradient)
        norms.append(trainer.optim_step()["loss/grad_norm"])
        moments.append(torch.cat([trainer._optimizer.moment(name, "exp_avg").flatten() for name in trainer.masters]))
    assert norms[0] == norms[1] > 0.05
    assert moments[0].norm().item() == pytest.approx(norms[0], rel=1e-5)
    assert moments[1].norm().item() == pytest.approx(0.05, rel=1e-4)


def test_decay_spares_norms(folder: Path) -> None:
    trainer = make_trainer(folder, weight_decay=0.5, lr=0.1)
    before = weights(trainer)
    trainer.forward_backward(make_batch(), lambda batch: LossOutput(0.0 * batch.logprobs.sum(), {}))
    trainer.optim_step()
    for name, tensor in weights(trainer).items():
        factor = 0.95 if tensor.ndim == 2 else 1.0
        torch.testing.assert_close(tensor, before[name] * factor)


def test_a_tied_weight_is_one_master(folder: Path) -> None:
    trainer = make_trainer(folder)
    assert "lm_head.weight" not in trainer.masters
    assert trainer.masters["model.embed_tokens.weight"].data_ptr() == trainer.model.head.data_ptr()


def test_a_gradient_that_is_not_finite_is_refused(folder: Path) -> None:
    trainer = make_trainer(folder)
    trainer.forward_backward(make_batch(), policy_gradient)
    trainer.optim_step()
    before = weights(trainer)
    moments = {name: trainer._optimizer.moment(name, "exp_avg").clone() for name in before}
    trainer.forward_backward(make_batch(), lambda batch: LossOutput(batch.logprobs.sum() * torch.inf, {}))
    metrics = trainer.optim_step()
    assert metrics["trainer/refused"] == 1.0
    assert not np.isfinite(metrics["loss/grad_norm"])
    assert same_bits(before, weights(trainer))
    assert all(torch.equal(kept, trainer._optimizer.moment(name, "exp_avg")) for name, kept in moments.items())
    trainer.forward_backward(make_batch(), policy_gradient)
    assert trainer.optim_step()["trainer/refused"] == 0.0
    assert not same_bits(before, weights(trainer))


def test_low_precision_rounds_the_masters_once_and_loses_no_small_update(folder: Path) -> None:
    trainer = make_trainer(folder, "bfloat16", lr=1e-5)
    live = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    places = {name: parameter.data_ptr() for name, parameter in trainer.model.named_parameters()}
    start = weights(trainer)
    for _ in range(4):
        trainer.forward_backward(make_batch(), policy_gradient)
        assert all(grad.dtype == torch.float32 for grad in gradients(trainer).values())
        trainer.optim_step()
    for name, parameter in trainer.model.named_parameters():
        master = trainer.masters[name]
        assert master.dtype == torch.float32
        assert parameter.dtype == torch.bfloat16
        assert parameter.data_ptr() == places[name]  # in place: an engine sees it
        assert torch.equal(parameter, master.detach().bfloat16())
        assert not torch.equal(master.detach(), start[name])
    norm = "model.norm.weight"  # around 1, where a bfloat16 step is 2^-7: four updates of 1e-5 vanish in it
    assert torch.equal(trainer.model.get_parameter(norm), live[norm])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_weight_has_no_master_and_is_saved_as_it_is(folder: Path, tmp_path: Path, dtype: str) -> None:
    model, name = load_model(folder, dtype=dtype), "model.layers.0.mlp.up_proj.weight"
    frozen = model.get_parameter(name).requires_grad_(False)
    before = frozen.clone()
    trainer = Trainer(model, TrainerConfig(lr=1e-2, weight_decay=0.1))
    assert trainer.masters.keys() == dict(model.named_parameters()).keys() - {name}
    start = weights(trainer)
    trainer.forward_backward(make_batch(), policy_gradient)
    trainer.optim_step()
    assert torch.equal(frozen, before)
    assert not any(torch.equal(start[name], weight) for name, weight in weights(trainer).items())
    (tmp_path / "saved").mkdir()
    trainer.save(tmp_path / "saved")
    again = Trainer(load_model(folder, dtype=dtype), TrainerConfig())
    again.model.get_parameter(name).requires_grad_(False)
    again = Trainer(again.model, TrainerConfig())
    again.restore(tmp_path / "saved")
    assert same_bits(weights(again), weights(trainer))
    assert torch.equal(again.model.get_parameter(name), before)


def test_recomputed_layers_keep_less_and_change_no_bit(folder: Path) -> None:
    kept, found = [], []
    for setting in ("none", "2", "all"):
        trainer = make_trainer(folder, checkpoint_layers=setting)
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = trainer.forward_backward(make_batch(), policy_gradient)
        kept.append(sum(sizes))
        found.append({**gradients(trainer), "logprobs": torch.from_numpy(np.concatenate(result.logprobs))})
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])
    assert kept[0] > kept[1] > kept[2]


def test_micro_batch_gradients_add_up_in_a_float32_tree(folder: Path) -> None:
    batch = make_batch()
    trainer = make_trainer(folder, "bfloat16", max_batch_tokens=25)
    trainer.forward_backward(batch, policy_gradient)
    total = sum(int(item.mask.sum()) for item in batch if item.mask is not None)
    alone = {use: TreeSum() for use in [HEAD, *trainer.masters]}
    for item in (item for item in batch if item.mask is not None and item.mask.any()):
        single = make_trainer(folder, "bfloat16")
        single.forward_backward([item], lambda seen: policy_gradient(dataclasses.replace(seen, total_tokens=total)))
        for use, tree in single._masters.gradients._trees.items():
            (term,) = tree._sums
            assert term is not None
            assert term.dtype == torch.bfloat16
            alone[use].push(term)
    totals = {use: tree.total() for use, tree in alone.items()}
    totals[EMBEDDING] += totals.pop(HEAD)  # a tied weight's two uses are two trees
    assert same_bits(gradients(trainer), totals)


def test_masters_of_a_rounded_model_begin_at_the_stored_weights(folder: Path) -> None:
    exact = dict(load_model(folder).named_parameters())
    model = load_model(folder, dtype="bfloat16")
    trainer = Trainer(model, TrainerConfig())
    assert all(torch.equal(trainer.masters[name], tensor) for name, tensor in exact.items())
    assert all(torch.equal(live, exact[name].bfloat16()) for name, live in model.named_parameters())
    assert not all(torch.equal(live.float(), exact[name]) for name, live in model.named_parameters())
    with torch.no_grad():
        model.head[3] += 1  # no longer what the folder holds
    changed = Trainer(model, TrainerConfig())
    assert all(torch.equal(changed.masters[name], live.float()) for name, live in model.named_parameters())


def test_restoring_another_models_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder)
    trainer.save(tmp_path)
    other = Trainer(new_model({**trainer.model.config.raw, "hidden_size": 16}, seed=0), TrainerConfig())
    with pytest.raises(ModelError, match=r"embed_tokens\.weight has shape \[61, 32\]; the model's is \[61, 16\]"):
        other.restore(tmp_path)
    untied = Trainer(new_model({**trainer.model.config.raw, "tie_word_embeddings": False}, seed=0), TrainerConfig())
    with pytest.raises(ModelError, match=r"missing \['lm_head\.weight'\]"):
        untied.restore(tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def of_another_model(path: Path) -> None:
    save_file({"step.other": torch.zeros(())}, path)


@pytest.mark.parametrize("name", ["trainer.json", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", [Path.unlink, cut, of_another_model])
def test_a_damaged_checkpoint_is_refused_before_anything_is_restored(
    folder: Path, tmp_path: Path, name, damage
) -> None:
    saved, other = make_trainer(folder), make_trainer(folder)
    for trainer in (saved, other):
        trainer.forward_backward(make_batch(), policy_gradient)
        trainer.optim_step()
    saved.forward_backward(make_batch(seed=1), policy_gradient)
    saved.optim_step()
    saved.save(tmp_path)
    before = weights(other)
    damage(tmp_path / name)
    with pytest.raises(RunError, match=rf"{name}.*optimizer=False"):
        other.restore(tmp_path)
    assert same_bits(before, weights(other))
    assert other.updates == 1
    other.restore(tmp_path, optimizer=False)
    assert same_bits(weights(saved), weights(other))


def test_a_loss_that_raises_leaves_no_gradient(folder: Path) -> None:
    clean, broken = (make_trainer(folder, max_batch_tokens=25) for _ in range(2))
    calls = 0

    def raises_later(batch: LossBatch) -> LossOutput:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return policy_gradient(batch)

    with pytest.raises(KeyboardInterrupt):
        broken.forward_backward(make_batch(), raises_later)
    with pytest.raises(ConfigError, match="call forward_backward first"):
        broken.optim_step()
    for trainer in (clean, broken):
        trainer.forward_backward(make_batch(), policy_gradient)
    assert same_bits(gradients(clean), gradients(broken))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_restore_continue_with_the_same_bits(folder: Path, tmp_path: Path, dtype: str) -> None:
    settings = {"schedule": Schedule.cosine, "num_steps": 6, "warmup_steps": 2, "weight_decay": 0.1}

    def go(trainer: Trainer, steps: range) -> list[dict[str, float]]:
        metrics = []
        for step in steps:
            trainer.forward_backward(make_batch(seed=step), get_loss("grpo"))
            metrics.append(trainer.optim_step())
        return metrics

    through = make_trainer(folder, dtype, **settings)
    whole = go(through, range(6))
    first = make_trainer(folder, dtype, **settings)
    half = go(first, range(3))
    first.save(tmp_path / "a")
    second = make_trainer(folder, dtype, **settings)
    go(second, range(1))  # whatever it did before, restore replaces
    second.restore(tmp_path / "a")
    assert same_bits(weights(first), weights(second))
    assert half + go(second, range(3, 6)) == whole
    assert same_bits(weights(through), weights(second))
    through.save(tmp_path / "b")
    second.save(tmp_path / "c")
    for path in (tmp_path / "b").iterdir():
        assert path.read_bytes() == (tmp_path / "c" / path.name).read_bytes()


def test_a_checkpoint_is_a_hugging_face_folder(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder)
    trainer.forward_backward(make_batch(), policy_gradient)
    trainer.optim_step()
    trainer.save(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_model(tmp_path)
    for name, tensor in weights(trainer).items():
        assert torch.equal(theirs.get_parameter(name), tensor)
        assert torch.equal(ours.get_parameter(name), tensor)


def test_a_reference_is_scored_and_not_trained(folder: Path) -> None:
    batch = make_batch()
    reference = load_model(folder)
    trainer = Trainer(load_model(folder), TrainerConfig(lr=1e-2, max_batch_tokens=60), reference=reference)
    expected = trainer.logprobs(batch)
    loss = partial(get_loss("grpo", kl_coef=0.1))
    assert trainer.forward_backward(batch, loss).metrics["loss/kl_ref"].value == 0.0
    trainer.optim_step()
    assert trainer.forward_backward_custom(batch, loss).metrics["loss/kl_ref"].value > 0.0
    assert all(parameter.grad is None for parameter in reference.parameters())
    still = Trainer(reference, TrainerConfig()).logprobs(batch)
    assert all((a == b).all() for a, b in zip(expected, still, strict=True))


def test_demonstrations_become_likely(folder: Path) -> None:
    trainer = make_trainer(folder)
    batch = [TrainSequence.supervised([3, 4], [5, 6, 0]), TrainSequence.supervised([4, 3], [6, 0])]
    losses = []
    for _ in range(20):
        losses.append(trainer.forward_backward(batch, get_loss("sft")).metrics["loss/total"].value)
        trainer.optim_step()
    assert losses[0] == pytest.approx(np.log(61), abs=0.6)
    assert losses[-1] < 0.1


def test_the_total_of_several_updates_is_their_mean(folder: Path) -> None:
    trainer, batch = make_trainer(folder), make_batch()
    results = [trainer.forward_backward(part, policy_gradient) for part in (batch[:2], batch[2:])]
    totals = [result.metrics["loss/total"].value for result in results]
    assert merge([result.metrics for result in results])["loss/total"].value == pytest.approx(sum(totals) / 2)


def of_entropy(batch: LossBatch) -> LossOutput:
    return LossOutput(-batch.entropy[batch.mask].sum() / batch.total_tokens, {})


def of_logprobs(batch: LossBatch) -> LossOutput:
    return policy_gradient(batch)


@pytest.mark.parametrize(
    ("loss", "kept"),
    [
        (get_loss("grpo"), True),
        (get_loss("grpo", entropy_coef=0.0), True),
        (get_loss("grpo", entropy_coef=0.01), False),
        (policy_gradient, True),
        (entropy_term(partial(of_entropy)), False),
        (whole_step(partial(of_logprobs)), True),
        (whole_step(partial(of_entropy)), False),  # known when the second forward begins
    ],
)
def test_gradients_of_logits_are_kept_for_losses_of_logprobs_alone(
    loss, kept: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def keep(*_: object) -> None:
        asked.append(torch.is_grad_enabled())

    monkeypatch.setattr(backend, "kept_token_logprob", keep, raising=False)
    make_trainer(folder).forward_backward(make_batch(), loss)
    assert (True in asked) == kept


def test_a_backward_is_on_the_callers_thread_and_others_are_as_before(folder: Path) -> None:
    """A GPU's; a CPU's is everywhere."""
    threaded, trainer = torch._C._is_multithreading_enabled, make_trainer(folder)

    def loss(batch: LossBatch) -> LossOutput:
        assert not threaded()
        raise ArithmeticError

    assert threaded()
    with pytest.raises(ArithmeticError):
        trainer.forward_backward(make_batch(), loss)
    assert threaded()


def test_what_others_differentiate_through_the_model_is_not_in_the_update(folder: Path) -> None:
    clean, touched = make_trainer(folder), make_trainer(folder)
    for parameter in touched.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for trainer in (clean, touched):
        trainer.forward_backward(make_batch(), policy_gradient)
    assert same_bits(gradients(clean), gradients(touched))


def test_two_batches_before_one_update_add_up(folder: Path) -> None:
    trainer, first, second = (make_trainer(folder) for _ in range(3))
    first.forward_backward(make_batch(seed=1), policy_gradient)
    second.forward_backward(make_batch(seed=2), policy_gradient)
    trainer.forward_backward(make_batch(seed=1), policy_gradient)
    trainer.forward_backward(make_batch(seed=2), policy_gradient)
    for name, grad in gradients(trainer).items():
        torch.testing.assert_close(grad, gradients(first)[name] + gradients(second)[name], atol=1e-7, rtol=1e-5)


def test_an_update_without_a_gradient_is_refused(folder: Path) -> None:
    trainer = make_trainer(folder)
    with pytest.raises(ConfigError, match="call forward_backward first"):
        trainer.optim_step()
    trainer.forward_backward(make_batch(), policy_gradient)
    trainer.optim_step()
    with pytest.raises(ConfigError, match="call forward_backward first"):
        trainer.optim_step()
