"""`rlloop serve engine --layout tp=N`: the ranks of one engine on this host, each a process."""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlloop.errors import ConfigError
from rlloop.parallel.layout import Layout

if TYPE_CHECKING:
    from rlloop.models import Model
    from rlloop.rollout import Engine

AXES = ("tp",)
SETTINGS = ("page_size", "max_batch_tokens", "max_cache_tokens", "adapter_slots", "adapter_rank")


def layout_of(texts: list[str]) -> Layout:
    """The layout of `--layout tp=N`. Raises `ConfigError`."""
    degrees: dict[str, int] = {}
    for text in texts:
        axis, _, degree = text.partition("=")
        if axis not in AXES or not degree.isdecimal():
            raise ConfigError(f"--layout is {text!r}; it must be tp=N, N ranks that share each product")
        degrees[axis] = int(degree)
    return Layout(**degrees)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of an engine."""
    return {name: getattr(args, name) for name in SETTINGS}


def check_layout(layout: Layout, args: argparse.Namespace) -> None:
    """Raises `ConfigError` for more ranks than the model has heads, or the machine GPUs, before they are started."""
    import torch

    from rlloop.models.config import read_config
    from rlloop.models.placement import fewest_heads
    from rlloop.models.weights import usable_device

    config, kind = read_config(args.model), usable_device(args.device).type
    limits = [("the model's heads in a layer", fewest_heads(config))]
    if kind == "cuda":
        limits.append(("this machine's GPUs", torch.cuda.device_count()))
    for what, most in limits:
        if layout.tp > most:
            raise ConfigError(f"--layout is tp={layout.tp}, more than {what} ({most}); give it tp={most} at most")


@contextmanager
def engine_over(layout: Layout, args: argparse.Namespace) -> Iterator[tuple[Engine, Model]]:
    """(engine, the weights that follow a store) over `layout.tp` processes, of which this is the first."""
    from rlloop.models import load_model
    from rlloop.rollout.engine.leader import LeadingEngine

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlloop-ranks-"))
        address = f"file://{Path(folder) / 'meeting'}"
        for rank in range(1, layout.tp):
            process = multiprocessing.get_context("spawn").Process(
                target=_follow, args=(args, layout, address, rank), name=f"rank {rank}", daemon=True
            )
            process.start()
            stack.callback(process.join, 30)
        make = stack.enter_context(_rank(args, layout, address, 0))
        # What a store's versions are written into.
        whole = None if args.store is None else load_model(args.model, dtype=args.dtype)
        engine = make(partial(LeadingEngine, weights=whole))
        stack.callback(engine.close)
        yield engine, whole or engine.model


@contextmanager
def _rank(args: argparse.Namespace, layout: Layout, address: str, rank: int) -> Iterator[Callable[[Any], Any]]:
    """A factory of this rank's engine, of a class like `Engine`."""
    import torch

    from rlloop.models import load_model
    from rlloop.models.weights import usable_device
    from rlloop.parallel.context import join
    from rlloop.parallel.start import Place, process_group

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    usable_device(args.device)
    device = Place(rank, layout.tp, address, rank).device(torch.device(args.device).type)
    with process_group(device, address, rank, layout.tp):
        model = load_model(args.model, dtype=args.dtype, context=join(device, layout))
        yield lambda kind: kind(model, **settings_of(args))


def _follow(args: argparse.Namespace, layout: Layout, address: str, rank: int) -> None:
    import signal

    from rlloop.rollout import Engine
    from rlloop.rollout.engine.leader import follow

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank ends the others, after its server
    with _rank(args, layout, address, rank) as make:
        follow(make(Engine))
