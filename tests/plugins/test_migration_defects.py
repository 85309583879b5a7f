"""Things that users of a system with the same interface ran into, and that must not happen here. One test for each."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import Booster
from shardwright.interface.shards import LoadedShard
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.shardformer.layer import FusedRMSNorm, cross_entropy_1d
from shardwright.testing import adamw, compare_models, keep_float64, loss_of, run_ranks, zoo

TWO = {"num_hidden_layers": 2}


@dataclass(frozen=True)
class Job:
    """Steps of (kind, samples, tokens), run on the layout and on one process alike.

    Kinds: "train"; "eval"; "accumulate", which is "train" without stepping and without resetting gradients.
    """

    plugin: dict[str, Any]
    steps: tuple[tuple[str, int, int], ...] = (("train", 4, 11), ("train", 4, 11))
    model: str = "llama-causal-lm"
    config: dict[str, Any] = field(default_factory=dict)
    criterion: Any = None


def run_job(rank: int, world: int, job: Job) -> list[dict[str, Any]]:
    """Raises where a loss, an evaluation output, a gradient or a weight differs; returns what execute_pipeline did."""
    with keep_float64():
        reference = zoo.build(job.model, dtype=torch.float64, **job.config)
        model = copy.deepcopy(reference)
        reference_optimizer = adamw(reference)
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **job.plugin))
        plugin: Any = booster.plugin
        boosted, optimizer, *_ = booster.boost(model, adamw(model))
        returned = []
        for number, (kind, samples, tokens) in enumerate(job.steps):
            batch = zoo.inputs(
                job.model, batch_size=samples * plugin.dp_size, seq_len=tokens, seed=number, **job.config
            )
            first = plugin.mesh.coordinate("dp") * samples
            mine = {name: value[first : first + samples] for name, value in batch.items()}
            training = kind != "eval"
            with torch.set_grad_enabled(training):
                output = reference(**batch)
            result = booster.execute_pipeline(
                iter([mine]),
                boosted,
                job.criterion,
                optimizer if training else None,
                return_loss=True,
                return_outputs=not training,
            )
            returned.append(result)
            losses = (
                (loss_of(output).detach().reshape(1), result["loss"].reshape(1)) if result["loss"] is not None else None
            )
            if training:
                loss_of(output).backward()
                report = {"losses": losses, "gradients": optimizer.gradients(), "weights": False}
                compare_models(reference, boosted, coordinate=plugin.mesh.coordinate, **report)  # type: ignore[arg-type]
                if kind == "accumulate":
                    continue
                for each in (reference_optimizer, optimizer):
                    each.step()
                    each.zero_grad()
                compare_models(reference, boosted, coordinate=plugin.mesh.coordinate, gradients=False)
            elif losses is not None:
                torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=1e-10)
                if plugin.tp_size == 1:
                    torch.testing.assert_close(
                        result["outputs"]["logits"], output.logits[first : first + samples], rtol=1e-10, atol=1e-10
                    )
        return returned


PIPE: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2}


def test_01_evaluation_with_another_batch_size_between_training_steps() -> None:
    run_ranks(run_job, 2, Job(PIPE, (("train", 4, 11), ("eval", 7, 11), ("eval", 1, 11), ("train", 4, 11)), config=TWO))


def test_02_a_smaller_last_batch() -> None:
    run_ranks(
        run_job,
        2,
        Job({"pp_size": 2, "microbatch_size": 2}, (("train", 4, 11), ("train", 3, 11), ("train", 1, 11)), config=TWO),
    )


def test_03_fewer_microbatches_than_stages() -> None:
    run_ranks(run_job, 2, Job({"pp_size": 2, "num_microbatches": 1}, config=TWO))


def test_04_labels_unevenly_spread_over_microbatches_and_replicas() -> None:
    run_ranks(run_job, 4, Job({"pp_size": 2, "num_microbatches": 3}, (("train", 5, 13),), config=TWO))


def test_05_sequence_lengths_that_change_with_the_metadata_cache_on() -> None:
    steps = (("train", 4, 11), ("train", 4, 17), ("train", 2, 9), ("train", 4, 11))
    run_ranks(run_job, 2, Job({**PIPE, "enable_metadata_cache": True}, steps, config=TWO))


def _headers_sent(rank: int, world: int) -> list[int]:
    model = zoo.build("llama-causal-lm", dtype=torch.float32, **TWO)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **PIPE))
    boosted, optimizer, *_ = booster.boost(model, adamw(model))
    comm = boosted.executor.comm
    encode, sent = comm._encode, [0]

    def counted(*args: Any) -> Any:
        sent[0] += 1
        return encode(*args)

    comm._encode = counted
    counts = []
    for training, samples in ((True, 4), (True, 4), (False, 6), (True, 4), (False, 6)):
        sent[0] = 0
        batch = zoo.inputs("llama-causal-lm", batch_size=samples, seq_len=9)
        booster.execute_pipeline(iter([batch]), boosted, None, optimizer if training else None)
        counts.append(sent[0])
    return counts


def test_06_evaluation_leaves_the_metadata_cache_on() -> None:
    results = run_ranks(_headers_sent, 2)
    for counts in results:
        assert counts[1] == counts[3] == counts[4] == 0, f"headers sent per step: {counts}"
    assert results[0][0] > 0, "the first stage describes what it sends, once"


def test_07_a_forward_only_run_of_the_v_schedule() -> None:
    plugin = {**PIPE, "pp_style": "zbv", "num_model_chunks": 2}
    run_ranks(run_job, 2, Job(plugin, (("eval", 4, 11), ("train", 4, 11), ("eval", 3, 9))))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_add_up_over_steps_without_no_sync(stage: int) -> None:
    steps = (("accumulate", 3, 11), ("accumulate", 4, 9), ("train", 4, 11), ("train", 4, 11))
    run_ranks(run_job, 4, Job({**PIPE, "zero_stage": stage}, steps, model="llama-tied-causal-lm", config=TWO))


@pytest.mark.parametrize("style", ["interleaved", "zbv"])
def test_08_layers_per_stage_with_several_chunks(style: str) -> None:
    plugin = {**PIPE, "pp_style": style, "num_model_chunks": 2, "num_layers_per_stage": [2, 1, 1, 1]}
    run_ranks(run_job, 2, Job(plugin, (("train", 4, 11),), config={"num_hidden_layers": 5}))


def test_09_partial_checkpointing_without_a_pipeline() -> None:
    config = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1])
    run_ranks(run_job, 1, Job({"gradient_checkpoint_config": config}, config=TWO))


def _resume(rank: int, world: int) -> bool:
    """Weights after two further steps: once going on, once resumed from state taken in between."""

    def build() -> tuple[Booster, Any, Any]:
        model = zoo.build("llama-causal-lm", dtype=torch.float32, **TWO)
        booster = Booster(plugin=HybridParallelPlugin(precision="bf16", zero_stage=1, tp_size=2))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        return booster, boosted, optimizer

    def steps(booster: Booster, model: Any, optimizer: Any, seeds: range) -> None:
        for seed in seeds:
            batch = zoo.inputs("llama-causal-lm", batch_size=2, seq_len=9, seed=seed)
            booster.execute_pipeline(iter([batch]), model, None, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    job = build()
    steps(*job, range(2))
    saved = {
        shard.name: LoadedShard(
            shard.master.clone(),
            {key: value.clone() for key, value in shard.state.items()},
            {key: value.clone() for key, value in shard.extra.items()},
        )
        for shard in job[2].shards()
    }
    resumed = build()
    resumed[2].load_shards(saved)
    for each in (job, resumed):
        steps(*each, range(2, 4))
    masters = [{shard.name: shard.master for shard in each[2].shards()} for each in (job, resumed)]
    half = any(param.dtype == torch.bfloat16 for param in job[1].parameters())
    fractions = any((master != master.bfloat16().float()).any() for master in masters[0].values())
    return half and fractions and all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0])


def test_10_half_precision_resumes_from_its_masters_bit_for_bit() -> None:
    assert all(run_ranks(_resume, 4))


def _fused_states(rank: int, world: int) -> list[str]:
    """Parameters whose gathered optimizer state differs from that of one process."""
    with keep_float64():
        reference = zoo.build("gpt2-causal-lm", dtype=torch.float64, n_layer=2)
        model = copy.deepcopy(reference)
        optimizer = adamw(reference)
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32", tp_size=2))
        boosted, wrapped, *_ = booster.boost(model, adamw(model))
        for seed in range(2):
            batch = zoo.inputs("gpt2-causal-lm", batch_size=3, seq_len=9, seed=seed, n_layer=2)
            optimizer.zero_grad()
            wrapped.zero_grad()
            reference(**batch).loss.backward()
            booster.execute_pipeline(iter([batch]), boosted, None, wrapped)
            optimizer.step()
            wrapped.step()
    params = dict(reference.named_parameters())
    wrong = []
    for shard in wrapped.shards():
        assert shard.is_whole
        for key, value in shard.state.items():
            parts: list[Any] = [None] * world
            dist.all_gather_object(parts, value.reshape(shard.local_shape))
            full = shard.spec.unshard(parts)
            if not torch.allclose(full, optimizer.state[params[shard.name]][key], rtol=1e-8, atol=1e-12):
                wrong.append(f"{shard.name} {key}")
    assert any("c_attn" in shard.name for shard in wrapped.shards())
    return wrong


def test_11_optimizer_state_of_fused_projections_is_gathered_in_their_layout() -> None:
    assert run_ranks(_fused_states, 2) == [[], []]


def test_12_a_rank_that_holds_only_padding_of_the_vocabulary() -> None:
    config = {**TWO, "vocab_size": 50}
    run_ranks(
        run_job, 4, Job({"tp_size": 4, "make_vocab_size_divisible_by": 64}, model="llama-tied-causal-lm", config=config)
    )


def _mean_loss(rank: int, world: int) -> tuple[float, float]:
    """Logits that make one token's loss exactly zero, a label that does not count, and the plain mean over the rest."""
    logits = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([3, 7, -100, 0, 5])
    logits[1] = -torch.inf
    logits[1, 7] = 0.0
    expected = nn.functional.cross_entropy(logits, labels)
    local = logits[:, rank * 4 : rank * 4 + 4].clone()
    return float(cross_entropy_1d(local, labels, mode="mean")), float(expected)


