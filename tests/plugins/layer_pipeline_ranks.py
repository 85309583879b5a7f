"""Steps of microbatches that differ in length, by models whose layers alone have parts of sequences, in pipelines and
in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from sequence_ranks import IGNORED, Sent, sgd
from test_sequence_layers import BART
from test_sequence_layers import MODELS as LAYERS
from torch import nn

from shardwright import Booster, Microbatches
from shardwright.lazy import LazyInitContext
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import compare_models, keep_float64, zoo

Batch = dict[str, torch.Tensor]
SIZES = ((3, 19), (2, 12), (3, 27))  # samples and length of a step's batch


def microbatch(decodes: bool, samples: int, length: int, seed: int) -> Batch:
    """Padded behind, with few labels; the last sample of one that has three is all padding but for two tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 99, (samples, length), generator=generator)
    seen = length - 3 * torch.arange(samples)
    if samples > 2:
        seen[2] = 2
    mask = (torch.arange(length) < seen[:, None]).long()
    if decodes:
        labels = torch.randint(5, 99, (samples, length // 2 + 3), generator=generator)
    else:
        labels = ids.masked_fill(mask == 0, IGNORED)
    labels[0, :4] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def steps_of(model: Any) -> list[list[Batch]]:
    """Three steps of two microbatches each, of other lengths in each; those of the second are one batch's."""
    decodes = model.config.is_encoder_decoder
    whole = microbatch(decodes, 3, 14, 2)
    cut = [{name: value[rows] for name, value in whole.items()} for rows in (slice(0, 2), slice(2, 3))]
    return [
        [microbatch(decodes, 3, 19, 0), microbatch(decodes, 1, 11, 1)],
        cut,
        [microbatch(decodes, 2, 8, 3), microbatch(decodes, 3, 23, 4)],
    ]


def given(microbatches: list[Batch], index: int) -> Any:
    """What the loader gives in a step."""
    if index != 1:
        return Microbatches(microbatches)
    return {name: torch.cat([each[name] for each in microbatches]) for name in microbatches[0]}


def loss_of(model: Any, microbatches: list[Batch]) -> torch.Tensor:
    """The mean over all labels, and router losses weighed by tokens."""
    decodes, total = model.config.is_encoder_decoder, torch.zeros((), dtype=torch.float64)
    counts = [(each["labels"][:, 0 if decodes else 1 :] != IGNORED).sum() for each in microbatches]
    tokens = [each["attention_mask"].sum() for each in microbatches]
    for each, count, seen in zip(microbatches, counts, tokens, strict=True):
        out = model(**each, use_cache=False)
        router = 0.0
        if getattr(out, "aux_loss", None) is not None:
            router = model.router_aux_loss_coef * out.aux_loss
        total = total + (out.loss - router) * count / sum(counts) + router * seen / sum(tokens)
    return total


def compare(build: Callable[[], nn.Module], arguments: dict[str, Any]) -> Any:
    """Three steps; returns the boosted model."""
    plugin = HybridParallelPlugin(precision="fp32", num_microbatches=2, **arguments)
    booster = Booster(plugin=plugin)
    reference, model = LazyInitContext.materialize(build()), build()
    plain = sgd(reference)
    boosted: Any
    boosted, optimizer, *_ = booster.boost(model, sgd(model))
    assert optimizer is not None
    for index, microbatches in enumerate(steps_of(reference)):
        expected = loss_of(reference, microbatches)
        expected.backward()
        batch = given(microbatches, index)
        loss = booster.execute_pipeline(iter([batch]), boosted, None, optimizer)["loss"]
        losses = None if loss is None else (expected.detach(), loss.detach())
        place = plugin.mesh.coordinate
        gradients = optimizer.gradients()
        compare_models(reference, boosted, coordinate=place, losses=losses, gradients=gradients, weights=False)
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
        compare_models(reference, boosted, coordinate=place, gradients=False)
    return boosted


def compare_all(rank: int, world: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """(model, arguments of the plugin)"""
    for name, arguments in cases:
        with keep_float64():
            try:
                compare(MODELS[name], arguments)
            except Exception as error:
                error.add_note(f"{name}, {arguments}")
                raise


def adapted_t5() -> nn.Module:
    """LoRA, with embeddings that are not trained."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q", "v", "wo"], task_type="SEQ_2_SEQ_LM")
    model: nn.Module = peft.get_peft_model(LAYERS["t5"](), config).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora" in name:
                param.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return model


def lazy_bart() -> nn.Module:
    config = transformers.BartConfig(**BART)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with LazyInitContext(seed=4):
            return transformers.BartForConditionalGeneration(config).train()
    finally:
        torch.set_default_dtype(usual)


MODELS: dict[str, Callable[[], nn.Module]] = {**LAYERS, "adapted t5": adapted_t5, "lazy bart": lazy_bart}
MODELS["t5 of three heads"] = lambda: zoo.build("t5-conditional-generation", num_heads=3)


def count_messages(rank: int, world: int, name: str, arguments: dict[str, Any]) -> tuple[list[int], list[int]]:
    """By step: headers that this rank has received, and numbers that it has sent to other stages."""
    model: Any = LAYERS[name]()
    plugin = HybridParallelPlugin(precision="fp32", num_microbatches=2, **arguments)
    booster = Booster(plugin=plugin)
    batches = [microbatch(model.config.is_encoder_decoder, samples, length, 0) for samples, length in SIZES]
    model, optimizer, *_ = booster.boost(model.float(), sgd(model))
    comm, headers, sent = model.executor.comm, [], []
    receive = comm._receive_header

    def counting(*args: Any) -> Any:
        headers[-1] += 1
        return receive(*args)

    comm._receive_header = counting
    for batch in batches:
        headers.append(0)
        with Sent(rank) as seen:
            booster.execute_pipeline(iter([batch]), model, None, optimizer)
        sent.append(seen.found.get("send", (0, 0))[1])
        optimizer.zero_grad()
    return headers, sent
