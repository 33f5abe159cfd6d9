"""`SamplingService`: a base model in memory, its checkpoints, and samplers of both."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from rlloop.errors import ConfigError
from rlloop.rollout.fleet.text import Tokenizer
from rlloop.training.checkpoints import CheckpointFolder, Overwrite, checked_name
from rlloop.training.futures import promised
from rlloop.training.lanes import Action
from rlloop.training.models import Models
from rlloop.training.provenance import SampledRecord, SampledSequences
from rlloop.training.samplers import Samplers
from rlloop.training.sampling import BASE, PromptAsk, Sampler
from rlloop.training.types import Checkpoint, CheckpointType, LoraConfig, SampleResponse, SamplingParams
from rlloop.types import ModelInput, as_model_input


class SamplingService:
    """The part of a `TrainingService` that reads weights: samplers of the base and of checkpoints, and the checkpoints.

    Its methods can be called from any thread; those that return a future compute in the service's one worker thread.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        checkpoints: str | Path | None = None,
        model_name: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        leaf_tokens: int = 16384,
        max_lora_rank: int = 64,
        adapter_slots: int = 8,
        max_running: int = 256,
        keep_samplers: int = 8,
        keep_sequences: int = 100_000,
        checkpoint_layers: int = 0,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        """`folder`: the base model, a Hugging Face folder. `checkpoints`: where weights are saved; None: a temporary
        folder. `model_name`: the base's name in answers; None: the folder's name.

        `leaf_tokens`: of a micro-batch; the only setting here besides `dtype` and `device` that decides bits.
        `max_lora_rank`, `adapter_slots`: as for `rlloop.Engine`. `max_running`: completions of one step of the engine.
        `keep_samplers`: unnamed samplers of one model that stay, the newest; `keep_sequences`: sampled sequences that
        provenance may name. `checkpoint_layers`: every n-th layer is computed again in the backward pass.
        `engine`: further settings of `rlloop.Engine`, such as `max_cache_tokens`.
        """
        if leaf_tokens < 1 or keep_samplers < 1 or max_running < 1:
            raise ConfigError(
                f"leaf_tokens is {leaf_tokens}, keep_samplers {keep_samplers}, max_running {max_running}; each must be "
                "at least 1"
            )
        self.sequences = SampledSequences(keep_sequences)
        self._models = models = Models(
            Path(folder), model_name, dtype, device, leaf_tokens=leaf_tokens, checkpoint_layers=checkpoint_layers,
            sequences=self.sequences,
        )  # fmt: skip
        models.base.adapters.configure(adapter_slots, max_lora_rank)
        self._samplers = Samplers(
            models.base, models.tokenizer, self.sequences, models.load_whole, engine=engine or {},
            max_running=max_running, keep=keep_samplers,
        )  # fmt: skip
        models.view = self._samplers.view
        models.worker.lanes += [self._samplers.over_base, self._samplers.whole]
        self._temporary = None if checkpoints is not None else tempfile.TemporaryDirectory(prefix="rlloop-")
        self._store = CheckpointFolder(Path(self._temporary.name if self._temporary else str(checkpoints)))

    @property
    def base_model(self) -> str:
        """The base's name in answers."""
        return self._models.name

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of the base's folder; None where it has none."""
        return self._models.tokenizer

    # ------------------------------------------------------------------------------------------------ samplers

    def create_sampler(self, path: str | None = None, *, sampler: str | None = None) -> Future[str]:
        """Create a sampler of a checkpoint of either kind, or without a path of the base; returns its id, `sampler` or
        the path. It is in memory until `drop_sampler`; under the path's id, also until the checkpoint is deleted."""
        if path is None:
            done: Future[str] = Future()
            done.set_result(self._samplers.add(Sampler(sampler or "base", BASE, keeps=True)))
            return done
        checkpoint, folder = self._store.get(path)
        lane = self._samplers.over_base if checkpoint.is_lora else self._samplers.whole
        return self._models.place(lane, Action(lambda: self._samplers.load(sampler or path, checkpoint, folder)))

    def drop_sampler(self, sampler: str) -> None:
        """Drop a sampler; its current requests are finished. Raises `ConfigError` for an unknown one."""
        self._models.place(*self._samplers.drop(sampler))

    def sample(
        self,
        prompt: ModelInput | Sequence[int],
        num_samples: int,
        params: SamplingParams,
        *,
        sampler: str | None = None,
        request: str | None = None,
        sequence_ids: Sequence[str] | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: np.ndarray | None = None,
        prompt_logprobs_last_n: int | None = None,
        prompt_alt_tokens_k: int = 0,
    ) -> Future[SampleResponse]:
        """Completions of a prompt by a sampler (None: the base). Samplers take turns; bits do not depend on the order.

        `request`: a name, unique to the request, such as `SESSION/NUMBER`: seeds that `params` leaves out come from it,
        and so do sequence ids that `sequence_ids` does not give (`REQUEST/0`, `REQUEST/1`, ...). None: the sampler and
        its count of requests.
        """
        ask = PromptAsk(
            include_prompt_logprobs, topk_prompt_logprobs, prompt_logprobs_last_n, target_prompt_logprobs,
            prompt_alt_tokens_k,
        )  # fmt: skip
        return self._ask(prompt, num_samples, params, sampler, request, sequence_ids, topk_sample_logprobs, ask)

    def compute_logprobs(
        self, prompt: ModelInput | Sequence[int], *, sampler: str | None = None
    ) -> Future[list[float | None]]:
        """The logprob of each token of a prompt given those before it; None for the first."""
        answer: Future[list[float | None]] = promised()
        asked = self._ask(prompt, 0, SamplingParams(max_tokens=1), sampler, None, None, 0, PromptAsk(logprobs=True))

        def done(sampled: Future[SampleResponse]) -> None:
            if (error := sampled.exception()) is not None:
                answer.set_exception(error)
                return
            logprobs = sampled.result().prompt_logprobs
            assert logprobs is not None
            answer.set_result([None, *logprobs[1:].tolist()])

        asked.add_done_callback(done)
        return answer

    def restore_sequence(
        self,
        sequence_id: str,
        prompt: ModelInput | Sequence[int],
        tokens: Sequence[int],
        raw_logprobs: np.ndarray,
        *,
        sampler: str | None = None,
    ) -> None:
        """Restore a sequence that this sampler drew before a restart, so that provenance may name it. Raises
        `ConfigError` for an unknown sampler."""
        prompt, weights = as_model_input(prompt), self._samplers.weights_of(sampler)
        arrays = np.asarray(prompt.token_ids, np.int32), np.asarray(tokens, np.int32), raw_logprobs
        self.sequences.add(SampledRecord(sequence_id, weights, *arrays, prompt.named_contents()))

    # ------------------------------------------------------------------------------------------------ checkpoints

    def checkpoints(self, model_id: str | None = None) -> list[Checkpoint]:
        """All checkpoints, by time."""
        return self._store.list(model_id)

    def checkpoint_folder(self, path: str) -> Path:
        """The folder of a checkpoint. Raises `ConfigError` for an unknown path."""
        return self._store.get(path)[1]

    def copy_checkpoint(
        self, path: str, model_id: str, *, ttl_seconds: float | None = None, overwrite: bool = False
    ) -> str:
        """Copy a checkpoint to a model's, under its own name; returns the copy's path. The model need not be there."""
        checkpoint, folder = self._store.get(path)
        name = checkpoint.checkpoint_id.partition("/")[2]
        copy = self._new_path(checked_name("model_id", model_id), checkpoint.checkpoint_type, name)
        self._write(copy, checkpoint.lora, partial(_copy, folder), overwrite, ttl_seconds, checkpoint.user_metadata)
        return copy

    def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint, and drop the sampler whose id is its path. Raises `ConfigError` for an unknown path."""
        self._store.delete(path)
        self._drop_named(path)

    def set_checkpoint_ttl(self, path: str, ttl_seconds: float | None) -> None:
        """Set a checkpoint's lifetime; None: unlimited."""
        self._store.set_ttl(path, ttl_seconds)

    def delete_expired(self) -> list[str]:
        """Delete expired checkpoints, as `delete_checkpoint` does; returns their paths."""
        now = time.time()
        expired = [each.tinker_path for each in self._store.list() if (each.expires_at or now) < now]
        for path in expired:
            self._store.delete(path, missing_ok=True)  # by somebody else meanwhile
            self._drop_named(path)
        return expired

    def _drop_named(self, path: str) -> None:
        with suppress(ConfigError):  # there is none
            self.drop_sampler(path)

    def _new_path(self, model_id: str, kind: CheckpointType, name: str) -> str:
        """The path to save a checkpoint under. Raises `ConfigError` for a name that none can have."""
        if checked_name("name", name).endswith(".json"):  # x.json holds the facts of x
            raise ConfigError(f"name is {name!r}; it must not end in .json, as the file beside each checkpoint does")
        return self._store.path(model_id, kind, name)

    def _write(
        self, path: str, lora: LoraConfig | None, write: Callable[[Path], None], overwrite: Overwrite,
        ttl_seconds: float | None, user_metadata: Mapping[str, str] | None,
    ) -> None:  # fmt: skip
        if overwrite is False:
            self._store.check_free(path)
        self._store.write(path, lora, write, ttl_seconds, user_metadata, only_equal=overwrite == "equal")

    def _ask(self, *asked: Any) -> Future[SampleResponse]:
        try:
            call = self._samplers.call(*asked)
        except ConfigError as error:
            return Action.failed(error).future
        return self._models.place(self._samplers.lane(call.sampler.weights), call)

    def close(self) -> None:
        """End the worker; pending futures fail."""
        self._models.worker.close(ConfigError("the training service was closed"))
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copy(source: Path, to: Path) -> None:
    shutil.copytree(source, to, dirs_exist_ok=True)
