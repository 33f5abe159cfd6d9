"""`rlloop serve engine|relay|trainer|proxy`: the servers of a fleet, from their command lines."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from rlloop.config.fleet import is_address
from rlloop.config.rollout import EngineKind
from rlloop.errors import ConfigError
from rlloop.web.clients import async_client
from rlloop.web.server import TOKEN_VARIABLE, Listen, is_loopback, read_token, serve

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from rlloop.rollout.engine.service import EngineService
    from rlloop.rollout.fleet.engine_server import EngineServer, Follower
    from rlloop.rollout.fleet.weight_follower import Source

DESCRIPTION = """\
Servers of a fleet. Each prints its address as soon as it listens, and ends with SIGINT or SIGTERM.

  engine    samples over HTTP: OpenAI's completions and chat, and rlloop's own exact route; follows a store of weights
  relay     a region's cache of weights: what crossed the wide network once is not fetched again
  trainer   the trainer's end, for trainers that are not rlloop's: publish weights, sample from the fleet.
            (`rlloop train fleet=regions` has its own)
  proxy     in front of a `vllm serve` on loopback: lets completions through, and no route that changes anything; with
            --store it has vLLM follow weights, and is an engine like any other (docs/vllm.md)

Off loopback a token is required, on every route: --token-file, or the environment variable RLLOOP_TOKEN. A trainer
always has one: without either it makes KEY.token, beside its signing key.
"""


def command(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rlloop serve", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="engine|relay|trainer|proxy")
    added = {"engine": _engine_options, "relay": _relay_options, "trainer": _trainer_options, "proxy": _proxy_options}
    for kind, add in added.items():
        options = kinds.add_parser(kind, formatter_class=_Help, allow_abbrev=False)
        _listen_options(options)
        add(options)
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        {"engine": _engine, "relay": _relay, "trainer": _trainer, "proxy": _proxy}[given.kind](given, stack)
    return 0


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults beside the options that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, []) else super()._get_help_string(action)


def _listen_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--host", default="127.0.0.1", help="address to listen on")
    options.add_argument("--port", type=int, default=0, help="0: any free one")
    options.add_argument("--token-file", type=Path, help=f"what every request must bring; else ${TOKEN_VARIABLE}")
    options.add_argument("--certificate", type=Path, help="PEM; with --key, the server speaks TLS")
    options.add_argument("--key", type=Path, help="PEM")
    options.add_argument("--ca-file", type=Path, help="PEM: whose certificates other servers must have")
    options.add_argument("--max-body", type=int, default=64 << 20, help="bytes of one request")


def _listen(given: argparse.Namespace) -> Listen:
    token = read_token(given.token_file)
    return Listen(given.host, given.port, token, given.certificate, given.key, given.max_body)


def _made(folder: Path, option: str) -> Path:
    """The folder, which is made where it is new. Raises `ConfigError` where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: the folder {folder} cannot be made: {error.strerror}") from None
    return folder


def _made_token(file: Path) -> Path:
    """The file, which gets a new token where it is new."""
    with contextlib.suppress(FileExistsError), open(file, "x", opener=_privately) as new:
        new.write(secrets.token_hex(32) + "\n")
    print(f"rlloop trainer: the fleet's token is in {file}: engines and relays take it by --token-file", flush=True)
    return file


def _privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _announce(kind: str) -> Callable[[str], None]:
    return lambda url: print(f"rlloop {kind}: {url}", flush=True)


# ------------------------------------------------------------------------------------------------ engine


def _engine_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--model", type=Path, required=True, help="Hugging Face folder: architecture and tokenizer")
    options.add_argument("--dtype", default="float32", help="as the trainer's model.dtype")
    options.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    options.add_argument("--threads", type=int, help="of the CPU; default: all")
    options.add_argument(
        "--engine", choices=list(EngineKind), type=EngineKind, default=EngineKind.embedded, help="what samples"
    )
    options.add_argument("--page-size", type=int, default=16, help="tokens of a cache block")
    options.add_argument("--max-batch-tokens", type=int, default=8192, help="computed in one step")
    options.add_argument("--max-cache-tokens", type=int, help="of the key-value cache; default: what fits")
    _member_options(options, "rlloop")


