"""`rlloop verify` of a model's command log: the weights again, and what was changed afterwards."""

import msgspec
import numpy as np
import pytest

from rlloop.api.core import Base, Settings, keep_base
from rlloop.api.inputs import InputReader
from rlloop.api.keys import Keys
from rlloop.api.log import MAGIC, Command, Weights, read_segment, segments
from rlloop.api.log import _framed as framed
from rlloop.api.schema import message
from rlloop.api.server import ApiServer
from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.training.service import TrainingService
from rlloop.web.server import BackgroundServer, Listen
from tests.support.api_client import Api
from tests.support.checkpoints import make_checkpoint
from tests.support.image_models import END, START
from tests.support.pictures import make_reading_model, picture

BITS = {"dtype": "float32", "device": "cpu", "leaf_tokens": 64, "max_lora_rank": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a server that has ended, after a model's five updates, a failure and a load."""
    top = tmp_path_factory.mktemp("verified")
    make_checkpoint(top / "tiny", "qwen3")
    keep_base(top, Base(str(top / "tiny"), "tiny", BITS))
    service = TrainingService(top / "tiny", checkpoints=top / "checkpoints", model_name="tiny", **BITS)
    settings = Settings(folder=top, model_name="tiny", model_folder=top / "tiny")
    server = BackgroundServer(ApiServer(service, settings, Keys({}, open=True)).app, Listen())
    api = Api(server.url).start("tiny", rank=4)
    for step in range(4):
        api.forward_backward([[5, 9, 14, 3, step], [7, 8, step]])
        assert "no gradient" not in str(api.optim_step())
        if step == 1:
            path = api.command("save_weights", path="two")["path"]
            assert "error" in api.command("optim_step", adam_params={"learning_rate": -1.0})
    api.command("load_weights", path=path, optimizer=True)
    api.forward_backward([[5, 9, 14, 3, 1]])
    api.optim_step()
    server.close()
    service.close()
    return top, top / "sessions" / api.session / "models" / "0"


def test_the_log_gives_the_weights_that_it_says(folder, capsys):
    assert main(["verify", str(folder[1])]) == 0
    shown = capsys.readouterr().out
    assert "ok  replay: weights compared 6 times" in shown


@pytest.mark.parametrize("kind", ["weights", "learning rate"])
def test_a_log_that_was_changed_is_found(folder, capsys, kind):
    path = segments(folder[1])[0]
    whole = path.read_bytes()

    def changed(record):
        if kind == "weights" and isinstance(record, Weights):
            return Weights(record.seq_id, bytes(32))
        if kind == "learning rate" and isinstance(record, Command) and b'"learning_rate":0.01' in record.body:
            return msgspec.structs.replace(record, body=record.body.replace(b"0.01", b"0.02"))
        return record

    try:
        path.write_bytes(MAGIC + framed([changed(record) for record in read_segment(path).records]))
        assert main(["verify", str(folder[1])]) == 1
        assert "leaves other weights than the log says" in capsys.readouterr().out
    finally:
        path.write_bytes(whole)


def test_other_settings_are_refused_before_a_replay_gives_other_weights(folder):
    with pytest.raises(ConfigError, match="their replay would give other weights"):
        keep_base(folder[0], Base(str(folder[0] / "tiny"), "tiny", {**BITS, "leaf_tokens": 128}))


def test_a_log_with_images_gives_the_weights_again(tmp_path, capsys):
    make_reading_model(tmp_path / "tiny")
    keep_base(tmp_path, Base(str(tmp_path / "tiny"), "tiny", BITS))
    service = TrainingService(tmp_path / "tiny", checkpoints=tmp_path / "checkpoints", model_name="tiny", **BITS)
    settings = Settings(
        folder=tmp_path, model_name="tiny", model_folder=tmp_path / "tiny",
        inputs=InputReader.of_folder(tmp_path / "tiny"),
    )  # fmt: skip
    server = BackgroundServer(ApiServer(service, settings, Keys({}, open=True)).app, Listen())
    api = Api(server.url).start("tiny", rank=4)
    for step in range(3):
        made = api.forward_backward([[5, START, (picture(24, 16, step), 6), END, 3, step], [7, 8, step]])
        offsets = np.frombuffer(made.loss_fn_outputs[0].fields["logprobs"].offsets, "<i8")
        assert offsets.tolist() == [0, 4 * 10, 4 * 12]
        assert "no gradient" not in str(api.optim_step())
    server.close()
    service.close()
    log = tmp_path / "sessions" / api.session / "models" / "0"
    assert main(["verify", str(log)]) == 0
    assert "ok  replay: weights compared 3 times" in capsys.readouterr().out

    path = segments(log)[0]
    was, other = picture(24, 16, 1), picture(24, 16, 7)  # their sizes differ, and protobuf has them
    records = read_segment(path).records
    for index, record in enumerate(records):
        if isinstance(record, Command) and was in record.body:
            request = message("ForwardBackwardRequest").FromString(record.body)
            request.data[0].model_input[1].image.data = other
            records[index] = msgspec.structs.replace(record, body=request.SerializeToString())
    path.write_bytes(MAGIC + framed(records))
    assert main(["verify", str(log)]) == 1
    assert "leaves other weights than the log says" in capsys.readouterr().out


def test_a_damaged_base_is_named(folder, capsys):
    base = folder[0] / "base.json"
    whole = base.read_bytes()
    base.write_bytes(whole[:-1])
    try:
        assert main(["verify", str(folder[1])]) != 0
    finally:
        base.write_bytes(whole)
    assert f"{base} is damaged" in capsys.readouterr().err
