"""What `import colossalai` gives: names, arguments, their order and defaults; and what is said of all else."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright
import shardwright.compat.colossalai
from shardwright.compat.colossalai.names import MODULES
from tests.forked_scripts import environment

# All parameters in their order; those without a default are required.
SIGNATURES = """
colossalai.launch(rank, world_size, host, port, backend="nccl", local_rank=None, seed=1024, verbose=True)
colossalai.launch_from_torch(backend="nccl", seed=1024, verbose=True)
colossalai.launch_from_slurm(host, port, backend="nccl", seed=1024, verbose=True)
colossalai.launch_from_openmpi(host, port, backend="nccl", seed=1024, verbose=True)
colossalai.booster.Booster.boost(self, model, optimizer=None, criterion=None, dataloader=None, lr_scheduler=None)
colossalai.booster.Booster.execute_pipeline(self, data_iter, model, criterion, optimizer=None, return_loss=True,
    return_outputs=False)
colossalai.booster.Booster.no_sync(self, model=None, optimizer=None)
colossalai.booster.Booster.enable_lora(self, model, pretrained_dir=None, lora_config=None,
    bnb_quantization_config=None, quantize=False)
colossalai.booster.Booster.load_model(self, model, checkpoint, strict=True, low_cpu_mem_mode=True, num_threads=1)
colossalai.booster.Booster.save_model(self, model, checkpoint, shard=False, gather_dtensor=True, prefix=None,
    size_per_shard=1024, use_safetensors=False, use_async=False)
colossalai.booster.Booster.load_optimizer(self, optimizer, checkpoint, low_cpu_mem_mode=True, num_threads=1)
colossalai.booster.Booster.save_optimizer(self, optimizer, checkpoint, shard=False, gather_dtensor=True, prefix=None,
    size_per_shard=1024, use_async=False)
colossalai.booster.Booster.save_lr_scheduler(self, lr_scheduler, checkpoint)
colossalai.booster.Booster.load_lr_scheduler(self, lr_scheduler, checkpoint)
colossalai.booster.Booster.save_lora_as_pretrained(self, model, checkpoint, use_safetensors=False)
colossalai.booster.plugin.TorchDDPPlugin(broadcast_buffers=True, bucket_cap_mb=25, find_unused_parameters=False,
    check_reduction=False, gradient_as_bucket_view=False, static_graph=False, fp8_communication=False)
colossalai.booster.plugin.TorchFSDPPlugin(process_group=None, sharding_strategy=None, cpu_offload=None,
    auto_wrap_policy=None, backward_prefetch=None, mixed_precision=None, ignored_modules=None, param_init_fn=None,
    sync_module_states=False, fp8_communication=False)
colossalai.booster.plugin.LowLevelZeroPlugin(stage=1, precision="fp16", initial_scale=4294967296, min_scale=1,
    growth_factor=2, backoff_factor=0.5, growth_interval=1000, hysteresis=2, max_scale=4294967296, max_norm=0.0,
    norm_type=2.0, reduce_bucket_size_in_m=12, communication_dtype=None, overlap_communication=True,
    overlap_allgather=False, cpu_offload=False, master_weights=True, verbose=False, cast_inputs=True,
    fp8_communication=False, use_fp8=False, extra_dp_size=1)
colossalai.booster.plugin.GeminiPlugin(chunk_config_dict=None, chunk_init_device=None, placement_policy="static",
    enable_gradient_accumulation=False, max_prefetch=0, shard_param_frac=1.0, offload_optim_frac=0.0,
    offload_param_frac=0.0, warmup_non_model_data_ratio=0.8, steady_cuda_cap_ratio=0.9, precision="fp16",
    master_weights=True, pin_memory=False, force_outputs_fp32=False, strict_ddp_mode=False, search_range_m=32,
    hidden_dim=None, min_chunk_size_m=32, memstats=None, gpu_margin_mem_ratio=0.0, initial_scale=65536, min_scale=1,
    growth_factor=2, backoff_factor=0.5, growth_interval=1000, hysteresis=2, max_scale=4294967296, max_norm=0.0,
    norm_type=2.0, tp_size=1, extra_dp_size=1, enable_all_optimization=False, enable_fused_normalization=False,
    enable_flash_attention=False, enable_sequence_parallelism=False, enable_jit_fused=False, enable_async_reduce=True,
    use_fp8=False, verbose=False, fp8_communication=False)
