import math

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlloop.dashboard.chat_text import messages_of, question_of
from rlloop.dashboard.tokens import explain, find_tokenizer, load_tokenizer, pieces
from rlloop.runs.folder import read_rollouts, rollout_files
from tests.support.dashboard_runs import write_talk


def words() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2, "?": 3}, unk_token="?"))


def test_pieces_put_together_are_the_text():
    tokenizer = words()
    assert "".join(pieces(tokenizer, [0, 1, 0, 2])) == tokenizer.decode([0, 1, 0, 2], skip_special_tokens=False)


def test_pieces_of_bytes_keep_their_spaces():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert pieces(tokenizer, tokenizer.encode("a b\nc").ids) == ["a", " ", "b", "\n", "c"]
    broken = pieces(tokenizer, tokenizer.encode("é").ids)  # two tokens, half a character each
    assert len(broken) == 2
    assert all(broken)


def row(**more):
    return {
        "uid": "1/0/0", "outcome": "trained", "prompt": "a", "prompt_ids": [0], "advantage": 0.5,
        "token_ids": [0, 1, 2], "logprobs": [-1.0, -2.0, -3.0],
        "sampling": {"max_tokens": 3, "seed": 2**62 + 1}, **more,
    }  # fmt: skip


def test_equal_bits():
    found = explain(row(), words())
    assert [token["same"] for token in found["tokens"]] == [True, True, True]
    token = {"id": 1, "text": " b", "engine": -2.0, "trainer": -2.0, "d": 0.0, "same": True}
    assert found["tokens"][1] == token | {"advantage": 0.5, "entropy": None}
    assert found["surprise"] == 2.0
    assert found["sampling"]["seed"] == str(2**62 + 1)


def test_differences_have_their_sign():
    found = explain(row(trainer_logprobs=[-1.0, -1.5, None]), None)
    assert [token["same"] for token in found["tokens"]] == [True, False, False]
    assert [token["d"] for token in found["tokens"]] == [0.0, 0.5, None]
    assert found["tokens"][0]["text"] is None


def test_one_bit_is_a_difference():
    next_one = float(np.nextafter(np.float32(-2.0), np.float32(0)))
    token = explain(row(trainer_logprobs=[-1.0, next_one, -3.0]), None)["tokens"][1]
    assert not token["same"]
    assert token["d"] == pytest.approx(1.2e-7, rel=0.1)


def test_what_was_not_trained_was_not_compared():
    found = explain(row(outcome="dropped: no signal in its group"), None)
    assert not found["compared"]
    assert "trainer" not in found["tokens"][0]


def test_what_others_said_has_no_logprob():
    found = explain(row(token_ids=[0, 1, 2, 0], logprobs=[-1.0, -2.0], turns=[[0, 1], [3, 4]]), None)
    assert [token.get("engine", math.nan) for token in found["tokens"]] == pytest.approx(
        [-1.0, math.nan, math.nan, -2.0], nan_ok=True
    )


def test_the_newest_checkpoints_tokenizer(tmp_path):
    assert find_tokenizer(tmp_path, {"model.path": None}) is None
    for step in (9, 10):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        words().save(str(folder / "tokenizer.json"))
    assert find_tokenizer(tmp_path, {}) == tmp_path / "checkpoints" / "step_10" / "tokenizer.json"
    words().save(str(tmp_path / "tokenizer.json"))
    assert find_tokenizer(tmp_path, {}) == tmp_path / "tokenizer.json"


def test_a_conversation_by_turn(tmp_path):
    write_talk(tmp_path)
    [talk] = read_rollouts(rollout_files(tmp_path)[0])
    found = explain(talk, load_tokenizer(tmp_path / "tokenizer.json"))
    assert [turn["role"] for turn in found["trace"]] == ["system", "user", "assistant", "tool", "assistant"]
    system, user, call, result, answer = found["trace"]
    assert (system["text"], user["text"]) == ("be brief", "what is 3 + 4")
    assert (call["calls"], call["reward"], answer["reward"]) == ([], 0.25, 0.75)  # its record's text names no tool
    assert (result["name"], result["text"], result["read"]) == ("add", "7", 12)
    assert [token.get("advantage") for token in found["tokens"][::9]] == [0.5, None, -0.25]
    assert "engine" not in found["tokens"][call["tokens"][1]]  # masked
    del talk["conversation"]  # as runs of other tasks are: turns and roles from the template's own markers
    again = explain(talk, load_tokenizer(tmp_path / "tokenizer.json"))["trace"]
    assert [(turn["role"], turn["text"]) for turn in again[3:4]] == [("tool", "7")]
    assert again[2]["calls"] == ["add"]
    assert again[2]["reward"] is None


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|start|>developer<|message|>S<|end|><|start|>user<|message|>U<|end|><|start|>assistant",
        "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>U<|im_end|>",
        "[gMASK]<sop><|system|>\nS<|user|>\nU<|assistant|>\n",
    ],
)
def test_messages_of_templates(text):
    assert messages_of(text)[:2] == [("system", "S"), ("user", "U")]
    assert question_of(text, 10) == "U"


def test_lists_show_the_question_rather_than_a_pictures_placeholders():
    seen = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
    assert question_of(f"<|im_start|>user\n{seen}what shape ?<|im_end|>\n<|im_start|>assistant\n", 10) == "what shape"
    assert question_of(f"{seen}what shape ?", 80) == "what shape ?"


def test_a_prompt_without_a_template_is_one_message():
    assert messages_of("3 5 7 -> 22") == [("prompt", "3 5 7 -> 22")]
    assert question_of("long " * 100 + "what?", 10) == "long what?"
    assert messages_of("<｜User｜>U<｜Assistant｜>") == [("user", "U")]
    assert messages_of("<bos><start_of_turn>user\nU<end_of_turn>\n<start_of_turn>model\n") == [("user", "U")]
