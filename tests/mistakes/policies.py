"""Policies, layers of shardformer, and what is registered by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardwright
from shardwright.booster import Booster
from shardwright.pipeline.schedules.phases import B, F, times
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import ModelSharder, ModulePolicyDescription, Policy, ShardConfig, ShardFormer
from shardwright.shardformer.layer import Linear1D_Col
from shardwright.testing import adamw
from tests.mistakes.table import mistake, refused


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class PairPolicy(Policy):
    layer_lists = ["layers"]


@mistake(
    symptom="a policy's class where an instance is meant: `optimize(model, MyPolicy)`",
    gets="refused on every rank, with the call that is meant",
    fix="`MyPolicy()`",
)
def class_of_a_policy(rank: int, world: int) -> None:
    with refused(r"policy=PairPolicy is the class; pass an instance: PairPolicy\(\)"):
        ShardFormer(ShardConfig()).optimize(Pair(), PairPolicy)  # type: ignore[arg-type]


@mistake(
    symptom="`ModelSharder(model, shard_config, policy)`",
    gets="refused with the order of the arguments",
    fix="`ModelSharder(model, policy, shard_config)`, or `ShardFormer(shard_config).optimize(model, policy)`",
)
def exchanged_arguments(rank: int, world: int) -> None:
    with refused(r"the order is ModelSharder\(model, policy, shard_config\)"):
        ModelSharder(Pair(), ShardConfig(), PairPolicy())  # type: ignore[arg-type]


@mistake(
    symptom="an argument of another framework's layer that asks for something, such as `skip_bias_add=True` or "
    "`seq_parallel_mode='ring'`",
    gets="refused with the reason; those that ask for nothing (`None`, `False`) are accepted",
    fix="leave it out",
)
def foreign_argument(rank: int, world: int) -> None:
    with refused("skip_bias_add=True cannot be had", "leave it out"):
        Linear1D_Col.from_native_module(nn.Linear(4, 4), skip_bias_add=True)
    Linear1D_Col.from_native_module(nn.Linear(4, 4), skip_bias_add=False, seq_parallel_mode=None)
    with refused("takes no bias_add=True; it takes split, gather_output"):
        Linear1D_Col.from_native_module(nn.Linear(4, 4), bias_add=True)


@mistake(
    symptom="a plugin's name with a slip in `Booster(plugin='torch_dpp')`",
    gets="refused with the names that are known and the nearest one",
    fix="the right name, or `shardwright.register_plugin` for one of your own",
)
def name_of_a_plugin(rank: int, world: int) -> None:
    with refused("did you mean 'torch_ddp'"):
        Booster(plugin="torch_dpp")


def forgetful(placement: Any, rank: int, num_microbatches: int) -> list[Any]:
    return [times(num_microbatches, F()), times(num_microbatches - 1, B())]


@mistake(
    symptom="a registered schedule that leaves out a backward",
    gets="refused on every rank when the model is boosted, with the table of the schedule",
    fix="every stage runs every microbatch once: F, then B, or I and later W",
    worlds=(2, 4),
)
def schedule_with_a_hole(rank: int, world: int) -> None:
    shardwright.register_schedule("forgetful", forgetful)
    x = torch.randn(4, 4)
    plugin = HybridParallelPlugin(
        pp_size=world,
        num_microbatches=4,
        pp_style="forgetful",
        precision="fp32",
        custom_policy=PairPolicy(),
        example_inputs=x,
    )
    model = Pair()
    with refused("pp_style='forgetful', which was registered: ", "B"):
        Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters()))


@mistake(
    symptom="a registered schedule whose function returns something else than phases, such as `[F(), B()]` or `None`",
    gets="refused with the name of the schedule, the rank and the number of microbatches",
    fix="a list of phases: `[times(num_microbatches, F(), B())]`",
    worlds=(2, 4),
)
def schedule_of_letters(rank: int, world: int) -> None:
    shardwright.register_schedule("letters", lambda placement, rank, num_microbatches: [F(), B()])  # type: ignore[list-item]
    plugin = HybridParallelPlugin(
        pp_size=world,
        num_microbatches=4,
        pp_style="letters",
        precision="fp32",
        custom_policy=PairPolicy(),
        example_inputs=torch.randn(4, 4),
    )
    model = Pair()
    with refused("pp_style='letters', which was registered, for rank 0 and ", "0 is no phase", r"\[times\("):
        Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters()))


class PortedPolicy(Policy):
    def __init__(self, *keys: Any) -> None:
        self.keys = keys

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        return {key: ModulePolicyDescription() for key in self.keys}


@mistake(
    symptom="a `module_policy` for classes that the model does not have",
    gets="refused with the classes of the model when none of them is there; where some are, the others are logged",
    fix="the class, or its name, as transformers calls it",
)
def classes_of_another_model(rank: int, world: int) -> None:
    with refused("describes BertLayer, LlamaAttention, but Pair has no such module; its modules are Pair"):
        ShardFormer(ShardConfig()).optimize(Pair(), PortedPolicy("BertLayer", "LlamaAttention"))


@mistake(
    symptom="ranks that share a model and were given different `example_inputs`, or one rank's batch does not run",
    gets="refused on all ranks, with the rank and its error",
    fix="the same batch on all ranks of a tensor-parallel group",
    worlds=(2, 4),
)
def batches_that_differ(rank: int, world: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class AnotherConfig(LlamaConfig):
        model_type = "another"

    sizes: dict[str, Any] = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(AnotherConfig(**sizes, num_attention_heads=4))
    ids = torch.arange(8).view(1, 8)
    for mine, words in (
        ({"input_ids": ids + rank, "labels": ids}, "example_inputs differs between ranks that share one model: rank 0"),
        ({"input_ids": ids + 1000 * (rank == 1), "labels": ids}, "rank 1 has no batch for the check.*IndexError"),
    ):
        with refused(words):
            ShardFormer(ShardConfig(example_inputs=mine)).optimize(model)


@mistake(
    symptom="a model type that nobody knows under tensor parallelism, whose batch cannot be guessed",
    gets="refused on every rank with the model's own error and the option that helps",
    fix="`example_inputs=` a batch like the real ones, to the plugin or to `ShardConfig`",
    worlds=(2, 4),
)
def batch_that_cannot_be_guessed(rank: int, world: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Steered(LlamaForCausalLM):
        def forward(self, input_ids: Any, strength: Any, labels: Any = None) -> Any:  # type: ignore[override]
            return super().forward(
                inputs_embeds=self.model.embed_tokens(input_ids) * strength, labels=labels, use_cache=False
            )

    class SteeredConfig(LlamaConfig):
        model_type = "steered"

    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    model = Steered(SteeredConfig(**sizes))
    with refused(
        "Steered has no policy of its own",
        "pass example_inputs=, a batch like the real ones, to the plugin or to ShardConfig",
    ):
        ShardFormer(ShardConfig()).optimize(model)
    ids = torch.arange(8).view(1, 8)
    example = {"input_ids": ids, "strength": torch.tensor(2.0), "labels": ids}
    sharded, _ = ShardFormer(ShardConfig(example_inputs=example, make_vocab_size_divisible_by=1)).optimize(model)
    sharded(**example).loss.backward()


class TiedLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).softmax(-1))


@mistake(
    symptom='`custom_policy="auto"` for a model in which nothing can be dealt to ranks',
    gets="refused on every rank, with its linears and what is in the way of each",
    fix="a policy that says how, or `tp_size=1`",
    worlds=(2,),
)
def nothing_to_infer(rank: int, world: int) -> None:
    plugin = HybridParallelPlugin(tp_size=2, custom_policy="auto", example_inputs=torch.randn(2, 8))
    model = TiedLinears()
    with refused("could not be sharded", "one: its weight is that of another module too", "custom_policy="):
        Booster(plugin=plugin).boost(model, adamw(model.parameters()))


@mistake(
    symptom='`custom_policy="auto"` for a model of one\'s own, without `example_inputs`',
    gets="refused: no batch can be guessed to try a plan on",
    fix="`example_inputs=next(iter(dataloader))`",
    worlds=(2,),
)
def nothing_to_try_on(rank: int, world: int) -> None:
    model = TiedLinears()
    with refused("custom_policy='auto'", "pass example_inputs="):
        Booster(plugin=HybridParallelPlugin(tp_size=2, custom_policy="auto")).boost(model, adamw(model.parameters()))
