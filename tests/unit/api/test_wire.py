"""The wire: the schema as data, messages to types and back, and bytes equal to those of Tinker's own module."""

import numpy as np
import pytest
import zstandard

from rlloop.api import requests, wire
from rlloop.api.inputs import TEXT_ONLY
from rlloop.api.schema import FILE, message, parse
from rlloop.errors import ConfigError
from rlloop.training.types import (
    ForwardBackwardOutput,
    PromptAltTokens,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    TopkLogprobs,
)


def request(**fields):
    made = message("ForwardBackwardRequest")(model_id="s:train:0", seq_id=3, loss_fn="ppo", **fields)
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6], "<i4").tobytes()
    datum.model_input.add().encoded_text.tokens = np.array([7], "<i4").tobytes()
    return made


def test_a_request_becomes_datums():
    made = request(loss_fn_config={"old": 1.0})
    made.loss_fn_config_v2["clip"].number = 0.2
    made.loss_fn_config_v2["mode"].text = "token"
    dense = made.data[0].loss_fn_inputs["weights"]
    dense.dtype, dense.dense = 1, np.array([0, 1, 0.5], "<f4").tobytes()
    dense.shape.extend([3])
    csr = made.data[0].loss_fn_inputs["target_tokens"]
    csr.dtype = 2
    csr.shape.extend([3, 4])
    for name, values in (("values", [9, 8]), ("crow_indices", [0, 1, 1, 2]), ("col_indices", [2, 0])):
        setattr(csr.sparse_csr, name, np.array(values, "<i8").tobytes())
    run = made.data[0].loss_fn_input_spans.add().sampled_tokens
    run.sequence_id, run.offset, run.length = "q/0", 1, 3
    made.data[0].model_input_spans.add().prompt_tokens.sequence_id = "q/0"

    read = wire.decode_forward_backward(made.SerializeToString())
    assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == ("s:train:0", 3, "ppo", False)
    assert read.loss_fn_config == {"clip": 0.2, "mode": "token"}
    assert read.data[0].model_input.token_ids == [5, 6, 7]
    np.testing.assert_array_equal(read.data[0].loss_fn_inputs["weights"], np.array([0, 1, 0.5], np.float32))
    np.testing.assert_array_equal(
        read.data[0].loss_fn_inputs["target_tokens"], [[0, 0, 9, 0], [0, 0, 0, 0], [8, 0, 0, 0]]
    )
    named = read.data[0].provenance
    assert named is not None
    assert named.loss_fn_inputs == (SampledProvenanceSpan(sequence_id="q/0", offset=1, length=3),)
    assert named.model_input == (PromptProvenanceSpan(sequence_id="q/0", length=0),)
    assert wire.decode_forward_backward(made.SerializeToString(), provenance=False).data[0].provenance is None


def test_an_old_client_sends_numbers_only():
    assert wire.decode_forward_backward(request(loss_fn_config={"a": 1.5}).SerializeToString()).loss_fn_config == {
        "a": 1.5
    }


def test_damaged_requests_say_what_is_wrong():
    with pytest.raises(ConfigError, match="no ForwardBackwardRequest"):
        wire.decode_forward_backward(b"\x0a\xff")
    image = request()
    chunk = image.data[0].model_input.add().image
    chunk.data, chunk.format = b"\x89PNG\r\n\x1a\n", "png"
    with pytest.raises(ConfigError, match="datum 0, chunk 2 is an image, and the model reads text only"):
        wire.decode_forward_backward(image.SerializeToString())
    chunk.override_dimensions.width = 8
    with pytest.raises(ConfigError, match="datum 0, chunk 2, has override_dimensions"):
        wire.decode_forward_backward(image.SerializeToString())
    sound = request()
    sound.data[0].model_input.add().dmel.dmel = b"1"
    with pytest.raises(ConfigError, match="datum 0, chunk 2, is of type dmel; this server takes token ids and images"):
        wire.decode_forward_backward(sound.SerializeToString())
    for shape, data, problem in (
        ([4], b"\0" * 12, "3 elements, which do not fit"), ([3], b"\0" * 11, "no whole number of float32"),
    ):  # fmt: skip
        wrong = request()
        tensor = wrong.data[0].loss_fn_inputs["weights"]
        tensor.dtype, tensor.dense = 1, data
        tensor.shape.extend(shape)
        with pytest.raises(ConfigError, match=problem):
            wire.decode_forward_backward(wrong.SerializeToString())
    for columns in ([5, 0], [-1, 0]):
        with pytest.raises(ConfigError, match="no CSR matrix"):
            wire.dense_of("x", np.ones(2), np.array([0, 1, 2]), np.array(columns), shape=(2, 4), fill=0)


