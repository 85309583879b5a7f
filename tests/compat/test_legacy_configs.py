"""Configuration files of Colossal-AI before its plugins, and of InternLM, which look alike: told apart, and every key
of both is read or named.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.compat.configs import TARGETS, read_file
from shardwright.plugins import HybridParallelPlugin
from shardwright.trainer import build_recipe

AMP = "from colossalai.amp import AMP_TYPE\n"
NAIVE_1D = f"""{AMP}
BATCH_SIZE = 32
LEARNING_RATE = 3e-3
IMG_SIZE, PATCH_SIZE, HIDDEN_SIZE = 224, 16, 768
SEQ_LENGTH = (IMG_SIZE // PATCH_SIZE) ** 2 + 1
parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'))
fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=2**8, hysteresis=3, verbose=True)
clip_grad_norm = 1.0
gradient_accumulation = 3
cudnn_deterministic = False
NUM_MICRO_BATCHES = parallel['pipeline'] * 2
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LENGTH, HIDDEN_SIZE)
cudnn_benchmark = True
"""
ZERO_2P5D = """from titans import GPT2
zero = dict(
    model_config=dict(tensor_placement_policy='cpu', shard_strategy=TensorShardStrategy(), reuse_fp16_shard=True,
                      reduce_scatter_bucket_size_mb=25),
    optimizer_config=dict(initial_scale=2**5, gpu_margin_mem_ratio=0.8, growth_interval=500))
