"""Other kernels for the recurrences of gated delta networks and of Mamba-2: flash-linear-attention's, mamba-ssm's and
vLLM's, and the numbers that all of them read.

They take bfloat16 with float32 decays, where rlloop takes and makes float32. vLLM's have no backward: they are those of
its engine, in Triton, with a state for each sequence before and after. mamba-ssm's are its Triton kernels, for Mamba-2
alone: its CUDA extensions need not be built, its sources on the path are enough.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

FLA, MAMBA, VLLM = "flash-linear-attention", "mamba-ssm", "vLLM's Triton kernels"
PACKAGES = {"triton": "triton", "fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "vllm": "vllm"}  # by module
CHUNK = 128  # tokens of a chunk of Mamba-2, as Nemotron's configuration says
PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Call = Callable[[], object]
Shape = tuple[int, int, int, int, bool]  # key heads, heads, numbers of a key, of a value; the delta rule or not


def inputs(tokens: int, shape: Shape) -> list[Tensor]:
    """q, k [T, G, K], v [T, H, V], decay and beta [T, H]: float32."""
    groups, heads, key, width, _ = shape
    q, k = (torch.randn(tokens, groups, key, device=PLACE) for _ in "qk")
    v, gates = torch.randn(tokens, heads, width, device=PLACE), torch.rand(2, tokens, heads, device=PLACE)
    return [q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v, 0.9 + 0.1 * gates[0], gates[1]]


def elapsed(work: Call) -> float:
    """Milliseconds of one call, its launches among them."""
    if PLACE.type == "cpu":
        began = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - began)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def here(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def runs(peer: str, call: Call) -> bool:
    """True if a peer's call does; else the reason is printed. Versions and GPUs decide, by errors of many types."""
    try:
        call()
    except Exception as error:
        print(f"{peer} does not run here: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        return False
    return True


def _mamba(module: str) -> Any:
    """A module of mamba-ssm's Triton kernels. Importing the package itself would ask for its CUDA extensions."""
    if "mamba_ssm" not in sys.modules:
        spec = importlib.util.find_spec("mamba_ssm")
        assert spec is not None
        sys.modules["mamba_ssm"] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"mamba_ssm.ops.triton.{module}")


def named_inputs(given: list[Tensor], corrects: bool) -> dict[str, Tensor]:
    """Inputs of flash-linear-attention, whose Mamba-2 has no groups or betas: they are multiplied into the values."""
    q, k, v, decay, beta = given
    if not corrects:
        q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (q, k))
        v = v * beta[..., None]
    named = {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16(), "g": decay.log()}
    return named | ({"beta": beta.bfloat16()} if corrects else {})


def scans(
    given: list[Tensor], corrects: bool, starts: Tensor, grad: Tensor, wanted: Collection[str] = (FLA, MAMBA, VLLM)
) -> dict[str, tuple[Call, Call | None]]:
    """Forward, and forward and backward, of whole sequences end to end, by peer, vLLM's first. What is not wanted is
    not imported either. starts: [sequences + 1] int32."""
    made: dict[str, tuple[Call, Call | None]] = {}
    given = [x.detach() for x in given]
    if VLLM in wanted and here("vllm"):
        made[VLLM] = (_vllm_delta(given, starts) if corrects else _vllm_mamba(given, starts), None)
    if FLA in wanted and here("fla"):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.simple_gla import chunk_simple_gla

        run: Any = chunk_gated_delta_rule if corrects else chunk_simple_gla
        named = {name: x[None].requires_grad_() for name, x in named_inputs(given, corrects).items()}
        half = grad.bfloat16()[None]
        made[FLA] = (
            lambda: run(**{name: x.detach() for name, x in named.items()}, scale=1.0, cu_seqlens=starts)[0],
            lambda: torch.autograd.grad(run(**named, scale=1.0, cu_seqlens=starts)[0], list(named.values()), half),
        )
    if MAMBA in wanted and here("mamba_ssm") and not corrects:
        made[MAMBA] = _mamba_scan(given, len(starts) - 1, grad)
    return made


def _mamba_scan(given: list[Tensor], sequences: int, grad: Tensor) -> tuple[Call, Call]:
    q, k, v, _, steps = given
    run, rates = _mamba("ssd_combined").mamba_chunk_scan_combined, torch.full((v.shape[1],), -0.1, device=v.device)
    x, dt, b, c, half = (each.bfloat16().unflatten(0, (sequences, -1)) for each in (v, steps, k, q, grad))
    leaves = [each.requires_grad_() for each in (x, dt, b, c)]

    def scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return run(x, dt, rates, b, c, CHUNK)

    return (
        lambda: scan(*(each.detach() for each in leaves)),
        lambda: torch.autograd.grad(scan(*leaves), leaves, half),
    )


