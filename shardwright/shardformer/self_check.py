"""Try a plan on a small copy of the model: loss and every gradient against the copy that is whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.shardformer.layer.parallel_module import ParallelGroup
from shardwright.spec import get_spec

TOLERANCE = 1e-4  # relative; models cast to single precision inside
Apply = Callable[[nn.Module], None]


class SelfCheck:
    """Holds the whole copy and its gradients; `failures` tries plans against them.

    Every rank runs the whole copy by itself, and the sharded copies together, so all ranks get the same answers.
    """

    def __init__(self, whole: nn.Module, parallel: ParallelGroup) -> None:
        self.whole = whole
        self.parallel = parallel
        self._inputs = _inputs(whole)
        self._loss = self._run(copy.deepcopy(whole), keep=True)

    def _run(self, model: nn.Module, keep: bool = False) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            outputs = model(**self._inputs)
        outputs.loss.backward()
        if keep:
            self._gradients = {name: param.grad for name, param in model.named_parameters()}
        return outputs.loss.detach()

    def failures(self, apply: Apply) -> list[str] | None:
        """Names of parameters with wrong gradients ("loss" for the loss) on any rank; None when the plan or the forward fails.

        apply   shards the copy that it is given
        """
        model = copy.deepcopy(self.whole)
        error = torch.zeros(len(self._gradients) + 2, dtype=torch.float64)
        try:
            apply(model)
            loss = self._run(model)
            sync_shared_gradients(model.parameters(), self.parallel.group)
            error[1] = abs(float(loss - self._loss)) / max(1.0, abs(float(self._loss)))
            self._compare(model, error[2:])
        except Exception:  # a wrong proposal may fail anywhere in a foreign forward
            error[0] = 1.0
        error = torch.nan_to_num(error, nan=torch.inf)
        device = next(self.whole.parameters()).device
        error = error.to(device)
        dist.all_reduce(error, op=dist.ReduceOp.MAX, group=self.parallel.group)
        if error[0] > 0:
            return None
        names = ["loss", *self._gradients]
        return [name for name, value in zip(names, error[1:].tolist(), strict=True) if value > TOLERANCE]

    def _compare(self, model: nn.Module, error: torch.Tensor) -> None:
        index = {name: position for position, name in enumerate(self._gradients)}
        largest = max(float(gradient.abs().max()) for gradient in self._gradients.values() if gradient is not None)
        for name, param in model.named_parameters():
            expected, spec = self._gradients[name], get_spec(param)
            if expected is None or not param.numel():
                continue
            local = expected if spec is None else spec.shard(expected, self.parallel.rank)
            actual = param.grad if param.grad is not None else torch.zeros_like(param)
            scale = max(float(expected.abs().max()), 1e-3 * largest, 1e-12)
            error[index[name]] = float((actual - local).abs().max()) / scale


def _inputs(model: nn.Module) -> dict[str, Any]:
    """Two sequences with labels, one of them padded."""
    generator = torch.Generator().manual_seed(2)
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    ids = torch.randint(5, min(config.vocab_size, 99), (2, 12), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return inputs if getattr(config, "is_encoder_decoder", False) else {**inputs, "use_cache": False}
