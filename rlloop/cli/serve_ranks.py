"""`rlloop serve engine --layout tp=N ep=N pp=N`: the ranks of one engine on this host, each a process."""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlloop.errors import ConfigError
from rlloop.parallel.layout import Layout, keys_of, with_experts

if TYPE_CHECKING:
    from rlloop.models import Model
    from rlloop.rollout import Engine

AXES = {"tp": "each product", "ep": "the experts", "pp": "the layers"}  # what N ranks share
SETTINGS = ("page_size", "max_batch_tokens", "max_cache_tokens", "adapter_slots", "adapter_rank")


def layout_of(texts: list[str]) -> Layout:
    """The layout of `--layout tp=N ep=N pp=N`. Raises `ConfigError`."""
    degrees = dict.fromkeys(AXES, 1)
    for text in texts:
        axis, _, degree = text.partition("=")
        if axis not in AXES or not degree.isdecimal() or int(degree) < 1:
            shared = ", ".join(f"{axis}=N ({what})" for axis, what in AXES.items())
            raise ConfigError(f"--layout is {text!r}; it must be degrees of N ranks that share something: {shared}")
        degrees[axis] = int(degree)
    tp, ep = degrees["tp"], degrees["ep"]
    if tp % ep:
        fitting = Layout(tp=ep, ep=ep) if tp == 1 else with_experts(Layout(tp=tp), ep)
        raise ConfigError(
            f"--layout has ep={ep} and tp={tp}, and it is the ranks of tp that divide the experts; give it "
            f"{keys_of(replace(fitting, pp=degrees['pp']))}"
        )
    return Layout(**degrees)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of an engine."""
    return {name: getattr(args, name) for name in SETTINGS}


def check_layout(layout: Layout, args: argparse.Namespace) -> None:
    """Raises `ConfigError` for a layout that the model cannot have, or of more ranks than GPUs, before they start."""
    import torch

    from rlloop.models.config import read_config
    from rlloop.models.placement import fault, fewest_heads
    from rlloop.models.weights import usable_device

    config, kind = read_config(args.model), usable_device(args.device).type
    find, have = partial(fault, config, "rollout.layout"), torch.cuda.device_count() if kind == "cuda" else math.inf
    if (found := find(layout)) is not None:
        rule = found[0]
    elif layout.world_size > have:
        rule = f"there are {layout.world_size} ranks, more than this machine's GPUs ({have})"
    else:
        return
    degrees = (range(1, layout.pp + 1), range(1, min(layout.tp, fewest_heads(config)) + 1), range(1, layout.ep + 1))
    smaller = (Layout(pp=pp, tp=tp, ep=ep) for pp, tp, ep in itertools.product(*degrees) if tp % ep == 0)
    fitting = (each for each in smaller if each.world_size <= have and find(each) is None)
    best = keys_of(max(fitting, key=lambda each: (each.world_size, each.ep, each.tp), default=Layout()))
    raise ConfigError(
        f"--layout {keys_of(layout)} does not fit: {rule}; {f'give it {best}' if best else 'leave it out'}"
    )


@contextmanager
def engine_over(layout: Layout, args: argparse.Namespace) -> Iterator[tuple[Engine, Model]]:
    """(engine, the weights that follow a store) over the layout's processes, of which this is the first."""
    from rlloop.models import load_model
    from rlloop.rollout.engine.leader import LeadingEngine

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlloop-ranks-"))
        address = f"file://{Path(folder) / 'meeting'}"
        for rank in range(1, layout.world_size):
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
    device = Place(rank, layout.world_size, address, rank).device(torch.device(args.device).type)
    with process_group(device, address, rank, layout.world_size):
        model = load_model(args.model, dtype=args.dtype, context=join(device, layout))
        yield lambda kind: kind(model, **settings_of(args))


def _follow(args: argparse.Namespace, layout: Layout, address: str, rank: int) -> None:
    import signal

    from rlloop.rollout import Engine
    from rlloop.rollout.engine.leader import follow

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank ends the others, after its server
    with _rank(args, layout, address, rank) as make:
        follow(make(Engine))
