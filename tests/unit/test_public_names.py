"""The names, parameters and defaults that users' scripts rely on: they may be added to, not renamed or given other
defaults.

A signature states the parameters that must exist; `=` values are their defaults. PENDING lists what is promised and not
there yet; an entry comes out when the name goes in. An indented line continues the one above it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

import pytest

SIGNATURES = """
shardwright.launch(rank, world_size, host, port, backend=None, seed=1024, local_rank=None, config=None)
shardwright.launch_from_torch(seed=1024, backend=None, verbose=False)
shardwright.launch_from_slurm()
shardwright.launch_from_openmpi()
shardwright.get_default_parser()
shardwright.Microbatches(batches)
shardwright.register_policy(model_type_or_class, policy_class)
shardwright.register_schedule(name, function)
shardwright.register_plugin(name, plugin)

shardwright.Booster(device=None, mixed_precision=None, plugin=None)
shardwright.booster.Booster(device=None, mixed_precision=None, plugin=None)
shardwright.booster.Booster.boost(self, model, optimizer=None, criterion=None, dataloader=None, lr_scheduler=None)
shardwright.booster.Booster.backward(self, loss, optimizer)
shardwright.booster.Booster.execute_pipeline(self, data_iter, model, criterion, optimizer=None, return_loss=True,
    return_outputs=False)
shardwright.booster.Booster.no_sync(self, model, optimizer)
shardwright.booster.Booster.save_model(self, model, path, shard=False, prefix=None, size_per_shard=1024,
    use_safetensors=True, use_async=False)
shardwright.booster.Booster.load_model(self, model, path, strict=True)
shardwright.booster.Booster.save_optimizer(self, optimizer, path, shard=False, size_per_shard=1024, use_async=False)
shardwright.booster.Booster.load_optimizer(self, optimizer, path)
shardwright.booster.Booster.save_lr_scheduler(self, lr_scheduler, path)
shardwright.booster.Booster.load_lr_scheduler(self, lr_scheduler, path)
shardwright.booster.Booster.save(self, path, model, optimizer, lr_scheduler, dataloader, step, extra, use_async=False)
shardwright.booster.Booster.load(self, path_or_run_dir, model, optimizer, lr_scheduler, dataloader)
shardwright.booster.Booster.enable_lora(self, model, pretrained_dir=None, lora_config=None)
shardwright.booster.Booster.save_lora_as_pretrained(self, model, path)

shardwright.cluster.DistCoordinator()
shardwright.cluster.DistCoordinator.is_master(self)
shardwright.cluster.DistCoordinator.is_node_master(self)
shardwright.cluster.DistCoordinator.is_last_process(self)
shardwright.cluster.DistCoordinator.print_on_master(self, msg)
shardwright.cluster.DistCoordinator.block_all(self)
shardwright.cluster.DistCoordinator.priority_execution(self)
shardwright.cluster.DistCoordinator.on_master_only(self)

shardwright.interface.ModelWrapper(module)
shardwright.interface.ModelWrapper.unwrap(self)
shardwright.interface.OptimizerWrapper(optim)
shardwright.interface.OptimizerWrapper.step(self)
shardwright.interface.OptimizerWrapper.zero_grad(self)
shardwright.interface.OptimizerWrapper.backward(self, loss)
shardwright.interface.OptimizerWrapper.clip_grad_by_norm(self, max_norm)
shardwright.interface.OptimizerWrapper.clip_grad_by_value(self, clip_value)
shardwright.interface.OptimizerWrapper.get_grad_norm(self)
shardwright.interface.OptimizerWrapper.unwrap(self)

shardwright.plugins.TorchDDPPlugin()
shardwright.plugins.TorchDDPPlugin.prepare_dataloader(self, dataset, batch_size, shuffle=False, seed=1024,
    drop_last=False, pin_memory=False, num_workers=0, distributed_sampler_cls=None)
shardwright.plugins.TorchDDPPlugin.supported_precisions(self)
shardwright.plugins.TorchDDPPlugin.supported_devices(self)
shardwright.plugins.TorchDDPPlugin.support_no_sync(self)
shardwright.plugins.TorchFSDPPlugin()
shardwright.plugins.LowLevelZeroPlugin(stage=1, precision="bf16", max_norm=0.0, reduce_bucket_size_in_m=12,
    communication_dtype=None, overlap_communication=True, overlap_allgather=False, cpu_offload=False,
    master_weights=True, zero_group_size=None)
shardwright.plugins.DeepSpeedPlugin(config)
shardwright.plugins.HybridParallelPlugin(tp_size=1, pp_size=1, sp_size=None, precision="bf16", zero_stage=0,
    enable_all_optimization=False, enable_fused_normalization=False, enable_flash_attention=False,
    enable_jit_fused=False, enable_sequence_parallelism=False, sequence_parallelism_mode=None,
    enable_sequence_overlap=False, parallel_output=True, num_microbatches=None, microbatch_size=None,
    initial_scale=65536, min_scale=1, growth_factor=2, backoff_factor=0.5, growth_interval=1000, hysteresis=2,
    max_scale=4294967296, max_norm=0, broadcast_buffers=True, ddp_bucket_cap_mb=25, find_unused_parameters=False,
    check_reduction=False, gradient_as_bucket_view=False, static_graph=False, zero_bucket_size_in_m=12,
    cpu_offload=False, communication_dtype=None, overlap_communication=True, overlap_allgather=False,
    zero_group_size=None, custom_policy=None, pp_style="1f1b", num_model_chunks=1, num_layers_per_stage=None,
    overlap_p2p=True, enable_metadata_cache=True, gradient_checkpoint_config=None, make_vocab_size_divisible_by=64,
    dp_outside=True, inner_ring_size=None, fp8_communication=False, use_fp8=False)
