"""What `module_policy` comes to: the order of its replacements, dropout by what its input is, what is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright
from shardwright.lazy import LazyInitContext
from shardwright.shardformer import ModelSharder, ShardConfig, ShardFormer
from shardwright.shardformer.layer import (
    DropoutForParallelInput,
    DropoutForReplicatedInput,
    Linear1D_Col,
    Linear1D_Row,
    ParallelModule,
)
from shardwright.shardformer.policies.base_policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
)
from shardwright.testing import compare_models, run_ranks


def child(suffix: str, target: Any, **kwargs: Any) -> SubModuleReplacementDescription:
    return SubModuleReplacementDescription(suffix, target, kwargs)


class Block(nn.Module):
    """Dropout before, between and behind the linears."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.before, self.between, self.behind = nn.Dropout(p), nn.Dropout(p), nn.Dropout(p)
        self.up, self.down, self.scale = nn.Linear(8, 12), nn.Linear(12, 8), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.behind(self.down(self.between(self.up(self.before(x)).relu()))) * self.scale


class Half(nn.Module):
    """BERT's way: the two linears in modules of their own, dropout before and behind the second."""

    def __init__(self, into: int, out: int, p: float) -> None:
        super().__init__()
        self.before, self.dense, self.behind = nn.Dropout(p), nn.Linear(into, out), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.dense(self.before(x)))


