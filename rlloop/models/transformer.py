"""The model definition shared by training, prefill and decode, which differ only in metadata.

All arithmetic is in operations of `rlloop.numerics`; this module calls them in order. Parameters have Hugging Face's
names. Shapes: T flat tokens, D hidden width, H heads, G key-value heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from rlloop.errors import ConfigError
from rlloop.inputs import Image
from rlloop.models import fp8
from rlloop.models.adapter_slots import AdapterRegistry
from rlloop.models.adapter_weights import Adapter, Target, check_adapts, find_targets
from rlloop.models.architecture import ModelConfig
from rlloop.models.decoder import Decoder
from rlloop.models.experts import Mixture
from rlloop.models.fingerprint import check_profile, fingerprint
from rlloop.models.head import Apart, Head
from rlloop.models.layers import Cache, Divisions, Step, Weight
from rlloop.models.model_facts import ModelFacts
from rlloop.models.peer_gathers import peers_of
from rlloop.models.placement import check_placement
from rlloop.models.recompute import Recompute
from rlloop.models.ropes import RopeTable, turned_by_axis
from rlloop.models.routing_record import RoutingRecord
from rlloop.models.stages import Stage
from rlloop.models.stored_parameter import CopiedPart, copies_of, entries_of, shared_parts
from rlloop.models.vision import PlacedFeatures, Tower
from rlloop.numerics.layout import VOCABULARY_BLOCK, AdapterSlots, AttentionLayout
from rlloop.numerics.operators.parameters import embedding
from rlloop.numerics.ops import Ops, ops_for
from rlloop.numerics.profile import NumericsProfile
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.cut import share
from rlloop.parallel.division import in_blocks, taken


class Model(ModelFacts, nn.Module):
    """A decoder of one of `families.FAMILIES`. Its own parameters get the gradient.

    `load_model` and `new_model` construct one with weights; the constructor leaves them uninitialised.

    `checkpoint_layers = n` recomputes every n-th layer in the backward pass instead of keeping its activations (0:
    none); the same operations run again, so the gradient keeps its bits. With `checkpoint_keep_attention` attention's
    results are kept; with `checkpoint_offload` what is kept of those layers waits in host memory. Of more than
    `row_blocks.ROWS` tokens a recomputed layer's dense MLP sums its weights' gradients by blocks of rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        profile: NumericsProfile | None = None,
        context: ParallelContext | None = None,
        *,
        weights_of: Model | None = None,
    ) -> None:
        """`context`: the rank, and the device of its tensors; None: one rank on the CPU.

        `weights_of`: a model of the same configuration whose parameters are shared; None: the model has its own. Where
        that model is whole and this one a tensor-parallel rank, contiguous parts are shared, and other parts are
        copies; if both are divided, in different ways, all are copies. `refresh` updates copies.
        """
        super().__init__()
        self.config = config
        self.profile = profile or NumericsProfile()
        self.context = context or ParallelContext(torch.device("cpu"))
        self.adapter: Adapter | None = None if weights_of is None else weights_of.adapter  # of all rows
        self.adapters = AdapterRegistry() if weights_of is None else weights_of.adapters  # those that rows may select
        self.ops = self._with_own_adapter(ops_for(self.profile))
        self.checkpoint_layers, self.checkpoint_keep_attention, self.checkpoint_offload = 0, False, False
        self.take_head_gradient: Callable[[Tensor], None] | None = None  # gets a tied weight's gradient as the head
        self.source_path: Path | None = None  # the folder it was loaded from
        self._copies: list[CopiedPart] = []
        # Of the head; the embedding is whole.
        self.vocabulary = in_blocks(config.vocab_size, self.context.tp, VOCABULARY_BLOCK)
        if weights_of is None:
            check_placement(config, {"layout": self.context.layout})
            self.model = Decoder(config, self.context)
            held = config.vocab_size if self.vocabulary is None else self.vocabulary.size
            self.lm_head = None
            if self.model.stage.last and not config.tied:
                self.lm_head = Weight(held, config.hidden_size)
            first = self.model.stage.first
            self.visual = Tower(config.vision) if config.vision is not None and first else None
            self.rope = RopeTable(config)
            return
        self.visual = weights_of.visual
        self.rope, self.source_path = weights_of.rope, weights_of.source_path
        self.checkpoint_layers = weights_of.checkpoint_layers
        self.checkpoint_keep_attention = weights_of.checkpoint_keep_attention
        self.checkpoint_offload = weights_of.checkpoint_offload
        if all(weights_of.context.ranks(axis).size == self.context.ranks(axis).size for axis in ("tp", "ep", "pp")):
            self.model, self.lm_head, self._copies = weights_of.model, weights_of.lm_head, weights_of._copies
            return
        with torch.device("meta"):
            skeleton = Model(config, profile, self.context)
        self.model, self.lm_head, self.visual = skeleton.model, skeleton.lm_head, skeleton.visual
        state, self._copies = shared_parts(entries_of(self), entries_of(weights_of))
        for name, parameter in self.named_parameters():  # assigned ones take this over: what is frozen stays so
            parameter.requires_grad_(state[name].requires_grad)
        self.load_state_dict(state, assign=True)
        self.refresh()
        if (theirs := weights_of.adapter) is not None:  # the base is frozen
            self.adapter = Adapter(theirs.exact, self.adapter_targets(), theirs.name)
            self._copies = copies_of(self.adapter.entries(), theirs.entries())
            self.ops = self._with_own_adapter(self.ops)
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring copies of another model's weights (`weights_of`) up to date, in place. Collective if those are cut."""
        for each in self._copies:
            each.refresh()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`to`, `cuda` and similar calls move the parameters; the context follows."""
        super()._apply(fn, recurse)
        self.context = replace(self.context, device=self._some_weight.device)
        return self

    @property
    def divisions(self) -> Divisions:
        """Tensor-parallel division of the parameters outside layers, by name: (dimension, division)."""
        return {} if self.vocabulary is None or self.lm_head is None else {"lm_head.weight": (0, self.vocabulary)}

    @property
    def head(self) -> Tensor:
        """This rank's rows of the output projection [V, D]; where it is tied to the embedding, rows of that."""
        if self.lm_head is not None:
            return self.lm_head.weight
        return taken(self._embedding, self.vocabulary, 0)

    @property
    def _head_parameter(self) -> nn.Parameter:
        """The parameter that has the rows of `head`."""
        return self._embedding if self.lm_head is None else self.lm_head.weight

    @property
    def stage(self) -> Stage:
        """This rank's stage of the pipeline."""
        return self.model.stage

    @property
    def _embedding(self) -> nn.Parameter:
        assert self.model.embed_tokens is not None, "this stage of the pipeline has no embedding"
        return self.model.embed_tokens.weight

    @property
    def _some_weight(self) -> nn.Parameter:
        """Any weight of the compute type; every stage has one."""
        return next(self.model.parameters())

    @property
    def output(self) -> Head:
        """Logprobs and draws of hidden states and `logits`."""
        adapted = self.ops.adapted(self._head_parameter) if self.stage.last else None
        return Head(self.ops, lambda: self.scoring_head, self.vocabulary, self.stage, self.vocab_size, adapted)

    @property
    def scoring_head(self) -> Tensor:
        """`head` for differentiable products: `take_head_gradient` keeps a tied weight's two gradients apart."""
        take = self.take_head_gradient
        if self.lm_head is not None or take is None:
            return self.head
        return taken(Apart.apply(self._embedding, take), self.vocabulary, 0)

    @property
    def dtype(self) -> torch.dtype:
        return self._some_weight.dtype

    def with_profile(self, profile: NumericsProfile, ops: Callable[[NumericsProfile], Ops] = ops_for) -> Model:
        """A view of the model under another profile: parameters are shared. Raises as `check_profile`. `ops` makes the
        profile's operations: a subclass of `Ops` departs from them."""
        self.check_profile(profile)
        view = Model(self.config, profile, self.context, weights_of=self)
        view.ops = view._with_own_adapter(ops(profile))
        return view

    def with_adapter(self, adapter: Adapter | str | None) -> Model:
        """A view of the model that applies this adapter, or the adapter of this name, to every token; None: the base.

        Weights are shared. Raises `ConfigError` for an unknown name, and as `check_adapts`.
        """
        if isinstance(adapter, str):
            loaded = self.adapters.get(adapter)
            adapter = Adapter(loaded.weights, self.adapter_targets(), adapter)
        if adapter is not None:
            self.check_adapts()
        view = Model(self.config, self.profile, self.context, weights_of=self)
        view.adapter = adapter
        view.ops = view._with_own_adapter(self.ops)
        return view

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        """An own adapter is attached to the copy's weights; loaded ones stay with the original."""
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        for key, value in self.__dict__.items():
            if key not in ("ops", "adapter", "adapters"):
                twin.__dict__[key] = deepcopy(value, memo)
        twin.adapters = AdapterRegistry()
        twin.adapter = None if self.adapter is None else self.adapter.attached(twin.adapter_targets())
        twin.ops = twin._with_own_adapter(self.ops)
        return twin

    def _with_own_adapter(self, ops: Ops) -> Ops:
        return ops.with_adapters(None if self.adapter is None else AdapterSlots(self.adapter.factors))

    def _ops_of_forward(self, adapters: AdapterSlots | None) -> Ops:
        """The operations of one forward; `adapters` None: the model's own."""
        if adapters is None and self.ops.adapters is not None:
            adapters = self.ops.adapters.renewed()
        return self.ops if adapters is None else self.ops.with_adapters(adapters)

    def own_targets(self) -> dict[str, Target]:
        """The weights of this rank's layers that adapters can adapt, by name."""
        heads = None if self.config.latent is None else self.config.num_heads
        return find_targets(self, self._head_parameter if self.stage.last else None, self.vocabulary, heads)

    def adapter_targets(self) -> dict[str, Target]:
        """The weights that adapters can adapt, by name: all of the model's, on each rank."""
        own = self.own_targets()
        if self.stage.whole:
            return own
        with torch.device("meta"):
            every = Model(self.config).adapter_targets()
        return {name: own.get(name) or replace(target, weight=None) for name, target in every.items()}

    def logits(self, hidden: Tensor, adapters: AdapterSlots | None = None) -> Tensor:
        """Logits [T, V] float32 of hidden states [T, D]; `adapters` as for `hidden`. Of tensor-parallel ranks, each has
        those of its own tokens of the vocabulary, as `output` takes them."""
        if not self.stage.last:
            return hidden.new_empty(len(hidden), 0, dtype=torch.float32)
        ops = self._ops_of_forward(adapters)
        return ops.logits(hidden, self.head, self._head_parameter)

    def check_adapts(self) -> None:
        """Raises `ConfigError` where adapters cannot be computed under this profile."""
        if fp8.is_quantised(self):
            raise ConfigError("quantize=fp8 trains the weights themselves, so adapters cannot be added; leave it out")
        check_adapts(self.profile)

    def check_profile(self, profile: NumericsProfile) -> None:
        """Raises `ConfigError` for settings that this model does not support on its device or in its type."""
        check_profile(self, profile, self.dtype, self.device)

    def fingerprint(self) -> dict[str, Any]:
        """Everything besides the weights that decides the bits, as JSON values."""
        return {
            "architecture": self.config.architecture,
            **({"quantize": "fp8"} if fp8.is_quantised(self) else {}),
            **fingerprint(self.profile, self.dtype, self.device),
        }

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: AttentionLayout,
        cache: Cache | None = None,
        *,
        routes: RoutingRecord | None = None,
        even: bool = False,
        adapters: AdapterSlots | None = None,
        images: PlacedFeatures | None = None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Last hidden states of flat tokens, normed. tokens and positions [T] int64 -> [T, D].

        Of context-parallel ranks each gets the rows of its own range of the tokens.

        In a pipeline each stage calls this with the same tokens. Stages before the last get zeros [T, D]: to
        differentiate them is to differentiate the stage.

        Positions are for the rope alone; masks and the cache go by `layout`. Without a cache that must be the trainer's
        (`AttentionLayout.of_sequences`). `routes` records the experts of each token, or holds those to replay.
        `even`: each rank of the layout has as many tokens; then no size has to be known on the host (CUDA graphs).
        `adapters` says which adapter each token has, in this forward; None: all have the model's own, if it has one.
        `images`: features (`see`) in place of tokens. `read` [R] int64: of these tokens alone,
        -> [R, D]; the last layer's MLP is not made for others where it is dense. Not of context-parallel ranks.

        Positions are [T], or [3, T] of a model whose rope has sections (MRoPE). Raises `ConfigError` for others.
        """
        sections = self.config.rope.sections
        if positions.ndim != 1 and (sections is None or len(positions) != 3):
            raise ConfigError(
                f"positions have {positions.shape[0]} axes; the rope of {self.config.architecture} takes "
                + ("one position a token (positions [T])" if sections is None else "one or three")
            )
        if (peers := peers_of(self.vocabulary)) is not None:
            peers.begin()
        rope = (self.rope.table[0], self.rope.table[1])
        if positions.ndim == 2 and sections is not None:
            cos, sin = turned_by_axis(self.rope.table, positions, sections)  # a row a token
            rope, positions = (cos, sin), torch.arange(len(tokens), device=tokens.device)
        ops = self._ops_of_forward(adapters)
        step = Step(positions, rope, layout, cache, ops, routes, self.context, even=even)
        cp = self.context.ranks("cp")
        if cp.size > 1:  # each rank computes its own range of the tokens
            begin, end = share(len(tokens), cp.size, cp.rank)
            tokens = tokens[begin:end]
            step = replace(
                step, positions=positions[begin:end], routes=None if routes is None else routes.own(begin, end)
            )
            images = None if images is None else images.part(begin, end)
        if self.stage.first:
            delta, stream = embedding(tokens, self._embedding), None
            if images is not None:
                delta = images.embedded(delta)
            degrees = self.context.layout
            if self.adapter is not None and torch.is_grad_enabled() and (degrees.pp > 1 or degrees.expert_leaves > 1):
                delta.requires_grad_()  # ranks meet in the backward of every layer, also below the first adapted one
        else:
            delta, stream = self.stage.begin(len(tokens), self.dtype, step)
        recompute, last = self._recompute, self.config.num_layers - 1
        fewer = read is not None and adapters is None and images is None
        fewer = fewer and type(ops) is Ops and self.model.ends_with_mlp
        for layer, module in zip(self.stage.layers, self.model.layers.values(), strict=True):
            if layer == last and fewer:
                step = replace(step, read=read)
            delta, stream = recompute.decoder_layer(layer, module, delta, stream, step)
            if images is not None:
                if peers is not None:
                    peers.settle()
                delta, stream = images.added(layer, delta, stream)
        if peers is not None:
            peers.settle()
        if self.model.norm is None:
            hidden = self.stage.end(delta, stream, step)
        else:
            hidden, _ = self.ops.rms_norm(delta, self.model.norm.scale, self.config.rms_norm_eps, stream)
        return hidden if read is None or step.read is not None else hidden[read]

    def see(self, images: Sequence[Image]) -> list[Tensor]:
        """Features [1 + L, F, D] of each image: embeddings, then what the first L layers add. Differentiable where the
        tower trains. Every rank has the whole tower, but for later stages of a pipeline, which add nothing: [0, F, D].
        """
        vision = self.config.vision
        assert vision is not None, "check_images refuses images for a text model"
        if self.visual is None:
            counts = [image.shape[0] // vision.merge_size**2 for image in images]
            return [torch.empty(0, count, vision.out_size, dtype=self.dtype, device=self.device) for count in counts]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.visual.trains):
            return self.visual(images, self.ops.with_adapters(None), self._recompute.run)

    def without_tokens(self) -> Tensor:
        """`hidden` of a rank without tokens in an expert group whose other ranks have some: its experts compute theirs.

        A zero that depends on every exchange: differentiate it where the others differentiate theirs.
        """
        mixture, nothing = self.config.mixture, torch.empty(0, dtype=torch.int64, device=self.device)
        if mixture is None:
            return torch.zeros((), device=self.device)
        layout, rope = AttentionLayout.of_sequences([], self.device), (self.rope.table[0], self.rope.table[1])
        step = Step(nothing, rope, layout, None, self.ops, None, self.context)
        width = mixture.latent_size or self.config.hidden_size
        x = torch.zeros(0, width, dtype=self.dtype, device=self.device, requires_grad=torch.is_grad_enabled())
        for layer, block in zip(self.stage.layers, self.model.layers.values(), strict=True):
            for module in block.children():
                if isinstance(module, Mixture):
                    x = self._recompute.run(layer, module.without_tokens, x, step)
        return x.sum()

    @property
    def _recompute(self) -> Recompute:
        alone = self.context.layout.world_size == 1
        return Recompute(self.checkpoint_layers, self.checkpoint_keep_attention, self.checkpoint_offload, alone)
