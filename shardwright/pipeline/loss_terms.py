"""Loss terms inside a model's own head: found, and scaled to the whole batch, while the head runs.

A head computes means (`cross_entropy(..., reduction="mean")`) over the tokens of its microbatch. A mean over the whole batch is not
the mean of such means when the microbatches have unequal numbers of tokens. So while the part behind the last layer runs, calls of the
loss functions in `_LOSSES` are answered with

    sum over this microbatch's elements / number of elements of the whole batch

The divisor must be known when the first microbatch runs. It depends on the targets of all microbatches, which are made from the
batch's labels by the head (shifted, clamped, flattened, selected). These steps are recorded for the first microbatch (`Recipe`) and
repeated on the labels of the others, so no rule per head is needed and heads with several terms get a divisor for each.

The loss is the sum over microbatches only if it is a linear function of the terms; that is tracked as well (`linear`), so that a
loss with a part of another kind is refused instead of being wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..ops.vocab_mode import sharded_cross_entropy
from ..utils import pytree
from .microbatch import items_of

_SIGNATURES = {
    function: inspect.signature(function)
    for function in (
        F.cross_entropy,
        sharded_cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
    )
}
_BY_CLASS = (F.cross_entropy, sharded_cross_entropy, F.nll_loss)  # their targets are class indices, with an ignore index
# What keeps a linear function of the terms linear, by the name of the torch function.
_SUMS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__", "__rsub__", "stack", "cat"})
_QUOTIENTS = frozenset({"div", "div_", "true_divide", "__truediv__", "__itruediv__", "__div__"})
_PRODUCTS = _QUOTIENTS | {"mul", "mul_", "__mul__", "__rmul__", "__imul__"}
_READ_BY_HOST = frozenset({"item", "__int__", "__float__", "tolist"})
_SAME = frozenset(
    {"to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda", "detach", "clone", "contiguous", "neg", "__neg__"}
    | {"sum", "mean", "squeeze", "unsqueeze", "view", "reshape", "flatten"}
)


@dataclass(frozen=True)
class Recipe:
    """How a tensor was made from the entries of the microbatch: an entry itself, or a function of recipes and constants."""

    key: Any = None
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    output: int = 0  # which tensor of the function's result
    in_place: bool = False  # the result is the changed first argument

    def make(self, entries: Mapping[Any, Any]) -> torch.Tensor:
        """The tensor for another microbatch."""
        if self.function is None:
            return entries[self.key]
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs or {})))
        args, kwargs = pytree.tree_unflatten([leaf.make(entries) if isinstance(leaf, Recipe) else leaf for leaf in leaves], spec)
        if self.in_place:
            target = args[0].clone()
            self.function(target, *args[1:], **kwargs)
            return target
        return [leaf for leaf in pytree.tree_leaves(self.function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)][self.output]


@dataclass(frozen=True)
class Elements:
    """What a term averages over: `count(entries)` of one microbatch, as a number or a 0-d tensor."""

    count: Callable[[Mapping[Any, Any]], int | torch.Tensor]


class TermWatcher(TorchFunctionMode):
    """Active while the part of the model behind its last layer, and the criterion, run for one microbatch.

    divide(index, elements) -> number of elements of the whole batch for term number `index`
    """

    def __init__(self, microbatch: Any, divide: Callable[[int, Elements], torch.Tensor]) -> None:
        super().__init__()
        self.entries = dict(items_of(microbatch))
        self._divide = divide
        self._recipes: dict[int, tuple[torch.Tensor, Recipe]] = {
            id(value): (value, Recipe(key)) for key, value in self.entries.items() if isinstance(value, torch.Tensor)
        }
        self._linear: dict[int, torch.Tensor] = {}
        self.num_terms = 0
        self.counts_itself = False  # something was divided by a number that follows from the batch: a mean written by hand

    def is_linear(self, loss: torch.Tensor) -> bool:
        """Whether `loss` is a sum of multiples of the terms found."""
        return id(loss) in self._linear

    def recipe_of(self, tensor: Any) -> Recipe | None:
        found = self._recipes.get(id(tensor))
        return found[1] if found is not None else None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _SIGNATURES:
            bound = _SIGNATURES[func].bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["reduction"] == "mean" and bound.arguments["size_average"] is None and bound.arguments["reduce"] is None:
                return self._term(func, dict(bound.arguments))
        result = func(*args, **kwargs)
        self._trace(func, args, kwargs, result)
        return result

    def _term(self, func: Callable[..., Any], arguments: dict[str, Any]) -> torch.Tensor:
        elements = _class_elements(self, func, arguments) if _has_class_targets(func, arguments) else _plain_elements(self, func, arguments)
        divisor = self._divide(self.num_terms, elements)
        self.num_terms += 1
        if arguments["input"].dtype == torch.float16:
            arguments["input"] = arguments["input"].float()  # a sum over many tokens exceeds the range of float16
        total = func(**{**arguments, "reduction": "sum"})
        term = total / divisor.to(device=total.device, dtype=total.dtype)
        self._linear[id(term)] = term
        return term

    def _trace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return
        name = getattr(func, "__name__", "")
        in_place = (
            name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name.endswith("__"))
        )
        known = all(id(tensor) in self._recipes for tensor in tensors)
        if in_place and isinstance(args[0], torch.Tensor):
            self._change(func, args, kwargs, known)
        elif known:
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if name in ("view", "reshape") and isinstance(result, torch.Tensor) and result.dim():
                # Written with the sizes of this microbatch, perhaps; the first one varies with its samples.
                func, args, kwargs = torch.reshape, (args[0], (-1, *result.shape[1:])), {}
            named_args, named_kwargs = self._named((args, kwargs))
            for index, tensor in enumerate(made):
                if id(tensor) not in self._recipes:
                    self._recipes[id(tensor)] = (tensor, Recipe(None, func, named_args, named_kwargs, index))
        divisor = args[1] if name in _QUOTIENTS and len(args) > 1 else args[0] if name in _READ_BY_HOST else None
        self.counts_itself |= isinstance(divisor, torch.Tensor) and divisor.dim() == 0 and self.recipe_of(divisor) is not None
        if isinstance(result, torch.Tensor) and self._linear:
            if self._stays_linear(name, args, kwargs, tensors):
                self._linear[id(result)] = result
            elif in_place:
                self._linear.pop(id(args[0]), None)

    def _change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: bool) -> None:
        """An in-place operation: views of the same memory are unknown from now on, and the tensor is what the operation made of it."""
        target = args[0]
        if target.device.type == "meta":
            return
        named_args, named_kwargs = self._named((args, kwargs))
        memory = target.untyped_storage().data_ptr()
        for key in [key for key, (tensor, _) in self._recipes.items() if tensor.untyped_storage().data_ptr() == memory]:
            del self._recipes[key]
        if known and not target._is_view():
            self._recipes[id(target)] = (target, Recipe(None, func, named_args, named_kwargs, in_place=True))

    def _named(self, tree: Any) -> Any:
        return pytree.tree_map(lambda leaf: self.recipe_of(leaf) or leaf, tree)

    def _stays_linear(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> bool:
        linear = [id(tensor) in self._linear for tensor in tensors]
        if not any(linear):
            return False
        numbers = [leaf for leaf in pytree.tree_leaves(args[:2]) if isinstance(leaf, int | float)]
        if name in _SUMS:
            return all(linear) and (name in ("stack", "cat") or not any(numbers))
        if name in _PRODUCTS:
            others = [tensor for tensor, is_linear in zip(tensors, linear, strict=True) if not is_linear]
            same_everywhere = all(isinstance(other, torch.nn.Parameter) for other in others)
            divided = name in ("__rdiv__", "__rtruediv__")
            return sum(linear) == 1 and same_everywhere and not divided and isinstance(args[0], torch.Tensor) and linear[0]
        return name in _SAME and linear[0] and sum(linear) == 1


def _has_class_targets(func: Any, arguments: Mapping[str, Any]) -> bool:
    return func in _BY_CLASS and not arguments["target"].is_floating_point()


def _class_elements(watcher: TermWatcher, func: Any, arguments: Mapping[str, Any]) -> Elements:
    """Targets that are not ignored, each with the weight of its class."""
    target, weight, ignored = arguments["target"], arguments["weight"], arguments["ignore_index"]
    recipe = watcher.recipe_of(target)

    def count_in(targets: torch.Tensor) -> torch.Tensor:
        valid = targets != ignored
        if weight is None:
            return valid.sum()
        return (weight.detach()[targets.clamp(0, len(weight) - 1)] * valid).sum()

    if recipe is None:
        raise ValueError(
            f"the loss of this model cannot be made that of the whole batch: the targets of {func.__name__}, of shape "
            f"{tuple(target.shape)}, do not follow from the batch's entries ({', '.join(map(str, watcher.entries))}) alone, so their "
            "number in other microbatches is unknown. Pass a criterion with criterion.weight(inputs) -> number, or use one microbatch"
        )
    return Elements(lambda entries: count_in(recipe.make(entries)))


def _plain_elements(watcher: TermWatcher, func: Any, arguments: Mapping[str, Any]) -> Elements:
    """All elements of the loss: as many as the targets, or in proportion to the samples where the targets are computed."""
    target, logits = arguments["target"], arguments["input"]
    if func in _BY_CLASS:  # probabilities of classes: one element per distribution, classes on dim 1 (dim 0 without a batch dim)
        elements = logits.numel() // logits.shape[1 if logits.dim() > 1 else 0]
    else:
        elements = torch.broadcast_shapes(target.shape, logits.shape).numel()
    recipe = watcher.recipe_of(target)
    if recipe is not None and target.numel() and elements % target.numel() == 0:
        ratio = elements // target.numel()
        return Elements(lambda entries: recipe.make(entries).numel() * ratio)
    if recipe is not None and elements and target.numel() % elements == 0:
        ratio = target.numel() // elements
        return Elements(lambda entries: recipe.make(entries).numel() // ratio)
    samples = watcher.entries.get(SAMPLES)
    assert samples
    if elements % samples:
        raise ValueError(
            f"the loss of this model cannot be made that of the whole batch: {func.__name__} averages over {elements} elements for "
            f"{samples} samples. Pass a criterion with criterion.weight(inputs) -> number, or use one microbatch"
        )
    return Elements(lambda entries: elements // samples * entries[SAMPLES])


SAMPLES = "<samples>"  # entry that holds the number of samples of a microbatch
