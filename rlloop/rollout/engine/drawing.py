"""Drawing tokens: from the logits of an engine's step to ids and logprobs on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlloop.models.logits_processing import warp_for
from rlloop.models.prompt_scores import likeliest
from rlloop.numerics.layout import LogitsProcessing
from rlloop.numerics.operators.distribution import check_drawn
from rlloop.numerics.transfer import on_device
from rlloop.rollout.engine.graphs import packed
from rlloop.rollout.engine.scheduler import ScheduledStep, Scheduler
from rlloop.types import SamplingParams

if TYPE_CHECKING:
    from rlloop.models import Model

Drawn = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids int64, logprobs and raw logprobs float32, [E] each


class Drawing:
    """Mixin of the engine: draws the next token of each row that emits, and scores prompts."""

    model: Model
    _device: torch.device
    _scheduler: Scheduler
    _last_warp: tuple[list[SamplingParams], LogitsProcessing]

    def _draws_plainly(self, warp: LogitsProcessing) -> bool:
        """True if a CUDA graph can draw: no distribution is warped, and sampling is rlloop's, which never waits."""
        return warp.plain and self.model.ops.profile.token_logprob == "rlloop"

    def _sample(self, logits: Iterable[Tensor], rows: np.ndarray, warp: LogitsProcessing) -> tuple[Tensor, Tensor]:
        """Draw a token for each row of the table, whose logits come in parts: ids [E] and, as `packed`, [3, E]."""
        table, output, device = self._scheduler.table, self.model.output, self._device
        if len(rows) == 0:
            return torch.empty(0, dtype=torch.int64, device=device), torch.empty(3, 0, dtype=torch.int32, device=device)
        seeds, positions = self._tensor(table.seed[rows]), self._tensor(table.length[rows])
        samples, begin = [], 0
        for chunk in logits:
            end = begin + len(chunk)
            samples.append(output.sample(chunk, warp.rows(begin, end), seeds[begin:end], positions[begin:end]))
            for index in np.flatnonzero(table.top[rows[begin:end]]).tolist():
                self._keep_likeliest(output.whole(chunk[index : index + 1]), int(rows[begin + index]))
            begin = end
        drawn = [torch.cat(column) for column in zip(*samples, strict=True)]
        return drawn[0], packed(*drawn)

    def _keep_likeliest(self, logits: Tensor, row: int) -> None:
        """logits [1, V] of the row's next token. The host waits for them."""
        table = self._scheduler.table
        request, generated = table.request(row), int(table.length[row] - table.prompt_length[row])
        request.likeliest[generated:] = [likeliest(self.model, logits, request.top, request.sampling, generated)]

    def _warp(self, rows: np.ndarray) -> LogitsProcessing:
        """The rows' logits processing; the last step's if nothing changed, since building it loops over requests."""
        table = self._scheduler.table
        sampling = [table.request(row).sampling for row in rows.tolist()]
        banning = bool((table.length[rows] < table.min_length[rows]).any())
        if banning or sampling != self._last_warp[0]:
            generated = table.length[rows] - table.prompt_length[rows]
            warp = warp_for(sampling, generated, self.model.eos_token_ids, device=self._device)
            self._last_warp = ([] if banning else sampling, warp)
        return self._last_warp[1]

    def _score_prompts(self, batch: ScheduledStep, query_start: np.ndarray, hidden: Tensor) -> None:
        """Keep logprobs of the prompt tokens that come after the step's."""
        table = self._scheduler.table
        for index in np.flatnonzero(table.scored[batch.rows]).tolist():
            request, begin = table.request(int(batch.rows[index])), int(batch.context[index])
            end = min(begin + int(batch.counts[index]), len(request.prompt_ids) - 1)
            if begin < end and request.scored is not None:
                rows = hidden[query_start[index] : query_start[index] + end - begin]
                targets = self._tensor(request.token_ids[begin + 1 : end + 1])
                logprobs, _ = self.model.output.token_logprob(rows, targets, LogitsProcessing())
                request.scored[begin] = self.model.stage.shared(logprobs).cpu().numpy()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return on_device(array, self._device)


def to_host(drawn: Tensor) -> Callable[[], Drawn]:
    """Start the copy to the host; calling the result waits for it."""
    landed, event = drawn.to("cpu", non_blocking=True), None  # in pinned memory
    if drawn.is_cuda:
        event = torch.cuda.Event()
        event.record()

    def finish() -> Drawn:
        if event is not None:
            event.synchronize()
        bits = landed.numpy()
        check_drawn(bits[0])
        return bits[0].astype(np.int64), bits[1].view(np.float32), bits[2].view(np.float32)

    return finish
