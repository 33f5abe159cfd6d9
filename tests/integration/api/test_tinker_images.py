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
        made.close("success").result(30)
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
