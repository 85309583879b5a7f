"""What a model that `ShardFormer` has sharded answers when it is asked as if this rank held all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from .layer.parallel_module import ParallelModule, combined_class, full_tensor


class Part(nn.Module):
    """The root of any such model."""

    @classmethod
    def become(cls, model: nn.Module) -> None:
        model.__class__ = combined_class(cls, type(model))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) of a sharded model would put tensors in the place of the parameters, "
                "whose gradients are summed and clipped over the ranks; leave assign out, and the numbers are copied"
            )
        return super().load_state_dict(state_dict, strict)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "peft_config" and not hasattr(self, name):  # peft leaves it when it has put adapters in
            refuse_adapters("peft.get_peft_model")
        super().__setattr__(name, value)


def refuse_adapters(what: str) -> NoReturn:
    raise ValueError(
        f"{what} of a sharded model: adapters that come now would see this rank's part of the features, and train "
        "apart. Put them on the whole model (peft.get_peft_model(model, lora_config), or "
        "peft.PeftModel.from_pretrained(model, path)), then give the result to ShardFormer"
    )


class PartOfModel(Part, ParallelModule):
    """Of transformers. Files hold the whole model; what would change its parts on one rank only is refused."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """The whole model, as `from_pretrained` reads it. Collective over the group; the first rank of the job
        writes.
        """
        if hasattr(self, "peft_config"):
            raise ValueError(
                "save_pretrained of adapters on a sharded model: this rank holds a part of them; train under "
                "HybridParallelPlugin, whose Booster.save_lora_as_pretrained writes them, or save before sharding"
            )
        if args or kwargs.get("state_dict") is not None:
            raise ValueError(
                "save_pretrained(state_dict=...) of a sharded model: a rank has a part of it; leave it out, the files "
                "are whole"
            )
        group = self.parallel.group
        whole: dict[int, Tensor] = {}
        for param in self.parameters():
            whole[id(param)] = full_tensor(param, group).cpu()
        names = {name: whole[id(param)] for name, param in self.named_parameters(remove_duplicate=False)}
        state = {name: names.get(name, tensor) for name, tensor in self.state_dict().items()}
        try:
            if dist.get_rank() == 0:
                super().save_pretrained(save_directory, state_dict=state, **kwargs)  # type: ignore[misc]
        finally:
            dist.barrier(group)

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "push_to_hub of a sharded model: call save_pretrained(path) on all ranks, then on one of them "
            "upload_folder of huggingface_hub.HfApi"
        )

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> Any:
        self._refuse(f"resize_token_embeddings({new_num_tokens})")

    def set_input_embeddings(self, *_: Any) -> None:
        self._refuse("set_input_embeddings")

    def set_output_embeddings(self, *_: Any) -> None:
        self._refuse("set_output_embeddings")

    def add_adapter(self, *_: Any, **__: Any) -> None:
        refuse_adapters("add_adapter")

    def load_adapter(self, *_: Any, **__: Any) -> None:
        refuse_adapters("load_adapter")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"{what} of a sharded model: every rank holds its rows of the vocabulary, and what it made would be no "
            "part of the others'; call it before ShardFormer.optimize"
        )
