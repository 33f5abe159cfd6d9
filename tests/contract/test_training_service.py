"""The training API in process: bits that cuts, times and company do not change, and parity with what was sampled."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlloop import load_model, token_logprobs
from rlloop.algorithms import LossOutput
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError, ParityError
from rlloop.models import save_model
from rlloop.trainer import Trainer, TrainSequence
from rlloop.training.lanes import Action
from rlloop.training.losses import LOSSES
from rlloop.training.service import TrainingService
from rlloop.training.types import AdamParams, Datum, LoraConfig, SamplingParams
from rlloop.types import ModelInput
from tests.support.tiny_models import tiny_qwen3
from tests.support.training_data import ADAM, digest, sampled, supervised
from tests.support.waiting import until

LORA = LoraConfig(rank=4, seed=1)
PROMPT = [5, 6, 7]
CHECKED, DIFFERENT = "parity/tokens_checked:sum", "parity/tokens_different:sum"
WAIT = 120


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training") / "base"
    save_model(tiny_qwen3(), folder)
    return folder


@pytest.fixture(scope="module")
def service(base):
    with TrainingService(base, leaf_tokens=64) as made:
        yield made


def new(service: TrainingService, lora: LoraConfig | None = LORA, **options) -> str:
    return service.create_model(lora=lora, **options).result(WAIT).model_id


def train(service, model_id, calls, *, waits=False, adam=ADAM):
    """`calls`: lists of data, and None for a step."""
    futures = []
    for number, (data, loss) in enumerate(calls, start=1):
        if data is None:
            futures.append(service.optim_step(model_id, adam, seq_id=number))
        else:
            futures.append(service.forward_backward(model_id, data, loss, seq_id=number))
        if waits:
            futures[-1].result(WAIT)
    return [each.result(WAIT) for each in futures]


def completions(service, model_id, count=3, tokens=6, **params):
    sampler = service.save_weights_for_sampler(model_id).result(WAIT).sampler
    params = SamplingParams(max_tokens=tokens, **params)
    return service.sample(PROMPT, count, params, sampler=sampler).result(WAIT).sequences


def rl_data(service, model_id, **options):
    return [
        sampled(PROMPT, each, (-1.0) ** index, **options) for index, each in enumerate(completions(service, model_id))
    ]


# ---------------------------------------------------------------------------------------------------- bits


def test_neither_cuts_nor_times_change_a_bit(service):
    data, loss = supervised(0, 13), "cross_entropy"
    whole = [(data, loss), (None, ""), (data[:5], loss), (None, "")]
    cuts = [
        [(data[:1], loss), (data[1:8], loss), (data[8:], loss), (None, ""), (data[:5], loss), (None, "")],
        [*(([each], loss) for each in data), (None, ""), (data[:5], loss), (None, "")],
    ]
    wanted, seen = None, []
    for calls, waits in ((whole, False), (whole, True), *((cut, waits) for cut in cuts for waits in (False, True))):
        id = new(service)
        train(service, id, calls, waits=waits)
        seen.append(digest(service, id))
        wanted = wanted or seen[0]
    assert seen == [wanted] * len(seen)
    other = new(service)
    train(service, other, [(data[::-1], loss), (None, ""), (data[:5], loss), (None, "")])
    assert digest(service, other) != wanted  # the order of data is part of what is asked


def test_calls_that_come_out_of_order_run_in_order(service):
    data, ids = supervised(1, 6), [new(service), new(service)]
    train(service, ids[0], [(data[:2], "cross_entropy"), (data[2:], "cross_entropy"), (None, "")])
    late = [
        service.optim_step(ids[1], ADAM, seq_id=3),
        service.forward_backward(ids[1], data[2:], "cross_entropy", seq_id=2),
    ]
    assert not any(each.done() for each in late)
    service.forward_backward(ids[1], data[:2], "cross_entropy", seq_id=1).result(WAIT)
    late[0].result(WAIT)
    assert digest(service, ids[0]) == digest(service, ids[1])


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "cross_entropy"])
def test_each_loss_has_bits_that_cuts_do_not_change(service, loss):
    source = new(service)
    extra = {"sequence_ratio_mask": 1.0} if loss == "gspo" else {}
    data = rl_data(service, source, named=False, **extra)
    found = []
    for calls in ([(data, loss), (None, "")], [*(([each], loss) for each in data), (None, "")]):
        id = new(service)
        train(service, id, calls, waits=len(calls) > 2)
        found.append(digest(service, id))
    assert found[0] == found[1]


def test_models_that_train_at_once_have_the_bits_that_they_have_alone(service):
    data = [supervised(seed, 8) for seed in range(3)]
    alone = []
    for each in data:
        id = new(service)
        train(service, id, [(each, "cross_entropy"), (None, "")] * 2)
        alone.append(digest(service, id))
    before = service.compute_logprobs(PROMPT).result(WAIT)
    ids = [new(service) for _ in data]
    threads = [
        threading.Thread(target=train, args=(service, id, [(each, "cross_entropy"), (None, "")] * 2))
        for id, each in zip(ids, data, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [digest(service, id) for id in ids] == alone
    assert service.compute_logprobs(PROMPT).result(WAIT) == before


def test_forward_has_the_results_of_forward_backward_and_leaves_no_gradient(service):
    id, data = new(service), supervised(2, 9)
    forward = service.forward(id, data).result(WAIT)
    with pytest.raises(ConfigError, match="no gradient to apply"):
        service.optim_step(id, ADAM).result(WAIT)
    both = service.forward_backward(id, data, "cross_entropy").result(WAIT)
    assert forward.metrics == both.metrics
    for one, other, datum in zip(forward.loss_fn_outputs, both.loss_fn_outputs, data, strict=True):
        assert one["logprobs"].tobytes() == other["logprobs"].tobytes()
        assert one["logprobs"].shape == datum.loss_fn_inputs["target_tokens"].shape


def test_several_targets_of_a_position_have_the_logprobs_of_each(service):
    id, rng = new(service), np.random.default_rng(0)
    ids = rng.integers(3, 300, 9).tolist()
    targets = np.stack([np.array(ids[1:]), rng.integers(3, 300, 8)], 1)
    wide = Datum(ModelInput.from_ids(ids[:-1]), {"target_tokens": targets, "weights": np.full(targets.shape, 0.5)})
    columns = [
        Datum(ModelInput.from_ids(ids[:-1]), {"target_tokens": targets[:, at], "weights": np.full(8, 0.5)})
        for at in range(2)
    ]
    outputs = service.forward_backward(id, [wide, *columns], "cross_entropy").result(WAIT)
    both = [each["logprobs"] for each in outputs.loss_fn_outputs]
    assert both[0].tobytes() == np.stack(both[1:], 1).tobytes()
    assert outputs.metrics["loss:sum"] == pytest.approx(-sum(each.sum() for each in both[1:]), rel=1e-5)


def test_full_training_is_the_trainers_own(service, base):
    id, data = new(service, None), supervised(3, 4, longest=12)
    train(service, id, [(data, "cross_entropy"), (None, "")], adam=replace(ADAM, eps=1e-8, grad_clip_norm=1.0))
    trainer = Trainer(load_model(base), TrainerConfig(lr=1e-2, max_batch_tokens=1000))
    batch = [
        TrainSequence(
            [*each.model_input.token_ids, int(each.loss_fn_inputs["target_tokens"][-1])],
            range(1, len(each.model_input) + 1),
            each.loss_fn_inputs["weights"],
        )
        for each in data
    ]

    def weighted_sum(batch):
        return LossOutput(-(batch.logprobs * batch.advantages).sum(), {})

    trainer.forward_backward(batch, weighted_sum)
    trainer.optim_step()
    model = service._models.get(id).model
    for name, tensor in trainer.masters.items():
        assert torch.equal(model.trainer.masters[name], tensor), name


# ---------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_what_is_sampled_is_what_is_trained_and_versions_stay(service, lora):
    id = new(service, lora)
    train_data = supervised(4, 3)
    service.forward_backward(id, train_data, "cross_entropy").result(WAIT)
    service.optim_step(id, ADAM).result(WAIT)
    sampler = service.save_weights_for_sampler(id).result(WAIT).sampler
    params = SamplingParams(max_tokens=6, seed=3)
    first = service.sample(PROMPT, 2, params, sampler=sampler).result(WAIT)
    data = [sampled(PROMPT, each) for each in first.sequences]
    on = service.forward_backward(id, data, "importance_sampling").result(WAIT)
    assert (on.metrics[CHECKED], on.metrics[DIFFERENT]) == (12, 0)
    assert on.metrics["loss:sum"] == -12.0  # every ratio is exactly 1
    service.optim_step(id, ADAM).result(WAIT)
    again = service.sample(PROMPT, 2, params, sampler=sampler).result(WAIT)
    for one, other in zip(first.sequences, again.sequences, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
    newer = service.save_weights_for_sampler(id).result(WAIT).sampler
    assert newer != sampler
    now = service.compute_logprobs(PROMPT + first.sequences[0].tokens, sampler=newer).result(WAIT)
    then = service.compute_logprobs(PROMPT + first.sequences[0].tokens, sampler=sampler).result(WAIT)
    assert now != then
    assert np.array(then[3:], np.float32).tobytes() == first.sequences[0].logprobs.tobytes()
    off = service.forward_backward(id, data, "ppo").result(WAIT)  # compared on the weights that sampled
    assert (off.metrics[CHECKED], off.metrics[DIFFERENT]) == (12, 0)
    assert off.metrics["loss:sum"] != -12.0


def test_a_sampler_keeps_its_weights_while_others_are_loaded(service):
    id, params = new(service), SamplingParams(max_tokens=6, seed=3)
    service.forward_backward(id, supervised(4, 3), "cross_entropy").result(WAIT)
    service.optim_step(id, ADAM).result(WAIT)
    saved = service.save_weights(id, "once").result(WAIT).path
    again = service.create_model_from(saved, optimizer=False).result(WAIT).model_id
    service.forward_backward(again, supervised(3, 2), "cross_entropy").result(WAIT)
    service.optim_step(again, ADAM).result(WAIT)
    sampler = service.save_weights_for_sampler(again).result(WAIT).sampler
    first = service.sample(PROMPT, 1, params, sampler=sampler).result(WAIT).sequences[0]
    service.load_weights(again, saved, optimizer=False).result(WAIT)
    assert service.save_weights_for_sampler(again).result(WAIT).sampler != sampler
    then = service.sample(PROMPT, 1, params, sampler=sampler).result(WAIT).sequences[0]
    assert then.logprobs.tobytes() == first.logprobs.tobytes()


def test_no_two_sequences_have_one_id(service):
    id, params, ids = new(service), SamplingParams(max_tokens=3), []
    path = service.save_weights_for_sampler(id, "kept").result(WAIT).path
    data = []
    for prompt in ([5, 6, 7], [8, 9]):
        live = service.save_weights_for_sampler(id).result(WAIT).sampler  # of the same weights
        samplers = (live, service.create_sampler(path).result(WAIT), service.create_sampler().result(WAIT))
        found = [service.sample(prompt, 1, params, sampler=each).result(WAIT).sequences[0] for each in samplers]
        ids += [each.sequence_id for each in found]
        data.append(sampled(prompt, found[0]))
    assert len(set(ids)) == 6
    done = service.forward_backward(id, data, "importance_sampling").result(WAIT)
    assert (done.metrics[CHECKED], done.metrics[DIFFERENT]) == (6, 0)


def test_sequences_are_known_after_an_earlier_sampler_of_the_same_weights_was_dropped(service):
    id, params = new(service), SamplingParams(max_tokens=3)
    service.drop_sampler(service.save_weights_for_sampler(id).result(WAIT).sampler)
    sampler = service.save_weights_for_sampler(id).result(WAIT).sampler
    data = [sampled(PROMPT, service.sample(PROMPT, 1, params, sampler=sampler).result(WAIT).sequences[0])]
    done = service.forward_backward(id, data, "importance_sampling").result(WAIT)
    assert (done.metrics[CHECKED], done.metrics[DIFFERENT]) == (3, 0)


def test_the_base_samples_as_the_model_that_was_loaded(service, base):
    model, params = load_model(base), SamplingParams(max_tokens=5, seed=9)
    (sequence,) = service.sample(PROMPT, 1, params).result(WAIT).sequences
    (scored,) = token_logprobs(model, [(PROMPT, sequence.tokens)])
    assert scored.detach().numpy().tobytes() == sequence.logprobs.tobytes()
    (other,) = service.sample(PROMPT, 1, params).result(WAIT).sequences
    assert other.tokens == sequence.tokens
    names = [service.sample(PROMPT, 2, SamplingParams(max_tokens=8), request=name).result(WAIT) for name in "aab"]
    tokens = [[each.tokens for each in found.sequences] for found in names]
    assert tokens[0] == tokens[1] != tokens[2]
    assert tokens[0][0] != tokens[0][1]


def test_prompts_are_scored_as_they_are_sampled(service):
    ids = [5, 6, 7, 8, 9]
    asked = service.sample(
        ids, 1, SamplingParams(max_tokens=1, seed=0), include_prompt_logprobs=True, topk_prompt_logprobs=3,
        topk_sample_logprobs=2, target_prompt_logprobs=np.array([[6, 9], [7, -1], [-1, -1], [9, 4]]),
        prompt_alt_tokens_k=4,
    ).result(WAIT)  # fmt: skip
    logprobs, top = asked.prompt_logprobs, asked.topk_prompt_logprobs
    assert [None, *logprobs[1:].tolist()] == service.compute_logprobs(ids).result(WAIT)
    assert np.isnan(logprobs[0])
    assert top.token_ids.shape == (5, 3)
    assert (np.diff(top.logprobs[1:], axis=1) <= 0).all()
    targets = asked.target_prompt_logprobs
    assert (targets[0, 0], targets[1, 0], targets[3, 0]) == (logprobs[1], logprobs[2], logprobs[4])
    assert (targets[1, 1], targets[2, 0], targets[2, 1]) == (0, 0, 0)
    draws = asked.prompt_alt_tokens
    assert draws.tokens.shape == (4, 4)
    assert len(set(draws.tokens.flatten().tolist())) > 4
    for row, draw in np.argwhere(draws.tokens[:, :, None] == top.token_ids[1:][:, None, :])[:, :2]:
        at = top.token_ids[row + 1].tolist().index(draws.tokens[row, draw])
        assert draws.logprobs[row, draw] == top.logprobs[row + 1, at]
    again = [service.sample(ids, 1, SamplingParams(max_tokens=1, seed=seed), prompt_alt_tokens_k=4) for seed in (0, 1)]
    same, other = [asked.result(WAIT).prompt_alt_tokens.tokens.tolist() for asked in again]
    assert same == draws.tokens.tolist() != other
    last = service.sample(
        ids, 1, SamplingParams(max_tokens=1), include_prompt_logprobs=True, prompt_logprobs_last_n=2
    ).result(WAIT)
    assert np.isnan(last.prompt_logprobs[:3]).all()
    assert last.prompt_logprobs[3:].tobytes() == logprobs[3:].tobytes()


# ---------------------------------------------------------------------------------------------------- parity


def test_a_difference_fails_the_call_and_takes_the_gradient_with_it(service):
    id = new(service)
    data = rl_data(service, id)
    named = data[1].provenance
    assert named is not None
    record = service.sequences.get(named.model_input[0].sequence_id, "")
    record.raw_logprobs[2:3].view(np.int32)[0] ^= 1  # as an engine of other kernels would have sampled
    before = digest(service, id)
    failed = service.forward_backward(id, data, "ppo")
    step = service.optim_step(id, ADAM)
    with pytest.raises(ParityError, match=r"datum 1: target 4, token \d+, has logprob .* 1 of 6 tokens differ"):
        failed.result(WAIT)
    with pytest.raises(ConfigError, match="it was dropped, and weights did not change"):
        step.result(WAIT)
    assert digest(service, id) == before
    good = service.forward_backward(id, [data[0], data[2]], "ppo").result(WAIT)
    assert good.metrics[CHECKED] == 12
    service.optim_step(id, ADAM).result(WAIT)
    assert digest(service, id) != before
    observer = new(service, parity="observe")
    seen = service.forward_backward(observer, data, "ppo").result(WAIT)
    assert (seen.metrics[CHECKED], seen.metrics[DIFFERENT]) == (18, 1)
    service.optim_step(observer, ADAM).result(WAIT)


def test_tokens_that_were_not_sampled_are_named(service):
    id = new(service)
    datum = rl_data(service, id)[0]
    named = datum.provenance
    assert named is not None
    targets = datum.loss_fn_inputs["target_tokens"].copy()
    targets[3] = (targets[3] + 1) % 300
    wrong = replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "target_tokens": targets})
    with pytest.raises(ConfigError, match=r"datum 0: target_tokens\[3\] is token .* was it tokenized again"):
        service.forward(id, [wrong], "ppo").result(WAIT)
    unknown = replace(named.model_input[0], sequence_id="other")
    wrong = datum.with_provenance([unknown, *named.model_input[1:]], named.loss_fn_inputs)
    with pytest.raises(ConfigError, match="sequence 'other', which was not sampled here"):
        service.forward(id, [wrong], "ppo").result(WAIT)


# ---------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_saved_weights_come_back_byte_for_byte(service, lora):
    id, data = new(service, lora), supervised(5, 3)
    calls = [(data, "cross_entropy"), (None, "")]
    train(service, id, calls)
    path = service.save_weights(id, f"a-{lora is None}", seq_id=3).result(WAIT).path
    files = {each.name: each.read_bytes() for each in service.checkpoint_folder(path).iterdir()}
    saved = digest(service, id)
    service.forward_backward(id, data, "cross_entropy", seq_id=4).result(WAIT)
    service.optim_step(id, ADAM, seq_id=5).result(WAIT)
    after = digest(service, id)
    twin = service.create_model_from(path, optimizer=True).result(WAIT).model_id
    assert digest(service, twin) == saved
    train(service, twin, calls)
    assert digest(service, twin) == after != saved
    assert service.load_weights(id, path, optimizer=True, seq_id=6).result(WAIT).path == path
    again = service.save_weights(id, f"b-{lora is None}", seq_id=7).result(WAIT).path
    assert {each.name: each.read_bytes() for each in service.checkpoint_folder(again).iterdir()} == files
    fresh = service.create_model_from(path, optimizer=False).result(WAIT).model_id
    train(service, fresh, calls)
    assert digest(service, fresh) != after  # the optimizer began anew
    sampler = service.create_sampler(path).result(WAIT)
    live = service.save_weights_for_sampler(id, seq_id=8).result(WAIT).sampler
    assert service.compute_logprobs(PROMPT, sampler=sampler).result(WAIT) == (
        service.compute_logprobs(PROMPT, sampler=live).result(WAIT)
    )


def test_checkpoints_are_listed_copied_and_deleted(service):
    id = new(service, model_id="of-lists")
    path = service.save_weights_for_sampler(id, "x", ttl_seconds=3600, user_metadata={"a": "b"}).result(WAIT).path
    assert path == "tinker://of-lists/sampler_weights/x"
    (found,) = service.checkpoints(id)
    assert (found.tinker_path, found.checkpoint_type, found.user_metadata) == (path, "sampler", {"a": "b"})
    assert found.lora == LORA
    with pytest.raises(ConfigError, match=r"there is a checkpoint .* already"):
        service.save_weights_for_sampler(id, "x").result(WAIT)
    service.save_weights_for_sampler(id, "x", overwrite=True).result(WAIT)
    with pytest.raises(ConfigError, match="has no optimizer state"):
        service.create_model_from(path, optimizer=True)
    copy = service.copy_checkpoint(path, "elsewhere")
    service.set_checkpoint_ttl(copy, -1)
    assert service.delete_expired() == [copy]
    service.delete_checkpoint(path)
    assert service.checkpoints(id) == []
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        service.checkpoint_folder(path)
    with pytest.raises(ConfigError, match="is no checkpoint's path"):
        service.checkpoint_folder("tinker://../weights/x")


@pytest.mark.parametrize("lora", [LORA, None])
def test_the_sampler_of_a_checkpoint_s_path_goes_with_the_checkpoint(base, lora):
    with TrainingService(base) as service:
        id, params = new(service, lora), SamplingParams(max_tokens=2, seed=0)

        def draw(sampler):
            return service.sample(PROMPT, 1, params, sampler=sampler).result(WAIT).sequences[0].tokens

        made = [service.save_weights_for_sampler(id, name).result(WAIT) for name in ("a", "b")]
        assert [each.sampler for each in made] == [each.path for each in made]
        tokens = draw(made[0].sampler)
        own = service.create_sampler(made[0].path, sampler="own").result(WAIT)
        only = service.save_weights_for_sampler(id, "c", freeze=False).result(WAIT)
        assert service.status()["samplers"] == 3  # a checkpoint alone holds no memory
        service.delete_checkpoint(made[0].path)
        service.set_checkpoint_ttl(made[1].path, -1)
        assert service.delete_expired() == [made[1].path]
        assert service.status()["samplers"] == 1
        for each in (*made, only):
            with pytest.raises(ConfigError, match="there is no sampler"):
                draw(each.sampler)
        assert draw(own) == draw(service.create_sampler(only.path).result(WAIT)) == tokens
        with pytest.raises(ConfigError, match="freeze=False needs a name"):
            service.save_weights_for_sampler(id, freeze=False).result(WAIT)


# ---------------------------------------------------------------------------------------------------- mistakes


def test_a_call_that_fails_its_checks_takes_its_number_and_nothing_else(service):
    data, ids = supervised(6, 4), [new(service), new(service)]
    nan = Datum(
        data[0].model_input,
        {
            "target_tokens": data[0].loss_fn_inputs["target_tokens"],
            "logprobs": np.zeros(len(data[0].model_input)),
            "advantages": np.full(len(data[0].model_input), np.nan),
        },
    )
    bad = service.forward_backward(ids[0], [nan], "ppo", seq_id=2)
    good = [
        service.forward_backward(ids[0], data, "cross_entropy", seq_id=1),
        service.optim_step(ids[0], ADAM, seq_id=3),
    ]
    with pytest.raises(ConfigError, match=r"loss_fn_inputs\['advantages'\] is nan at \[0\]; it must be finite"):
        bad.result(WAIT)
    for each in good:
        each.result(WAIT)
    train(service, ids[1], [(data, "cross_entropy"), (None, "")])
    assert digest(service, ids[0]) == digest(service, ids[1])


@pytest.mark.parametrize(
    ("change", "loss", "message"),
    [
        ({"weights": None}, "cross_entropy", r"lacks loss_fn_inputs\['weights'\]"),
        ({"mask": np.ones(3)}, "cross_entropy", r"has loss_fn_inputs\['mask'\], which cross_entropy does not read"),
        ({"weights": np.ones(2)}, "cross_entropy", r"loss_fn_inputs\['weights'\] is \[2\], and target_tokens \[3\]"),
        ({"target_tokens": [1, 2]}, "cross_entropy", r"'target_tokens'\] is int64 \[2\]; it must be token ids"),
        ({"target_tokens": [1.0, 2.0, 3.0]}, "cross_entropy", "is float32"),
        (
            {"target_tokens": [1, 2, 300]},
            "cross_entropy",
            "target_tokens has token 300; the vocabulary's ids are 0 to 299",
        ),
        ({}, "ppo", r"lacks loss_fn_inputs\['logprobs'\], which ppo needs"),
        ({}, "pppo", "loss_fn is 'pppo'; it must be one of cross_entropy, importance_sampling"),
        ({}, "stable_reinforce", "whose definition its authors have not published"),
        ({}, "custom", "loss_fn is custom, and loss_fn_config"),
    ],
)
def test_mistakes_in_data_are_named(service, change, loss, message):
    id = new(service)
    inputs = {"target_tokens": [4, 5, 6], "weights": np.ones(3), **change}
    inputs = {key: value for key, value in inputs.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        service.forward_backward(id, [Datum(ModelInput.from_ids([3, 4, 5]), inputs)], loss).result(WAIT)


def test_other_mistakes_are_named(service):
    id = new(service)
    with pytest.raises(ConfigError, match="the model has 256 positions, so an input may have 255"):
        service.forward_backward(id, [long(256)], "cross_entropy").result(WAIT)
    with pytest.raises(ConfigError, match="the call has no datum"):
        service.forward_backward(id, [], "cross_entropy").result(WAIT)
    with pytest.raises(ConfigError, match=r"AdamParams.beta1 is 1.5; it must be from 0 to below 1"):
        service.optim_step(id, AdamParams(beta1=1.5)).result(WAIT)
    with pytest.raises(ConfigError, match="there is no model 'nobody'"):
        service.forward("nobody", [], "cross_entropy")
    with pytest.raises(ConfigError, match=r"LoraConfig.rank is 65; it must be 1 to 64"):
        service.create_model(lora=LoraConfig(rank=65))
    with pytest.raises(ConfigError, match="there is no sampler 'nobody'"):
        service.sample(PROMPT, 1, SamplingParams(), sampler="nobody").result(WAIT)
    with pytest.raises(ConfigError, match="takes 258 positions"):
        service.sample(PROMPT, 1, SamplingParams(max_tokens=255)).result(WAIT)
    with pytest.raises(ConfigError, match="the base's folder has no tokenizer"):
        service.sample(PROMPT, 1, SamplingParams(stop="x")).result(WAIT)
    other = new(service, replace(LORA, rank=2))
    path = service.save_weights(other, "small").result(WAIT).path
    with pytest.raises(ConfigError, match=r"an adapter of rank 2, .* and model .* of an adapter of rank 4"):
        service.load_weights(id, path, optimizer=True).result(WAIT)
    for save in (service.save_weights, service.save_weights_for_sampler):  # x.json has the facts of x
        with pytest.raises(ConfigError, match=r"name is 'small.json'; it must not end in .json"):
            save(other, "small.json").result(WAIT)
    numbered = new(service)
    service.forward(numbered, supervised(0, 1), seq_id=1)
    with pytest.raises(ConfigError, match="had a call of seq_id 1 already; the next is 2"):
        service.forward(numbered, supervised(0, 1), seq_id=1)


def long(count: int) -> Datum:
    return Datum(ModelInput.from_ids([5] * count), {"target_tokens": [5] * count, "weights": np.ones(count)})


def test_a_caller_cannot_cancel_a_call(service):
    """As `asyncio.wait_for` does with what it stops waiting for: the worker's thread is about to set its result."""
    id, goes_on = new(service), threading.Event()
    held = service._models.place(service._models.get(id), Action(lambda: goes_on.wait(WAIT)))
    calls = [
        held, service.forward_backward(id, supervised(0, 2), "cross_entropy"), service.optim_step(id, ADAM),
        service.sample(PROMPT, 1, SamplingParams(max_tokens=2)), service.compute_logprobs(PROMPT),
    ]  # fmt: skip
    cancelled = [each.cancel() for each in calls]
    goes_on.set()
    assert not any(cancelled)
    for each in calls:
        each.result(WAIT)


