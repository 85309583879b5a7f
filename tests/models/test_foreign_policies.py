"""Policies, layers and names as scripts of other frameworks have them: they work as they are, or say what to write."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer, BertPooler

import shardwright
from shardwright import Booster
from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.plugins import HybridParallelPlugin, TorchDDPPlugin
from shardwright.shardformer import ModelSharder, ShardConfig, ShardFormer
from shardwright.shardformer.layer import (
    DropoutForParallelInput,
    DropoutForReplicatedInput,
    FusedLinear1D_Row,
    FusedRMSNorm,
    LayerNorm,
    Linear1D_Col,
    Linear1D_Row,
    RMSNorm,
)
from shardwright.shardformer.policies.auto_policy import get_autopolicy
from shardwright.shardformer.policies.base_policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
)
from shardwright.testing import compare_models, keep_float64, run_ranks, zoo


def pooled(self: nn.Module, hidden_states: torch.Tensor, scale: float) -> torch.Tensor:
    return self.activation(self.dense(hidden_states[:, 0])) * scale


def halve(module: Any, process_group: dist.ProcessGroup) -> None:
    module.dense.bias.data /= process_group.size()


class BertForSequenceClassificationPolicy(Policy):
    """A policy as it is written elsewhere: every hook, neutral arguments for every layer, None where nothing
    changes.
    """

    def __init__(self) -> None:
        super().__init__()
        assert self.model is None
        self.seen: list[str] = []

    def config_sanity_check(self) -> None:
        assert self.model.config.num_attention_heads % self.shard_config.tensor_parallel_size == 0

    def preprocess(self) -> None:  # type: ignore[override]
        self.seen.append(f"tied {self.tie_weight_check()}")

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        ranks = self.shard_config.tensor_parallel_size
        assert self.pipeline_stage_manager is None
        assert (self.shard_config.sequence_parallel_size, self.shard_config.expert_parallel_size) == (1, 1)
        neutral = {
            "seq_parallel_mode": None,
            "overlap": False,
            "skip_bias_add": False,
            "fp8_communication": False,
            "use_zbv": False,
        }
        policy: dict[Any, ModulePolicyDescription] = {}
        policy[BertLayer] = ModulePolicyDescription(
            attribute_replacement={
                "attention.self.all_head_size": self.model.config.hidden_size // ranks,
                "attention.self.num_attention_heads": self.model.config.num_attention_heads // ranks,
            },
            sub_module_replacement=[
                *(
                    SubModuleReplacementDescription(
                        suffix=f"attention.self.{name}", target_module=Linear1D_Col, kwargs=neutral
                    )
                    for name in ("query", "key", "value")
                ),
                SubModuleReplacementDescription(
                    suffix="attention.self.dropout", target_module=DropoutForParallelInput, kwargs=None
                ),  # type: ignore[arg-type]
                SubModuleReplacementDescription(
                    suffix="attention.output.dense", target_module=Linear1D_Row, kwargs=neutral
                ),
                SubModuleReplacementDescription(
                    suffix="attention.output.dropout", target_module=DropoutForReplicatedInput
                ),
                SubModuleReplacementDescription(
                    suffix="intermediate.dense", target_module=Linear1D_Col, kwargs=neutral
                ),
                SubModuleReplacementDescription(suffix="output.dense", target_module=Linear1D_Row, kwargs=neutral),
                SubModuleReplacementDescription(
                    suffix="no_such.dense", target_module=Linear1D_Row, ignore_if_not_exist=True
                ),
            ],
            method_replacement=None,  # type: ignore[arg-type]
            param_replacement=None,  # type: ignore[arg-type]
        )
        self.append_or_create_submodule_replacement(
            description=SubModuleReplacementDescription(suffix="LayerNorm", target_module=LayerNorm),
            policy=policy,
            target_key=BertEmbeddings,
        )
        self.append_or_create_method_replacement(
            description={"forward": functools.partial(pooled, scale=0.5)}, policy=policy, target_key=BertPooler
        )
        policy[BertPooler].param_replacement.append(halve)
        return policy

    def postprocess(self) -> None:  # type: ignore[override]
        self.seen.append("after")

    def get_held_layers(self) -> list[nn.Module]:
        raise AssertionError("there are no stages")

    def get_shared_params(self) -> list[dict[int, torch.Tensor]]:
        return []


class Listed(Policy):
    """A plan that is a plain dict."""

    def plan(self) -> Any:
        return {"mlp.0": "colwise", "mlp.2": "rowwise"}


def ported(rank: int, world_size: int) -> None:
    name, settings = "bert-sequence-classification", {"num_hidden_layers": 2}
    reference, model = zoo.build(name, **settings), zoo.build(name, **settings)
    reference.bert.pooler.forward = functools.partial(pooled, reference.bert.pooler, scale=0.5)
    reference.bert.pooler.dense.bias.data /= 2
    policy = BertForSequenceClassificationPolicy()
    model, shared = ShardFormer(ShardConfig(make_vocab_size_divisible_by=8)).optimize(model, policy)
    assert (shared, policy.seen) == ([], ["tied False", "after"])
    assert isinstance(model.bert.encoder.layer[0].attention.self.dropout, DropoutForParallelInput)
    batch = zoo.inputs(reference)
    with keep_float64():
        losses = [one(**batch).loss for one in (reference, model)]
        for loss in losses:
            loss.backward()
    sync_shared_gradients(model.parameters(), dist.group.WORLD)
    compare_models(reference, model, coordinate=rank, losses=(losses[0].detach(), losses[1].detach()))

    listed = nn.Module()
    listed.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    ShardFormer(ShardConfig()).optimize(listed, Listed())
    assert listed.mlp[0].weight.shape == (4, 4)

    layers(rank)


def layers(rank: int) -> None:
    """Groups in lists, the row-parallel linear with several inputs, norms that stay."""
    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    joined, x = nn.Linear(10, 3), torch.randn(5, 10)
    expected = joined(x)
    row = FusedLinear1D_Row.from_native_module(joined, process_group=[group], split_sizes=[4, 6], use_zbv=True)
    mine = torch.cat([x[:, :4].chunk(2, 1)[rank], x[:, 4:].chunk(2, 1)[rank]], 1)
    torch.testing.assert_close(row(mine), expected)
    assert Linear1D_Col.from_native_module(nn.Linear(4, 6), (group,)).weight.shape == (3, 4)
    norm, rms = nn.LayerNorm(4), nn.RMSNorm(4)
    assert LayerNorm.from_native_module(norm, sp_partial_derived=False) is norm
    assert RMSNorm.from_native_module(rms) is rms
    for layer, module, arguments, words in (
        (
            Linear1D_Col,
            nn.Linear(4, 6),
            {"skip_bias_add": True},
            "skip_bias_add=True cannot be had: the bias is added by the layer",
        ),
        (
            Linear1D_Row,
            nn.Linear(4, 6),
            {"seq_parallel_mode": "ring"},
            "seq_parallel_mode='ring' cannot be had: sequences are cut by",
        ),
        (Linear1D_Row, nn.Linear(4, 6), {"gather": True}, "takes no gather=True; it takes split, parallel_input"),
        (FusedRMSNorm, nn.RMSNorm(4), {"eps": 1.0}, "takes no eps=1.0; it takes no arguments of its own"),
        (Linear1D_Col, nn.Linear(4, 6), {"process_group": [group, group]}, "a layer is sharded over one group"),
    ):
        with pytest.raises(ValueError, match=words):
            layer.from_native_module(module, **arguments)  # type: ignore[attr-defined]


def test_a_policy_of_another_framework_runs_unchanged() -> None:
    run_ranks(ported, 2)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LOCAL_RANK", "0")
    shardwright.launch(0, 2, None, None, backend="fake")
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Listed, "policy=Listed is the class; pass an instance: Listed()"),
        ("llama", "policy='llama' must be a shardformer Policy"),
        (ShardConfig(), r"the order is ModelSharder\(model, policy, shard_config\)"),
    ],
)
def test_what_is_no_policy(policy: Any, words: str, alone: Any) -> None:
    with pytest.raises(ValueError, match=words):
        ModelSharder(nn.Linear(2, 2), policy, ShardConfig())


def test_flags(alone: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert ShardConfig(enable_all_optimization=True).enable_fused_normalization
    model = zoo.build("bert-masked-lm", dtype=torch.float32)
    sharder = ModelSharder(model, None, ShardConfig(enable_fused_normalization=True, enable_tensor_parallelism=False))
    sharder.shard()
    assert "norms of BertForMaskedLM are one kernel each already, and stay" in caplog.text
    for chosen, kept in (("flex_attention", "flex_attention"), ("eager", "sdpa")):
        model = zoo.build("bert-masked-lm", dtype=torch.float32)
        model.set_attn_implementation(chosen)
        ModelSharder(model, None, ShardConfig(enable_all_optimization=True, enable_tensor_parallelism=False)).shard()
        assert model.config._attn_implementation == kept
    for argument, words in (
        ("tensor_parallel_size", "tensor_parallel_process_group="),
        ("use_flash_attention", "enable_flash_attention"),
    ):
        with pytest.raises(ValueError, match=words):
            ShardConfig(**{argument: 2})


FOUND = [
    ("shardformer", "get_autopolicy"),
    ("shardformer.policies.llama", "LlamaForCausalLMPolicy"),
    ("shardformer.policies.bert", "BertForMaskedLMPolicy"),
    ("shardformer.policies.gpt2", "GPT2LMHeadModelPolicy"),
    ("shardformer.policies.t5", "T5ForConditionalGenerationPolicy"),
    ("shardformer.policies.opt", "OPTForCausalLMPolicy"),
    ("shardformer.policies.bloom", "BloomModelPolicy"),
    ("shardformer.layer", "GPT2FusedLinearConv1D_Col"),
    ("shardformer.layer", "GPT2FusedLinearConv1D_Row"),
]
EXPLAINED = [
    ("shardformer", "Shard", "Linear1D_Col"),
    ("shardformer", "GradientCheckpointConfig", "PipelineGradientCheckpointConfig"),
    ("shardformer", "PipelineStageManager", "plugin.stage_manager"),
    ("shardformer.layer", "PaddingEmbedding", "VocabParallelEmbedding1D"),
    ("shardformer.layer", "PaddingLMHead", "VocabParallelLMHead1D"),
    ("shardformer.layer", "dist_cross_entropy", "cross_entropy_1d"),
    ("shardformer.layer", "RingAttention", "sequence_parallelism_mode"),
    ("cluster", "ProcessGroupMesh", "ParallelMesh"),
    ("cluster", "ProcessGroupManager", "new_group"),
    ("utils", "print_rank_0", "print_on_master"),
    ("testing", "spawn", "run_ranks"),
]
MOVED = ["pipeline.schedule", "nn", "tensor", "shardformer.shard"]


def test_names_that_scripts_import() -> None:
    for module, name in FOUND:
        assert getattr(importlib.import_module(f"shardwright.{module}"), name)
    for module, name, words in EXPLAINED:
        with pytest.raises(ImportError, match=words):
            getattr(importlib.import_module(f"shardwright.{module}"), name)
    for module in MOVED:
        with pytest.raises(ModuleNotFoundError, match=rf"No module named 'shardwright.{module}': "):
            importlib.import_module(f"shardwright.{module}")
    for module in ("shardformer.policies.llama", "shardformer.layer", "testing"):
        with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
            importlib.import_module(f"shardwright.{module}").Nonsense  # noqa: B018


def test_what_is_no_registration() -> None:
    with pytest.raises(ValueError, match="must be the model_type of a config, such as 'llama', or a class of models"):
        shardwright.register_policy(3, Listed)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"must be a subclass of shardwright.shardformer.Policy; pass the class: Listed"
    ):
        shardwright.register_policy("mine", Listed())  # type: ignore[arg-type]
    for name in ("1f1b", "auto", ""):
        with pytest.raises(ValueError, match=r"must be a text that is not taken by 'gpipe'"):
            shardwright.register_schedule(name, lambda placement, rank, m: [])
    with pytest.raises(ValueError, match="'linear' has 1 stage per rank"):
        shardwright.register_schedule("mine", lambda placement, rank, m: [], num_model_chunks=2)
    with pytest.raises(ValueError, match="not taken by 'deepspeed'"):
        shardwright.register_plugin("torch_ddp", TorchDDPPlugin)
    with pytest.raises(ValueError, match=r"must be a subclass of shardwright.plugins.Plugin or a function"):
        shardwright.register_plugin("mine", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"plugin='torch_dpp' is not one of .* - did you mean 'torch_ddp'"):
        Booster(plugin="torch_dpp")


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Halves() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MinePolicy(Policy):
    layer_lists = ["layers"]

    def rules(self) -> dict[str, str]:  # type: ignore[override]
        return {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def one_by_one(placement: Any, rank: int, num_microbatches: int) -> list[Any]:
    """Every microbatch goes down and up before the next one."""
    from shardwright.pipeline.schedules.phases import B, F, times

    return [times(num_microbatches, F(), B())]


def wrong(placement: Any, rank: int, num_microbatches: int) -> list[Any]:
    from shardwright.pipeline.schedules.phases import B, F, times

    return [times(num_microbatches, F()), times(num_microbatches - 1, B())]


def registered(rank: int, world_size: int) -> None:
    shardwright.register_policy(Mine, MinePolicy)
    shardwright.register_schedule("one_by_one", one_by_one)
    shardwright.register_schedule("wrong", wrong)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    shardwright.register_plugin("mine", lambda: HybridParallelPlugin(tp_size=2, precision="fp32"))
    settings = {"pp_size": 2, "num_microbatches": 4, "precision": "fp32", "example_inputs": x}
    plugins = {
        "policy": "mine",
        "schedule": HybridParallelPlugin(pp_style="one_by_one", custom_policy=MinePolicy(), **settings),
    }
    for plugin in plugins.values():
        torch.manual_seed(0)
        model, reference = Mine(), Mine()
        reference.load_state_dict(model.state_dict())
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        out = booster.execute_pipeline(iter([x]), model, lambda outputs, inputs: outputs.square().mean(), optimizer)
        optimizer.step()
        loss = reference(x).square().mean()
        loss.backward()
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        if out["loss"] is not None:
            torch.testing.assert_close(out["loss"], loss.detach())
        coordinate = booster.plugin.mesh.coordinate("tp")
        compare_models(reference, model.unwrap(), coordinate=coordinate, gradients=False, tolerance=1e-5)
    model = Mine()
    plugin = HybridParallelPlugin(pp_style="wrong", custom_policy=MinePolicy(), **settings)
    with pytest.raises(ValueError, match=r"pp_style='wrong', which was registered: "):
        Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters()))


def test_registered_policies_schedules_and_plugins_train_like_one_process() -> None:
    run_ranks(registered, 2)
    assert type(get_autopolicy(zoo.build("llama-causal-lm"))).__name__ == "LlamaPolicy"
