"""The dict form of a configuration: every form of every key, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.config_form import read_config
from shardwright.shardformer import PipelineGradientCheckpointConfig


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Make this process rank 0 of a world without other processes."""
    monkeypatch.setenv("LOCAL_RANK", "0")

    def start(size: int, config: Any = None) -> None:
        shardwright.launch(0, size, None, None, backend="fake", config=config)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def parallel(**section: Any) -> dict[str, Any]:
    return {"parallel": section}


FULL = {
    "parallel": {
        "zero1": 8,
        "tensor": 1,
        "pipeline": {"size": 1, "interleaved_overlap": True},
        "sequence_parallel": False,
    },
    "hybrid_zero_optimizer": {
        "overlap_sync_grad": True,
        "overlap_sync_param": True,
        "reduce_bucket_size": 512 * 1024 * 1024,
        "clip_grad_norm": 1.0,
    },
    "model": {"num_chunks": 1},
}

FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (
        FULL,
        {
            "zero_stage": 1,
            "zero_group_size": 8,
            "tp_size": 1,
            "pp_size": 1,
            "overlap_p2p": True,
            "overlap_communication": True,
            "overlap_allgather": True,
            "zero_bucket_size_in_m": 536.870912,
            "max_norm": 1.0,
            "num_model_chunks": 1,
        },
    ),
    (parallel(zero1=1), {"zero_stage": 0}),
    (parallel(zero1=-1), {"zero_stage": 1, "zero_group_size": None}),
    (parallel(zero1=4), {"zero_stage": 1, "zero_group_size": 4}),
    (parallel(zero1={"size": 4}), {"zero_stage": 1, "zero_group_size": 4}),
    (parallel(zero1={"size": 4, "fsdp": False}), {"zero_stage": 1, "zero_group_size": 4}),
    (parallel(zero1={"size": 4, "fsdp": True}), {"zero_stage": 3, "zero_group_size": 4}),
    (parallel(zero1={"size": -1, "fsdp": True}), {"zero_stage": 3, "zero_group_size": None}),
    (parallel(tensor=2), {"tp_size": 2}),
    (parallel(tensor={"size": 2, "mode": "1d"}), {"tp_size": 2}),
    (parallel(tensor={"size": 2, "mode": "mtp"}), {"tp_size": 2}),
    (parallel(tensor={"size": 1, "mode": None}), {"tp_size": 1}),
    (parallel(pipeline=4), {"pp_size": 4}),
    (parallel(pipeline={"size": 4, "interleaved_overlap": False}), {"pp_size": 4, "overlap_p2p": False}),
    (parallel(pipeline={"size": 4, "mode": "1F1B"}), {"pp_size": 4, "pp_style": "1f1b"}),
    (parallel(pipeline={"size": 4, "mode": "ZBH1"}), {"pp_size": 4, "pp_style": "zb"}),
    (parallel(weight={"size": 1, "overlap": True, "memory_pool": True}), {}),
    (
        {**parallel(pipeline=2), "model": {"num_chunks": 2}},
        {"pp_size": 2, "num_model_chunks": 2, "pp_style": "interleaved"},
    ),
    (
        {**parallel(pipeline={"size": 2, "mode": "ZBV"}), "model": {"num_chunks": 2}},
        {"pp_size": 2, "num_model_chunks": 2, "pp_style": "zbv"},
    ),
    (
        {**parallel(pipeline=1), "model": {"num_chunks": 2}},
        {"pp_size": 1, "num_model_chunks": 2, "pp_style": "interleaved"},
    ),
    ({"model": {"dtype": "torch.bfloat16"}}, {"precision": "bf16"}),
    ({"model": {"dtype": "float16"}}, {"precision": "fp16"}),
    ({"model": {"dtype": torch.float32, "parallel_output": False}}, {"precision": "fp32", "parallel_output": False}),
    (
        {"model": {"checkpoint": True}},
        {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)},
    ),
    (
        {"model": {"checkpoint": 0.5}},
        {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5)},
    ),
    ({"model": {"checkpoint": False}}, {}),
    ({"data": {"micro_num": 4}}, {"num_microbatches": 4}),
    ({"data": {"micro_bsz": 2}}, {"microbatch_size": 2}),
    ({"data": {"micro_num": 4, "micro_bsz": 2}}, {"num_microbatches": 4}),
    (
        {
            "grad_scaler": {
                "fp16": {"initial_scale": 2**14, "min_scale": 2, "growth_interval": 100},
                "growth_factor": 3,
                "backoff_factor": 0.25,
            }
        },
        {"initial_scale": 2**14, "min_scale": 2, "growth_interval": 100, "growth_factor": 3, "backoff_factor": 0.25},
    ),
    ({"grad_scaler": {"max_scale": 2**20, "hysteresis": 3}}, {"max_scale": 2**20, "hysteresis": 3}),
    ({"SEQ_LEN": 2048, "JOB_NAME": "seven", **parallel(tensor=2)}, {"tp_size": 2}),
    ({"parallel": None, "model": None}, {}),
    ({**parallel(zero1=1), "hybrid_zero_optimizer": {"overlap_sync_param": True}}, {"zero_stage": 0}),
]