colossalai.booster.plugin.HybridParallelPlugin(tp_size, pp_size, sp_size=None, precision="fp16", zero_stage=0,
    enable_all_optimization=False, enable_fused_normalization=False, enable_flash_attention=False,
    enable_jit_fused=False, enable_sequence_parallelism=False, sequence_parallelism_mode=None, parallel_output=True,
    num_microbatches=None, microbatch_size=None, initial_scale=65536, min_scale=1, growth_factor=2, backoff_factor=0.5,
    growth_interval=1000, hysteresis=2, max_scale=4294967296, max_norm=0, broadcast_buffers=True, ddp_bucket_cap_mb=25,
    find_unused_parameters=False, check_reduction=False, gradient_as_bucket_view=False, static_graph=False,
    zero_bucket_size_in_m=12, cpu_offload=False, communication_dtype=None, overlap_communication=True,
    custom_policy=None, pp_style="1f1b", num_model_chunks=1, scheduler_nodes=None, num_layers_per_stage=None,
    gradient_checkpoint_config=None, enable_metadata_cache=True, make_vocab_size_divisible_by=64, dp_outside=True,
    overlap_p2p=True, overlap_allgather=False, fp8_communication=False, use_fp8=False, inner_ring_size=None)
colossalai.booster.plugin.MoeHybridParallelPlugin(tp_size, pp_size, ep_size, sp_size=None, precision="fp16",
    zero_stage=0, enable_all_optimization=False, enable_fused_normalization=False, enable_flash_attention=False,
    enable_jit_fused=False, enable_sequence_parallelism=False, sequence_parallelism_mode=None, parallel_output=True,
    num_microbatches=None, microbatch_size=None, initial_scale=65536, min_scale=1, growth_factor=2, backoff_factor=0.5,
    growth_interval=1000, hysteresis=2, max_scale=4294967296, max_norm=0, broadcast_buffers=True, ddp_bucket_cap_mb=25,
    find_unused_parameters=False, check_reduction=False, gradient_as_bucket_view=False, static_graph=False,
    zero_bucket_size_in_m=12, cpu_offload=False, communication_dtype=None, overlap_communication=False,
    custom_policy=None, pp_style="1f1b", num_model_chunks=1, scheduler_nodes=None, num_layers_per_stage=None,
    gradient_checkpoint_config=None, enable_metadata_cache=True, make_vocab_size_divisible_by=64, moe_dp_outside=True,
    overlap_p2p=True, overlap_allgather=False, fp8_communication=False, use_fp8=False)
colossalai.nn.optimizer.HybridAdam(model_params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
    weight_decay=0, adamw_mode=True, nvme_offload_fraction=0.0, nvme_offload_dir=None, **defaults)
colossalai.nn.optimizer.FusedAdam(params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
    adamw_mode=True, weight_decay=0.0, amsgrad=False, set_grad_none=True)
colossalai.nn.optimizer.FusedSGD(params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False,
    wd_after_momentum=False)
colossalai.nn.optimizer.Adafactor(params, lr=None, eps=(1e-30, 0.001), clip_threshold=1.0, decay_rate=-0.8, beta1=None,
    weight_decay=0.0, scale_parameter=True, relative_step=True, warmup_init=False)
colossalai.nn.lr_scheduler.CosineAnnealingWarmupLR(optimizer, total_steps, warmup_steps=0, eta_min=0.0, last_epoch=-1)
colossalai.nn.lr_scheduler.OneCycleLR(optimizer, total_steps, pct_start=0.3, anneal_strategy="cos",
    cycle_momentum=True, base_momentum=0.85, max_momentum=0.95, div_factor=25.0, final_div_factor=10000.0,
    last_epoch=-1, **kwargs)
