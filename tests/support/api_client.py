"""The training API's protocol as plain HTTP, without anybody's client."""

from __future__ import annotations

import hashlib
import time
import weakref
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np

from rlloop.api.schema import message

Shown = tuple[bytes, int]  # a png file in place of so many tokens
Tokens = Sequence[int | Shown]
PROTOBUF = {"content-type": "application/x-protobuf"}


class Api:
    """`session` and `model_id` are those of `start`. Calls with `_` return a future's id."""

    def __init__(self, url: str, key: str = "tml-test") -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=60, trust_env=False)
        weakref.finalize(self, self.http.close)
        self.session = self.model_id = ""
        self.seq_id = 0

    def post(self, route: str, /, **body: Any) -> httpx.Response:
        return self.http.post(route, json=body)

    def ok(self, route: str, /, **body: Any) -> dict[str, Any]:
        answer = self.post(route, **body)
        assert answer.status_code == 200, (route, answer.status_code, answer.text)
        return answer.json()

    def result(self, request_id: str, seconds: float = 240.0) -> Any:
        """The result of a future: a dictionary, or the bytes of a message."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            answer = self.post("retrieve_future", request_id=request_id)
            if answer.status_code == 408:
                continue
            assert answer.status_code == 200, (answer.status_code, answer.text)
            return answer.json() if answer.headers["content-type"] == "application/json" else answer.content
        raise AssertionError(f"{request_id} is not done after {seconds} seconds")

    def start(self, base_model: str = "fake", rank: int = 8, model: int = 0, **metadata: str) -> Api:
        """A session with a model."""
        if not self.session:
            created = self.ok("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")
            self.session = created["session_id"]
        made = self.ok(
            "create_model", session_id=self.session, model_seq_id=model, base_model=base_model,
            lora_config={"rank": rank, "seed": 0}, user_metadata=metadata or None,
        )  # fmt: skip
        done = self.result(made["request_id"])
        assert "error" not in done, done
        self.model_id, self.seq_id = done["model_id"], 0
        return self

    def next(self) -> int:
        self.seq_id += 1
        return self.seq_id

    def forward_backward_(
        self,
        tokens: Sequence[Tokens],
        *,
        seq_id: int | None = None,
        loss_fn: str = "cross_entropy",
        weights: float = 1.0,
        names: list[str] | None = None,
        prompt: int = 1,
        **headers: str,
    ) -> httpx.Response:
        """Datums of these tokens, each of which predicts the next. `names`: sampled sequences, of whose prompt the
        first `prompt` tokens are, and which the others are."""
        number = self.next() if seq_id is None else seq_id
        body = datums(self.model_id, number, tokens, loss_fn, weights, names, prompt)
        return self.http.post("forward_backward", content=body, headers={**PROTOBUF, **headers})

    def forward_backward(self, tokens: Sequence[Tokens], **options: Any) -> Any:
        answer = self.forward_backward_(tokens, **options)
        assert answer.status_code == 200, answer.text
        return output(self.result(answer.json()["request_id"]))

    def command_(self, kind: str, /, *, seq_id: int | None = None, **body: Any) -> str:
        number = self.next() if seq_id is None else seq_id
        return self.ok(kind, model_id=self.model_id, seq_id=number, **body)["request_id"]

    def command(self, kind: str, /, **body: Any) -> dict[str, Any]:
        return self.result(self.command_(kind, **body))

    def optim_step(self, learning_rate: float = 0.01) -> dict[str, Any]:
        return self.command("optim_step", adam_params={"learning_rate": learning_rate})

    def saved(self, name: str, seconds: float = 240.0) -> str:
        """Save the weights, again while the server has no room for them; returns the checkpoint's name."""
        deadline = time.monotonic() + seconds
        while "error" in (done := self.command("save_weights", path=name)):
            assert done["category"] == "server", done
            assert time.monotonic() < deadline, done
            time.sleep(0.1)
        return done["path"].rpartition("/")[2]

    def sampler(self, number: int) -> str:
        """A sampling session of the weights of this moment."""
        return self.command("save_weights_for_sampler", sampling_session_seq_id=number)["sampling_session_id"]

    def sample_(self, sampler: str, seq_id: int, prompt: Tokens, n: int = 1, **params: Any) -> dict[str, Any]:
        chunks = [
            {"type": "encoded_text", "tokens": each}
            if isinstance(each, list)
            else {"type": "image", "data": b64encode(each[0]).decode(), "format": "png", "expected_tokens": each[1]}
            for each in chunks_of(prompt)
        ]
        return self.ok(
            "asample", sampling_session_id=sampler, seq_id=seq_id, num_samples=n, prompt={"chunks": chunks},
            sampling_params=params,
        )  # fmt: skip

    def sample(self, sampler: str, seq_id: int, prompt: Tokens, n: int = 1, **params: Any) -> list[list[int]]:
        return sampled(self.result(self.sample_(sampler, seq_id, prompt, n, **params)["request_id"]))


