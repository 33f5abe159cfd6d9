"""Steps on a GPU as CUDA graphs: one launch in place of some hundreds.

A graph is recorded for a (rounded up) number of rows and of pages per row. It reads tokens, indices, positions, slots,
seeds, state rows and pages from its own buffers, and the weights in place, so the next replay sees their update.

Steps that decode are recorded when one first needs it. Unused rows decode token 0 at position 0 into a spare slot. If
no row's distribution is warped (truncated, scaled or banned), the graph draws the tokens as well.

Steps with prompts (prefill, decoding beside it or not) are recorded up to `MOST_TOKENS`, of small models up to the
engine's longest step: beyond, the host keeps pace with the device. They are recorded when `SEEN` steps of their form
have come; the `KEPT` latest used are kept. The form has a number of tokens, too; padding makes up further rows in a
spare page. Logits are left to the engine.

A server records the usual steps before it answers (`prepare`): each takes longer than a request may wait. Ranks that
take their steps together record the same ones in the same order.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlloop.models.routing_record import RoutingRecord
from rlloop.numerics.layout import AdapterSlots, AttentionLayout, LogitsProcessing
from rlloop.numerics.ops import Ops
from rlloop.parallel.interrupts import held_back
from rlloop.rollout.engine.adapters import single
from rlloop.rollout.engine.choice_store import ChoiceStore
from rlloop.rollout.engine.graph_forms import Form, PromptInputs, decode_forms, prompt_forms
from rlloop.rollout.engine.graph_sizes import at_least, rounded, rounded_rows, rounded_tokens
from rlloop.rollout.engine.kv_cache import PagedCache
from rlloop.rollout.engine.scheduler import ScheduledStep
from rlloop.rollout.engine.step_ranks import StepRanks, Stopped
from rlloop.rollout.engine.step_tokens import LateTokens, StepTokens, with_late

if TYPE_CHECKING:
    from rlloop.models import Model

logger = logging.getLogger(__name__)

LEAST_TOKENS = 1024  # smallest number of tokens in a row's pages
MOST_TOKENS, SEEN, KEPT = 2048, 3, 256  # of steps with prompts: tokens, steps before it is recorded, graphs
# A layer's weights times tokens that take a Hopper GPU about 1 ms; launching a layer takes the host 1 to 2 ms.
LAUNCHED, FILL = 3e11, 1024  # and tokens that may fill up the engine's longest step
HOST_DRAWN = 64  # rows of the steps that `prepare` records and that leave drawing to the host, at most
ADAPTER, SLOT = 1, 4  # columns of `_Recorded.inputs`
ROW = 6  # of the recurrent states
PAGES = 7  # the column of `_Recorded.inputs` where they begin


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]  # logits; or ids [R] int64 and, packed, [3, R] int32; of prompts hidden states [T, D]
    # int64; of prompts `PromptInputs`, else [R, 7 + B]: token, adapter's slot, index, position, slot, seed, row, and
    # first slots of pages
    inputs: Tensor
    layout: AttentionLayout | None = None  # its tensors, which a step that decodes fills from `inputs`


class EngineGraphs:
    """Graphs of an engine's steps."""

    def __init__(
        self, model: Model, cache: PagedCache, page_size: int, choices: ChoiceStore | None, longest: int = 0
    ) -> None:
        """`longest`: tokens of the engine's longest step."""
        self._model, self._cache, self._page_size, self._choices = model, cache, page_size, choices
        self._recorded: dict[Form, _Recorded] = {}
        self._seen: Counter[Form] = Counter()  # steps with prompts
        self._hidden: Tensor | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []
        # An indexer reads lengths on the host, and so may implementations of others. Many rows of packed weights are
        # unpacked, and a graph would keep that memory; fp8 weights may be, once for all steps until they change. Ranks
        # that share experts would send all tokens everywhere; in a pipeline it has not been tried.
        profile, layout = model.ops.profile, model.context.layout
        plain = layout.pp == layout.cp == 1 and (layout.layers_alone or model.config.mixture is None)
        own = type(model.ops) is Ops and all(getattr(profile, knob) == "rlloop" for knob in profile.operations())
        self._packed = any(hasattr(parameter, "codes") for parameter in model.parameters())
        self._records_prompts = own and plain and not self._packed and model.indexed_layers() == 0
        self._most_tokens = MOST_TOKENS
        if longest > MOST_TOKENS and model.config.mixture is None and layout.world_size == 1:
            layers = model.model.layers.values()
            weights = max(sum(each.numel() for each in layer.parameters()) for layer in layers)
            self._most_tokens = max(MOST_TOKENS, min(longest + FILL, int(LAUNCHED / weights)))
        self._ranks = StepRanks(model.context)
        self._pool = torch.cuda.graph_pool_handle()
        self._made_of, self._adapters_at = (model.ops, self._addresses()), 0
        self.least = (1, 1)  # rows and pages of the graphs that are replayed

    def check_weights(self) -> None:
        """Drop the graphs if parameters were moved, or operations replaced."""
        if self._made_of != (now := (self._model.ops, self._addresses())):
            self.drop()
            self._made_of = now

    def drop(self) -> None:
        """Drop the graphs; they are recorded anew when they are needed."""
        self._recorded.clear()

    def logits(self, tokens: Tensor, adapters: np.ndarray | None, inputs: StepTokens, rows: np.ndarray) -> Tensor:
        """Logits of one token a row, as `Model.logits` has them. The host need not know the tokens.

        tokens, adapters' slots (−1: none; None: all rows have the model's own) [S]; `inputs` of one token a row; rows
        [S] of the states. The result is valid until the next call.
        """
        (logits,) = self._replay(False, tokens, adapters, inputs, rows, np.zeros_like(rows))
        return logits[: len(tokens)]

    def draw(
        self, tokens: Tensor, adapters: np.ndarray | None, inputs: StepTokens, rows: np.ndarray, seeds: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """The next tokens, drawn from unwarped distributions: ids [S], and [3, S] as returned by `packed`."""
        ids, drawn = self._replay(True, tokens, adapters, inputs, rows, seeds)
        return ids[: len(tokens)], drawn[:, : len(tokens)]

    def hidden(
        self, batch: ScheduledStep, inputs: StepTokens, adapters: np.ndarray | None, decodes: int,
        late: LateTokens | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Last hidden states [T, D] of a step with prompts, as `Model.hidden` has them; None if it is not recorded.

        adapters' slots [T] (as for `logits`); `decodes`: of `decoding`. `late`: in place of some of the tokens. The
        result is valid until the next call.
        """
        count, rows, pages = len(inputs.tokens), batch.rows, inputs.block_start
        given = (inputs.tokens, 0 if adapters is None else adapters, inputs.positions, inputs.slots)
        if not self._records_prompts or count <= len(rows):
            return None
        most = (first := decodes and rounded_rows(decodes)) + rounded_rows(len(rows) - decodes + 1)
        _, width = self.shape(len(rows), pages.shape[1])
        form = Form(most, width, self._adapted(adapters), False, rounded_tokens(count + most - len(rows)), first)
        room = width * self._page_size  # no row that fills up may be longer
        rest = most - first - (len(rows) - decodes)
        if form.tokens - count > room * rest or form.tokens > min(self._most_tokens, room * (most - first)):
            return None
        self._seen[form] += 1
        if form not in self._recorded and (self._seen[form] < SEEN or not self._record_prompts(form)):
            return None
        step = self._recorded[form] = self._recorded.pop(form)  # the last of those that are kept
        self._stage(step.inputs, form, given, decodes, batch.counts, batch.context, pages, rows, late)
        step.graph.replay()
        (hidden,) = step.outputs
        if decodes == first:
            return hidden[:count]
        return torch.cat((hidden[:decodes], hidden[first : first + count - decodes]))

    def prepare(self, requests: int, tokens: int) -> int:
        """Record the steps of up to `requests` requests of up to `tokens` tokens each; returns the number of graphs.

        What does not fit into memory is left out, and so are, from then on, steps of more than `MOST_TOKENS`: they come
        in many forms, and a request would wait while one is recorded. Ranks that compute steps together call this
        together, and stop together where one of them cannot go on, which the log names, or is interrupted.
        """
        self._most_tokens = MOST_TOKENS
        if self._packed:  # beyond, graphs keep weights that are unpacked
            requests = min(requests, HOST_DRAWN)
        with held_back() as interrupt:
            try:
                for form in self._usual(requests, tokens):
                    self._ranks.check("interrupted" if interrupt.asked else "")
                    if form.tokens:
                        self._record_prompts(form)
                    else:
                        self._record_together(form)
                self._ranks.check_room()
                with self._ranks.agreeing():
                    self._launch_draws(min(requests, HOST_DRAWN))
            except Stopped as why:
                logger.warning("%d steps are recorded, others when they come: %s", len(self._recorded), why)
        return len(self._recorded)

    def _usual(self, requests: int, tokens: int) -> Iterator[Form]:
        """Forms of the steps of so many requests that are not recorded, and can be; the same on all ranks."""
        pages = range(1, -(-min(tokens, self._model.max_positions) // self._page_size) + 1)
        widths = sorted({self.shape(1, n)[1] for n in pages})
        forms = decode_forms(min(requests, HOST_DRAWN), widths, draws=False)
        if self._model.ops.profile.token_logprob == "rlloop":  # else the engine draws
            finely = self._model.context.layout.expert_leaves == 1
            forms = [*decode_forms(requests, widths, draws=True, finely=finely), *forms]
        # In longer contexts prompts come in many forms, of which a run has few.
        room = widths[0] * self._page_size
        prompts = prompt_forms(requests, widths[0], room, MOST_TOKENS)
        for form in chain(forms, prompts):
            if form not in self._recorded and (self._records_prompts or not form.tokens):
                yield form

    def _launch_draws(self, most: int) -> None:
        """Compile what draws after a step with prompts, which no graph has: each number of rows may be another variant
        of a kernel."""
        model, device = self._model, self._model.device
        for rows in range(1, most + 1):
            hidden = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=device)
            indices = torch.ones(rows, dtype=torch.int64, device=device)
            model.output.sample(model.logits(hidden), LogitsProcessing(), indices, indices)

    def shape(self, rows: int, pages: int, *, draws: bool = False) -> tuple[int, int]:
        """Rows and pages of the smallest graph for this many. Graphs that draw keep no logits, so many may exist."""
        return rounded(rows, finely=draws), at_least(
            pages, min(LEAST_TOKENS, self._model.max_positions) // self._page_size
        )

    def idle(self, draws: bool) -> None:
        """Replay a graph with nothing to decode, since other ranks need this rank's experts."""
        nothing = np.zeros(0, np.int64)
        inputs = StepTokens(*[nothing] * 6, block_start=nothing[:, None])
        tokens = torch.empty(0, dtype=torch.int64, device=self._model.device)
        self._replay(draws, tokens, None, inputs, nothing, nothing)

    def _replay(
        self, draws: bool, tokens: Tensor, adapters: np.ndarray | None, inputs: StepTokens, rows: np.ndarray,
        seeds: np.ndarray,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        count, pages = inputs.block_start.shape
        least = self.shape(count, pages, draws=draws)
        form = Form(max(least[0], self.least[0]), max(least[1], self.least[1]), self._adapted(adapters), draws)
        step = self._recorded.get(form) or self._record(form)
        staging = torch.empty(form.rows, PAGES + form.pages, dtype=torch.int64, pin_memory=step.inputs.is_cuda)
        host = staging.numpy()
        host[:, :PAGES], host[:, PAGES:], host[:, SLOT] = 0, self._cache.spare, self._cache.spare
        host[:, ROW] = self._cache.spare_row
        if adapters is not None:
            host[:, ADAPTER], host[:count, ADAPTER] = -1, adapters
        for column, values in enumerate((inputs.index, inputs.positions, inputs.slots, seeds, rows), ADAPTER + 1):
            host[:count, column] = values
        host[:count, PAGES : PAGES + pages] = inputs.block_start
        step.inputs.copy_(staging, non_blocking=True)
        step.inputs[:count, 0] = tokens
        step.graph.replay()
        return step.outputs

    def _adapted(self, adapters: np.ndarray | None) -> str:
        """`Form.adapted` of a step's rows. Drops the graphs with adapters if factors were moved."""
        if adapters is not None and self._adapters_at != (now := self._model.adapters.moves):
            self._recorded = {form: step for form, step in self._recorded.items() if form.adapted == "none"}
            self._adapters_at = now
        return "none" if adapters is None else "one" if single(adapters) else "many"

    def _stage(
        self, inputs: Tensor, form: Form, given: tuple[np.ndarray | int, ...], decodes: int, counts: np.ndarray,
        context: np.ndarray, pages: np.ndarray, rows: np.ndarray, late: LateTokens | None = None,
    ) -> None:  # fmt: skip
        """Copy a step with prompts, padded to its form with prompts of token 0, into a graph's inputs."""
        staging = torch.empty(len(inputs), dtype=torch.int64, pin_memory=inputs.is_cuda)
        host, count = PromptInputs.of(staging.numpy(), form), int(counts.sum())
        # Real rows and tokens are those that decode, then, after such that fill up, all others.
        gap, rest = form.decoding - decodes, form.rows - form.decoding - (len(rows) - decodes)
        at, of = (np.arange(n) + gap * (np.arange(n) >= decodes) for n in (count, len(rows)))
        left = np.diff(np.linspace(0, form.tokens - count - gap, rest + 1).astype(np.int64))
        lengths = np.concatenate((counts[:decodes], np.ones(gap, np.int64), counts[decodes:], left))
        within = np.arange(form.tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        host.tokens[0], host.tokens[1], host.tokens[2] = 0, -1, 0
        host.tokens[3] = self._cache.spare + within % self._page_size
        for row, values in zip(host.tokens, given, strict=True):
            row[at] = values
        host.starts[0], host.starts[1:] = 0, np.cumsum(lengths)
        host.context[:], host.rows[:], host.pages[:] = 0, self._cache.spare_row, self._cache.spare
        host.context[of], host.rows[of], host.pages[of, : pages.shape[1]] = context, rows, pages
        inputs.copy_(staging, non_blocking=True)
        if late is not None:
            with_late(inputs[: form.tokens], (at[late[0]], late[1]))

    def _record_prompts(self, form: Form) -> bool:
        """False if there is no memory for it now, or, and never again, if the model does something that cannot be
        recorded; the log then says what. Ranks that take the same steps all record it or none."""
        device = self._model.device
        if not self._ranks.has_room():
            self._seen[form] = 0
            return False

        def work() -> tuple[Tensor, ...]:
            ids, adapter, positions, slots = tokens
            self._cache.slots, self._cache.rows = slots, rows
            # A new one, so that what it derives from its tensors is recorded.
            layout = AttentionLayout(starts, context, pages, self._page_size, False, decoding=form.decoding)
            return (made.copy_(self._forward(ids, positions, layout, self._rows(adapter, form.adapted))),)

        failure = ""
        try:
            nothing = np.zeros(0, np.int64)
            inputs = torch.empty(PromptInputs.size(form), dtype=torch.int64, device=device)
            self._stage(inputs, form, (0, 0, 0, 0), 0, nothing, nothing, nothing[:, None], nothing)
            tokens, starts, context, rows, pages = PromptInputs.of(inputs, form)
            if self._hidden is None:  # of all graphs with prompts, which are many
                width = self._model.config.hidden_size
                self._hidden = torch.empty(self._most_tokens, width, dtype=self._model.dtype, device=device)
            made = self._hidden[: form.tokens]
            self._recorded[form] = _Recorded(*self._captured(work), inputs=inputs)
        except RuntimeError as error:
            failure = str(error) or repr(error)
        if not (failures := self._ranks.troubles(failure)):
            for old in [each for each in self._recorded if each.tokens][:-KEPT]:
                del self._recorded[old], self._seen[old]
            return True
        self._recorded.pop(form, None)
        if all("out of memory" in each for each in failures):  # others may fit, and this one later
            self._seen[form] = 0
            return False
        logger.warning("steps with prompts are launched one by one, since recording failed: %s", failures[0])
        self._records_prompts = False
        return False

    def _record_together(self, form: Form) -> None:
        """`_record` on all ranks or on none; raises `Stopped` on all of them where one cannot."""
        self._ranks.check_room()
        try:
            with self._ranks.agreeing():
                self._record(form)
        except Stopped:
            self._recorded.pop(form, None)
            raise

    def _record(self, form: Form) -> _Recorded:
        rows, width, adapted, draws = form.rows, form.pages, form.adapted, form.draws
        device, output = self._model.device, self._model.output
        inputs = torch.zeros(rows, PAGES + width, dtype=torch.int64, device=device)
        inputs[:, SLOT], inputs[:, PAGES:], inputs[:, ROW] = self._cache.spare, self._cache.spare, self._cache.spare_row
        layout = AttentionLayout(
            query_start=torch.arange(rows + 1, device=device),
            context=torch.zeros(rows, dtype=torch.int64, device=device),
            block_start=torch.empty(rows, width, dtype=torch.int64, device=device),
            block_size=self._page_size,
            contiguous=False,
        )

        def work() -> tuple[Tensor, ...]:
            tokens, adapter, index, positions, slots, seeds, state_rows = (
                inputs[:, i].contiguous() for i in range(PAGES)
            )
            layout.context.copy_(index)
            layout.block_start.copy_(inputs[:, PAGES:])
            self._cache.slots, self._cache.rows = slots, state_rows
            adapters = self._rows(adapter, adapted)
            tokens = tokens.clamp(min=0)  # -1: no token could be drawn; the host checks later
            logits = self._model.logits(self._forward(tokens, positions, layout, adapters), adapters)
            if not draws:
                return (logits,)
            drawn = output.sample(logits, LogitsProcessing(), seeds, index + 1)
            return drawn[0], packed(*drawn)

        step = self._recorded[form] = _Recorded(*self._captured(work), inputs=inputs, layout=layout)
        return step

    def _captured(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        """A graph of `work`, and what it writes."""
        work()  # compiles kernels first
        if not self._recorded:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream() if self._model.device.type == "cuda" else None
        try:
            # Other threads may use the GPU meanwhile, such as one that stages new weights.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = work()
        except BaseException:  # PyTorch then leaves its stream current, the pool recording, and pointers to the graph
            if stream is not None:
                torch.cuda.set_stream(stream)
            self._pool = torch.cuda.graph_pool_handle()
            self._failed.append(graph)
            raise
        return graph, outputs

    def _rows(self, slots: Tensor, adapted: str) -> AdapterSlots | None:
        return None if adapted == "none" else self._model.adapters.rows(slots, adapted == "one")

    def _forward(
        self, tokens: Tensor, positions: Tensor, layout: AttentionLayout, adapters: AdapterSlots | None
    ) -> Tensor:
        """Last hidden states; keeps what the model chose."""
        routes = None if self._choices is None else RoutingRecord()
        hidden = self._model.hidden(tokens, positions, layout, self._cache, routes=routes, even=True, adapters=adapters)
        if self._choices is not None and routes is not None:
            self._choices.write(self._cache.slots, routes)
        return hidden

    def _addresses(self) -> list[int]:
        return [getattr(parameter, "codes", parameter).data_ptr() for parameter in self._model.parameters()]


def packed(ids: Tensor, logprobs: Tensor, raw: Tensor) -> Tensor:
    """Ids, logprobs and raw logprobs of R rows as the bits of [3, R] int32: one copy to the host."""
    return torch.stack([ids.int(), logprobs.view(torch.int32), raw.view(torch.int32)])
