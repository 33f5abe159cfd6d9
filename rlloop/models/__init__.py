"""One model definition for engine and trainer, read from and written to Hugging Face folders."""

from rlloop.models.routing_record import ChoiceCounts, RoutingRecord
from rlloop.models.scoring import Redrawn, RedrawRecord, ScoreRow, redraw, score, token_logprobs
from rlloop.models.transformer import Model
from rlloop.models.weights import load_model, new_model, read_state, save_model

__all__ = [
    "ChoiceCounts",
    "Model",
    "RedrawRecord",
    "Redrawn",
    "RoutingRecord",
    "ScoreRow",
    "load_model",
    "new_model",
    "read_state",
    "redraw",
    "save_model",
    "score",
    "token_logprobs",
]
