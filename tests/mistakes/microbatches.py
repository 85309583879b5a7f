"""Mistakes in microbatches that the script makes itself, and in batches with rows that are not samples."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

import shardwright
from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, zoo
from tests.models import tiny_qwen2_vl
from tests.models.tiny_qwen2_vl import IMAGE, PATCH

from .table import mistake, refused


def boosted(world: int, **settings: Any) -> tuple[Booster, nn.Module, Any]:
    booster = Booster(plugin=HybridParallelPlugin(pp_size=min(world, 2), precision="fp32", **settings))
    model = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=2)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    return booster, model, optimizer


@mistake(
    symptom="`output_router_logits=True` in a batch, or in the config after `boost`, with pipelines",
    gets="refused on every rank before the step: the router logits of other stages would be missing from the loss",
    fix="`model.config.output_router_logits = True` before `boost`",
    worlds=(1, 2),
)
def router_loss_asked_for_too_late(rank: int, world: int) -> None:
    def step(settings: dict[str, Any], entries: dict[str, Any]) -> Any:
        booster = Booster(plugin=HybridParallelPlugin(pp_size=min(world, 2), num_microbatches=2, precision="fp32"))
        model = zoo.build(
            "mixtral-causal-lm", dtype=torch.float32, num_hidden_layers=2, experts_implementation="eager", **settings
        )
        model, *_ = booster.boost(model)
        batch = zoo.inputs("mixtral-causal-lm")
        return booster.execute_pipeline(iter([{**batch, **entries}]), model, None)["loss"]

    if world > 1:
        with refused("output_router_logits=True", r"model\.config\.output_router_logits=True before booster\.boost"):
            step({}, {"output_router_logits": True})
    with_router = step({"output_router_logits": True}, {})
    without = step({"output_router_logits": True}, {"output_router_logits": False})
    assert without is None or float(with_router) > float(without)


@mistake(
    symptom="`output_router_logits=True` with several microbatches and a model whose router loss is its own (Switch "
    "Transformers)",
    gets="refused on every rank before the step: how the losses of microbatches weigh is not known",
    fix="one microbatch, a criterion with a `weight(inputs)`, or `output_router_logits=False`",
    worlds=(2,),
)
def router_loss_of_another_kind(rank: int, world: int) -> None:
    config = transformers.SwitchTransformersConfig(
        vocab_size=64,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=2,
        decoder_start_token_id=0,
    )
    booster = Booster(plugin=HybridParallelPlugin(num_microbatches=2, precision="fp32"))
    model, *_ = booster.boost(transformers.SwitchTransformersForConditionalGeneration(config))
    ids = torch.randint(1, 64, (4, 6), generator=torch.Generator().manual_seed(rank))
    batch = {"input_ids": ids, "labels": ids, "output_router_logits": True}
    with refused("computes the loss of its routers in its own way", r"criterion\.weight"):
        booster.execute_pipeline(iter([batch]), model, None)
    booster.execute_pipeline(iter([{**batch, "output_router_logits": False}]), model, None)


def microbatches(booster: Booster, *sizes: tuple[int, int]) -> list[dict[str, torch.Tensor]]:
    replica = booster.plugin.data_parallel[1]  # type: ignore[union-attr]
    return [
        zoo.inputs("llama-causal-lm", batch_size=samples, seq_len=length, seed=10 * replica + index)
        for index, (samples, length) in enumerate(sizes)
    ]


@mistake(
    symptom="an iterator that gives `execute_pipeline` a plain list of microbatches",
    gets="refused on every rank: a list is a batch of positional inputs, and its entries are no tensors",
    fix="`shardwright.Microbatches([first, second])`",
)
def a_plain_list_of_microbatches(rank: int, world: int) -> None:
    booster, model, optimizer = boosted(world, num_microbatches=2)
    parts = microbatches(booster, (2, 9), (1, 12))
    with refused("if these 2 dicts are the microbatches", r"shardwright\.Microbatches\(batch\)"):
        booster.execute_pipeline(iter([parts]), model, None, optimizer)
    booster.execute_pipeline(iter([shardwright.Microbatches(parts)]), model, None, optimizer)
    with refused("not a single dict", r"Microbatches\(\[batch\]\)"):
        shardwright.Microbatches(parts[0])  # type: ignore[arg-type]
    with refused("not with the Microbatches of a step", r"booster\.execute_pipeline"):
        model(shardwright.Microbatches(parts))


@mistake(
    symptom="`shardwright.Microbatches` of another number than `num_microbatches`, or with more samples than "
    "`microbatch_size`",
    gets="refused on every rank, with both numbers",
    fix="`microbatch_size`, the most samples that one has, in place of `num_microbatches`: then a step has as many as "
    "it is given",
    worlds=(1, 2),
)
def another_number_of_microbatches(rank: int, world: int) -> None:
    booster, model, optimizer = boosted(world, num_microbatches=4)
    with refused("gave 3 ready-made microbatches, but num_microbatches=4", "set microbatch_size"):
        booster.execute_pipeline(
            iter([shardwright.Microbatches(microbatches(booster, (2, 9), (1, 12), (2, 9)))]), model, None, optimizer
        )
    booster, model, optimizer = boosted(world, microbatch_size=2)
    with refused("microbatch 1 has 3 samples, but microbatch_size=2"):
        booster.execute_pipeline(
            iter([shardwright.Microbatches(microbatches(booster, (2, 9), (3, 12)))]), model, None, optimizer
        )
    with refused(r"Microbatches\(\[\]\) has no microbatch"):
        booster.execute_pipeline(iter([shardwright.Microbatches([])]), model, None, optimizer)
    with refused("microbatch 1: a batch of type dict without any tensor"):
        given = shardwright.Microbatches([*microbatches(booster, (2, 9)), {}])
        booster.execute_pipeline(iter([given]), model, None, optimizer)
    given = shardwright.Microbatches(microbatches(booster, (2, 9), (1, 12), (2, 9)))
    booster.execute_pipeline(iter([given]), model, None, optimizer)


@mistake(
    symptom="`shardwright.Microbatches` with `zero_stage=2` or `3`, several data-parallel ranks and only "
    "`microbatch_size`",
    gets="refused on every rank: ranks exchange gradients or parameters for every microbatch, so all need equally many",
    fix="`num_microbatches=` the number that every rank has in every step",
    worlds=(2,),
)
def unknown_number_of_microbatches_with_sharded_gradients(rank: int, world: int) -> None:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", zero_stage=2, microbatch_size=2))
    model = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=2)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    given = shardwright.Microbatches(microbatches(booster, (2, 9), (1, 12)))
    with refused("need num_microbatches with zero_stage 2 or 3", "num_microbatches=2 fits this step"):
        booster.execute_pipeline(iter([given]), model, None, optimizer)


@mistake(
    symptom="`shardwright.Microbatches` of several lengths, and a criterion that counts with `torch.arange(length)`",
    gets="refused on every rank before the step: what is counted in the other microbatches could not be told ahead",
    fix="a mask that is an entry of each microbatch, or a criterion with a `weight(inputs)` of its own",
    worlds=(1, 2),
)
def counts_of_one_length(rank: int, world: int) -> None:
    def late_tokens(outputs: Any, inputs: Any) -> torch.Tensor:
        counted = ((inputs["labels"] != -100) & (torch.arange(inputs["labels"].shape[1]) > 2))[:, 1:]
        losses = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:], reduction="none")
        return (losses * counted).sum() / counted.sum()

    class Weighed:
        def __call__(self, outputs: Any, inputs: Any) -> torch.Tensor:
            return late_tokens(outputs, inputs)

        def weight(self, inputs: Any) -> torch.Tensor:
            return (inputs["labels"][:, 3:] != -100).sum()

    booster, model, optimizer = boosted(world, microbatch_size=2)
    given = shardwright.Microbatches(microbatches(booster, (2, 9), (1, 12)))
    with refused("differ in more than their number of samples", r"torch\.arange", r"criterion\.weight"):
        booster.execute_pipeline(iter([given]), model, late_tokens, optimizer)
    booster.execute_pipeline(iter([given]), model, Weighed(), optimizer)


@mistake(
    symptom="a packed row of documents whose `labels` are not -100 where documents begin, with `num_microbatches`",
    gets="refused on every rank: the row is cut between documents, and the last token of one would predict the first "
    "of the next",
    fix="transformers' `DataCollatorWithFlattening`, which sets these labels, or -100 there by hand",
    worlds=(1, 2),
)
def labels_across_documents(rank: int, world: int) -> None:
    booster, model, optimizer = boosted(world, num_microbatches=2)
    replica = booster.plugin.data_parallel[1]  # type: ignore[union-attr]
    ids = torch.randint(5, 90, (1, 14), generator=torch.Generator().manual_seed(replica))
    batch = {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(8), torch.arange(6)])[None],
        "labels": ids.clone(),
    }
    with refused(r"labels\[0, 8\]=", "DataCollatorWithFlattening", r"shardwright\.Microbatches"):
        booster.execute_pipeline(iter([batch]), model, None, optimizer)
    batch["labels"][0, 8] = -100
    booster.execute_pipeline(iter([batch]), model, None, optimizer)


def pictures(replica: int) -> dict[str, torch.Tensor]:
    """Two samples, with an image of 4 x 4 and one of 2 x 4 patches: four tokens, and two."""
    generator = torch.Generator().manual_seed(replica)
    ids = torch.randint(5, 50, (2, 9), generator=generator)
    ids[0, 1:5] = ids[1, 2:4] = IMAGE
    patches = torch.randn(16 + 8, PATCH, generator=generator)
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == IMAGE, -100),
        "mm_token_type_ids": (ids == IMAGE).int(),
    } | {
        "pixel_values": patches,
        "image_grid_thw": grid,
    }


@mistake(
    symptom="images for a model that was cut into pipeline stages with texts alone as `example_inputs`",
    gets="refused on every rank before the step: the stages were cut as for text alone",
    fix="`example_inputs=` a small batch with images and texts",
    worlds=(2,),
)
def images_that_the_cut_knew_nothing_of(rank: int, world: int) -> None:
    settings: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2, "precision": "fp32"}
    for known in (False, True):
        example = {key: value for key, value in pictures(9).items() if known or key in ("input_ids", "labels")}
        booster = Booster(plugin=HybridParallelPlugin(**settings, example_inputs=example))
        model = tiny_qwen2_vl.build()
        model, optimizer, *_ = booster.boost(model, adamw(model))
        batch = pictures(booster.plugin.data_parallel[1])  # type: ignore[union-attr]
        if known:
            booster.execute_pipeline(iter([batch]), model, None, optimizer)
            continue
        with refused("the batch has pixel_values", "example_inputs="):
            booster.execute_pipeline(iter([batch]), model, None, optimizer)


@mistake(
    symptom="`image_grid_thw` whose rows are not in the order of the samples",
    gets="refused on every rank: an image would go to another microbatch than its text",
    fix="one row per image, in the order in which the texts have them, as processors make it; or "
    "`shardwright.Microbatches`",
    worlds=(2,),
)
def images_in_another_order(rank: int, world: int) -> None:
    booster = Booster(plugin=HybridParallelPlugin(num_microbatches=2, precision="fp32"))
    model = tiny_qwen2_vl.build()
    model, *_ = booster.boost(model)
    batch = pictures(rank)
    mixed = {**batch, "image_grid_thw": batch["image_grid_thw"].flip(0)}
    with refused("those of sample 0 are not filled by whole rows of image_grid_thw", r"shardwright\.Microbatches"):
        booster.execute_pipeline(iter([mixed]), model, None)
    booster.execute_pipeline(iter([batch]), model, None)
