"""The public face: own models, own policies, the four replacements, and what is refused with which words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.shardformer import (
    HeadGeometry,
    ModelSharder,
    ModulePolicyDescription,
    Plan,
    Policy,
    ShardConfig,
    ShardFormer,
    SubModuleReplacementDescription,
    attention_rules,
    mlp_rules,
)
from shardwright.shardformer.layer import (
    Embedding1D,
    FusedLayerNorm,
    FusedLinear1D_Col,
    FusedRMSNorm,
    Linear1D_Col,
    Linear1D_Row,
    ParallelModule,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
    cross_entropy_1d,
)
from shardwright.shardformer.layer.norm import fuse_norms
from shardwright.shardformer.layer.parallel_module import full_tensor
from shardwright.shardformer.policies.auto import get_autopolicy
from shardwright.spec import get_spec
from shardwright.testing import run_ranks, zoo
from tests.models.tp_ranks import overrides


class MLP(nn.Module):
    def __init__(self, dim: int = 256) -> None:
        super().__init__()
        self.dense_1 = nn.Linear(dim, dim * 4)
        self.activation = nn.GELU()
        self.dense_2 = nn.Linear(dim * 4, dim)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense_2(self.activation(self.dense_1(x))) * self.scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MLP(16) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class PlanPolicy(Policy):
    def __init__(self, **rules: Any) -> None:
        self.given = rules["rules"]

    def plan(self) -> Plan:
        return Plan(self.given, "test")


class ReplacingPolicy(Policy):
    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        children = [
            SubModuleReplacementDescription("dense_1", Linear1D_Col),
            SubModuleReplacementDescription("dense_2", Linear1D_Row),
            SubModuleReplacementDescription("norm", Linear1D_Row, ignore_if_not_exist=True),
        ]

        def halve(module: nn.Module) -> None:
            module.dense_2.bias.data /= 2

        return {
            MLP: ModulePolicyDescription(
                attribute_replacement={"scale": 3.0, "activation.approximate": "tanh"},
                param_replacement=[halve],
                sub_module_replacement=children,
            ),
            "Stack": ModulePolicyDescription(
                method_replacement={"forward": lambda self, x: self.blocks[1](self.blocks[0](x))}
            ),
        }


def tutorial(rank: int, world_size: int) -> tuple[list[int], list[int], torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = MLP()
    x = torch.randn(16, 256)
    expected = model(x)
    Linear1D_Col.from_native_module(model.dense_1)
    Linear1D_Row.from_native_module(model.dense_2)
    return list(model.dense_1.weight.T.shape), list(model.dense_2.weight.T.shape), expected.detach(), model(x).detach()


def test_two_layer_mlp_of_the_tutorial():
    for first, second, expected, actual in run_ranks(tutorial, 2):
        assert (first, second) == ([256, 512], [512, 256])
        torch.testing.assert_close(actual, expected)


def replaced(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, reference = Stack().double(), Stack().double()
    reference.load_state_dict(model.state_dict())
    x = torch.randn(3, 16, dtype=torch.float64)
    ShardFormer(ShardConfig()).shard_model(model, ReplacingPolicy())
    for block in reference.blocks:
        block.scale, block.activation.approximate = 3.0, "tanh"
        block.dense_2.bias.data /= 2
    expected = reference.blocks[1](reference.blocks[0](x))
    actual = model(x)
    torch.testing.assert_close(actual, expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    assert isinstance(model.blocks[0].dense_1, Linear1D_Col)
    for (name, param), (_, full) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert get_spec(param).name == name
        torch.testing.assert_close(param.grad, get_spec(param).shard(full.grad, rank))
        torch.testing.assert_close(full_tensor(param, dist.group.WORLD), full.data)


def test_all_four_replacements():
    run_ranks(replaced, 2)


def by_plan(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, reference = Stack().double(), Stack().double()
    reference.load_state_dict(model.state_dict())
    ShardFormer(ShardConfig()).optimize(model, PlanPolicy(rules=mlp_rules("blocks.*", "dense_1", "dense_2")))
    x = torch.randn(3, 16, dtype=torch.float64)
    torch.testing.assert_close(model(x), reference(x))
    assert model.blocks[1].dense_1.weight.shape == (32, 16)


def test_a_plan_for_a_custom_model():
    run_ranks(by_plan, 2)


def layers(rank: int, world_size: int) -> None:
    """Every public layer against the module it came from, and built from sizes."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    x, ids = torch.randn(5, 12, dtype=torch.float64), torch.tensor([[0, 3, 100], [1, 55, 99]])
    linear = nn.Linear(12, 30).double()
    expected = linear(x)
    torch.testing.assert_close(
        FusedLinear1D_Col.from_native_module(linear, group, split_sizes=[7, 23], gather_output=True)(x), expected
    )
    assert linear.weight.shape[0] == (4 + 12 if rank == 0 else 3 + 11)
    whole = nn.Linear(12, 7).double()
    expected = whole(x)
    torch.testing.assert_close(Linear1D_Row.from_native_module(whole, group, parallel_input=False)(x), expected)
    for kind in (VocabParallelEmbedding1D, Embedding1D):
        embedding = nn.Embedding(101, 12, padding_idx=3).double()
        expected = embedding(ids)
        torch.testing.assert_close(kind.from_native_module(embedding, group)(ids), expected)
        assert isinstance(embedding, ParallelModule)
    head = nn.Linear(12, 101).double()
    full = head(x)
    labels = torch.tensor([5, 100, -100, 0, 64])
    VocabParallelLMHead1D.from_native_module(head, group, make_vocab_size_divisible_by=64)
    local = head(x)
    assert local.shape == (5, 101)
    assert local.nbytes == 5 * 64 * 8  # what this rank holds
    loss = cross_entropy_1d(local, labels, process_group=group, vocab_size=101)
    torch.testing.assert_close(loss, F.cross_entropy(full, labels))
    # A head knows how many of its rows are padding.
    torch.testing.assert_close(cross_entropy_1d(local, labels, process_group=group), loss)
    each = cross_entropy_1d(local.view(1, 5, -1), labels.view(1, 5), mode="none")
    torch.testing.assert_close(each, F.cross_entropy(full, labels, reduction="none").view(1, 5))
    with pytest.raises(ValueError, match="vocab_size=128, but the logits are those of a head over 101 entries"):
        cross_entropy_1d(local, labels, vocab_size=128)
    gathered = VocabParallelLMHead1D(12, 10, process_group=group, gather_output=True)
    assert gathered(x.float()).shape == (5, 10)
    assert Linear1D_Col(12, 9, process_group=group).weight.shape[0] == 5 - rank
    assert Linear1D_Row(9, 12, process_group=group).weight.shape[1] == 5 - rank
    norm = zoo.build("llama-base", num_hidden_layers=1).norm
    hidden = torch.randn(4, 48, dtype=torch.float64)
    expected = norm(hidden)
    torch.testing.assert_close(FusedRMSNorm.from_native_module(norm, group)(hidden), expected, atol=1e-6, rtol=1e-6)
    layer_norm = nn.LayerNorm(12)
    assert FusedLayerNorm.from_native_module(layer_norm, group) is layer_norm
    with pytest.raises(ValueError, match="FusedRMSNorm takes modules that compute"):
        FusedRMSNorm.from_native_module(layer_norm, group)


