"""Alerts: conditions on a run's metrics, and on its silence, posted to a webhook.

    eval/solved < 0.1            a metric against a number: <, <=, >, >=, ==, !=
    reward/mean < 0.05 for 20    in so many records in a row
    parity/k3 > 0                a number that is not finite meets every condition but ==
    silent 10                    no record for 10 minutes
    failed                       the run ended otherwise than by its last step; the dashboard alone can tell

A condition is posted once when it becomes true, and again only after it was false. A run sends its own alerts
(`sinks.alerts`); the dashboard sends those of all its runs, also of one that was killed (`rlloop dashboard --alert`).
"""

from __future__ import annotations

import math
import operator
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlloop.errors import ConfigError
from rlloop.metrics import number_of

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
METRIC = re.compile(r"\s*([\w./-]+)\s*(<=|>=|==|!=|<|>)\s*([-+.\deE]+)\s*(?:for\s+(\d+))?\s*")
SILENT = re.compile(r"\s*silent\s+(?:for\s+)?([.\d]+)\s*(?:min(?:utes)?)?\s*")
TIMEOUT = 10.0  # seconds for a webhook to answer


@dataclass(frozen=True)
class Condition:
    """One condition, parsed. Either `metric`, or `silent` (minutes), or neither: that the run failed."""

    text: str
    metric: str | None = None
    compare: str = "<"
    value: float = 0.0
    records: int = 1  # in a row
    silent: float | None = None

    @classmethod
    def parse(cls, text: str) -> Condition:
        """A condition from its text. Raises `ConfigError` for invalid ones."""
        if str(text).strip() == "failed":
            return cls("failed")
        try:
            if (match := SILENT.fullmatch(str(text))) and float(match[1]) > 0:
                return cls(str(text).strip(), silent=float(match[1]))
            if match := METRIC.fullmatch(str(text)):
                name, compare, value, count = match.groups()
                return cls(str(text).strip(), name, compare, float(value), max(1, int(count or 1)))
        except ValueError:
            pass
        raise ConfigError(
            f"{text!r} is no condition of an alert; write `eval/solved < 0.1`, `reward/mean < 0.05 for 20` (records in "
            "a row), `silent 10` (minutes without a record) or `failed`"
        )

    def holds(self, value: float) -> bool:
        return self.compare != "==" if not math.isfinite(value) else OPERATORS[self.compare](value, self.value)


