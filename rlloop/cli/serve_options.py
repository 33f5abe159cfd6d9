"""Command lines of `rlloop serve engine|relay|trainer|proxy|api`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlloop.cli.parser import Help, Parser
from rlloop.config.rollout import EngineKind
from rlloop.web import TOKEN_VARIABLE

DESCRIPTION = """\
Start a server of a fleet. Each prints its address as soon as it listens, and ends with Ctrl-C or SIGTERM.

  engine    samples over HTTP: OpenAI's completions and chat, and rlloop's own exact route; can follow a store
  relay     caches a store of weights for a region, so that each blob crosses the wide-area network once
  trainer   publishes weights and samples from the fleet, for trainers other than rlloop's
            (`rlloop train fleet=regions` starts one of its own)
  proxy     stands before a `vllm serve` on loopback and passes only completions on; with --store it lets vLLM follow
            weights, and is an engine like any other (docs/vllm.md)
  api       trains for other programs: Tinker's client, or anything that speaks its protocol (docs/api.md)

Off loopback, every route requires a token: --token-file, or the environment variable RLLOOP_TOKEN. A trainer always has
one: without either it creates KEY.token beside its signing key.

`rlloop serve KIND --help` lists the options of a kind.
"""

KINDS = {
    "engine": (
        "An engine that samples from MODEL over HTTP. With --store it follows published weights;\n"
        "with --join it serves a trainer's fleet.",
        "examples:\n"
        "  rlloop serve engine --model my-model --port 8000\n"
        "  rlloop serve engine --model my-model --store http://trainer:7000 --public-key key.pub --join http://trainer:7000",
    ),
    "relay": (
        "A cache of a store of weights, for the engines of one region, which name it by --relay.",
        "example:\n  rlloop serve relay --upstream http://trainer:7000 --cache /var/cache/rlloop --port 7001",
    ),
    "trainer": (
        "A fleet for a trainer that is not rlloop's: it publishes weights, engines join it, and it passes\n"
        "requests on to them (docs/fleet.md).",
        "example:\n  rlloop serve trainer --store weights --signing-key key --run-id mine --port 7000",
    ),
    "proxy": (
        "A proxy before a `vllm serve` on loopback that passes only completions on (docs/vllm.md).",
        "example:\n  rlloop serve proxy --upstream http://127.0.0.1:8000 --token-file token --host 0.0.0.0 --port 8001",
    ),
    "api": (
        "A training API over MODEL: forward_backward, optim_step, sample, over Tinker's protocol (docs/api.md).\n"
        "Without a token file it listens on loopback only, and takes any key that begins with tml-. A token file has\n"
        "a key a line, as KEY, KEY NAME or KEY NAME operator. Started again with the same --folder, it goes on where\n"
        "it was.",
        "examples:\n"
        "  rlloop serve api --model my-model --port 8000\n"
        "  TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python train.py",
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Run `rlloop serve`; returns the exit code. `--help` needs no extra."""
    args = parse(arguments)

    from rlloop.cli.serve import run  # the servers' packages, an extra

    return run(args)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a kind of server, with its name as `kind`."""
    parser = Parser(prog="rlloop serve", description=DESCRIPTION, formatter_class=Help)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="engine|relay|trainer|proxy|api")
    added = {
        "engine": _engine_options, "relay": _relay_options, "trainer": _trainer_options, "proxy": _proxy_options,
        "api": _api_options,
    }  # fmt: skip
    for kind, add in added.items():
        description, examples = KINDS[kind]
        options = kinds.add_parser(
            kind, description=description, epilog=examples, formatter_class=_Help, allow_abbrev=False
        )
        _listen_options(options)
        add(options)
    return parser.parse_args(arguments)


class _Help(Help, argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults of options that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return (
            action.help if action.default in (None, []) or action.default is False else super()._get_help_string(action)
        )


def _listen_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--host", default="127.0.0.1", help="address to listen on")
    options.add_argument("--port", type=int, default=0, help="port to listen on; 0 picks a free one")
    options.add_argument(
        "--token-file", type=Path, help=f"file with the token that requests need; default: ${TOKEN_VARIABLE}"
    )
    options.add_argument("--certificate", type=Path, help="PEM file; with --key the server speaks TLS")
    options.add_argument("--key", type=Path, help="PEM file with the certificate's private key")
    options.add_argument("--ca-file", type=Path, help="PEM file of authorities to trust for other servers")
    options.add_argument("--max-body", type=int, default=64 << 20, help="largest request in bytes")


def _engine_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--model", type=Path, required=True, help="Hugging Face folder with weights and tokenizer")
    options.add_argument("--dtype", default="float32", help="dtype of the model; must be the trainer's model.dtype")
    options.add_argument(
        "--quantize", choices=["none", "fp8"], default="none", help="the trainer's model.quantize; default: none"
    )
    options.add_argument("--device", default="cpu", help="cpu or cuda; CUDA_VISIBLE_DEVICES chooses among GPUs")
    options.add_argument("--threads", type=int, help="CPU threads; default: all")
    options.add_argument(
        "--engine", choices=list(EngineKind), type=EngineKind, default=EngineKind.embedded, help="engine that samples"
    )
    options.add_argument(
        "--layout", nargs="*", default=[], metavar="AXIS=N",
        help="ranks of one engine, each a process of this host with a GPU or CPU of its own: tp=N share each product "
        "and the experts, or ep=N of them the experts; pp=N share the layers",
    )  # fmt: skip
    options.add_argument(
        "--rank-timeout", type=float, default=600.0, metavar="SECONDS",
        help="with --layout: end the server, and name the rank, when one makes no progress for so long; default: 600",
    )  # fmt: skip
    options.add_argument(
        "--lora-rank", type=int, default=0, metavar="R",
        help="follow an adapter of this rank, the trainer's model.lora.rank, over MODEL as it is; 0: whole weights",
    )  # fmt: skip
    options.add_argument(
        "--lora-targets", nargs="+", default=["all-linear"], metavar="NAME", help="the trainer's model.lora.targets"
    )
    options.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=FOLDER",
        help="load this PEFT folder; clients name it as their model; may be given several times",
    )  # fmt: skip
    options.add_argument(
        "--adapter-root", type=Path, metavar="FOLDER",
        help="clients may have adapters under this folder loaded, by /v1/load_lora_adapter; default: none",
    )  # fmt: skip
    options.add_argument("--adapter-slots", type=int, default=8, help="adapters that may run at once; more wait")
    options.add_argument("--adapter-rank", type=int, default=64, help="largest rank of an adapter")
    options.add_argument("--page-size", type=int, default=16, help="tokens of a page of the key-value cache")
    options.add_argument("--max-batch-tokens", type=int, default=8192, help="tokens computed in one step, at most")
    options.add_argument("--max-cache-tokens", type=int, help="tokens in the key-value cache; default: as many as fit")
    options.add_argument(
        "--no-warm-up", action="store_true",
        help="on a GPU, answer before the usual steps are recorded as CUDA graphs: sooner, but the first requests wait",
    )  # fmt: skip
    _member_options(options, "rlloop")


def _member_options(options: argparse.ArgumentParser, name: str | None) -> None:
    """Options of servers that are engines of a fleet and follow a store of weights."""
    options.add_argument("--model-name", default=name, help="the model's name for OpenAI's clients")
    options.add_argument(
        "--logprobs-mode",
        choices=["processed_logprobs", "raw_logprobs"],
        default="processed_logprobs",
        help="logprobs for OpenAI's clients: of the distribution sampled from, or at temperature 1, not truncated",
    )
    options.add_argument("--max-waiting", type=int, default=4096, help="waiting requests; further ones are refused")
    options.add_argument("--store", metavar="URL", help="follow the weights of this store (a folder, http, s3, ...)")
    options.add_argument("--relay", metavar="URL", help="read the store through this relay, or directly if that fails")
    options.add_argument(
        "--public-key", metavar="HEX|FILE", help="the key that signs the store's versions; required with --store"
    )
    options.add_argument("--run-id", help="follow this run only; default: the first run in the store")
    options.add_argument("--any-run", action="store_true", help="follow every new run in the store")
    options.add_argument("--interval", type=float, default=2.0, help="seconds between reads of the store's head")
    options.add_argument("--join", metavar="URL", help="join the fleet of the trainer at this address")
    options.add_argument("--region", default="home", help="region's name in the fleet")
    options.add_argument(
        "--advertise", metavar="URL", help="address at which the trainer reaches this engine; default: its own"
    )


def _relay_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--upstream", metavar="URL", required=True, help="store: the trainer's address, s3://..., ...")
    options.add_argument("--cache", type=Path, required=True, help="folder for fetched blobs")
    options.add_argument("--cache-bytes", type=int, default=16 << 30, help="largest size of that folder in bytes")


def _trainer_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--store", required=True, help="store to publish versions to: a folder or an fsspec URL")
    options.add_argument(
        "--signing-key", type=Path, required=True, help="Ed25519 key in PEM; created if it does not exist"
    )
    options.add_argument("--run-id", required=True, help="name of the run; versions are RUN_ID/STEP")
    options.add_argument("--anchor-every", type=int, default=50, help="versions between whole copies of the weights")
    options.add_argument(
        "--engine", action="append", default=[], metavar="REGION=URL",
        help="an engine of the fleet; may be given several times, and engines may also join by themselves",
    )  # fmt: skip
    options.add_argument("--patience", type=float, default=120.0, help="seconds to wait for an engine")
    options.set_defaults(max_body=16 << 30)


def _proxy_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--upstream", metavar="URL", required=True, help="address of the vLLM server, on loopback")
    options.add_argument("--upstream-key-file", type=Path, help="file with the key of vLLM's --api-key")
    options.add_argument("--timeout", type=float, default=600.0, help="seconds for an answer of vLLM's")
    _member_options(options, None)


def _api_options(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--model", type=Path, required=True, help="base model: a Hugging Face folder; tokenizer optional"
    )
    options.add_argument("--model-name", help="name that clients ask for; default: the folder's")
    options.add_argument("--folder", type=Path, default=Path("runs/api"), help="sessions, command logs and checkpoints")
    options.add_argument(
        "--shape", metavar="ID",
        help="take dtype, device, tokens of a micro-batch and largest rank from this shape of `rlloop shapes`",
    )  # fmt: skip
    options.add_argument(
        "--shape-file",
        type=Path,
        action="append",
        default=[],
        help="file with shapes of your own; several may be given",
    )
    options.add_argument(
        "--ray", nargs="?", const="local", metavar="HOST:PORT",
        help="run model and engine in an actor of this Ray cluster (auto: of the one here); without a value, of a new "
        "Ray on this machine",
    )  # fmt: skip
    options.add_argument("--ray-cpus", type=float, default=1.0, help="CPUs that the actor reserves")
    options.add_argument("--ray-gpus", type=float, default=0.0, help="GPUs that the actor reserves; --shape sets 1")
    options.add_argument("--dtype", default="float32", help="dtype of the model")
    options.add_argument("--device", default="cpu", help="cpu or cuda; CUDA_VISIBLE_DEVICES chooses among GPUs")
    options.add_argument("--threads", type=int, help="CPU threads; default: all")
    options.add_argument(
        "--parity", choices=["require", "observe"], default="require",
        help="require: tokens that differ from what was sampled fail their request; observe: they are counted",
    )  # fmt: skip
    options.add_argument("--leaf-tokens", type=int, default=16384, help="tokens of a micro-batch; decides bits")
    options.add_argument("--max-lora-rank", type=int, default=64, help="largest rank of an adapter")
    options.add_argument("--adapter-slots", type=int, default=8, help="adapters on the device at the same time")
    options.add_argument(
        "--keep-samplers", type=int, default=8, help="a model's unnamed samplers that stay, the newest, in memory"
    )
    options.add_argument("--max-running", type=int, default=256, help="limit of completions in one step of the engine")
    options.add_argument(
        "--checkpoint-layers", type=int, default=0, help="recompute every n-th layer in the backward pass (0: none)"
    )
    options.add_argument("--models-per-key", type=int, default=16, help="limit of models of one client")
    options.add_argument("--futures-per-key", type=int, default=10_000, help="limit of a client's requests in flight")
    options.add_argument("--bytes-per-key", type=int, default=1 << 30, help="limit of those requests' bytes")
    options.add_argument("--idle", type=float, default=900.0, help="seconds without a heartbeat that end a session")
    options.add_argument("--state-every", type=int, default=50, help="updates of a model between states in its log")
