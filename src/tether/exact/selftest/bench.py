"""The bench of the self-test: small models in the user's precision, run by production code alone.

Two models: the language of two letters, a table whose 31 responses are all known, and a random
Llama with an adapter, cache and padding. Whatever a check needs of them is made once a run, so
that a sabotage reaches everything that is made under it.
"""

import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tether.config import CriticConfig, ModelConfig, PPOConfig
from tether.core.advantages import gae
from tether.core.masking import length_mask, whiten
from tether.core.shaping import shape_rewards
from tether.exact.languages import VALUE_UNITS, Language, word_tokenizer
from tether.exact.selftest.oracle import small_language
from tether.exact.tree import Tree
from tether.generation.sampler import sample
from tether.generation.sequences import last_tokens, response_states, sequence
from tether.models.load import Base, Policy, make_policy, policy_parameters
from tether.models.trunk import final_hidden
from tether.rollout import collect_rollout, measure_kl, read_reference, trainer_logprobs
from tether.types import Drift, Generation, PromptBatch, Rollout
from tether.update import TrainingData, training_data, update_policy

MEMORY_GIB = 2.0
KL_COEF = 0.5
"""β of the small languages: theory's fixed points are given for it."""
WARM, COOL = 1.0, 0.7
"""Temperatures; the second shows where one is forgotten."""
LLAMA_LIMIT = 6
"""Tokens of the Llama's responses."""
ONE_STEP = PPOConfig(minibatches=1, max_gradient_norm=1e30)
"""All rows in one optimiser step, the gradient as it comes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """Models and rollouts of one run of all checks.

    Attributes:
        device: where the models live.
        dtype: precision of their weights and states.
    """

    device: torch.device
    dtype: torch.dtype

    @cached_property
    def language(self) -> Language:
        """Two letters and EOS, at most four tokens."""
        return small_language()

    @cached_property
    def scores(self) -> Float[Tensor, " sequences"]:
        """The reward of every response, as production takes it."""
        return self.language.rewards.to(self.device, torch.float32)

    @cached_property
    def tree(self) -> Tree:
        """The language's responses on the device, with the mask that production makes."""
        tree, device = self.language.tree, self.device
        lengths = tree.mask.sum(dim=1)
        return replace(
            tree,
            tokens=tree.tokens.to(device),
            mask=length_mask(lengths.to(device), tree.length),
            prefix=tree.prefix.to(device),
            next_prefix=tree.next_prefix.to(device),
            ends=tree.ends.to(device),
        )

    def tabular(self, name: str = "policy") -> Policy:
        """A policy of the letters; every logit is trained. `reference` starts at the reference."""
        language = self.language
        base = _on_device(language.base(copy.deepcopy(language.reference)), self.device, self.dtype)
        config = ModelConfig(name=language.name, trainable="full")
        policy = make_policy(base, config, value_units=VALUE_UNITS)
        if name != "reference":
            policy.lm.load_state_dict(language.others[name].state_dict())
        return _with_opinion(policy)

    @cached_property
    def table_policy(self) -> Policy:
        """The letters' policy, moved away from its reference. Not to be trained."""
        return self.tabular()

    @cached_property
    def table_drift(self) -> Drift:
        """KL and reference log-probabilities of every response at temperature 1."""
        return drift(self.table_policy, self.table_rollout, WARM)

    @cached_property
    def table_rollout(self) -> Rollout:
        """Every response once, at temperature 1."""
        return every_response(self, self.table_policy, WARM)

    @cached_property
    def llama_base(self) -> Base:
        """The untouched random Llama, kept for comparison."""
        return _on_device(_llama(), self.device, self.dtype)

    @cached_property
    def llama(self) -> Policy:
        """The same Llama with an adapter on its upper layer that is not 0. Not to be trained."""
        config = ModelConfig(name="llama", lora_rank=4, lora_alpha=8, lora_first_layer=1)
        base = replace(self.llama_base, lm=copy.deepcopy(self.llama_base.lm))
        policy = make_policy(base, config, value_units=8)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in policy_parameters(policy).items():
                if "lora_B" in name:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(0.2 * noise.to(parameter))
        return _with_opinion(policy)

    @cached_property
    def llama_rollout(self) -> Rollout:
        """Responses of the Llama to prompts of different lengths, sampled in production."""
        prompts = PromptBatch(
            prompt_tokens=torch.tensor([[2, 2, 3], [2, 4, 5], [6, 7, 8]]),
            prompt_mask=torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=torch.bool),
            texts=("w3", "w4 w5", "w6 w7 w8"),
        ).to(self.device)
        return collect_rollout(
            self.llama, prompts, responses_per_prompt=3, max_new_tokens=LLAMA_LIMIT,
            temperature=COOL, seed=1, reward_layer=None, recompute_logprobs=False,
            memory_gib=MEMORY_GIB,
        )  # fmt: skip

    @cached_property
    def llama_scores(self) -> Float[Tensor, " batch"]:
        """A score for each of the Llama's responses."""
        generator = torch.Generator().manual_seed(2)
        return torch.randn(len(self.llama_rollout.texts), generator=generator).to(self.device)


def _on_device(base: Base, device: torch.device, dtype: torch.dtype) -> Base:
    """The same model on a device, in a precision."""
    lm = base.lm.to(device=device, dtype=dtype)  # type: ignore[call-overload]
    return replace(base, lm=lm, eos_tokens=base.eos_tokens.to(device))


