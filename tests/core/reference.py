"""Independent float64 loops over plain Python lists; each follows its equation, not our code."""

import math


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def kl(policy_logits: list[float], ref_logits: list[float], temperature: float = 1.0) -> float:
    p, q = softmax(policy_logits, temperature), softmax(ref_logits, temperature)
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def gae_double_sum(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> list[float]:
    """Eq. 16: Â_t = Σ_l (γλ)^l δ_{t+l}, with V = 0 after the end; one unpadded response."""
    n = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]


def clipped_loss(
    new: list[float], old: list[float], advantages: list[float], epsilon: float
) -> list[float]:
    losses = []
    for a, b, advantage in zip(new, old, advantages, strict=True):
        ratio = math.exp(a - b)
        clipped = min(max(ratio, 1 - epsilon), 1 + epsilon)
        losses.append(-min(ratio * advantage, clipped * advantage))
    return losses
