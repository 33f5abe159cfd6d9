"""What can go wrong, as a tree.

    RlloopError
    ├── ConfigError (ValueError)       a setting, an argument or a combination of them that cannot work
    ├── ModelError (ValueError)        a checkpoint folder that is missing, unsupported or does not fit
    ├── RunError (ValueError)          a run folder that is missing, damaged or belongs to another run
    ├── ParityError                    engine and trainer disagree where the run requires that they do not
    └── SyncError                      weights that could not be published or brought over; what served still serves

A user's mistake is a `ValueError` whose message says what was given, what is allowed and what to change, raised before
any work starts. A broken invariant of rlloop's own is an `assert`.
"""

import msgspec

# What decoders raise for bytes that are not what they should be: text that is not UTF-8 and integers of thousands of
# digits are ValueErrors, and what is nested too deeply ends in a RecursionError.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class RlloopError(Exception):
    """Base of every error that rlloop raises on purpose. `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(RlloopError, ValueError):
    """A setting that cannot work: says which, what it was and what is allowed."""

    exit_code = 2


class ModelError(RlloopError, ValueError):
    """A model folder that is missing, of an unsupported architecture, or whose tensors do not fit."""

    exit_code = 2


class RunError(RlloopError, ValueError):
    """A run folder that is missing, damaged, or not the one the configuration describes."""

    exit_code = 2


class ParityError(RlloopError):
    """The trainer's bits differ from the engine's in a run whose `parity.mode` is `require`."""

    exit_code = 3


class SyncError(RlloopError):
    """A version of the weights could not be published, fetched or applied. What was served before still is."""
