"""Heads that compute their logits only for those who read them: for losses that do without.

A head over the vocabulary returns `kernels.lazy_logits.LazyLogits` while a loss is wanted of the forward that runs, and
there are so many tokens that it gains by it.
Which heads: those that sharding has made `LogitsParallel`, and on one rank what the model calls its output embeddings;
of them linears that compute x W^T + b and nothing else. Heads keep identity, names and parameters; their class becomes
a subclass of what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..comm.compat import hooks_of_all_modules, runs_in_checkpoint
from ..kernels.lazy_logits import Clock, Head, LazyLogits, is_loss_wanted
from ..kernels.linear_cross_entropy import tokens_at_a_time
from ..ops.vocab_mode import as_scripts_see, in_forward, mark_vocab_sharded
from ..ops.vocab_shard import VocabShard
from .adapters import native_model
from .layer.embedding import LogitsParallel
from .layer.linear import computes_plainly, is_conv1d
from .layer.parallel_module import ParallelModule, combined_class


class FusedHead(nn.Module):
    """See `kernels.lazy_logits.Head`."""

    weight: Tensor
    bias: Tensor | None
    shard: VocabShard | None
    clock: Clock

    def forward(self, x: Tensor, *, then: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None) -> Any:
        if then is not None:
            return then(x, self.weight, self.bias)
        if not self._may_wait(x):
            return super().forward(x)  # type: ignore[misc]
        logits = LazyLogits.of(cast(Head, self), x)
        if self.shard is None:
            return logits
        marked = mark_vocab_sharded(logits, self.shard)
        return marked if in_forward() else as_scripts_see(marked)

    def _may_wait(self, x: Any) -> bool:
        return (
            is_loss_wanted()
            and "forward" not in vars(self)  # which somebody has put around this one
            and isinstance(x, Tensor)
            and not torch.is_inference_mode_enabled()
            and not any(tensor.is_inference() for tensor in (x, self.weight))
            and not runs_in_checkpoint()
            and x.dtype == self.weight.dtype
            and not x.is_meta
            and x.numel() > x.shape[-1] * tokens_at_a_time(x.device, self.weight.shape[0])
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled(x.device.type)
            and not getattr(self, "gather_output", False)
            and not getattr(self, "in_sum", False)
            and not _is_watched(self)
        )


def _is_watched(module: nn.Module) -> bool:
    """Whether a script's hooks look at what the head is given and returns."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values())
    hooks += (*module._backward_pre_hooks.values(), *hooks_of_all_modules())
    return any(not getattr(hook, "of_layout", False) for hook in hooks)


def fusable_heads(model: nn.Module) -> list[nn.Linear]:
    """Heads whose logits can wait."""
    heads: list[Any] = [module for module in model.modules() if isinstance(module, LogitsParallel)]
    for root in (model, native_model(model)):
        find = getattr(root, "get_output_embeddings", None)
        found = find() if callable(find) else None
        if isinstance(found, nn.Linear) and found not in heads:
            heads.append(found)
    return [head for head in heads if _is_plain(head)]


def _is_plain(head: nn.Module) -> bool:
    sharded_otherwise = isinstance(head, ParallelModule) and not isinstance(head, LogitsParallel)
    return not (sharded_otherwise or is_conv1d(head) or not computes_plainly(head) or hasattr(head, "parametrizations"))


def let_losses_do_without_logits(model: nn.Module, clock: Clock) -> int:
    """Let the heads of `model` return lazy logits; how many do. `clock` tells of changes to their weights."""
    count = 0
    for head in fusable_heads(model):
        head.__class__ = combined_class(FusedHead, type(head))
        head.shard = head.vocabulary if isinstance(head, LogitsParallel) else None  # type: ignore[assignment]
        head.clock = clock  # type: ignore[assignment]
        count += 1
    return count


def heads_without_logits(model: nn.Module) -> list[nn.Module]:
    """Those that return lazy logits."""
    return [module for module in model.modules() if isinstance(module, FusedHead)]
