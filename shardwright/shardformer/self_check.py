"""Try a plan on a small copy of the model: loss, every gradient and what its forward leaves in buffers against the copy
that is whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from ..models.dry_run import call_model, meta_copy, without_data
from ..models.example_inputs import has_loss, loss_of, training_batches
from ..ops.shared_grads import sync_shared_gradients
from ..spec import get_spec
from ..utils.errors import said_in_model
from ..utils.tensors import map_tensors
from .layer.parallel_module import ParallelGroup
from .model import gathered_logits
from .patterns import without_classes
from .rng import without_dropout
from .same_weights import hash_of

TOLERANCE = 1e-4  # relative; models cast to single precision inside
_SAMPLES = 2  # of a user's batch
Apply = Callable[[nn.Module], None]


class SelfCheck:
    """Holds the whole copy and its gradients; `failures` tries plans against them.

    Every rank runs the whole copy by itself, and the sharded copies together, so all ranks get the same answers. Before
    numbers are computed, every rank runs its sharded copy without data. Where some ranks cannot, or would call other
    collectives than the others before they fail, the plan is rejected: on numbers a rank would wait for another one for
    good.

    copies          whole models; the first that a batch runs on is taken, as `whole`, with the `batch`
    example_inputs  the user's batch; None tries those that fit the kind of model
    both_forwards   try the forward without gradients too, which may be other code (torch's fast paths)

    Raises ValueError on every rank when no batch runs on any copy of some rank, or when their batches differ.
    """

    def __init__(
        self,
        copies: Iterable[nn.Module],
        parallel: ParallelGroup,
        example_inputs: Any = None,
        both_forwards: bool = False,
    ) -> None:
        self.parallel, self.reason = parallel, ""
        self._both_forwards = both_forwards
        failure = None
        try:
            self._take(copies, example_inputs)
        except Exception as error:  # of this rank alone, maybe
            failure = error
        if parallel.is_played:  # nobody to agree with, and nothing to try: `whole` and `batch` are all there is
            if failure is not None:
                raise failure
            return
        _agree_on_batches(parallel.group, failure, getattr(self, "batch", None))
        self._train()
        try:
            self._count_collectives(self.whole)
            self._runs_without_data = True
        except Exception:  # a forward that needs numbers says nothing about the plan
            self._runs_without_data = False

    def _take(self, copies: Iterable[nn.Module], example_inputs: Any) -> None:
        failures: dict[str, None] = {}
        name = ""
        for whole in _in_both_precisions(copies):
            name = type(whole).__name__
            for batch in (
                training_batches(whole)
                if example_inputs is None
                else [_own_batch(example_inputs, next(whole.parameters()).device)]
            ):
                model = copy.deepcopy(whole)
                try:
                    self.batch, self._has_loss = batch, False
                    loss, self._has_loss = self._run(model)
                except Exception as error:  # the model's own code: anything can happen on a guessed batch
                    failures[f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"] = None
                    continue
                self.whole, self._loss = whole, loss
                self._gradients = {name: param.grad for name, param in model.named_parameters()}
                self._buffers = _changed_buffers(whole, model)
                if torch.isfinite(loss) and any(gradient is not None for gradient in self._gradients.values()):
                    return
                failures["its loss is not finite, or depends on no parameter"] = None
        shown = "; ".join(list(failures)[-3:])
        if example_inputs is not None:
            raise ValueError(
                f"example_inputs: a small copy of {name} does not run on it ({shown}); give a batch as the model takes "
                "it in training, such as next(iter(dataloader)), or a policy: policy=, to the plugin custom_policy="
            )
        raise ValueError(
            f"{name} has no policy of its own, so its plan is tried on a small copy, which runs on no batch that could "
            f"be guessed ({shown}); pass example_inputs=, a batch like the real ones, to the plugin or to ShardConfig"
        )

    def _train(self) -> None:
        """Go on with the copy in training mode, without dropout, where that draws no numbers: a forward may read its
        weights in other ways there. That it evaluates afterwards as the whole copy does is tried, too: with what batch
        norms and the like have kept of the training.
        """
        self._evaluated: torch.Tensor | None = None
        training, losses = without_dropout(copy.deepcopy(self.whole)).train(), []
        copies = [copy.deepcopy(training) for _ in range(2)]
        try:
            for seed, model in enumerate(copies, 1):
                losses.append(self._run(model, seed)[0])
            gradients = [[param.grad for param in model.parameters()] for model in copies]
            differs = float(losses[0] - losses[1]) != 0 or any(
                (one is None) != (other is None) or (one is not None and not torch.equal(one, other))
                for one, other in zip(*gradients, strict=True)
            )
            differs |= not bool(torch.isfinite(losses[0]))
        except Exception:  # a forward may ask for more in training
            differs = True
        if float(self._largest(torch.tensor([float(differs)], dtype=torch.float64))):
            return
        self.whole, self._loss = training, losses[0]
        self._gradients = {name: param.grad for name, param in copies[0].named_parameters()}
        self._buffers = _changed_buffers(training, copies[0])
        with torch.no_grad():
            self._evaluated = self._forward(copies[0].eval())[0]

    def reaches(self, patterns: Iterable[str], shape_of: Callable[[str], str]) -> bool:
        """Whether the loss depends on any parameter under one of the names, which are compared as `shape_of` gives
        them.
        """
        trained = [shape_of(name) for name, gradient in self._gradients.items() if gradient is not None]
        shapes = {shape_of(without_classes(pattern)) for pattern in patterns}
        return any(name == shape or name.startswith(f"{shape}.") for shape in shapes for name in trained)

    def _run(self, model: nn.Module, seed: int = 1) -> tuple[torch.Tensor, bool]:
        """The loss, whose gradients are left on the parameters, and whether the model computed it itself."""
        loss, has_own = self._forward(model, seed)
        loss.backward()
        return loss.detach(), has_own

    def _forward(self, model: nn.Module, seed: int = 1) -> tuple[torch.Tensor, bool]:
        # A loss of ours is made from whole logits.
        with torch.random.fork_rng(devices=[]), nullcontext() if self._has_loss else gathered_logits(model):
            torch.manual_seed(seed)
            outputs = call_model(model, self.batch)
            return loss_of(outputs), has_loss(outputs)

    def failures(self, apply: Apply) -> list[str] | None:
        """Names of parameters with wrong gradients and of buffers with wrong numbers ("loss" for the loss) on any rank;
        None when the plan or the forward fails, `reason` says with what on this rank.

        apply   shards the copy that it is given
        """
        self.reason = ""
        model = copy.deepcopy(self.whole)
        error = torch.zeros(len(self._gradients) + len(self._buffers) + 2, dtype=torch.float64)
        try:
            apply(model)
            applied = True
        except Exception as failure:  # a wrong proposal may fit no module
            applied = False
            self._note(failure)
        if not self._agree(model if applied else None):
            return None
        try:
            loss, _ = self._run(model)
            sync_shared_gradients(model.parameters(), self.parallel.group)
            error[1] = abs(float(loss - self._loss)) / max(1.0, abs(float(self._loss)))
            self._compare(model, error[2:])
            self._compare_buffers(model, error[2 + len(self._gradients) :])
            expected = self._loss if self._evaluated is None else self._evaluated
            if self._both_forwards or self._evaluated is not None:
                with torch.no_grad():
                    again, _ = self._forward(model.eval())
                error[1] += abs(float(again - expected)) / max(1.0, abs(float(expected)))
        except Exception as failure:  # a wrong proposal may fail anywhere in a foreign forward
            error[0] = 1.0
            self._note(failure)
        error = self._largest(torch.nan_to_num(error, nan=torch.inf))
        if error[0] > 0:
            return None
        names = ["loss", *self._gradients, *self._buffers]
        return [name for name, value in zip(names, error[1:].tolist(), strict=True) if value > TOLERANCE]

    def _note(self, failure: BaseException | None) -> None:
        self.reason = said_in_model(failure)

    def _agree(self, model: nn.Module | None) -> bool:
        """Whether all ranks call as many collectives, up to the end of the forward or a failure; None has failed
        already.
        """
        failed, count = model is None, 0
        if model is not None and self._runs_without_data:
            try:
                count = self._count_collectives(model)
            except _DryRunError as error:
                failed, count = True, error.collectives
                self._note(error.__cause__)
        state = torch.tensor([failed, -float(failed), count, -count], dtype=torch.float64)
        most_failed, least_failed, most, least = self._largest(state).tolist()
        return most_failed == -least_failed and most == -least and (model is not None)

    def _count_collectives(self, model: nn.Module) -> int:
        """How many collectives a forward on tensors without data calls."""
        copied = meta_copy(model).train(model.training)
        batch = map_tensors(lambda tensor: tensor.to("meta"), self.batch)
        with without_data() as made_up, nullcontext() if self._has_loss else gathered_logits(copied):
            try:
                loss_of(call_model(copied, batch))
            except Exception as error:
                raise _DryRunError(made_up.collectives) from error
        return made_up.collectives

    def _largest(self, values: torch.Tensor) -> torch.Tensor:
        values = values.to(next(self.whole.parameters()).device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.parallel.group)
        return values

    def _compare(self, model: nn.Module, error: torch.Tensor) -> None:
        index = {name: position for position, name in enumerate(self._gradients)}
        gradients = [each for each in self._gradients.values() if each is not None and each.numel()]
        largest = max(float(gradient.abs().max()) for gradient in gradients)
        for name, param in model.named_parameters():
            expected, spec = self._gradients[name], get_spec(param)
            if expected is None or not param.numel():
                continue
            local = expected if spec is None else spec.shard(expected, self.parallel.rank)
            actual = param.grad if param.grad is not None else torch.zeros_like(param)
            scale = max(float(expected.abs().max()), 1e-3 * largest, 1e-12)
            error[index[name]] = float((actual - local).abs().max()) / scale

    def _compare_buffers(self, model: nn.Module, error: torch.Tensor) -> None:
        """Those that the forward changes, which every rank keeps whole."""
        held = dict(model.named_buffers())
        for place, (name, expected) in enumerate(self._buffers.items()):
            if expected.numel():
                difference = (held[name].double() - expected.double()).abs().max()
                error[place] = float(difference) / max(float(expected.double().abs().max()), 1e-12)


def _changed_buffers(before: nn.Module, after: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers of a model that has run, by name, that are others than those of the same model before."""
    known = dict(before.named_buffers())
    return {
        name: buffer.detach().clone()
        for name, buffer in after.named_buffers()
        if name in known and known[name].shape == buffer.shape and not torch.equal(known[name], buffer)
    }


def _agree_on_batches(group: dist.ProcessGroup, failure: Exception | None, batch: Any) -> None:
    """Every rank raises where some rank has failed, or where they have different batches. Collective."""
    described = ""
    if failure is None:
        try:
            described = _described(batch)
        except Exception as unreadable:  # no numbers, or an entry that cannot be shown
            failure = ValueError(
                f"example_inputs cannot be compared between ranks ({type(unreadable).__name__}: {unreadable}); give a "
                "batch of "
                "tensors with numbers, such as next(iter(dataloader))"
            )
    said = (
        None if failure is None else f"{type(failure).__name__ * (type(failure) is not ValueError)} {failure}".strip()
    )
    mine = (said, described)
    found: list[tuple[str | None, str]] = [mine] * group.size()
    dist.all_gather_object(found, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    if all(error is not None and error == said for error, _ in found):
        assert failure is not None
        raise failure
    for rank, (error, _) in zip(ranks, found, strict=True):
        if error is not None:
            raise ValueError(
                f"rank {rank} has no batch for the check that ranks do together: {error}. Give all "
                "ranks that share the model the same example_inputs="
            ) from failure
    for rank, (_, described) in zip(ranks, found, strict=True):
        if described != found[0][1]:
            raise ValueError(
                f"example_inputs differs between ranks that share one model: rank {ranks[0]} has {found[0][1]}, rank "
                f"{rank} has {described}; give all of them the same batch"
            )


def _described(batch: Any) -> str:
    """The batch in words, which differ where batches do."""
    if isinstance(batch, Mapping):  # in any order
        batch = dict(sorted(batch.items(), key=lambda entry: str(entry[0])))
    words = map_tensors(lambda tensor: f"{list(tensor.shape)} {tensor.dtype} ({hash_of(tensor)})", batch)
    return str(words).replace("torch.", "")


def _in_both_precisions(copies: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The copies as they are, then in single precision, as a forward may make tensors in no other."""
    tried = []
    for whole in copies:
        yield whole
        tried.append(whole)
    for whole in tried:
        yield whole.float()


class _DryRunError(Exception):
    """A forward without data failed, after so many collectives."""

    def __init__(self, collectives: int) -> None:
        super().__init__(collectives)
        self.collectives = collectives


def _own_batch(batch: Any, device: torch.device) -> Any:
    """The first samples of a user's batch, in double precision."""
    if isinstance(batch, Mapping):
        batch = dict(batch)  # what tokenizers return is no dict
    found: list[torch.Tensor] = []
    map_tensors(found.append, batch)
    rows = {len(tensor) if tensor.dim() else 0 for tensor in found}
    alike = len(rows) == 1

    def take(tensor: torch.Tensor) -> torch.Tensor:
        tensor = (tensor[:_SAMPLES] if alike and tensor.dim() else tensor).detach().to(device)
        return tensor.double() if tensor.is_floating_point() else tensor

    return map_tensors(take, batch)
