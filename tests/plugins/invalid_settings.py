"""Arguments that HybridParallelPlugin refuses by themselves, and the parts that mistakes are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from shardwright import Booster
from shardwright.shardformer import PipelineGradientCheckpointConfig, Policy
from shardwright.testing import zoo

RING = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"}


class Unmatched(Policy):
    def rules(self) -> dict[str, str]:
        return {"layers.*.self_attn.query": "colwise"}


@dataclass(frozen=True)
class Case:
    """A mistake: arguments of the plugin, and what is done with it; without an action the constructor must refuse.

    words   what the message must hold: field and value, rule, what would work
    """

    plugin: dict[str, Any]
    words: list[str]
    action: Callable[[Booster], Any] | None = None
    boosted: dict[str, Any] | None = field(default=None)  # the action wants a boosted model: arguments of the zoo


def boost(
    model: str | Callable[[], nn.Module] = "llama-causal-lm",
    optimizer: Callable[[nn.Module], Any] | None = None,
    **config: Any,
) -> Any:
    def action(booster: Booster) -> Any:
        built = zoo.build(model, dtype=torch.float32, **config) if isinstance(model, str) else model()
        return booster.boost(
            built, optimizer(built) if optimizer is not None else torch.optim.AdamW(built.parameters())
        )

    return action


def execute(batch: Any) -> Any:
    def action(booster: Booster, model: nn.Module, optimizer: Any) -> Any:
        return booster.execute_pipeline(iter([batch]) if not callable(batch) else batch(), model, None, optimizer)

    return action


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return optimizer


def empty(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = []
    return optimizer


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    return optimizer


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in model.parameters() if param.ndim == 2])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def routed_both_sides() -> nn.Module:
    config = transformers.NllbMoeConfig(
        vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_experts=2, encoder_sparse_step=1,
        decoder_sparse_step=1, output_router_logits=True, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    return transformers.NllbMoeForConditionalGeneration(config)


def ckpt(*numbers: int) -> PipelineGradientCheckpointConfig:
    return PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=list(numbers))


def ids(samples: int) -> torch.Tensor:
    return torch.ones(samples, 5, dtype=torch.long)


PIPE: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2, "precision": "fp32"}
V = {**PIPE, "pp_style": "interleaved"}

SETTINGS: dict[str, Case] = {
    "tp that does not divide the world": Case(
        {"tp_size": 3}, ["world_size=2", "tp_size=3", "tp_size=2", "Start 3 ranks"]
    ),
    "pp larger than the world": Case({"pp_size": 4, "num_microbatches": 4}, ["world_size=2", "pp_size=4", "pp_size=2"]),
    "a product larger than the world": Case(
        {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}, ["tp_size=2 x pp_size=2", "Start 4 ranks"]
    ),
    "tp of zero": Case({"tp_size": 0}, ["tp_size=0", "at least 1"]),
    "a negative pp": Case({"pp_size": -1}, ["pp_size=-1", "at least 1"]),
    "tp as text": Case({"tp_size": "2"}, ["tp_size='2'", "whole number", "use 2"]),
    "tp as float": Case({"tp_size": 2.0}, ["tp_size=2.0", "use 2"]),
    "tp between numbers": Case({"tp_size": 1.5}, ["tp_size=1.5", "nearest are 1 and 2"]),
    "tp as bool": Case({"tp_size": True}, ["tp_size=True", "whole number", "use 1"]),
    "tp missing": Case({"tp_size": None}, ["tp_size=None", "whole number"]),
    "sp as text": Case({"sp_size": "two"}, ["sp_size='two'", "whole number or None"]),
    "ep as text": Case({"ep_size": "2"}, ["ep_size='2'", "use 2"]),
    "ep of zero": Case({"ep_size": 0}, ["ep_size=0", "at least 1"]),
    "ep that does not divide dp": Case({"ep_size": 3}, ["ep_size=3 does not divide dp_size=2", "do: 1, 2"]),
    "ep where tp takes the ranks": Case({"ep_size": 2, "tp_size": 2}, ["ep_size=2", "dp_size=1", "do: 1"]),
    "ep over several ZeRO sub-groups": Case(
        {"ep_size": 2, "zero_stage": 1, "zero_group_size": 1},
        ["ep_size=2", "zero_group_size=1", "use zero_group_size=2"],
    ),
    "an unknown sequence mode": Case(
        {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "rings"},
        ["sequence_parallelism_mode='rings'"],
    ),
    "sequences split along nothing": Case(
        {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"},
        ["sequence_parallelism_mode='split_gather' with tp_size=1", "tp_size=2 or more"],
    ),
    "sequences split along two axes": Case(
        {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring", "tp_size": 2, "sp_size": 2},
        ["sp_size=2", "use sp_size=1"],
    ),
    "sequences split and sliced": Case(
        {
            "enable_sequence_parallelism": True,
            "tp_size": 2,
            "pp_size": 2,
            "num_microbatches": 2,
            "num_sequence_slices": 2,
        },
        ["num_sequence_slices=2 with sequence_parallelism_mode='split_gather'", "num_sequence_slices=1"],
    ),
    "a sequence gathered again that is not split": Case(
        {"enable_sequence_overlap": True, "tp_size": 2},
        ["enable_sequence_overlap=True needs enable_sequence_parallelism=True"],
    ),
    "a mode of the wrong type": Case(
        {"sequence_parallelism_mode": 1}, ["sequence_parallelism_mode=1", "string or None"]
    ),
    "a ring size without a ring": Case({"inner_ring_size": 2}, ["inner_ring_size=2", "ring_attn"]),
    "heads traded inside of no ring": Case({"ulysses_size": 2}, ["ulysses_size=2", "ring_attn", "leave it None"]),
    "heads traded by too many ranks": Case(
        {**RING, "sp_size": 2, "ulysses_size": 4},
        ["ulysses_size=4 does not divide sp_size=2", "use one of [1, 2]"],
    ),
    "an inner ring of all ranks, of which some trade": Case(
        {**RING, "sp_size": 2, "ulysses_size": 2, "inner_ring_size": 2},
        ["inner_ring_size=2 does not divide sp_size=2 / ulysses_size=2 = 1", "None"],
    ),
    "heads traded by nobody": Case({"ulysses_size": 0}, ["ulysses_size=0", "at least 1", "None"]),
    "an unknown precision": Case({"precision": "fp17"}, ["precision='fp17'", "did you mean 'fp16'"]),
    "a precision in bits": Case({"precision": 16}, ["precision=16", "string"]),
    "fp8 with compiled layers": Case(
        {"precision": "fp8", "enable_jit_fused": True}, ["enable_jit_fused=True with precision='fp8'", "leave one"]
    ),
    "fp8 with products in parts": Case(
        {"precision": "fp8", "tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring"},
        ["sequence_parallelism_mode='ring' with precision='fp8'", "'split_gather'"],
    ),
    "fp8 with sequences gathered again": Case(
        {"use_fp8": True, "tp_size": 2, "enable_sequence_parallelism": True, "enable_sequence_overlap": True},
        ["enable_sequence_overlap=True with use_fp8=True", "leave enable_sequence_overlap out"],
    ),
    "two formats on the wire": Case(
        {"fp8_communication": True, "communication_dtype": torch.bfloat16},
        ["communication_dtype=torch.bfloat16 with fp8_communication=True", "leave one of them out"],
    ),
    "a zero stage that does not exist": Case(
        {"zero_stage": 4}, ["zero_stage=4", "0 (all-reduce), 1", "3 (and parameters)"]
    ),
    "a zero stage as bool": Case({"zero_stage": True}, ["zero_stage=True", "use 1"]),
    "a zero stage as text": Case({"zero_stage": "2"}, ["zero_stage='2'", "use 2"]),
    "a sub-group that does not divide dp": Case(
        {"zero_stage": 1, "zero_group_size": 3}, ["zero_group_size=3", "dp_size=2", "1, 2"]
    ),
    "a sub-group as text": Case({"zero_group_size": "2"}, ["zero_group_size='2'", "use 2", "or None"]),
    "a sub-group of nothing": Case(
        {"zero_group_size": 2}, ["zero_group_size=2 with zero_stage=0", "zero_stage=1, 2 or 3"]
    ),
    "unused parameters where there may be none": Case(
        {"find_unused_parameters": True, "zero_stage": 3}, ["find_unused_parameters=True", "zero_stage=0, 1 or 2"]
    ),
    "fp8 gradients": Case(
        {"communication_dtype": torch.float8_e4m3fn}, ["communication_dtype=torch.float8_e4m3fn", "torch.bfloat16"]
    ),
    "a sequence mode that does not exist": Case(
        {"sequence_parallelism_mode": "rings"}, ["'rings'", "did you mean 'ring'"]
    ),
    "offload without sharding": Case({"cpu_offload": True}, ["cpu_offload=True", "zero_stage=0", "use zero_stage=1"]),
    "offload as text": Case({"cpu_offload": "yes"}, ["cpu_offload='yes'", "use True"]),
    "less than nothing gathered ahead": Case(
        {"gather_ahead": -1, "zero_stage": 3}, ["gather_ahead=-1", "at least 0", "None"]
    ),
    "overlapped gather without one": Case(
        {"overlap_allgather": True, "zero_stage": 3}, ["overlap_allgather=True", "zero_stage=1 or 2"]
    ),
    "a negative norm": Case({"max_norm": -1.0}, ["max_norm=-1.0", "0 (no clipping) or positive"]),
    "a norm as text": Case({"max_norm": "1.0"}, ["max_norm='1.0'", "a number", "use 1"]),
    "a norm that is no number": Case({"max_norm": float("nan")}, ["max_norm=nan", "a number"]),
    "an empty bucket": Case({"zero_bucket_size_in_m": 0}, ["zero_bucket_size_in_m=0", "positive", "12"]),
    "a negative bucket": Case({"ddp_bucket_cap_mb": -5}, ["ddp_bucket_cap_mb=-5", "positive", "25"]),
    "a dtype by name": Case({"communication_dtype": "bf16"}, ["communication_dtype=bf16", "torch.bfloat16"]),
    "an integer dtype": Case({"communication_dtype": torch.int8}, ["communication_dtype=torch.int8", "floating-point"]),
    "check_reduction": Case({"check_reduction": True}, ["check_reduction=True", "leave it False"]),
    "compiled layers and slices": Case(
        {"enable_jit_fused": True, "pp_size": 2, "num_sequence_slices": 2, "num_microbatches": 4},
        ["enable_jit_fused=True", "num_sequence_slices=2", "num_sequence_slices=1"],
    ),
    "compiled layers recomputed in part": Case(
        {
            "enable_jit_fused": True,
            "gradient_checkpoint_config": PipelineGradientCheckpointConfig(selective_ratio=0.5),
        },
        ["enable_jit_fused=True", "selective_ratio", "gradient_checkpointing_ratio"],
    ),
    "a flag as number": Case({"enable_flash_attention": 1}, ["enable_flash_attention=1", "use True"]),
    "a flag as text": Case({"find_unused_parameters": "no"}, ["find_unused_parameters='no'", "use False"]),
    "a flag missing": Case({"overlap_p2p": None}, ["overlap_p2p=None", "True or False"]),
    "an order by name": Case({"dp_outside": "inside"}, ["dp_outside='inside'", "True or False"]),
    "padding to nothing": Case(
        {"make_vocab_size_divisible_by": 0}, ["make_vocab_size_divisible_by=0", "at least 1", "64"]
    ),
    "padding to a fraction": Case(
        {"make_vocab_size_divisible_by": 2.5}, ["make_vocab_size_divisible_by=2.5", "2 and 3"]
    ),
    "a policy's class": Case({"custom_policy": Unmatched}, ["custom_policy=", "an instance, not the class"]),
    "a policy's name": Case({"custom_policy": "llama"}, ["custom_policy='llama'", "Policy", "'auto'"]),
    "an unknown schedule": Case({**PIPE, "pp_style": "1f2b"}, ["pp_style='1f2b'", "did you mean '1f1b'", "'zbv'"]),
    "chunks without interleaving": Case(
        {**PIPE, "num_model_chunks": 2}, ["num_model_chunks=2", "exactly 1", "'interleaved', 'zbv'"]
    ),
    "interleaving one chunk": Case({**PIPE, "pp_style": "interleaved"}, ["num_model_chunks=1", "at least 2", "'1f1b'"]),
    "a V of three": Case(
        {**PIPE, "pp_style": "zbv", "num_model_chunks": 3}, ["num_model_chunks=3", "exactly 2", "'interleaved'"]
    ),
    "less than nothing put off": Case(
        {**PIPE, "pp_style": "zb", "deferred_bytes": -1}, ["deferred_bytes=-1", "at least 0"]
    ),
    "activations away without a pipeline": Case(
        {"offload_activations": 0.5}, ["offload_activations=0.5", "pp_size=1", "gradient_checkpoint_config"]
    ),
    "slices without a pipeline": Case(
        {"num_sequence_slices": 2}, ["num_sequence_slices=2", "pp_size=1", "pp_size of at least 2"]
    ),
    "slices for a search": Case(
        {**PIPE, "pp_style": "auto", "num_sequence_slices": 2}, ["num_sequence_slices=2", "name a schedule"]
    ),
    "more than all activations away": Case(
        {**PIPE, "offload_activations": 1.5}, ["offload_activations=1.5", "0 (none) to 1 (all)"]
    ),
    "activations of too few stages": Case(
        {**PIPE, "offload_activations": [1.0]}, ["offload_activations=[1.0]", "2 stages", "one number"]
    ),
    "a share as flag": Case({**PIPE, "offload_activations": True}, ["offload_activations=True", "a number"]),
    "a search without memory": Case(
        {**PIPE, "pp_style": "auto", "auto_memory": 0.5}, ["auto_memory=0.5", "at least 1"]
    ),
    "a cut without memory": Case({**PIPE, "cut_memory": 0.0}, ["cut_memory=0.0", "above 0"]),
    "a bound for a search": Case(
        {**PIPE, "pp_style": "auto", "cut_memory": 2.0}, ["cut_memory=2.0", "'auto'", "auto_memory=2"]
    ),
    "a bound for a given cut": Case(
        {**PIPE, "num_layers_per_stage": [2, 2], "cut_memory": 1.0}, ["cut_memory=1.0", "[2, 2]", "leave one"]
    ),
    "a bound for any microbatches": Case(
        {"pp_size": 2, "microbatch_size": 1, "cut_memory": 1.0}, ["cut_memory=1.0", "num_microbatches"]
    ),
    "a search with chunks": Case(
        {**PIPE, "pp_style": "auto", "num_model_chunks": 2}, ["num_model_chunks=2", "'auto'", "leave"]
    ),
    "a search with a cut": Case(
        {**PIPE, "pp_style": "auto", "num_layers_per_stage": [2, 2]}, ["num_layers_per_stage=[2, 2]", "leave"]
    ),
    "no chunks": Case({**PIPE, "num_model_chunks": 0}, ["num_model_chunks=0", "at least 1"]),
    "a pipeline without microbatches": Case({"pp_size": 2}, ["pp_size=2", "num_microbatches=4 is a good start"]),
    "two ways to split": Case({**PIPE, "microbatch_size": 2}, ["num_microbatches=2", "microbatch_size=2", "give one"]),
    "no microbatches": Case({"num_microbatches": 0}, ["num_microbatches=0", "at least 1"]),
    "microbatches as text": Case({"num_microbatches": "4"}, ["num_microbatches='4'", "use 4"]),
    "negative microbatches": Case({"microbatch_size": -2}, ["microbatch_size=-2", "at least 1"]),
    "layers as text": Case({**PIPE, "num_layers_per_stage": "2,2"}, ["num_layers_per_stage='2,2'", "[4, 4]"]),
    "layers of text": Case(
        {**PIPE, "num_layers_per_stage": [2, "2"]}, ["num_layers_per_stage=[2, '2']", "whole numbers"]
    ),
    "a batch by name": Case({**PIPE, "example_inputs": "batch"}, ["example_inputs='batch'", "next(iter(dataloader))"]),
    "checkpointing as flag": Case(
        {"gradient_checkpoint_config": True}, ["gradient_checkpoint_config=True", "PipelineGradientCheckpointConfig"]
    ),
    "a scale of zero": Case({"precision": "fp16", "initial_scale": 0}, ["initial_scale=0", "positive"]),
    "a scale above its bound": Case(
        {"precision": "fp16", "max_scale": 2.0}, ["max_scale=2.0", "initial_scale <= max_scale"]
    ),
    "a scale below its bound": Case({"min_scale": 2**20}, ["min_scale=1048576", "min_scale <= initial_scale"]),
    "a scale that shrinks": Case({"growth_factor": 0.5}, ["growth_factor=0.5", "at least 1"]),
    "a backoff that grows": Case({"backoff_factor": 2}, ["backoff_factor=2", "(0, 1]"]),
    "growth at once": Case({"growth_interval": 0}, ["growth_interval=0", "at least 1"]),
    "growth at a fraction": Case({"growth_interval": 0.5}, ["growth_interval=0.5", "0 and 1"]),
    "no patience": Case({"hysteresis": 0}, ["hysteresis=0", "at least 1"]),
}
