"""tinker-cookbook's own recipes, unchanged, against the training API on a tiny model: they train, and KL is exactly 0.

Install tinker-cookbook to run it; it is in no extra of rlloop, since it needs pyarrow, pandas and more.
"""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlloop.api.core import Settings
from rlloop.api.keys import Keys
from rlloop.api.server import ApiServer
from rlloop.training.service import TrainingService
from rlloop.web.server import BackgroundServer, Listen
from tests.support.checkpoints import make_checkpoint

pytest.importorskip("tinker_cookbook", reason="needs tinker-cookbook: pip install tinker-cookbook")

NAME = "Qwen/Qwen3-8B-Base"  # which the cookbook knows; it finds the tokenizer in the folder of that name
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,:?{}\\'\"<>|_/#"
# A model of random weights draws any token as often as any other. These make some of its texts right and some wrong.
BOXED = [f"\\boxed{{{' ' * spaces}{answer}}}" for answer in (3, 4) for spaces in range(8)]
ANSWERS = [f"Answer: {count}\n" for count in range(8)]


def make_tokenizer(folder):
    """A token for each character, and one for each whole answer."""
    vocabulary = ["<unk>", *SPECIAL, *CHARACTERS, *BOXED, *ANSWERS]
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*BOXED, *ANSWERS)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token=SPECIAL[0], pad_token=SPECIAL[0],
        additional_special_tokens=list(SPECIAL[1:]), clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.save_pretrained(folder)
    return len(vocabulary)


def make_data(folder, dataset, rows, config="default"):
    (folder / dataset).mkdir(parents=True)
    (folder / dataset / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / dataset / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    )


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Runs a recipe in a process of its own; returns the metrics of its steps."""
    folder = tmp_path_factory.mktemp("cookbook")
    model = folder / NAME
    make_checkpoint(model, "qwen3", vocab_size=make_tokenizer(model), max_position_embeddings=4096, eos_token_id=1)
    make_data(folder, "openai/gsm8k", [{"question": f"{row} and 3?", "answer": "#### 3"} for row in range(8)], "main")
    make_data(folder, "HuggingFaceH4/no_robots", [
        {"messages": [{"role": "user", "content": f"say {row}."}, {"role": "assistant", "content": f"{row} it is."}]}
        for row in range(16)
    ])  # fmt: skip
    text = {"text": "it was known that many ships came over the sea, and that some of them were lost. " * 20}
    make_data(folder, "Salesforce/wikitext", [text] * 20, "wikitext-103-raw-v1")
    service = TrainingService(model, checkpoints=folder / "checkpoints", model_name=NAME)
    settings = Settings(folder=folder / "api", model_name=NAME, model_folder=model)
    server = BackgroundServer(ApiServer(service, settings, Keys({}, open=True)).app, Listen())
    environment = {
        **os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-cookbook", "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "home"),
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip

    def run(name, *options):
        log = folder / "logs" / name
        command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", f"model_name={NAME}", f"log_path={log}"]
        done = subprocess.run(
            [*command, "lora_rank=4", "save_every=0", *options],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=800,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]

    yield run
    server.close()
    service.close()


def test_sl_loop_learns(recipe):
    steps = recipe("sl_loop", "batch_size=4", "learning_rate=0.01")
    losses = [step["train_mean_nll"] for step in steps]
    assert len(losses) == 4
    assert losses[-1] < 0.9 * losses[0]


def test_rl_loop_moves_the_weights(recipe):
    steps = recipe(
        "rl_loop", "loss_fn=importance_sampling", "batch_size=4", "group_size=8", "max_tokens=8", "learning_rate=0.02"
    )
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["reward/total"] < 1
        assert step["optim/grad_norm"] > 0


def test_the_numerics_check_is_exactly_0_while_weights_move(recipe):
    steps = recipe(
        "rl_numerics_check.train", "renderer_name=qwen3_disable_thinking", "groups_per_batch=4", "group_size=4",
        "max_tokens=32", "max_trajectory_tokens=3500", "task.num_pages_min=2", "task.num_pages_max=3",
        "task.page_chars=200", "task.reward_tolerance=9", "max_steps=3", "learning_rate=0.004",
    )  # fmt: skip
    steps = [step for step in steps if "progress/batch" in step]  # the last line counts tokens only
    assert len(steps) == 3
    for step in steps:
        assert step["optim/kl_sample_train_v1"] == 0.0
        assert step["optim/kl_sample_train_v2"] == 0.0
        assert step["optim/grad_norm"] > 0
    rewards = [step["env/all/reward/total"] for step in steps]
    assert any(earlier != later for earlier, later in pairwise(rewards))
