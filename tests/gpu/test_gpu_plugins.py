"""Every plugin and precision on one device, against one process without any of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from habits import Habits
from hybrid_ranks import Layout
from jobs import attended, compiled, generated, resumed, run_alone, trained, unwaited
from place import ONE_RANK, REHEARSED

from shardwright.attention.choice import BACKENDS
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import run_ranks

pytestmark = pytest.mark.gpu
CLIPPED = Habits(clip="plugin", clip_at=0.05)
FUSED = {"enable_fused_normalization": True, "enable_fused_activation": True, "enable_fused_rotary": True}
PARTLY = {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(selective_ratio=1.0)}
BF16, FP16 = Habits(half="bf16"), Habits(half="fp16", clip="plugin", clip_at=0.05)
LAYOUTS = {
    "stages": [
        *(Layout("llama-causal-lm", 1, {"zero_stage": stage}, habits=CLIPPED, accumulate=2) for stage in range(4)),
        Layout("llama-causal-lm", 1, {"zero_stage": 1, "num_microbatches": 3}, batch=7),
        Layout("llama-causal-lm", 1, zero=True, plugin={"stage": 2}),
        Layout("llama-causal-lm", 1, {"zero_stage": 1, "cpu_offload": True}, habits=CLIPPED),
        Layout("llama-causal-lm", 1, {"zero_stage": 3, "cpu_offload": True}, habits=CLIPPED),
    ],
    "operators": [
        Layout("llama-causal-lm", 1, {**FUSED, **PARTLY}, {"num_hidden_layers": 3}),
        Layout("qwen3-moe-causal-lm", 1, {"zero_stage": 2}),
        Layout("t5-gated-conditional-generation", 1, FUSED, checkpointing=True),
        Layout("gpt2-causal-lm", 1, {"enable_fused_normalization": True}),
        Layout("bert-masked-lm", 1, calls=True),
        # What fp32 rounds, Adam's quotients make larger from step to step.
        Layout("llama-causal-lm", 1, {"enable_all_optimization": True}, dtype="fp32", habits=Habits(optimizer="sgd")),
        Layout("llama-causal-lm", 1, {"zero_stage": 1}, habits=Habits(optimizer="own adamw", lora=True)),
    ],
    "half": [
        *(Layout("llama-causal-lm", 1, {"zero_stage": stage}, habits=BF16, dtype="fp32") for stage in (0, 1, 3)),
        *(Layout("llama-causal-lm", 1, {"zero_stage": stage}, habits=FP16, dtype="fp32") for stage in (0, 2)),
        Layout("llama-causal-lm", 1, {"zero_stage": 1, "cpu_offload": True}, habits=FP16, dtype="fp32"),
        Layout("llama-causal-lm", 1, {"zero_stage": 1, **FUSED}, habits=BF16, dtype="fp32"),
    ],
}


@pytest.mark.timeout(280)
@pytest.mark.parametrize("group", LAYOUTS)
def test_layouts_of_one_rank(group: str) -> None:
    (found,) = run_ranks(run_alone, 1, LAYOUTS[group], backend=ONE_RANK, timeout=200, debug="OFF")
    assert not found, "\n\n".join([f"{len(found)} of {len(LAYOUTS[group])} failed", *found])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("plugin", "settings"),
    [
        ("ddp", {}),
        ("fsdp", {}),
        ("fsdp", {"reshard_after_forward": False, "cpu_offload": True}),
        ("zero", {"stage": 1, "overlap_allgather": True}),
        ("zero", {"stage": 3}),
        ("hybrid", {"zero_stage": 2, "enable_flash_attention": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_plugins_and_precisions(plugin: str, settings: dict[str, Any], precision: str) -> None:
    own = plugin in ("zero", "hybrid")
    settings = {**settings, "precision": precision} if own else settings
    mixed = None if own or precision == "fp32" else precision
    if plugin == "fsdp" and precision == "fp16":
        pytest.skip("FSDP in fp16 needs a scaler of the script's own")
    ((mine, theirs, apart),) = run_ranks(
        trained, 1, plugin, settings, mixed, backend=ONE_RANK, timeout=120, debug="OFF"
    )
    close = 1e-5 if precision == "fp32" else 2e-2
    assert mine == pytest.approx(theirs, rel=close)
    assert apart <= (1e-3 if precision == "fp32" else 0.3), f"weights are {apart:.1e} of a step apart"


@pytest.mark.parametrize("calls", [False, True], ids=["microbatches", "calls"])
@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 1, "precision": "bf16", "enable_all_optimization": True},
        {"zero_stage": 2, "precision": "fp16"},
        {"zero_stage": 3, "precision": "bf16", "attention_backend": "sdpa"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_host_waits_for_nothing(settings: dict[str, Any], calls: bool) -> None:
    """As `DeviceReads` shows on a CPU: here torch itself raises."""
    more = {} if calls else {"num_microbatches": 2}
    (loss,) = run_ranks(unwaited, 1, {**settings, **more}, calls, backend=ONE_RANK, timeout=120, debug="OFF")
    assert loss == loss


def test_linears_in_eight_bits() -> None:
    settings = {"precision": "fp8", "fp8_options": {"emulate": True} if REHEARSED else None, "zero_stage": 1}
    ((mine, theirs, _),) = run_ranks(trained, 1, "hybrid", settings, None, backend=ONE_RANK, timeout=120, debug="OFF")
    assert mine == pytest.approx(theirs, rel=5e-2)


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in the background"])
def test_a_run_goes_on_from_a_checkpoint(in_background: bool, tmp_path: Path) -> None:
    """Bit by bit. What is saved in the background is not what later steps make of it."""
    for number, settings in enumerate(({"zero_stage": 1, "precision": "bf16"}, {"zero_stage": 3, "precision": "fp16"})):
        (losses,) = run_ranks(
            resumed, 1, str(tmp_path / str(number)), settings, in_background, backend=ONE_RANK, timeout=120
        )
        assert losses[:2] == losses[2:], settings


@pytest.mark.parametrize("name", ["llama-causal-lm", "t5-conditional-generation"])
def test_boosted_models_write_what_plain_ones_do(name: str) -> None:
    for settings in ({}, {"zero_stage": 3}, FUSED):
        ((mine, theirs),) = run_ranks(generated, 1, name, settings, backend=ONE_RANK, timeout=120)
        assert torch.equal(mine, theirs), settings


@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", ["llama-causal-lm", "bert-masked-lm"])
def test_compiled_layers(name: str) -> None:
    """No break, and no graph after the first steps, whose lengths are equal."""
    backend = "aot_eager" if REHEARSED else "inductor"
    (found,) = run_ranks(compiled, 1, name, {"zero_stage": 1}, backend, backend=ONE_RANK, timeout=200, debug="OFF")
    assert found["compiled"] == pytest.approx(found["plain"], rel=1e-5)
    assert not found["breaks"]
    assert found["graphs"][0] > 0
    assert found["graphs"][-1] == found["graphs"][1], "layers were compiled again"


@pytest.mark.parametrize("kind", ["whole", "padded", "packed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_backends(backend: str, kind: str) -> None:
    """Each is right to the rounding of bf16, or declines by name."""
    ((declined, apart),) = run_ranks(attended, 1, backend, kind, backend=ONE_RANK, timeout=120, debug="OFF")
    if declined:
        assert f"attention_backend={backend!r}" in declined
        pytest.skip(f"declines: {declined[:200]}")
    assert apart <= 3e-2