shardwright.plugins.HybridParallelPlugin.from_config(config)

shardwright.shardformer.ShardConfig(tensor_parallel_process_group, sequence_parallel_process_group,
    pipeline_stage_manager, enable_tensor_parallelism=True, gradient_checkpoint_config, fp8_communication,
    parallel_output)
shardwright.shardformer.register_policy(model_type_or_class, policy_class)
shardwright.shardformer.ShardFormer(shard_config)
shardwright.shardformer.ShardFormer.optimize(self, model, policy=None)
shardwright.shardformer.ShardFormer.shard_model(self, model, policy=None)
shardwright.shardformer.ShardFormer.init_distributed()
shardwright.shardformer.ShardFormer.shard_dataset(self, dataset)
shardwright.shardformer.ModelSharder()
shardwright.shardformer.Policy()
shardwright.shardformer.Policy.set_model(self, model)
shardwright.shardformer.Policy.preprocess(self)
shardwright.shardformer.Policy.module_policy(self)
shardwright.shardformer.Policy.postprocess(self)
shardwright.shardformer.Policy.get_held_layers(self)
shardwright.shardformer.Policy.get_shared_params(self)
shardwright.shardformer.ModulePolicyDescription(attribute_replacement, param_replacement, sub_module_replacement,
    method_replacement)
shardwright.shardformer.SubModuleReplacementDescription(suffix, target_module, kwargs, ignore_if_not_exist)
shardwright.shardformer.PipelineGradientCheckpointConfig()
shardwright.shardformer.layer.ParallelModule.from_native_module(module, process_group)
shardwright.shardformer.layer.Linear1D_Col()
shardwright.shardformer.layer.Linear1D_Row()
shardwright.shardformer.layer.FusedLinear1D_Col()
shardwright.shardformer.layer.Embedding1D()
shardwright.shardformer.layer.VocabParallelEmbedding1D()
shardwright.shardformer.layer.VocabParallelLMHead1D()
shardwright.shardformer.layer.DropoutForParallelInput()
shardwright.shardformer.layer.DropoutForReplicatedInput()
shardwright.shardformer.layer.FusedLayerNorm()
shardwright.shardformer.layer.FusedRMSNorm()
shardwright.shardformer.layer.cross_entropy_1d()

shardwright.optim.HybridAdam()
shardwright.optim.CPUAdam()
shardwright.optim.FusedAdam()
shardwright.lazy.LazyInitContext()
shardwright.testing.run_ranks(fn, world_size, timeout=60, backend="gloo")
"""

VERBS = ("demo", "train", "plan", "models", "doctor", "env", "config", "generate")

# Beginnings of names; whatever starts with one of them may be missing.
PENDING: tuple[str, ...] = ()
PENDING_VERBS = ("train", "models", "generate")


def parse(line: str) -> tuple[str, dict[str, Any]]:
    """Full name, and the parameters with their defaults; a parameter without one maps to `inspect.Parameter.empty`."""
    name, listed = line.removesuffix(")").split("(", 1)
    parameters = {}
    for part in filter(None, listed.split(", ")):
        parameter, _, default = part.partition("=")
        parameters[parameter] = ast.literal_eval(default) if default else inspect.Parameter.empty
    return name, parameters


PROMISED = dict(parse(line) for line in SIGNATURES.replace("\n    ", " ").split("\n") if line)


def find(name: str) -> Any:
    """The object of a full name: the longest part that is a module is imported, the rest are attributes."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if not ".".join(parts[:cut]).startswith(error.name or "?"):
                raise
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{name} is in no package")


@pytest.mark.parametrize("name", list(PROMISED))
def test_promised_names_keep_their_signature(name: str) -> None:
    try:
        found = find(name)
    except AttributeError:
        if name.startswith(PENDING):
            pytest.skip("pending")
        raise
    actual = inspect.signature(found).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in actual.values())
    for parameter, default in PROMISED[name].items():
        assert parameter in actual or takes_any, f"{name} lost its parameter {parameter}"
        if parameter in actual and default is not inspect.Parameter.empty:
            assert actual[parameter].default == default, f"{name}({parameter}=...): the default was {default!r}"
    required = {
        p.name for p in actual.values() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    if PROMISED[name] and not name.startswith("shardwright.shardformer."):
        assert required <= set(PROMISED[name]), (
            f"{name} demands parameters that scripts do not give: {required - set(PROMISED[name])}"
        )


@pytest.mark.parametrize("verb", VERBS)
def test_promised_verbs_exist(verb: str) -> None:
    from shardwright.cli.main import VERBS as EXISTING

    if verb not in EXISTING and verb in PENDING_VERBS:
        pytest.skip("pending")
    assert verb in EXISTING


def test_nothing_pending_is_unknown() -> None:
    """So that a typing mistake in PENDING does not excuse anything forever."""
    assert all(any(name.startswith(beginning) for name in PROMISED) for beginning in PENDING)
    assert set(PENDING_VERBS) <= set(VERBS)
