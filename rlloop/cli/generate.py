"""`rlloop generate`: completions of a prompt, or a chat with a model, as they are sampled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlloop.cli.parser import new_parser
from rlloop.errors import ConfigError

if TYPE_CHECKING:
    from rlloop.rollout import Engine
    from rlloop.types import SamplingParams

DTYPES = ("float32", "bfloat16", "float16")

GENERATE = """\
Complete a prompt, or chat with a model: a Hugging Face folder, a run (its best checkpoint) or one of its checkpoints.
Text is printed as it is sampled. Without PROMPT it is read from the standard input.

A chat ends with an empty line, Ctrl-D or Ctrl-C.
"""

GENERATE_EXAMPLES = """\
examples:
  rlloop generate my-model "Once upon a time" --max-tokens 100
  rlloop generate runs/mine --chat
  rlloop generate runs/mine/checkpoints/step_50 "3 5 7 -> 22" -n 4 --temperature 0.7
"""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("generate", GENERATE, GENERATE_EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help="a model's folder, a run's, or a checkpoint's")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to complete; with --chat, the first message")
    parser.add_argument("--chat", action="store_true", help="a conversation, by the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system's message")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="limit of a completion (default: 256)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: 1)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: 1")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of sampling (default: a new one each time)")
    parser.add_argument(
        "-n", "--number", type=int, default=1, metavar="N", help="completions of the prompt (default: 1)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument(
        "--device", default="cpu", help="cpu or cuda; CUDA_VISIBLE_DEVICES chooses among GPUs (default: cpu)"
    )
    args = parser.parse_intermixed_args(arguments)  # the prompt may follow options
    if args.number < 1:
        raise ConfigError(f"-n is {args.number}; it must be at least 1")

    from rlloop.types import SamplingParams

    asked = SamplingParams(args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    engine, chat = _open(args.model, args.dtype, args.device)
    if args.chat:
        return _chat(engine, chat, args, asked)
    prompt = args.prompt if args.prompt is not None else sys.stdin.read()
    ids = _encoded(chat, prompt)
    for index in range(args.number):
        if index:
            print("---")
        _say(_stream(engine, chat.tokenizer.decode, ids, _numbered(asked, index)))
    return 0


def _open(name: str, dtype: str, device: str) -> tuple[Engine, Any]:
    """An engine over the model, and its tokenizer."""
    from rlloop.chat import ChatTokenizer
    from rlloop.launch.stored import Stored
    from rlloop.rollout import Engine

    stored = Stored.find(name)
    base = stored.base()
    model = stored.load(base, dtype, device)
    folder = stored.folder if (stored.folder / "tokenizer_config.json").is_file() else base
    return Engine(model), ChatTokenizer(folder, eos_token_ids=model.config.eos_token_ids)


def _encoded(chat: Any, text: str) -> list[int]:
    ids = list(chat.tokenizer(text)["input_ids"])
    if not ids:
        raise ConfigError("the prompt is empty; give a text to complete")
    return ids


def _numbered(asked: SamplingParams, index: int) -> SamplingParams:
    from dataclasses import replace

    return asked if asked.seed is None else replace(asked, seed=asked.seed + index)


def _chat(engine: Engine, chat: Any, args: Any, asked: SamplingParams) -> int:
    if not chat.is_chat:
        raise ConfigError(f"{args.model} has no chat template, so it cannot chat; leave out --chat to complete a text")
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    said, index = args.prompt, 0
    while True:
        if said is None:
            with suppress(EOFError):
                said = input("> ")
        if not said:
            return 0
        messages.append({"role": "user", "content": said})
        ids = list(chat.tokenizer(chat.render(messages), add_special_tokens=False)["input_ids"])
        answer = _say(_stream(engine, _plain(chat), ids, _numbered(asked, index)))
        messages.append({"role": "assistant", "content": answer})
        said, index = None, index + 1


def _plain(chat: Any) -> Callable[[list[int]], str]:
    return lambda ids: chat.tokenizer.decode(ids, skip_special_tokens=True)


def _say(chunks: Iterator[str]) -> str:
    text = ""
    for chunk in chunks:
        print(chunk, end="", flush=True)
        text += chunk
    print()
    return text


def _stream(engine: Engine, decode: Callable[[list[int]], str], ids: list[int], asked: SamplingParams) -> Iterator[str]:
    """The completion's text as it is sampled, without the token that ends it."""
    from rlloop.rollout.fleet.text import Detokenizer

    detokenizer, written = Detokenizer(decode), 0
    request = engine.add_request(ids, asked)
    while True:
        done = [completion for finished, completion in engine.step() if finished == request]
        if done:
            kept = done[0].token_ids[: -1 if done[0].finish_reason == "stop" else None]
            yield detokenizer.feed(kept[written:]) + detokenizer.end()
            return
        tokens = engine.so_far(request, written).token_ids
        written += len(tokens)
        yield detokenizer.feed(tokens)
