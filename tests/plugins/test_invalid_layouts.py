"""What a user can get wrong with HybridParallelPlugin: one ValueError on every rank, before any collective, that
says what would work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from invalid_settings import (
    PIPE,
    SETTINGS,
    Case,
    Unmatched,
    V,
    boost,
    ckpt,
    empty,
    execute,
    frozen,
    ids,
    muon,
    routed_both_sides,
    sgd,
    stepped,
)
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo
from tests.models import tiny_causal_lm

WORLD = 2
SECONDS = 5.0 * float(os.environ.get("SHARDWRIGHT_PATIENCE", "1"))  # below any wait for another rank


def unfused_experts() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 8, "intermediate_size_mlp": 8, "head_dim": 8, "vocab_size": 40}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    config = transformers.Llama4TextConfig(**sizes, **counts, interleave_moe_layer_step=1, pad_token_id=0)
    return transformers.Llama4ForCausalLM(config)


MODELS: dict[str, Case] = {
    "fp8 as precision": Case(
        {"precision": "fp8"}, ["precision='fp8'", "cpu", "8.9 or higher", "'bf16'", "emulate=True"], boost()
    ),
    "fp8 arithmetic": Case({"use_fp8": True}, ["use_fp8=True", "cpu", "8.9 or higher", "emulate=True"], boost()),
    "fp8 for a model that has no size for it": Case(
        {"precision": "fp8", "fp8_options": {"emulate": True}},
        ["precision='fp8'", "no linear that can compute in fp8", "multiples of 16", "precision='bf16'"],
        boost(hidden_size=24, intermediate_size=40),
    ),
    "ep for a dense model": Case(
        {"ep_size": 2}, ["ep_size=2", "LlamaForCausalLM has no experts", "ep_size=1"], boost()
    ),
    "ep for more experts than there are": Case(
        {"ep_size": 2},
        ["ep_size=2 does not divide the 3 experts of model.layers.0.mlp.experts", "do: 1, 3"],
        boost("qwen3-moe-causal-lm", num_experts=3),
    ),
    "ep for experts of another kind": Case(
        {"ep_size": 2}, ["model.layers.0.feed_forward.experts, Llama4TextExperts", "ep_size=1"], boost(unfused_experts)
    ),
    "ep with an optimizer of matrices": Case(
        {"ep_size": 2},
        ["optimizer=Adafactor", "split over 'ep'", "ep_size=1"],
        boost("qwen3-moe-causal-lm", lambda model: torch.optim.Adafactor(model.parameters())),
    ),
    "more stages than layers": Case(
        {**V, "num_model_chunks": 3}, ["pp_size x num_model_chunks = 6", "4 layers", "at most 4"], boost()
    ),
    "layers that do not sum": Case(
        {**PIPE, "num_layers_per_stage": [1, 2]}, ["num_layers_per_stage=[1, 2]", "4 layers", "[2, 2]"], boost()
    ),
    "too few stages": Case(
        {**PIPE, "num_layers_per_stage": [4]}, ["num_layers_per_stage=[4]", "2 stages", "[2, 2]"], boost()
    ),
    "a stage without layers": Case(
        {**V, "num_model_chunks": 2, "num_layers_per_stage": [2, 0, 1, 1]},
        ["num_layers_per_stage=[2, 0, 1, 1]", "at least 1"],
        boost(),
    ),
    "less memory than any cut needs": Case(
        {**PIPE, "cut_memory": 0.1}, ["cut_memory=0.1", "4 layers", "the least that works is cut_memory=0.75"], boost()
    ),
    "costs of other layers": Case(
        {**PIPE, "layer_costs": [1.0, 2.0]}, ["layer_costs=[1.0, 2.0]", "4 layers", "positive"], boost()
    ),
    "costs of nothing": Case({**PIPE, "layer_costs": [1, 1, 1, 0]}, ["layer_costs=[1, 1, 1, 0]", "positive"], boost()),
    "layers of one stage": Case(
        {"num_layers_per_stage": [3]}, ["num_layers_per_stage=[3]", "4 layers", "[4]"], boost()
    ),
    "checkpointing more than there is": Case(
        {**PIPE, "gradient_checkpoint_config": ckpt(9, 0)},
        ["num_ckpt_layers_per_stage=[9, 0]", "2 layers", "[2, 2]"],
        boost(),
    ),
    "checkpointing for other stages": Case(
        {**PIPE, "gradient_checkpoint_config": ckpt(1, 1, 1)},
        ["num_ckpt_layers_per_stage=[1, 1, 1]", "3 entries", "2 entries work"],
        boost(),
    ),
    "a pipeline over nothing": Case(PIPE, ["Linear", "no list of layers", "pp_size=1"], boost(lambda: nn.Linear(3, 3))),
    "sharding what nobody knows": Case({"tp_size": 2}, ["Linear", "policy"], boost(lambda: nn.Linear(3, 3))),
    "fewer features than ranks": Case(
        {"tp_size": 2}, ["1 features cannot be dealt to 2 ranks", "at most 1"], boost(intermediate_size=1)
    ),
    "a rule that matches nothing": Case(
        {"tp_size": 2, "custom_policy": Unmatched()},
        ["layers.*.self_attn.query", "Unmatched", "LlamaForCausalLM"],
        boost(),
    ),
    "flash attention where there is none": Case(
        {"tp_size": 2, "enable_flash_attention": True},
        ["enable_flash_attention=True", "torch's SDPA has no soft caps", "use enable_flash_attention=False"],
        boost(lambda: tiny_causal_lm.build("gemma2")),
    ),
    "an attention that is not installed": Case(
        {"attention_backend": "flash_attention_2"},
        ["attention_backend='flash_attention_2'", "it runs on cuda only", "attention_backend='sdpa' works here"],
        boost(),
    ),
    "routers on both sides": Case(
        PIPE, ["output_router_logits=True", "encoder and its decoder", "pp_size=1"], boost(routed_both_sides)
    ),
    "another model's optimizer": Case(
        {"zero_stage": 1}, ["2 of 2 parameters", "LlamaForCausalLM"], boost(optimizer=lambda _: sgd(nn.Linear(2, 2)))
    ),
    "an optimizer that stepped": Case(
        {"zero_stage": 2}, ["stepped already", "load its state afterwards"], boost(optimizer=stepped)
    ),
    "an optimizer without parameters": Case({}, ["SGD", "no parameters"], boost(optimizer=empty)),
    "nothing to train": Case({"zero_stage": 3}, ["requires_grad=False"], boost(optimizer=frozen)),
    "a whole-model optimizer": Case(
        {"zero_stage": 3}, ["LBFGS", "AdamW"], boost(optimizer=lambda m: torch.optim.LBFGS(m.parameters()))
    ),
    "a sparse optimizer": Case(
        {}, ["SparseAdam", "sparse=False"], boost(optimizer=lambda m: torch.optim.SparseAdam(m.parameters()))
    ),
    "sparse gradients": Case({}, ["sparse gradients", "sparse=False"], boost(lambda: nn.Embedding(5, 4, sparse=True))),
    "whole matrices that are split": Case(
        {"tp_size": 2, "zero_stage": 1}, ["Muon", "tp_size=1", "AdamW"], boost(optimizer=muon)
    ),
    "a model without weights": Case(
        {}, ["meta device", "LazyInitContext"], boost(lambda: nn.Linear(3, 3, device="meta"))
    ),
    "a model without parameters": Case({}, ["ReLU", "no parameters"], lambda booster: booster.boost(nn.ReLU())),
    "complex parameters": Case(
        {}, ["torch.complex64", "torch.float32"], boost(lambda: nn.Linear(3, 3, dtype=torch.complex64))
    ),
    "a second number format": Case(
        {}, ["mixed_precision='bf16'", "precision="], lambda b: Booster(mixed_precision="bf16", plugin=b.plugin)
    ),
    "a device beside the plugin's": Case(
        {}, ["device='cpu'", "leave device out"], lambda b: Booster(device="cpu", plugin=b.plugin)
    ),
    "adapters of nothing": Case({}, ["lora_config", "pretrained_dir"], lambda b: b.plugin.enable_lora(nn.Linear(2, 2))),
    "a loader for no samples": Case(
        {}, ["batch_size=0", "at least 1"], lambda b: b.plugin.prepare_dataloader([1, 2, 3], 0)
    ),
    "a plan for no samples": Case(
        {}, ["batch_size=0", "at least 1"], lambda b: b.plugin.preflight(nn.Linear(2, 2), batch_size=0)
    ),
    "a pipeline run of a bare model": Case(
        PIPE,
        ["execute_pipeline", "bare Linear"],
        lambda b: b.execute_pipeline(iter([]), nn.Linear(2, 2), lambda o, i: o),
    ),
}

BATCHES: dict[str, tuple[Any, list[str]]] = {
    "rows that do not match": (
        execute({"input_ids": ids(4), "labels": ids(3)}),
        ["4 samples", "'labels' has shape (3, 5)", "dim 0"],
    ),
    "a batch without tensors": (execute({"text": "hello"}), ["without any tensor", "samples on dim 0"]),
    "a batch without samples": (execute({"input_ids": ids(0), "labels": ids(0)}), ["no samples", "at least 1"]),
    "a list instead of an iterator": (execute(lambda: [ids(2)]), ["data_iter", "list", "iter(dataloader)"]),
    "no_sync without the optimizer": (
        lambda b, m, o: b.no_sync(m).__enter__(),
        ["no_sync", "booster.no_sync(model, optimizer)"],
    ),
    "a bare optimizer in backward": (
        lambda b, m, o: b.backward(torch.zeros(()), o.unwrap()),
        ["AdamW", "boost returned"],
    ),
}


class Collectives:
    """While it is entered, collectives raise with their name instead of waiting for other ranks."""

    NAMES = (
        *(
            "all_reduce",
            "broadcast",
            "all_gather",
            "all_gather_into_tensor",
            "reduce_scatter",
            "reduce_scatter_tensor",
            "barrier",
        ),
        *(
            "all_gather_object",
            "broadcast_object_list",
            "new_group",
            "send",
            "recv",
            "isend",
            "irecv",
            "batch_isend_irecv",
        ),
    )

    def __enter__(self) -> None:
        self.kept = {name: getattr(torch.distributed, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(torch.distributed, name, self._refusing(name))

    def __exit__(self, *_: Any) -> None:
        for name, function in self.kept.items():
            setattr(torch.distributed, name, function)

    @staticmethod
    def _refusing(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"reached {name}")

        return refuse


def _attempt(action: Callable[[], Any]) -> tuple[str, float]:
    """What was said, and after how many seconds."""
    start = time.perf_counter()
    try:
        with Collectives():
            action()
        said = "nothing was refused"
    except ValueError as error:
        return str(error), time.perf_counter() - start
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return f"WRONG: {said}", time.perf_counter() - start


def _refused_settings(rank: int, world: int) -> dict[str, tuple[str, float]]:
    return {
        name: _attempt(lambda case=case: HybridParallelPlugin(**case.plugin))  # type: ignore[misc]
        for name, case in SETTINGS.items()
    }


def _refused_models(rank: int, world: int) -> dict[str, tuple[str, float]]:
    said = {}
    for name, case in MODELS.items():
        assert case.action is not None
        booster = Booster(plugin=HybridParallelPlugin(**{"precision": "fp32", **case.plugin}))
        said[name] = _attempt(lambda case=case, booster=booster: case.action(booster))  # type: ignore[misc]
    return said


def _refused_batches(rank: int, world: int) -> dict[str, tuple[str, float]]:
    booster = Booster(plugin=HybridParallelPlugin(**PIPE))
    built = zoo.build("llama-causal-lm", dtype=torch.float32)
    model, optimizer, *_ = booster.boost(built, torch.optim.AdamW(built.parameters()))
    return {
        name: _attempt(lambda action=action: action(booster, model, optimizer)) for name, (action, _) in BATCHES.items()
    }  # type: ignore[misc]


def _check(results: list[dict[str, tuple[str, float]]], words_of: dict[str, list[str]]) -> None:
    problems = []
    for name, words in words_of.items():
        messages = [said[name][0] for said in results]
        if len(set(messages)) > 1:
            problems.append(f"{name}: ranks differ: {messages}")
        problems += [f"{name}: {word!r} is not in: {messages[0]}" for word in words if word not in messages[0]]
        problems += [f"{name}: took {said[name][1]:.1f} s" for said in results if said[name][1] > SECONDS]
    assert not problems, "\n".join(problems)


def test_settings_are_refused_alike_on_every_rank() -> None:
    _check(run_ranks(_refused_settings, WORLD), {name: case.words for name, case in SETTINGS.items()})


def test_models_and_optimizers_that_do_not_fit_are_refused() -> None:
    _check(run_ranks(_refused_models, WORLD, timeout=110), {name: case.words for name, case in MODELS.items()})


def test_batches_that_cannot_be_split_are_refused() -> None:
    _check(run_ranks(_refused_batches, WORLD), {name: words for name, (_, words) in BATCHES.items()})


def test_every_argument_has_a_case() -> None:
    """An argument that nobody can get wrong is an argument that nobody checks."""
    import inspect

    arguments = set(inspect.signature(HybridParallelPlugin).parameters)
    covered = {argument for case in [*SETTINGS.values(), *MODELS.values()] for argument in case.plugin}
    flags = {
        "enable_all_optimization",
        "broadcast_buffers",
        "gradient_as_bucket_view",
        "static_graph",
        "enable_metadata_cache",
    }
    flags |= {"parallel_output", "overlap_communication", "enable_sequence_overlap", "enable_fused_normalization"}
    flags |= {"enable_fused_cross_entropy", "enable_fused_activation", "enable_fused_rotary"}
    for flag in flags:
        with pytest.raises(ValueError, match=f"{flag}='maybe' must be True or False"):
            HybridParallelPlugin(**{flag: "maybe"})
    assert arguments == covered | flags


def test_the_plugin_needs_processes() -> None:
    with pytest.raises(ValueError, match="launch_from_torch"):
        HybridParallelPlugin()
