"""A table whose hidden state also tells what came before, for the critic's sake alone.

The output layer does not read it, so the policy stays a table of the last tokens. The value head
does: a score that comes at the end depends on the whole response, and a critic that sees only the
last token is wrong by what was earned before, which biases GAE for every λ below 1.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from tether.exact.table_lm import TableConfig, TableLM, TableModel


class HistoryConfig(TableConfig):
    """A table's size and how much of the past is told.

    Attributes:
        steps: longest history, tokens; what is longer reads like this long.
        states: rows of the table, the part of the hidden state that the output layer reads.
        hidden_size: states, then steps × states, then tokens × (steps + 1).
    """

    model_type = "tether_history_table"

    def __init__(self, steps: int = 7, **options: Any) -> None:
        super().__init__(**options)
        self.steps = steps
        self.states = self.hidden_size
        self.hidden_size = self.states * (1 + steps) + self.vocab_size * (steps + 1)


class HistoryModel(TableModel):
    """Token ids to the one-hot state, the one-hot pair of step and state, and token counts.

    How often each token came is one-hot too, so the same number of entries is 1 at every position
    and a layer norm on top only scales and shifts.
    """

    config_class = HistoryConfig

    def __init__(self, config: HistoryConfig) -> None:
        super().__init__(config)
        self.layers[0].states = config.states
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "batch new"],
        attention_mask: Int[Tensor, "batch time"] | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool = False,
        **_ignored: Any,
    ) -> BaseModelOutputWithPast:
        """States after each new token, with the whole sequence behind each."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        read = super().forward(input_ids, attention_mask, past_key_values, use_cache)
        state, digits = read.last_hidden_state, input_ids + 1
        assert state is not None
        if past_key_values is not None:
            kept: Any = past_key_values.layers[0]  # the layer below keeps the tokens there
            digits = kept.keys[:, 0, :, 0]
        elif attention_mask is not None:
            digits = digits * attention_mask.long()
        return BaseModelOutputWithPast(
            last_hidden_state=self._hidden(digits, state),  # type: ignore[arg-type]
            past_key_values=past_key_values,
        )

    def _hidden(
        self, digits: Int[Tensor, "batch time"], state: Float[Tensor, "batch new states"]
    ) -> Float[Tensor, "batch new hidden"]:
        """State, step and state, and token counts at the new positions; digit 0 is no token."""
        steps, states, vocab = self.config.steps, self.config.states, self.config.vocab_size
        tokens = torch.arange(1, vocab + 1, device=digits.device)
        counts = (digits[..., None] == tokens).cumsum(dim=1)[:, -state.shape[1] :]
        step = (counts.sum(dim=-1, keepdim=True) - 1).clamp(0, steps - 1)
        number = state.argmax(dim=-1, keepdim=True)
        told = states * (1 + steps) + (tokens - 1) * (steps + 1) + counts.clamp(max=steps)
        ones = torch.cat([number, states * (1 + step) + number, told], dim=-1)
        hidden = state.new_zeros(*state.shape[:2], self.config.hidden_size)
        return hidden.scatter_(-1, ones, 1.0)


class TableHead(nn.Linear):
    """Logits of a state, whatever came before."""

    def forward(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:  # type: ignore[override]
        """Read the table with the first part of the hidden state."""
        return super().forward(hidden[..., : self.in_features])


class HistoryTableLM(TableLM):
    """The table with a history as a causal language model; its weights are the table's."""

    config_class = HistoryConfig

    def __init__(self, config: HistoryConfig) -> None:
        super().__init__(config)
        self.model = HistoryModel(config)
        self.lm_head = TableHead(config.states, config.vocab_size, bias=False)
        self.post_init()


def with_history(lm: TableLM, *, steps: int) -> HistoryTableLM:
    """The same frozen model with so many tokens of history in its hidden state."""
    given = lm.config
    config = HistoryConfig(
        steps=steps, vocab_size=given.vocab_size, order=given.order, eos_token_id=given.eos_token_id
    )
    history = HistoryTableLM(config).to(lm.dtype)  # type: ignore[arg-type]
    history.load_state_dict(lm.state_dict())
    return history.eval().requires_grad_(requires_grad=False)
