"""What `module_policy` says that a model cannot be given: a part of a head, parameters that a function fails on."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardwright.shardformer import ModulePolicyDescription, SubModuleReplacementDescription
from shardwright.shardformer.layer import GPT2FusedLinearConv1D_Col, Linear1D_Col, Linear1D_Row
from shardwright.shardformer.lowering import lower
from shardwright.testing import zoo


def columns(names: str, target: Any = Linear1D_Col, **settings: Any) -> ModulePolicyDescription:
    children = [SubModuleReplacementDescription(name, target, settings) for name in names.split()]
    return ModulePolicyDescription(sub_module_replacement=children)


def test_heads_that_tp_does_not_divide_are_refused_by_name() -> None:
    llama = zoo.build("llama-causal-lm", num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    attention = {"LlamaAttention": columns("q_proj k_proj v_proj")}
    assert len(lower(llama, attention, "P", 3).rules) == 3 * len(llama.model.layers)  # type: ignore[arg-type, union-attr]
    lower(llama, {"LlamaAttention": columns("q_proj k_proj", gather_output=True)}, "P", 2)
    for ranks, words in ((2, "k_proj .* has 3 heads of 8 features, which tp=2"), (4, "q_proj .* 6 heads .* tp=4")):
        with pytest.raises(
            ValueError, match=rf"P\.module_policy: model\.layers\.0\.self_attn\.{words} does not divide"
        ):
            lower(llama, attention, "P", ranks)
    own = ModulePolicyDescription(
        sub_module_replacement=attention["LlamaAttention"].sub_module_replacement,
        method_replacement={"forward": lambda module, *args: None},
    )
    lower(llama, {"LlamaAttention": own}, "P", 2)
    gpt2 = zoo.build("gpt2-causal-lm", n_head=3, n_embd=24)
    fused = columns("attn.c_attn", GPT2FusedLinearConv1D_Col, split_sizes=[24, 24, 24])
    with pytest.raises(ValueError, match=r"attn\.c_attn \(Conv1D\) has 3 heads of 8 features, which tp=2"):
        lower(gpt2, {"GPT2Block": fused}, "P", 2)


def narrow(module: nn.Module) -> None:
    module.get_parameter("q_proj.wieght")


def test_a_function_that_fails_on_parameters_is_named() -> None:
    described = ModulePolicyDescription(
        param_replacement=[narrow],
        sub_module_replacement=[SubModuleReplacementDescription("o_proj", Linear1D_Row)],
    )
    lowered = lower(zoo.build("llama-causal-lm"), {"LlamaAttention": described}, "P")
    with pytest.raises(
        ValueError, match=r"P\.module_policy, LlamaAttention: param_replacement narrow raised Attribute"
    ):
        lowered.change()
