"""Policies of GPT-2, OPT, BERT and T5 as users of Colossal-AI write them: layers class by class, vocabulary included,
neutral arguments everywhere, dropout layers for parallel input wherever a dropout is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.models.bert.modeling_bert import (
    BertEmbeddings,
    BertForMaskedLM,
    BertLayer,
    BertLMPredictionHead,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2LMHeadModel, GPT2Model
from transformers.models.opt.modeling_opt import OPTDecoder, OPTDecoderLayer, OPTForCausalLM
from transformers.models.t5.modeling_t5 import (
    T5Attention,
    T5DenseActDense,
    T5DenseGatedActDense,
    T5ForConditionalGeneration,
    T5LayerCrossAttention,
    T5LayerFF,
    T5LayerSelfAttention,
    T5Stack,
)

import shardwright.shardformer.layer as col_nn
from shardwright.shardformer.policies.base_policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
)

Descriptions = dict[Any, ModulePolicyDescription]


def child(suffix: str, target: Any, **kwargs: Any) -> SubModuleReplacementDescription:
    return SubModuleReplacementDescription(suffix=suffix, target_module=target, kwargs=kwargs or None)  # type: ignore[arg-type]


class ReferencePolicy(Policy):
    """What all of them share: hooks that do little, and the arguments that every layer is given."""

    def config_sanity_check(self) -> None:
        pass

    def preprocess(self) -> nn.Module:
        self.tie_weight = self.tie_weight_check()
        return self.model

    def postprocess(self) -> nn.Module:
        return self.model

    def get_held_layers(self) -> list[nn.Module]:
        return []

    def get_shared_params(self) -> list[dict[int, torch.Tensor]]:
        return []

    def neutral(self, **own: Any) -> dict[str, Any]:
        return {
            "seq_parallel_mode": self.shard_config.sequence_parallelism_mode,
            "fp8_communication": self.shard_config.fp8_communication,
            "use_zbv": self.pipeline_stage_manager is not None,
            **own,
        }

    def padding(self) -> dict[str, Any]:
        return {"make_vocab_size_divisible_by": self.shard_config.make_vocab_size_divisible_by}

    def head(self, policy: Descriptions, key: Any, suffix: str) -> Descriptions:
        arguments = {"gather_output": not self.shard_config.parallel_output, **self.padding()}
        return self.append_or_create_submodule_replacement(
            description=child(suffix, col_nn.VocabParallelLMHead1D, fp8_communication=False, **arguments),
            policy=policy,
            target_key=key,
        )


class GPT2LMHeadModelPolicy(ReferencePolicy):
    def module_policy(self) -> Descriptions:
        config, ranks = self.model.config, self.shard_config.tensor_parallel_size
        policy: Descriptions = {
            GPT2Model: ModulePolicyDescription(
                sub_module_replacement=[child("drop", col_nn.DropoutForParallelInput)],
            ),
            GPT2Block: ModulePolicyDescription(
                attribute_replacement={
                    "attn.embed_dim": config.hidden_size // ranks,
                    "attn.split_size": config.hidden_size // ranks,
                    "attn.num_heads": config.num_attention_heads // ranks,
                },
                sub_module_replacement=[
                    child(
                        "attn.c_attn",
                        col_nn.GPT2FusedLinearConv1D_Col,
                        **self.neutral(split_sizes=[config.hidden_size] * 3),
                    ),
                    child("attn.c_proj", col_nn.GPT2FusedLinearConv1D_Row, **self.neutral()),
                    child(
                        "mlp.c_fc",
                        col_nn.GPT2FusedLinearConv1D_Col,
                        **self.neutral(split_sizes=[config.n_inner or 4 * config.hidden_size], skip_bias_add=False),
                    ),
                    child("mlp.c_proj", col_nn.GPT2FusedLinearConv1D_Row, **self.neutral()),
                    *(
                        child(name, col_nn.DropoutForParallelInput)
                        for name in ("attn.attn_dropout", "attn.resid_dropout", "mlp.dropout")
                    ),
                    child("ln_1", col_nn.LayerNorm, sp_partial_derived=False),
                    child("ln_2", col_nn.LayerNorm, sp_partial_derived=False),
                    SubModuleReplacementDescription(
                        suffix="ln_cross_attn", target_module=col_nn.LayerNorm, ignore_if_not_exist=True
                    ),
                ],
            ),
        }
        self.append_or_create_submodule_replacement(
            description=child("wte", col_nn.VocabParallelEmbedding1D, **self.padding()),
            policy=policy,
            target_key=GPT2Model,
        )
        return self.head(policy, GPT2LMHeadModel, "lm_head")

    def postprocess(self) -> nn.Module:
        if self.tie_weight:
            self.model.lm_head.weight = self.model.transformer.wte.weight
        return self.model


class OPTForCausalLMPolicy(ReferencePolicy):
    def module_policy(self) -> Descriptions:
        config, ranks = self.model.config, self.shard_config.tensor_parallel_size
        attention = ModulePolicyDescription(
            attribute_replacement={
                "embed_dim": config.hidden_size // ranks,
                "num_heads": config.num_attention_heads // ranks,
            },
            sub_module_replacement=[
                *(child(name, col_nn.Linear1D_Col, **self.neutral()) for name in ("q_proj", "k_proj", "v_proj")),
                child("out_proj", col_nn.Linear1D_Row, **self.neutral()),
            ],
        )
        policy: Descriptions = {
            "OPTAttention": attention,
            "OPTFlashAttention2": attention,  # which is there with another implementation of attention
            OPTDecoderLayer: ModulePolicyDescription(
                sub_module_replacement=[
                    child("fc1", col_nn.Linear1D_Col, **self.neutral()),
                    child("fc2", col_nn.Linear1D_Row, **self.neutral()),
                ]
            ),
        }
        self.append_or_create_submodule_replacement(
            description=[
                child("embed_tokens", col_nn.VocabParallelEmbedding1D, **self.padding()),
                child("final_layer_norm", col_nn.FusedLayerNorm, sp_partial_derived=False),
            ],
            policy=policy,
            target_key=OPTDecoder,
        )
        return self.head(policy, OPTForCausalLM, "lm_head")


class BertForMaskedLMPolicy(ReferencePolicy):
    def module_policy(self) -> Descriptions:
        config, ranks = self.model.config, self.shard_config.tensor_parallel_size
        attributes = {
            f"{attention}.self.{name}": value // ranks
            for attention in ("attention", "crossattention")
            for name, value in (
                ("all_head_size", config.hidden_size),
                ("num_attention_heads", config.num_attention_heads),
            )
        }
        columns = [*(f"attention.self.{name}" for name in ("query", "key", "value")), "intermediate.dense"]
        policy: Descriptions = {
            BertLayer: ModulePolicyDescription(
                attribute_replacement=attributes,
                sub_module_replacement=[
                    *(child(name, col_nn.Linear1D_Col, **self.neutral(skip_bias_add=False)) for name in columns),
                    *(
                        child(name, col_nn.Linear1D_Row, **self.neutral())
                        for name in ("attention.output.dense", "output.dense")
                    ),
                    *(
                        child(name, col_nn.DropoutForParallelInput)
                        for name in ("attention.self.dropout", "attention.output.dropout", "output.dropout")
                    ),
                ],
            ),
            BertEmbeddings: ModulePolicyDescription(
                sub_module_replacement=[
                    child("dropout", col_nn.DropoutForReplicatedInput),
                    child("word_embeddings", col_nn.VocabParallelEmbedding1D, **self.padding()),
                ]
            ),
            "BertLayerWithAnotherName": ModulePolicyDescription(),
        }
        kept: dict[str, Callable[..., Any]] = {
            "_save_to_state_dict": col_nn.ParallelModule._save_to_state_dict,
            "_load_from_state_dict": col_nn.ParallelModule._load_from_state_dict,
        }
        self.append_or_create_method_replacement(description=kept, policy=policy, target_key=BertLMPredictionHead)
        return self.head(policy, BertLMPredictionHead, "decoder")

    def postprocess(self) -> nn.Module:
        assert isinstance(self.model, BertForMaskedLM)
        self.model.cls.predictions.decoder.weight = self.model.bert.embeddings.word_embeddings.weight
        return self.model


class T5ForConditionalGenerationPolicy(ReferencePolicy):
    """Both kinds of MLP are described; a model has one of them."""

    def module_policy(self) -> Descriptions:
        config, ranks = self.model.config, self.shard_config.tensor_parallel_size
        dropout = child("dropout", col_nn.DropoutForParallelInput)

        def mlp(*columns: str) -> ModulePolicyDescription:
            return ModulePolicyDescription(
                sub_module_replacement=[
                    *(child(name, col_nn.Linear1D_Col, **self.neutral()) for name in columns),
                    child("wo", col_nn.Linear1D_Row, **self.neutral()),
                    dropout,
                ]
            )

        policy: Descriptions = {
            T5Stack: ModulePolicyDescription(
                sub_module_replacement=[
                    dropout,
                    child("embed_tokens", col_nn.VocabParallelEmbedding1D, **self.padding()),
                    child("final_layer_norm", col_nn.RMSNorm, sp_partial_derived=False),
                ]
            ),
            T5Attention: ModulePolicyDescription(
                attribute_replacement={
                    "d_model": config.d_model // ranks,
                    "n_heads": config.num_heads // ranks,
                    "inner_dim": config.num_heads * config.d_kv // ranks,
                },
                sub_module_replacement=[
                    *(child(name, col_nn.Linear1D_Col, **self.neutral()) for name in "qkv"),
                    child("o", col_nn.Linear1D_Row, **self.neutral()),
                    SubModuleReplacementDescription(
                        suffix="relative_attention_bias",
                        target_module=col_nn.Embedding1D,
                        kwargs={"gather_output": False, "fp8_communication": False},
                        ignore_if_not_exist=True,
                    ),
                ],
            ),
            T5DenseGatedActDense: mlp("wi_0", "wi_1"),
            T5DenseActDense: mlp("wi"),
        }
        for layer in (T5LayerFF, T5LayerSelfAttention, T5LayerCrossAttention):
            policy[layer] = ModulePolicyDescription(
                sub_module_replacement=[child("layer_norm", col_nn.RMSNorm), dropout]
            )
        self.append_or_create_submodule_replacement(
            description=child("shared", col_nn.VocabParallelEmbedding1D, **self.padding()),
            policy=policy,
            target_key=T5ForConditionalGeneration,
        )
        return self.head(policy, T5ForConditionalGeneration, "lm_head")


POLICIES = {
    "gpt2-causal-lm": GPT2LMHeadModelPolicy,
    "opt-causal-lm": OPTForCausalLMPolicy,
    "bert-masked-lm": BertForMaskedLMPolicy,
    "t5-gated-conditional-generation": T5ForConditionalGenerationPolicy,
}
