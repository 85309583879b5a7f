"""Mistakes in the settings of plugins."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import shardwright
from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig, Policy, ShardConfig, ShardFormer
from shardwright.testing import adamw, zoo

from .data import said
from .model import directory, shared
from .table import mistake, refused

SCALE = {"initial_scale": 2.0**10, "growth_interval": 100}


def tiny(**config: int) -> nn.Module:
    return zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=2, **config)


def idle(plugin: Any) -> set[str]:
    return {found.name for found in plugin.without_effect}


@mistake(
    symptom="`HybridParallelPlugin(precision='half')`",
    gets="refused with the formats there are",
    fix="`precision='bf16'`",
)
def unknown_precision(rank: int, world: int) -> None:
    with refused("precision='half'", "'bf16'"):
        HybridParallelPlugin(precision="half")
    assert HybridParallelPlugin(precision="bf16").precision == "bf16"


@mistake(
    symptom="`precision='fp8'` or `use_fp8=True`",
    gets="refused at boost on CPUs and GPUs older than Ada and Hopper: they have no products in 8 bits",
    fix="`precision='bf16'`, or `fp8_options=Fp8Options(emulate=True)` to try the numbers",
)
def fp8(rank: int, world: int) -> None:
    for settings, words in (({"precision": "fp8"}, "precision='fp8'"), ({"use_fp8": True}, "use_fp8=True")):
        with refused(words, "the device is cpu", "8.9 or higher", "precision='bf16'", "emulate=True"):
            Booster(plugin=HybridParallelPlugin(**settings)).boost(tiny())
    Booster(plugin=HybridParallelPlugin(precision="fp8", fp8_options={"emulate": True})).boost(tiny())


@mistake(
    symptom="`precision='fp8'` with layers whose sizes are no multiples of 16, or only some of them on this layout",
    gets="the others compute in bf16, named in the log; refused where no linear is left",
    fix="sizes that are multiples of 16 times `tp_size`",
)
def fp8_without_sizes(rank: int, world: int) -> None:
    plugin = HybridParallelPlugin(precision="fp8", fp8_options={"emulate": True})
    with refused("precision='fp8'", "multiples of 16", "precision='bf16'"):
        Booster(plugin=plugin).boost(tiny(hidden_size=24, intermediate_size=40))


@mistake(
    symptom="`fp8_options` without `precision='fp8'` or `use_fp8=True`",
    gets="refused: nothing would be computed in fp8",
    fix="`precision='fp8'`",
)
def fp8_options_alone(rank: int, world: int) -> None:
    with refused("fp8_options=", "use_fp8=False", "precision='fp8'"):
        HybridParallelPlugin(fp8_options={"emulate": True})


@mistake(
    symptom="`fp8_communication=True` with a model in float64",
    gets="refused when it is boosted: what such a model sends is not rounded to 8 bits",
    fix="`model.float()`, or `fp8_communication=False`",
)
def eight_bits_of_sixty_four(rank: int, world: int) -> None:
    plugin = HybridParallelPlugin(precision="fp32", fp8_communication=True)
    with refused("fp8_communication=True", "torch.float64", "model.float()"):
        Booster(plugin=plugin).boost(tiny().double())
    assert Booster(plugin=plugin).boost(tiny())


@mistake(
    symptom="`communication_dtype=torch.float8_e4m3fn`",
    gets="refused at once: ranks cannot sum numbers of 8 bits",
    fix="`communication_dtype=torch.bfloat16`",
)
def gradients_in_8_bits(rank: int, world: int) -> None:
    for plugin in (HybridParallelPlugin, LowLevelZeroPlugin):
        with refused("communication_dtype=torch.float8_e4m3fn", "torch.bfloat16"):
            plugin(communication_dtype=torch.float8_e4m3fn)  # type: ignore[operator]
    assert "communication_dtype" not in idle(HybridParallelPlugin(communication_dtype=torch.bfloat16)) or world == 1


@mistake(
    symptom="`communication_dtype='bf16'`, a name instead of a dtype",
    gets="refused with a dtype to pass",
    fix="`communication_dtype=torch.bfloat16`",
)
def dtype_by_name(rank: int, world: int) -> None:
    with refused("communication_dtype=bf16", "torch.bfloat16"):
        LowLevelZeroPlugin(communication_dtype="bf16")  # type: ignore[arg-type]


@mistake(
    symptom="`tp_size='2'`, a number that a command line or an environment variable brought as text",
    gets="refused with the number that was meant",
    fix="`tp_size=int(...)`",
)
def sizes_as_text(rank: int, world: int) -> None:
    with refused("tp_size='2'", "use 2"):
        HybridParallelPlugin(tp_size="2")  # type: ignore[arg-type]
    with refused("stage='1'", "use 1"):
        LowLevelZeroPlugin(stage="1")  # type: ignore[arg-type]


@mistake(
    symptom="`cpu_offload='no'`, a flag as text: `'no'` counts as true in Python",
    gets="refused with the flag that was meant",
    fix="`cpu_offload=False`",
)
def flags_as_text(rank: int, world: int) -> None:
    for plugin in (HybridParallelPlugin, LowLevelZeroPlugin):
        with refused("cpu_offload='no'", "use False"):
            plugin(cpu_offload="no")  # type: ignore[operator]
    with refused("find_unused_parameters='yes'", "use True"):
        TorchDDPPlugin(find_unused_parameters="yes")  # type: ignore[arg-type]
    with refused("reshard_after_forward=1", "use True"):
        TorchFSDPPlugin(reshard_after_forward=1)  # type: ignore[arg-type]


@mistake(
    symptom="sizes that do not divide the number of ranks: `tp_size=3`",
    gets="refused with sizes that would work and the number of ranks that would",
    fix="a `tp_size` that divides the world, or that many ranks",
)
def sizes_that_do_not_divide(rank: int, world: int) -> None:
    with refused(f"world_size={world}", "tp_size=3", "Start 3 "):
        HybridParallelPlugin(tp_size=3)


@mistake(
    symptom="`pp_size=2` without `num_microbatches`",
    gets="refused with a number of microbatches to begin with",
    fix="`num_microbatches=4`",
)
def pipeline_without_microbatches(rank: int, world: int) -> None:
    with refused("pp_size=2 needs num_microbatches", "num_microbatches=4 is a good start"):
        HybridParallelPlugin(pp_size=2)


@mistake(
    symptom="`num_microbatches` and `microbatch_size` both given",
    gets="refused: both say how a batch is split",
    fix="one of them",
)
def two_ways_to_split(rank: int, world: int) -> None:
    with refused("num_microbatches=4", "microbatch_size=1", "give one of them"):
        HybridParallelPlugin(num_microbatches=4, microbatch_size=1)


@mistake(
    symptom="a schedule whose name is misspelt: `pp_style='1f2b'`",
    gets="refused with the schedules there are and the nearest name",
    fix="`pp_style='1f1b'`",
)
def unknown_schedule(rank: int, world: int) -> None:
    with refused("pp_style='1f2b'", "did you mean '1f1b'"):
        HybridParallelPlugin(pp_style="1f2b")


@mistake(
    symptom="`pp_style='zbv'` with the default `num_model_chunks=1`",
    gets="refused with the number of chunks that the schedule needs",
    fix="`num_model_chunks=2`",
)
def schedule_and_chunks(rank: int, world: int) -> None:
    with refused("num_model_chunks=1", "'zbv' needs exactly 2"):
        HybridParallelPlugin(pp_style="zbv")
    HybridParallelPlugin(pp_style="zbv", num_model_chunks=2)


@mistake(
    symptom="`enable_jit_fused=True` with sequences in slices",
    gets="refused: each slice has other keys and values before it, and would be a graph of its own",
    fix="`num_sequence_slices=1`, or layers that are not compiled",
    worlds=(2, 4),
)
def compiled_layers_and_slices(rank: int, world: int) -> None:
    settings = {"pp_size": 2, "num_microbatches": 4, "enable_jit_fused": True}
    with refused("enable_jit_fused=True with num_sequence_slices=2", "use num_sequence_slices=1"):
        HybridParallelPlugin(num_sequence_slices=2, **settings)  # type: ignore[arg-type]
    HybridParallelPlugin(pp_style="zb", **settings)  # type: ignore[arg-type]


@mistake(
    symptom="`enable_fused_activation=True` or `enable_fused_rotary=True` for a model without gated MLPs, or without "
    "rotary positions",
    gets="accepted: a warning says that there are none",
    fix="nothing, or leave it out",
    worlds=(1, 2),
)
def nothing_to_fuse(rank: int, world: int) -> None:
    gpt2 = zoo.build("gpt2-causal-lm", dtype=torch.float32, n_layer=1)
    for option in ("enable_fused_activation", "enable_fused_rotary"):
        with said(f"{option}=True", "of GPT2LMHeadModel are none", by=0):
            layout = HybridParallelPlugin(precision="fp32", **{option: True}).preflight(gpt2)  # type: ignore[arg-type]
        assert "activations" not in layout.kernels
        assert "rotary" not in layout.kernels


@mistake(
    symptom="options of pipelines in a run with `pp_size=1`",
    gets="accepted, as one configuration often serves many layouts; named in `plugin.without_effect`, in the layout "
    "report and in the log",
    fix="nothing, or leave them out",
)
def pipeline_options_without_a_pipeline(rank: int, world: int) -> None:
    plugin = HybridParallelPlugin(
        pp_style="interleaved", num_model_chunks=2, overlap_p2p=False, enable_metadata_cache=False
    )
    assert idle(plugin) == {"pp_style", "num_model_chunks", "overlap_p2p", "enable_metadata_cache"}
    assert ("without effect here: pp_style='interleaved' (pp_size=1 has no pipeline)") in str(
        plugin.preflight(nn.Linear(2, 2))
    )


@mistake(
    symptom="a loss scale (`initial_scale`, `growth_interval`, ...) with `precision='bf16'` or `'fp32'`",
    gets="accepted and named as without effect: only fp16 scales the loss",
    fix="nothing, or `precision='fp16'`",
)
def loss_scale_without_fp16(rank: int, world: int) -> None:
    for plugin in (HybridParallelPlugin, LowLevelZeroPlugin):
        assert idle(plugin(**SCALE)) == set(SCALE)  # type: ignore[operator]
        assert idle(plugin(**SCALE, precision="fp16")) == set()  # type: ignore[operator]


@mistake(
    symptom="`zero_bucket_size_in_m` with `zero_stage=0`, or `ddp_bucket_cap_mb` with ZeRO",
    gets="accepted and named as without effect, with the option that counts",
    fix="the other one of the two",
)
def buckets_of_the_other_stage(rank: int, world: int) -> None:
    assert idle(HybridParallelPlugin(zero_bucket_size_in_m=1.0)) == {"zero_bucket_size_in_m"}
    assert idle(HybridParallelPlugin(zero_stage=1, ddp_bucket_cap_mb=1.0)) == {"ddp_bucket_cap_mb"}
    assert idle(LowLevelZeroPlugin(stage=3, reduce_bucket_size_in_m=1.0)) == {"reduce_bucket_size_in_m"}


@mistake(
    symptom="`zero_group_size` with `zero_stage=0`",
    gets="refused: nothing is sharded, so there are no groups to shard in",
    fix="`zero_stage=1`",
)
def groups_of_nothing(rank: int, world: int) -> None:
    with refused("zero_group_size=1 with zero_stage=0", "use zero_stage=1, 2 or 3"):
        HybridParallelPlugin(zero_group_size=1)
    HybridParallelPlugin(zero_stage=1, zero_group_size=1)


@mistake(
    symptom="`ep_size=2` for a model without experts, or one that does not divide the data-parallel ranks",
    gets="refused with the values that do",
    fix="`ep_size=1`, or a divisor of the data-parallel ranks and of the experts",
)
def experts_of_a_dense_model(rank: int, world: int) -> None:
    with refused(f"ep_size={world + 1} does not divide dp_size={world}", "values that do: 1"):
        HybridParallelPlugin(ep_size=world + 1)
    if world > 1:
        with refused("ep_size=2: LlamaForCausalLM has no experts", "use ep_size=1"):
            model = tiny()
            Booster(plugin=HybridParallelPlugin(ep_size=2)).boost(model, torch.optim.AdamW(model.parameters()))


@mistake(
    symptom="`cpu_offload=True` with `zero_stage=0`",
    gets="refused: what is sharded moves to the host, and stage 0 shards nothing",
    fix="`zero_stage=1`",
)
def offload_without_zero(rank: int, world: int) -> None:
    with refused("cpu_offload=True with zero_stage=0", "use zero_stage=1"):
        HybridParallelPlugin(cpu_offload=True)
    HybridParallelPlugin(cpu_offload=True, zero_stage=1)


@mistake(
    symptom="`overlap_allgather=True` with ZeRO-3",
    gets="refused: stage 3 gathers weights ahead of their layers, and none after a step",
    fix="stage 1 or 2, or leave it out",
)
def gather_at_stage_3(rank: int, world: int) -> None:
    with refused("overlap_allgather=True with zero_stage=3", "zero_stage=1 or 2"):
        HybridParallelPlugin(overlap_allgather=True, zero_stage=3)
    with refused("overlap_allgather=True with stage=3", "stage=1 or 2"):
        LowLevelZeroPlugin(overlap_allgather=True, stage=3)


@mistake(
    symptom="`find_unused_parameters=True` with ZeRO-3",
    gets="refused: at stage 3 every rank must use the same layers; parameters that no rank uses are always found",
    fix="`zero_stage=0`, `1` or `2`",
)
def unused_parameters_at_stage_3(rank: int, world: int) -> None:
    with refused("find_unused_parameters=True with zero_stage=3", "zero_stage=0, 1 or 2"):
        HybridParallelPlugin(find_unused_parameters=True, zero_stage=3)
    HybridParallelPlugin(find_unused_parameters=True, zero_stage=2)


@mistake(
    symptom="`check_reduction=True`",
    gets="refused: DistributedDataParallel itself withdrew it and ignores it",
    fix="leave it out",
)
def check_reduction(rank: int, world: int) -> None:
    for plugin in (HybridParallelPlugin, TorchDDPPlugin):
        with refused("check_reduction=True", "leave it False"):
            plugin(check_reduction=True)  # type: ignore[operator]


@mistake(
    symptom="`sequence_parallelism_mode='all_to_all'` with `enable_sequence_parallelism=False`, as benchmark scripts "
    "pass it",
    gets="accepted and named as without effect; refused with `enable_sequence_parallelism=True` and no `sp_size`, and "
    "a mode that does not exist is refused",
    fix="leave both out, or give `sp_size` as well; `split_gather` and `ring` need `tp_size` above 1 instead",
)
def sequence_mode_that_is_off(rank: int, world: int) -> None:
    assert idle(HybridParallelPlugin(sequence_parallelism_mode="all_to_all")) == {"sequence_parallelism_mode"}
    with refused("sequence_parallelism_mode='all_to_all' with sp_size=None", "use sp_size=2"):
        HybridParallelPlugin(sequence_parallelism_mode="all_to_all", enable_sequence_parallelism=True)
    with refused("sequence_parallelism_mode='al_to_al'", "did you mean 'all_to_all'"):
        HybridParallelPlugin(sequence_parallelism_mode="al_to_al")


@mistake(
    symptom="`ulysses_size=` with `sequence_parallelism_mode='all_to_all'`, or one that does not divide `sp_size`",
    gets="refused: in `all_to_all` all ranks of `sp` trade sequences for heads anyway",
    fix="`sequence_parallelism_mode='ring_attn'` with a `ulysses_size` that divides `sp_size`",
)
def heads_traded_in_the_wrong_mode(rank: int, world: int) -> None:
    settings = {"enable_sequence_parallelism": True, "sp_size": 2}
    with refused("ulysses_size=2 belongs to sequence_parallelism_mode='ring_attn'"):
        HybridParallelPlugin(**settings, sequence_parallelism_mode="all_to_all", ulysses_size=2)
    with refused("ulysses_size=3 does not divide sp_size=2", r"use one of \[1, 2\]"):
        HybridParallelPlugin(**settings, sequence_parallelism_mode="ring_attn", ulysses_size=3)


@mistake(
    symptom="`make_vocab_size_divisible_by` or `parallel_output=False` with `tp_size=1`",
    gets="accepted and named as without effect: the vocabulary is whole",
    fix="nothing, or `tp_size` above 1",
)
def vocabulary_that_is_whole(rank: int, world: int) -> None:
    plugin = HybridParallelPlugin(make_vocab_size_divisible_by=128, parallel_output=False)
    assert idle(plugin) == {"make_vocab_size_divisible_by", "parallel_output"}


@mistake(
    symptom="`custom_policy=LlamaPolicy`, the class instead of an instance",
    gets="refused with the difference",
    fix="`custom_policy=LlamaPolicy()`",
)
def a_class_of_policies(rank: int, world: int) -> None:
    with refused("custom_policy=", "an instance, not the class"):
        HybridParallelPlugin(custom_policy=Policy)


@mistake(
    symptom="`gradient_checkpointing_ratio=0.1` on stages of few layers: the share rounds down to none",
    gets="a warning when the model is boosted and in the layout report, with the least ratio that has an effect",
    fix="a larger ratio, or `num_ckpt_layers_per_stage`",
)
def ratio_that_rounds_down(rank: int, world: int) -> None:
    config = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.1)
    model = tiny()
    layout = HybridParallelPlugin(gradient_checkpoint_config=config).preflight(model, adamw(model))
    [warning] = layout.warnings
    assert "rounds down to none" in warning
    assert "0.5 is the least" in warning
    half = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5)
    assert (
        HybridParallelPlugin(gradient_checkpoint_config=half).preflight(model, adamw(model)).stages[0].recomputed == 1
    )


@mistake(
    symptom="a policy that defines `get_held_layers` or `get_shared_params`, in a pipeline",
    gets="refused: stages and tied parameters follow from the model, so the policy's word would be ignored",
    fix="remove the method; `layer_lists` of the policy and `num_layers_per_stage` say what cannot be found",
    worlds=(2, 4),
)
def a_policy_that_cuts(rank: int, world: int) -> None:
    class Holding(Policy):
        def get_held_layers(self) -> list[nn.Module]:
            return []

    model = tiny()
    with refused("Holding.get_held_layers with pp_size above 1", "layer_lists", "num_layers_per_stage="):
        HybridParallelPlugin(pp_size=2, num_microbatches=2, custom_policy=Holding()).preflight(model, adamw(model))


@mistake(
    symptom="a key of the dict form that means nothing: `parallel=dict(weight=dict(size=1, overlap=True))`",
    gets="accepted and named as without effect; a key that does not exist is refused with the nearest one",
    fix="leave it out",
)
def keys_of_the_dict_form(rank: int, world: int) -> None:
    plugin = HybridParallelPlugin.from_config({"parallel": {"weight": {"size": 1, "overlap": True}}})
    assert idle(plugin) == {"parallel.weight.overlap"}
    with refused("parallel.wieght", "did you mean 'weight'"):
        HybridParallelPlugin.from_config({"parallel": {"wieght": 1}})


@mistake(
    symptom="`Booster(mixed_precision='bf16', plugin=HybridParallelPlugin())`",
    gets="refused: the plugin sets the number format itself",
    fix="`HybridParallelPlugin(precision='bf16')`",
)
def two_number_formats(rank: int, world: int) -> None:
    with refused("mixed_precision='bf16' with HybridParallelPlugin", "pass precision= to the plugin"):
        Booster(mixed_precision="bf16", plugin=HybridParallelPlugin())


@mistake(
    symptom="`TorchFSDPPlugin(activation_checkpointing=True)` for a model without repeated blocks",
    gets="refused: there would be nothing to recompute",
    fix="`auto_wrap_policy=[...]` with the names of the blocks' classes, or leave it out",
)
def nothing_to_recompute(rank: int, world: int) -> None:
    with refused("activation_checkpointing=True", "auto_wrap_policy="):
        Booster(plugin=TorchFSDPPlugin(activation_checkpointing=True)).boost(nn.Linear(2, 2))


@mistake(
    symptom="`ShardConfig(pipeline_stage_manager=...)` or `gradient_checkpoint_config=...` given to `ShardFormer`",
    gets="refused: ShardFormer alone cuts no stages",
    fix="`HybridParallelPlugin(pp_size=..., gradient_checkpoint_config=...)`",
)
def stages_without_the_plugin(rank: int, world: int) -> None:
    with refused("pipeline_stage_manager", "HybridParallelPlugin"):
        ShardFormer(ShardConfig(pipeline_stage_manager=object())).shard_model(tiny())
    with refused("gradient_checkpoint_config", "HybridParallelPlugin"):
        ShardFormer(ShardConfig(gradient_checkpoint_config=object())).shard_model(tiny())


@mistake(
    symptom="`Booster()` without a plugin in a job of several ranks",
    gets="a warning: every rank trains a model of its own",
    fix="`Booster(plugin=TorchDDPPlugin())`",
)
def no_plugin(rank: int, world: int) -> None:
    model = nn.Linear(2, 2)
    with said(f"in a job of {world} ranks: every rank trains a model of its own", by=0 if world > 1 else -1):
        Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@mistake(
    symptom="`booster.boost(model, optimizer, lr_scheduler=...)` with a scheduler of another optimizer",
    gets="refused: the learning rate would never change",
    fix="build the scheduler on the optimizer that goes to `boost`, or on the one that it returns",
)
def scheduler_of_another_optimizer(rank: int, world: int) -> None:
    model = nn.Linear(2, 2)
    mine, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with refused("lr_scheduler=StepLR was built on another optimizer"):
        Booster(plugin=TorchDDPPlugin()).boost(model, mine, lr_scheduler=StepLR(other, 1))
    Booster(plugin=TorchDDPPlugin()).boost(model, mine, lr_scheduler=StepLR(mine, 1))


@mistake(
    symptom="`booster.no_sync(optim=...)`, `launch(sed=1)`, `prepare_dataloader(shufle=True)`, "
    "`ShardConfig(enable_flash=True)`",
    gets="refused with the nearest name that exists",
    fix="that name",
)
def unknown_arguments_of_calls(rank: int, world: int) -> None:
    with refused("no_sync takes no argument optim", "did you mean 'optimizer'"):
        Booster().no_sync(optim=None)  # type: ignore[call-arg]
    with refused("launch_from_torch takes no argument sed=1", "did you mean 'seed'"):
        shardwright.launch_from_torch(sed=1)  # type: ignore[call-arg]
    with refused("prepare_dataloader takes no argument shufle=True", "did you mean 'shuffle'"):
        TorchDDPPlugin().prepare_dataloader([1, 2], batch_size=1, shufle=True)  # type: ignore[arg-type]
    with refused("ShardConfig takes no argument enable_flash", "did you mean 'enable_flash_attention'"):
        ShardConfig(enable_flash=True)  # type: ignore[call-arg]


@mistake(
    symptom="`booster.save_model(model, path, size_per_shard=512)` without `shard=True`",
    gets="one file, and a word in the log that the size has no effect",
    fix="`shard=True`",
)
def size_without_shards(rank: int, world: int) -> None:
    facade = Booster(plugin=TorchDDPPlugin())
    model, *_ = facade.boost(nn.Linear(2, 2))
    with said("size_per_shard=512", "shard=True", by=0):
        facade.save_model(model, directory() / "model", size_per_shard=512)


@mistake(
    symptom="`booster.save(f'ckpt-{time.time()}', ...)` or a `tempfile.mkdtemp()` of each rank: ranks save to "
    "different paths",
    gets="refused with the paths",
    fix="make the path on one rank and send it to the others (`torch.distributed.broadcast_object_list`)",
    worlds=(2, 4),
)
def paths_that_differ(rank: int, world: int) -> None:
    facade = Booster(plugin=TorchDDPPlugin())
    model, *_ = facade.boost(nn.Linear(2, 2))
    place = directory()
    rows = (r"rank 0 booster\.save(_model)? to .*first", r"rank 1 booster\.save(_model)? to .*later")
    for save in (facade.save_model, lambda model, path: facade.save(path, model=model)):
        with refused("ranks call different things", *rows):
            save(model, place / ("later" if rank else "first"))  # type: ignore[no-untyped-call]


@mistake(
    symptom="`booster.save(model, path)`, in the order of `torch.save`, or `booster.save_model(path, model)`",
    gets="refused with the order of the arguments",
    fix="`booster.save(path, model=model, optimizer=optimizer)`, `booster.save_model(model, path)`",
)
def arguments_in_another_order(rank: int, world: int) -> None:
    facade = Booster(plugin=TorchDDPPlugin())
    model, *_ = facade.boost(nn.Linear(2, 2))
    with refused("is no path", r"save\(path, model=model"):
        facade.save(model, "path")  # type: ignore[arg-type]
    with refused("is no path", r"save_model\(model, path\)"):
        facade.save_model("path", model)  # type: ignore[arg-type]


@mistake(
    symptom="`from shardwright.plugins import GeminiPlugin`, `shardwright.pipeline.schedule.v_schedule`, ...",
    gets="an ImportError that says what to import instead",
    fix="the name in the message",
)
def foreign_import(rank: int, world: int) -> None:
    with refused("GeminiPlugin", "LowLevelZeroPlugin", by=ImportError):
        from shardwright.plugins import GeminiPlugin  # type: ignore[attr-defined]  # noqa: F401
    for module, words in (
        ("shardwright.booster.plugin", "from shardwright.plugins import"),
        ("shardwright.pipeline.schedule.v_schedule", "scheduler_nodes out"),
        ("shardwright.nn.optimizer", r"shardwright\.optim"),
    ):
        with refused(words, by=ImportError):
            importlib.import_module(module)


@mistake(
    symptom="`HybridParallelPlugin(tp=2)`, `LowLevelZeroPlugin(zero_stage=1)`, `Booster(plugins=...)`, ...",
    gets="refused, with the nearest name that does",
    fix="the name in the message",
)
def unknown_argument(rank: int, world: int) -> None:
    make: Any = {"hybrid": HybridParallelPlugin, "zero": LowLevelZeroPlugin, "ddp": TorchDDPPlugin, "booster": Booster}
    for name, arguments, words in (
        ("hybrid", {"tp": 2}, "takes no argument tp=2 - did you mean 'tp_size'"),
        ("hybrid", {"scheduler_nodes": []}, "scheduler_nodes=.*plans itself"),
        ("zero", {"zero_stage": 1}, "did you mean 'stage'|it is called stage"),
        ("ddp", {"find_unused": True}, "did you mean 'find_unused_parameters'"),
        ("booster", {"plugins": None}, "did you mean 'plugin'"),
    ):
        with refused(words):
            make[name](**arguments)
    with refused("at most 7 positional arguments|takes at most 7", "by name"):
        make["ddp"](*[False] * 9)
    with refused("takes no argument checkpoint=.*called path here"):
        shared().booster.save_model(shared().model, checkpoint="x")
    with refused("booster.boost|did you mean", by=AttributeError):
        shared().booster.prepare  # noqa: B018


@mistake(
    symptom="`attention_backend='flash_attention_2'` without flash-attn or on a CPU; `'flash_atention'`",
    gets="refused with the reason, what to install and one that works; a wrong name with the nearest that exists",
    fix="`attention_backend='sdpa'`, or `enable_flash_attention=True`, which chooses by itself",
)
def attention_that_is_not_there(rank: int, world: int) -> None:
    with refused("attention_backend='flash_atention' is not one of", "did you mean 'flash_attention"):
        HybridParallelPlugin(attention_backend="flash_atention")
    booster = Booster(plugin=HybridParallelPlugin(attention_backend="flash_attention_2", precision="fp32"))
    with refused("attention_backend='flash_attention_2'", "attention_backend='sdpa' works here"):
        booster.boost(model := tiny(), adamw(model))
