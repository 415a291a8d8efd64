"""Running a decoder in parts, so that no layer is computed twice for the same tokens.

Layers below the first adapter are the same for policy, reference and reward model. Their output
is kept when the tokens are sampled and handed to the later passes, which start above them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.core.logprobs import Head
from tether.core.masking import position_ids
from tether.errors import ConfigError


def decoder_layers(lm: PreTrainedModel) -> nn.ModuleList:
    """Find the list of decoder layers.

    Raises:
        ConfigError: the architecture has no list as long as its configuration says.
    """
    count = lm.config.get_text_config().num_hidden_layers
    for module in lm.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(
        f"model.name: {type(lm).__name__} has no list of {count} decoder layers; use another model"
    )


def output_head(lm: PreTrainedModel) -> Head:
    """The map from final hidden states to logits.

    Raises:
        ConfigError: the model has no output layer.
    """
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ConfigError(f"model.name: {type(lm).__name__} has no output layer")
    return head


@contextmanager
def keeping(
    lm: PreTrainedModel, depths: Iterable[int]
) -> Iterator[dict[int, Float[Tensor, "batch time hidden"]]]:
    """Collect the hidden states after the given numbers of layers (1 = after the first).

    The dictionary is filled by the next forward pass.
    """
    layers = decoder_layers(lm)
    kept: dict[int, Tensor] = {}

    def hook(depth: int) -> Callable[..., None]:
        def store(_module: nn.Module, _inputs: object, output: Any) -> None:
            kept[depth] = output if isinstance(output, Tensor) else output[0]

        return store

    with ExitStack() as stack:
        for depth in depths:
            handle = layers[depth - 1].register_forward_hook(hook(depth))
            stack.callback(handle.remove)
        yield kept


@contextmanager
def starting_above(
    lm: PreTrainedModel, depth: int, hidden: Float[Tensor, "batch time hidden"]
) -> Iterator[None]:
    """Let the first `depth` layers hand through `hidden`, their output kept from another pass."""
    skipped = decoder_layers(lm)[:depth]

    def hand_through(*_args: object, **_kwargs: object) -> Tensor:
        return hidden

    for layer in skipped:
        layer.forward = hand_through  # shadows the class's method until it is deleted again
    try:
        yield
    finally:
        for layer in skipped:
            del layer.forward


def final_hidden(
    lm: PreTrainedModel,
    tokens: Int[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    above: int = 0,
    entering: Float[Tensor, "batch time hidden"] | None = None,
) -> Float[Tensor, "batch time hidden"]:
    """Final hidden states (after the last norm) of whole sequences.

    Args:
        lm: the causal language model.
        tokens: ids, padding anywhere.
        mask: True on real tokens.
        above: layers that are handed through instead of computed.
        entering: their output; required when `above` is not 0.

    Returns:
        One state per position; the head turns state t into the distribution of token t + 1.
    """
    inputs = {
        "input_ids": tokens,
        "attention_mask": mask.long(),
        "position_ids": position_ids(mask),
        "use_cache": False,
    }
    if above == 0 or entering is None:
        return lm.base_model(**inputs).last_hidden_state
    with starting_above(lm, above, entering):
        return lm.base_model(**inputs).last_hidden_state


class _DeepEnoughError(Exception):
    """Carries the hidden states out of a forward pass that need go no deeper."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def hidden_after(
    lm: PreTrainedModel,
    tokens: Int[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    depth: int,
) -> Float[Tensor, "batch time hidden"]:
    """Hidden states after `depth` layers; the layers above are not run."""

    def stop(_module: nn.Module, _inputs: object, output: Any) -> None:
        raise _DeepEnoughError(output if isinstance(output, Tensor) else output[0])

    handle = decoder_layers(lm)[depth - 1].register_forward_hook(stop)
    try:
        final_hidden(lm, tokens, mask)
    except _DeepEnoughError as reached:
        return reached.hidden
    finally:
        handle.remove()
    raise AssertionError("the hook ends every pass")
