"""Images through Tinker's own client: the same bits in sampling, scoring and training, and what is refused."""

import numpy as np
import pytest

from rlloop import Engine, SamplingParams, load_model
from rlloop.api.core import Settings
from rlloop.api.inputs import InputReader
from rlloop.api.keys import Keys
from rlloop.api.server import ApiServer
from rlloop.models import ScoreRow, score
from rlloop.training.service import TrainingService
from rlloop.web.server import BackgroundServer, Listen
from tests.support.image_models import END, PAD, START
from tests.support.pictures import make_reading_model, picture

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
WIDE, TALL = picture(24, 16), picture(16, 32, 1, "jpeg")  # 6 and 8 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("images")
    make_reading_model(top / MODEL)
    return top


@pytest.fixture(scope="module")
def processor(folder):
    from rlloop.models.vision_processor import ImageProcessor

    return ImageProcessor.of_folder(folder / MODEL)


@pytest.fixture(scope="module")
def client(folder):
    service = TrainingService(folder / MODEL, checkpoints=folder / "checkpoints", leaf_tokens=64)
    reader = InputReader.of_folder(folder / MODEL)
    settings = Settings(folder=folder / "api", model_name=MODEL, model_folder=folder / MODEL, inputs=reader)
    background = BackgroundServer(ApiServer(service, settings, Keys({}, open=True)).app, Listen())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        made = tinker.ServiceClient(base_url=background.url, api_key="tml-test")
        made.get_server_capabilities()  # the client's own lock is held by two threads where both set it up
        yield made
        made.close("success").result(240)
    background.close()
    service.close()


@pytest.fixture(scope="module")
def base(client):
    return client.create_sampling_client(base_model=MODEL)


def text(*ids):
    return types.EncodedTextChunk(tokens=list(ids))


def image(data, format="png", expected_tokens=None):
    return types.ImageChunk(data=data, format=format, expected_tokens=expected_tokens)


def prompt_of(*chunks):
    return types.ModelInput(chunks=list(chunks))


ONE = prompt_of(text(5, 9, START), image(WIDE, expected_tokens=6), text(END, 3, 7))
TWO = prompt_of(text(4, START), image(WIDE, expected_tokens=6), text(END, START), image(TALL, "jpeg", 8), text(END, 11))
PROMPTS = {"one": ONE, "two": TWO}


def ours(processor, prompt):
    """The prompt as rlloop's own types have it."""
    ids, images = [], []
    for chunk in prompt.chunks:
        if isinstance(chunk, types.ImageChunk):
            images.append(processor.image(chunk.data))
            ids.append(PAD)
        else:
            ids += chunk.tokens
    return processor.prompt(ids, images)


def sample(sampler, prompt, count=1, **asked):
    params = types.SamplingParams(max_tokens=6, seed=3)
    return sampler.sample(prompt, num_samples=count, sampling_params=params, **asked).result()


@pytest.mark.parametrize("name", PROMPTS)
def test_a_sample_has_the_engines_bits(folder, processor, base, name):
    (sequence,) = sample(base, PROMPTS[name]).sequences
    prompt = ours(processor, PROMPTS[name])
    assert len(prompt) == PROMPTS[name].length
    (alone,) = Engine(load_model(folder / MODEL)).generate([prompt], SamplingParams(max_tokens=6, seed=3))
    assert sequence.tokens == alone.token_ids
    assert np.float32(sequence.logprobs).tobytes() == alone.logprobs.tobytes()


def test_the_picture_matters(base):
    other = prompt_of(*ONE.chunks[:1], image(picture(24, 16, 5), expected_tokens=6), *ONE.chunks[2:])
    assert sample(base, ONE).sequences[0].logprobs != sample(base, other).sequences[0].logprobs


