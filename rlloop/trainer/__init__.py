"""The update: fp32 master weights, micro-batches under a token budget, schedules, checkpoints."""

from rlloop.trainer.batching import TrainSequence
from rlloop.trainer.checkpoint import Checkpoint, CheckpointStore
from rlloop.trainer.trainer import Trainer
from rlloop.trainer.update_result import UpdateResult

__all__ = ["Checkpoint", "CheckpointStore", "TrainSequence", "Trainer", "UpdateResult"]
