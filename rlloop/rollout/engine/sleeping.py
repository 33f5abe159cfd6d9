"""Giving the cache's memory back while others, such as a trainer on the same GPU, need it."""

from __future__ import annotations

from rlloop.errors import ConfigError
from rlloop.rollout.engine.feature_cache import FeatureCache
from rlloop.rollout.engine.front_end import EngineFrontEnd
from rlloop.rollout.engine.kv_cache import PagedCache
from rlloop.rollout.engine.scheduler import Scheduler


class Sleeping(EngineFrontEnd):
    """`sleep` and `wake_up`. CUDA graphs stay, and so do the addresses that they hold."""

    sleeps: bool  # made with `sleep=True`
    _cache: PagedCache
    _scheduler: Scheduler
    _images: FeatureCache
    _asleep = False

    def sleep(self) -> None:
        """Give back the memory of keys, values and states, and forget what they hold. The weights stay.

        Raises `ConfigError` while requests are in flight, and for an engine that was not made with `sleep=True`.
        """
        if self._asleep:
            return
        if not self.sleeps or self._cache.memory is None:
            raise ConfigError("an engine that is to sleep has to be made with sleep=True")
        if self.in_flight:
            raise ConfigError(f"sleep came while {self.in_flight} requests are in flight; call abort_all() first")
        self._scheduler.forget(self.policy_version)
        self._images.forget()
        self._cache.memory.release()
        self._asleep = True

    def wake_up(self) -> None:
        """Take the memory again. Raises `ConfigError` where others have taken it."""
        if self._asleep and self._cache.memory is not None:
            self._cache.memory.restore()
            self._asleep = False
