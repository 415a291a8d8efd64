"""Rewards written in Python: `reward.function: recipes.rewards:cheerful`."""

CHEERFUL = {"happy", "good", "great", "love", "laughed", "smile", "joy", "pretty", "dear", "kind"}
GLOOMY = {"sad", "bad", "angry", "cried", "afraid", "dead", "poor", "tears", "dark", "alone"}


def cheerful(prompts: list[str], responses: list[str]) -> list[float]:
    """Cheerful words minus gloomy ones, per response."""
    del prompts
    return [_tone(response) for response in responses]


def _tone(text: str) -> float:
    words = [word.strip(".,;:!?'\"").lower() for word in text.split()]
    return float(sum(w in CHEERFUL for w in words) - sum(w in GLOOMY for w in words))
