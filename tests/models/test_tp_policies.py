"""Policies that replace children class by class: the same as a plan, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from shardwright.shardformer import (
    ModulePolicyDescription,
    Plan,
    Policy,
    ShardConfig,
    ShardFormer,
    SubModuleReplacementDescription,
)
from shardwright.shardformer.layer import Linear1D_Col, Linear1D_Row, VocabParallelEmbedding1D, VocabParallelLMHead1D
from shardwright.shardformer.layer.parallel_module import full_tensor
from shardwright.spec import get_spec
from shardwright.testing import run_ranks, zoo
from tests.models.tp_ranks import overrides

Child = SubModuleReplacementDescription


class LlamaByClass(Policy):
    """Every part by hand, in the form that ColossalAI's documentation teaches."""

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        ranks = self.shard_config.tensor_parallel_size
        rows = {"make_vocab_size_divisible_by": self.shard_config.make_vocab_size_divisible_by}
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        layer = ModulePolicyDescription(
            attribute_replacement={"self_attn.num_heads": self.config.num_attention_heads // ranks},
            sub_module_replacement=[
                *(Child(name, Linear1D_Col) for name in columns),
                *(Child(name, Linear1D_Row) for name in ("self_attn.o_proj", "mlp.down_proj")),
            ],
        )
        return {
            "LlamaDecoderLayer": layer,
            "LlamaModel": ModulePolicyDescription(
                sub_module_replacement=[Child("embed_tokens", VocabParallelEmbedding1D, rows)]
            ),
            "LlamaForCausalLM": ModulePolicyDescription(
                sub_module_replacement=[Child("lm_head", VocabParallelLMHead1D, rows)]
            ),
        }


class BertByClass(Policy):
    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        ranks = self.shard_config.tensor_parallel_size
        columns = ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense")
        layer = ModulePolicyDescription(
            attribute_replacement={
                "attention.self.num_attention_heads": self.config.num_attention_heads // ranks,
                "attention.self.all_head_size": self.config.hidden_size // ranks,
            },
            sub_module_replacement=[
                *(Child(name, Linear1D_Col) for name in columns),
                *(Child(name, Linear1D_Row) for name in ("attention.output.dense", "output.dense")),
            ],
        )
        return {"BertLayer": layer}


class Classifier(nn.Module):
    """Sharded modules at the root: an inline loss over a vocabulary, and an MLP with a learned activation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.up, self.act, self.down = nn.Linear(8, 12), nn.PReLU(init=0.3), nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.down(self.act(self.up(self.embedding(ids))))))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


class ClassifierByClass(Policy):
    def __init__(self, rules: dict[str, Any], children: list[SubModuleReplacementDescription]) -> None:
        self._rules, self._children = rules, children

    def rules(self) -> dict[str, Any]:
        return self._rules

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        return {Classifier: ModulePolicyDescription(sub_module_replacement=self._children)}


MLP = [Child("up", Linear1D_Col), Child("down", Linear1D_Row)]
HEAD = Child("head", VocabParallelLMHead1D, {"make_vocab_size_divisible_by": 1})


class Unclosed(Policy):
    def plan(self) -> Plan:
        return Plan({"up": "colwise", "act": "partial_gradient", "down": "replicated"}, "Unclosed")


def equal_to_whole(
    reference: nn.Module, model: nn.Module, loss: torch.Tensor, expected: torch.Tensor, rank: int
) -> None:
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    whole = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        spec = get_spec(param)
        torch.testing.assert_close(
            param.grad, spec.shard(whole[name].grad, rank), msg=lambda text, name=name: f"{name}: {text}"
        )
        torch.testing.assert_close(full_tensor(param, dist.group.WORLD), whole[name].detach())


def by_class(rank: int, world_size: int) -> None:
    former = ShardFormer(ShardConfig(make_vocab_size_divisible_by=8))
    arguments = overrides("llama-causal-lm")
    reference, model = zoo.build("llama-causal-lm", **arguments), zoo.build("llama-causal-lm", **arguments)
    batch = zoo.inputs(reference)
    model = former.shard_model(model, LlamaByClass())
    assert model.lm_head.weight.shape[0] < reference.lm_head.weight.shape[0]
    equal_to_whole(reference, model, model(**batch).loss, reference(**batch).loss, rank)

    torch.manual_seed(0)
    reference, model = Classifier().double(), Classifier().double()
    model.load_state_dict(reference.state_dict())
    ids = torch.randint(20, (3, 5))
    labels = ids % 10  # all on the first rank
    policy = ClassifierByClass({"act": "partial_gradient"}, [*MLP, HEAD])
    model = former.shard_model(model, policy)
    equal_to_whole(reference, model, model(ids, labels), reference(ids, labels), rank)

    messages = []
    for policy in (
        ClassifierByClass({}, MLP),
        Unclosed(),
        ClassifierByClass({}, [Child("up", Linear1D_Col, {"nonsense": 1})]),
    ):
        with pytest.raises(ValueError) as caught:
            former.shard_model(Classifier(), policy)
        messages.append(str(caught.value))
    assert "shards modules next to act.weight of Classifier without deciding" in messages[0]
    assert (
        "up (Linear), rule 'up' of Unclosed: its output is this rank's features, and no linear near by takes these"
    ) in messages[1]
    assert "Linear1D_Col.from_native_module takes no " in messages[2]


def test_class_by_class_is_the_same_as_a_plan():
    run_ranks(by_class, 2)


def attention_masks(rank: int, world_size: int) -> torch.Tensor:
    config = BertConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.5,
        attn_implementation="eager",
    )
    model = ShardFormer(ShardConfig()).shard_model(BertForMaskedLM(config).train(), BertByClass())
    masks: list[torch.Tensor] = []
    dropout = F.dropout

    def recorded(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        y = dropout(x, p, training, inplace)
        if p and training:
            masks.append(y == 0)
        return y

    ids = torch.arange(5, 37).view(2, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", recorded)
        model(input_ids=ids, labels=ids)
    return masks[0]


def test_attention_dropout_differs_over_ranks():
    first, second = run_ranks(attention_masks, 2)
    assert abs((first == second).double().mean() - 0.5) < 0.05
