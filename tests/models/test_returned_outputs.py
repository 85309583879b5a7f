"""Outputs of a batch that ran in microbatches, of uneven weight: losses in them are those of the whole batch."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright import Booster
from shardwright.pipeline.batch.microbatch import split_batch
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, run_ranks
from shardwright.utils.objects import tensors_within
from tests.models.evaluated_nets import Found, Inner, loss_of
from tests.models.side_doors import Net, batch


class Several(Net):
    """Losses by name, in a tuple and in an object."""

    form = "dict"

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = loss_of(logits, labels)
        if self.form == "tuple":
            return loss, (logits, {"triple": 3 * loss})
        if self.form == "object":
            return Found(loss, logits, Inner(loss_of(logits * 0.5, labels), "of softer logits"))
        return {"loss": loss, "logits": logits, "parts": {"triple": 3 * loss}}


def twice(outputs: Any, inputs: Any) -> Tensor:
    """Another loss than the one in the outputs."""
    logits = outputs[1][0] if isinstance(outputs, tuple) else getattr(outputs, "logits", None)
    return 2 * loss_of(outputs["logits"] if logits is None else logits, inputs["labels"])


def returned(rank: int, world: int, stages: int) -> None:
    """Data-parallel ranks have parts of one batch, of different sizes."""
    for form in ("dict", "tuple", "object"):
        plugin = HybridParallelPlugin(
            pp_size=stages, precision="fp32", example_inputs=batch(5), custom_policy="auto", num_microbatches=2
        )
        torch.manual_seed(0)
        plain = Several().double()
        plain.form = form
        model = copy.deepcopy(plain)
        booster = Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
        whole = batch(1)
        mine = slice(None) if world == stages else (slice(0, 2) if rank < world // 2 else slice(2, None))
        share = {key: value[mine] for key, value in whole.items()}
        want = plain(**whole)
        for given, with_loss in product((optimizer, None), (True, False)):
            found = booster.execute_pipeline(
                iter([share]), boosted, twice, given, return_loss=with_loss, return_outputs=True
            )
            if found["outputs"] is None:
                continue
            if with_loss:
                torch.testing.assert_close(found["loss"], twice(want, whole), rtol=1e-10, atol=1e-10)
            for one, two in zip(tensors_within(found["outputs"]), tensors_within(want), strict=True):
                if two.dim() or with_loss or given is not None:  # else nobody counts what the losses are means of
                    torch.testing.assert_close(one, two[mine] if two.dim() else two, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 2), (2, 1)])
def test_losses_in_outputs_are_of_the_whole_batch(ranks: int, stages: int) -> None:
    run_ranks(returned, ranks, stages)


def test_rows_of_samples_within_an_entry_are_refused() -> None:
    given = batch(1) | {"more": {"scales": [torch.ones(5)]}}
    with pytest.raises(ValueError, match=r"entry 'more' is a dict with a tensor of shape \(5,\) in it"):
        split_batch(given, 2)
    (whole,) = split_batch(given, 1)
    assert whole["more"] is given["more"]