def test_a_call_to_a_model_that_goes_at_that_moment_fails(service):
    """Its lane was found before, and the worker serves it no longer."""
    id = new(service)
    lane = service._models.get(id)
    service.drop_model(id).result(WAIT)
    until(lambda: lane not in service._models.worker.lanes)
    for number in (5, 2):  # also one with a gap before it
        with pytest.raises(ConfigError, match="was dropped"):
            service._models.place(lane, Action(lambda: None), number).result(WAIT)


def test_a_call_that_waits_for_earlier_ones_ends_with_its_model(service):
    id = new(service)
    early = service.forward(id, supervised(0, 2), seq_id=2)
    service.drop_model(id).result(WAIT)
    with pytest.raises(ConfigError, match="was dropped"):
        early.result(WAIT)


def test_a_dropped_model_ends_after_its_calls(service):
    id = new(service)
    last = service.forward(id, supervised(0, 2))
    service.drop_model(id).result(WAIT)
    assert last.done()
    with pytest.raises(ConfigError, match="there is no model"):
        service.forward(id, supervised(0, 2))


def test_old_samplers_without_a_name_give_way(base):
    with TrainingService(base, keep_samplers=2) as service:
        id = new(service)
        params, made = SamplingParams(max_tokens=4, seed=0), []
        for seed in range(3):
            made.append(service.save_weights_for_sampler(id).result(WAIT).sampler)
            waiting = service.sample(PROMPT, 1, params, sampler=made[0]) if seed == 0 else None
            if waiting is not None:
                waiting.result(WAIT)
            train_one = service.forward_backward(id, supervised(seed, 2), "cross_entropy")
            service.optim_step(id, ADAM)
            train_one.result(WAIT)
        with pytest.raises(ConfigError, match="a model's newest 2 are kept"):
            service.sample(PROMPT, 1, params, sampler=made[0]).result(WAIT)
        service.sample(PROMPT, 1, params, sampler=made[2]).result(WAIT)
        assert len(service._models.base.adapters.names) == 2
        assert service.status()["samplers"] == 2
        assert service.status()["sequences"] == 1  # those of the weights that have gone hold no memory
    with pytest.raises(ConfigError, match="takes no more calls"):
        service.forward(id, supervised(0, 1))
