"""Mistakes with gradients, clipping, optimizers and weights that are written to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

from .table import mistake, refused

STAGES = (0, 1, 2, 3)


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def boosted(
    stage: int, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None, **options: Any
) -> tuple[Booster, Any, Any]:
    model = net()
    optim = optimizer(model.parameters()) if optimizer else torch.optim.SGD(model.parameters(), lr=0.5)
    settings = {"precision": "fp32", **options}
    plugin = LowLevelZeroPlugin(stage=stage, **settings) if stage else HybridParallelPlugin(**settings)
    booster = Booster(plugin=plugin)
    model, optim, *_ = booster.boost(model, optim)
    return booster, model, optim


def samples(rank: int, number: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)


def one_process(world: int, numbers: Iterator[int] | tuple[int, ...] = (0,)) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Plain torch on the samples of all ranks, after the backwards."""
    model = net()
    for number in numbers:
        sum(model(samples(rank, number)).pow(2).mean() / world for rank in range(world)).backward()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def backward(booster: Booster, model: Any, optim: Any, rank: int, number: int = 0) -> None:
    booster.backward(model(samples(rank, number)).pow(2).mean(), optim)


def assert_weights(model: Any, wanted: nn.Module) -> None:
    for param, plain in zip(model.parameters(), wanted.parameters(), strict=True):
        value = param.detach()
        torch.testing.assert_close(
            value.full_tensor() if isinstance(value, DTensor) else value, plain.detach(), rtol=1e-10, atol=1e-10
        )