@pytest.mark.parametrize(("config", "flat"), FORMS, ids=lambda value: str(value)[:60])
def test_forms(config: dict[str, Any], flat: dict[str, Any]) -> None:
    assert read_config(config).arguments == flat


UNUSED: list[tuple[dict[str, Any], list[str]]] = [
    (FULL, []),
    (
        parallel(weight={"size": 1, "overlap": True, "memory_pool": True}),
        ["parallel.weight.overlap=True (weight parallelism is off", "parallel.weight.memory_pool=True (weight"],
    ),
    (parallel(weight={"size": 1, "overlap": False, "memory_pool": False}), []),
    ({"data": {"micro_num": 4, "micro_bsz": 2}}, ["data.micro_bsz=2 (data.micro_num splits the batch)"]),
    (
        {**parallel(zero1=1), "hybrid_zero_optimizer": {"overlap_sync_param": True}},
        ["hybrid_zero_optimizer.overlap_sync_param=True (zero_stage=0 gathers no weights"],
    ),
    (
        {**parallel(zero1={"size": -1, "fsdp": True}), "hybrid_zero_optimizer": {"overlap_sync_param": True}},
        ["hybrid_zero_optimizer.overlap_sync_param=True (zero_stage=3 gathers"],
    ),
    (
        {**parallel(pipeline=1), "model": {"num_chunks": 2}},
        ["pp_style='interleaved' (pp_size=1", "num_model_chunks=2 (pp_size=1"],
    ),
    ({"grad_scaler": {"growth_factor": 3}}, ["growth_factor=3 (only precision='fp16'"]),
    (parallel(pipeline={"size": 1, "interleaved_overlap": False}), ["overlap_p2p=False (pp_size=1"]),
    ({"model": {"parallel_output": False}}, ["parallel_output=False (logits are whole"]),
    (
        {**parallel(zero1=1), "hybrid_zero_optimizer": {"reduce_bucket_size": 1000}},
        ["zero_bucket_size_in_m=0.001 (zero_stage=0"],
    ),
]


@pytest.mark.parametrize(("config", "said"), UNUSED, ids=lambda value: str(value)[:60])
def test_keys_without_effect_are_named(config: dict[str, Any], said: list[str], world: Callable[..., None]) -> None:
    """In the plugin and in the layout report; the tested ones and no others."""
    world(8)
    plugin = HybridParallelPlugin.from_config(config)
    assert len(plugin.without_effect) == len(said), plugin.without_effect
    report = str(plugin.preflight(torch.nn.Linear(3, 3)))
    for found, words in zip(plugin.without_effect, said, strict=True):
        assert words in str(found)
        assert f"without effect here: {found}" in report


