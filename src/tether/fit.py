"""Fit the reward model, and a judge of another kind, on disjoint parts of human judgements."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from peft import get_peft_model
from torch import Tensor

from tether.config import ModelConfig, RewardConfig
from tether.core.accuracy import pair_accuracy
from tether.core.losses import pairwise_reward_loss
from tether.data.judgements import Judgements
from tether.errors import DataError
from tether.models.heads import pool
from tether.models.load import Base
from tether.models.reward_model import (
    REWARD_ADAPTER,
    TOKENS_PER_BATCH,
    RewardModel,
    RewardSpec,
    TokenPair,
    batches_by_length,
    collate,
    encode_text,
    new_head,
    reward_lora,
)
from tether.models.trunk import hidden_after
from tether.models.usable import context_limit
from tether.observer import Observer

HEAD_LEARNING_RATE = 1e-3
ADAPTER_LEARNING_RATE = 2e-4
GROUP = 128
"""Texts compared with each other in one optimiser step of the head."""
ADAPTER_GROUP = 16


def fit_reward_model(
    base: Base,
    train: Judgements,
    test: Judgements,
    *,
    model: ModelConfig,
    reward: RewardConfig,
    seed: int,
    observer: Observer,
) -> tuple[RewardModel, dict[str, Tensor]]:
    """Fit a head (and its adapter) by Bradley-Terry; measure it on held-out pairs.

    Args:
        base: the untouched language model.
        train: texts with human judgements.
        test: others, disjoint by text.
        model: adapter rank and scale, used by an adapter trunk.
        reward: layer, pooling, epochs, gap.
        seed: of initial weights and order.
        observer: told about progress.

    Returns:
        The model, and its adapter's weights by name (empty on a frozen trunk); `base` is
        untouched again.
    """
    spec = RewardSpec(
        base=base.name, layer=reward.layer, pooling=reward.pooling,
        hidden_units=reward.hidden_units, trunk=reward.trunk,
        lora_rank=model.lora_rank, lora_alpha=model.lora_alpha,
    )  # fmt: skip
    head = new_head(base, layer=spec.layer, hidden_units=spec.hidden_units, seed=seed)
    fitted = RewardModel(head=head, spec=spec)
    items, test_items = encode_texts(base, train), encode_texts(base, test)
    observer.stage("reading rated texts", len(items) + len(test_items))
    features = text_features(base, items, spec, observer)
    head.mean.copy_(features.mean(dim=0))  # type: ignore[operator]
    head.std.copy_(features.std(dim=0).clamp(min=1e-6))  # type: ignore[operator]
    weights: dict[str, Tensor] = {}
    if spec.trunk == "frozen":
        _fit_head(fitted, features, train, epochs=reward.epochs, gap=reward.gap, seed=seed)
        test_features = text_features(base, test_items, spec, observer)
    else:
        observer.stage("fitting the reward adapter", reward.epochs)
        weights, test_features = _fit_adapter(
            base, fitted, items, train, test_items, reward=reward, seed=seed, observer=observer
        )
    head.requires_grad_(requires_grad=False)
    return replace(fitted, spec=_measured(fitted, test_features, test)), weights


def encode_texts(base: Base, judged: Judgements) -> list[TokenPair]:
    """Each text with its prompt as ids that the base can read.

    Raises:
        DataError: a text has no token but EOS, or is longer than the model's context.
    """
    limit = context_limit(base.lm)
    items = []
    for i, (text, prompt) in enumerate(zip(judged.texts, judged.prompts, strict=True)):
        item = encode_text(base, text, prompt)
        length = len(item.prompt) + len(item.response)
        if not item.response:
            raise DataError(f"reward.fit: {judged.place(i)} has no token but EOS; remove the row")
        if limit is not None and length > limit:
            raise DataError(
                f"reward.fit: {judged.place(i)} has {length} tokens with its prompt; the model "
                f"reads at most {limit} (max_position_embeddings); shorten or remove the row"
            )
        items.append(item)
    return items


def _measured(
    fitted: RewardModel, features: Float[Tensor, "texts hidden"], test: Judgements
) -> RewardSpec:
    """The model's spec with its held-out pair accuracy written in."""
    found = pair_accuracy(fitted.head(features).cpu(), test.pairs, clusters=test.clusters)
    return replace(
        fitted.spec, accuracy=found.accuracy, accuracy_interval=found.interval, pairs=found.pairs
    )


