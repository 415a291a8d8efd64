"""One step of RLHF with tether's parts and no command line: `python examples/one_step.py`."""

import torch

from tether.config import CriticConfig, ModelConfig, PPOConfig
from tether.core.advantages import gae
from tether.core.diagnostics import sequence_kl
from tether.core.masking import whiten
from tether.core.shaping import shape_rewards
from tether.data.prompts import Prompt, prompt_batch
from tether.models.load import load_base, make_policy
from tether.rollout import collect_rollout, measure_kl, read_reference
from tether.update import make_optimizer, training_data, update_policy

OPENINGS = ("Alice was", "The Queen said that", "The little dog", "One day the King") * 8
BETA = 0.1  # reward per nat

config = ModelConfig(name="builtin:glassllm")
base = load_base(config, device=torch.device("cpu"))
policy = make_policy(base, config, value_units=64)
ppo, critic = PPOConfig(learning_rate=3e-3), CriticConfig()
optimizer = make_optimizer(policy, ppo, critic)
encoded = [Prompt(text=t, tokens=tuple(base.tokenizer(t)["input_ids"])) for t in OPENINGS]
prompts = prompt_batch(encoded, base.pad_token)

for step in range(5):
    rollout = collect_rollout(
        policy, prompts, responses_per_prompt=1, max_new_tokens=24, temperature=1.0, seed=step,
        reward_layer=None, recompute_logprobs=False, memory_gib=1.0,
    )  # fmt: skip
    reference = read_reference(policy, rollout, reward_layer=None, memory_gib=1.0)
    drift = measure_kl(policy, rollout, reference, temperature=1.0)
    scores = torch.tensor([float(text.count("e")) for text in rollout.texts])  # any number will do
    rewards = shape_rewards(
        scores, rollout.old_logprobs, drift.ref_logprobs, rollout.response_mask, kl_coef=BETA
    )
    estimate = gae(rewards, rollout.values, rollout.response_mask, gamma=1.0, gae_lambda=0.95)
    data = training_data(rollout, estimate, whiten(estimate.advantages, rollout.response_mask))
    update_policy(policy, optimizer, data, ppo=ppo, critic=critic, temperature=1.0, seed=step)
    nats = sequence_kl(drift.kl, rollout.response_mask)
    print(
        f"step {step}: {scores.mean():.2f} e's a response, "
        f"KL {nats.mean:.3f} ± {nats.standard_error:.3f} nats per response"
    )
