"""`rlloop serve engine|relay|trainer|proxy|api`: the servers. `serve_options` has their command lines."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from rlloop.cli.serve_api import api
from rlloop.cli.serve_ranks import check_layout, engine_over, layout_of, settings_of
from rlloop.config.fleet import is_address
from rlloop.config.rollout import EngineKind
from rlloop.errors import ConfigError
from rlloop.web.clients import async_client
from rlloop.web.server import Listen, is_loopback, read_token, serve

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from rlloop.config.model import LoraSection
    from rlloop.parallel.layout import Layout
    from rlloop.rollout.engine.service import EngineService
    from rlloop.rollout.fleet.engine_server import EngineServer, Follower
    from rlloop.rollout.fleet.weight_follower import Source


SWITCH_SECONDS = 0.0005  # that the engine's thread may wait while streams are written; Python's own is ten times that


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code. `args`: of `rlloop.cli.serve_options`."""
    with ExitStack() as stack:
        {"engine": _engine, "relay": _relay, "trainer": _trainer, "proxy": _proxy, "api": api}[args.kind](args, stack)
    return 0


def _listen(args: argparse.Namespace) -> Listen:
    token = read_token(args.token_file)
    return Listen(args.host, args.port, token, args.certificate, args.key, args.max_body)


def _create_folder(folder: Path, option: str) -> Path:
    """Create the folder if it does not exist. Raises `ConfigError`, which names `option`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: the folder {folder} cannot be created: {error.strerror}") from None
    return folder


def _create_token(file: Path) -> Path:
    """Write a new token to the file if it does not exist."""
    from rlloop.sync.manifest import write_secret

    try:
        with contextlib.suppress(FileExistsError):
            write_secret(file, secrets.token_hex(32).encode() + b"\n")
    except OSError as error:
        raise ConfigError(
            f"the token {file} cannot be written: {error.strerror}; choose another --signing-key"
        ) from None
    print(f"rlloop trainer: the fleet's token is in {file}; give it to engines and relays by --token-file", flush=True)
    return file


def _announce(kind: str) -> Callable[[str], None]:
    return lambda url: print(f"rlloop {kind}: {url}", flush=True)


# ------------------------------------------------------------------------------------------------ engine


def _engine(args: argparse.Namespace, stack: ExitStack) -> None:
    listen = _listen(args)
    _check_addresses(args)
    source = _source(args, listen.token)
    store = None if source is None else source.open()
    layout = layout_of(args.layout)
    lora, adapters = _followed_adapter(args, layout), _named_adapters(args)
    if args.quantize != "none" and (args.engine is not EngineKind.embedded or layout.world_size > 1 or lora):
        raise ConfigError(
            "--quantize is for --engine embedded on one rank; leave --engine, --layout and --lora-rank out"
        )
    if not (args.model / "config.json").is_file():
        raise ConfigError(f"--model {args.model} has no config.json; it must be a Hugging Face checkpoint folder")

    import torch  # slow to import, so after the checks

    from rlloop.launch.make import with_lora
    from rlloop.models import load_model
    from rlloop.rollout import Engine, vllm
    from rlloop.rollout.engine.service import EngineService
    from rlloop.rollout.fleet.weight_follower import ReplicaFollower
    from rlloop.sync.live import LiveTarget, named_weights
    from rlloop.sync.manifest import public_key
    from rlloop.sync.replica import Replica

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if layout.world_size > 1:
        if args.engine is not EngineKind.embedded:
            raise ConfigError(
                "--layout is for --engine embedded; leave one of the two out (in runs rollout.layout is for vLLM, too)"
            )
        check_layout(layout, args)
        engine, model = stack.enter_context(engine_over(layout, args))
    else:
        model = load_model(args.model, dtype=args.dtype, device=args.device, quantize=args.quantize)
        model = model if lora is None else with_lora(model, lora, seed=0)
        if args.engine is EngineKind.embedded:
            engine = Engine(model, **settings_of(args))
        else:
            engine = vllm.build(args.engine, model, **settings_of(args))
    if isinstance(engine, Engine) and not args.no_warm_up and (recorded := engine.prepare()):
        print(f"rlloop engine: {recorded} steps recorded as CUDA graphs", flush=True)
    service = EngineService(engine, max_waiting=args.max_waiting)
    for name, folder in adapters.items():
        service.load_adapter(name, folder)
    follower = None
    if source is not None and store is not None:
        target = LiveTarget(named_weights(model).items(), engine.set_version, service.change_weights)
        replica = Replica(store, public_key(source.public_key), target, run_id=source.run_id, any_run=source.any_run)
        follower = ReplicaFollower(replica, service, interval=args.interval)
        stack.callback(follower.close)
    stack.callback(service.close)  # runs before the follower's: it ends a weight change that waits in a pause
    _serve_member("engine", args, listen, args.model, service, follower, args.model_name)


def _followed_adapter(args: argparse.Namespace, layout: Layout) -> LoraSection | None:
    """The adapter of `--lora-rank`, zeros until the first version; None: whole weights are followed."""
    if args.lora_rank == 0:
        return None
    if args.store is None:
        raise ConfigError(f"--lora-rank {args.lora_rank} follows an adapter that trains, so it needs --store")
    if args.engine is not EngineKind.embedded or layout.world_size > 1:
        raise ConfigError("--lora-rank is for --engine embedded on one rank; leave --engine and --layout out")
    from rlloop.config.model import LoraSection

    return LoraSection(rank=args.lora_rank, targets=args.lora_targets)


def _named_adapters(args: argparse.Namespace) -> dict[str, Path]:
    """The folders of `--adapter` by name."""
    folders: dict[str, Path] = {}
    for text in args.adapter:
        name, _, folder = text.partition("=")
        if not name or not folder or name == args.model_name:
            raise ConfigError(f"--adapter is {text!r}; it must be NAME=FOLDER, of another name than the base's")
        folders[name] = Path(folder)
    if folders and args.engine is EngineKind.vllm_stock:
        raise ConfigError("--adapter is for rlloop's own model: set --engine embedded or vllm")
    if args.adapter_root is not None and not args.adapter_root.is_dir():
        raise ConfigError(f"--adapter-root {args.adapter_root} is not a folder")
    return folders


def _serve_member(
    kind: str,
    args: argparse.Namespace,
    listen: Listen,
    folder: Path,
    service: EngineService,
    follower: Follower | None,
    model: str,
    beside: Sequence[BaseRoute] = (),
) -> None:
    """Serve as an engine until a signal, joined to a trainer if `--join` is given."""
    from rlloop.models.vision_processor import ImageProcessor
    from rlloop.rollout.fleet.engine_server import EngineServer
    from rlloop.rollout.fleet.text import tokenizer_of

    address: list[str] = []
    joining = None if args.join is None else _Joining(args, listen.token, address)
    server = EngineServer(
        service,
        name=f"{socket.gethostname()}:{folder.name}",
        region=args.region,
        model=model,
        tokenizer=tokenizer_of(folder),
        images=ImageProcessor.if_any(folder) if kind == "engine" else None,
        logprobs_mode=args.logprobs_mode,
        follower=follower,
        lifespan=None if joining is None else joining.lifespan,
        beside=beside,
        adapter_root=getattr(args, "adapter_root", None),
        root=folder,
    )
    sys.setswitchinterval(SWITCH_SECONDS)

    def announce(url: str) -> None:
        address.append(url)
        _announce(kind)(url)

    serve(server.app, listen, announce)


def _check_addresses(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for addresses that cannot be reached."""
    for option in ("upstream", "relay", "join", "advertise"):
        if (url := getattr(args, option, None)) is not None and not is_address(url):
            raise ConfigError(f"--{option} is {url!r}; it must be an address such as http://127.0.0.1:7000")
    if args.join is not None and args.advertise is None and args.host in ("0.0.0.0", "::"):
        raise ConfigError(f"--join with --host {args.host} needs --advertise: the address that the trainer reaches")