def _member_options(options: argparse.ArgumentParser, name: str | None) -> None:
    """Of whatever follows a store of weights and serves as an engine."""
    options.add_argument("--model-name", default=name, help="what OpenAI's clients call it")
    options.add_argument(
        "--logprobs-mode",
        choices=["processed_logprobs", "raw_logprobs"],
        default="processed_logprobs",
        help="which logprobs OpenAI's clients get: of the distribution sampled from, or at temperature 1, untruncated",
    )
    options.add_argument("--max-waiting", type=int, default=4096, help="requests above which others are refused")
    options.add_argument("--store", metavar="URL", help="follow the weights of this store (a folder, http, s3, ...)")
    options.add_argument("--relay", metavar="URL", help="read that store through this relay; around it where it fails")
    options.add_argument("--public-key", metavar="HEX|FILE", help="whose versions are taken; needed with --store")
    options.add_argument("--run-id", help="the only run whose versions are taken; default: the first that is met")
    options.add_argument("--any-run", action="store_true", help="follow each run that comes, not one alone")
    options.add_argument("--interval", type=float, default=2.0, help="seconds between looks at the store")
    options.add_argument("--join", metavar="URL", help="announce itself to this trainer")
    options.add_argument("--region", default="home", help="its name there")
    options.add_argument("--advertise", metavar="URL", help="where the trainer reaches it; default: where it listens")


def _engine(given: argparse.Namespace, stack: ExitStack) -> None:
    listen = _listen(given)
    _check_addresses(given)
    source = _source(given, listen.token)
    store = None if source is None else source.open()
    if not (given.model / "config.json").is_file():
        raise ConfigError(f"--model {given.model} has no config.json; it must be a Hugging Face checkpoint folder")

    import torch  # a second of imports, after what can be refused without them

    from rlloop.models import load_model
    from rlloop.rollout import Engine, vllm
    from rlloop.rollout.engine.service import EngineService
    from rlloop.rollout.fleet.weight_follower import ReplicaFollower
    from rlloop.sync.live import LiveTarget, named_weights
    from rlloop.sync.manifest import public_key
    from rlloop.sync.replica import Replica

    if given.threads is not None:
        torch.set_num_threads(given.threads)
    model = load_model(given.model, dtype=given.dtype, device=given.device)
    make = Engine if given.engine is EngineKind.embedded else partial(vllm.build, given.engine)
    engine = make(
        model,
        page_size=given.page_size,
        max_batch_tokens=given.max_batch_tokens,
        max_cache_tokens=given.max_cache_tokens,
    )
    service = EngineService(engine, max_waiting=given.max_waiting)
    follower = None
    if source is not None and store is not None:
        target = LiveTarget(named_weights(model).items(), engine.set_version, service.change_weights)
        replica = Replica(store, public_key(source.public_key), target, run_id=source.run_id, any_run=source.any_run)
        follower = ReplicaFollower(replica, service, interval=given.interval)
        stack.callback(follower.close)
    stack.callback(service.close)  # before the follower's: a change of weights that waits in a pause ends with it
    _serve_member("engine", given, listen, given.model, service, follower, given.model_name)


def _serve_member(
    kind: str,
    given: argparse.Namespace,
    listen: Listen,
    folder: Path,
    service: EngineService,
    follower: Follower | None,
    model: str,
    beside: Sequence[BaseRoute] = (),
) -> None:
    """Serves as an engine, joined to a trainer if `--join` says so, until a signal ends it."""
    from rlloop.rollout.fleet.engine_server import EngineServer
    from rlloop.rollout.fleet.text import tokenizer_of

    address: list[str] = []
    joining = None if given.join is None else _Joining(given, listen.token, address)
    server = EngineServer(
        service,
        name=f"{socket.gethostname()}:{folder.name}",
        region=given.region,
        model=model,
        tokenizer=tokenizer_of(folder),
        logprobs_mode=given.logprobs_mode,
        follower=follower,
        lifespan=None if joining is None else joining.lifespan,
        beside=beside,
    )

    def announce(url: str) -> None:
        address.append(url)
        _announce(kind)(url)

    serve(server.app, listen, announce)