@torch.no_grad()
def text_features(
    base: Base, items: list[TokenPair], spec: RewardSpec, observer: Observer
) -> Float[Tensor, "texts hidden"]:
    """Pooled hidden states of texts after `spec.layer` layers; layers above are not run."""
    features = torch.zeros(len(items), base.hidden_size, device=base.device)
    lengths = [len(item.prompt) + len(item.response) for item in items]
    for group in batches_by_length(lengths, TOKENS_PER_BATCH):
        tokens, mask, pooled = collate(base, [items[i] for i in group])
        hidden = hidden_after(base.lm, tokens, mask, depth=spec.layer)
        features[group] = pool(hidden, pooled, how=spec.pooling).float()
        observer.advance(len(group))
    return features


def _groups(
    judged: Judgements, size: int, gap: float, seed: int
) -> Iterator[tuple[Int[Tensor, " texts"], Int[Tensor, "pairs 2"]]]:
    """One pass in random order: groups of texts with the pairs inside each group."""
    generator = torch.Generator().manual_seed(seed)
    if judged.scores is None:
        for pairs in judged.pairs[torch.randperm(len(judged.pairs), generator=generator)].split(
            max(1, size // 2)
        ):
            yield pairs.flatten(), torch.arange(pairs.numel()).reshape(-1, 2)
        return
    for texts in torch.randperm(len(judged.texts), generator=generator).split(size):
        scores = judged.scores[texts]
        pairs = (scores[:, None] - scores[None, :] >= gap).nonzero()
        if len(pairs):
            yield texts, pairs


def _descend(
    parameters: list[torch.nn.Parameter],
    judged: Judgements,
    scores_of: Callable[[Int[Tensor, " texts"]], Float[Tensor, " texts"]],
    *,
    rate: float,
    size: int,
    epochs: int,
    gap: float,
    seed: int,
    after_epoch: Callable[[], None],
) -> None:
    """Minimise the Bradley-Terry loss with AdamW and a rate that falls to 0 by cosine."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(epochs):
        for texts, pairs in _groups(judged, size, gap, (seed * 1000 + epoch) % 2**63):
            scores = scores_of(texts)
            optimizer.zero_grad(set_to_none=True)
            pairwise_reward_loss(scores[pairs[:, 0]], scores[pairs[:, 1]]).backward()
            optimizer.step()
        schedule.step()
        after_epoch()


def _fit_head(
    fitted: RewardModel,
    features: Float[Tensor, "texts hidden"],
    judged: Judgements,
    *,
    epochs: int,
    gap: float,
    seed: int,
) -> None:
    """Fit the head alone, on features that were computed once."""
    _descend(
        list(fitted.head.parameters()), judged, lambda texts: fitted.head(features[texts]),
        rate=HEAD_LEARNING_RATE, size=GROUP, epochs=epochs, gap=gap, seed=seed,
        after_epoch=lambda: None,
    )  # fmt: skip


def _fit_adapter(
    base: Base,
    fitted: RewardModel,
    items: list[TokenPair],
    judged: Judgements,
    test_items: list[TokenPair],
    *,
    reward: RewardConfig,
    seed: int,
    observer: Observer,
) -> tuple[dict[str, Tensor], Float[Tensor, "texts hidden"]]:
    """Fit head and adapter together; return the adapter's weights and the test texts' features."""
    spec = fitted.spec
    wrapped = get_peft_model(base.lm, reward_lora(base.lm, spec), adapter_name=REWARD_ADAPTER)

    def scores_of(texts: Int[Tensor, " texts"]) -> Float[Tensor, " texts"]:
        tokens, mask, pooled = collate(base, [items[i] for i in texts.tolist()])
        hidden = hidden_after(base.lm, tokens, mask, depth=spec.layer)
        return fitted.head(pool(hidden, pooled, how=spec.pooling))

    adapter = {n: p for n, p in wrapped.named_parameters() if p.requires_grad}
    _descend(
        [*adapter.values(), *fitted.head.parameters()], judged, scores_of,
        rate=ADAPTER_LEARNING_RATE, size=ADAPTER_GROUP, epochs=reward.epochs, gap=reward.gap,
        seed=seed, after_epoch=observer.advance,
    )  # fmt: skip
    observer.stage("reading test texts", len(test_items))
    features = text_features(base, test_items, spec, observer)
    weights = {name: p.detach().clone().contiguous() for name, p in adapter.items()}
    wrapped.unload()
    return weights, features