colossalai.nn.lr_scheduler.PolynomialWarmupLR(optimizer, total_steps, warmup_steps=0, end_lr=0.0001, power=1.0,
    last_epoch=-1, **kwargs)
colossalai.lazy.LazyInitContext(tensor_cls=None, default_device=None)
colossalai.logging.get_dist_logger(name="colossalai")
colossalai.pipeline.schedule.v_schedule.PipelineGraph(n_stage, n_micro, f_cost, b_cost, w_cost, c_cost, f_mem, b_mem,
    w_mem, max_mem=None)
"""


LINES = [line for line in SIGNATURES.replace("\n    ", " ").split("\n") if line]


def find(dotted: str) -> Any:
    """The object of a full name: modules first, then attributes."""
    names = dotted.split(".")
    end = max(end for end in range(1, len(names) + 1) if ".".join(names[:end]) in MODULES)
    found: Any = importlib.import_module(".".join(names[:end]))
    for name in names[end:]:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("line", LINES, ids=[line.partition("(")[0] for line in LINES])
def test_arguments_have_the_order_and_defaults_that_scripts_rely_on(line: str) -> None:
    name, _, listed = line.partition("(")
    wanted = inspect.signature(eval(f"lambda {listed.removesuffix(')')}: None")).parameters
    actual = inspect.signature(find(name)).parameters
    assert [(each.name, each.kind) for each in actual.values()] == [(each.name, each.kind) for each in wanted.values()]
    # What scripts have to give may be left out here.
    asked = {each.name for each in wanted.values() if each.default is not each.empty}
    assert {name: actual[name].default for name in asked} == {name: wanted[name].default for name in asked}


def test_all_names_of_the_table_are_there() -> None:
    for module, home in MODULES.items():
        imported = importlib.import_module(module)
        for name in home if isinstance(home, dict) else imported.__all__:
            assert getattr(imported, name) is not None
    for line in (
        "from colossalai.shardformer.policies.llama import LlamaForCausalLMPolicy",
        "from colossalai.shardformer.policies.vit import ViTForImageClassificationPolicy",
        "from colossalai.shardformer.policies.mixtral import MixtralForCausalLMPolicy",
        "from colossalai.shardformer.policies.base_policy import Policy, SubModuleReplacementDescription",
        "from colossalai.shardformer.layer import Linear1D_Col, FusedRMSNorm",
        "from colossalai.nn.lr_scheduler import *",
        "import colossalai; colossalai.logging.get_dist_logger(); colossalai.booster.plugin.GeminiPlugin",
    ):
        exec(line)


MISSING = [
    ("from colossalai.nn.optimizer import Lamb", "use HybridAdam, torch.optim.AdamW"),
    ("from colossalai.nn.optimizer import GaLoreAdamW8bit", "LoRA"),
    ("from colossalai.cluster import ProcessGroupMesh", "plugin.pg_mesh"),
    ("from colossalai.testing import spawn", "run_ranks"),
    ("import colossalai.legacy.core", "Booster and the plugins replace it"),
    ("from colossalai.moe import anything", "MoeHybridParallelPlugin"),
    ("from colossalai.checkpoint_io import GeneralCheckpointIO", "booster.save"),
    ("from colossalai.pipeline.schedule import InterleavedSchedule", 'pp_style="interleaved"'),
    ("from colossalai.zero import LowLevelZeroOptimizer", "LowLevelZeroPlugin"),
    ("from colossalai.shardformer.layer import RingAttention", 'sequence_parallelism_mode="ring_attn"'),
    ("from colossalai.booster import Boster", "did you mean 'Booster'"),
    ("from colossalai.booster.plugin import GemniPlugin", "did you mean 'GeminiPlugin'"),
    ("import colossalai.nonsense", "colossalai has "),
]


@pytest.mark.parametrize(("line", "words"), MISSING, ids=[line for line, _ in MISSING])
def test_what_is_missing_says_what_to_use(line: str, words: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(line)
    assert words in str(caught.value)


def test_a_missing_attribute_is_an_attribute_error() -> None:
    """As tools that look through all modules expect it."""
    import colossalai.nn.optimizer

    assert not hasattr(colossalai.nn.optimizer, "Lamb")
    with pytest.raises(AttributeError, match="use HybridAdam"):
        colossalai.nn.optimizer.Lamb  # noqa: B018


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rank 0 of a world of 8 without other processes."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    shardwright.launch(0, 8, None, None, backend="fake")
    yield
    dist.destroy_process_group()


REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("GeminiPlugin", (), {"placement_policy": "auto"}, "use 'static', with offload_optim_frac=1.0"),
    ("GeminiPlugin", (), {"shard_param_frac": 0.5}, r"use 1.0 \(ZeRO-3\) or 0.0"),
    ("GeminiPlugin", (), {"offload_param_frac": 1.0}, "weights stay on the device"),
    ("GeminiPlugin", (), {"master_weights": False}, r"LowLevelZeroPlugin\(stage=3, master_weights=False\)"),
    ("GeminiPlugin", (), {"pp_size": 2}, r"use HybridParallelPlugin\(pp_size=...\)"),
    ("GeminiPlugin", (), {"extra_dp_size": 3}, "does not divide the 8 data-parallel ranks"),
    ("HybridParallelPlugin", (1, 1), {"scheduler_nodes": [1]}, "plans itself"),
    ("HybridParallelPlugin", (1, 1), {"ep_size": 2}, "use MoeHybridParallelPlugin"),
    ("HybridParallelPlugin", (3, 1), {}, "world_size=8 is not divisible by tp_size=3"),
    ("TorchFSDPPlugin", (), {"sharding_strategy": "NO_SHARD"}, "TorchDDPPlugin"),
    ("TorchFSDPPlugin", (), {"ignored_modules": []}, "freeze what is not to be trained"),
    ("LowLevelZeroPlugin", (), {"norm_type": 1.0}, "norm_type=1.0 must be 2.0"),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_arguments_without_counterpart_are_refused(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], words: str, world: None
) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(find("colossalai.booster.plugin"), name)(*args, **kwargs)


def test_an_empty_config_of_older_scripts_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(shardwright.cluster, "launch_from_torch", lambda *args: seen.append(args))
    find("colossalai.launch_from_torch")(config={}, seed=3)
    assert seen == [(3, None, True)]
    with pytest.raises(ValueError, match="sizes are arguments of the plugin"):
        find("colossalai.launch_from_torch")(config={"parallel": {"tensor": 2}})


def test_plugins_are_laid_out_as_asked(world: None) -> None:
    plugins = find("colossalai.booster.plugin")
    gemini = plugins.GeminiPlugin(tp_size=2, extra_dp_size=2, offload_optim_frac=1.0, max_prefetch=3, search_range_m=64)
    assert (gemini.tp_size, gemini.dp_size, gemini.mesh.size("zero"), gemini.zero_stage) == (2, 4, 2, 3)
    assert gemini.settings.zero.cpu_offload
    assert gemini.settings.zero.gather_ahead == 3
    assert "search_range_m" in [each.name for each in gemini.without_effect]
    assert isinstance(gemini, plugins.DPPluginBase)
    assert not isinstance(gemini, plugins.HybridParallelPlugin)
    assert plugins.GeminiPlugin(shard_param_frac=0.0).zero_stage == 2
    moe = plugins.MoeHybridParallelPlugin(2, 1, 4, moe_dp_outside=False, zero_stage=1)
    assert (moe.ep_size, moe.dp_size, moe.tp_size) == (4, 4, 2)
    graph = find("colossalai.pipeline.schedule.v_schedule").PipelineGraph(2, 4, 6, 6, 6, 6, 34, 1, 1)
    hybrid = plugins.HybridParallelPlugin(
        *(2, 2, 4, "bf16"),
        enable_sequence_parallelism=True,
        sequence_parallelism_mode="split_gather",
        num_microbatches=4,
        pp_style="zbv",
        num_model_chunks=2,
        scheduler_nodes=graph.get_v_schedule(),
    )
    assert (hybrid.tp_size, hybrid.pp_size, hybrid.sp_size, hybrid.dp_size) == (2, 2, 1, 2)
    assert isinstance(hybrid.stage_manager, find("colossalai.pipeline.stage_manager").PipelineStageManager)
    with pytest.raises(AttributeError, match=r"print\(plugin.layout\) shows what came of them"):
        hybrid.shard_config  # noqa: B018
    zero = plugins.LowLevelZeroPlugin(precision="bf16")
    assert "initial_scale" not in [each.name for each in zero.without_effect]
    strategy = torch.distributed.fsdp.ShardingStrategy.SHARD_GRAD_OP
    assert not plugins.TorchFSDPPlugin(sharding_strategy=strategy).reshard_after_forward


def test_wrap_policies_of_the_first_fsdp_choose_the_blocks(world: None) -> None:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.GELU(), torch.nn.Sequential(torch.nn.Linear(3, 3)))
    plugins = find("colossalai.booster.plugin")
    by_class = plugins.TorchFSDPPlugin(auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))
    assert by_class.auto_wrap_policy(model) == [model[0], model[2][0]]

    def large(**asked: Any) -> bool:
        return bool(size_based_auto_wrap_policy(min_num_params=100, **asked))

    assert plugins.TorchFSDPPlugin(auto_wrap_policy=large).auto_wrap_policy(model) == [model[0]]


def rates(name: str, **settings: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = getattr(find("colossalai.nn.lr_scheduler"), name)(optimizer, 10, **settings)
    seen = []
    for _ in range(10):
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return seen


def test_schedules() -> None:
    half = [1 / 2, 1]
    assert rates("MultiStepLR", milestones=[2, 5]) == pytest.approx([1.0] * 2 + [0.1] * 3 + [0.01] * 5)
    assert rates("MultiStepWarmupLR", warmup_steps=2, milestones=[4, 6]) == pytest.approx(
        [*half, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01]
    )
    assert rates("PolynomialLR", end_lr=0.5) == pytest.approx([1 - 0.05 * step for step in range(10)])
    assert rates("PolynomialWarmupLR", warmup_steps=2, end_lr=0.0, power=2.0) == pytest.approx(
        [*half, *((1 - step / 8) ** 2 for step in range(8))]
    )
    flat = rates("FlatAnnealingLR", pct_start=0.5)
    annealing = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(annealing, 5)
    tail = []
    for _ in range(5):
        tail.append(cosine.get_last_lr()[0])
        annealing.step()
        cosine.step()
    assert flat == pytest.approx([1.0] * 5 + tail)
    assert rates("FlatAnnealingWarmupLR", warmup_steps=2, pct_start=0.5)[:7] == pytest.approx([*half, 1, 1, 1, 1, 1])
    assert rates("StepLR", step_size=4, gamma=0.5) == pytest.approx([1.0] * 4 + [0.5] * 4 + [0.25] * 2)
    assert rates("LambdaLR", lr_lambda=lambda step: 1 / (step + 1))[3] == pytest.approx(0.25)
    with pytest.raises(ValueError, match="num_steps_per_epoch=3: no schedule looks at it"):
        rates("CosineAnnealingLR", num_steps_per_epoch=3)


def test_an_installed_colossalai_is_not_hidden_unless_asked(tmp_path: Path) -> None:
    package = tmp_path / "colossalai"
    package.mkdir()
    (package / "__init__.py").write_text("REAL = True\n")
    code = "import shardwright.compat.colossalai, colossalai; print(hasattr(colossalai, 'REAL'))"

    def run(**names: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env={**environment(), **names}, capture_output=True, text=True
        )

    refused = run()
    assert refused.returncode == 1
    assert f"would hide the colossalai in {package / '__init__.py'}" in refused.stderr
    assert "SHARDWRIGHT_SHADOW_COLOSSALAI=1" in refused.stderr
    assert run(SHARDWRIGHT_SHADOW_COLOSSALAI="1").stdout == "False\n"