REFUSED: list[tuple[Any, list[str]]] = [
    ({"paralel": {}}, ["config['paralel']", "did you mean 'parallel'"]),
    ({"adam": {"lr": 1}}, ["config['adam']", "parallel, hybrid_zero_optimizer"]),
    ({"ADAM": {"lr": 1}}, ["config['ADAM']"]),
    ([1], ["config=[1]", "list"]),
    ({"parallel": 8}, ["config['parallel']=8", "must be a dict"]),
    (parallel(zero=8), ["parallel.zero=8", "did you mean 'zero1'"]),
    (parallel(pipelines=2), ["parallel.pipelines=2", "did you mean 'pipeline'"]),
    (parallel(tensor="2"), ["parallel.tensor='2'", "whole number"]),
    (parallel(tensor=True), ["parallel.tensor=True", "whole number"]),
    (parallel(tensor={"mode": "1d"}), ["parallel.tensor=", "needs a size"]),
    (parallel(tensor={"size": 2, "mode": "2d"}), ["parallel.tensor.mode='2d'", "'1d'"]),
    (parallel(tensor={"sizes": 2, "size": 2}), ["parallel.tensor.sizes=2"]),
    (parallel(pipeline={"size": 2, "interleave_overlap": True}), ["did you mean 'interleaved_overlap'"]),
    (parallel(pipeline={"size": 2, "mode": "zbh2"}), ["parallel.pipeline.mode='zbh2'", "did you mean 'zbh1'"]),
    (parallel(zero1={"size": 4, "fsd": True}), ["parallel.zero1.fsd=True", "did you mean 'fsdp'"]),
    (parallel(weight=2), ["parallel.weight=2", "fsdp=True"]),
    ({"hybrid_zero_optimizer": {"overlap_sync_params": True}}, ["did you mean 'overlap_sync_param'"]),
    ({"hybrid_zero_optimizer": {"reduce_bucket_size": "1e6"}}, ["reduce_bucket_size='1e6'", "12_000_000"]),
    ({"model": {"num_chunk": 2}}, ["model.num_chunk=2", "did you mean 'num_chunks'"]),
    ({"model": {"dtype": "int8"}}, ["model.dtype='int8'", "torch.bfloat16"]),
    ({"model": {"checkpoint": 2}}, ["model.checkpoint=2", "0 to 1"]),
    ({"data": {"micro_number": 4}}, ["did you mean 'micro_num'"]),
    ({"grad_scaler": {"fp16": {"init_scale": 1}}}, ["grad_scaler.fp16.init_scale=1", "did you mean 'initial_scale'"]),
]


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_forms(config: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        read_config(config)
    for word in words:
        assert word in str(caught.value)


def test_the_whole_form_becomes_a_plugin(world: Callable[..., None]) -> None:
    world(8)
    plugin = HybridParallelPlugin.from_config(FULL)
    assert (plugin.dp_size, plugin.tp_size, plugin.pp_size) == (8, 1, 1)
    assert plugin.mesh.size("zero") == 8
    options = plugin.settings.zero
    assert (options.stage, options.overlap_allgather, options.max_norm) == (1, True, 1.0)
    assert options.bucket_size_in_m == pytest.approx(536.870912)


def test_sub_groups_and_chunks(world: Callable[..., None]) -> None:
    world(16)
    config = {
        **parallel(zero1=2, tensor={"size": 2}, pipeline={"size": 2}, data=4),
        "model": {"num_chunks": 2},
        "data": {"micro_num": 4},
    }
    plugin = HybridParallelPlugin.from_config(config, precision="fp32")
    assert (plugin.dp_size, plugin.tp_size, plugin.pp_size, plugin.mesh.size("zero")) == (4, 2, 2, 2)
    assert plugin.settings.pipeline.pp_style == "interleaved"
    assert plugin.stage_manager.num_model_chunks == 2
    assert plugin.precision == "fp32"


def test_launch_keeps_the_configuration_for_the_plugin(world: Callable[..., None], tmp_path: Path) -> None:
    file = tmp_path / "layout.py"
    file.write_text(
        "TP = 2\nparallel = dict(zero1=dict(size=2), tensor=dict(size=TP, mode='1d'), pipeline=2)\ndata = "
        "dict(micro_num=4)\n"
    )
    world(8, file)
    plugin = HybridParallelPlugin.from_config()
    assert (plugin.dp_size, plugin.tp_size, plugin.pp_size, plugin.zero_stage) == (2, 2, 2, 1)
    assert plugin.settings.pipeline.num_microbatches == 4


def test_the_size_of_data_must_be_what_is_left(world: Callable[..., None]) -> None:
    world(8)
    with pytest.raises(ValueError, match=r"parallel.data=3 does not fit: 8 ranks .* leave 4 .* use data=4"):
        HybridParallelPlugin.from_config(parallel(data=3, tensor=2))
    for fitting in (4, -1, "auto"):
        assert HybridParallelPlugin.from_config(parallel(data=fitting, tensor=2)).dp_size == 4


def test_sizes_that_do_not_fit_are_refused_as_in_the_constructor(world: Callable[..., None]) -> None:
    world(8)
    with pytest.raises(ValueError, match="zero_group_size=3 does not divide dp_size=8"):
        HybridParallelPlugin.from_config(parallel(zero1=3))
    with pytest.raises(ValueError, match="pp_size=2 needs num_microbatches"):
        HybridParallelPlugin.from_config(parallel(pipeline=2))
    with pytest.raises(ValueError, match="sequence"):
        HybridParallelPlugin.from_config(parallel(sequence_parallel=True, tensor=1))