BROKEN = {
    "count": (image(WIDE, expected_tokens=7), "expected_tokens=7, and this model's image processor makes 6 tokens"),
    "broken": (image(WIDE[:-40]), "chunk 1: a picture of .* bytes is broken"),
    "header": (image(WIDE[:20]), "chunk 1: a picture of 20 bytes is "),
    "format": (image(TALL, "png"), "format 'png', and its data are no such file"),
    "slim": (image(picture(402, 2)), "402 x 2 pixels; the longer side may be at most 200 times"),
    "pointer": (
        types.ImageAssetPointerChunk(format="png", location="s3://a/b.png", expected_tokens=6),
        "image at 's3://a/b.png'.*fetches nothing",
    ),
    "placeholder": (text(*[PAD] * 6), "token 91 at index 3 of the input, the placeholder of images"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_read_is_refused_by_name(base, kind):
    chunk, problem = BROKEN[kind]
    prompt = prompt_of(text(5, 9, START), chunk, text(END))
    with pytest.raises(tinker.RequestFailedError, match=problem) as raised:
        sample(base, prompt)
    assert raised.value.category.name == "User"


# ---------------------------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_scored_with_the_trainers_bits(folder, processor, base, name):
    model, prompt = load_model(folder / MODEL), ours(processor, PROMPTS[name])
    count = len(prompt) - 1

    def scored(targets):
        with torch.no_grad():
            row = ScoreRow(prompt.token_ids, range(1, count + 1), targets=np.array(targets), model_input=prompt)
            return score(model, [row])[0].numpy().reshape(np.shape(targets))

    wanted = scored(prompt.token_ids[1:])
    first, *others = base.compute_logprobs(PROMPTS[name]).result()
    assert first is None
    assert np.float32(others).tobytes() == wanted.tobytes()
    targets = np.array([prompt.token_ids[1:], [7] * count]).T
    asked = sample(
        base, PROMPTS[name], include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=3,
        target_prompt_logprobs=types.TensorData.from_numpy(targets),
    )  # fmt: skip
    assert np.float32(asked.prompt_logprobs[1:]).tobytes() == wanted.tobytes()
    assert np.float32(asked.target_prompt_logprobs.to_numpy()).tobytes() == scored(targets).tobytes()
    draws = asked.prompt_alt_tokens
    assert draws.logprobs.to_numpy().tobytes() == scored(draws.tokens.to_numpy()).tobytes()


# ---------------------------------------------------------------------------------------------------- training


def of_sample(prompt, sequence, advantage=1.0, chunks=None):
    """A datum of a sampled sequence, as tinker-cookbook makes it: the targets of images are 0. `chunks`: in place of
    the prompt's."""
    ids = [id for chunk in prompt.chunks for id in getattr(chunk, "tokens", [0] * chunk.length)]
    tokens, count = ids + sequence.tokens, len(ids) - 1
    rows = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": np.float32([0.0] * count + sequence.logprobs),
        "advantages": np.float32([0.0] * count + [advantage] * len(sequence.tokens)),
    }
    model_input = prompt_of(*(chunks or prompt.chunks), text(*sequence.tokens[:-1]))

    def spans(begin, tokens):
        name = sequence.sequence_id
        prompt_span = types.PromptProvenanceSpan(sequence_id=name, offset=begin, length=len(ids) - begin)
        return [prompt_span, types.SampledProvenanceSpan(sequence_id=name, length=tokens)]

    datum = types.Datum(model_input=model_input, loss_fn_inputs=rows)
    return datum.with_provenance(spans(0, len(sequence.tokens) - 1), spans(1, len(sequence.tokens)))


def logprobs_of(output):
    return [each["logprobs"].to_numpy() for each in output.loss_fn_outputs]


@pytest.mark.parametrize("rank", [4, 0])
def test_sampled_tokens_are_trained_with_equal_bits(client, rank):
    training = client.create_lora_training_client(base_model=MODEL, rank=rank, seed=1).result()
    before = None
    for _ in range(2):  # the second time by other weights
        sampler = training.save_weights_and_get_sampling_client()
        data, sampled = [], []
        for prompt in PROMPTS.values():
            sampled += (sequences := sample(sampler, prompt, 2).sequences)
            data += [of_sample(prompt, each, 1.0 - 2 * index) for index, each in enumerate(sequences)]
        forward = training.forward(data, "importance_sampling").result()
        done = training.forward_backward(data, "importance_sampling").result()
        assert done.metrics["parity/tokens_checked:sum"] == sum(len(each.tokens) for each in sampled)
        assert done.metrics["parity/tokens_different:sum"] == 0
        for here, there, sequence in zip(logprobs_of(forward), logprobs_of(done), sampled, strict=True):
            assert here.tobytes() == there.tobytes()
            assert here[-len(sequence.tokens) :].tobytes() == np.float32(sequence.logprobs).tobytes()
        assert [each.logprobs for each in sampled] != before
        before = [each.logprobs for each in sampled]
        step = training.optim_step(types.AdamParams(learning_rate=0.01)).result()
        assert step.metrics["optim/grad_norm"] > 0


@pytest.fixture(scope="module")
def lora(client):
    return client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def test_another_picture_than_the_sampled_one_is_found(client, lora):
    (sequence,) = sample(lora.save_weights_and_get_sampling_client(), ONE).sequences
    other = [*ONE.chunks[:1], image(picture(24, 16, 5), expected_tokens=6), *ONE.chunks[2:]]
    with pytest.raises(tinker.RequestFailedError, match="send the images that were sampled from") as raised:
        lora.forward_backward([of_sample(ONE, sequence, chunks=other)], "importance_sampling").result()
    assert raised.value.category.name == "User"
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        lora.optim_step(types.AdamParams()).result()


@pytest.mark.parametrize("kind", sorted(BROKEN.keys() - {"pointer"}))  # the client itself refuses those
def test_data_that_cannot_be_read_are_refused_before_any_work(lora, kind):
    chunk, problem = BROKEN[kind]
    good, length = of_text([5, 9, 14, 3]), 4 + (chunk.length if kind == "placeholder" else 6)
    bad = types.Datum(
        model_input=prompt_of(text(5, 9, START), chunk, text(END)),
        loss_fn_inputs={"target_tokens": np.zeros(length, np.int64), "weights": np.ones(length, np.float32)},
    )
    with pytest.raises(tinker.RequestFailedError, match=f"datum 1, .*{problem}") as raised:
        lora.forward_backward([good, bad], "cross_entropy").result()
    assert raised.value.category.name == "User"
    lora.forward_backward([good], "cross_entropy")
    assert lora.optim_step(types.AdamParams()).result().metrics["optim/grad_norm"] > 0


def of_text(tokens):
    rows = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=rows)