class Patient(Api):
    """Sends a request again until it is answered. Tinker's client also repeats 500 and the like, for five minutes; this
    one fails, since an answer 500 is a defect of the server."""

    answered = 0
    patience = 240.0  # seconds

    def post(self, route: str, /, **body: Any) -> httpx.Response:
        return self._again(lambda: super(Patient, self).post(route, **body))

    def forward_backward_(self, tokens: Sequence[Tokens], **options: Any) -> httpx.Response:
        options.setdefault("seq_id", self.next())
        return self._again(lambda: super(Patient, self).forward_backward_(tokens, **options))

    def _again(self, send: Any) -> httpx.Response:
        deadline = time.monotonic() + self.patience
        while True:
            try:
                answer = send()
                if answer.status_code not in (429, 503):
                    self.answered += 1
                    return answer
                problem = f"{answer.status_code} {answer.text}"
            except httpx.TransportError as error:
                problem = repr(error)
            assert time.monotonic() < deadline, problem
            time.sleep(0.02)


def trained_session(url: str, key: str, steps: int = 4) -> Iterator[Any]:
    """Results of a session that samples by seeds, trains on its samples, whose names it gives, and saves its weights:
    the same in every run."""
    api = Patient(url, key)
    api.http.timeout = httpx.Timeout(3.0)
    api.start("model", rank=4)
    for step in range(steps):
        asked = api.sample_(api.sampler(step), 0, [5, 9, 14, step], n=2, max_tokens=4, seed=step)
        tokens = sampled(api.result(asked["request_id"]))
        yield {"step": step, "sampled": tokens}
        for ids, name in zip(tokens, asked["sample_sequence_ids"], strict=True):
            made = api.forward_backward([[5, 9, 14, step, *ids]], names=[name], prompt=4)
            content = made if isinstance(made, dict) else made.SerializeToString(deterministic=True).hex()
            yield {"step": step, "trained": ids, "result": hashlib.sha256(str(content).encode()).hexdigest()}
        yield {"step": step, "updated": api.optim_step()}
        yield {"step": step, "saved": api.saved(f"step-{step}")}
    last = api.forward_backward([[5, 9, 14, 3, 7, 8]])
    yield {"last": last if isinstance(last, dict) else last.SerializeToString(deterministic=True).hex()}


def chunks_of(tokens: Tokens) -> list[list[int] | Shown]:
    """Texts and pictures in turn."""
    chunks: list[list[int] | Shown] = []
    for token in tokens:
        if isinstance(token, tuple):
            chunks.append(token)
        elif chunks and isinstance(chunks[-1], list):
            chunks[-1].append(token)
        else:
            chunks.append([token])
    return chunks


def datums(
    model_id: str,
    seq_id: int,
    tokens: Sequence[Tokens],
    loss_fn: str = "cross_entropy",
    weights: float = 1.0,
    names: list[str] | None = None,
    prompt: int = 1,
) -> bytes:
    request = message("ForwardBackwardRequest")(model_id=model_id, seq_id=seq_id, loss_fn=loss_fn)
    for index, sequence in enumerate(tokens):
        datum = request.data.add()
        for chunk in chunks_of(sequence[:-1]):
            if isinstance(chunk, list):
                datum.model_input.add().encoded_text.tokens = np.array(chunk, "<i4").tobytes()
            else:
                image = datum.model_input.add().image
                image.data, image.format, image.expected_tokens = chunk[0], "png", chunk[1]
        ids = [id for token in sequence for id in ([0] * token[1] if isinstance(token, tuple) else [token])]
        _set(datum.loss_fn_inputs["target_tokens"], np.array(ids[1:], "<i8"), 2)
        _set(datum.loss_fn_inputs["weights"], np.full(len(ids) - 1, weights, "<f4"), 1)
        if names is not None:
            for spans, offset in ((datum.model_input_spans, 0), (datum.loss_fn_input_spans, 1)):
                sampled = len(ids) - prompt - 1 + offset
                for kind, start, length in (("prompt", offset, prompt - offset), ("sampled", 0, sampled)):
                    if length:
                        run = getattr(spans.add(), f"{kind}_tokens")
                        run.sequence_id, run.offset, run.length = names[index], start, length
    return request.SerializeToString(deterministic=True)


def _set(tensor: Any, array: np.ndarray, dtype: int) -> None:
    tensor.dense, tensor.dtype = array.tobytes(), dtype
    tensor.shape.extend(array.shape)


def output(body: Any) -> Any:
    """A ForwardBackwardOutput, or the error that came instead of it."""
    return body if isinstance(body, dict) else message("ForwardBackwardOutput").FromString(body)


def sampled(body: Any) -> list[list[int]]:
    assert not isinstance(body, dict), body
    return [np.frombuffer(each.tokens, "<i4").tolist() for each in message("SampleResponse").FromString(body).sequences]
