"""Adapters of models that read images: the engine's bits in the trainer, and PEFT's values, on prompts with images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from rlloop import Engine, load_adapter, load_model, token_logprobs
from rlloop.models.adapter_files import with_stored_adapter
from tests.support.adapters import adapter_folder
from tests.support.family_checks import SAMPLING
from tests.support.image_models import FAMILIES, inputs, make_image_checkpoint, theirs

logging.disable_progress_bar()

LOGPROB_ERROR = 2e-4  # measured: 7e-6, of recurrent layers (in chunks there) 6.4e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_recomputes_the_engines_bits(tmp_path: Path, family: str, dtype: str) -> None:
    """Rows of an adapter beside rows of the base, all with images."""
    make_image_checkpoint(tmp_path / "base", family, dtype=torch.bfloat16)
    model = load_model(tmp_path / "base", dtype=dtype).requires_grad_(False)
    load_adapter(model, adapter_folder(tmp_path / "adapter", model, 0), "a")
    prompts = [prompt for prompt, _ in inputs()]
    names = [None if index % 3 == 2 else "a" for index in range(len(prompts))]
    made = Engine(model, max_batch_tokens=16).generate(prompts, SAMPLING, adapters=names)
    for prompt, each, sampling, name in zip(prompts, made, SAMPLING, names, strict=True):
        pair = (prompt, each.token_ids)
        (row,) = token_logprobs(model, [pair], sampling=[sampling], adapter=name)
        assert each.logprobs.tobytes() == row.detach().numpy().tobytes()
        (base,) = token_logprobs(model, [pair], sampling=[sampling])
        assert torch.equal(base, row) == (name is None)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_adapter_trains(tmp_path: Path, family: str) -> None:
    make_image_checkpoint(tmp_path / "base", family)
    model = load_model(tmp_path / "base").requires_grad_(False)
    policy = with_stored_adapter(model, adapter_folder(tmp_path / "adapter", model, 0))
    prompt, tokens = inputs()[1]
    token_logprobs(policy, [(prompt, tokens)])[0].sum().backward()
    assert policy.adapter is not None
    gradients = [factor.grad for factor in policy.adapter.named_parameters().values()]
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_it_and_agrees_on_images(tmp_path: Path, family: str) -> None:
    peft = pytest.importorskip("peft")
    make_image_checkpoint(tmp_path / "base", family)
    model = load_model(tmp_path / "base").requires_grad_(False)
    load_adapter(model, adapter_folder(tmp_path / "adapter", model, 0), "a")
    base = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "base", attn_implementation="eager", experts_implementation="eager"
    )
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    for prompt, tokens in inputs():
        with torch.no_grad():
            wanted = theirs(adapted, prompt, tokens).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            (mine,) = token_logprobs(model, [(prompt, tokens)], adapter="a")
        assert (mine - wanted).abs().max() < LOGPROB_ERROR
    adapted.save_pretrained(tmp_path / "theirs")
    load_adapter(model, tmp_path / "theirs", "b")
    prompt, tokens = inputs()[1]
    mine, again = (token_logprobs(model, [(prompt, tokens)], adapter=name)[0] for name in ("a", "b"))
    assert torch.equal(mine, again)
