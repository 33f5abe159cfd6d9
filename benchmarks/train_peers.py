"""The strongest plain trainer that transformers and PyTorch make: what gpu_train.py and gpu_step.py compare with.

    peer = Peer(folder, "cuda", packed=True, compiled=True)
    parts = peer.lay_out([Row(tokens, 128, 0.7, old_logprobs), ...], budget=16384)
    peer.tune(parts)                                    # tries every attention, keeps the fastest that runs
    loss, logprobs = peer.forward_backward(parts)       # gradients are in .grad, in bfloat16
    print(peer.name)                                    # transformers, packed, compiled, flash_attention_3

- Attention, padded to a micro-batch's longest sequence: SDPA as PyTorch chooses, and with cuDNN first. Packed,
  sequences end to end without padding: FlashAttention 3 and 2 where transformers finds them, the FlashAttention that
  PyTorch brings, and FlexAttention, whose masks are made beforehand. Each is tried without compilation.
- Loss, as Liger's: lm_head at completion positions only, `CHUNK` rows of logits at a time, whose gradients are taken at
  once, so that logits are neither held whole nor computed twice.
- `compiled`: torch.compile of the model and of the loss of a chunk, anew for each batch, so that shapes are constants
  where they can be. An attention with which that fails is named, and the next one taken.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CHUNK = 2048
CUDNN, BUILT_IN = "sdpa, cuDNN", "FlashAttention of PyTorch"  # the other names are transformers' own
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


flash_attention = torch.ops.aten._flash_attention_forward  # of sequences end to end, differentiable


class Row(NamedTuple):
    """A sequence of `prompt` tokens and a completion."""

    tokens: np.ndarray
    prompt: int
    advantage: float
    old: np.ndarray  # [completion] float32, logprobs that ratios divide by


class Part(NamedTuple):
    """A micro-batch on the device."""

    tokens: Tensor  # [1, N] packed, [sequences, longest] padded
    positions: Tensor | None  # [1, N] packed
    lengths: list[int]
    before: Tensor  # [C] where completion tokens are predicted
    columns: tuple[Tensor, Tensor, Tensor]  # [C] each: completion tokens, old logprobs, weights


def micro_batches(batch: Sequence[Row], budget: int, padded: bool) -> list[list[Row]]:
    """Longest first, so that a micro-batch's lengths are alike; `padded`: each counts as its longest."""
    made: list[list[Row]] = []
    room = 0
    for each in sorted(batch, key=lambda row: -len(row.tokens)):
        size = len(made[-1][0].tokens) if made and padded else len(each.tokens)
        if not made or room < size:
            made.append([])
            room, size = budget, len(each.tokens)
        made[-1].append(each)
        room -= size
    return made


def loss_of_rows(logits: Tensor, targets: Tensor, old: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """GRPO's clipped loss and the logprobs, of [C, vocabulary] logits, in float32."""
    logprobs = logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2) * weights).sum(), logprobs


class ChunkedLoss(torch.autograd.Function):
    """`loss_of` of hidden [C, width] @ head.T, with gradients made in the forward. It is the last function: what comes
    from behind it counts as 1."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, loss_of: Callable[..., Any], *columns: Tensor) -> Any:
        of_hidden, of_head = torch.empty_like(hidden), torch.zeros_like(head)
        loss, logprobs = hidden.new_zeros((), dtype=torch.float32), []
        for begin in range(0, len(hidden), CHUNK):
            rows = hidden[begin : begin + CHUNK]
            logits = (rows @ head.T).requires_grad_()
            with torch.enable_grad():
                own, scored = loss_of(logits, *(column[begin : begin + CHUNK] for column in columns))
            (of_logits,) = torch.autograd.grad(own, logits)
            torch.mm(of_logits, head, out=of_hidden[begin : begin + CHUNK])
            of_head.addmm_(of_logits.T, rows)
            loss += own.detach()
            logprobs.append(scored.detach())
            del logits, of_logits, own, scored
        ctx.made = of_hidden, of_head
        scored = torch.cat(logprobs)
        ctx.mark_non_differentiable(scored)
        return loss, scored

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        of_hidden, of_head = ctx.made
        del ctx.made  # so that the gradient is kept instead of copied
        return of_hidden, of_head, None, None, None, None


def built_in(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **more: Any) -> Any:
    """PyTorch's own FlashAttention over packed sequences, by transformers' interface: [1, heads, N, width] each."""
    ends, longest = more["cu_seq_lens_q"], more["max_length_q"]
    rows = (each.transpose(1, 2)[0] for each in (query, key, value))
    made = flash_attention(*rows, ends, ends, longest, longest, 0.0, True, False, scale=scaling)  # no dropout; causal
    return made[0][None], None


def attentions(packed: bool, device: str) -> list[str]:
    if device != "cuda":
        return ["sdpa"]
    if not packed:
        return ["sdpa", CUDNN]
    from transformers.utils import import_utils

    flash = {"flash_attention_3": import_utils.is_flash_attn_3_available()}
    flash["flash_attention_2"] = import_utils.is_flash_attn_2_available()
    return [*(name for name, there in flash.items() if there), BUILT_IN, "flex_attention"]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], object], device: str) -> float:
    """Seconds."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begin


