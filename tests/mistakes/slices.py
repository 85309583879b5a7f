"""Mistakes with sequences that are cut into slices."""

from __future__ import annotations

import torch

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, zoo

from .table import mistake, refused


@mistake(
    symptom="`num_sequence_slices` without a pipeline, to save memory",
    gets="refused: all slices would be held until the first backward, as the whole sequence is",
    fix="activation checkpointing or fewer samples in a microbatch; `pp_size` of at least 2 for slices",
)
def slices_without_a_pipeline(rank: int, world: int) -> None:
    with refused("num_sequence_slices=2 with pp_size=1"):
        HybridParallelPlugin(num_sequence_slices=2, num_microbatches=2)
    HybridParallelPlugin(num_microbatches=2)


@mistake(
    symptom="`num_sequence_slices` with an encoder (BERT), an encoder-decoder or a recurrent model",
    gets="refused when the model is boosted, with what looks at more than keys and values of earlier tokens",
    fix="a causal decoder, or `num_sequence_slices=1`",
    worlds=(2,),
)
def slices_of_an_encoder(rank: int, world: int) -> None:
    model = zoo.build("bert-masked-lm")
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2, num_sequence_slices=2, precision="fp32")
    with refused("num_sequence_slices=2: sequences of BertForMaskedLM cannot be cut", "use num_sequence_slices=1"):
        Booster(plugin=plugin).boost(model, adamw(model))


@mistake(
    symptom="packed rows (`position_ids` that begin anew, no `attention_mask`) with `num_sequence_slices`",
    gets="refused in the step: models keep packed documents apart only where they get the whole row",
    fix="`num_sequence_slices=1` for packed rows; an `attention_mask` of ones where `position_ids` are no sign of "
    "packing",
    worlds=(2,),
)
def packed_rows_in_slices(rank: int, world: int) -> None:
    model = zoo.build("llama-causal-lm")
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=1, num_sequence_slices=2, precision="fp32")
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, adamw(model))
    batch = zoo.inputs("llama-causal-lm", batch_size=2, seq_len=8)
    batch["position_ids"] = torch.arange(8).remainder(5).expand(2, 8)
    mask = batch.pop("attention_mask")
    with refused("position_ids but no attention_mask"):
        booster.execute_pipeline(iter([batch]), boosted, None, optimizer)
    batch["attention_mask"] = mask
    booster.execute_pipeline(iter([batch]), boosted, None, optimizer)
