"""Every argument of every plugin changes something that can be measured, or is refused, or is named as without effect.

`OPTIONS` has entries for each argument, found with inspect.signature: a new argument without one fails here.

    Changes(see, value, base, world)    with `value` on top of `base` the observer `see` sees something else
    Refused(value, words, base)         a ValueError with these words
    Idle(value, base)                   accepted, and named in `without_effect` and in the layout report

An argument that acts in one combination and not in another has an entry for both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright
from shardwright.plugins import (
    DeepSpeedPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardwright.plugins.without_effect import HYBRID, LOW_LEVEL_ZERO
from shardwright.shardformer import (
    ModulePolicyDescription,
    PipelineGradientCheckpointConfig,
    Policy,
    ShardConfig,
    ShardFormer,
)
from shardwright.shardformer.policies.llama import LlamaPolicy
from shardwright.testing import run_ranks
from tests.plugins import option_observers as see
from tests.plugins.test_advice import TowerPolicy, _batch

Settings = dict[str, Any]


@dataclass(frozen=True)
class Changes:
    see: Callable[[type, Settings], Any]
    value: Any
    base: Settings = field(default_factory=dict)
    world: int = 2


@dataclass(frozen=True)
class Refused:
    value: Any
    words: str
    base: Settings = field(default_factory=dict)
    world: int = 2


@dataclass(frozen=True)
class Idle:
    value: Any
    base: Settings = field(default_factory=dict)
    world: int = 2


class Marking(Policy):
    """Leaves a mark on every MLP."""

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        return {"LlamaMLP": ModulePolicyDescription(attribute_replacement={"marked": True})}


F32: Settings = {"precision": "fp32"}
FP16: Settings = {"precision": "fp16"}
DELAYED: Settings = {"scaling": "delayed"}
EMULATED: Settings = {"fp8_options": {"emulate": True}}
EMULATED_DELAYED: Settings = {"emulate": True, **DELAYED}
SCALER: Settings = {
    **FP16,
    "initial_scale": 1024.0,
    "growth_interval": 3,
    "hysteresis": 2,
    "min_scale": 1.0,
    "max_scale": 4096.0,
}
PIPE: Settings = {"pp_size": 2, "num_microbatches": 4}
CHUNKS: Settings = {**PIPE, "pp_style": "interleaved", "num_model_chunks": 2}
HALF = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5)
PARTLY = PipelineGradientCheckpointConfig(selective_ratio=0.5)
TP: Settings = {"tp_size": 2, **F32}


ULYSSES: Settings = {
    "enable_sequence_parallelism": True,
    "sequence_parallelism_mode": "all_to_all",
    "sp_size": 2,
    "precision": "fp32",
}


def fp8_options() -> dict[str, list[Any]]:
    """Products in 8 bits, which no CPU has; `use_fp8` needs options that say so to be tried here."""
    base = {**F32, "use_fp8": True}
    return {
        "use_fp8": [Changes(see.fp8_is_refused, True)],
        "fp8_options": [
            *(
                Changes(see.products, {"emulate": True, **value}, {**base, **EMULATED})
                for value in ({"granularity": "rowwise"}, DELAYED)
            ),
            Changes(
                see.products, {"emulate": True, **DELAYED, "amax_history": 1}, {**base, "fp8_options": EMULATED_DELAYED}
            ),
            Changes(see.fp8_is_refused, {"emulate": True}, base),
            Refused({"granularity": "rowwise"}, "write rowwise products in bf16 alone", base),
            Refused({"emulate": True}, "nothing is computed in fp8"),
            Refused({"emulated": True}, "did you mean 'emulate'", base),
        ],
    }


def scaler_options() -> dict[str, list[Any]]:
    """The loss scale's: each moves it in fp16, none is used otherwise."""
    values = {
        "initial_scale": 512.0,
        "min_scale": 300.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
        "hysteresis": 1,
    }
    options: dict[str, list[Any]] = {
        name: [Changes(see.loss_scales, value, SCALER), Idle(value)] for name, value in values.items()
    }
    return {**options, "max_scale": [Changes(see.loss_scales, 1024.0, SCALER), Idle(2.0**20)]}


