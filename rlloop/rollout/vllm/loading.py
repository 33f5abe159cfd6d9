"""Configuration and load formats by which vLLM loads rlloop's model, and models shared with engines in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import msgspec
from torch import nn
from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.transformers_utils.config import get_config_parser
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from rlloop.models import Model, load_model
from rlloop.models.checkpoint_names import HEAD
from rlloop.models.parameters import ParameterStore
from rlloop.models.weights import usable_device
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.layout import Layout
from rlloop.rollout.vllm import versions
from rlloop.rollout.vllm.messages import Facts
from rlloop.rollout.vllm.names import ARCHITECTURE, FORMAT, GATE, GPU_WORKER

LENT_AS = "rlloop_model"  # the key of `additional_config` that names a lent model
_LENT: WeakValueDictionary[str, Model] = WeakValueDictionary()
_FACTS: WeakKeyDictionary[nn.Module, Facts] = WeakKeyDictionary()  # of vLLM's own models
_ROUTERS: WeakKeyDictionary[nn.Module, tuple[int, int, int] | None] = WeakKeyDictionary()


def lend(model: Model) -> dict[str, str]:
    """Register `model` for engines of this process. Returns the `additional_config` that selects it."""
    name = str(id(model))
    _LENT[name] = model
    return {LENT_AS: name}


def policy_of(config: VllmConfig, *, whole: bool = False) -> Model:
    """The lent model, whose parameters stay shared; or, of a server, the folder's own: of tensor-parallel ranks each
    one's part, or (`whole`) all of it, which vLLM's own models divide themselves."""
    asked = config.additional_config if isinstance(config.additional_config, dict) else {}
    if LENT_AS in asked:
        return _LENT[asked[LENT_AS]]
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    device, tp = usable_device(config.device_config.device or "cpu"), get_tp_group()
    if whole:
        return load_model(config.model_config.model, dtype=dtype, device=device)
    ranks = Ranks(tp.world_size, tp.rank_in_group, tp.device_group) if tp.world_size > 1 else Ranks()
    # Experts are cut beside the rest, whether vLLM was started with expert parallelism or without.
    groups: dict[str, Ranks] = {"tp": ranks, "ep": ranks, "world": ranks}
    context = ParallelContext(device, Layout(tp=ranks.size), ranks.rank, groups=groups)
    return load_model(config.model_config.model, dtype=dtype, context=context)


def facts_of(model: Any, config: VllmConfig) -> Facts | None:
    """Facts about a server's model; None where vLLM loaded it by itself."""
    policy = getattr(model, "policy", None)
    return _FACTS.get(model) if policy is None else _facts(policy, config)


def routes_of(model: Any) -> tuple[tuple[int, int, int] | None, int]:
    """The model's `route_shape()`, and the number of its layers with an indexer: the choices that can be recorded."""
    policy = getattr(model, "policy", None)
    return (_ROUTERS.get(model), 0) if policy is None else (policy.route_shape(), policy.indexed_layers())


def _facts(policy: Model, config: VllmConfig) -> Facts:
    return Facts(
        folder=str(Path(config.model_config.model).absolute()),
        vocabulary=policy.vocab_size,
        positions=config.model_config.max_model_len,
        eos_token_ids=tuple(policy.eos_token_ids),
        fingerprint=policy.fingerprint(),
    )


class ConfigParser(ConfigParserBase):
    """Format `rlloop`: a folder's config.json as Hugging Face's parser reads it, with our architecture.

    Of a model with a vision tower it is the text model's, and without the rope's sections: vLLM reads token ids alone,
    and images and their positions go past it (`StepInputs`).
    """

    def parse(self, model: str | Path, *args: Any, **kwargs: Any) -> tuple[dict, Any]:
        plain, config = get_config_parser("hf").parse(model, *args, **kwargs)
        config = config.get_text_config()
        if isinstance(rope := getattr(config, "rope_parameters", None), dict):
            config.rope_parameters = {name: value for name, value in rope.items() if name != "mrope_section"}
        config.architectures = [ARCHITECTURE]
        return {**plain, "architectures": [ARCHITECTURE]}, config


class OnGpu(VerifyAndUpdateConfig):
    """Settings of a GPU build that our architecture needs, however vLLM was started."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = GPU_WORKER
        vllm_config.load_config.load_format = FORMAT
        model.enforce_eager = True  # its compilation and graphs are not for our model, which has its own
        if GATE not in (processors := model.logits_processors or ()):
            model.logits_processors = [*processors, GATE]


class Loader(BaseModelLoader):
    """Load format `rlloop`: rlloop reads the weights itself, or the model was shared by this process."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download: folders are local."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Nothing to load: the model has its weights."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        return initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix).eval()


class StockLoader(BaseModelLoader):
    """Load format `rlloop_stock`: vLLM's own model with the lent model's weights, which stay live parameters.

    On the CPU vLLM would pack each matrix for oneDNN and let go of the original. A packed matrix cannot be written, and
    packing anew is no way out: 0.32 remembers primitives by the address of the old one and goes on multiplying by it
    (docs/vllm.md). So linears here take vLLM's fallback, torch's own product.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download: the weights are shared in this process."""

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        config = get_current_vllm_config()
        policy = policy_of(config, whole=True)
        weights = ParameterStore(policy).wholes_as_stored()  # of which each of vLLM's ranks takes its part
        model.load_weights((name, whole) for name, whole in weights if name != HEAD or not policy.config.tied)
        facts = _facts(policy, config)
        _ROUTERS[model] = policy.route_shape()
        _FACTS[model] = msgspec.structs.replace(
            facts, stock=True, fingerprint=versions.stock_fingerprint(facts.fingerprint)
        )
        latent = policy.config.latent is not None and policy.device.type == "cpu"
        for module in model.modules():
            if isinstance(module, LinearBase):
                vars(module)["_cpu_skip_gemm_dispatch"] = True
            elif isinstance(module, RotaryEmbedding) and latent:
                # Its CPU kernel is wrong where queries have more heads than keys, unless they come flat.
                vars(module)["_forward_method"] = module.forward_native

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        with set_current_vllm_config(vllm_config):
            model = super().load_model(vllm_config, model_config, prefix)
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                vars(module)["cpu_linear"] = nn.functional.linear
        return model
