"""The config of ChatGLM2 and 3, with the fields of the published `config.json`."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig


class ChatGLMConfig(PreTrainedConfig):
    """Sizes and switches of ChatGLM, under the published names.

    num_layers, padded_vocab_size, hidden_size, ffn_hidden_size, num_attention_heads
    kv_channels             features of a head
    seq_length              longest sequence that the model was trained on
    hidden_dropout, attention_dropout
    classifier_dropout      before the head of the sequence classifier; None for none
    layernorm_epsilon, rmsnorm          RMS norms, or layer norms with a bias
    apply_residual_connection_post_layernorm    residuals start behind the norms of a layer instead of before
    post_layer_norm         a norm behind the last layer
    add_bias_linear         biases in every linear of a layer
    add_qkv_bias            a bias in the projection to queries, keys and values
    multi_query_attention, multi_query_group_num    key/value heads that the query heads share; without
                            `multi_query_attention` each query head has its own
    rope_ratio              the base of the rotary embedding is 10000 times this
    fp32_residual_connection    the sums of residuals are kept in float32 where the weights are smaller
    pre_seq_len             trainable keys and values before every sequence, in each layer: all other weights are
                            frozen; None for none
    prefix_projection       these come out of two linears instead of a table
    prefix_dropout          of these; no field of the published config, where it always is 0.1

    Three fields choose how the published code computes the same numbers, and change nothing here:
    `bias_dropout_fusion`, `apply_query_key_layer_scaling` (a factor that the softmax takes back) and
    `attention_softmax_in_fp32` (it always is). Weights that were quantised by the published code are refused.
    """

    model_type = "chatglm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "vocab_size": "padded_vocab_size",
        "intermediate_size": "ffn_hidden_size",
        "head_dim": "kv_channels",
        "max_position_embeddings": "seq_length",
    }

    num_layers: int = 28
    padded_vocab_size: int = 65024
    hidden_size: int = 4096
    ffn_hidden_size: int = 13696
    kv_channels: int = 128
    num_attention_heads: int = 32
    seq_length: int = 2048
    hidden_dropout: float = 0.0
    classifier_dropout: float | None = None
    attention_dropout: float = 0.0
    layernorm_epsilon: float = 1e-5
    rmsnorm: bool = True
    apply_residual_connection_post_layernorm: bool = False
    post_layer_norm: bool = True
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    bias_dropout_fusion: bool = True
    multi_query_attention: bool = False
    multi_query_group_num: int = 1
    rope_ratio: float = 1.0
    original_rope: bool = True
    apply_query_key_layer_scaling: bool = True
    attention_softmax_in_fp32: bool = True
    fp32_residual_connection: bool = False
    quantization_bit: int = 0
    pre_seq_len: int | None = None
    prefix_projection: bool = False
    prefix_dropout: float = 0.1
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.quantization_bit:
            raise ValueError(
                f"quantization_bit={self.quantization_bit!r} must be 0: weights in 4 or 8 bits of the published code "
                "cannot be trained; load the checkpoint in 16 bits"
            )
        if not self.original_rope:
            raise ValueError("original_rope=False names a rotary embedding that was never published; leave it True")
        heads, groups = self.num_attention_heads, self.multi_query_group_num
        if self.multi_query_attention and (groups < 1 or heads % groups):
            divisors = [count for count in range(1, heads + 1) if heads % count == 0]
            raise ValueError(
                f"multi_query_group_num={groups!r} must divide num_attention_heads={heads}: one of {divisors}"
            )
        if self.kv_channels % 4:
            raise ValueError(
                f"kv_channels={self.kv_channels!r} must be a multiple of 4: half of a head is rotated, in pairs; "
                f"{-(-self.kv_channels // 4) * 4} would do"
            )
        if self.pre_seq_len is not None and self.pre_seq_len < 1:
            raise ValueError(f"pre_seq_len={self.pre_seq_len!r} must be at least 1, or None for no prefix")
        if self.prefix_projection and self.pre_seq_len is None:
            raise ValueError("prefix_projection=True needs pre_seq_len=, the length of the prefix; set both or neither")

    @property
    def num_key_value_heads(self) -> int:
        return self.multi_query_group_num if self.multi_query_attention else self.num_attention_heads


AutoConfig.register(ChatGLMConfig.model_type, ChatGLMConfig, exist_ok=True)