def test_13_the_mean_loss_counts_tokens_whose_loss_is_zero() -> None:
    for actual, expected in run_ranks(_mean_loss, 2):
        assert actual == pytest.approx(expected, rel=1e-12)


def _fused_norms(rank: int, world: int) -> int:
    model = zoo.build("llama-causal-lm", dtype=torch.float32, **TWO)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", enable_fused_normalization=True))
    batch = zoo.inputs("llama-causal-lm", batch_size=2, seq_len=9)
    expected = model(**batch).loss
    boosted, optimizer, *_ = booster.boost(model, adamw(model))
    result = booster.execute_pipeline(iter([batch]), boosted, None, optimizer)
    torch.testing.assert_close(result["loss"], expected.detach(), rtol=1e-5, atol=1e-5)
    return sum(isinstance(module, FusedRMSNorm) for module in boosted.modules())


def test_14_fused_norms_need_no_other_package() -> None:
    assert run_ranks(_fused_norms, 1) == [5]


def _unknown_model(rank: int, world: int) -> None:
    """A model of a family without a policy: data parallelism asks nothing of it."""
    import transformers

    config = transformers.AlbertConfig(
        vocab_size=50,
        hidden_size=16,
        embedding_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    torch.manual_seed(0)
    model = transformers.AlbertForMaskedLM(config).eval()
    reference, batch = copy.deepcopy(model), torch.randint(0, 50, (4, 7))
    expected, optimizer = reference(input_ids=batch, labels=batch).loss, adamw(reference)
    expected.backward()
    optimizer.step()
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", zero_stage=1))
    boosted, wrapped, *_ = booster.boost(model, adamw(model))
    mine = batch[2 * rank : 2 * rank + 2]
    loss = boosted(input_ids=mine, labels=mine).loss
    booster.backward(loss, wrapped)
    wrapped.step()
    for one, other in zip(boosted.unwrap().parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_15_models_without_a_policy_train_on_data_parallel_ranks() -> None:
    run_ranks(_unknown_model, 2)


def test_16_fewer_key_value_heads_than_ranks() -> None:
    run_ranks(run_job, 4, Job({"tp_size": 4}, config={**TWO, "num_key_value_heads": 1}))


def _orders(rank: int, world: int) -> list[list[int]]:
    plugin = HybridParallelPlugin(precision="fp32")
    return [
        [int(x) for batch in plugin.prepare_dataloader(list(range(32)), 4, shuffle=True, seed=seed) for x in batch]
        for seed in (1, 999, 1)
    ]


def test_17_the_seed_of_a_dataloader_decides_the_order() -> None:
    first, second, again = run_ranks(_orders, 1)[0]
    assert first == again
    assert first != second


def test_18_pipelines_sharded_layers_and_zero_run_on_the_cpu() -> None:
    run_ranks(run_job, 4, Job({**PIPE, "tp_size": 2, "zero_stage": 1}, (("train", 4, 11),), config=TWO))


def test_19_the_interleaved_schedule_on_two_ranks_ends() -> None:
    run_ranks(
        run_job,
        2,
        Job({**PIPE, "num_microbatches": 4, "pp_style": "interleaved", "num_model_chunks": 2}, (("train", 4, 11),)),
    )


def _losses(rank: int, world: int) -> tuple[bool, bool, bool]:
    plugin = HybridParallelPlugin(precision="fp32", **PIPE)
    booster = Booster(plugin=plugin)
    model = zoo.build("llama-causal-lm", dtype=torch.float32, **TWO)
    boosted, optimizer, *_ = booster.boost(model, adamw(model))
    batch = zoo.inputs("llama-causal-lm", batch_size=4, seq_len=9)
    result = booster.execute_pipeline(
        iter([batch]), boosted, lambda outputs, inputs: outputs[0], optimizer, return_outputs=True
    )
    last = plugin.stage_manager.is_last_stage(ignore_chunk=True)
    return (
        last,
        isinstance(result["loss"], torch.Tensor),
        result["outputs"] is not None and "logits" in result["outputs"],
    )


def test_20_the_loss_is_where_the_stage_manager_says() -> None:
    """None elsewhere, by contract; the criterion may index the outputs as the ones of transformers."""
    assert run_ranks(_losses, 2) == [(False, False, False), (True, True, True)]


def _mixed_precision(rank: int, world: int) -> None:
    for name in ("bf16", "fp16"):
        model = nn.Linear(4, 3)
        booster = Booster(mixed_precision=name)
        boosted, optimizer, criterion, *_ = booster.boost(
            model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss()
        )
        before = model.weight.detach().clone()
        output = boosted(torch.ones(2, 4))
        assert output.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
        booster.backward(criterion(output, torch.zeros(2, 3)), optimizer)
        optimizer.step()
        assert not torch.equal(before, model.weight)


def test_21_mixed_precision_by_name_works_or_is_refused_by_name() -> None:
    run_ranks(_mixed_precision, 1)
    for name in ("fp8", "fp16_naive", "fp16_apex"):
        with pytest.raises(ValueError, match=rf"mixed_precision='{name}' is not one of 'fp16', 'bf16', 'fp32'"):
            Booster(mixed_precision=name)
