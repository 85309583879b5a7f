"""What a boosted model answers when it is asked as if it were the whole, plain model: `save_pretrained`,
`num_parameters`, `to`.

Each call is right whatever the layout, or refused on every rank with what to call instead. Where every rank holds all
weights, files are written by rank 0 and other ranks return at once, so that a call on all ranks and one under
`if rank == 0` do the same. Where the weights are split, saving is a call of all ranks.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn

from ..interface.model import Answer, ModelWrapper, count_parameters
from ..models.config import text_config
from ..plugins.base import Plugin, unwrapped
from ..precision.optimizer import MixedPrecisionOptimizer
from ..utils.errors import nearest
from ..utils.tensors import is_unmoved
from .checkpoints import Checkpoints

Native = Callable[..., Any]

# Why a change is refused once the model is boosted, and what to do instead; by the name of the method.
_BEFORE = "call it before booster.boost, and build the optimizer after it"
_CHANGES = {
    "resize_token_embeddings": _BEFORE,
    "resize_position_embeddings": _BEFORE,
    "set_input_embeddings": _BEFORE,
    "set_output_embeddings": _BEFORE,
    "init_weights": _BEFORE,
    "add_adapter": "use booster.enable_lora(model, lora_config=...) before booster.boost, and build the optimizer "
    "after it",
    "load_adapter": "use booster.enable_lora(model, pretrained_dir=...) before booster.boost, and build the optimizer "
    "after it",
    "delete_adapter": _BEFORE,
}
_MERGES = ("merge_and_unload", "unload", "merge_adapter", "unmerge_adapter")
_SAVE_ARGUMENTS = (
    "is_main_process",
    "state_dict",
    "push_to_hub",
    "max_shard_size",
    "variant",
    "token",
    "save_peft_format",
    "save_original_format",
    "safe_serialization",
    "selected_adapters",
    "save_embedding_layers",
)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Counts:
    """Parameters of a model, counted while it was whole."""

    all: int
    trainable: int
    all_but_embeddings: int
    trainable_but_embeddings: int

    @staticmethod
    def of(model: nn.Module) -> Counts:
        return Counts(
            *(count_parameters(model, trainable, bare) for bare in (False, True) for trainable in (False, True))
        )


class WholeModel:
    """See `interface.model.WholeModel`.

    counts       of the model before it was boosted
    optimizer    what boost returned for it, or None
    save_lora    `Booster.save_lora_as_pretrained`
    """

    def __init__(
        self,
        model: ModelWrapper,
        optimizer: Any,
        plugin: Plugin,
        counts: Counts,
        checkpoints: Checkpoints,
        save_lora: Callable[[nn.Module, Any], None],
    ) -> None:
        self.split = plugin.split
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None
        self._name = type(unwrapped(model)).__name__
        self._pipelined = plugin.is_pipelined
        self._counts = counts
        self._checkpoints = checkpoints
        self._save_lora = save_lora

    @property
    def guards(self) -> Mapping[str, Answer]:
        answers: dict[str, Answer] = {
            "save_pretrained": self._save_pretrained,
            "push_to_hub": self._push_to_hub,
            "num_parameters": lambda _module, _native, *args, **kwargs: self.num_parameters(*args, **kwargs),
            "get_nb_trainable_parameters": lambda *_: (self._counts.trainable, self._counts.all),
            "generate": self._generate,
            "zero_grad": self._zero_grad,
            "tie_weights": self._tie_weights,
            "_apply": _refuse_moves,
            "__setattr__": _refuse_adapters,
        }
        answers |= {name: partial(self._refuse_change, name) for name in _CHANGES}
        if self.split:
            answers |= {name: partial(self._refuse_merge, name) for name in _MERGES}
        return answers

    @property
    def _boosted(self) -> ModelWrapper:
        model = self._model()
        if model is None:
            raise ValueError(
                f"the boosted {self._name} is gone, and with it what knew its layout: keep what booster.boost returned"
            )
        return model

    # Reading.

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        counts = self._counts
        if exclude_embeddings:
            return counts.trainable_but_embeddings if only_trainable else counts.all_but_embeddings
        return counts.trainable if only_trainable else counts.all

    def _generate(self, module: nn.Module, native: Native, *args: Any, **kwargs: Any) -> Any:
        if self._pipelined:
            raise ValueError(
                f"generate under {self.split}: no rank of a pipeline has the whole model. Save it with "
                "booster.save_model(model, path) and generate from AutoModelForCausalLM.from_pretrained(path), or use "
                "pp_size=1 (generate works with tp_size and ZeRO); booster.execute_pipeline without an optimizer gives "
                "losses and logits"
            )
        if self.split and dist.get_world_size() > 1:
            kwargs.setdefault("synced_gpus", True)  # every rank takes part in every forward until all are done
        return native(*args, **kwargs)

    # Files.

    def _save_pretrained(
        self, module: nn.Module, native: Native, save_directory: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.split:
            return native(save_directory, *args, **kwargs) if dist.get_rank() == 0 else None
        kwargs = {**dict(zip(_SAVE_ARGUMENTS, args, strict=False)), **kwargs}
        unknown = [name for name in kwargs if name not in _SAVE_ARGUMENTS]
        if unknown:
            raise ValueError(
                f"save_pretrained({unknown[0]}=...) under {self.split} is not "
                f"known{nearest(unknown[0], _SAVE_ARGUMENTS)}"
            )
        if kwargs.get("state_dict") is not None:
            raise ValueError(
                f"save_pretrained(state_dict=...) under {self.split}: a rank has a part of it; leave state_dict out, "
                "the files are whole"
            )
        if kwargs.get("safe_serialization") is False:
            raise ValueError(
                "safe_serialization=False would write pickle files, which run code when they are read; leave it True"
            )
        if kwargs.get("push_to_hub"):
            self._push_to_hub(module, native)
        if hasattr(module, "peft_config"):
            self._save_lora(self._boosted, save_directory)
            return None
        limit = _bytes(kwargs.get("max_shard_size") or "50GB")
        largest = max((param.itemsize for param in module.parameters()), default=4)
        is_large = self._counts.all * largest > limit
        self._checkpoints.save_model(
            self._boosted,
            save_directory,
            is_large,
            kwargs.get("variant"),
            limit / 2**20,
            True,
            False,
            what="model.save_pretrained",
        )
        return None

    def _push_to_hub(self, module: nn.Module, native: Native, *args: Any, **kwargs: Any) -> Any:
        if not self.split:
            return native(*args, **kwargs) if dist.get_rank() == 0 else None
        raise ValueError(
            f"push_to_hub under {self.split}: no rank holds the whole model. Save it on all ranks with "
            "booster.save_model(model, path), then on one of them huggingface_hub.HfApi().upload_folder(repo_id=..., "
            "folder_path=path)"
        )

    # Loading.

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) of a boosted model would put tensors in the place of those that the "
                "optimizer steps on; leave assign=False, which copies"
            )
        if self.split:
            return self._checkpoints.load_state_dict(self._boosted, state_dict, strict)
        return self.load_local_state_dict(state_dict, strict)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        result = self._boosted.unwrap().load_state_dict(state_dict, strict=strict)
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None and optimizer.sharded is not None:
            optimizer.sharded.refresh_masters()  # the weights that the optimizer steps on follow
        return result

    # Changes.

    def _zero_grad(self, module: nn.Module, native: Native, set_to_none: bool = True) -> None:
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None:
            optimizer.zero_grad(set_to_none)
        if not isinstance(optimizer, MixedPrecisionOptimizer):  # its gradients lie in buffers of its own
            native(set_to_none)

    def _tie_weights(self, module: Any, native: Native, *_: Any, **__: Any) -> None:
        """Weights that were tied stay tied under every layout, so there is nothing to do."""
        if not self.split and getattr(module.config, "tie_word_embeddings", False):
            one, other = module.get_input_embeddings(), module.get_output_embeddings()
            if other is not None and one.weight is not other.weight:
                raise ValueError(
                    f"tie_weights after boost would tie weights that the optimizer steps on one by one; {_BEFORE}"
                )

    def _refuse_change(self, name: str, module: Any, native: Native, *args: Any, **kwargs: Any) -> Any:
        if name == "resize_token_embeddings":
            wanted = kwargs.get("new_num_tokens", args[0] if args else None)
            if wanted in (None, text_config(module).vocab_size) and not kwargs.get("pad_to_multiple_of"):
                return module.get_input_embeddings()  # nothing would change
        raise ValueError(
            f"{name} after boost: the layout of the model and the optimizer's parameters are settled, and what it "
            f"makes would be neither laid out nor trained; {_CHANGES[name]}"
        )

    def _refuse_merge(self, name: str, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"{name} under {self.split}: this rank holds a part of the weights. Write the adapters with "
            "booster.save_lora_as_pretrained(model, path) and merge them in one process: "
            "peft.PeftModel.from_pretrained(base_model, path).merge_and_unload()"
        )


def _refuse_adapters(module: nn.Module, native: Native, name: str, value: Any) -> None:
    if name == "peft_config" and not hasattr(module, name):  # peft leaves it when it has put adapters in
        raise ValueError(
            "peft.get_peft_model after boost: the adapters would be neither laid out over the ranks nor trained, and "
            "the model that they are in now is not the one that was boosted. Wrap a model before boosting: "
            "model = peft.get_peft_model(model, lora_config), or booster.enable_lora(model, lora_config=...), then "
            "booster.boost, with an optimizer built on the result"
        )
    native(name, value)


def _refuse_moves(module: nn.Module, native: Native, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """Behind `.to`, `.half`, `.cuda` and the like: nothing where they would change nothing, else a refusal."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        made = fn(tensor)
        if not is_unmoved(made, tensor):
            raise ValueError(
                f"moving or converting a boosted model: {name} would go from {tensor.dtype} on {tensor.device} to "
                f"{made.dtype} on {made.device}, away from what the optimizer steps on. The plugin places the model, "
                "and its precision= (or Booster(mixed_precision=...)) sets the number format; call .to(...), .half() "
                "and the like before booster.boost"
            )
    return module


def _bytes(size: int | str) -> int:
    """Bytes of a size such as "5GB", as transformers reads it."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"max_shard_size={size!r} must be a number of bytes or a size such as '5GB'")
    return int(float(found[1]) * _UNITS[found[2].upper()])
