"""A client's model: logs, orders and executes its commands, and replays them after a restart."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future as Saving
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from rlloop.api.calls import HIDDEN, Call, Context, Replayed, failed, failure, sampling_session, start
from rlloop.api.core import Core, Refused, log
from rlloop.api.futures import JSON, PROTOBUF, Future, Outcome
from rlloop.api.log import Checked, Command, CommandLog, Result, Weights
from rlloop.api.wire import sequences_named
from rlloop.errors import ConfigError, RlloopError
from rlloop.runs.journal import decoded
from rlloop.training.types import CHECKED, DIFFERENT, SaveWeightsResponse

AHEAD = 4096  # numbers that may come before the one that is next
LAST_SECONDS = 2.0  # for which a log stays open after its model, for results on their way
SMALL = 1 << 15  # bytes of a request; a larger one is decoded, and its result encoded, in a thread of its own


class State(msgspec.Struct):
    """Contents of a log's `state.json`: the state to resume from after earlier commands were dropped."""

    path: str  # of the checkpoint
    samplers: list[str]  # sampling sessions of these very weights
    updates: int


class _Arrival:
    def __init__(self, digest: bytes, durable: asyncio.Future[None]) -> None:
        self.digest, self.durable = digest, durable


class Trained:
    def __init__(
        self, core: Core, client: str, folder: Path, context: Context, sampler_made: Callable[[str, str | None], None],
    ) -> None:  # fmt: skip
        """Opens the log in `folder`, or begins one. `sampler_made` is called with the id of a sampling session when the
        service has its weights, or with the reason why it never will. Raises `RunError` for a damaged log."""
        self.core, self.client, self.model_id, self.context = core, client, context.model_id, context
        self.log = CommandLog(folder, core.committer)
        self.updates = 0
        self.checked = self.different = 0  # tokens compared with what was sampled
        self.created = self.last_request = time.time()
        self.failed: str | None = None  # why it could not be created, or made again
        self._sampler_made = sampler_made
        self._next = 0  # number of the command that is handed to the service next
        self._arrived: dict[int, _Arrival] = {}
        self._ready: dict[int, Command] = {}  # on disk, not yet handed to the service
        self._results: dict[int, Result] = {}  # of commands that a replay must not execute again
        self._compared: dict[int, dict[str, float]] = {}  # commands that succeeded, by the log
        self._replayed = set[int]()  # commands of before a restart
        self._digests: dict[int, bytes] = {}  # of the weights that they left
        self._wake = asyncio.Event()
        self._gradient = False  # a gradient waits for an update
        self._updates_since = 0  # the last state
        self._samplers: list[str] = []  # of the weights of this moment
        self._has_samplers = False
        self._restored = set[str]()
        self._state: asyncio.Task[None] | None = None
        self._update: int | None = None  # number of the last optim_step
        self._loads: dict[int, tuple[asyncio.Future[Result], asyncio.Task[None]]] = {}  # results that wait for a state
        self._closed = False
        self._runner = core.task(self._run())

    @property
    def queued(self) -> int:
        """Commands that have come and are not handed to the service."""
        return len(self._ready)

    async def submit(self, seq_id: int, kind: str, key: str, body: bytes) -> str:
        """Put a command on disk; returns its future's id. The same command again is the same future.

        Raises `Refused` for a number that came with another body, or is too far ahead, and with 429 beyond the quota.
        """
        request_id = f"{self.model_id}:{seq_id}"
        digest = hashlib.blake2b(kind.encode() + b"\0" + body, digest_size=16).digest()
        arrival = self._arrived.get(seq_id)
        if arrival is not None:
            if arrival.digest != digest:
                raise Refused(422, f"seq_id {seq_id} of {self.model_id} came before, with another request")
            await asyncio.shield(arrival.durable)
            return request_id
        if seq_id < self._next:
            return request_id  # it is done; its result may still be there
        if seq_id > self._next + AHEAD:
            raise Refused(422, f"seq_id is {seq_id}, and the next one of {self.model_id} is {self._next}")
        self.core.admit(self.client, len(body), urgent=seq_id == self._next)
        self.last_request = time.time()
        arrival = self._arrived[seq_id] = _Arrival(digest, asyncio.get_running_loop().create_future())
        future = self.core.futures.add(request_id, self.client, kind, len(body))
        command = Command(seq_id, kind, key, body)
        try:
            await asyncio.wrap_future(self.log.append(command))
        except Exception as error:
            del self._arrived[seq_id]
            self.core.futures.discard(future)
            arrival.durable.set_exception(Refused(503, f"the command log cannot be written: {error}"))
            await arrival.durable
        arrival.durable.set_result(None)
        if self._closed:
            self.core.futures.resolve(future, failed("the session has ended", "user"))
            return request_id
        self._ready[seq_id] = command
        self._wake.set()
        await asyncio.sleep(0)  # the work begins before the answer is written
        return request_id

    def replay(self) -> int:
        """Queue the log's commands as if they had just come; returns their number."""
        replay = self.log.replay
        if replay.first:
            assert replay.state is not None
            state = replay.state / "state.json"
            self._restore(decoded(state.read_bytes(), state, State))
            self._next = replay.first
        self._results, self._compared, self._digests = replay.results, replay.checked, replay.digests
        commands = replay.commands
        self._replayed = {command.seq_id for command in commands}
        for seq_id in self._results.keys() - self._replayed:  # before the state
            self._settle_replayed(self._future(seq_id, "", 0), self._results.pop(seq_id))
        for command in commands:
            self._future(command.seq_id, command.kind, len(command.body))
            durable = asyncio.get_running_loop().create_future()
            durable.set_result(None)
            content = command.kind.encode() + b"\0" + command.body
            self._arrived[command.seq_id] = _Arrival(hashlib.blake2b(content, digest_size=16).digest(), durable)
            self._ready[command.seq_id] = command
        self._wake.set()
        return len(commands)

    def samplers_to_come(self) -> set[str]:
        """Sampling sessions whose weights the replay makes again."""
        return {each for command in self._ready.values() if (each := self._sampler_of(command))} | self._restored

    def _sampler_of(self, command: Command) -> str | None:
        """The sampling session that a command makes; None: none."""
        if command.kind != "save_weights_for_sampler":
            return None
        try:
            number = msgspec.json.decode(command.body).get("sampling_session_seq_id")
        except msgspec.MsgspecError:
            return None
        return None if number is None else sampling_session(self.model_id, number)

    def _future(self, seq_id: int, kind: str, nbytes: int) -> Future:
        return self.core.futures.add(f"{self.model_id}:{seq_id}", self.client, kind, nbytes)

    def _restore(self, state: State) -> None:
        service = self.core.service
        try:
            future = service.create_model_from(
                state.path, optimizer=True, model_id=self.model_id, parity=self.context.parity, owner=self.client
            )
        except ConfigError as error:  # at once, by a service of this process
            self._made_again(error)
            return
        future.add_done_callback(lambda done: self._made_again(done.exception()))
        self._restored = set(state.samplers)
        for sampler in state.samplers:
            again = service.create_sampler(state.path, sampler=sampler)
            again.add_done_callback(lambda done, sampler=sampler: self._on_loop(
                self._sampler_made, sampler, None if done.exception() is None else str(done.exception())))  # fmt: skip
        self.updates = state.updates

    def _on_loop(self, call: Callable[..., object], *arguments: object) -> None:
        assert self.core.loop is not None
        self.core.loop.call_soon_threadsafe(call, *arguments)

    def _made_again(self, error: BaseException | None) -> None:
        if error is not None:
            self._refuse(f"the state of its log cannot be loaded: {error}")

    def _refuse(self, reason: str) -> None:
        """Fail all that follows."""
        self.failed = reason
        log.error("model %s cannot be used: %s", self.model_id, reason)

    # ------------------------------------------------------------------------------------------------ execution

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while (command := self._ready.pop(self._next, None)) is None:
                self._wake.clear()
                await self._wake.wait()
            self._next += 1
            future = self.core.futures[f"{self.model_id}:{command.seq_id}"]
            known = self._results.pop(command.seq_id, None)
            if known is not None:
                self._settle_replayed(future, known)
                if command.kind not in ("forward_backward", "optim_step"):
                    continue  # a failed call is repeated for its effect on the gradient
            if self.failed is not None:
                self._settle(command, future, failed(f"{self.model_id} cannot be used: {self.failed}", "user"), None)
                continue
            if command.kind == "forward_backward" and command.seq_id not in self._compared:
                await self._restored_sequences(command)
            small = len(command.body) < SMALL  # a thread would cost more than the work
            if small:
                call = self._begin(command, known)
            else:
                call = await loop.run_in_executor(self.core.threads, self._begin, command, known)
            if not isinstance(call, Outcome):
                with suppress(ConfigError):  # the model is gone
                    self._account(command)
            if (digest := self._digests.pop(command.seq_id, None)) is not None:
                await self._compare(command.seq_id, digest)
            if isinstance(call, Outcome):
                self._settle(command, future, call, None)
            else:
                settle = partial(self._settle, command, future, call=call)
                self.core.when_done(call.future, call.encode, settle, small=small)

    async def _restored_sequences(self, command: Command) -> None:
        """After a restart, wait until the service knows the sequences of before that the command's datums name. They
        were sampled from weights of earlier commands, which do not wait for this one."""
        if restoring := self.core.restoring:
            with suppress(ConfigError):  # `_begin` says what is wrong
                if tasks := {restoring[name] for name in sequences_named(command.body) if name in restoring}:
                    await asyncio.wait(tasks)

    def _begin(self, command: Command, known: Result | None) -> Call | Outcome:
        """Decode the command and call the service. `known`: how it failed when it came first."""
        replayed = Replayed(
            self._compared.pop(command.seq_id, None),
            broken=known is not None and b'"server"' in known.body,
            again=command.seq_id in self._replayed,
        )
        try:
            return start(self.core.service, self.context, command, replayed)
        except Exception as error:
            if not isinstance(error, RlloopError):
                log.error("a command failed in the server", exc_info=error)
            return failure(error)

    def _settle(self, command: Command, future: Future, outcome: Outcome, call: Call | None) -> None:
        self._arrived.pop(command.seq_id, None)
        self.core.task(self._finish(command, future, outcome, call))

    async def _finish(self, command: Command, future: Future, outcome: Outcome, call: Call | None) -> None:
        """Record what a replay needs, then let the client have the outcome."""
        if future.outcome is not None:  # a call that is made again
            return
        if not command.seq_id and outcome.failed:
            self.failed = msgspec.json.decode(outcome.body)["error"]
        if outcome.failed or (call is not None and call.kept):
            await self.core.keep(self.log, Result(command.seq_id, outcome.body, outcome.failed))
        elif call is not None and call.checked:
            metrics = {name: value for name, value in outcome.metrics.items() if name.startswith("parity/")}
            self.core.keep(self.log, Checked(command.seq_id, metrics))
        if (load := self._loads.pop(command.seq_id, None)) is not None:
            loaded, state = load
            loaded.set_result(Result(command.seq_id, outcome.body, outcome.failed))
            with suppress(Exception):  # the checkpoint may be deleted from now on, so the log must not need it
                await asyncio.shield(state)
        self.checked += int(outcome.metrics.get(CHECKED, 0))
        self.different += int(outcome.metrics.get(DIFFERENT, 0))
        if command.kind == "optim_step" and not outcome.failed:
            self.updates += 1
        if sampler := self._sampler_of(command):
            error = msgspec.json.decode(outcome.body)["error"] if outcome.failed else None
            self._sampler_made(sampler, error)
        self.core.futures.resolve(future, outcome)

    def _settle_replayed(self, future: Future, known: Result) -> None:
        media = JSON if known.failed or known.body[:1] == b"{" else PROTOBUF
        self._arrived.pop(known.seq_id, None)
        if not known.seq_id and known.failed:
            self.failed = msgspec.json.decode(known.body)["error"]
        self.core.futures.resolve(future, Outcome(known.body, media, known.failed))

    # ------------------------------------------------------------------------------------------------ states

    def _account(self, command: Command) -> None:
        """After a command was handed to the service: begin a state of the log when it is time for one."""
        kind = command.kind
        if kind == "optim_step" and command.seq_id not in self._digests:
            self._record_digest(command.seq_id)
        if kind == "forward_backward":
            self._gradient = True
        elif kind == "optim_step":
            self._gradient, self._samplers, self._update = False, [], command.seq_id
            self._updates_since += 1
        elif sampler := self._sampler_of(command):
            self._samplers.append(sampler)
            self._has_samplers = True
        every, since = self.core.settings.state_every, self._updates_since
        best = self._samplers or not self._has_samplers  # so that the newest sampler outlives a restart
        if kind == "load_weights":
            self._samplers = []
            loaded = asyncio.get_running_loop().create_future()
            self._loads[command.seq_id] = loaded, self._begin_state(command.seq_id + 1, loaded)
        elif (
            since >= every
            and (best or since >= 4 * every)
            and not self._gradient
            and (self._state is None or self._state.done())
        ):
            self._begin_state(command.seq_id + 1, None)

    def _begin_state(self, first: int, loaded: asyncio.Future[Result] | None) -> asyncio.Task[None]:
        """Have the service save the weights of this moment, in order with the commands, and a task do the rest."""
        saving = self.core.service.save_weights(self.model_id, f"{HIDDEN}{first:06d}", overwrite=True)
        self._updates_since = 0
        work = self._write_state(first, saving, list(self._samplers), self._update, loaded, self._state)
        self._state = self.core.task(work)
        self._state.add_done_callback(self._state_ended)
        return self._state

    def _state_ended(self, state: asyncio.Task[None]) -> None:
        """After one that failed, on a full disk for example, the next update tries again."""
        if not state.cancelled() and state.exception() is not None:
            self._updates_since = max(self._updates_since, self.core.settings.state_every)

    async def _compare(self, seq_id: int, before: bytes) -> None:
        """Refuse what follows if an update of before the restart leaves other weights now."""
        with suppress(RlloopError):  # the model is gone
            now = await asyncio.wrap_future(self.core.service.weights_digest(self.model_id, adapters_only=True))
            if now and now != before:
                self._refuse(f"update {seq_id} of its log gave other weights before the restart")

    def _record_digest(self, seq_id: int) -> None:
        """Have the log say which weights an update leaves."""

        def note(done: Saving[bytes]) -> None:
            if done.exception() is None and (digest := done.result()):
                self.log.append_later(Weights(seq_id, digest))

        with suppress(ConfigError):  # the model is gone
            self.core.service.weights_digest(self.model_id, adapters_only=True).add_done_callback(note)

    async def _write_state(
        self, first: int, saving: Saving[SaveWeightsResponse], samplers: list[str], update: int | None,
        loaded: asyncio.Future[Result] | None, before: asyncio.Task[None] | None,
    ) -> None:  # fmt: skip
        """Begin a new segment of the log at command `first`, with the weights that `saving` saves as its state.

        `update`: number of the last optim_step; one that failed may have left a gradient, which no state has. `loaded`:
        the result of the load before, which is given out only when the state is there. `before`: the last state.
        """
        service = self.core.service
        if before is not None:
            await asyncio.wait([before])
        saved = await asyncio.wrap_future(saving)
        for seq_id in range(max(0, first - AHEAD), first - (loaded is not None)):
            with suppress(KeyError):
                await self.core.futures[f"{self.model_id}:{seq_id}"].done.wait()
        result = None if loaded is None else await loaded
        if self._has_failed(update) if result is None else result.failed:
            service.delete_checkpoint(saved.path)
            return
        folder = self.log.new_state(first)
        (folder / "state.json").write_bytes(msgspec.json.encode(State(saved.path, samplers, self.updates)))
        carried = [
            Result(int(future.request_id.rpartition(":")[2]), future.outcome.body, future.outcome.failed)
            for future in self.core.futures.kept(f"{self.model_id}:")
            if future.outcome is not None and int(future.request_id.rpartition(":")[2]) < first
        ]
        if result is not None:
            carried.append(result)
        await asyncio.wrap_future(self.log.rotate(first, carried))
        needed = {f"{HIDDEN}{path.name}" for path in self.log.folder.iterdir() if path.is_dir()}
        for checkpoint in service.checkpoints(self.model_id):
            name = checkpoint.checkpoint_id.partition("/")[2]
            mine = name.startswith(HIDDEN) and int(name.removeprefix(HIDDEN)) < first  # later ones are being made
            if mine and name not in needed:
                service.delete_checkpoint(checkpoint.tinker_path)

    def _has_failed(self, seq_id: int | None) -> bool:
        try:
            outcome = None if seq_id is None else self.core.futures[f"{self.model_id}:{seq_id}"].outcome
        except KeyError:
            return True  # unknown by now
        return outcome is not None and outcome.failed

    def close(self) -> None:
        """Drop the model; its log and its checkpoints stay."""
        self._closed = True
        self._runner.cancel()
        for command in self._ready.values():
            future = self.core.futures[f"{self.model_id}:{command.seq_id}"]
            self.core.futures.resolve(future, failed("the session has ended", "user"))
        self._ready.clear()
        dropped = None
        with suppress(ConfigError):  # it was not made
            dropped = self.core.service.drop_model(self.model_id)
        self.core.task(self._close_log(dropped))

    async def _close_log(self, dropped: Saving[None] | None) -> None:
        if dropped is not None:
            done, _ = await asyncio.wait([asyncio.wrap_future(dropped)])
            done.pop().exception()  # of a model that was gone already
        await asyncio.sleep(LAST_SECONDS)
        self.log.close()
