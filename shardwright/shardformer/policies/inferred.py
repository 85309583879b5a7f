"""The policy that `custom_policy="auto"` stands for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import nn

from ...models.layer_chain import callable_lists, module_list
from ..plan import Plan
from ..short_copy import short_copies
from .generic import GenericPolicy

AUTO = "auto"  # what it is called
_DECLARE = (
    "declare it: a Policy whose plan names 'colwise' for linears whose features are dealt, 'rowwise' for those that "
    "read them, passed as custom_policy=; docs/adding_a_model.md has the whole way"
)


class InferredPolicy(GenericPolicy):
    """Any model: transformers' plan, names, and what autograd finds, all of it tried on a small copy before it is used.

    Nothing is used untested: where no copy can be made or no batch runs on it, and where nothing passes, a ValueError
    on every rank says which modules could not be placed and why.
    """

    chosen_for = "with custom_policy='auto' could not be sharded"

    def _plan(self) -> Plan:
        self.whole_model = not hasattr(self.model, "config")
        if self.whole_model and self.shard_config.example_inputs is None:
            raise ValueError(
                f"custom_policy='auto': {type(self.model).__name__} is not built from a config of transformers, so no "
                "batch can be guessed to try its plan on; pass example_inputs=, a batch like the real ones, such as "
                "next(iter(dataloader))"
            )
        plan = super()._plan()
        if not self.findings.checked and not self.shard_config.parallel.is_played:
            raise ValueError(
                f"custom_policy='auto': no small copy of {type(self.model).__name__} can be built to try its plan on; "
                f"{_DECLARE}"
            )
        return plan

    def layer_lists_in(self, model: nn.Module) -> list[str] | None:
        """Of models without a config, which have no other sign of their layers: the lists of modules of one class, but
        for lists in others, and of single linears and norms where there are any of more. Of lists of lists, which
        cannot be called, those in them.
        """
        if hasattr(self.model, "config"):
            return None
        lists = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(layer) for layer in module}) == 1
        ]
        outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        found = [each for name in outer for each in callable_lists(name, module_list(model, name))]
        of_more = [name for name, layers in found if any(list(layer.children()) for layer in layers)]
        return of_more or [name for name, _ in found] or None

    def _copies(self) -> Iterator[nn.Module]:
        built = super()._copies() if hasattr(self.model, "config") else iter(())
        return chain(built, short_copies(self.model))