HYBRID_OPTIONS: dict[str, list[Any]] = {
    **scaler_options(),
    "tp_size": [Changes(see.modules, 2)],
    "pp_size": [Changes(see.report, 2, {"num_microbatches": 4})],
    "sp_size": [
        Changes(see.report, 4, ULYSSES, world=4),
        Refused(2, "sp_size=2 without enable_sequence_parallelism=True"),
        Refused(1, "sequence_parallelism_mode='all_to_all' with sp_size=1", ULYSSES),
    ],
    "ep_size": [
        Changes(see.experts, 2, F32),
        Refused(2, "ep_size=2 does not divide dp_size=1", {"tp_size": 2}),
    ],
    "precision": [
        Changes(see.modules, "fp16"),
        Changes(see.products, "fp8", {**EMULATED, "use_fp8": True, "precision": "fp32"}),
        Refused("fp17", "did you mean 'fp16'"),
    ],
    "zero_stage": [Changes(see.traffic, stage, F32) for stage in (1, 2, 3)],
    "enable_all_optimization": [Changes(see.modules, True)],
    "enable_fused_normalization": [Changes(see.modules, True)],
    "enable_fused_activation": [Changes(see.modules, True)],
    "enable_fused_rotary": [Changes(see.modules, True)],
    "enable_flash_attention": [Changes(see.report, True)],
    "enable_fused_cross_entropy": [Changes(see.logits, False, F32)],
    "attention_backend": [
        Changes(see.modules, "math"),
        Refused("flush", "attention_backend='flush' is not one of"),
    ],
    "enable_jit_fused": [
        Changes(see.report, True),
        Changes(see.modules, True, TP),
        Refused(True, "num_sequence_slices=2", {**PIPE, "num_sequence_slices": 2}),
        Refused(True, "selective recomputation", {"gradient_checkpoint_config": PARTLY}),
    ],
    "enable_sequence_parallelism": [
        Changes(see.traffic, True, {**TP, **F32}),
        Refused(True, "enable_sequence_parallelism=True with tp_size=1"),
        Refused(False, "enable_sequence_parallelism=True", ULYSSES),
    ],
    "sequence_parallelism_mode": [
        Idle("all_to_all"),
        Refused("circle", "sequence_parallelism_mode='circle' is not one of"),
        Changes(see.traffic, "ring", {**TP, **F32, "enable_sequence_parallelism": True}),
    ],
    "enable_sequence_overlap": [
        Changes(see.report, True, {**TP, "enable_sequence_parallelism": True}),
        Refused(True, "needs enable_sequence_parallelism=True"),
        Refused(True, "belongs to sequence_parallelism_mode='split_gather'", ULYSSES),
    ],
    "parallel_output": [Changes(see.outputs, False, TP), Idle(False)],
    "num_microbatches": [Changes(see.layer_calls, 2)],
    "microbatch_size": [Changes(see.layer_calls, 1), Refused(1, "give one of them", {"num_microbatches": 2})],
    "max_norm": [Changes(see.step_size, 0.5, F32)],
    "broadcast_buffers": [Changes(see.buffers, False), Idle(False, world=1)],
    "ddp_bucket_cap_mb": [Changes(see.traffic, 0.01, F32), Idle(0.01, {"zero_stage": 1})],
    "gather_ahead": [
        Changes(see.traffic, 0, {**F32, "zero_stage": 3}),
        Changes(see.actions, 0, {**CHUNKS, "zero_stage": 3}, world=4),
        Idle(1),
        Idle(1, {"zero_stage": 3}, world=1),
        Refused(-1, "gather_ahead=-1 must be a whole number"),
    ],
    "find_unused_parameters": [Idle(True), Refused(True, "every rank must use the same layers", {"zero_stage": 3})],
    "check_reduction": [Refused(True, "check_reduction=True was withdrawn")],
    "gradient_as_bucket_view": [Idle(True), Idle(True, {"zero_stage": 3})],
    "static_graph": [Idle(True)],
    "zero_bucket_size_in_m": [
        Changes(see.traffic, 0.002, {**F32, "zero_stage": 1}),
        Idle(1.0),
        Idle(1.0, {"zero_stage": 3}),
    ],
    "cpu_offload": [
        Changes(see.masters, True, {**F32, "zero_stage": 1}),
        Changes(see.report, True, {**F32, "zero_stage": 2}),
        Refused(True, "cpu_offload=True with zero_stage=0"),
    ],
    "communication_dtype": [
        *(Changes(see.traffic, torch.bfloat16, {**F32, "zero_stage": stage}) for stage in (0, 1, 2)),
        Changes(see.report, torch.bfloat16, {"zero_stage": 3}),
        Refused(torch.float8_e4m3fn, "in which ranks can sum"),
        Idle(torch.bfloat16, world=1),
    ],
    "overlap_communication": [
        Changes(see.traffic, False, {**F32, "zero_stage": 1, "zero_bucket_size_in_m": 0.002}),
        Changes(see.traffic, False, {**F32, "zero_stage": 3}),
        Idle(False, world=1),
    ],
    "overlap_allgather": [
        Changes(see.traffic, True, {**F32, "zero_stage": 1}),
        Refused(True, "only stages 1 and 2 gather"),
        Refused(True, "only stages 1 and 2 gather", {"zero_stage": 3}),
        Idle(True, {"zero_stage": 1, "zero_group_size": 1}),
    ],
    "zero_group_size": [
        Changes(see.traffic, 2, {**F32, "zero_stage": 1}, world=4),
        Refused(2, "zero_group_size=2 with zero_stage=0"),
    ],
    "custom_policy": [
        Changes(see.modules, Marking()),
        Idle(LlamaPolicy()),
        Changes(see.report, "auto", {"tp_size": 2}),
        Idle("auto"),
    ],
    "pp_style": [
        Changes(see.report, "gpipe", PIPE),
        Changes(see.report, "auto", PIPE),
        Refused("auto", "needs num_microbatches", {"pp_size": 2, "microbatch_size": 1}),
        Idle("gpipe"),
        Idle("auto"),
    ],
    "auto_memory": [
        Changes(see.report, 9.0, {**PIPE, "pp_style": "auto"}),
        Refused(0.5, "auto_memory=0.5 must be at least 1", {**PIPE, "pp_style": "auto"}),
        Idle(2.0, PIPE),
    ],
    "cut_memory": [
        Changes(see.report, 0.75, PIPE),
        Refused(0.0, "must be above 0", PIPE),
        Refused(1.0, "whose bound is auto_memory", {**PIPE, "pp_style": "auto"}),
        Idle(1.0),
    ],
    "num_model_chunks": [Changes(see.report, 4, CHUNKS), Idle(2, {"pp_style": "interleaved"})],
    "num_sequence_slices": [
        Changes(see.report, 2, PIPE),
        Changes(see.report, 3, CHUNKS),
        Refused(2, "without one all of them would be held"),
        Refused(2, "searches among schedules of whole microbatches", {**PIPE, "pp_style": "auto"}),
        Refused(0, "a whole number of at least 1", PIPE),
    ],
    "num_layers_per_stage": [Changes(see.report, [3, 5], PIPE), Refused("1,3", "list of whole numbers")],
    "overlap_p2p": [Idle(False)],  # see test_messages_between_stages
    "enable_metadata_cache": [Idle(False)],  # see test_messages_between_stages
    "deferred_bytes": [
        Idle(0),
        Idle(0, PIPE),
        Refused(-1, "at least 0", {**PIPE, "pp_style": "zb"}),
    ],  # see test_pipeline_deferral
    "offload_activations": [
        Changes(see.actions, 1.0, CHUNKS),
        Changes(see.report, [1.0, 0.0, 1.0, 0.0], CHUNKS),
        Refused(0.5, "without a pipeline"),
        Refused([0.5, 1.5], "must be a share", PIPE),
        Refused([0.5], "1 entry for 2 stages", PIPE),
        Refused([0.5, 0.5], "give one number", {**PIPE, "pp_style": "auto"}),
        Refused("half", "a number, or a list of numbers", PIPE),
    ],
    "gradient_checkpoint_config": [
        *(Changes(see.layer_calls, value) for value in (HALF, PARTLY)),
        *(Changes(see.report, value, PIPE) for value in (HALF, PARTLY)),
    ],
    "make_vocab_size_divisible_by": [Changes(see.modules, 1, TP), Idle(32)],
    "dp_outside": [Changes(see.places, False, PIPE, world=4), Idle(False), Idle(False, PIPE)],
    "inner_ring_size": [Refused(2, "inner_ring_size=2")],
    "ulysses_size": [
        Changes(see.report, 2, {**ULYSSES, "sequence_parallelism_mode": "ring_attn", "sp_size": 4}, world=4),
        Refused(2, "ulysses_size=2 belongs to sequence_parallelism_mode='ring_attn'", ULYSSES),
    ],
    "fp8_communication": [
        *(Changes(see.traffic, True, base) for base in ({}, {"zero_stage": 2}, {"zero_stage": 3}, TP)),
        Changes(see.report, True, PIPE),
        Refused(True, "both say in which format", {"communication_dtype": torch.bfloat16}),
        Idle(True, world=1),
    ],
    **fp8_options(),
    "example_inputs": [
        Changes(see.cuts_a_tower, _batch(), {**PIPE, "custom_policy": TowerPolicy()}),
        Refused("a batch", "next(iter(dataloader))", PIPE),
        Idle(_batch()),
    ],
    "layer_costs": [
        Changes(see.report, [1.0] * 7 + [9.0], PIPE),
        Refused("1,3", "list of numbers"),
        Idle([1.0, 2.0]),
    ],
}