def _check_addresses(given: argparse.Namespace) -> None:
    """Raises `ConfigError` for what nobody could reach."""
    for option in ("upstream", "relay", "join", "advertise"):
        if (url := getattr(given, option, None)) is not None and not is_address(url):
            raise ConfigError(f"--{option} is {url!r}; it must be an address such as http://127.0.0.1:7000")
    if given.join is not None and given.advertise is None and given.host in ("0.0.0.0", "::"):
        raise ConfigError(f"--join with --host {given.host} needs --advertise: the address that the trainer reaches")


def _source(given: argparse.Namespace, token: str | None) -> Source | None:
    """What `--store` and its companions say. Raises `ConfigError`."""
    if (given.store is None) != (given.public_key is None):
        raise ConfigError("--store and --public-key belong together: versions are only taken from who signed them")
    if given.run_id is not None and given.any_run:
        raise ConfigError(f"--run-id {given.run_id} says one run and --any-run each that comes; leave one of them out")
    if given.store is None:
        if given.relay is not None:
            raise ConfigError("--relay needs --store: the store that the relay reads, for when the relay fails")
        return None
    from rlloop.rollout.fleet.weight_follower import Source
    from rlloop.sync.manifest import public_hex, public_key

    store = given.store if "://" in given.store else str(Path(given.store).absolute())
    key = Path(given.public_key).read_text() if Path(given.public_key).is_file() else given.public_key
    ca_file = None if given.ca_file is None else str(given.ca_file.absolute())
    return Source(store, public_hex(public_key(key)), given.relay, token, ca_file, given.run_id, given.any_run)


class _Joining:
    """Tells a trainer again and again that this engine is there; at the end, that it goes."""

    EVERY = 3.0  # seconds

    def __init__(self, given: argparse.Namespace, token: str | None, address: list[str]) -> None:
        self._given, self._address = given, address
        self._http = async_client(token=token, ca_file=given.ca_file, most=1 << 20, base_url=given.join, timeout=5.0)

    @asynccontextmanager
    async def lifespan(self, server: EngineServer) -> AsyncIterator[None]:
        task = asyncio.create_task(self._again_and_again())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(httpx.HTTPError):
                await self._http.post("/fleet/leave", json=self._self())
            await self._http.aclose()

    async def _again_and_again(self) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):  # it may come later, or be starting anew
                reply = await self._http.post("/fleet/join", json=self._self())
                if reply.status_code in (400, 401):
                    print(f"rlloop engine: {self._given.join} refuses it: {reply.text}", flush=True)
            await asyncio.sleep(self.EVERY)

    def _self(self) -> dict[str, str]:
        return {"url": self._given.advertise or self._address[0], "region": self._given.region}


# ------------------------------------------------------------------------------------------------ relay


def _relay_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--upstream", metavar="URL", required=True, help="the store: the trainer's address, s3://...")
    options.add_argument("--cache", type=Path, required=True, help="folder for what was fetched")
    options.add_argument("--cache-bytes", type=int, default=16 << 30, help="what the folder may hold")


def _relay(given: argparse.Namespace, stack: ExitStack) -> None:
    from rlloop.rollout.fleet.weight_follower import open_served
    from rlloop.sync.http import relay_app
    from rlloop.sync.relay import CachingStore

    listen = _listen(given)
    upstream = open_served(given.upstream, listen.token, given.ca_file)
    cache = _made(given.cache, f"--cache {given.cache}")
    serve(relay_app(CachingStore(upstream, cache, given.cache_bytes)), listen, _announce("relay"))


# ------------------------------------------------------------------------------------------------ trainer


def _trainer_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--store", required=True, help="where versions are published: a folder or an fsspec URL")
    options.add_argument("--signing-key", type=Path, required=True, help="Ed25519 PEM; made when it is not there")
    options.add_argument("--run-id", required=True, help="name of the run, in every version's")
    options.add_argument("--anchor-every", type=int, default=50, help="versions between whole copies")
    options.add_argument("--engine", action="append", default=[], metavar="REGION=URL", help="engines may also join")
    options.add_argument("--patience", type=float, default=120.0, help="seconds to wait for an engine")
    options.set_defaults(max_body=16 << 30)


