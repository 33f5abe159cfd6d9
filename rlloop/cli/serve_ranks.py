"""`rlloop serve engine --layout tp=N ep=N pp=N`: the ranks of one engine on this host, each a process."""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlloop.errors import ConfigError, RlloopError
from rlloop.parallel.layout import Layout, keys_of, with_experts

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess
    from types import FrameType

    from rlloop.models import Model
    from rlloop.rollout import Engine
    from rlloop.rollout.engine.leader import LeadingEngine

AXES = {"tp": "each product", "ep": "the experts", "pp": "the layers"}  # what N ranks share
GRACE = 3.0  # seconds after a rank has ended in which the first may end by itself
STARTING = 600.0  # seconds without progress until the first step has ended, in which kernels are compiled
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
    heads = fewest_heads(config)  # the most ranks of tp, and so of ep
    most = min(layout.pp, config.num_layers), min(layout.tp, heads), min(layout.ep, heads)
    degrees = itertools.product(*(range(1, each + 1) for each in most))
    smaller = (Layout(pp=pp, tp=tp, ep=ep) for pp, tp, ep in degrees if tp % ep == 0)
    fitting = (each for each in smaller if each.world_size <= have and find(each) is None)
    best = keys_of(max(fitting, key=lambda each: (each.world_size, each.ep, each.tp), default=Layout()))
    raise ConfigError(
        f"--layout {keys_of(layout)} does not fit: {rule}; {f'give it {best}' if best else 'leave it out'}"
    )


@contextmanager
def engine_over(layout: Layout, args: argparse.Namespace) -> Iterator[tuple[Engine, Model]]:
    """(engine, the weights that follow a store) over the layout's processes, of which this is the first. If another one
    ends, or makes no progress for `args.rank_timeout` seconds, this one says which and ends, too."""
    from rlloop.models import load_model
    from rlloop.parallel.progress import SILENT, Watch, reported, rest, rests
    from rlloop.parallel.start import host_store, meet
    from rlloop.rollout.engine.leader import LeadingEngine

    if not SILENT <= args.rank_timeout < math.inf:
        raise ConfigError(f"--rank-timeout is {args.rank_timeout:g}; it must be seconds, at least {SILENT:g}")
    with ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, _terminate)
        stack.callback(signal.signal, signal.SIGTERM, before)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlloop-ranks-"))
        address = f"file://{Path(folder) / 'meeting'}"
        hosted = host_store("127.0.0.1")
        reports = f"tcp://127.0.0.1:{hosted.port}/{secrets.token_hex(16)}"  # a name that others cannot write to
        store = meet(reports)
        others: list[SpawnProcess] = []
        for rank in range(1, layout.world_size):
            process = multiprocessing.get_context("spawn").Process(
                target=_follow, args=(args, layout, address, reports, rank), name=f"rank {rank}", daemon=True
            )
            process.start()
            others.append(process)
            stack.callback(process.kill)
            stack.callback(process.join, 30)
        engines: list[LeadingEngine] = []
        closing, watch = threading.Event(), Watch(store, layout.world_size)

        def stalled() -> str:
            if rests():
                watch.reset()
            watch.look()
            if engines and engines[0].has_stepped:
                found = watch.stalled(args.rank_timeout, "--rank-timeout")
            else:
                found = watch.stalled(max(STARTING, args.rank_timeout), "before the first step had ended")
            return "" if found is None else f"rank {found[0]} of {watch.size}: {found[1]}"

        stack.enter_context(reported(store, 0))
        threading.Thread(target=_look_after, args=(others, closing, folder, stalled), name="ranks", daemon=True).start()
        try:
            make = stack.enter_context(_rank(args, layout, address, 0))
            # What a store's versions are written into.
            whole = None if args.store is None else load_model(args.model, dtype=args.dtype)
            engine = make(partial(LeadingEngine, weights=whole))
            stack.callback(_close, engine, others)
            rest()
            engines.append(engine)
            yield engine, whole or engine.model
        finally:
            closing.set()


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # all ranks end in order, and it has the exit code of a process that the signal ended


def _close(engine: Engine, others: list[SpawnProcess]) -> None:
    """End all ranks. Raises `RlloopError` if one has ended before."""
    if lost := _lost(others):
        raise RlloopError(lost)
    engine.close()


def _lost(others: list[SpawnProcess]) -> str:
    """The rank that has ended, in words; empty if none has."""
    gone = next((each for each in others if not each.is_alive()), None)
    if gone is None:
        return ""
    code = gone.exitcode or 0
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return f"{gone.name} of {len(others) + 1} ended {how}, and with it this engine"


def _look_after(others: list[SpawnProcess], closing: threading.Event, folder: str, stalled: Callable[[], str]) -> None:
    """End this process if another rank ends before it, or `stalled` names one: it may wait for that one in a copy."""
    from rlloop.parallel.progress import PERIOD

    said = ""
    while not (said or wait([each.sentinel for each in others], PERIOD)):
        said = stalled()
    if not said and closing.wait(GRACE):  # it ends by itself, perhaps with the same error
        return
    print(f"rlloop: {said or _lost(others)}", file=sys.stderr, flush=True)
    for each in others:
        each.kill()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _end_with_first() -> None:
    first = multiprocessing.parent_process()
    assert first is not None
    wait([first.sentinel])
    os._exit(1)


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


def _follow(args: argparse.Namespace, layout: Layout, address: str, reports: str, rank: int) -> None:
    from rlloop.parallel.progress import reported
    from rlloop.parallel.start import meet
    from rlloop.rollout import Engine
    from rlloop.rollout.engine.leader import follow

    threading.Thread(target=_end_with_first, name="first rank", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # the first rank ends the others, after its server
        signal.signal(number, signal.SIG_IGN)
    with reported(meet(reports), rank), _rank(args, layout, address, rank) as make:
        follow(make(Engine))