def test_layers():
    run_ranks(layers, 2)


def optimized(rank: int, world_size: int) -> float:
    model = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=2)
    reference = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=2)
    ShardFormer(ShardConfig(enable_all_optimization=True)).shard_model(model)
    assert isinstance(model.model.norm, FusedRMSNorm)
    assert model.config._attn_implementation == "sdpa"
    batch = zoo.inputs(reference)
    return float((model(**batch).loss - reference(**batch).loss).detach().abs())


def test_fused_norms_and_attention_change_no_result():
    assert max(run_ranks(optimized, 2)) < 1e-5


def test_norms_with_an_offset_are_fused():
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(GemmaRMSNorm(12)).to(dtype)
        nn.init.normal_(model[0].weight)
        x = torch.randn(3, 5, 12, dtype=dtype)
        expected = model(x)
        assert fuse_norms(model) == 1
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)


def shared_row_gradients(rank: int, world_size: int) -> list[Any]:
    """One rank has no gradient for a shared parameter; a parameter without gradients on any rank gets none."""
    from shardwright.spec import ParamSpec, Piece, set_spec

    partial, unused, rows = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2, 2))
    set_spec(partial, ParamSpec("partial", (3,), partial=("tp",)))
    set_spec(unused, ParamSpec("unused", (2,), partial=("tp",)))
    set_spec(rows, ParamSpec("rows", (3, 2), 0, ((Piece(0, 1), Piece(2, 1)), (Piece(1, 2),))))
    if rank == 0:
        partial.grad = torch.full((3,), 2.0)
    rows.grad = torch.full((2, 2), float(rank + 1))
    sync_shared_gradients([partial, unused, rows], dist.group.WORLD)
    return [partial.grad, unused.grad, rows.grad]


def test_shared_gradients():
    for rank, (partial, unused, rows) in enumerate(run_ranks(shared_row_gradients, 2)):
        assert partial.tolist() == [2.0] * 3
        assert unused is None
        assert rows.tolist() == [[rank + 1.0] * 2, [3.0] * 2]


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MLP(16)])
        self.blocks[0].norm = nn.LayerNorm(32)
        self.conv = nn.Conv2d(3, 3, 1)
        self.narrow = nn.Linear(16, 1)