def _trainer(given: argparse.Namespace, stack: ExitStack) -> None:
    from rlloop.config.fleet import FleetConfig, FleetKind
    from rlloop.launch.regions import open_pool
    from rlloop.rollout.fleet.external_trainer import Publishing
    from rlloop.rollout.fleet.trainer_server import trainer_app
    from rlloop.sync.manifest import load_or_make_key
    from rlloop.sync.store import open_store

    engines: dict[str, list[str]] = {}
    for text in given.engine:
        region, _, url = text.partition("=")
        if not url:
            raise ConfigError(f"--engine is {text!r}; it must be REGION=URL, such as eu=http://10.0.0.2:8000")
        engines.setdefault(region, []).append(url)
    ca_file = None if given.ca_file is None else str(given.ca_file)
    fleet = FleetConfig(FleetKind.regions, engines=engines, patience=given.patience, ca_file=ca_file)
    _made(given.signing_key.parent, f"--signing-key {given.signing_key}")
    if read_token(given.token_file) is None:  # whoever publishes here has weights signed
        given.token_file = _made_token(given.signing_key.with_name(given.signing_key.name + ".token"))
    listen = _listen(given)
    if "://" not in given.store:
        _made(Path(given.store), f"--store {given.store}")
    store = open_store(given.store)
    publishing = Publishing(store, load_or_make_key(given.signing_key), given.run_id, given.anchor_every)
    pool = open_pool(fleet, _print_event, token=listen.token, holder=given.run_id, term=publishing.term)
    stack.callback(pool.close)
    app = trainer_app(store, pool, publishing.squash, publishing.bound_to(pool))
    serve(app, listen, _announce("trainer"))


def _print_event(event: Any) -> None:
    why = f": {event['why']}" if event.get("why") else ""
    print(f"rlloop trainer: {event['event']} {event['engine']}{why}", flush=True)


# ------------------------------------------------------------------------------------------------ proxy


def _proxy_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--upstream", metavar="URL", required=True, help="the vLLM server, on loopback")
    options.add_argument("--upstream-key-file", type=Path, help="holds the key that vLLM was started with (--api-key)")
    options.add_argument("--timeout", type=float, default=600.0, help="seconds that vLLM may take for an answer")
    _member_options(options, None)


def _proxy(given: argparse.Namespace, stack: ExitStack) -> None:
    from rlloop.rollout.vllm.proxy import proxy_app

    listen = _listen(given)
    _check_addresses(given)
    upstream_host = urlsplit(given.upstream).hostname or ""
    if not is_loopback(upstream_host):
        raise ConfigError(
            f"--upstream is {given.upstream!r}; it must be on loopback: start vLLM on this machine with its --host "
            "127.0.0.1. Its routes for weights, caches and pausing answer whoever reaches the port, past any proxy"
        )
    source = _source(given, listen.token)
    if source is None and given.join is not None:
        raise ConfigError("--join needs --store: only what follows the trainer's weights is an engine of its fleet")
    key = None if given.upstream_key_file is None else read_token(given.upstream_key_file)
    through = async_client(token=key, most=None, base_url=given.upstream, timeout=given.timeout)
    if source is None:
        serve(proxy_app(through), listen, _announce("proxy"))
        return

    from starlette.routing import Mount

    from rlloop.rollout.fleet.weight_follower import ReplicaFollower
    from rlloop.rollout.vllm.proxy import BESIDE
    from rlloop.rollout.vllm.remote_vllm import ServedEngine, ServedReplica, ServedService, Upstream, facts_of

    upstream = Upstream(given.upstream, key, given.timeout)
    stack.callback(upstream.close)
    facts = facts_of(upstream)
    engine = ServedEngine(upstream, facts)
    service = ServedService(engine, max_waiting=given.max_waiting)
    replica = ServedReplica(upstream, engine, source, service.change_weights)
    follower = ReplicaFollower(replica, service, interval=given.interval)
    stack.callback(follower.close)
    stack.callback(service.close)
    model = given.model_name or upstream.models()[0]
    beside = [Mount("/", proxy_app(through, BESIDE))]
    _serve_member("proxy", given, listen, Path(facts.folder), service, follower, model, beside)