ZERO_OPTIONS: dict[str, list[Any]] = {
    **scaler_options(),
    "stage": [
        Changes(see.gradients_kept, 2),
        Changes(see.traffic, 3, F32),
        Refused(0, "stage=0 must be 1"),
        Refused("2", "use 2"),
    ],
    "precision": [
        Changes(see.modules, "fp16"),
        Changes(see.products, "fp8", {**EMULATED, "use_fp8": True, "precision": "fp32"}),
    ],
    "max_norm": [Changes(see.step_size, 0.5, F32)],
    "norm_type": [Refused(1.0, "norm_type=1.0 must be 2.0")],
    "reduce_bucket_size_in_m": [Changes(see.traffic, 0.002, F32), Idle(1.0, {"stage": 3})],
    "communication_dtype": [
        Changes(see.traffic, torch.bfloat16, F32),
        Refused(torch.float8_e4m3fn, "in which ranks can sum"),
        Refused("bf16", "communication_dtype=bf16"),
        Idle(torch.bfloat16, world=1),
    ],
    "overlap_communication": [
        Changes(see.traffic, False, {**F32, "reduce_bucket_size_in_m": 0.002}),
        Changes(see.traffic, False, {**F32, "stage": 3}),
        Idle(False, world=1),
    ],
    "overlap_allgather": [
        Changes(see.traffic, True, F32),
        Refused(True, "overlap_allgather=True with stage=3", {"stage": 3}),
        Idle(True, {"zero_group_size": 1}),
    ],
    "cpu_offload": [Changes(see.masters, True, F32), Refused("yes", "use True")],
    "master_weights": [Changes(see.masters, False), Changes(see.masters, False, {"stage": 3}), Idle(False, F32)],
    "verbose": [Changes(see.printed, True), Changes(see.printed, True, {"stage": 3})],
    "cast_inputs": [Changes(see.input_dtype, False), Idle(False, F32)],
    "fp8_communication": [
        *(Changes(see.traffic, True, {"stage": stage}) for stage in (1, 2, 3)),
        Refused(True, "both say in which format", {"communication_dtype": torch.bfloat16}),
        Idle(True, world=1),
    ],
    **fp8_options(),
    "extra_dp_size": [
        Changes(see.traffic, 2, F32, world=4),
        Refused(3, "extra_dp_size=3 does not divide"),
        Refused(2, "say the same thing", {"zero_group_size": 2}),
    ],
    "zero_group_size": [Changes(see.traffic, 2, F32, world=4), Changes(see.traffic, 2, {**F32, "stage": 3}, world=4)],
    "gather_ahead": [
        Changes(see.traffic, 0, {**F32, "stage": 3}),
        Idle(1, F32),
        Refused(-1, "gather_ahead=-1 must be a whole number", {"stage": 3}),
    ],
}