@mistake(
    symptom="`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` between backward and step",
    gets="the clipping of one process where every rank holds whole gradients (one rank, `zero_stage=0`); refused where "
    "ranks "
    "hold parts, since each would clip by a norm of its own",
    fix="`max_norm=1.0` of the plugin, or `optimizer.clip_grad_by_norm(1.0)`, right in every layout",
)
def clipping_with_torch(rank: int, world: int) -> None:
    for stage in STAGES:
        booster, model, optim = boosted(stage)
        backward(booster, model, optim, rank)
        plain, plain_optim = one_process(world)
        if world > 1 and stage > 0:
            with refused(r"0.weight.grad: between backward and zero_grad", r"clip_grad_by_norm\(max_norm\)"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optim.clip_grad_by_norm(0.1)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optim.step()
        plain_optim.step()
        assert_weights(model, plain)


@mistake(
    symptom="`torch.nn.utils.clip_grad_norm_` on a tensor-parallel model",
    gets="refused at every stage: each rank would clip by the norm of its shards",
    fix="`max_norm=` of the plugin, or `optimizer.clip_grad_by_norm(max_norm)`",
    worlds=(2, 4),
)
def clipping_with_torch_under_tensor_parallelism(rank: int, world: int) -> None:
    from shardwright.testing import zoo

    for stage in (0, 1, 3):
        model = zoo.build("llama-causal-lm", seed=0, dtype=torch.float32)
        optim: Any = torch.optim.AdamW(model.parameters())
        booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32", zero_stage=stage))
        boosted_model, optim, *_ = booster.boost(model, optim)
        booster.backward(boosted_model(**zoo.inputs("llama-causal-lm", batch_size=2, seed=1)).loss, optim)
        with refused("clip_grad_by_norm"):
            nn.utils.clip_grad_norm_(boosted_model.parameters(), 0.1)
            optim.step()
        optim.zero_grad()


@mistake(
    symptom="`loss.backward()` instead of `booster.backward(loss, optimizer)`",
    gets="refused before a step can use the gradients, which would be neither scaled nor reduced",
    fix="`booster.backward(loss, optimizer)`",
)
def backward_without_the_booster(rank: int, world: int) -> None:
    for stage in STAGES:
        for precision in ("fp32", "fp16"):
            booster, model, optim = boosted(stage, precision=precision)
            with refused(r"write booster.backward\(loss, optimizer\) instead of loss.backward\(\)"):
                model(samples(rank)).float().pow(2).mean().backward()
                optim.step()
            optim.zero_grad()
            booster.backward(model(samples(rank)).float().pow(2).mean(), optim)
            optim.step()


@mistake(
    symptom="a loss that reaches the model of another optimizer (GAN: the generator's loss and the discriminator)",
    gets="what plain torch does: the gradients are added, and dropped by the other optimizer's `zero_grad`; refused "
    "where they came after "
    "its own had been reduced, or in fp16, and it steps without `zero_grad`",
    fix="`zero_grad()` before each backward of the other optimizer, or `requires_grad_(False)` on its model meanwhile",
)
def loss_that_reaches_another_model(rank: int, world: int) -> None:
    for stage in (0, 1, 2):
        for precision in ("fp32", "fp16"):
            first = boosted(stage, precision=precision)
            booster, model, optim = boosted(stage, precision=precision)
            mixed = first[1](model(samples(rank)).double().repeat(1, 2)).float().pow(2).mean()
            own = model(samples(rank)).float().pow(2).mean()
            if precision == "fp32":
                booster.backward(own, optim)
                optim.get_grad_norm()
            booster.backward(mixed, first[2])
            advice = ("from the backward of another optimizer's loss", r"zero_grad\(\)", r"requires_grad_\(False\)")
            with refused(*advice):
                optim.step()
            with refused(*advice):
                booster.backward(model(samples(rank)).float().mean(), optim)
            optim.zero_grad()
            booster.backward(model(samples(rank)).float().pow(2).mean(), optim)
            optim.step()
            first[2].step()


@mistake(
    symptom="two forwards before two backwards, or `retain_graph=True`, under "
    "`TorchDDPPlugin(find_unused_parameters=True)`",
    gets="refused in the second backward, which torch's DistributedDataParallel would not reduce; right with the "
    "default arguments",
    fix="backward after each forward, or one backward of the sum of the losses",
    worlds=(2, 4),
)
def two_forwards_with_unused_parameters(rank: int, world: int) -> None:
    model: Any = net()
    booster = Booster(plugin=TorchDDPPlugin(find_unused_parameters=True))
    model, optim, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses = [model(samples(rank, number)).pow(2).mean() for number in (0, 1)]
    booster.backward(losses[0], optim)
    with refused("a second backward since the last forward", "add the losses"):
        booster.backward(losses[1], optim)
    optim.zero_grad()
    booster.backward(model(samples(rank)).pow(2).mean() + model(samples(rank, 1)).pow(2).mean(), optim)
    optim.step()
    plain, plain_optim = one_process(world, (0, 1))
    plain_optim.step()
    assert_weights(model, plain)


@mistake(
    symptom="gradients accumulate over several `booster.backward` without `booster.no_sync`",
    gets="the right sum, also when the norm is read in between; more traffic than needed",
    fix="`with booster.no_sync(model, optimizer):` around all backwards of a step but the last",
)
def accumulating_without_no_sync(rank: int, world: int) -> None:
    for stage in STAGES:
        booster, model, optim = boosted(stage)
        for number in range(3):
            backward(booster, model, optim, rank, number)
            if number == 1:
                optim.get_grad_norm()
        optim.step()
        plain, plain_optim = one_process(world, (0, 1, 2))
        plain_optim.step()
        assert_weights(model, plain)


@mistake(
    symptom="`optimizer.step()` without a backward",
    gets="nothing: parameters without a gradient are skipped, as in torch",
    fix="nothing to do",
)
def step_without_backward(rank: int, world: int) -> None:
    for stage in STAGES:
        booster, model, optim = boosted(stage, lambda params: torch.optim.AdamW(params, weight_decay=0.5))
        optim.step()
        assert_weights(model, net())
        optim.zero_grad()
        backward(booster, model, optim, rank)


@mistake(
    symptom="`zero_grad` forgotten after `optimizer.step()`",
    gets="refused by the next backward; plain torch would add to the gradients of the last step",
    fix="`optimizer.zero_grad()` after every `optimizer.step()`",
)
def zero_grad_forgotten(rank: int, world: int) -> None:
    for stage in STAGES:
        booster, model, optim = boosted(stage)
        backward(booster, model, optim, rank)
        optim.step()
        with refused("backward after step without zero_grad", r"call zero_grad\(\) first"):
            backward(booster, model, optim, rank)
        optim.zero_grad()
        backward(booster, model, optim, rank)


@mistake(
    symptom="`model.zero_grad()`, or a loop of `param.grad = None`, instead of `optimizer.zero_grad()`",
    gets="what `optimizer.zero_grad()` does",
    fix="nothing to do",
)
def other_ways_to_zero(rank: int, world: int) -> None:
    def by_hand(model: Any) -> None:
        for param in model.parameters():
            param.grad = None

    for stage in STAGES:
        for zero in (lambda model: model.zero_grad(), by_hand):
            booster, model, optim = boosted(stage)
            backward(booster, model, optim, rank, 5)
            zero(model)
            backward(booster, model, optim, rank)
            optim.step()
            zero(model)
            backward(booster, model, optim, rank, 1)
            plain, plain_optim = one_process(world)
            plain_optim.step()
            assert_weights(model, plain)


@mistake(
    symptom="`param.grad = None` for some parameters, to leave them out of a step",
    gets="refused at stages 0, 1 and 2",
    fix="`requires_grad_(False)` on them before the backward of that step",
)
def some_gradients_dropped(rank: int, world: int) -> None:
    for stage in (0, 1, 2):
        booster, model, optim = boosted(stage)
        backward(booster, model, optim, rank)
        next(iter(model.parameters())).grad = None
        with refused("param.grad = None for 1 of 4 parameters", r"requires_grad_\(False\)"):
            optim.step()
        optim.zero_grad()
        first = next(iter(model.parameters())).requires_grad_(False)
        before = first.detach().clone()
        backward(booster, model, optim, rank)
        optim.step()
        assert torch.equal(first, before)
        first.requires_grad_(True)
        optim.zero_grad()
        backward(booster, model, optim, rank)
        optim.clip_grad_by_norm(1.0)  # which all that follows takes for measured
        first.grad = None
        with refused("param.grad = None for 1 of 4 parameters", r"requires_grad_\(False\)"):
            optim.step()
        optim.zero_grad()


@mistake(
    symptom="`param.grad` is read after backward (logging, own clipping, a penalty)",
    gets="the averaged, unscaled gradient where this rank has all of it (one rank, `zero_stage=0`); else refused",
    fix="`optimizer.gradients()` gives whole gradients by name, `optimizer.get_grad_norm()` their norm",
)
def reading_gradients(rank: int, world: int) -> None:
    for stage in (0, 1, 2):
        for precision in ("fp32", "fp16"):
            booster, model, optim = boosted(stage, precision=precision)
            booster.backward(model(samples(rank)).double().pow(2).mean(), optim)
            wanted = one_process(world)[0][0].weight.grad
            if world > 1 and stage:
                with refused(r"0.weight.grad", r"optimizer.gradients\(\)"):
                    model.unwrap()[0].weight.grad  # noqa: B018
                grad = optim.gradients()["0.weight"]
            else:
                grad = model.unwrap()[0].weight.grad
            tolerance = 1e-10 if precision == "fp32" else 1e-2
            torch.testing.assert_close(grad.double(), wanted, rtol=tolerance, atol=tolerance)


@mistake(
    symptom="`optimizer.clip_grad_by_value` in fp16, and a step whose gradients overflow",
    gets="the step is skipped and the loss scale falls, as without clipping",
    fix="nothing to do",
)
def value_clipping_in_fp16(rank: int, world: int) -> None:
    for stage in STAGES:
        booster, model, optim = boosted(stage, precision="fp16", hysteresis=1)
        booster.backward(model(samples(rank)).float().pow(2).mean() * (1e8 if rank == 0 else 1.0), optim)
        optim.clip_grad_by_value(1.0)
        optim.step()
        assert optim.scaler.skipped_steps == 1


class Halved(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.sub_(param.grad / 2)


@mistake(
    symptom="a subclass of torch's AdamW with a `step` of its own",
    gets="the gradients of one process, in whole parameters",
    fix="nothing to do; `elementwise = True` on the class lets it step on flat pieces, which is faster",
)
def optimizer_with_its_own_step(rank: int, world: int) -> None:
    for stage in STAGES:
        booster, model, optim = boosted(stage, Halved, max_norm=0.1)
        backward(booster, model, optim, rank)
        optim.step()
        plain, plain_optim = one_process(world)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        plain_optim.step()  # SGD with a rate of 0.5
        assert_weights(model, plain)


@mistake(
    symptom="`model.load_state_dict(...)`, `nn.init`, `param.copy_(...)` or `param.data.clamp_(...)` on a boosted "
    "model in bf16 or fp16",
    gets="the new weights stay: fp32 masters follow before the next step or save",
    fix="nothing to do; inside the model's own `forward` write `with torch.no_grad(): param.clamp_(...)`, where "
    "`.data` is not watched",
)
def weights_written_after_boost(rank: int, world: int) -> None:
    for stage in (0, 1, 2):
        booster, model, optim = boosted(stage, lambda params: torch.optim.SGD(params, lr=0.0), precision="bf16")
        state = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        booster.backward(model(samples(rank)).float().mean(), optim)
        optim.step()
        assert all(bool((param == 3.0).all()) for param in model.parameters())
        for param in model.parameters():
            param.data.fill_(4.0)
        optim.step()
        assert all(bool((param == 4.0).all()) for param in model.parameters())


@mistake(
    symptom="an average of weights (EMA) over `list(model.parameters())` taken before boost, with "
    "`overlap_allgather=True`",
    gets="whole weights: whoever reads a parameter waits for its gather",
    fix="nothing to do; at stage 3, which gathers what is read, all ranks read alike, or `optimizer.shards()` gives "
    "this rank's part",
)
def average_of_captured_parameters(rank: int, world: int) -> None:
    for stage in (1, 2, 3):
        model = net()
        captured = list(model.parameters())
        optim: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="fp32", overlap_allgather=stage < 3))
        boosted_model, optim, *_ = booster.boost(model, optim)
        plain, plain_optim = one_process(world)
        backward(booster, boosted_model, optim, rank)
        optim.step()
        plain_optim.step()
        average = [torch.lerp(param.detach(), param, 0.5) for param in captured]
        again = copy.deepcopy(captured)
        for value, copied, wanted in zip(average, again, plain.parameters(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)
            assert type(copied) is nn.Parameter
        optim.gatherer.wait()


@mistake(
    symptom="`optimizer.step(closure)`",
    gets="refused: gradients are reduced once per step",
    fix="`optimizer.step()` after `booster.backward(loss, optimizer)`",
)
def step_with_a_closure(rank: int, world: int) -> None:
    for stage in STAGES:
        _, _, optim = boosted(stage)
        with refused(r"step\(closure=...\) is not supported", r"call step\(\) without it"):
            optim.step(lambda: None)


@mistake(
    symptom="LBFGS, which runs the model itself",
    gets="refused at boost, by every plugin",
    fix="AdamW or another first-order optimizer",
)
def lbfgs(rank: int, world: int) -> None:
    for plugin in (TorchDDPPlugin(), TorchFSDPPlugin(), LowLevelZeroPlugin(), HybridParallelPlugin()):
        model = net()
        with refused("LBFGS needs a closure", "use AdamW"):
            Booster(plugin=plugin).boost(model, torch.optim.LBFGS(model.parameters()))


@mistake(
    symptom="an optimizer that cannot step on DTensors (Adafactor, Rprop) under `TorchFSDPPlugin`",
    gets="refused in the first step",
    fix="`LowLevelZeroPlugin` or `HybridParallelPlugin`, which give it whole parameters, at stage 3 too",
)
def optimizers_that_know_no_dtensors(rank: int, world: int) -> None:
    for plugin in (
        TorchFSDPPlugin(),
        LowLevelZeroPlugin(stage=2, precision="fp32"),
        LowLevelZeroPlugin(stage=3, precision="fp32"),
    ):
        model: Any = net()
        booster = Booster(plugin=plugin)
        model, optim, *_ = booster.boost(model, torch.optim.Adafactor(model.parameters()))
        backward(booster, model, optim, rank)
        if isinstance(plugin, LowLevelZeroPlugin):
            optim.step()
            continue
        with refused("Adafactor cannot step on sharded parameters", "LowLevelZeroPlugin or HybridParallelPlugin"):
            optim.step()


@mistake(
    symptom="`param.register_hook(...)`, or hooks registered before boost, under `TorchFSDPPlugin`",
    gets="refused: FSDP2 would never call them; all ZeRO stages and `TorchDDPPlugin` call all hooks",
    fix="after boost `param.register_post_accumulate_grad_hook(hook)`, which sees this rank's shard of the reduced "
    "gradient",
)
def hooks_on_sharded_parameters(rank: int, world: int) -> None:
    def double(param: Any) -> None:
        param.grad.mul_(2.0)

    plugin = TorchFSDPPlugin()
    model: Any = net()
    handle = model[0].weight.register_hook(lambda grad: grad)
    with refused("0.weight: param.register_hook", "register_post_accumulate_grad_hook"):
        Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    handle.remove()
    booster = Booster(plugin=plugin)
    model, optim, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.25))
    for param in model.parameters():
        with refused("it would never be called", "register_post_accumulate_grad_hook"):
            param.register_hook(lambda grad: grad)
        param.register_post_accumulate_grad_hook(double)
    backward(booster, model, optim, rank)
    optim.step()
    plain, plain_optim = one_process(world)
    plain_optim.step()
    assert_weights(model, plain)


