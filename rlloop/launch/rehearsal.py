"""`rlloop train --dry-run`: a run up to its first step, in a folder that is deleted again."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from rlloop.launch.kernels import compile_if_new
from rlloop.launch.layouts import check_launch, check_task
from rlloop.launch.prepare import prepare
from rlloop.launch.run import Job, builder_of
from rlloop.launch.torchrun import Leader
from rlloop.models.config import read_config
from rlloop.parity.monitor import refuse_different_fingerprints
from rlloop.runs.folder import RunFolder

SHOWN = 300  # characters of a prompt


def rehearse(job: Job, console: Console, leader: Leader | None = None) -> None:
    """Build the parts of a run as `train` does, and print what they are. Raises what `train` would before its first
    step. `leader`: of the other ranks, under torchrun."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    config = job.config
    with ExitStack() as stack:
        if leader is None:
            check_launch(config, 1)
        else:
            check_launch(config, leader.here.size, leader.machines)
        prepared = prepare(config, job.reward)
        stack.callback(prepared.scorer.close)
        check_task(config, prepared.task)
        compile_if_new(config, say)
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlloop-dry-run-"))
        folder = stack.enter_context(RunFolder(Path(scratch)))
        folder.adopt(job.plain)
        parts = stack.enter_context(builder_of(config, leader)(config, prepared, folder))
        if config.parity.mode == "require":
            refuse_different_fingerprints(parts.engine.fingerprint(), parts.trainer.fingerprint())
        model, rollout = read_config(Path(prepared.task.model_folder())), config.rollout
        examples = prepared.task.train_examples(1, rollout.num_prompts)
        held_out = prepared.task.eval_examples(config.eval.num_draws)
        say(f"model    {prepared.task.model_folder()}: {model.num_layers} layers, {model.vocab_size} tokens")
        say(f"run      {job.folder}, {config.trainer.num_steps} steps, launch={config.launch}, device={config.device}")
        each = f"{rollout.group_size} completions of up to {rollout.max_tokens} tokens"
        say(f"step     {rollout.num_prompts} prompts x {each}")
        say(f"eval     {len(held_out)} held-out completions, every {config.eval.every} steps")
        say(f"reward   {config.reward.get('_target_')}")
        say(f"prompt   {examples[0].prompt[:SHOWN]!r}")
    say("Dry run: everything is built, no step was taken, nothing was written")
