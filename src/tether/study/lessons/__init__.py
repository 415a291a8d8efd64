"""The lessons: a page each, with exact numbers computed when it is made.

To add one, write `study/lessons/<name>.py` with `lesson() -> Lesson` and name it in `LESSONS`, in
`mkdocs.yml`, and run `make gallery`. This module imports nothing heavy: listing is instant.
"""

import difflib

from tether.errors import ConfigError

LESSONS = {
    "clipping": "why a clipped update does not bound the walk: clipping against the penalty",
    "shaping": "how the score and the KL become one reward per token, worked by hand",
    "estimators": "k1, k2, k3 and the full KL: value, variance, gradient, and what is refused",
    "tokens": "why a ratio is made of token ids, never of text that was encoded again",
    "hacking": "a reward model that learnt 'longer is better', with and without a tether",
    "collapse": "ten ways to say the right thing: how many are left, against β",
    "direction": "KL(π‖π_ref) and KL(π_ref‖π): what each of them forbids",
    "beta": "too small, too large, right; three controllers; the price of a nat; published values",
    "budget": "proxy and true reward against √KL, when to stop, and best-of-n beside it",
    "reference": "the same run anchored to a pre-trained, a fine-tuned and a too-focused model",
    "information": "KL as extra code length, and the frontier as a rate-distortion curve",
    "dpo": "DPO on all pairs reaches the optimum of RLHF; on few pairs it spends what it likes",
}
"""Name to one line about it, in the order of the gallery."""


def require_known(name: str) -> None:
    """Refuse a name that is no lesson.

    Raises:
        ConfigError: with the nearest name.
    """
    if name not in LESSONS:
        near = difflib.get_close_matches(name, LESSONS, n=1)
        hint = f"did you mean {near[0]}?" if near else "tether lesson lists them"
        raise ConfigError(f"NAME: got {name!r}, which is no lesson; {hint}")
