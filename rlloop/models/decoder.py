"""The decoder's layers: blocks of attention, recurrences, experts and MLPs in Hugging Face's names.

Shapes: T flat tokens, D hidden width.
"""

from __future__ import annotations

from torch import Tensor, nn

from rlloop.models.architecture import ModelConfig
from rlloop.models.attention import Attention
from rlloop.models.experts import Mixture
from rlloop.models.latent import LatentAttention
from rlloop.models.layers import Cache, Mlp, Norm, PlainMlp, Step, Weight, normed
from rlloop.models.recurrent import DeltaNet, Mamba
from rlloop.models.row_blocks import in_blocks
from rlloop.models.stages import Stage
from rlloop.numerics.layout import DecoderWeights
from rlloop.numerics.ops import Ops
from rlloop.parallel.context import ParallelContext


class Layer(nn.Module):
    """Attention or a gated delta network, then an MLP or experts."""

    def __init__(self, config: ModelConfig, layer: int, context: ParallelContext) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_layernorm = Norm(config.hidden_size, config.centred_norms)
        latent, mixture, self.linear_attn, tp = config.latent, config.mixture, None, context.tp
        if config.delta is not None and layer in config.delta.layers:
            self.linear_attn = DeltaNet(config, config.delta, layer, tp)
        elif latent is None:
            self.self_attn = Attention(config, layer, tp)
        else:
            self.self_attn = LatentAttention(config, latent, layer, tp)
        self.post_attention_layernorm = Norm(config.hidden_size, config.centred_norms)
        if mixture is not None and layer in mixture.layers:
            self.mlp = Mixture(config, mixture, mixture.layers.index(layer), context)
        else:
            self.mlp = Mlp(config.hidden_size, config.intermediate_size, tp, config.mlp_bias, then_norm=True)
        attends = isinstance(getattr(self, "self_attn", None), Attention) and isinstance(self.mlp, Mlp)
        biased = config.qkv_bias or config.output_bias or config.mlp_bias
        special = config.output_gate or config.whole_norm or config.sinks or config.rope_dim != config.head_dim
        self._simple = attends and tp.size == 1 and context.ranks("cp").size == 1 and not (biased or special)

    def forward(self, delta: Tensor, stream: Tensor | None, step: Step, summed: bool = False) -> tuple[Tensor, Tensor]:
        """(delta, stream) -> (delta, stream), [T, D] each. `delta`, the last block's output, is still to be added;
        `summed`: it has been, and there is no `stream`."""
        ops, cache = step.ops, step.cache
        one_each = delta.shape[0] == step.layout.context.shape[0] and step.read is None  # one token a sequence
        if cache is not None and one_each and self._simple and type(ops) is Ops:  # subclasses depart
            made = self._decoded(delta, stream, step, cache)
            if made is not None:
                return made
        x, stream = _first_norm(delta, stream, self.input_layernorm, self.eps, step, summed)
        attended = (self.self_attn if self.linear_attn is None else self.linear_attn)(x, step.inner)
        if step.read is not None:
            attended, stream = attended[step.read], stream[step.read]
        x, stream = normed(attended, self.post_attention_layernorm, self.eps, stream, step)
        return in_blocks(self.mlp, x, step), stream

    def _decoded(self, delta: Tensor, stream: Tensor | None, step: Step, cache: Cache) -> tuple[Tensor, Tensor] | None:
        """`Ops.decoder_layer`."""
        attention, mlp = self.self_attn, self.mlp
        assert isinstance(attention, Attention)
        assert isinstance(mlp, Mlp)
        q_norm, k_norm = attention.q_norm, attention.k_norm
        weights = DecoderWeights(
            norms=(self.input_layernorm.scale, self.post_attention_layernorm.scale),
            qkv=(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            head_norms=None if q_norm is None or k_norm is None else (q_norm.scale, k_norm.scale),
            o=attention.o_proj.weight,
            gate=mlp.gate_proj.weight,
            up=mlp.up_proj.weight,
            down=mlp.down_proj.weight,
        )
        slots, keys, values = cache.places(attention.layer, "k", "v")
        return step.ops.decoder_layer(
            delta, stream, weights, self.eps, step.positions, step.rope, slots, keys, values, step.layout,
            attention.scale, attention.window,
        )  # fmt: skip


class Block(nn.Module):
    """A layer of a single block: attention, a recurrence, experts or an MLP (Nemotron)."""

    def __init__(self, config: ModelConfig, kinds: tuple[str, ...], layer: int, context: ParallelContext) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.norm = Norm(config.hidden_size, config.centred_norms)
        kind, tp = kinds[layer], context.tp
        if kind == "linear_attention" and config.mamba is not None:
            self.mixer = Mamba(config, config.mamba, layer, tp)
        elif kind == "full_attention":
            self.mixer = Attention(config, layer, tp)
        elif kind == "moe" and config.mixture is not None:
            self.mixer = Mixture(config, config.mixture, config.mixture.layers.index(layer), context)
        else:
            self.mixer = PlainMlp(config.hidden_size, config.intermediate_size, config.mlp_bias, tp)

    def forward(self, delta: Tensor, stream: Tensor | None, step: Step, summed: bool = False) -> tuple[Tensor, Tensor]:
        """As `Layer.forward`."""
        x, stream = _first_norm(delta, stream, self.norm, self.eps, step, summed)
        return in_blocks(self.mixer, x, step), stream


def _first_norm(
    delta: Tensor, stream: Tensor | None, norm: Norm, eps: float, step: Step, summed: bool
) -> tuple[Tensor, Tensor]:
    if summed:
        return step.ops.norm_of_sum(delta, norm.scale, eps)
    return normed(delta, norm, eps, stream, step)


class Decoder(nn.Module):
    """Embedding, layers and final norm: Hugging Face's `model.` prefix. A pipeline stage has its share of them."""

    @property
    def ends_with_mlp(self) -> bool:
        """True if the model's last layer is on this stage and ends with a dense MLP, whose rows nothing else needs."""
        last = list(self.layers.values())[-1] if self.stage.last else None
        return isinstance(last, Layer) and isinstance(last.mlp, Mlp)

    def __init__(self, config: ModelConfig, context: ParallelContext) -> None:
        super().__init__()
        self.stage = Stage(config, context)
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size) if self.stage.has_embedding else None
        kinds = config.blocks
        self.layers = nn.ModuleDict(
            {
                str(layer): Layer(config, layer, context) if kinds is None else Block(config, kinds, layer, context)
                for layer in self.stage.layers
            }
        )
        self.norm = Norm(config.hidden_size, config.centred_norms) if self.stage.last else None