optimizer = dict(type=HybridAdam, lr=0.00015, weight_decay=1e-2, betas=(0.9, 0.95))
model = dict(type=GPT2, checkpoint=True, num_chunks=2)
parallel = dict(pipeline=dict(size=2), tensor=dict(size=4, mode='2.5d', depth=1))
NUM_MICRO_BATCHES = 4
"""
HALF = {"initial_scale": 256, "hysteresis": 3}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "naive": (
        NAIVE_1D,
        # 4 microbatches of each of 3 batches make a step
        {"pp_size": 2, "tp_size": 4, "num_microbatches": 12, **HALF},
        {"fp16": True, "max_grad_norm": 1.0, "gradient_accumulation_steps": 3},
        ["BATCH_SIZE", "LEARNING_RATE", "SEQ_LENGTH", "cudnn_benchmark"],
    ),
    "zero, 2.5d, interleaved": (
        ZERO_2P5D,
        {
            "zero_stage": 3,
            "cpu_offload": True,
            "initial_scale": 32,
            "max_scale": 2.0**32,
            "growth_interval": 500,
            "pp_size": 2,
            "tp_size": 4,
            "num_microbatches": 4,
            "pp_style": "interleaved",
            "num_model_chunks": 2,
        },
        {
            "fp16": True,
            "max_grad_norm": 0.0,
            "optim": "hybrid_adam",
            "learning_rate": 0.00015,
            "weight_decay": 0.01,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
        },
        [
            *("parallel.tensor.depth", "parallel.tensor.mode", "zero.model_config.tensor_placement_policy"),
            *("zero.optimizer_config.gpu_margin_mem_ratio", "model.checkpoint"),
        ],
    ),
    "torch amp": (
        f"{AMP}fp16 = dict(mode=AMP_TYPE.TORCH, init_scale=2.**10)\nparallel = dict(tensor=dict(size=2, mode='1d'))\n"
        "gradient_accumulation = 4\nclip_grad_norm = 0.5\nhost = 'localhost'\nport = 29500\n",
        {"tp_size": 2, "initial_scale": 1024.0, "growth_interval": 2000, "hysteresis": 1},
        {"fp16": True, "max_grad_norm": 0.5, "gradient_accumulation_steps": 4},
        ["host", "port"],
    ),
    "apex": (
        f"{AMP}MODE = AMP_TYPE.APEX\nfp16 = dict(mode=MODE, opt_level='O2', loss_scale=128, max_loss_scale=2.**20)\n",
        {"growth_interval": 2000, "hysteresis": 1, "max_scale": 2.0**20},
        {"fp16": True, "max_grad_norm": 0.0},
        ["fp16.loss_scale"],
    ),
    "apex in fp32": (
        f"{AMP}fp16 = dict(mode=AMP_TYPE.APEX, opt_level='O0')\n",
        {},
        {"max_grad_norm": 0.0},
        [],
    ),
    "ring of a sequence": (
        "parallel = dict(pipeline=1, tensor=dict(size=4, mode='sequence'))\nfp16 = dict(mode=None)\nSEED = 7\n"
        "gradient_handler = [dict(type='SequenceParallelGradientHandler')]\n",
        {"pp_size": 1, "sp_size": 4, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"},
        {"max_grad_norm": 0.0},
        ["SEED"],
    ),
    "bf16 shards, odd keys": (
        "zero = dict(model_config=dict(bf16=True, fp32_reduce_scatter=True))\nfoo = 3\nparallel = dict(other=2)\n"
        "optimizer = dict(type='Lamb', lr=1.0)\ntorch_ddp = dict(find_unused_parameters=True, bucket_cap_mb=50)\n",
        {"zero_stage": 3, "find_unused_parameters": True, "ddp_bucket_cap_mb": 50},
        {"bf16": True, "max_grad_norm": 0.0},
        ["optimizer", "zero.model_config.fp32_reduce_scatter", "foo", "parallel.other"],
    ),
    "a mode that is no constant": (
        f"{AMP}fp16 = dict(mode=choose())\n",
        {},
        {"max_grad_norm": 0.0},
        ["fp16.mode"],
    ),
    "sizes that only running tells": (
        "import os\nparallel = dict(pipeline=int(os.environ['PP']), tensor=dict(size=tp(), mode='1d'))\nfp16 = None\n"
        "clip_grad_norm = clip()\n",
        {},
        {},
        ["parallel.pipeline", "parallel.tensor.size", "clip_grad_norm"],
    ),
    "InternLM, sizes that only running tells": (
        "parallel = dict(zero1=dict(size=shards()), tensor=dict(size=2, mode='mtp'), pipeline=dict(size=stages()))\n"
        "hybrid_zero_optimizer = dict(clip_grad_norm=clip())\n",
        {"tp_size": 2},
        {},
        ["parallel.zero1.size", "parallel.pipeline.size", "hybrid_zero_optimizer.clip_grad_norm"],
    ),
    "2d": (
        "parallel = dict(tensor=dict(size=4, mode='2D'))\nclip_grad_norm = 2.0\n",
        {"tp_size": 4},
        {"max_grad_norm": 2.0},
        ["parallel.tensor.mode"],
    ),
    "InternLM, keys that the layout has not": (
        "parallel = dict(zero1=dict(size=8, odd=1), tensor=dict(size=2, mode='msp', chunks=4),\n"
        "    pipeline=dict(size=2, mode='DualPipe'), weight=dict(size=4, overlap=True), expert=dict(size=-1),\n"
        "    sequence_parallel=True)\n"
        "model = dict(dtype='torch.half', use_flash_attn=True)\n"
        "hybrid_zero_optimizer = dict(clip_grad_norm=1.0, new=1)\n",
        {
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "split_gather",
            "zero_stage": 1,
            "zero_group_size": 8,
            "tp_size": 2,
            "pp_size": 2,
        },
        {"fp16": True, "max_grad_norm": 1.0},
        [
            *("parallel.zero1.odd", "parallel.tensor.chunks", "parallel.weight", "parallel.pipeline.mode"),
            *("parallel.expert.size", "hybrid_zero_optimizer.new", "model"),
        ],
    ),
    "InternLM, weights and a sequence dealt": (
        "JOB_NAME = 'a'\nparallel = dict(zero1=dict(size=-1), tensor=dict(size=4, mode='isp'), weight=dict(size=4))\n"
        "model = dict(dtype='torch.tf32')\n",
        {
            "sp_size": 4,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "all_to_all",
            "zero_stage": 1,
        },
        {"run_name": "a", "max_grad_norm": 0.0},
        ["parallel.weight", "model.dtype"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_key_is_read_or_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, layout, recipe, noted = CASES[name]
    (tmp_path / "config.py").write_text(text)
    source, found = read_file(tmp_path / "config.py")
    assert source == ("internlm" if name.startswith("InternLM") else "colossalai")
    assert (found.layout, found.recipe) == (layout, recipe)
    assert sorted(note.key for note in found.notes) == sorted(noted)
    assert set(layout) <= set(inspect.signature(HybridParallelPlugin).parameters)
    build_recipe({**recipe, "model": "gpt2", "data": {"path": "a.jsonl"}, "layout": layout})
    for target in TARGETS:
        assert main(["config", str(tmp_path / "config.py"), "--to", target]) == 0
        if target == "shardwright":
            assert ("1 key without" in capsys.readouterr().out) == (len(noted) == 1)


def test_a_file_of_either_is_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.py"
    path.write_text("parallel = dict(pipeline=2)\n")
    assert main(["config", str(path)]) == 2
    assert "no key of it tells); say --from colossalai or --from internlm" in capsys.readouterr().err
    for source in ("colossalai", "internlm"):
        assert read_file(path, source)[1].layout == {"pp_size": 2}
    path.write_text("parallel = dict(zero1=1)\nclip_grad_norm = 1.0\n")
    assert main(["config", str(path)]) == 2
    assert "clip_grad_norm is of Colossal-AI's, parallel.zero1 of InternLM's" in capsys.readouterr().err


WRONG = {
    "parallel = dict(zero1=1, tensor=dict(size='2', mode='isp'))": "parallel.tensor='2' must be a whole number",
    "parallel = dict(pipeline='2')\nfp16 = None": "parallel.pipeline='2' must be a whole number",
    "parallel = 2\nfp16 = None": "parallel=2 must be a dict",
    "clip_grad_norm = 1\nparallel = dict(tensor=dict(mode='1d'))": "parallel.tensor=None must be a whole number",
}


@pytest.mark.parametrize("text", WRONG)
def test_values_that_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(text)
    with pytest.raises(ValueError, match="must be a") as caught:
        read_file(tmp_path / "config.py")
    assert WRONG[text] in str(caught.value)
