"""Tinker's own client, unmodified, against the training API on a tiny model."""

import httpx
import numpy as np
import pytest

from rlloop.api.core import Settings
from rlloop.api.keys import Keys
from rlloop.api.server import ApiServer
from rlloop.training.service import TrainingService
from rlloop.web.server import BackgroundServer, Listen
from tests.support.checkpoints import make_checkpoint

tinker = pytest.importorskip("tinker")
torch = pytest.importorskip("torch")
types = tinker.types

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MODEL = "tiny"
PROMPT = [5, 9, 14, 3]
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tinker")
    make_checkpoint(folder / MODEL, "qwen3")
    service = TrainingService(folder / MODEL, checkpoints=folder / "checkpoints", leaf_tokens=64)
    settings = Settings(folder=folder / "api", model_name=MODEL, model_folder=folder / MODEL)
    background = BackgroundServer(ApiServer(service, settings, Keys({}, open=True)).app, Listen())
    yield background.url
    background.close()
    service.close()


@pytest.fixture(scope="module")
def client(url):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        made = tinker.ServiceClient(base_url=url, api_key="tml-test")
        made.get_server_capabilities()  # the client's own lock is held by two threads where both set it up
        yield made
        made.close("success").result(240)


@pytest.fixture(scope="module")
def lora(client):
    return client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def supervised(tokens, weights=None):
    inputs = {
        "target_tokens": types.TensorData(tokens[1:], "int64", [len(tokens) - 1]),
        "weights": types.TensorData(weights or [1.0] * (len(tokens) - 1), "float32", [len(tokens) - 1]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def of_sample(prompt, sequence, advantage=1.0, loss_fn="ppo"):
    """A datum of a sampled sequence, as tinker-cookbook's rl_loop makes it."""
    tokens, count = prompt + sequence.tokens, len(prompt) - 1
    rows = {
        "target_tokens": types.TensorData(tokens[1:], "int64", [len(tokens) - 1]),
        "logprobs": types.TensorData([0.0] * count + sequence.logprobs, "float32", [len(tokens) - 1]),
        "advantages": types.TensorData(
            [0.0] * count + [advantage] * len(sequence.tokens), "float32", [len(tokens) - 1]
        ),
    }
    if loss_fn == "gspo":
        mask = [0.0] * count + [1.0] * len(sequence.tokens)
        rows["sequence_ratio_mask"] = types.TensorData(mask, "float32", [len(tokens) - 1])
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=rows)
    prompt_span = types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=len(prompt))
    context = [prompt_span, types.SampledProvenanceSpan(
        sequence_id=sequence.sequence_id, length=len(sequence.tokens) - 1)]  # fmt: skip
    targets = [
        types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=count),
        types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=len(sequence.tokens)),
    ]
    return datum.with_provenance(context, targets)


def logprobs_of(output):
    return [each["logprobs"].to_numpy() for each in output.loss_fn_outputs]


def test_capabilities_and_info(client, lora):
    (model,) = client.get_server_capabilities().supported_models
    assert model.model_name == MODEL
    info = lora.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (MODEL, True, 4)


def test_pipelined_steps_learn(lora):
    datum = supervised([5, 9, 14, 3, 7, 8, 21, 40])
    pairs = [
        (lora.forward_backward([datum] * 3, "cross_entropy"), lora.optim_step(types.AdamParams(learning_rate=0.02)))
        for _ in range(6)
    ]
    losses = [pair[0].result().metrics["loss:sum"] for pair in pairs]
    assert losses[-1] < 0.8 * losses[0]
    assert "optim/grad_norm" in (pairs[0][1].result().metrics or {})


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_every_built_in_loss_trains_on_samples_with_equal_bits(client, lora, loss_fn):
    sampler = lora.save_weights_and_get_sampling_client()
    sampled = sampler.sample(
        types.ModelInput.from_ints(PROMPT), num_samples=3, sampling_params=types.SamplingParams(max_tokens=6, seed=3)
    ).result()
    data = [of_sample(PROMPT, sequence, 1.0 - index, loss_fn) for index, sequence in enumerate(sampled.sequences)]
    if loss_fn == "cross_entropy":
        data = [supervised(PROMPT + sequence.tokens) for sequence in sampled.sequences]
    forward = lora.forward(data, loss_fn).result()
    done = lora.forward_backward(data, loss_fn).result()
    step = lora.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    assert step.metrics["optim/grad_norm"] > 0
    for ours, again, sequence in zip(logprobs_of(done), logprobs_of(forward), sampled.sequences, strict=True):
        assert ours.tobytes() == again.tobytes()
        assert ours[len(PROMPT) - 1 :].astype(np.float32).tobytes() == np.float32(sequence.logprobs).tobytes()
    if loss_fn != "cross_entropy":
        assert done.metrics["parity/tokens_checked:sum"] == sum(len(each.tokens) for each in sampled.sequences)
        assert done.metrics["parity/tokens_different:sum"] == 0


