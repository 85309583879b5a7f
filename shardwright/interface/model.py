"""The wrapper around a boosted model, and what the model inside of it answers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol

from torch import nn

from .optimizer import OptimizerWrapper

Answer = Callable[..., Any]


class WholeModel(Protocol):
    """What a boosted model answers for the whole model, of which this rank may hold a part.

    split    how the weights are split over ranks, in the words of the plugin's settings; "" where every rank holds all
             of them
    guards   answers of the module inside the wrapper, by name of the method:
             `answer(module, native method, *args, **kwargs)`
    """

    split: str

    @property
    def guards(self) -> Mapping[str, Answer]: ...

    def num_parameters(self, only_trainable: bool, exclude_embeddings: bool) -> int: ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any: ...

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> Any: ...


class ModelWrapper(nn.Module):
    """Calls the module it wraps and gives it back on request.

    Names of parameters, buffers and modules, state-dict keys and attributes are those of the wrapped module, so that
    scripts written for the plain model (`model.config`, `model.generate`, `model.eval()`) keep working. Once sealed,
    attributes are set on that module too.
    """

    _whole: WholeModel | None = None
    input_guard: Any = None  # what checks its batches, put there by the booster

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._optimizer: weakref.ref[OptimizerWrapper] | None = None

    def _trained_by(self, optimizer: OptimizerWrapper | None) -> None:
        """Note who lays out the parameters; not owned, since the optimizer knows the model."""
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def _running(self) -> AbstractContextManager[None]:
        """Context of everything that runs the model."""
        optimizer = None if self._optimizer is None else self._optimizer()
        return nullcontext() if optimizer is None else optimizer.plain_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `optimizer.zero_grad()`, where boost returned an optimizer that keeps gradients in buffers of its own."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None:
            super().zero_grad(set_to_none)
        else:
            optimizer.zero_grad(set_to_none)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def unwrap(self) -> nn.Module:
        """The HuggingFace module: this rank's part of it where the plugin shards."""
        module = self.module
        return module.unwrap() if isinstance(module, ModelWrapper) else module

    def check_batch(self, batch: Any) -> None:
        """ValueError, without any communication, for a batch that `execute_pipeline` could not run."""

    def seal(self, whole: WholeModel) -> None:
        """Boosting is done: from here on `whole` answers what is asked of the model."""
        guard(self.unwrap(), whole.guards, whole.split)
        self._whole = whole

    # What belongs to the module inside, or to the whole model.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model's, where this rank holds the whole model; refused where it holds a part."""
        if self._whole is not None and self._whole.split:
            raise ValueError(
                f"model.state_dict() of {type(self.unwrap()).__name__} under {self._whole.split}: this rank holds a "
                "part of the model, which would load nowhere else. booster.save_model(model, path) writes the whole "
                "model, as from_pretrained reads it; booster.save(path, model=model, optimizer=optimizer) what a "
                "resume needs; model.local_state_dict() is this rank's part"
            )
        return self.local_state_dict(*args, **kwargs)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What this rank holds, under the names of the whole model: for the same layout only.
        `load_local_state_dict` takes it back.
        """
        return self.unwrap().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take the whole model's state dict. Where weights are split, every rank calls this with all of them."""
        if self._whole is None:
            return self.unwrap().load_state_dict(state_dict, strict=strict, assign=assign)
        return self._whole.load_state_dict(state_dict, strict, assign)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Take back what `local_state_dict` gave."""
        if self._whole is None:
            return self.unwrap().load_state_dict(state_dict, strict=strict)
        return self._whole.load_local_state_dict(state_dict, strict)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Parameters of the whole model, whatever this rank holds of it."""
        if self._whole is None:
            return count_parameters(self.unwrap(), only_trainable, exclude_embeddings)
        return self._whole.num_parameters(only_trainable, exclude_embeddings)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.unwrap().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.unwrap().named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self.unwrap().named_modules(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # how python copies and pickles the module inside is not how to do it here
            if name == "module" or name.startswith("__"):
                raise
            return getattr(self.unwrap(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._whole is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
            return
        if isinstance(value, nn.Module | nn.Parameter) or name in self._modules:
            self._refuse_new(name)
        setattr(self.unwrap(), name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if self._whole is not None:
            self._refuse_new(name)
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if self._whole is not None:
            self._refuse_new(name)
        super().register_parameter(name, param)

    def _refuse_new(self, name: str) -> NoReturn:
        raise ValueError(
            f"model.{name} = ... after boost: a module or parameter that comes now would be neither laid out over the "
            "ranks nor trained; change the model before booster.boost, and build the optimizer after the change"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles."""
        if self._whole is None:
            return super().__reduce_ex__(protocol)
        raise ValueError(
            "copying or pickling a boosted model (copy.deepcopy(model), torch.save(model, ...)): it shares buffers, "
            "hooks and groups with its optimizer. Copy the model before booster.boost; booster.save_model(model, path) "
            "writes it; for an average of the weights keep {name: param.detach().clone() for name, param in "
            "model.named_parameters()}, which is this rank's share"
        )


def count_parameters(module: Any, only_trainable: bool, exclude_embeddings: bool) -> int:
    """As transformers counts, or for other modules as torch does."""
    if hasattr(module, "num_parameters"):
        count: int = module.num_parameters(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
        return count
    embeddings = (
        {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
        if exclude_embeddings
        else set()
    )
    params = (param for param in module.parameters() if id(param) not in embeddings)
    return sum(param.numel() for param in params if param.requires_grad or not only_trainable)


def guard(module: nn.Module, answers: Mapping[str, Answer], split: str) -> None:
    """Let `module` answer by `answers[name](module, native method, ...)` where it has a method of that name.

    It gets a subclass of its class, so that a script that kept the plain model, or unwraps the boosted one, is answered
    too. A copy of the module is its owner's where the weights are whole; a copy of a part does nothing that is meant
    for a whole model.
    """
    base: Any = type(module)
    original = weakref.ref(module)

    def method(name: str, answer: Answer) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            native = getattr(super(guarded, self), name, None)
            if native is None:  # of a module inside, which peft's wrappers look up
                native = base.__getattr__(self, name)
            if original() is self:
                return answer(self, native, *args, **kwargs)
            if split and name not in _HARMLESS:
                raise ValueError(
                    f"{name} of a copy of this rank's part of a model ({split}): call it on the model "
                    "that boost returned"
                )
            return native(*args, **kwargs)

        call.__name__ = name
        return call

    methods = {name: method(name, answer) for name, answer in answers.items() if hasattr(module, name)}
    rest = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__qualname__": base.__qualname__,
        "_guarded": original,
    }
    guarded = type(base.__name__, (base,), {**methods, **rest})
    module.__class__ = guarded


_HARMLESS = ("zero_grad", "_apply", "__setattr__")


def is_guarded(module: nn.Module) -> bool:
    """Whether boosting took this very module; its copies are free."""
    original = getattr(type(module), "_guarded", None)
    return original is not None and original() is module