def _source(args: argparse.Namespace, token: str | None) -> Source | None:
    """The source of weights by `--store` and related options, if any. Raises `ConfigError`."""
    if (args.store is None) != (args.public_key is None):
        raise ConfigError("--store and --public-key belong together: only versions signed by that key are accepted")
    if args.run_id is not None and args.any_run:
        raise ConfigError(f"--run-id {args.run_id} names one run, and --any-run follows all; give only one of the two")
    if args.store is None:
        if args.relay is not None:
            raise ConfigError("--relay needs --store: the store that the relay reads, used directly if the relay fails")
        return None
    from rlloop.rollout.fleet.weight_follower import Source
    from rlloop.sync.manifest import public_hex, public_key

    store = args.store if "://" in args.store else str(Path(args.store).absolute())
    key = Path(args.public_key).read_text() if Path(args.public_key).is_file() else args.public_key
    ca_file = None if args.ca_file is None else str(args.ca_file.absolute())
    return Source(store, public_hex(public_key(key)), args.relay, token, ca_file, args.run_id, args.any_run)


class _Joining:
    """Joins this engine to a trainer, repeatedly as a heartbeat, and leaves at the end."""

    EVERY = 3.0  # seconds

    def __init__(self, args: argparse.Namespace, token: str | None, address: list[str]) -> None:
        self._given, self._address = args, address
        self._http = async_client(token=token, ca_file=args.ca_file, most=1 << 20, base_url=args.join, timeout=5.0)

    @asynccontextmanager
    async def lifespan(self, server: EngineServer) -> AsyncIterator[None]:
        task = asyncio.create_task(self._announce_repeatedly())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(httpx.HTTPError):
                await self._http.post("/fleet/leave", json=self._self())
            await self._http.aclose()

    async def _announce_repeatedly(self) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):  # the trainer may start later, or restart
                reply = await self._http.post("/fleet/join", json=self._self())
                if reply.status_code in (400, 401):
                    print(f"rlloop engine: {self._given.join} refuses this engine: {reply.text}", flush=True)
            await asyncio.sleep(self.EVERY)

    def _self(self) -> dict[str, str]:
        return {"url": self._given.advertise or self._address[0], "region": self._given.region}