def test_a_token_that_was_not_sampled_so_fails_its_future(lora):
    sampler = lora.save_weights_and_get_sampling_client()
    sampled = sampler.sample(
        types.ModelInput.from_ints(PROMPT), num_samples=2, sampling_params=types.SamplingParams(max_tokens=4, seed=5)
    ).result()
    first, second = sampled.sequences
    wrong = of_sample([*PROMPT[:-1], 4], first)  # another prompt than the sampled one
    with pytest.raises(tinker.RequestFailedError, match="tokenized again") as raised:
        lora.forward_backward([wrong], "importance_sampling").result()
    assert raised.value.category.name == "User"
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        lora.optim_step(types.AdamParams()).result()
    lora.forward_backward([of_sample(PROMPT, second)], "importance_sampling").result()
    lora.optim_step(types.AdamParams()).result()


def test_full_training_is_rank_0(client):
    full = client.create_lora_training_client(base_model=MODEL, rank=0)
    info = full.get_info()
    assert info.is_lora is False
    datum = supervised([5, 9, 14, 3, 7, 8])
    before = full.forward_backward([datum], "cross_entropy")
    full.optim_step(types.AdamParams(learning_rate=0.01)).result()
    sampler = full.save_weights_and_get_sampling_client()
    after = full.forward([datum], "cross_entropy").result()
    assert after.metrics["loss:sum"] < before.result().metrics["loss:sum"]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints([5, 9, 14, 3, 7, 8])).result()
    assert np.float32(scored[1:]).tobytes() == logprobs_of(after)[0].astype(np.float32).tobytes()


def test_chunks_of_a_call_are_one_gradient(client):
    """Weights are the same bytes for every number of chunks that the client splits a call into."""
    datums = [supervised([5, 9, number, 3, 7, 8, 21]) for number in range(1, 9)]
    saved = []
    for cut in (1, 8):
        trains = client.create_lora_training_client(base_model=MODEL, rank=4, seed=7)
        config = trains.holder._client_config
        trains.holder._client_config = config.model_copy(update={"fwdbwd_max_chunk_len": cut})
        try:
            done = trains.forward_backward(datums, "cross_entropy")
            trains.optim_step(types.AdamParams(learning_rate=0.01)).result()
        finally:
            trains.holder._client_config = config
        assert len(done.result().loss_fn_outputs) == 8
        saved.append(b"".join(each.tobytes() for each in logprobs_of(trains.forward(datums, "cross_entropy").result())))
    assert saved[0] == saved[1]


def squared(logprobs, weights):
    return -(weights * logprobs).sum() + 0.5 * (logprobs**2).sum(), {"custom/rows:sum": weights.sum()}


def squared_of_all(data, logprobs):
    total = sum(squared(row, torch.tensor(datum.loss_fn_inputs["weights"].to_numpy()))[0] for datum, row in
                zip(data, logprobs, strict=True))  # fmt: skip
    return total, {"rows": 1.0}