COLUMN_ROW = {"blocks.*.dense_1": "colwise", "blocks.*.dense_2": "rowwise"}
BAD = {
    "nothing": (
        {"blocks.*.dense_9": "colwise"},
        "rule 'blocks.*.dense_9' of test matches no module or parameter of WithNorm; correct the name",
    ),
    "style": (
        {"blocks.*.dense_1": "columnwise"},
        "rule 'blocks.*.dense_1' of test: unknown style 'columnwise'; use one of colwise, rowwise",
    ),
    "module type": ({"conv": "colwise"}, "conv (Conv2d), rule 'conv' of test: a colwise style shards nn.Linear"),
    "embedding": (
        {"blocks.*.dense_1": "vocab_embedding"},
        "vocab_embedding shards nn.Embedding (and subclasses), not Linear",
    ),
    "undecided": (
        COLUMN_ROW,
        "test shards modules next to blocks.0.norm.weight, blocks.0.norm.bias of WithNorm without deciding",
    ),
    "too narrow": (
        {"narrow": "colwise"},
        "narrow (Linear), rule 'narrow' of test: 1 features cannot be dealt to 2 ranks",
    ),
    "parameter": ({"narrow.weight": "colwise"}, "Column applies to a module, but the rule names a parameter"),
    "heads": (attention_rules("blocks.*", "dense_1", "dense_1", "dense_1", "dense_2"), "MLP keeps no head count"),
    "head size": (
        attention_rules("blocks.*", "dense_1", "dense_1", "dense_1", "dense_2", geometry=HeadGeometry(3, 3)),
        "64 features are not 3 heads",
    ),
}


def refused(rank: int, world_size: int) -> dict[str, str]:
    """Messages; a collective would be counted, and the models must be as they were."""
    messages = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
            monkeypatch.setattr(dist, name, lambda *_, **__: pytest.fail("a collective before the plan was verified"))
        for case, (rules, _) in BAD.items():
            model = WithNorm()
            classes = [type(module) for module in model.modules()]
            with pytest.raises(ValueError) as caught:
                ModelSharder(model, PlanPolicy(rules=rules), ShardConfig()).shard()
            messages[case] = str(caught.value)
            assert [type(module) for module in model.modules()] == classes
            assert all(get_spec(param) is None for param in model.parameters())
    return messages


def test_bad_plans_are_refused_on_all_ranks_before_any_collective():
    first, second = run_ranks(refused, 2)
    assert first == second
    for case, (_, words) in BAD.items():
        assert words in first[case], first[case]


def refused_settings(rank: int, world_size: int) -> list[str]:
    messages = []
    settings: list[dict[str, Any]] = [
        {"enable_sequence_parallelism": True},
        {"gradient_checkpoint_config": object()},
    ]
    for setting in settings:
        with pytest.raises(ValueError) as caught:
            ShardFormer(ShardConfig(**setting)).shard_model(zoo.build("gpt2-causal-lm", **overrides("gpt2-causal-lm")))
        messages.append(str(caught.value))
    with pytest.raises(
        ValueError, match="MLP is no transformers model, so no policy can be found for it; pass policy="
    ):
        ShardFormer(ShardConfig()).shard_model(MLP())
    return messages


def test_settings_that_cannot_be_honoured_are_refused():
    for messages in run_ranks(refused_settings, 2):
        flags = ["enable_sequence_parallelism"]
        assert all(message.startswith(f"{flag}=True") for message, flag in zip(messages, flags, strict=False))
        assert messages[-1].startswith("gradient_checkpoint_config: which layers recompute")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"make_vocab_size_divisible_by": 0}, "make_vocab_size_divisible_by=0 must be at least 1"),
        ({"parallel_output": "yes"}, "parallel_output='yes' must be True or False"),
        (
            {"sequence_parallelism_mode": "ring"},
            "sequence_parallelism_mode='ring' needs enable_sequence_parallelism=True",
        ),
        (
            {"fp8_communication": True, "enable_tensor_parallelism": False},
            "fp8_communication=True with enable_tensor_parallelism=False",
        ),
        ({"inner_ring_size": 2}, "inner_ring_size=2 needs enable_sequence_parallelism=True"),
    ],
)
def test_bad_configs(setting, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        ShardConfig(**setting)


def seen_samples(rank: int, world_size: int) -> list[int]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    former = ShardFormer(ShardConfig(tensor_parallel_process_group=groups[rank % 2]))
    assert ShardFormer.init_distributed().rank == rank
    loader = former.shard_dataset(torch.arange(8), batch_size=2, shuffle=True, seed=3)
    return [int(sample) for batch in loader for sample in batch]


def test_ranks_of_a_group_see_the_same_samples():
    first, second, third, fourth = run_ranks(seen_samples, 4)
    assert first == third
    assert second == fourth
    assert sorted(first + second) == list(range(8))


def plan_for_full_size(rank: int, world_size: int) -> list[tuple[str, bool, list[str]]]:
    """The generic policy on models of real size, without their weights: a small copy stands in for the check."""
    found = []
    for name in ("gemma2", "glm4", "cohere", "glm4_moe"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name]())
        policy = get_autopolicy(model)
        policy.set_model(model)
        policy.set_shard_config(ShardConfig())
        policy.plan()
        found.append((name, policy.findings.checked, policy.findings.dropped))
    return found


def test_generic_plans_are_checked_for_models_of_real_size():
    for found in run_ranks(plan_for_full_size, 2, timeout=110):
        assert [checked and not dropped for _, checked, dropped in found] == [True] * 4, found