# ------------------------------------------------------------------------------------------------ relay


def _relay(args: argparse.Namespace, stack: ExitStack) -> None:
    from rlloop.rollout.fleet.weight_follower import open_served
    from rlloop.sync.http import relay_app
    from rlloop.sync.relay import CachingStore

    listen = _listen(args)
    upstream = open_served(args.upstream, listen.token, args.ca_file)
    cache = _create_folder(args.cache, f"--cache {args.cache}")
    serve(relay_app(CachingStore(upstream, cache, args.cache_bytes)), listen, _announce("relay"))


# ------------------------------------------------------------------------------------------------ trainer


def _trainer(args: argparse.Namespace, stack: ExitStack) -> None:
    from rlloop.config.fleet import FleetConfig, FleetKind
    from rlloop.launch.regions import open_pool
    from rlloop.rollout.fleet.external_trainer import Publishing
    from rlloop.rollout.fleet.trainer_server import trainer_app
    from rlloop.sync.manifest import load_or_make_key
    from rlloop.sync.store import open_store

    engines: dict[str, list[str]] = {}
    for text in args.engine:
        region, _, url = text.partition("=")
        if not url:
            raise ConfigError(f"--engine is {text!r}; it must be REGION=URL, such as eu=http://10.0.0.2:8000")
        engines.setdefault(region, []).append(url)
    ca_file = None if args.ca_file is None else str(args.ca_file)
    fleet = FleetConfig(FleetKind.regions, engines=engines, patience=args.patience, ca_file=ca_file)
    _create_folder(args.signing_key.parent, f"--signing-key {args.signing_key}")
    if read_token(args.token_file) is None:  # this server signs clients' weights, so a token is required
        args.token_file = _create_token(args.signing_key.with_name(args.signing_key.name + ".token"))
    listen = _listen(args)
    if "://" not in args.store:
        _create_folder(Path(args.store), f"--store {args.store}")
    store = open_store(args.store)
    publishing = Publishing(store, load_or_make_key(args.signing_key), args.run_id, args.anchor_every)
    pool = open_pool(fleet, _print_event, token=listen.token, holder=args.run_id, term=publishing.term)
    stack.callback(pool.close)
    app = trainer_app(store, pool, publishing.squash, publishing.bound_to(pool))
    serve(app, listen, _announce("trainer"))


def _print_event(event: Any) -> None:
    why = f": {event['why']}" if event.get("why") else ""
    print(f"rlloop trainer: {event['event']} {event['engine']}{why}", flush=True)


# ------------------------------------------------------------------------------------------------ proxy


def _proxy(args: argparse.Namespace, stack: ExitStack) -> None:
    from rlloop.rollout.vllm.proxy import proxy_app

    listen = _listen(args)
    _check_addresses(args)
    upstream_host = urlsplit(args.upstream).hostname or ""
    if not is_loopback(upstream_host):
        raise ConfigError(
            f"--upstream is {args.upstream!r}; it must be on loopback: start vLLM on this machine with its --host "
            "127.0.0.1. Its routes for weights, caches and pausing answer anyone who reaches the port directly"
        )
    source = _source(args, listen.token)
    if source is None and args.join is not None:
        raise ConfigError("--join needs --store: only an engine that follows the trainer's weights can join its fleet")
    key = None if args.upstream_key_file is None else read_token(args.upstream_key_file)
    through = async_client(token=key, most=None, base_url=args.upstream, timeout=args.timeout)
    if source is None:
        serve(proxy_app(through), listen, _announce("proxy"))
        return

    from starlette.routing import Mount

    from rlloop.rollout.fleet.weight_follower import ReplicaFollower
    from rlloop.rollout.vllm.proxy import BESIDE
    from rlloop.rollout.vllm.remote_vllm import ServedEngine, ServedReplica, ServedService
    from rlloop.rollout.vllm.upstream import Upstream, facts_of

    upstream = Upstream(args.upstream, key, args.timeout)
    stack.callback(upstream.close)
    facts = facts_of(upstream)
    engine = ServedEngine(upstream, facts)
    service = ServedService(engine, max_waiting=args.max_waiting)
    replica = ServedReplica(upstream, engine, source, service.change_weights)
    follower = ReplicaFollower(replica, service, interval=args.interval)
    stack.callback(follower.close)
    stack.callback(service.close)
    model = args.model_name or upstream.models()[0]
    beside = [Mount("/", proxy_app(through, BESIDE))]
    _serve_member("proxy", args, listen, Path(facts.folder), service, follower, model, beside)
