"""A training service without a model: its weights are a digest of the commands that made them."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from rlloop.errors import ConfigError
from rlloop.training.types import (
    Checkpoint,
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsResponse,
    ModelData,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    SupportedModel,
)


def mixed(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class FakeTraining:
    """`gate`: cleared, work waits. `calls`: the verbs in the order in which they were done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: set[str] = set()  # asked for, made or not
        self.weights: dict[str, str] = {}
        self.gradients: dict[str, list[object]] = {}
        self.samplers: dict[str, str] = {}
        self.losses: set[str] = set()
        self.sequences: dict[str, list[int]] = {}
        self.calls: list[tuple[object, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self._worker = ThreadPoolExecutor(1)
        self._disk = threading.Lock()  # no thread sees half a checkpoint

    def _do(self, work, *call: object) -> Future:
        def run():
            self.gate.wait()
            self.calls.append(call)
            return work()

        return self._worker.submit(run)

    # models

    def create_model(self, *, lora, model_id, parity, user_metadata=None, owner=None):
        if lora is not None and lora.rank > 64:
            raise ConfigError(f"rank is {lora.rank}; at most 64")
        self.models.add(model_id)

        def work():
            self.weights[model_id], self.gradients[model_id] = mixed("new", lora), []
            return self.info(model_id)

        return self._do(work, "create", model_id)

    def create_model_from(self, path, *, optimizer, model_id, parity, user_metadata=None, owner=None):
        self.models.add(model_id)

        def work():
            self.weights[model_id], self.gradients[model_id] = self._read(path), []
            return self.info(model_id)

        return self._do(work, "create_from", path)

    def drop_model(self, model_id):
        self.models.discard(model_id)
        return self._do(lambda: self.weights.pop(model_id, None), "drop", model_id)

    def _check(self, model_id):
        if model_id not in self.models:
            raise ConfigError(f"there is no model {model_id}")

    def info(self, model_id):
        if model_id not in self.weights:
            raise ConfigError(f"there is no model {model_id}")
        return GetInfoResponse(model_id, ModelData("fake", "fake", None), True, 8)

    def capabilities(self):
        return GetServerCapabilitiesResponse([SupportedModel("fake", 64)])

    # training

    def forward_backward(self, model_id, data, loss_fn, loss_fn_config=None):
        for datum in data:
            for name, array in datum.loss_fn_inputs.items():
                if not np.isfinite(array).all():
                    raise ConfigError(f"{name} has values that are not finite")

        def work():
            for datum in data:
                if datum.provenance is not None:
                    for span in datum.provenance.loss_fn_inputs:
                        if span.sequence_id not in self.sequences:
                            raise ConfigError(f"sequence {span.sequence_id} is not known")
                self.gradients[model_id].append((datum.model_input.token_ids, loss_fn))
            outputs = [{"logprobs": np.arange(len(datum.model_input), dtype=np.float32)} for datum in data]
            checked = sum(datum.provenance is not None for datum in data)
            return ForwardBackwardOutput(outputs, {"loss:sum": 1.0, "parity/tokens_checked:sum": float(checked)})

        return self._do(work, "forward_backward", model_id, [datum.model_input.token_ids for datum in data])

    forward = forward_backward

    def optim_step(self, model_id, params):
        if params.learning_rate < 0:
            raise ConfigError(f"learning_rate is {params.learning_rate}")  # the gradient stays

        def work():
            self.weights[model_id] = mixed(self.weights[model_id], self.gradients[model_id], params)
            self.gradients[model_id] = []
            return OptimStepResponse({"optim/grad_norm": 1.0, "optim/infinite": float("inf")})

        return self._do(work, "optim_step", model_id)

    def weights_digest(self, model_id, *, adapters_only=False):
        def work():
            self.info(model_id)  # raises for one that could not be made
            return bytes.fromhex(self.weights[model_id])

        return self._do(work, "digest", model_id)

    def create_custom_loss(self, name, inputs, graph):
        if any(node.target.startswith("os.") for node in graph.nodes):
            raise ConfigError("os.system is not allowed")
        loss_id = f"loss-{mixed(name)}"
        self.losses.add(loss_id)
        return loss_id

    # weights

    def _file(self, path):
        return self.folder / path.removeprefix("tinker://").replace("/", "__")

    def _read(self, path):
        return json.loads((self._file(path) / "weights").read_text())["weights"]

    def _save(self, model_id, kind, name, overwrite, ttl_seconds=None):
        path = f"tinker://{model_id}/{kind}/{name}"
        if overwrite is not True and self._file(path).is_dir():
            if overwrite != "equal" or self._read(path) != self.weights[model_id]:
                raise ConfigError(f"there is a checkpoint {path} already")
            return path
        expires = None if ttl_seconds is None else time.time() + ttl_seconds
        facts = {"weights": self.weights[model_id], "path": path, "time": time.time(), "expires": expires}
        with self._disk:
            self._file(path).mkdir(parents=True, exist_ok=True)
            (self._file(path) / "weights").write_text(json.dumps(facts))
        return path

    def save_weights(self, model_id, name, *, overwrite=False, ttl_seconds=None, user_metadata=None):
        self._check(model_id)
        return self._do(
            lambda: SaveWeightsResponse(self._save(model_id, "weights", name, overwrite, ttl_seconds)), "save", name
        )

    def load_weights(self, model_id, path, *, optimizer):
        self._check(model_id)

        def work():
            self.checkpoint_folder(path)
            self.weights[model_id], self.gradients[model_id] = self._read(path), []
            return LoadWeightsResponse(path, model_id)

        return self._do(work, "load", path)

    def save_weights_for_sampler(
        self, model_id, name=None, *, sampler=None, freeze=True, overwrite=False, ttl_seconds=None, user_metadata=None
    ):
        def work():
            path = None if name is None else self._save(model_id, "sampler_weights", name, overwrite, ttl_seconds)
            id = sampler or path or "x"
            if freeze:
                self.samplers[id] = self.weights[model_id]
            return SaveWeightsForSamplerResponse(id, path)

        return self._do(work, "sampler", model_id)

    def create_sampler(self, path=None, *, sampler=None):
        return self._do(lambda: self.samplers.update({sampler: self._read(path)}), "create_sampler", path)

    def drop_sampler(self, sampler):
        self.samplers.pop(sampler, None)

    def checkpoints(self, model_id=None):
        found = []
        with self._disk:
            every = [json.loads((folder / "weights").read_text()) for folder in sorted(self.folder.glob("*__*"))]
        for facts in every:
            run, kind, name = facts["path"].removeprefix("tinker://").split("/")
            if model_id in (None, run):
                type_ = "training" if kind == "weights" else "sampler"
                found.append(
                    Checkpoint(f"{kind}/{name}", type_, facts["time"], facts["path"], 16, True, None,
                               expires_at=facts["expires"])
                )  # fmt: skip
        return found

    def checkpoint_folder(self, path):
        if not self._file(path).is_dir():
            raise ConfigError(f"there is no checkpoint {path}")
        return self._file(path)

    def delete_checkpoint(self, path):
        with self._disk:
            (self.checkpoint_folder(path) / "weights").unlink()
            self._file(path).rmdir()

    def set_checkpoint_ttl(self, path, ttl_seconds):
        with self._disk:
            facts = json.loads((self.checkpoint_folder(path) / "weights").read_text())
            facts["expires"] = None if ttl_seconds is None else time.time() + ttl_seconds
            (self._file(path) / "weights").write_text(json.dumps(facts))

    def delete_expired(self):
        now = time.time()
        expired = [each.tinker_path for each in self.checkpoints() if (each.expires_at or now) < now]
        for path in expired:
            self.delete_checkpoint(path)
        return expired

    # sampling

    def sample(self, prompt, num_samples, params, *, sampler, request, sequence_ids, **asked):
        if sampler is not None and sampler not in self.samplers:
            raise ConfigError(f"there is no sampler {sampler}")
        source = "base" if sampler is None else self.samplers[sampler]

        def work():
            sequences = []
            for name in sequence_ids:
                tokens = [int(mixed(source, prompt.token_ids, name)[:2], 16)]
                self.sequences[name] = tokens
                logprobs = np.array([-1.0], np.float32)
                sequences.append(SampledSequence("stop", name, tokens, logprobs, raw_logprobs=logprobs))
            return SampleResponse(sequences)

        return self._do(work, "sample", request)

    def restore_sequence(self, sequence_id, prompt, tokens, raw_logprobs, *, sampler):
        self.sequences[sequence_id] = tokens

    def status(self):
        return {"models": {}, "samplers": len(self.samplers)}

    def close(self):
        self.gate.set()
        self._worker.shutdown()