def test_custom_losses_on_the_server_and_on_the_client(client):
    datums = [supervised([5, 9, 14, 3, number], [1.0, 0.5, 0.0, 2.0]) for number in (7, 8)]
    handle = client.create_custom_loss(squared, input_ranks={"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is not None
    found = []
    for loss in (handle, squared_of_all):
        trains = client.create_lora_training_client(base_model=MODEL, rank=4, seed=2)
        trains.forward_backward_custom(datums, loss).result()
        norm = trains.optim_step(types.AdamParams(learning_rate=0.01)).result().metrics["optim/grad_norm"]
        found.append((norm, np.concatenate(logprobs_of(trains.forward(datums, "cross_entropy").result()))))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-4)

    def forbidden(logprobs):
        return torch.bernoulli(logprobs).sum(), {}

    with pytest.raises(tinker.RequestFailedError, match="bernoulli"):
        client.create_custom_loss(forbidden, input_ranks={"logprobs": 1}).result()


def test_what_a_sample_can_be_asked(client, lora):
    sampler = lora.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(PROMPT)
    asked = sampler.sample(
        prompt, num_samples=4, sampling_params=types.SamplingParams(max_tokens=5, seed=1, temperature=0.7, top_k=8),
        include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3, prompt_alt_tokens_k=2,
        target_prompt_logprobs=types.TensorData([1, 2, -1, 3, 4, 5], "int64", [3, 2]),
    ).result()  # fmt: skip
    assert len({tuple(each.tokens) for each in asked.sequences}) > 1
    assert len({each.sequence_id for each in asked.sequences}) == 4
    assert asked.sequences[0].topk_logprobs_np.token_ids.shape == (len(asked.sequences[0].tokens), 3)
    assert asked.prompt_logprobs[0] is None
    assert asked.prompt_logprobs[1:] == sampler.compute_logprobs(prompt).result()[1:]
    assert asked.topk_prompt_logprobs[0] in (None, [])
    assert asked.target_prompt_logprobs.to_numpy().shape == (3, 2)
    assert asked.target_prompt_logprobs.to_numpy()[1, 0] == 0
    assert asked.prompt_alt_tokens.tokens.to_numpy().shape == (3, 2)
    again = sampler.sample(
        prompt, num_samples=4, sampling_params=types.SamplingParams(max_tokens=5, seed=1, temperature=0.7, top_k=8)
    ).result()
    assert [each.tokens for each in again.sequences] == [each.tokens for each in asked.sequences]
    last = sampler.sample(
        prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=1), include_prompt_logprobs=True,
        prompt_logprobs_last_n=1,
    ).result()  # fmt: skip
    assert last.prompt_logprobs[:3] == [None] * 3
    assert last.prompt_logprobs[3] == asked.prompt_logprobs[3]
    stopped = sampler.sample(
        prompt, num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=5, seed=1, stop=[asked.sequences[0].tokens[0]]),
    )  # fmt: skip
    assert stopped.result().sequences[0].stop_reason in ("stop", "length")


def test_the_base_model_is_sampled_and_scored(client):
    base = client.create_sampling_client(base_model=MODEL)
    fresh = client.create_lora_training_client(base_model=MODEL, rank=4)
    scored = base.compute_logprobs(types.ModelInput.from_ints([5, 9, 14, 3])).result()
    output = fresh.forward([supervised([5, 9, 14, 3])], "cross_entropy").result()
    assert np.float32(scored[1:]).tobytes() == logprobs_of(output)[0].astype(np.float32).tobytes()
    assert base.get_base_model() == MODEL


def test_state_is_saved_listed_loaded_and_deleted(client, lora):
    rest = client.create_rest_client()
    datum = supervised([5, 9, 14, 3, 7])
    path = lora.save_state("step-1", ttl_seconds=7200).result().path
    before = logprobs_of(lora.forward([datum], "cross_entropy").result())[0]

    def step(trains):
        trains.forward_backward([datum], "cross_entropy")
        trains.optim_step(types.AdamParams(learning_rate=0.01)).result()
        return logprobs_of(trains.forward([datum], "cross_entropy").result())[0]

    after = step(lora)
    assert before.tobytes() != after.tobytes()
    other = client.create_training_client_from_state_with_optimizer(path)
    assert logprobs_of(other.forward([datum], "cross_entropy").result())[0].tobytes() == before.tobytes()
    assert step(other).tobytes() == after.tobytes()
    lora.load_state_with_optimizer(path).result()
    assert step(lora).tobytes() == after.tobytes()
    (listed,) = [each for each in rest.list_checkpoints(lora.model_id).result().checkpoints
                 if each.tinker_path == path]  # fmt: skip
    assert listed.checkpoint_type == "training"
    assert listed.expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    saved = lora.save_weights_for_sampler("final").result().path
    sampler = client.create_sampling_client(model_path=saved)
    scored = sampler.compute_logprobs(types.ModelInput.from_ints([5, 9, 14, 3, 7])).result()
    assert np.float32(scored[1:]).tobytes() == after.astype(np.float32).tobytes()
    assert rest.get_training_run(lora.model_id).result().lora_rank == 4
    external = rest.get_external_weights_urls(lora.save_weights_external("final").result().path).result()
    files = {name: httpx.get(url, trust_env=False) for name, url in external.urls.items()}
    assert all(file.is_success for file in files.values())
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files.keys()
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
        lora.load_state(path).result()