@mistake(
    symptom="a gradient penalty in a backward of its own under `TorchFSDPPlugin`",
    gets="refused on several ranks: FSDP2 has freed the weights that it needs",
    fix="the penalty first, then the outputs for the loss, and one backward of the sum; or any ZeRO stage",
    worlds=(2, 4),
)
def penalty_by_itself(rank: int, world: int) -> None:
    for plugin in (LowLevelZeroPlugin(stage=3, precision="fp32"), TorchFSDPPlugin()):
        model: Any = net()
        booster = Booster(plugin=plugin)
        model, optim, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))

        def penalty(model: Any = model) -> torch.Tensor:
            inputs = samples(rank).requires_grad_()
            return torch.autograd.grad(model(inputs).pow(2).sum(), inputs, create_graph=True)[0].pow(2).mean()

        alone = penalty()
        with (
            refused("weights which FSDP2 has freed", "backward once on the sum")
            if isinstance(plugin, TorchFSDPPlugin)
            else nullcontext()
        ):
            booster.backward(alone, optim)
        optim.zero_grad()
        first = penalty()
        booster.backward(model(samples(rank)).pow(2).mean() + first, optim)
        optim.step()


@mistake(
    symptom="`optimizer.state[param]` is read after boost (moments for logging)",
    gets="refused at every ZeRO stage: states belong to pieces of parameters",
    fix="`optimizer.shards()` lists this rank's pieces with name, range, master and state",
)
def states_of_parameters(rank: int, world: int) -> None:
    for stage in STAGES:
        booster, model, optim = boosted(stage, torch.optim.AdamW)
        assert not optim.state
        backward(booster, model, optim, rank)
        optim.step()
        assert all("exp_avg" in state for state in optim.state.values())
        with refused(r"optimizer.state\[param\] after boost", r"optimizer.shards\(\)"):
            optim.state[next(iter(model.parameters()))]
        assert all("exp_avg" in shard.state for shard in optim.shards())


