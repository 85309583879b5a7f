"""State-space mixers over ranks: each computes its own heads or channels, and all together what one process does."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from shardwright import Booster
from shardwright.lazy import LazyInitContext
from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import ModelSharder, ShardConfig
from shardwright.shardformer.layer.parallel_module import full_tensor
from shardwright.shardformer.state_layout import StateLayout
from shardwright.spec import get_spec
from shardwright.testing import compare_models, keep_float64, run_ranks
from tests.models import tiny_causal_lm as tiny

ALMOST_ALL = 0.95  # of the parameters
TWO_LAYERS = {"num_hidden_layers": 2}
# One norm over all channels, uneven; groups that are dealt unevenly; several heads that are mixers of their own; no
# norm, and a factor for every feature that is projected; norms of dt, B and C.
THREE_HEADS = {**TWO_LAYERS, "hidden_size": 48, "expand": 2, "num_heads": 3, "head_dim": 32, "state_size": 8}
ZAMBA = {"num_hidden_layers": 5, "attention_hidden_size": 128, "attention_head_dim": 32, "attn_layer_period": 2,
         "attn_layer_offset": 1}  # fmt: skip
NO_EXPERTS = {**TWO_LAYERS, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("mamba", {**TWO_LAYERS, "use_bias": True, "time_step_rank": 4}),
    ("mamba2", {**THREE_HEADS, "n_groups": 1}),
    ("mamba2", {**THREE_HEADS, "n_groups": 3, "use_bias": True}),
    ("falcon_h1", {**TWO_LAYERS, "mamba_rms_norm": False, "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 1.3]}),
    ("jamba", NO_EXPERTS),
]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("falcon_mamba", TWO_LAYERS),
    ("falcon_h1", {**TWO_LAYERS, "mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_n_groups": 2}),
    ("bamba", {"attn_layer_indices": [1]}),
    ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"] * 2}),
    ("nemotron_h", {}),
    ("zamba", ZAMBA),
]


def build(case: tuple[str, dict[str, Any]]) -> Any:
    model: Any = tiny.build(*case)
    for module in model.modules():  # steps that last: decays are of order one
        if StateLayout.of(module) is not None:
            module.A_log.data.normal_(generator=torch.Generator().manual_seed(4))
    return model


def trained(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    with keep_float64():
        torch.manual_seed(7)
        loss = model(**batch).loss
        loss.backward()
    return loss.detach()


def share_of(model: nn.Module) -> float:
    specs = [spec for param in model.parameters() if (spec := get_spec(param)) is not None]
    sizes = [(torch.Size(spec.full_shape).numel(), spec.is_sharded) for spec in specs]
    return sum(size for size, sharded in sizes if sharded) / sum(size for size, _ in sizes)


def sharded(model: nn.Module) -> Any:
    with keep_float64():
        sharder = ModelSharder(model, None, ShardConfig(make_vocab_size_divisible_by=8))
        sharder.shard()
    findings: Any = sharder.policy.findings
    assert not findings.dropped, findings.dropped
    assert findings.checked
    return sharder.model


def generated(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """From prompts of two lengths, the shorter one padded in front."""
    ids, mask = batch["input_ids"][:2, :6], torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    with keep_float64(), torch.no_grad():
        tokens: torch.Tensor = model.eval().generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    return tokens


def compare(rank: int, world: int, cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Loss, gradients, tokens that are generated, and weights that are gathered; returns what is wrong."""
    problems = []
    for case in cases:
        reference, model = build(case), sharded(build(case))
        batch = tiny.inputs(reference)
        losses = trained(reference, batch), trained(model, batch)
        sync_shared_gradients(model.parameters(), dist.group.WORLD)
        report = compare_models(reference, model, coordinate=rank, losses=losses, tolerance=1e-10, check=False)
        try:
            report.check()
            assert share_of(model) >= ALMOST_ALL, f"{share_of(model):.0%} of the parameters are sharded"
            whole = dict(reference.named_parameters())
            for name, param in model.named_parameters():
                assert torch.equal(full_tensor(param, dist.group.WORLD), whole[name]), f"{name} gathered"
            want, got = generated(reference, batch), generated(model, batch)
            assert torch.equal(got, want), f"generated {got.tolist()}, not {want.tolist()}"
        except AssertionError as error:
            problems.append(f"{case}: {error}")
    return problems