def test_zstd_is_bounded():
    packed = zstandard.compress(b"\0" * 100_000)
    assert wire.unpacked(packed, "zstd", 100_000) == b"\0" * 100_000
    assert wire.unpacked(b"ab", "", 10) == b"ab"
    with pytest.raises(ConfigError, match="more than 99999 bytes"):
        wire.unpacked(packed, "zstd", 99_999)
    with pytest.raises(ConfigError, match="not zstd"):
        wire.unpacked(b"plain", "zstd", 10)
    frames = zstandard.compress(b"a" * 3000) + zstandard.compress(bytes(range(256)) * 40)
    assert wire.unpacked(frames, "zstd", 20_000) == b"a" * 3000 + bytes(range(256)) * 40
    for cut in (1, 20, len(frames)):
        with pytest.raises(ConfigError, match="cut off"):
            wire.unpacked(frames[:-cut], "zstd", 20_000)
    with pytest.raises(ConfigError, match="encoded as 'gzip'"):
        wire.unpacked(b"", "gzip", 10)


def test_outputs_of_different_width_stand_in_records_of_their_own():
    one, two = np.array([1.0, 2.0], np.float32), np.array([[1.0, 2.0]], np.float32)
    sent = wire.encode_output(
        ForwardBackwardOutput([{"logprobs": one}, {"logprobs": one[:1]}, {"logprobs": two}], {"loss:sum": 1.25})
    )
    read = message("ForwardBackwardOutput").FromString(sent)
    assert [record.num_datums for record in read.loss_fn_outputs] == [2, 1]
    first = read.loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(first.offsets, "<i8").tolist() == [0, 8, 12]
    assert list(read.loss_fn_outputs[1].fields["logprobs"].trailing_shape) == [2]
    assert dict(read.metrics) == {"loss:sum": 1.25}


def test_json_requests():
    params = requests.decoded(b'{"max_tokens": 4, "stop": [1, 2], "temperature": 1}', requests.Params).sampling()
    assert (params.max_tokens, params.stop, params.temperature) == (4, [1, 2], 1.0)
    with pytest.raises(ConfigError, match="unknown field `surprise`"):
        requests.decoded(b'{"request_id": "a", "surprise": 1}', requests.Retrieve)
    for chunk, problem in (
        (b'"type": "image", "data": "iVBORw0KGgo=", "format": "png"', "is an image, and the model reads text only"),
        (b'"type": "image", "data": "aa", "format": "png"', "Invalid base64"),
        (b'"type": "image_asset_pointer", "location": "a/b", "format": "png"', "fetches nothing"),
        (b'"type": "dmel", "dmel": "aa"', "chunk 0, is of type 'dmel'; this server takes token ids and images"),
    ):
        with pytest.raises(ConfigError, match=problem):
            requests.decoded(b'{"chunks": [{%s}]}' % chunk, requests.Input).read(TEXT_ONLY)
    sparse = (
        b'{"data": [7], "dtype": "int64", "shape": [2, 2], "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [1]}'
    )
    np.testing.assert_array_equal(requests.decoded(sparse, requests.Tensor).array("t", -1), [[-1, -1], [-1, 7]])
    assert requests.decoded(b'{"rank": 0}', requests.Lora).config() is None


# ------------------------------------------------------------------------------------------------ beside Tinker's own