def _with_opinion(policy: Policy) -> Policy:
    """A value head that does not answer 0, so that values are in play."""
    generator = torch.Generator().manual_seed(7)
    weight = policy.value_head.net[-1].weight
    with torch.no_grad():
        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))  # type: ignore[operator, arg-type]
    return policy


def _llama() -> Base:
    """Two layers of random weights, wide enough that its distributions are far from uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.3, attention_dropout=0.1,
        bos_token_id=None, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    words = tuple("</s>" if i == 2 else f"w{i}" for i in range(11))
    lm = LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)
    return Base(
        lm=lm, tokenizer=word_tokenizer(words, 2), eos_tokens=torch.tensor([2]), pad_token=2,
        name="llama",
    )  # fmt: skip


@torch.no_grad()
def every_response(bench: Bench, policy: Policy, temperature: float) -> Rollout:
    """Every response of the letters once, read by production as if it had been sampled."""
    tree, count = bench.tree, len(bench.tree.tokens)
    prompts = bench.language.prompts(count).to(bench.device)
    blank = torch.zeros(tree.tokens.shape, device=bench.device)
    generation = Generation(
        prompt_tokens=prompts.prompt_tokens,
        prompt_mask=prompts.prompt_mask,
        prompt_texts=prompts.texts,
        response_tokens=tree.tokens,
        response_mask=tree.mask,
        sampler_logprobs=blank,
        policy_hidden=torch.zeros(*blank.shape, 1, device=bench.device, dtype=bench.dtype),
        layer_hidden={},
    )
    states = response_states(final_hidden(policy.lm, *sequence(generation)), generation)
    old = trainer_logprobs(policy, generation, temperature=temperature, memory_gib=MEMORY_GIB)
    return as_rollout(policy, replace(generation, sampler_logprobs=old, policy_hidden=states))


@torch.no_grad()
def as_rollout(policy: Policy, generation: Generation) -> Rollout:
    """A rollout whose texts nobody reads."""
    return Rollout(
        generation=generation,
        texts=generation.prompt_texts,
        finished=torch.isin(last_tokens(generation), policy.base.eos_tokens),
        old_logprobs=generation.sampler_logprobs,
        values=policy.value_head(generation.policy_hidden),
    )


def sampled(bench: Bench, policy: Policy, *, count: int, temperature: float, seed: int) -> Rollout:
    """Responses of the letters from the production sampler."""
    generation = sample(
        policy.base, bench.language.prompts().to(bench.device), responses_per_prompt=count,
        max_new_tokens=bench.language.length, temperature=temperature, seed=seed,
        memory_gib=MEMORY_GIB,
    )  # fmt: skip
    return as_rollout(policy, generation)


def drift(policy: Policy, rollout: Rollout, temperature: float) -> Drift:
    """The reference's pass and the exact KL, as in a training step."""
    reference = read_reference(policy, rollout, reward_layer=None, memory_gib=MEMORY_GIB)
    return measure_kl(policy, rollout, reference, temperature=temperature)


def prepared(
    policy: Policy,
    rollout: Rollout,
    scores: Float[Tensor, " batch"],
    *,
    temperature: float,
    weights: Float[Tensor, " batch"] | None = None,
) -> TrainingData:
    """KL, rewards and advantages as in a training step.

    Args:
        policy: with its reference.
        rollout: sampled responses, or every response.
        scores: one a response.
        temperature: divides logits.
        weights: probability of each response where the rollout holds every one once: then each
            advantage is multiplied by it instead of whitened, and sums become expectations.
    """
    mask = rollout.response_mask
    ref_logprobs = drift(policy, rollout, temperature).ref_logprobs
    rewards = shape_rewards(scores, rollout.old_logprobs, ref_logprobs, mask, kl_coef=KL_COEF)
    whole = 1.0 if weights is not None else 0.95
    estimate = gae(rewards, rollout.values, mask, gamma=1.0, gae_lambda=whole)
    if weights is None:
        return training_data(rollout, estimate, whiten(estimate.advantages, mask))
    weighted = estimate.advantages * weights[:, None] * int(mask.sum())
    return training_data(rollout, estimate, weighted)


class GradientRecorder(torch.optim.AdamW):
    """Takes the place of the optimiser in an update: keeps the gradient and moves nothing."""

    gradient: Float[Tensor, " parameters"]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Remember the policy's gradient, all parameters in one row, in float64."""
        policy = self.param_groups[0]["params"]
        self.gradient = torch.cat([p.grad.double().cpu().flatten() for p in policy])


def update_gradient(
    policy: Policy, data: TrainingData, *, temperature: float, ppo: PPOConfig = ONE_STEP
) -> tuple[Float[Tensor, " parameters"], dict[str, float]]:
    """The gradient that the production update hands to its optimiser, and the update's metrics."""
    groups = [list(policy_parameters(policy).values()), list(policy.value_head.parameters())]
    optimizer = GradientRecorder([{"params": parameters, "lr": 0.0} for parameters in groups])
    metrics = update_policy(
        policy, optimizer, data, ppo=ppo, critic=CriticConfig(), temperature=temperature, seed=0
    )
    return optimizer.gradient, metrics
