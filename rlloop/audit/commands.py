"""`rlloop verify LOG`: the command log of a model of the training API, executed again."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rlloop.api.calls import Context, Replayed, service_path, start
from rlloop.api.core import Base
from rlloop.api.inputs import InputReader
from rlloop.api.log import Command, Replay, read_segment, segments
from rlloop.api.models import State
from rlloop.api.requests import CreateLoss
from rlloop.audit.history import Check
from rlloop.errors import RlloopError, RunError
from rlloop.runs.journal import decoded
from rlloop.training.service import TrainingService

SAVES = ("save_weights", "save_weights_external", "save_weights_for_sampler")  # leave the weights as they are


def verify_log(folder: Path, progress: Callable[[str], None] = lambda text: None) -> Iterator[Check]:
    """A check of the files, and one that executes the commands on the base model and compares the digest of the weights
    after each update with the log's. Reads only.

    Raises `RunError` for a log that is damaged, or does not lie in a folder of `rlloop serve api`.
    """
    replays = [read_segment(path) for path in segments(folder)]
    commands = {command.seq_id: command for replay in replays for command in replay.commands}
    dropped = sum(replay.dropped for replay in replays)
    note = f"; {dropped} bytes at the end were never acknowledged" if dropped else ""
    missing = sorted({*range(min(commands, default=0), max(commands, default=0))} - set(commands))
    yield Check(
        "log",
        f"{len(commands)} commands in {len(replays)} segments from number {replays[0].first} on{note}",
        [f"command {number} is missing, and later ones are there" for number in missing],
    )
    yield _replayed(folder, replays, commands, progress)


def _replayed(
    folder: Path, replays: list[Replay], commands: dict[int, Command], progress: Callable[[str], None]
) -> Check:
    session, top = folder.parents[1], folder.parents[3]
    try:
        base = decoded((top / "base.json").read_bytes(), top / "base.json", Base)
    except OSError:
        raise RunError(f"{folder} is not of a folder of `rlloop serve api`: {top / 'base.json'} is missing") from None
    results = {seq_id: result for replay in replays for seq_id, result in replay.results.items()}
    digests = {seq_id: digest for replay in replays for seq_id, digest in replay.digests.items()}
    problems, compared = list[str](), 0
    with tempfile.TemporaryDirectory() as temporary:
        service = TrainingService(base.folder, checkpoints=temporary, **base.settings)
        try:
            stored, own = top / "checkpoints", Path(temporary)
            model_id = f"{session.name}:train:{folder.name}"
            context = Context(
                model_id, (base.name,), check_path=lambda path, token: _fetched(path, stored, own),
                inputs=InputReader.of_folder(base.folder),
            )  # fmt: skip
            for file in (session / "losses").glob("*.json"):
                service.create_custom_loss(*decoded(file.read_bytes(), file, CreateLoss).loss())
            first = replays[0]
            if first.state is not None:
                kept = first.state / "state.json"
                state = decoded(kept.read_bytes(), kept, State)
                path = _fetched(state.path, stored, own)
                service.create_model_from(path, optimizer=True, model_id=model_id).result()
            for seq_id, command in sorted(commands.items()):
                if command.kind in SAVES or (seq_id < first.first):
                    continue
                progress(f"command {seq_id} of {max(commands)}")
                known = results.get(seq_id)
                failed = known is not None and known.failed
                replayed = Replayed(None if failed else {}, failed and known is not None and b'"server"' in known.body)
                error = None
                try:
                    start(service, context, command, replayed).future.result()
                except RlloopError as problem:
                    error = problem
                if (error is not None) != failed:
                    now = "succeeds" if error is None else f"fails: {error}"
                    before = "failed" if failed else "succeeded"
                    problems.append(f"command {seq_id} ({command.kind}) {before}, and now it {now}")
                    if not seq_id:
                        break
                if seq_id in digests:
                    compared += 1
                    if service.weights_digest(model_id).result() != digests[seq_id]:
                        problems.append(f"command {seq_id} ({command.kind}) leaves other weights than the log says")
        finally:
            service.close()
    return Check("replay", f"weights compared {compared} times", problems)


def _fetched(path: str, stored: Path, own: Path) -> str:
    """A checkpoint's path, after its files were copied to where the replay's service finds them."""
    path = service_path(path)
    name = path.removeprefix("tinker://")
    for source, target in ((stored / entry, own / entry) for entry in (name, f"{name}.json")):
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.exists():
            shutil.copy(source, target)
    return path