class Peer:
    def __init__(self, folder: Path, device: str, *, packed: bool, compiled: bool) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(BUILT_IN, built_in)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.model.to(device).train()
        self.device, self.packed, self.compiled = device, packed, compiled
        self._use("sdpa", compiled=False)

    @property
    def name(self) -> str:
        how = ["packed" if self.packed else "padded", *["compiled"] * self.compiled, self.attention]
        return ", ".join(["transformers", *how])

    def lay_out(self, batch: Sequence[Row], budget: int) -> list[Part]:
        """Micro-batches of at most `budget` tokens. GRPO: the mean over sequences of their means."""
        return [self._part(rows, len(batch)) for rows in micro_batches(batch, budget, not self.packed)]

    def tune(self, parts: Sequence[Part]) -> None:
        """Choose the attention, and compile. Raises the last error if nothing runs."""
        seconds: dict[str, float] = {}
        failure: BaseException | None = None
        for name in attentions(self.packed, self.device):
            try:
                self._use(name, compiled=False)
                self._once(parts)
                seconds[name] = timed(lambda: self._once(parts), self.device)
            except Exception as error:
                failure = self._failed(name, error)
        for name in sorted(seconds, key=seconds.__getitem__):
            print(f"{name}: {seconds[name]:.3f} s without compilation", file=sys.stderr, flush=True)
        for name in sorted(seconds, key=seconds.__getitem__):
            try:
                self._use(name, compiled=self.compiled)
                return self._once(parts)
            except Exception as error:
                failure = self._failed(f"{name}, compiled", error)
        raise failure or RuntimeError("no attention")

    def forward_backward(self, parts: Sequence[Part]) -> tuple[float, list[Tensor]]:
        """The loss, and the logprobs of each micro-batch."""
        losses, logprobs = [], []
        if self._laid is not parts:
            self._laid, self._more = parts, [self._beside(part) for part in parts]
        with self._kernels():
            for part, more in zip(parts, self._more, strict=True):
                hidden = self._body(part.tokens, use_cache=False, **more).last_hidden_state.flatten(0, 1)
                loss, scored = ChunkedLoss.apply(
                    hidden[part.before], self.model.lm_head.weight, self._loss, *part.columns
                )
                loss.backward()
                losses.append(loss.detach())
                logprobs.append(scored)
        return float(sum(losses)), logprobs

    def drop_gradient(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def gradient_norm(self) -> float:
        """Norm of all gradients, in float32."""
        gradients = (each.grad for each in self.model.parameters() if each.grad is not None)
        squares = [torch.linalg.vector_norm(each, dtype=torch.float32).square() for each in gradients]
        return float(torch.stack(squares).sum().sqrt())

    def _once(self, parts: Sequence[Part]) -> None:
        self.forward_backward(parts)
        self.drop_gradient()

    def _failed(self, what: str, error: Exception) -> Exception:
        print(f"{what} does not run here: {type(error).__name__}: {error}"[:500], file=sys.stderr, flush=True)
        self.drop_gradient()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return error

    def _use(self, attention: str, *, compiled: bool) -> None:
        self.attention = attention
        self.model.set_attn_implementation("sdpa" if attention == CUDNN else attention)
        self._laid: Sequence[Part] | None = None  # what `_more` belongs to
        torch.compiler.reset()
        backend = "inductor" if self.device == "cuda" else "aot_eager"
        if compiled:
            torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than go on without compilation, unseen

        def made(function: Any) -> Any:
            return torch.compile(function, backend=backend) if compiled else function

        self._body, self._loss = made(self.model.model), made(loss_of_rows)

    def _kernels(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(CUDNN_FIRST, set_priority=True) if self.attention == CUDNN else contextlib.nullcontext()

    def _beside(self, part: Part) -> dict[str, Any]:
        """The model's arguments beside tokens: for packed sequences, what tells them from each other."""
        if part.positions is None:
            return {}
        sequence = torch.repeat_interleave(torch.tensor(part.lengths, device=self.device))  # [N] of each token
        more: dict[str, Any] = {"position_ids": part.positions}
        if self.attention == "flex_attention":
            from torch.nn.attention.flex_attention import create_block_mask

            def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return (query >= key) & (sequence[query] == sequence[key])

            count = len(sequence)
            return {**more, "attention_mask": create_block_mask(sees, None, None, count, count, self.device)}
        if self.attention == "sdpa":
            same = sequence[:, None] == sequence[None]
            return {**more, "attention_mask": same.tril()[None, None]}
        ends = torch.tensor([0, *np.cumsum(part.lengths)], dtype=torch.int32, device=self.device)
        longest = max(part.lengths)
        lengths = {"max_length_q": longest, "max_length_k": longest}
        return {**more, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, **lengths}

    def _part(self, rows: Sequence[Row], sequences: int) -> Part:
        lengths = [len(row.tokens) for row in rows]
        longest, count = max(lengths), sum(lengths)
        tokens = np.zeros((1, count) if self.packed else (len(rows), longest), np.int64)
        begins = [sum(lengths[:at]) if self.packed else at * longest for at in range(len(rows))]
        positions = np.concatenate([np.arange(length) for length in lengths])[None] if self.packed else None
        before, targets, old, weights = [], [], [], []
        for begin, row in zip(begins, rows, strict=True):
            size = len(row.tokens) - row.prompt
            tokens.reshape(-1)[begin : begin + len(row.tokens)] = row.tokens
            before.append(begin + np.arange(row.prompt - 1, len(row.tokens) - 1))
            targets.append(row.tokens[row.prompt :])
            old.append(row.old)
            weights.append(np.full(size, row.advantage / size / sequences, np.float32))
        there = [torch.from_numpy(np.concatenate(each)).to(self.device) for each in (before, targets, old, weights)]
        return Part(
            torch.from_numpy(tokens).to(self.device),
            None if positions is None else torch.from_numpy(positions).to(self.device),
            lengths, there[0], (there[1], there[2], there[3]),
        )  # fmt: skip