class Split(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.between, self.second = Half(8, 12, p), nn.Dropout(p), Half(12, 8, p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.between(self.first(x).relu()))


class Tower(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.drop, self.layers = nn.Dropout(p), nn.ModuleList([kind(p) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Described(Policy):
    def __init__(self, policy: Any = None) -> None:
        self.policy = policy

    def module_policy(self) -> Any:
        return self.policy

    def scaled(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """A method of the policy's, which gets the module too."""
        return Block.forward(module, x) * 2


def linears(target: Any = Linear1D_Col) -> list[SubModuleReplacementDescription]:
    return [child("up", target), child("down", Linear1D_Row)]


# --- order ---


def reverse_rows(module: Any, seen: list[Any]) -> None:
    """Whatever mixes rows of different ranks; notes what it found."""
    seen.append((tuple(module.up.weight.shape), module.scale, type(module).forward is Block.forward))
    module.up.weight.data = module.up.weight.data.flip(0)
    module.down.bias.data *= module.scale


def widen(module: Any) -> None:
    """From 12 to 14 features between the linears."""
    with torch.no_grad():
        module.up.weight = nn.Parameter(torch.cat([module.up.weight, module.up.weight[:2]]))
        module.up.bias = nn.Parameter(torch.cat([module.up.bias, module.up.bias[:2]]))
        module.down.weight = nn.Parameter(torch.cat([module.down.weight, module.down.weight[:, :2]], 1))


def ordered(rank: int, world_size: int) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    seen: list[Any] = []
    for replace in (functools.partial(reverse_rows, seen=seen), widen):
        policy = Described()
        policy.policy = {
            Block: ModulePolicyDescription(
                attribute_replacement={"scale": 0.5, "no_such.scale": 3},
                param_replacement=[replace],
                sub_module_replacement=linears(),
                method_replacement={"forward": policy.scaled},
            )
        }
        reference, model = Tower(), Tower()
        for layer in reference.layers:
            layer.scale = 0.5
            reverse_rows(layer, []) if replace is not widen else widen(layer)
            layer.forward = functools.partial(policy.scaled, layer)
        model = ShardFormer(ShardConfig()).shard_model(model, policy)
        assert model.layers[0].up.weight.shape == ((6 if replace is not widen else 7), 8)
        losses = []
        for one in (reference, model):
            loss = one(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        compare_models(reference, model, coordinate=rank, losses=(losses[0], losses[1]), tolerance=1e-6)
    assert seen == [((12, 8), 0.5, True)] * 2


def test_parameters_are_replaced_whole_after_attributes_and_before_methods() -> None:
    run_ranks(ordered, 2)


def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, 2 * self.weight, self.bias)


class Scaled(ParallelModule):
    """A layer of a user's in the form of ours, with an argument of its own."""

    def __init__(self, native: nn.Module, factor: float) -> None:
        super().__init__()
        self.native, self.factor = native, factor

    @staticmethod
    def from_native_module(module: nn.Module, process_group: Any = None, factor: float = 1.0) -> nn.Module:  # type: ignore[override]
        assert process_group.size() == 2
        return Scaled(module, factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.native(x) * self.factor


def linears_of_their_own(rank: int, world_size: int) -> None:
    """Linears whose forward a policy replaces compute it on their shards."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    reference, model = Tower(), Tower()
    for module in reference.modules():
        if isinstance(module, nn.Linear):
            module.forward = functools.partial(doubled, module)  # type: ignore[method-assign]
    policy = {
        nn.Linear: ModulePolicyDescription(method_replacement={"forward": doubled}),
        Block: ModulePolicyDescription(sub_module_replacement=[*linears(), child("behind", Scaled, factor=3.0)]),
    }
    for layer in reference.layers:
        layer.behind = Scaled(layer.behind, 3.0)
    model = ShardFormer(ShardConfig()).shard_model(model, Described(policy))
    for one in (reference, model):
        one(x).square().mean().backward()
    compare_models(reference, model, coordinate=rank, tolerance=1e-5)


def test_replaced_forwards_of_linears_run_on_shards_and_layers_of_the_users_in_their_places() -> None:
    run_ranks(linears_of_their_own, 2)


# --- dropout ---


def masks(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What every dropout left of ones."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_pre_hook(lambda module, args: (torch.ones_like(args[0]),))
            module.register_forward_hook(
                lambda module, args, output, name=name: found.update({name: output.detach() != 0})
            )
    model(x)
    return found


def dropped(rank: int, world_size: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for kind, prefixes in ((Block, ("",)), (Split, ("first.", "second."))):
        children = (
            linears() if kind is Block else [child("first.dense", Linear1D_Col), child("second.dense", Linear1D_Row)]
        )
        names = [f"{prefix}{name}" for prefix in prefixes for name in ("before", "behind")] + ["between"]
        policy = {
            kind: ModulePolicyDescription(
                sub_module_replacement=[*children, *(child(name, DropoutForParallelInput) for name in names)]
            ),
            Tower: ModulePolicyDescription(sub_module_replacement=[child("drop", DropoutForParallelInput)]),
        }
        model = ShardFormer(ShardConfig()).shard_model(Tower(kind, p=0.4).train(), Described(policy))
        assert isinstance(model.layers[0].between, DropoutForParallelInput)
        found[kind.__name__] = masks(model, torch.ones(50, 8))
        evaluated = ShardFormer(ShardConfig()).shard_model(Tower(kind, p=0.4).eval(), Described(policy))
        assert not evaluated.layers[0].between.training
    return found


def test_a_dropout_draws_per_rank_where_activations_are_sharded_and_the_same_elsewhere() -> None:
    first, second = run_ranks(dropped, 2)
    sharded = {"between", "first.behind", "second.before"}
    for kind, found in first.items():
        assert len(found) == {"Block": 7, "Split": 11}[kind]
        for name, mask in found.items():
            agreement = (mask == second[kind][name]).double().mean()
            if name.removeprefix("layers.0.").removeprefix("layers.1.") in sharded:
                assert agreement < 0.75, name
            else:
                assert agreement == 1, name


class OwnColumn(nn.Linear):
    """A layer that this package knows nothing about."""

    @staticmethod
    def from_native_module(module: nn.Module, process_group: Any, **kwargs: Any) -> nn.Module:
        return module


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LOCAL_RANK", "0")
    shardwright.launch(0, 2, None, None, backend="fake")
    yield
    dist.destroy_process_group()


def prepare(policy: Any, model: nn.Module | None = None) -> None:
    ModelSharder(model if model is not None else Tower(), Described(policy), ShardConfig()).prepare()


def test_a_dropout_near_a_layer_that_nobody_knows_is_refused(alone: Any) -> None:
    for target, words in (
        (DropoutForParallelInput, r"layers.0.between is to be a DropoutForParallelInput.*layers.0.up near by becomes"),
        (DropoutForReplicatedInput, None),
    ):
        policy = {
            Block: ModulePolicyDescription(sub_module_replacement=[*linears(OwnColumn), child("between", target)])
        }
        if words is None:
            prepare(policy)
        else:
            with pytest.raises(ValueError, match=words):
                prepare(policy)


# --- what does not fit ---


def test_classes_that_a_model_does_not_have(alone: Any, caplog: pytest.LogCaptureFixture) -> None:
    described = ModulePolicyDescription(sub_module_replacement=linears())
    with caplog.at_level("INFO"):
        prepare({Block: described, Split: described, "NoSuch": described})
    assert "Described.module_policy: Tower has no Split, NoSuch" in caplog.text
    with pytest.raises(
        ValueError, match=r"describes Split, NoSuch, but Tower has no such module; its modules are Tower, Block$"
    ):
        prepare({Split: described, "NoSuch": described})
    caplog.clear()
    prepare({Block: ModulePolicyDescription(attribute_replacement={"heads": 2}, sub_module_replacement=linears())})
    assert "attribute_replacement 'heads' of Block: Block has no 'heads' to be replaced" in caplog.text


def test_numbers_of_a_lazy_model_cannot_be_changed(alone: Any) -> None:
    with LazyInitContext():
        model = Tower()
    with pytest.raises(ValueError, match="param_replacement changes numbers, which a model that was built in a Lazy"):
        prepare({Block: ModulePolicyDescription(param_replacement=[widen])}, model)


def test_descriptions_of_wrong_types(alone: Any) -> None:
    many: Any = ModulePolicyDescription
    one: Any = SubModuleReplacementDescription
    for make, words in (
        (lambda: one(None, Linear1D_Col), "suffix=None must be the name of a child module"),
        (lambda: one("", Linear1D_Col), "suffix='' must be the name of a child module"),
        (lambda: one("up", "Linear1D_Col"), "target_module='Linear1D_Col' of 'up' has no from_native_module"),
        (lambda: one("up", nn.Linear), "target_module=.*Linear'> of 'up' has no from_native_module"),
        (lambda: one("up", Linear1D_Col, [1]), r"kwargs=\[1\] of 'up' must be a dict"),
        (lambda: one("up", Linear1D_Col, ignore_if_not_exist="no"), "ignore_if_not_exist='no' of 'up' must be True"),
        (lambda: one("up", Linear1D_Col, ignore=True), "takes no argument ignore=True - did you mean 'ignore_if_not"),
        (lambda: many(attribute_replacement=["a"]), r"attribute_replacement=\['a'\] must be a dict from names to val"),
        (lambda: many(method_replacement={"forward": 3}), r"method_replacement\['forward'\]=3 must be a function"),
        (lambda: many(method_replacement={3: widen}), "method_replacement=.* must be a dict from names to functions"),
        (lambda: many(param_replacement=widen), "param_replacement=.* must be a list of functions.*put it in a list"),
        (lambda: many(sub_module_replacement=linears()[0]), "must be a list of SubModuleRepl.*put it in a list"),
        (lambda: many(sub_module_replacement=[Linear1D_Col]), "must be a list of SubModuleReplacementDescription"),
        (
            lambda: prepare({Block: many(param_replacement=[lambda: None])}),
            "Described.module_policy, Block: param_replacement: .* must be a function of a module, or of a module and",
        ),
        (lambda: many(submodule_replacement=[]), "did you mean 'sub_module_replacement'"),
        (lambda: prepare([many()]), r"Described.module_policy returned \[.*must return a dict from classes"),
        (lambda: prepare({Block: linears()}), "is described by .* must be a ModulePolicyDescription"),
        (lambda: prepare({3: many()}), "the key 3 must be a class of modules, or the name of one"),
        (lambda: prepare({Block(): many()}), r"the key Block\(.*use its class, Block"),
        (
            lambda: Policy().append_or_create_submodule_replacement(["up"], {}, Block),  # type: ignore[list-item]
            "must be a list of SubModuleReplacementDescription",
        ),
    ):
        with pytest.raises(ValueError, match=f"(?s){words}"):
            make()  # type: ignore[no-untyped-call]
