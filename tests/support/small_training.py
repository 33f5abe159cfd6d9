"""A small training on any service, local or remote: what it returns must have the same bits on each."""

import os

import numpy as np

import rlloop
from rlloop.training.types import AdamParams, Datum, SamplingParams
from rlloop.types import ModelInput


def datum(*tokens):
    inputs = {"target_tokens": list(tokens[1:]), "weights": [1.0] * (len(tokens) - 1)}
    return Datum(ModelInput.from_ids(list(tokens[:-1])), inputs)


class EndsItsReader:
    """A setting of a service: the process that unpickles it ends at once."""

    def __reduce__(self):
        return os._exit, (7,)


def trained(service):
    """Digest of the weights after updates that are all sent at once, and completions that they sample."""
    client = rlloop.ServiceClient(service).create_lora_training_client(rank=4, seed=1)
    pairs = [
        (client.forward_backward([datum(5, 9, 14, step, 7), datum(3, step)], "cross_entropy"),
         client.optim_step(AdamParams(learning_rate=0.02)))
        for step in range(3)
    ]  # fmt: skip
    losses = [pair[0].result().metrics["loss:sum"] for pair in pairs]
    sampler = client.save_weights_and_get_sampling_client()
    answer = sampler.sample([5, 9, 14], num_samples=2, sampling_params=SamplingParams(max_tokens=6, seed=3)).result()
    drawn = [(each.tokens, np.float32(each.logprobs).tobytes()) for each in answer.sequences]
    digest = service.weights_digest(client.model_id)
    assert service.weights_digest(client.model_id, adapters_only=True).result() == digest.result()
    return digest.result(), losses, drawn