def _vllm_delta(given: list[Tensor], starts: Tensor) -> Call:
    from vllm.third_party.flash_linear_attention.ops import chunk_gated_delta_rule

    q, k, v, decay, beta = given
    named = {"q": q.bfloat16()[None], "k": k.bfloat16()[None], "v": v.bfloat16()[None], "g": decay.log()[None]}
    named["beta"] = beta.bfloat16()[None]
    before = torch.zeros(len(starts) - 1, v.shape[1], v.shape[2], k.shape[2], device=v.device)

    def run() -> object:
        with torch.inference_mode():
            return chunk_gated_delta_rule(
                **named, scale=1.0, initial_state=before, output_final_state=True, cu_seqlens=starts
            )

    return run


def _vllm_mamba(given: list[Tensor], starts: Tensor) -> Call:
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    q, k, v, _, steps = given
    total, sequences = len(v), len(starts) - 1
    length = total // sequences
    assert length % CHUNK == 0
    chunks = total // CHUNK
    place = v.device
    ends = torch.arange(0, total + 1, CHUNK, dtype=torch.int32, device=place)
    of = torch.arange(chunks, dtype=torch.int32, device=place) // (length // CHUNK)
    last = torch.arange(1, sequences + 1, dtype=torch.int64, device=place) * (length // CHUNK) - 1
    x, b, c, dt = v.bfloat16(), k.bfloat16(), q.bfloat16(), steps.bfloat16()
    rates, skip, bias = (torch.full((v.shape[1],), each, device=place) for each in (-0.1, 1.0, 0.0))
    out = torch.empty_like(x)

    def run() -> object:
        with torch.inference_mode():
            return mamba_chunk_scan_combined_varlen(
                x, dt, rates, b, c, CHUNK, cu_seqlens=starts, cu_chunk_seqlens=ends, last_chunk_indices=last,
                seq_idx=of, out=out, D=skip, dt_bias=bias, dt_softplus=True, state_dtype=torch.float32,
            )  # fmt: skip

    return run


def steps(given: list[Tensor], corrects: bool, copies: int) -> dict[str, list[Call]]:
    """One token of each sequence, by package: a call for each of so many sets of states."""
    q, k, v, decay, beta = given
    sequences, heads, width = v.shape
    key, place, made = k.shape[2], v.device, dict[str, list[Call]]()
    if here("fla"):
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.simple_gla import fused_recurrent_simple_gla

        run: Any = fused_recurrent_gated_delta_rule if corrects else fused_recurrent_simple_gla
        named = {name: x[:, None] for name, x in named_inputs(given, corrects).items()}
        states = [torch.randn(sequences, heads, key, width, device=place) for _ in range(copies)]
        made[FLA] = [
            _quietly(lambda state=state: run(**named, scale=1.0, initial_state=state, output_final_state=True)[0])
            for state in states
        ]
    rows = torch.arange(1, sequences + 1, dtype=torch.int32, device=place)

    def stores() -> list[Tensor]:  # the first state is no sequence's
        return [torch.randn(sequences + 1, heads, width, key, device=place) * 0.1 for _ in range(copies)]

    if here("mamba_ssm") and not corrects:
        made[MAMBA] = _updates(_mamba("selective_state_update").selective_state_update, given, stores(), rows)
    if here("vllm") and corrects:
        from vllm.third_party.flash_linear_attention.ops import fused_recurrent_gated_delta_rule as step

        halves = {name: x.bfloat16()[None] for name, x in (("q", q), ("k", k), ("v", v), ("beta", beta))}
        starts, logs = torch.arange(sequences + 1, dtype=torch.int32, device=place), decay.log()[None]
        made[VLLM] = [
            _quietly(
                lambda store=store: step(
                    **halves, g=logs, scale=1.0, initial_state=store, cu_seqlens=starts, ssm_state_indices=rows
                )
            )
            for store in stores()
        ]
    elif here("vllm"):
        from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

        out = torch.empty_like(v, dtype=torch.bfloat16)
        made[VLLM] = _updates(selective_state_update, given, stores(), rows, out=out)
    return made


def _updates(step: Any, given: list[Tensor], stores: list[Tensor], rows: Tensor, **more: Tensor) -> list[Call]:
    """Calls of the state update of mamba-ssm, or of vLLM's, which was made from it: one for each set of states."""
    q, k, v, _, beta = given
    _, heads, width = v.shape
    x, b, c = v.bfloat16(), k.bfloat16(), q.bfloat16()
    dt = beta.bfloat16()[..., None].expand(-1, -1, width)
    rates, skip, bias = (torch.full((heads,), each, device=v.device) for each in (-0.1, 1.0, 0.0))
    wide = rates[:, None, None].expand(-1, width, k.shape[2])
    skip, bias = (each[:, None].expand(-1, width) for each in (skip, bias))
    more |= {"D": skip, "dt_bias": bias}
    return [
        _quietly(lambda store=store: step(store, x, dt, wide, b, c, dt_softplus=True, state_batch_indices=rows, **more))
        for store in stores
    ]


def _quietly(call: Call) -> Call:
    def run() -> object:
        with torch.inference_mode():
            return call()

    return run
