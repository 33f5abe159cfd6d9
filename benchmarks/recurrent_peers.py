"""Other kernels for the recurrences of gated delta networks and of Mamba-2: flash-linear-attention's, and vLLM's.

Both take bfloat16 with float32 decays, where rlloop takes and makes float32. vLLM's have no backward: they are those of
its engine, in Triton, with a state for each sequence before and after.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FLA, VLLM = "flash-linear-attention", "vLLM's Triton kernels"
CHUNK = 128  # tokens of a chunk of Mamba-2, as Nemotron's configuration says
Call = Callable[[], object]


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


def named_inputs(given: list[Tensor], corrects: bool) -> dict[str, Tensor]:
    """For flash-linear-attention, which has no groups in Mamba-2, nor betas: they are multiplied into the values."""
    q, k, v, decay, beta = given
    if not corrects:
        q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (q, k))
        v = v * beta[..., None]
    named = {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16(), "g": decay.log()}
    return named | ({"beta": beta.bfloat16()} if corrects else {})


def scans(given: list[Tensor], corrects: bool, starts: Tensor, grad: Tensor) -> dict[str, tuple[Call, Call | None]]:
    """Forward, and forward and backward, of whole sequences end to end, by package. starts: [sequences + 1] int32."""
    made: dict[str, tuple[Call, Call | None]] = {}
    given = [x.detach() for x in given]
    if here("fla"):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.simple_gla import chunk_simple_gla

        run: Any = chunk_gated_delta_rule if corrects else chunk_simple_gla
        named = {name: x[None].requires_grad_() for name, x in named_inputs(given, corrects).items()}
        half = grad.bfloat16()[None]
        made[FLA] = (
            lambda: run(**{name: x.detach() for name, x in named.items()}, scale=1.0, cu_seqlens=starts)[0],
            lambda: torch.autograd.grad(run(**named, scale=1.0, cu_seqlens=starts)[0], list(named.values()), half),
        )
    if here("vllm"):
        made[VLLM] = (_vllm_delta(given, starts) if corrects else _vllm_mamba(given, starts), None)
    return made


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
    if here("vllm"):  # its first state is no sequence's
        rows = torch.arange(1, sequences + 1, dtype=torch.int32, device=place)
        stores = [torch.randn(sequences + 1, heads, width, key, device=place) * 0.1 for _ in range(copies)]
        if corrects:
            from vllm.third_party.flash_linear_attention.ops import fused_recurrent_gated_delta_rule as step

            halves = {name: x.bfloat16()[None] for name, x in (("q", q), ("k", k), ("v", v), ("beta", beta))}
            starts, logs = torch.arange(sequences + 1, dtype=torch.int32, device=place), decay.log()[None]
            made[VLLM] = [
                _quietly(
                    lambda store=store: step(
                        **halves, g=logs, scale=1.0, initial_state=store, cu_seqlens=starts, ssm_state_indices=rows
                    )
                )
                for store in stores
            ]
        else:
            from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

            x, b, c, out = v.bfloat16(), k.bfloat16(), q.bfloat16(), torch.empty_like(v, dtype=torch.bfloat16)
            dt = beta.bfloat16()[..., None].expand(-1, -1, width)
            rates, skip, bias = (torch.full((heads,), each, device=place) for each in (-0.1, 1.0, 0.0))
            wide = rates[:, None, None].expand(-1, width, key)
            skip, bias = (each[:, None].expand(-1, width) for each in (skip, bias))
            made[VLLM] = [
                _quietly(
                    lambda store=store: selective_state_update(
                        store, x, dt, wide, b, c, skip, bias, dt_softplus=True, state_batch_indices=rows, out=out
                    )
                )
                for store in stores
            ]
    return made


def _quietly(call: Call) -> Call:
    def run() -> object:
        with torch.inference_mode():
            return call()

    return run
