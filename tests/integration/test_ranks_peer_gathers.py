"""Gathers by peers over gloo: what a rank writes reaches the others when all meet, and is NaN if it is read before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlloop import Engine, SamplingParams
from rlloop.models import new_model, peer_gathers
from rlloop.models.peer_gathers import PeerGathers
from rlloop.numerics import operators
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from tests.support.gpu_models import CONFIG, TEN_EXPERTS
from tests.support.image_models import image_config, inputs
from tests.support.rank_cases import CPU
from tests.support.ranks import run_ranks
from tests.support.traffic import bits

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 500}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {**CONFIG, **SMALL},
    "experts": {**CONFIG, **SMALL, **TEN_EXPERTS, "moe_intermediate_size": 32},
    "pictures": image_config("qwen3_vl", {"hidden_size": 64, "intermediate_size": 96}, {"out_hidden_size": 64}),
}


class Meeting(NamedTuple):
    number: int


class Peers:
    """Memory and kernels of a rank. `met`: by whom, in order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.met = ranks, list[str]()
        self._written: list[tuple[Tensor, Any, Tensor]] = []  # a buffer, where, and what others have not yet
        self._last = 0

    def buffer(self, rows: int, columns: int, first: int) -> Any:
        whole = torch.full((rows, columns), torch.nan, dtype=torch.bfloat16)
        return SimpleNamespace(whole=whole, places=(whole, first))

    def rewind(self) -> None:
        assert not self._written

    def begin(self, meeting: Meeting) -> None:
        assert not self._written, "the last forward ended without a meeting"
        assert meeting.number == 0
        self._last = 0

    def meet(self, meeting: Meeting, kernel: str = "meet") -> None:
        assert meeting.number == self._last + 1
        self._last = meeting.number
        self.met.append(kernel)
        for whole, where, part in self._written:
            for at, theirs in self.ranks.gather_objects((where, part)):
                whole[at] = theirs
        self._written.clear()

    def write(self, x: Tensor, places: Any, stride: int, meeting: Meeting | None = None) -> None:
        whole, first = places
        assert whole.stride(0) == stride
        self._written.append((whole, (slice(None), slice(first, first + x.shape[1])), x))
        if meeting is not None:
            self.meet(meeting, "write")

    def write_chosen(self, x: Tensor, chosen: Tensor, begin: int, end: int, places: Any) -> None:
        own = ((chosen >= begin) & (chosen < end)).flatten()
        self._written.append((places[0], own, x.flatten(0, -2)[own]))

    def decodes(self, q: Tensor, v: Tensor, layout: Any) -> bool:
        return len(q) == len(layout.context)

    def attention_into(self, q: Tensor, k: Tensor, v: Tensor, layout: Any, scale: float, places: Any, n: int) -> None:
        self.write(operators.attention(q, k, v, layout, scale).flatten(1), places, n)

    def linear_into(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, places: Any, meeting: Meeting | None
    ) -> None:
        if meeting is not None:
            self.meet(meeting, "linear_into")
        self.write(operators.linear(x, weight, bias), places, out.stride(0))

    def gated_linear_into(self, x: Tensor, gate: Tensor, up: Tensor, out: Tensor, places: Any) -> None:
        self.write(
            operators.silu_mul(operators.linear(x, gate, None), operators.linear(x, up, None)), places, out.stride(0)
        )

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, meeting: Meeting
    ) -> tuple[Tensor, Tensor, None]:
        self.meet(meeting, "rms_norm")
        return *operators.rms_norm(x, weight, eps, residual), None


class Gathers(PeerGathers):
    def __init__(self, peers: Any) -> None:
        self.numbers, self._kernels, self._memory = 1 << 20, peers, peers
        self._first: Any = Meeting(0)
        self._meetings, self._owed = 0, None


def of_a_rank(shape: str, size: int, apart: bool) -> list[str]:
    """The kernels that met, in order; checks that tokens are one rank's."""
    config = SHAPES[shape]
    context = join(CPU, Layout(tp=size))
    peer_gathers.MEETS_IN_READERS = peer_gathers.ATTENTION_WRITES = not apart
    whole, divided = (
        new_model(config, seed=0, dtype="bfloat16", context=each) for each in (ParallelContext(CPU), context)
    )
    peers = Peers(context.tp)
    peer_gathers._opened[context.tp] = Gathers(peers)
    pictures = [prompt for prompt, _ in inputs()][:2]
    prompts = pictures if shape == "pictures" else [[5, 6, 7, 8], [9, 10, 11]]
    sampling = [SamplingParams(max_tokens=6, seed=seed, ignore_eos=True) for seed in range(2)]
    wanted = [bits(each) for each in Engine(whole).generate(prompts, sampling)]
    assert not peers.met
    made = [bits(each) for each in Engine(divided).generate(prompts, sampling)]
    assert made == wanted
    return peers.met


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("apart", [False, True])
def test_gathers_have_the_bits_of_one_rank(shape: str, apart: bool) -> None:
    for met in run_ranks(2, of_a_rank, shape, 2, apart):
        if apart:
            assert set(met) == {"meet", "write"}
        elif shape != "experts":  # all but the last of a step is met where it is read
            layer = ["linear_into", "rms_norm", "linear_into"]
            assert met[-12:] == [*layer, "rms_norm", *layer, "rms_norm", *layer, "meet"]
        else:
            assert {"linear_into", "rms_norm"} <= set(met)
