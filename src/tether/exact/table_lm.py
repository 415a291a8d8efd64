"""A causal language model that is a table: the last few tokens pick a row of logits.

It is a real transformers model with configuration, cache and safetensors, so the production
sampler, rollout and update run on it unchanged. Its hidden state is the one-hot number of the
state, its output layer the table. Absent on purpose: embeddings and positions.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class TableConfig(PreTrainedConfig):
    """Size of the table.

    Attributes:
        vocab_size: V, number of tokens.
        order: how many tokens before a position pick its row; 1 is a bigram model.
        hidden_size: number of rows, (V + 1) ^ order.
    """

    model_type = "tether_table"

    def __init__(
        self, vocab_size: int = 8, order: int = 1, eos_token_id: int | None = None, **options: Any
    ) -> None:
        self.vocab_size = vocab_size
        self.order = order
        self.hidden_size = (vocab_size + 1) ** order
        self.num_hidden_layers = 1
        self.num_attention_heads = 1
        self.num_key_value_heads = 1
        self.head_dim = 1
        options["tie_word_embeddings"] = False
        super().__init__(eos_token_id=eos_token_id, **options)  # type: ignore[call-arg]


def state_numbers(
    digits: Int[Tensor, "batch time"], *, vocab_size: int, order: int
) -> Int[Tensor, "batch time"]:
    """Number of the state after each position, from the last `order` digits.

        state = Σⱼ digitₜ₋ⱼ (V+1)ʲ,   digit = token + 1, or 0 where there is no token

    Padding on the left thus reads like nothing at all.
    """
    before = digits.new_zeros(len(digits), order - 1)
    windows = torch.cat([before, digits], dim=1).unfold(1, order, 1)  # the last digit is newest
    powers = (vocab_size + 1) ** torch.arange(order - 1, -1, -1, device=digits.device)
    return (windows * powers).sum(dim=-1)


class TableLayer(nn.Module):
    """The only layer: reads tokens, remembers them in the cache, returns the one-hot state."""

    one: Tensor

    def __init__(self, config: TableConfig) -> None:
        super().__init__()
        self.vocab_size, self.order, self.states = (
            config.vocab_size, config.order, config.hidden_size
        )  # fmt: skip
        self.register_buffer("one", torch.ones(()))  # carries the model's dtype

    def forward(
        self, digits: Int[Tensor, "batch time"], cache: DynamicCache | None
    ) -> Float[Tensor, "batch time hidden"]:
        """One-hot states of the new positions; earlier tokens come out of the cache."""
        new = digits.shape[1]
        if cache is not None:
            kept = digits[:, None, :, None]  # batch, one head, time, one number
            digits = cache.update(kept, kept, 0)[0][:, 0, :, 0]
        numbers = state_numbers(digits, vocab_size=self.vocab_size, order=self.order)
        return nn.functional.one_hot(numbers[:, -new:], self.states) * self.one


class TablePreTrainedModel(PreTrainedModel):
    """What transformers asks of both classes below."""

    config_class = TableConfig
    base_model_prefix = "model"

    def _init_weights(self, module: nn.Module) -> None:
        """Start from the uniform distribution."""
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
        if isinstance(module, TableLayer):
            nn.init.ones_(module.one)


class TableModel(TablePreTrainedModel):
    """Token ids to one-hot states."""

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([TableLayer(config)])
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "batch new"],
        attention_mask: Int[Tensor, "batch time"] | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool = False,
        **_ignored: Any,
    ) -> BaseModelOutputWithPast:
        """States after each new token; padding must be on the left or right of the real tokens."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        digits = input_ids + 1
        if attention_mask is not None:
            digits = digits * attention_mask[:, -input_ids.shape[1] :].long()
        hidden = self.layers[0](digits, past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)


class TableLM(TablePreTrainedModel, GenerationMixin):
    """The table as a causal language model; `lm_head.weight[token, state]` is a logit."""

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        self.model = TableModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The table; transformers would look for embeddings first."""
        return self.lm_head

    def forward(
        self,
        input_ids: Int[Tensor, "batch new"],
        attention_mask: Int[Tensor, "batch time"] | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool = False,
        **_ignored: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the token after each new one."""
        read = self.model(input_ids, attention_mask, past_key_values, use_cache)
        return CausalLMOutputWithPast(
            logits=self.lm_head(read.last_hidden_state), past_key_values=read.past_key_values
        )


def table_lm(
    logits: Float[Tensor, "rows vocab"],
    states: Int[Tensor, " rows"],
    *,
    order: int,
    eos: int | None,
) -> TableLM:
    """Make a frozen model in the logits' precision; states that are not given are uniform.

    Args:
        logits: next-token logits of each given state.
        states: their numbers, from `state_numbers`.
        order: tokens that pick a row.
        eos: id that ends a response, or None where every response has the full length.
    """
    config = TableConfig(vocab_size=logits.shape[1], order=order, eos_token_id=eos)
    lm = TableLM(config).to(logits.dtype)  # type: ignore[arg-type]
    with torch.no_grad():
        lm.lm_head.weight[:, states] = logits.T
    return lm.eval().requires_grad_(requires_grad=False)


AutoConfig.register(TableConfig.model_type, TableConfig)
AutoModel.register(TableConfig, TableModel)
AutoModelForCausalLM.register(TableConfig, TableLM)