def check(found: list[list[str]]) -> None:
    problems = [f"rank {rank}: {problem}" for rank, one in enumerate(found) for problem in one]
    assert not problems, "\n".join(problems)


def _two_ranks(rank: int, world: int) -> list[str]:
    return [*compare(rank, world, CASES), *lazily_built(rank), *kernels_of_whole_mixers(), *one_head()]


def test_two_ranks_compute_what_one_process_does() -> None:
    check(run_ranks(_two_ranks, 2, timeout=110))


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_family(ranks: int) -> None:
    check(run_ranks(compare, ranks, MORE if ranks == 2 else [("mamba2", {"n_groups": 2}), *MORE[:3]], timeout=500))


LAYOUTS: dict[str, tuple[int, tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "stages": (4, CASES[3], {"tp_size": 2, "pp_size": 2, "num_microbatches": 3}),
    "zero": (4, CASES[1], {"tp_size": 2, "zero_stage": 2, "max_norm": 0.05}),
    "adapters": (2, CASES[0], {"tp_size": 2}),
    "split sequences": (2, CASES[2], {"tp_size": 2, "enable_sequence_parallelism": True}),
    "compiled": (2, MORE[1], {"tp_size": 2, "enable_jit_fused": True}),
    "recomputed": (2, CASES[4], {"tp_size": 2}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, tmp_path: Path) -> None:
    run_ranks(_boosted, LAYOUTS[name][0], name, tmp_path, timeout=900)


@keep_float64()
def _boosted(rank: int, world: int, name: str, path: Path) -> None:
    """Three steps; what is saved then is loaded by plain transformers, and by the same layout."""
    _, case, layout = LAYOUTS[name]
    plugin = HybridParallelPlugin(precision="fp32", **layout)
    booster = Booster(plugin=plugin)
    model, reference = build(case), build(case)
    if name == "adapters":
        lora = {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": ["in_proj", "x_proj", "embeddings"],
            "task_type": "CAUSAL_LM",
        }
        model, reference = (
            booster.enable_lora(each, lora_config=peft.LoraConfig(**lora)) for each in (model, reference)
        )
        for each in (model, reference):
            generator = torch.Generator().manual_seed(3)
            for param in each.parameters():
                if param.requires_grad:
                    param.data = 0.2 * torch.randn(param.shape, generator=generator, dtype=torch.float64)
    if name == "recomputed":
        model.gradient_checkpointing_enable()

    def adamw(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in of.parameters() if param.requires_grad], lr=1e-2, eps=1e-3)

    theirs = adamw(reference)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    for step in range(3):
        batch = tiny.inputs(reference)
        batch["input_ids"] = (batch["input_ids"] + step) % 97
        parts, mine = plugin.dp_size, plugin.mesh.coordinate("dp")
        batch = {key: value.repeat(parts, 1) if torch.is_tensor(value) else value for key, value in batch.items()}
        batch["input_ids"][3:] = batch["input_ids"][3:].flip(1)
        own = {key: value.chunk(parts)[mine] if torch.is_tensor(value) else value for key, value in batch.items()}
        loss = reference(**batch).loss
        loss.backward()
        result = booster.execute_pipeline(iter([own]), model, None, optimizer)
        losses = (loss.detach().reshape(1), result["loss"].reshape(1)) if result["loss"] is not None else None
        gradients = {"gradients": optimizer.gradients(), "weights": False} if parts == 1 else {"gradients": False}
        compare_models(reference, model, coordinate=plugin.mesh.coordinate, losses=losses, tolerance=1e-10, **gradients)
        if layout.get("max_norm"):
            nn.utils.clip_grad_norm_(reference.parameters(), layout["max_norm"])
        for each in (theirs, optimizer):
            each.step()
            each.zero_grad()
        compare_models(reference, model, coordinate=plugin.mesh.coordinate, gradients=False, tolerance=1e-9)
    if name == "adapters":
        return
    booster.save_model(model, path, shard=True)
    dist.barrier()
    read = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    compare_models(reference, read, gradients=False, tolerance=1e-9)
    other, *_ = booster.boost(build(case), None)
    booster.load_model(other, path)
    compare_models(reference, other, coordinate=plugin.mesh.coordinate, gradients=False, tolerance=1e-9)


def lazily_built(rank: int) -> list[str]:
    """A buffer that the forward multiplies with is cut like the projection, without the checkpoint knowing of it."""
    made = tiny.config("falcon_h1", CASES[3][1])
    with LazyInitContext(seed=3):
        whole = AutoModelForCausalLM.from_config(made)
    LazyInitContext.materialize(whole)
    with LazyInitContext(seed=3):
        model = AutoModelForCausalLM.from_config(made)
    model = sharded(model)
    batch = tiny.inputs(whole)
    want, got = whole(**batch).loss, model(**batch).loss
    return [] if torch.allclose(want, got, rtol=1e-5) else [f"built lazily: {got}, not {want}"]


def kernels_of_whole_mixers() -> list[str]:
    """Kernels that go from the input projection to the output projection are not asked, as they cannot sum between."""
    problems = []
    for case, kernel in ((CASES[0], "mamba_inner_fn"), (CASES[1], "mamba2_split_conv1d_scan_combined")):
        home = importlib.import_module(f"transformers.models.{case[0]}.modeling_{case[0]}")
        asked: list[bool] = []
        own = getattr(home, kernel)
        setattr(home, kernel, lambda *_, asked=asked, **__: asked.append(True))
        try:
            whole = build(case)
            model = sharded(build(case))
            trained(whole, tiny.inputs(whole))
            if not asked:
                problems.append(f"{kernel} is no name that {case[0]} calls")
            asked.clear()
            trained(model, tiny.inputs(whole))
            if asked:
                problems.append(f"{kernel} was given parts of a mixer")
        finally:
            setattr(home, kernel, own)
    return problems


def one_head() -> list[str]:
    """What cannot be dealt stays whole, and is named."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardwright")
    logger.addHandler(handler)
    try:
        model = build(("mamba2", {**THREE_HEADS, "num_heads": 1, "head_dim": 96, "n_groups": 1}))
        ModelSharder(model, None, ShardConfig(make_vocab_size_divisible_by=8)).shard()
    finally:
        logger.removeHandler(handler)
    mixer = model.backbone.layers[0].mixer  # type: ignore[union-attr, index]
    problems = [] if mixer.num_heads == 1 and mixer.in_proj.weight.shape[0] == 96 * 2 + 16 + 1 else [str(mixer)]
    if not any("mixer stays whole" in line and "1 heads cannot be dealt to 2 ranks" in line for line in told):
        problems.append(f"one head: {told}")
    return problems


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "expected"),
    [
        (6, 3, 2, [(0, 4, 0, 2), (4, 2, 2, 1)]),
        (6, 2, 4, [(0, 2, 0, 1), (2, 1, 0, 1), (3, 2, 1, 1), (5, 1, 1, 1)]),
        (6, 3, 4, "3 groups of B and C cannot be shared by 4 ranks"),
        (2, 1, 4, "2 heads cannot be dealt to 4 ranks"),
    ],
)
def test_heads_follow_their_groups(heads: int, groups: int, ranks: int, expected: Any) -> None:
    layout = StateLayout("mamba2", heads, groups, 8 * heads, 4 * groups)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            layout.shares(ranks)
        return
    assert [(*share.heads, *share.groups) for share in layout.shares(ranks)] == expected
    assert sum(layout.local(rank, ranks).features for rank in range(ranks)) == 8 * heads
