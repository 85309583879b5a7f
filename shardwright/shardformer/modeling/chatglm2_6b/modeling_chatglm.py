"""ChatGLM2 and 3 as transformers models, written after the published architecture.

Parameters have the names of the published checkpoints, which load as they are. What differs from the code published
with these: hidden states are [B, S, H], not [S, B, H], and the cache is one of transformers'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_chatglm import ChatGLMConfig
from .layers import Embedding, GLMBlock, GLMTransformer, RotaryEmbedding, SelfAttention, inverse_frequencies
from .prefix_encoder import PrefixEncoder


class ChatGLMPreTrainedModel(PreTrainedModel):
    config: ChatGLMConfig
    config_class = ChatGLMConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GLMBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": GLMBlock, "attentions": SelfAttention}

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RotaryEmbedding):
            init.copy_(module.inv_freq, inverse_frequencies(self.config))

    def _trunk(self) -> Any:
        return self.base_model

    def get_input_embeddings(self) -> nn.Module:
        return self._trunk().embedding.word_embeddings  # type: ignore[no-any-return]

    def set_input_embeddings(self, value: nn.Module) -> None:
        self._trunk().embedding.word_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        return self._trunk().output_layer  # type: ignore[no-any-return]

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self._trunk().output_layer = new_embeddings


class ChatGLMModel(ChatGLMPreTrainedModel):
    """Words to hidden states. The head over the vocabulary is part of it, as in the checkpoints, but not called."""

    _tied_weights_keys = {"output_layer.weight": "embedding.word_embeddings.weight"}

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.embedding = Embedding(config)
        self.rotary_pos_emb = RotaryEmbedding(config)
        self.encoder = GLMTransformer(config)
        self.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.pre_seq_len = config.pre_seq_len
        if self.pre_seq_len is not None:
            self.requires_grad_(False)
            self.prefix_encoder = PrefixEncoder(config)
            self.dropout = nn.Dropout(config.prefix_dropout)
        self.gradient_checkpointing = False
        self.post_init()

    def _prefixes(self, x: torch.Tensor) -> list[torch.Tensor | None]:
        """For each layer, [2, B, groups, P, channels] of keys and values before the tokens `x` [B, S, H]."""
        layers = self.config.num_layers
        if self.pre_seq_len is None:
            return [None] * layers
        tokens = torch.arange(self.pre_seq_len, device=x.device).expand(x.shape[0], -1)
        heads = (2 * layers, self.config.num_key_value_heads, self.config.kv_channels)
        prefix = self.dropout(self.prefix_encoder(tokens).to(x.dtype).unflatten(-1, heads))
        return list(prefix.permute(2, 0, 3, 1, 4).split(2))

    def _mask(
        self,
        x: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        position_ids: torch.Tensor,
    ) -> Any:
        """Causal, whatever form the attention function takes; every token sees the whole prefix."""
        mask: Any = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            allow_is_causal_skip=self.pre_seq_len is None,
        )
        if self.pre_seq_len is None or mask is None:  # without a mask, queries are the last of the keys
            return mask
        if not isinstance(mask, torch.Tensor):
            raise ValueError(
                f"attn_implementation={self.config._attn_implementation!r} with pre_seq_len={self.pre_seq_len}: its "
                f"mask, a {type(mask).__name__}, has no room for a prefix; use 'sdpa', 'eager' or a flash attention"
            )
        seen = 0 if mask.is_floating_point() else 1
        return torch.cat((mask.new_full((*mask.shape[:-1], self.pre_seq_len), seen), mask), dim=-1)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Positions count tokens, not the prefix, whose keys are not rotated."""
        if (input_ids is None) == (inputs_embeds is None):
            given = "both" if input_ids is not None else "neither"
            raise ValueError(f"input_ids and inputs_embeds: {given} given; pass one of them")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(x.shape[1], device=x.device) + past).unsqueeze(0)  # type: ignore[assignment]
        hidden_states = self.encoder(
            x,
            self._prefixes(x),
            attention_mask=self._mask(x, attention_mask, past_key_values, position_ids),  # type: ignore[arg-type]
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=self.rotary_pos_emb(x, position_ids),
            **kwargs,
        )
        # residuals may have been wider than the weights
        return BaseModelOutputWithPast(last_hidden_state=hidden_states.to(x.dtype), past_key_values=past_key_values)


class ChatGLMForConditionalGeneration(ChatGLMPreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"transformer.output_layer.weight": "transformer.embedding.word_embeddings.weight"}

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.transformer = ChatGLMModel(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        return_last_logit: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """`labels` are the inputs, or -100 where they do not count: they are shifted here. `return_last_logit` is the
        published name of `logits_to_keep=1`.
        """
        outputs = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        keep = 1 if return_last_logit else logits_to_keep
        kept = slice(-keep, None) if isinstance(keep, int) else keep
        logits = self.transformer.output_layer(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.padded_vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class ChatGLMForSequenceClassification(ChatGLMPreTrainedModel):
    """A class for the last token that the mask counts: the last of the sequence where none does, as published."""

    _tied_weights_keys = ChatGLMForConditionalGeneration._tied_weights_keys

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.num_labels: int = config.num_labels  # type: ignore[assignment]
        self.transformer = ChatGLMModel(config)
        self.classifier_head = nn.Linear(config.hidden_size, self.num_labels, bias=True)
        self.dropout = nn.Dropout(config.classifier_dropout or 0.0)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        outputs = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        logits = self.classifier_head(self.dropout(_last(hidden_states, attention_mask)))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=hidden_states, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _last(x: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """[B, S, H] -> [B, H], of the last token that a mask [B, T] counts."""
    if attention_mask is None or attention_mask.ndim != 2:
        return x[:, -1]
    counted = attention_mask[:, -x.shape[1] :].to(x.device) != 0
    places = torch.arange(x.shape[1], device=x.device)
    return x[torch.arange(x.shape[0], device=x.device), (places * counted).argmax(-1)]


AutoModel.register(ChatGLMConfig, ChatGLMModel, exist_ok=True)
AutoModelForCausalLM.register(ChatGLMConfig, ChatGLMForConditionalGeneration, exist_ok=True)
AutoModelForSeq2SeqLM.register(ChatGLMConfig, ChatGLMForConditionalGeneration, exist_ok=True)
AutoModelForSequenceClassification.register(ChatGLMConfig, ChatGLMForSequenceClassification, exist_ok=True)