@mistake(
    symptom="`copy.deepcopy(optimizer)` or `torch.save(optimizer, path)` after boost",
    gets="refused at every ZeRO stage: it shares buffers with its model",
    fix="`booster.save_optimizer(optimizer, path)`",
)
def copied_optimizers(rank: int, world: int) -> None:
    for stage in STAGES:
        _, _, optim = boosted(stage)
        with refused("copying or pickling a boosted optimizer", r"booster.save_optimizer\(optimizer, path\)"):
            copy.deepcopy(optim)


@mistake(
    symptom="`optimizer.add_param_group(...)` after boost",
    gets="refused: the parameters have been laid out",
    fix="add the group to the optimizer before `booster.boost`",
)
def group_added_after_boost(rank: int, world: int) -> None:
    for stage in STAGES:
        _, _, optim = boosted(stage)
        with refused("add_param_group after boost", "before booster.boost"):
            optim.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@mistake(
    symptom="parameters that were frozen at boost are unfrozen later",
    gets="refused by the next step, which would leave them as they are",
    fix="unfreeze before `booster.boost`, and freeze for the first steps with `requires_grad_(False)` afterwards",
)
def unfreezing_after_boost(rank: int, world: int) -> None:
    for stage in STAGES:
        model = net()
        model[0].requires_grad_(False)
        optim: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        plugin = LowLevelZeroPlugin(stage=stage, precision="fp32") if stage else HybridParallelPlugin(precision="fp32")
        booster = Booster(plugin=plugin)
        boosted_model, optim, *_ = booster.boost(model, optim)
        for param in boosted_model.parameters():
            param.requires_grad_(True)
        backward(booster, boosted_model, optim, rank)
        with refused("frozen when the optimizer was boosted", "unfreeze before boost"):
            optim.step()


@mistake(
    symptom="all backwards of a step under `booster.no_sync`",
    gets="the right sum: the step reduces what no backward has",
    fix="the last backward of a step outside of `no_sync`, so that reducing overlaps with it",
)
def never_synchronized(rank: int, world: int) -> None:
    for stage in STAGES:
        booster, model, optim = boosted(stage)
        with booster.no_sync(model, optim):
            for number in range(2):
                backward(booster, model, optim, rank, number)
        optim.step()
        plain, plain_optim = one_process(world, (0, 1))
        plain_optim.step()
        assert_weights(model, plain)


@mistake(
    symptom="`communication_dtype=torch.float8_e4m3fn`",
    gets="refused when the plugin is built: no backend adds 8-bit floats",
    fix="`communication_dtype=torch.bfloat16`",
)
def eight_bit_wire(rank: int, world: int) -> None:
    for make in (HybridParallelPlugin, LowLevelZeroPlugin):
        with refused("communication_dtype=torch.float8_e4m3fn must be", "torch.bfloat16"):
            make(communication_dtype=torch.float8_e4m3fn)