DDP_OPTIONS: dict[str, list[Any]] = {
    "broadcast_buffers": [Changes(see.ddp_settings, False, world=1)],
    "bucket_cap_mb": [Changes(see.ddp_settings, 1, world=1), Refused(0, "bucket_cap_mb=0"), Refused("25", "use 25")],
    "find_unused_parameters": [Changes(see.ddp_settings, True, world=1)],
    "check_reduction": [Refused(True, "check_reduction=True was withdrawn")],
    "gradient_as_bucket_view": [Changes(see.ddp_settings, True, world=1)],
    "static_graph": [Changes(see.ddp_settings, True, world=1)],
    "fp8_communication": [Changes(see.ddp_settings, True, world=1)],  # see test_fp8_communication.py
}

FSDP_OPTIONS: dict[str, list[Any]] = {
    "mixed_precision": [Changes(see.fsdp_state, "bf16"), Refused("half", "mixed_precision='half'")],
    "reshard_after_forward": [Changes(see.fsdp_state, False)],
    "shard_size": [Changes(see.modules, 2, world=4), Refused(3, "shard_size=3")],
    "cpu_offload": [Changes(see.fsdp_state, True), Refused("yes", "cpu_offload='yes'")],
    "activation_checkpointing": [Changes(see.layer_calls, True)],
    "auto_wrap_policy": [Changes(see.fsdp_state, ["LlamaMLP"])],
    "param_init_fn": [],  # see test_param_init_fn
    "fp8_communication": [Changes(see.bytes_sent, True)],
}

