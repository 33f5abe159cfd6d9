r"""Another trainer on rlloop's fleet: publish weights, sample with exact logprobs, learn, repeat.

Model and optimizer are transformers' and torch's; from rlloop come only the fleet's servers, over HTTP. Start the
servers, each in a terminal of its own (see docs/fleet.md):

    rlloop serve trainer --store weights --signing-key key --run-id mine --port 7000
    rlloop serve engine --model MODEL --store http://127.0.0.1:7000 --public-key key.pub --join http://127.0.0.1:7000 \
        --token-file key.token
    RLLOOP_TOKEN=$(cat key.token) python examples/foreign_trainer.py MODEL http://127.0.0.1:7000

The trainer's server writes key.token. MODEL is a Hugging Face folder of a family that rlloop supports. The reward is
the share of tokens with an even id.
"""

from __future__ import annotations

import os
import sys

import httpx
import msgspec
import numpy as np
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from rlloop.rollout.fleet.wire import Answer, Ask, unpack
from rlloop.types import Completion, SamplingParams

PROMPTS, GROUP, TOKENS = 8, 8, 16


def main(folder: str, url: str, steps: int = 5, lr: float = 3e-3) -> list[float]:
    headers = {"Authorization": f"Bearer {os.environ['RLLOOP_TOKEN']}"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    rewards = []
    with httpx.Client(base_url=url, headers=headers, timeout=600.0, trust_env=False) as fleet:
        for step in range(steps):
            weights = {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}
            sync = fleet.post("/fleet/publish", params={"step": step}, content=save(weights)).raise_for_status().json()
            groups = sample(fleet, step, model.config.vocab_size)
            reward_NG = np.array([[reward(each.token_ids) for each in group] for group in groups])
            advantage_NG = reward_NG - reward_NG.mean(axis=1, keepdims=True)
            gap = learn(model, optimizer, groups, advantage_NG)
            rewards.append(float(reward_NG.mean()))
            print(
                f"step {step}: reward {rewards[-1]:.3f}, {sync.get('sync/wire_bytes', 0):,.0f} bytes on the wire, "
                f"largest gap between the engine's logprobs and this trainer's {gap:.1e}",
                flush=True,
            )
    return rewards


def sample(fleet: httpx.Client, step: int, vocabulary: int) -> list[list[Completion]]:
    """`GROUP` completions of each prompt, sampled with the weights of exactly this step."""
    random = np.random.default_rng(step)
    prompts = [random.integers(3, vocabulary, 4).tolist() for _ in range(PROMPTS)]
    each = [prompt for prompt in prompts for _ in range(GROUP)]
    sampling = [SamplingParams(max_tokens=TOKENS, seed=1000 * step + i, ignore_eos=True) for i in range(len(each))]
    ask = Ask(each, sampling, lowest=step, highest=step)
    reply = fleet.post("/fleet/generate", content=msgspec.msgpack.encode(ask)).raise_for_status()
    completions = unpack(ask, msgspec.msgpack.decode(reply.content, type=Answer))
    return [completions[start : start + GROUP] for start in range(0, len(completions), GROUP)]


def reward(token_ids: list[int]) -> float:
    return float(np.mean([id % 2 == 0 for id in token_ids]))


def learn(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[list[Completion]], advantage_NG: np.ndarray
) -> float:
    """One REINFORCE step. Returns the largest difference between sampled and recomputed logprobs, which is not 0: this
    trainer's arithmetic is not the engine's."""
    flat = [completion for group in groups for completion in group]
    ids_ST = torch.tensor([[*each.prompt_ids, *each.token_ids] for each in flat])
    begin = len(flat[0].prompt_ids)
    logits = model(ids_ST).logits[:, begin - 1 : -1].float()
    logprobs_ST = logits.log_softmax(-1).gather(2, ids_ST[:, begin:, None]).squeeze(2)
    advantage_S1 = torch.tensor(advantage_NG.reshape(-1, 1), dtype=torch.float32)
    loss = -(advantage_S1 * logprobs_ST).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sampled_ST = torch.from_numpy(np.stack([each.logprobs for each in flat]))
    return float((sampled_ST - logprobs_ST.detach()).abs().max())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
