"""Recurrent language models: GRU layers one behind another, plain, as residuals, or as residuals
behind a norm.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


class RecurrentConfig(PretrainedConfig):
    """Sizes of a recurrent language model, and what surrounds each of its layers."""

    model_type = "commsweep_recurrent"

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 128,
        num_hidden_layers: int = 4,
        residual: bool = False,
        norm: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.tie_word_embeddings = False
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.residual, self.norm = num_hidden_layers, residual, norm


class Layer(nn.Module):
    """GRU(x), x + GRU(x), or x + GRU(LayerNorm(x)); x is [batch, tokens, features]."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.ln = nn.LayerNorm(width) if config.norm else nn.Identity()
        self.gru, self.residual = nn.GRU(width, width, batch_first=True), config.residual

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(self.ln(x))
        return x + y if self.residual else y


class Recurrent(nn.Module):
    """Embedding, layers, norm (with `config.norm`)."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size) if config.norm else nn.Identity()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> BaseModelOutput:
        """Hidden states [batch, tokens, features] of tokens [batch, tokens] or their embeddings."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class RecurrentLM(PreTrainedModel):
    """A recurrent model with a head of its own."""

    config_class = RecurrentConfig
    base_model_prefix = "model"

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.model = Recurrent(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> CausalLMOutput:
        """Logits [batch, tokens, vocabulary]."""
        hidden = self.model(input_ids, inputs_embeds).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))