class Alarm:
    """The conditions of one run. `record` and `quiet` return the texts of those that have become true."""

    def __init__(self, run: str, conditions: Sequence[Condition]) -> None:
        self.run, self.conditions = run, conditions
        self._rows: dict[str, int] = {}  # records in a row that met a condition
        self._raised: set[str] = set()

    def record(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        """A new record. Null values are numbers that were not finite."""
        alerts = []
        for each in self.conditions:
            if each.silent is not None:
                self._raised.discard(each.text)
            if each.metric is None or each.metric not in metrics:
                continue
            value = math.nan if metrics[each.metric] is None else number_of(metrics[each.metric])
            if value is None:  # as if it were absent
                continue
            self._rows[each.text] = self._rows.get(each.text, 0) + 1 if each.holds(value) else 0
            if self._becomes(each, self._rows[each.text] >= each.records):
                alerts.append(f"{self.run}, step {step}: {each.metric} is {value:.4g} ({each.text})")
        return alerts

    def quiet(self, minutes: float) -> list[str]:
        """Minutes since the last record."""
        return [
            f"{self.run}: no record for {minutes:.0f} minutes ({each.text})"
            for each in self.conditions
            if each.silent is not None and self._becomes(each, minutes >= each.silent)
        ]

    def ended(self, status: str, reason: str | None) -> list[str]:
        """The run's status; "live" and "finished" are well."""
        return [
            f"{self.run}: {status}" + (f": {reason}" if reason else "")
            for each in self.conditions
            if each.text == "failed" and self._becomes(each, status not in ("live", "finished"))
        ]

    def _becomes(self, condition: Condition, now: bool) -> bool:
        before = condition.text in self._raised
        (self._raised.add if now else self._raised.discard)(condition.text)
        return now and not before


def post(webhook: str, text: str, tell: Callable[[str], None]) -> threading.Thread:
    """Post an alert from a thread of its own. `text` is the key that Slack and Mattermost show, `content` Discord's.

    `tell` gets the reason of one that could not be delivered; nothing waits for it.
    """
    import httpx

    from rlloop.web.clients import client

    def send() -> None:
        try:
            content = {"text": f"rlloop: {text}", "content": f"rlloop: {text}", "host": socket.gethostname()}
            with client(most=1 << 16, timeout=TIMEOUT) as session:
                session.post(webhook, json=content).raise_for_status()
        except httpx.HTTPError as error:
            tell(f"an alert could not be posted to the webhook ({type(error).__name__}): {text}")

    thread = threading.Thread(target=send, name="alert", daemon=True)
    thread.start()
    return thread


def check_webhook(webhook: Any, secret: str = "") -> str:
    """Raises `ConfigError` unless it is an http(s) address; `secret`: what the error tells in place of it."""
    import httpx

    valid = isinstance(webhook, str) and re.fullmatch(r"https?://[^\s/]+\S*", webhook) is not None
    if valid:
        try:
            valid = (httpx.URL(webhook).port or 0) < 1 << 16
        except (httpx.InvalidURL, UnicodeError):  # their texts may have a part of the secret
            valid = False
    if not valid:
        given = secret or repr(webhook)
        raise ConfigError(f"the webhook of alerts is {given}; it must be an address, as https://hooks.example/...")
    return webhook


class AlertSink:
    """Posts a run's alerts: `webhook`, its address, or `webhook_env`, the environment variable that has it; `when`,
    conditions. Silence is watched by a thread of its own."""

    def __init__(
        self, run_dir: Path, config: Mapping[str, Any], *, webhook: str = "", webhook_env: str = "",
        when: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._webhook, conditions = self.check(webhook, webhook_env, when)
        self._alarm, self._log = Alarm(run_dir.name, conditions), run_dir / "run.log"
        self._posts: list[threading.Thread] = []
        self._last, self._ended = time.monotonic(), threading.Event()
        self._guard = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="alerts", daemon=True)
        self._watcher.start()
        self.note = f"alerts: {'; '.join(each.text for each in conditions)}"

    @staticmethod
    def check(webhook: str = "", webhook_env: str = "", when: Sequence[str] = ()) -> tuple[str, list[Condition]]:
        """The address and conditions. Raises `ConfigError` for what cannot be watched or posted, and for a login."""
        from rlloop.web.clients import from_environment, refuse_login

        if webhook_env:
            if webhook:
                raise ConfigError("sinks.alerts has webhook and webhook_env; give one of them")
            webhook = from_environment("sinks.alerts.webhook_env", webhook_env)
            check_webhook(webhook, f"what {webhook_env} holds")
        else:
            instead = "and name an environment variable with the whole address: sinks.alerts.webhook_env=NAME"
            refuse_login("sinks.alerts.webhook", str(webhook), instead)
            check_webhook(webhook)
        conditions = [Condition.parse(text) for text in ([when] if isinstance(when, str) else when)]
        if any(each.metric is None and each.silent is None for each in conditions):
            raise ConfigError(
                "sinks.alerts.when has `failed`, which a run that was killed cannot tell; let the dashboard send it: "
                "rlloop dashboard RUNS_DIR --alert failed --webhook URL"
            )
        if not conditions:
            raise ConfigError("sinks.alerts.when is empty; give conditions, as when=['eval/solved < 0.1', 'silent 10']")
        return webhook, conditions

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        with self._guard:
            self._last = time.monotonic()
            self._post(self._alarm.record(step, metrics))

    def _watch(self) -> None:
        waits = [each.silent for each in self._alarm.conditions if each.silent is not None]
        while waits and not self._ended.wait(min(10.0, 60 * min(waits) / 4)):
            with self._guard:
                self._post(self._alarm.quiet((time.monotonic() - self._last) / 60))

    def _post(self, texts: Sequence[str]) -> None:
        self._posts = [thread for thread in self._posts if thread.is_alive()]
        self._posts += [post(self._webhook, text, self._tell) for text in texts]

    def _tell(self, problem: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {problem}\n")

    def close(self) -> None:
        self._ended.set()
        self._watcher.join()
        for thread in self._posts:
            thread.join(TIMEOUT)