OPTIONS: dict[type, dict[str, list[Any]]] = {
    HybridParallelPlugin: HYBRID_OPTIONS,
    LowLevelZeroPlugin: ZERO_OPTIONS,
    TorchDDPPlugin: DDP_OPTIONS,
    TorchFSDPPlugin: FSDP_OPTIONS,
}
ENTRIES = [
    (plugin, name, entry)
    for plugin, options in OPTIONS.items()
    for name, entries in options.items()
    for entry in entries
]


def _id(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else value if isinstance(value, str) else type(value).__name__


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    yield lambda size: shardwright.launch(0, size, None, None, backend="fake" if size > 1 else "gloo")
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("plugin", OPTIONS, ids=_id)
def test_every_argument_has_an_entry(plugin: type) -> None:
    assert set(inspect.signature(plugin).parameters) == set(OPTIONS[plugin])


@pytest.mark.parametrize(("plugin", "rules"), [(HybridParallelPlugin, HYBRID), (LowLevelZeroPlugin, LOW_LEVEL_ZERO)])
def test_every_rule_is_for_an_argument_and_has_an_entry(plugin: type, rules: Any) -> None:
    named = {name for rule in rules for name in rule.options}
    idle = {name for name, entries in OPTIONS[plugin].items() if any(isinstance(entry, Idle) for entry in entries)}
    assert named | ({"custom_policy"} if plugin is HybridParallelPlugin else set()) == idle


@pytest.mark.parametrize(("plugin", "name", "entry"), ENTRIES, ids=_id)
def test_it_acts_or_is_refused_or_is_named(plugin: type, name: str, entry: Any, start: Callable[[int], None]) -> None:
    start(entry.world)
    if isinstance(entry, Refused):
        with pytest.raises(ValueError) as caught:
            plugin(**{**entry.base, name: entry.value})
        assert entry.words in str(caught.value)
        assert name in str(caught.value)
    elif isinstance(entry, Idle):
        made = plugin(**{**entry.base, name: entry.value})
        assert name in [found.name for found in made.without_effect]  # type: ignore[attr-defined]
        if hasattr(made, "preflight"):
            [said] = [str(found) for found in made.without_effect if found.name == name]
            assert f"without effect here: {said}" in str(made.preflight(see.build(num_hidden_layers=4)))
    else:
        given = {**entry.base, name: entry.value}
        without, with_it = entry.see(plugin, entry.base), entry.see(plugin, given)
        assert with_it != without, (
            f"{name}={entry.value!r} on top of {entry.base} changes nothing that {entry.see.__name__} sees"
        )
        made = plugin(**given)
        assert name not in [found.name for found in getattr(made, "without_effect", ())]


def messages(rank: int, world: int) -> list[list[Any]]:
    """What pipelines with and without each option of messages send in two steps, and when they wait."""
    found = []
    for option in ({}, {"overlap_p2p": False}, {"enable_metadata_cache": False}):
        plugin = HybridParallelPlugin(**PIPE, **F32, **option)
        booster, model, optimizer = see.boosted(plugin)
        with see.recorded() as events:
            for _ in range(2):
                booster.execute_pipeline(iter([see.batch()]), model, None, optimizer)  # type: ignore[arg-type]
                optimizer.step()
                optimizer.zero_grad()
        found.append(events)
    return found


def test_messages_between_stages() -> None:
    """overlap_p2p: waits come later than posts; enable_metadata_cache: descriptions of messages travel once."""
    for plain, waiting, describing in run_ranks(messages, 2):
        kinds = [[event[0] if event[0] == "wait" else event for event in events] for events in (plain, waiting)]
        assert kinds[0] != kinds[1]
        assert len(describing) > len(plain)


def test_a_default_is_silent(start: Callable[[int], None], caplog: pytest.LogCaptureFixture) -> None:
    """Written out, too: who names a default asks for nothing."""
    start(2)
    for plugin in (HybridParallelPlugin, LowLevelZeroPlugin):
        defaults = {name: parameter.default for name, parameter in inspect.signature(plugin).parameters.items()}
        assert plugin(**defaults).without_effect == ()  # type: ignore[attr-defined]
    assert not caplog.records


def test_what_has_no_effect_is_logged_once(start: Callable[[int], None], caplog: pytest.LogCaptureFixture) -> None:
    start(2)
    for _ in range(2):
        HybridParallelPlugin(pp_style="gpipe", growth_factor=7.0)
    [record] = [record.getMessage() for record in caplog.records]
    assert "pp_style='gpipe' (pp_size=1 has no pipeline)" in record
    assert "growth_factor=7.0 (only precision='fp16' scales the loss)" in record


def test_param_init_fn(start: Callable[[int], None], caplog: pytest.LogCaptureFixture) -> None:
    """It fills modules on the meta device, and is named where there are none."""
    start(2)
    filled: list[nn.Module] = []

    def fill(module: nn.Module) -> None:
        filled.append(module)
        module.reset_parameters()  # type: ignore[operator]

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    see.boosted(TorchFSDPPlugin(param_init_fn=fill), model)
    assert len(filled) == 2
    see.boosted(TorchFSDPPlugin(param_init_fn=fill), nn.Sequential(nn.Linear(4, 4)))
    assert any("without effect: param_init_fn" in record.getMessage() for record in caplog.records)
    with pytest.raises(ValueError, match="activation_checkpointing=True: Linear has no repeated blocks"):
        see.boosted(TorchFSDPPlugin(activation_checkpointing=True), nn.Linear(4, 4))


def test_deepspeed_has_one_argument() -> None:
    """Its keys are DeepSpeed's business; tests/plugins/test_deepspeed.py walks those that are changed on the way."""
    assert list(inspect.signature(DeepSpeedPlugin).parameters) == ["config"]


SHARD_CONFIG: dict[str, list[Any]] = {
    # see tests/models/test_tp_interface.py, as for `parallel_output` and the vocabulary
    "tensor_parallel_process_group": [],
    "parallel_output": [],
    "make_vocab_size_divisible_by": [],
    "enable_tensor_parallelism": [],
    "enable_all_optimization": [],
    "enable_fused_normalization": [],
    "enable_fused_activation": [],  # see tests/plugins/test_fused_layouts.py
    "enable_fused_rotary": [],
    "enable_flash_attention": [],
    "attention_backend": [],  # see tests/models/test_attention.py
    "enable_jit_fused": [],  # see tests/models/test_tp_compile.py
    "example_inputs": [],  # see tests/models/test_self_check.py
    "extra_kwargs": [],  # for policies of the user's own
    "sequence_parallel_process_group": [object()],
    "pipeline_stage_manager": [object()],
    "enable_sequence_parallelism": [True],
    "sequence_parallelism_mode": ["ring"],
    "enable_sequence_overlap": [True],
    "gradient_checkpoint_config": [object()],
    "fp8_communication": [],  # see test_fp8_communication.py
    "inner_ring_size": [2],
}


def test_what_shardformer_alone_cannot_do_is_refused(start: Callable[[int], None]) -> None:
    start(2)
    assert set(inspect.signature(ShardConfig).parameters) == set(SHARD_CONFIG)
    for name, values in SHARD_CONFIG.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                ShardFormer(ShardConfig(**{name: value})).shard_model(see.build())
