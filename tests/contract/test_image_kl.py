"""k3 of image and of text tokens under another rounding of experts' products, before and after text is learned.

A token that a model is sure of hardly feels an error in its logits; a placeholder, which no loss makes likely, feels
all of it. So the ratio of the two grows as text is learned (benchmarks/image_parity.py has it in size).
"""

from pathlib import Path

from rlloop import Engine, load_model
from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.inputs import ModelInput
from rlloop.models.prompt_scores import score_prompt
from rlloop.numerics.profile import NumericsProfile
from rlloop.parity.token_types import compare_prompt
from rlloop.trainer import Trainer, TrainSequence
from tests.support.image_models import END, image, make_image_checkpoint, prompt_with

BEFORE, AFTER = [5, 6, 7], [END, 11, 12, 13, 14, 15, 16, 17]


def k3(folder: Path, prompts: list[ModelInput], combine: str) -> tuple[float, float]:
    """(text, image): the engine combines experts as `combine`, the trainer rounds their sum once."""
    ours = load_model(folder, dtype="bfloat16")
    engine = Engine(ours.with_profile(NumericsProfile(expert_combine=combine)))
    of_text, of_image = 0.0, 0.0
    for prompt in prompts:
        [read] = engine.prefill_logprobs([prompt])
        metrics = compare_prompt(prompt, read, score_prompt(ours, prompt).logprobs).metrics
        of_text, of_image = of_text + metrics["parity/k3_text"], of_image + metrics["parity/k3_image"]
    return of_text / len(prompts), of_image / len(prompts)


def test_learning_the_text_makes_image_tokens_stand_out(tmp_path: Path) -> None:
    make_image_checkpoint(tmp_path / "new", "qwen3_vl_moe", text={"num_experts_per_tok": 8, "num_experts": 16})
    prompts = [prompt_with(BEFORE, image(4, 6, seed), AFTER[1:]) for seed in range(6)]
    rows = []
    for prompt in prompts:
        [span] = prompt.contents
        assert span.image is not None
        begin = ModelInput.with_images(prompt.token_ids[: span.end], range(span.start, span.end), [span.image])
        rows.append(TrainSequence.supervised(begin, AFTER))
    rows.append(TrainSequence.supervised(prompts[0].token_ids[:1], prompts[0].token_ids[1 : span.start]))
    trainer, loss = Trainer(load_model(tmp_path / "new"), TrainerConfig(num_steps=30, lr=3e-3)), get_loss("sft")
    for _ in range(30):
        trainer.forward_backward(rows, loss)
        trainer.optim_step()
    trainer.save(tmp_path / "taught")

    text, pictures = k3(tmp_path / "new", prompts, "bf16_each")
    assert min(text, pictures) > 1e-5
    assert pictures < 3 * text
    text, pictures = k3(tmp_path / "taught", prompts, "bf16_each")
    assert pictures > 60 * text > 0
    assert k3(tmp_path / "taught", prompts, "fp32_once") == (0, 0)