def test_the_schema_has_the_fields_of_tinkers():
    theirs = pytest.importorskip("tinker.proto.tinker_public_pb2").DESCRIPTOR
    ours = {each.name: each for each in parse(FILE.read_text()).message_type}
    renamed = {"PromptProvenanceSpan": "SequenceRun", "SampledProvenanceSpan": "SequenceRun"}
    read_by_nobody = {"SamplingParams", "StopStrings", "StopTokens"}  # sampling requests travel as JSON
    for name, described in theirs.message_types_by_name.items():
        if name in read_by_nobody:
            continue
        expected = {(field.number, field.name, field.type, field.is_repeated) for field in described.fields}
        own = message(renamed.get(name, name)).DESCRIPTOR
        assert {(field.number, field.name, field.type, field.is_repeated) for field in own.fields} == expected, name
        assert [each.name for each in own.oneofs] == [each.name for each in described.oneofs], name
    assert set(ours) - set(theirs.message_types_by_name) == {"SequenceRun"}


def test_tinkers_requests_are_read_and_written_byte_for_byte():
    tinker = pytest.importorskip("tinker")
    from tinker.proto.request_conv import forward_backward_request_to_proto
    from tinker.types.forward_backward_input import ForwardBackwardInput
    from tinker.types.forward_backward_request import ForwardBackwardRequest

    types = tinker.types
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={
            "target_tokens": types.TensorData([6, 7, 8], dtype="int64", shape=[3]),
            "advantages": types.TensorData([0.5, -1.0, 2.0], dtype="float32", shape=[3]),
        },
    )
    sent = forward_backward_request_to_proto(
        ForwardBackwardRequest(
            model_id="m", seq_id=1,
            forward_backward_input=ForwardBackwardInput(data=[datum], loss_fn="ppo", loss_fn_config={"a": 0.25}),
        )
    ).SerializeToString(deterministic=True)  # fmt: skip
    read = wire.decode_forward_backward(sent)
    assert read.data[0].model_input.token_ids == [5, 6, 7]
    np.testing.assert_array_equal(read.data[0].loss_fn_inputs["advantages"], np.array([0.5, -1, 2], np.float32))
    assert read.loss_fn_config == {"a": 0.25}
    ours = message("ForwardBackwardRequest").FromString(sent)
    assert ours.SerializeToString(deterministic=True) == sent


def test_tinker_reads_the_results():
    pytest.importorskip("tinker")
    from tinker.proto import tinker_public_pb2 as theirs
    from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

    arrays = [np.array([-1.5, -2.5], np.float32), np.array([[-1.0, -3.0]], np.float32)]
    sent = wire.encode_output(ForwardBackwardOutput([{"logprobs": each} for each in arrays], {"loss:sum": 2.0}))
    read = deserialize_forward_backward_output(sent)
    for each, array in zip(read.loss_fn_outputs, arrays, strict=True):
        assert each["logprobs"].to_numpy().tobytes() == array.tobytes()
        assert list(each["logprobs"].shape) == list(array.shape)
    assert theirs.ForwardBackwardOutput.FromString(sent).SerializeToString(deterministic=True) == sent

    topk = TopkLogprobs(np.array([[1, 2]], np.int32), np.array([[-0.5, -1.5]], np.float32))
    logprobs = np.array([-0.25], np.float32)
    response = SampleResponse(
        [SampledSequence("length", "q/0", [4], logprobs, topk)],
        prompt_logprobs=np.array([np.nan, -1.0], np.float32),
        topk_prompt_logprobs=topk,
        target_prompt_logprobs=np.array([[-7.0]], np.float32),
        prompt_cache_hit_tokens=2,
        prompt_alt_tokens=PromptAltTokens(np.array([[3, 4]]), np.array([[-1.0, -2.0]], np.float32)),
    )
    sent = wire.encode_sample(response)
    read = deserialize_sample_response(sent)
    assert (read.sequences[0].tokens, read.sequences[0].stop_reason) == ([4], "length")
    assert read.sequences[0].logprobs_np.tobytes() == logprobs.tobytes()
    assert read.prompt_logprobs == [None, -1.0]
    assert read.target_prompt_logprobs.to_numpy().tolist() == [[-7.0]]
    assert read.prompt_alt_tokens.tokens.to_numpy().tolist() == [[3, 4]]
    assert theirs.SampleResponse.FromString(sent).SerializeToString(deterministic=True) == sent
