"""Calls of `forward` and `forward_backward`: their data, checked before anything is computed, and their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlloop.errors import ConfigError
from rlloop.models import ScoreRow
from rlloop.models.architecture import ModelConfig
from rlloop.models.vision import check_images
from rlloop.training.custom_loss import CustomLoss
from rlloop.training.futures import promised
from rlloop.training.losses import LOSSES, THRESHOLDS, evaluate, settings_of
from rlloop.training.types import CHECKED, DIFFERENT, LOSS, Datum, ForwardBackwardOutput, Provenance
from rlloop.types import is_ids

TARGETS = "target_tokens"
OPTIONAL = {"cross_entropy": (), **dict.fromkeys(("ppo", "cispo", "gspo"), THRESHOLDS)}


@dataclass(frozen=True)
class Objective:
    """A loss with its settings: a built-in one by its name, or a custom one."""

    name: str
    settings: Mapping[str, float]
    custom: CustomLoss | None = None

    @classmethod
    def of(cls, name: str, settings: Mapping[str, float | str] | None, custom: Mapping[str, CustomLoss]) -> Objective:
        """Raises `ConfigError` for an unknown loss, custom loss or setting."""
        if name != "custom":
            return cls(name, settings_of(name, settings))
        config = dict(settings or {})
        loss_id = config.pop("loss_id", None)
        if config or not isinstance(loss_id, str) or loss_id not in custom:
            raise ConfigError(
                f"loss_fn is custom, and loss_fn_config {dict(settings or {})!r:.80}; it must be "
                '{"loss_id": ...} of a loss that create_custom_loss made'
            )
        return cls(name, {}, custom[loss_id])

    def evaluate(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> tuple[float, Tensor, dict[str, float]]:
        if self.custom is not None:
            return self.custom.evaluate(logprobs, inputs)
        return *evaluate(self.name, logprobs, inputs, self.settings), {}

    def check(self, inputs: Mapping[str, np.ndarray], where: str) -> None:
        """Raises `ConfigError` for inputs that are missing, unknown, misshapen, or not finite."""
        shape = inputs[TARGETS].shape
        if self.custom is not None:
            ranks = {each.name: each.rank for each in self.custom.inputs[1:]} | {TARGETS: self.custom.inputs[0].rank}
            for key, rank in ranks.items():
                if key not in inputs or inputs[key].ndim != rank:
                    has = f"{inputs[key].ndim} dimensions" if key in inputs else "none"
                    raise ConfigError(
                        f"{where}: custom loss {self.custom.name!r} takes loss_fn_inputs[{key!r}] of {rank} "
                        f"dimensions, and it has {has}"
                    )
            return
        loss = LOSSES[self.name]
        if missing := [key for key in loss.inputs if key not in inputs]:
            raise ConfigError(f"{where} lacks loss_fn_inputs[{missing[0]!r}], which {self.name} needs")
        known = (TARGETS, *loss.inputs, *OPTIONAL.get(self.name, ()))
        if unknown := [key for key in inputs if key not in known]:
            raise ConfigError(
                f"{where} has loss_fn_inputs[{unknown[0]!r}], which {self.name} does not read; it reads "
                f"{', '.join(known)}"
            )
        if len(shape) == 2 and not loss.wide:
            raise ConfigError(f"{where}: target_tokens is {list(shape)}; {self.name} takes one target a position, [N]")
        for key, value in inputs.items():
            if value.shape != shape:
                raise ConfigError(
                    f"{where}: loss_fn_inputs[{key!r}] is {list(value.shape)}, and target_tokens {list(shape)}; they "
                    "must be alike"
                )
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                at = np.argwhere(~np.isfinite(value))[0].tolist()
                raise ConfigError(f"{where}: loss_fn_inputs[{key!r}] is {value[tuple(at)]} at {at}; it must be finite")


@dataclass(eq=False)
class Item:
    """A datum of a call, with its state in forward and backward."""

    call: LossCall
    index: int  # in the call
    row: ScoreRow
    inputs: Mapping[str, Tensor]  # of the loss, by name, on the host
    provenance: Provenance | None
    tokens: int
    gradient: Tensor | None = None  # [n] by logprob, once its forward is done

    @property
    def targets(self) -> np.ndarray:
        """[N] or [N, K]."""
        assert self.row.targets is not None
        return self.row.targets

    @property
    def where(self) -> str:
        return f"datum {self.index}"


class LossCall:
    """One `forward` or `forward_backward`: the future is done once all data have been through a forward."""

    def __init__(
        self, data: Sequence[Datum], objective: Objective, *, trains: bool, vocabulary: int, config: ModelConfig
    ) -> None:
        """Raises `ConfigError` for data that cannot be scored, or do not fit the loss."""
        if not data:
            raise ConfigError("the call has no datum; give one or more")
        self.trains, self.objective = trains, objective
        self.future: Future[ForwardBackwardOutput] = promised()
        self._outputs: list[dict[str, np.ndarray] | None] = [None] * len(data)
        self._losses, self._metrics = [0.0] * len(data), [{} for _ in data]
        self._missing, self._checked, self._different = len(data), 0, 0
        self.waiting = deque(self._item(index, datum, vocabulary, config) for index, datum in enumerate(data))

    def _item(self, index: int, datum: Datum, vocabulary: int, config: ModelConfig) -> Item:
        where, ids, positions = f"datum {index}", datum.model_input.token_ids, config.max_positions
        if not is_ids(ids) or not len(ids):
            raise ConfigError(f"{where}: model_input is {ids!r:.60}; it must be a list of token ids, one or more")
        if len(ids) >= positions:
            raise ConfigError(
                f"{where} has {len(ids)} tokens; the model has {positions} positions, so an input may have "
                f"{positions - 1}; cut the sequence"
            )
        if (last := datum.model_input.positions_at(0, len(ids) + 1).max()) >= positions:
            raise ConfigError(f"{where} reaches position {last}; the model has {positions}, from 0 on")
        try:
            check_images(datum.model_input, config)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        targets = datum.loss_fn_inputs.get(TARGETS)
        if targets is None or targets.ndim not in (1, 2) or len(targets) != len(ids) or targets.dtype.kind != "i":
            description = "missing" if targets is None else f"{targets.dtype} {list(targets.shape)}"
            raise ConfigError(
                f"{where}: loss_fn_inputs['target_tokens'] is {description}; it must be token ids, one for each of the "
                f"{len(ids)} tokens of model_input ([{len(ids)}], or [{len(ids)}, K])"
            )
        if not targets.size:
            raise ConfigError(f"{where}: target_tokens has no column; it must be [N, K] with K of 1 or more")
        for what, values in (("model_input", np.asarray(ids)), ("target_tokens", targets)):
            if values.min() < 0 or values.max() >= vocabulary:
                wrong = int(values[(values < 0) | (values >= vocabulary)].flat[0])
                raise ConfigError(f"{where}: {what} has token {wrong}; the vocabulary's ids are 0 to {vocabulary - 1}")
        self.objective.check(datum.loss_fn_inputs, where)
        if datum.provenance is not None:
            _check_tiling(where, "model_input", datum.provenance.model_input, len(ids))
            _check_tiling(where, "loss_fn_inputs", datum.provenance.loss_fn_inputs, len(targets))
        ids = np.asarray(ids).tolist()
        model_input = None if datum.model_input.is_text else datum.model_input
        # The last token is not read.
        row = ScoreRow([*ids, ids[-1]], range(1, len(ids) + 1), targets=targets, model_input=model_input)
        inputs = {key: torch.from_numpy(np.array(x)) for key, x in datum.loss_fn_inputs.items() if key != TARGETS}
        if self.objective.custom is not None and TARGETS in [each.name for each in self.objective.custom.inputs]:
            inputs[TARGETS] = torch.from_numpy(np.array(targets))
        return Item(self, index, row, inputs, datum.provenance, len(ids))

    @property
    def over(self) -> bool:
        return self.future.done()

    def answer(self, item: Item, logprobs: Tensor, checked: int, different: int) -> None:
        """Compute a datum's loss and gradient from its logprobs, on the host, in the shape of its targets.

        Raises `ConfigError` for a loss or gradient that is not finite.
        """
        loss, gradient, metrics = self.objective.evaluate(logprobs, item.inputs)
        if not np.isfinite(loss) or not bool(gradient.isfinite().all()):
            raise ConfigError(
                f"{item.where}: the loss is {loss}, or its gradient is not finite; look for logprobs far from this "
                "model's, and very large advantages or weights"
            )
        item.gradient = gradient.flatten()
        self._outputs[item.index] = {"logprobs": logprobs.numpy()}
        self._losses[item.index], self._metrics[item.index] = loss, metrics
        self._checked, self._different = self._checked + checked, self._different + different
        self._missing -= 1
        if not self._missing and not self.over:
            self.future.set_result(self._output())

    def fail(self, error: BaseException) -> None:
        if not self.over:
            self.future.set_exception(error)

    def _output(self) -> ForwardBackwardOutput:
        metrics = {LOSS: sum(self._losses), CHECKED: float(self._checked), DIFFERENT: float(self._different)}
        for each in self._metrics:
            for key, value in each.items():
                metrics[key] = metrics.get(key, 0.0) + value / (len(self._metrics) if key.endswith(":mean") else 1)
        return ForwardBackwardOutput([output for output in self._outputs if output is not None], metrics)


def _check_tiling(where: str, name: str, spans: Sequence, count: int) -> None:
    if (total := sum(span.length for span in spans)) != count:
        raise ConfigError(f"{where}: provenance of {name} covers {total} positions, and there are {count}")
