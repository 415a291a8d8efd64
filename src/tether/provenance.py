"""What a run depends on besides its recipe, as fingerprints: a resumed run must find the same.

The reference's weights are checked with its answers (`baseline`); here stand the tokenizer, the
prompts, the reward and the judge.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tether.checkpoint import fingerprint
from tether.data.prompts import Prompt
from tether.errors import CheckpointError
from tether.models.reward_model import REWARD_ADAPTER, RewardModel
from tether.models.word_judge import WordJudge
from tether.prepare import Prepared
from tether.types import RewardFunction


def fingerprints(ready: Prepared) -> dict[str, str]:
    """SHA-256 of everything a run depends on, by the words that a message names it with.

    A reward function stands for the whole file it was written in; one without a file, such as a
    function of a compiled module, cannot be told apart and has no entry.
    """
    found = {
        "tokenizer": _tokenizer(ready.policy.base.tokenizer),
        "held-out prompts": _prompts(ready.prompts.heldout),
        "training prompts": _prompts(ready.prompts.train),
    }
    if ready.reward.model is not None:
        found["reward model"] = _reward_model(ready.reward.model)
    if ready.judge is not None:
        found["judge"] = _judge(ready.judge)
    for name, function in ready.reward.functions:
        sources = _sources(name, function)
        if sources:
            found[f"source of {name}"] = _sha256(path.read_bytes() for path in sources)
    return found


def require_unchanged(run: Path, ready: Prepared) -> None:
    """Raise unless a resumed run depends on what environment.json says it began with.

    Raises:
        CheckpointError: naming what changed, or the file is damaged.
    """
    path = run / "environment.json"
    try:
        begun = dict(json.loads(path.read_text("utf-8")))["sha256"]
        now = fingerprints(ready)
        changed = [name for name in {**now, **begun} if now.get(name) != begun.get(name)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"--resume: {str(path)!r} is missing or damaged, so nobody knows what the run began "
            "with; start the run anew"
        ) from error
    if changed:
        raise CheckpointError(
            f"--resume: changed since {str(run)!r} began: {', '.join(changed)}; put the original "
            "back, or start a new run"
        )


def _sha256(parts: Iterable[bytes]) -> str:
    """Over the parts and the borders between them."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _prompts(prompts: Iterable[Prompt]) -> str:
    return _sha256(prompt.text.encode() for prompt in prompts)


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Vocabulary, rules and template; padding and truncation are set anew at each use."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    whole = {k: v for k, v in rules.items() if k not in {"padding", "truncation"}}
    chat = tokenizer.chat_template
    words = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _sha256([json.dumps([whole, chat, words], sort_keys=True).encode()])


def _reward_model(model: RewardModel) -> str:
    """Weights of the head and of its own adapter, with the description they were saved with."""
    tensors = dict(sorted(model.head.state_dict().items()))
    if model.adapter is not None:
        named = sorted(model.adapter.named_parameters())
        tensors |= {name: p for name, p in named if REWARD_ADAPTER in name.split(".")}
    spec = json.dumps(asdict(model.spec), sort_keys=True)
    return _sha256([spec.encode(), fingerprint(tensors.values()).encode()])


def _judge(judge: WordJudge) -> str:
    words = json.dumps([list(judge.index), judge.bias])
    return _sha256([words.encode(), fingerprint([judge.idf, judge.weights]).encode()])


def _sources(name: str, function: RewardFunction) -> list[Path]:
    """Files of the module that the recipe names and of the one that the function comes from."""
    modules = [sys.modules.get(name.partition(":")[0]), inspect.getmodule(function)]
    files = {getattr(module, "__file__", None) for module in modules}
    return sorted(Path(file) for file in files if file and Path(file).is_file())
