"""A loss or gradient that is not finite is traced to what made it, on all ranks alike."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright import Booster
from shardwright.booster.anomaly.notes import MOST
from shardwright.booster.anomaly.origin import Origin, first_of
from shardwright.cluster import job
from shardwright.interface import NonFiniteLoss
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.testing import run_ranks, zoo
from shardwright.utils.tensors import local_tensor

NAME = "llama-causal-lm"
TWO = {"num_microbatches": 2, "precision": "fp32"}
LAYOUTS: dict[str, Any] = {
    "tp2": lambda: HybridParallelPlugin(tp_size=2, **TWO),
    "pp2": lambda: HybridParallelPlugin(pp_size=2, **TWO),
    "pp2 zb": lambda: HybridParallelPlugin(pp_size=2, pp_style="zb", **TWO),
    "zero2": lambda: HybridParallelPlugin(zero_stage=2, **TWO),
    "zero2, own loop": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "ddp": lambda: TorchDDPPlugin(find_unused_parameters=True),  # a batch of embeddings needs no table of them
    "fsdp": TorchFSDPPlugin,
    "tp2 bf16": lambda: HybridParallelPlugin(tp_size=2, num_microbatches=2, precision="bf16"),
    "pp2 bf16": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="bf16"),
    # from the lowest scale there is nothing to fall: gradients that are not finite are no matter of the scale
    "tp2 fp16": lambda: HybridParallelPlugin(tp_size=2, num_microbatches=2, precision="fp16", initial_scale=1),
    "pp2 fp16": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp16", initial_scale=1),
}
BAD = 1  # the step in which it happens


def _loss_of(outputs: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = outputs.loss
    return loss


class _Spoiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan")


def _break(fault: str, model: nn.Module, rank: int) -> None:
    """What is wrong on rank 1 from this step on."""
    if rank != 1:
        return
    weights = [param for name, param in model.named_parameters() if "down_proj" in name and param.numel()]
    layers = [module for module in model.modules() if type(module).__name__ == "LlamaMLP"]
    match fault:
        case "weight":
            local_tensor(weights[-1].data).view(-1)[0] = float("nan")
        case "gradient" if isinstance(weights[-1], DTensor):  # whose hooks are refused
            layers[-1].register_forward_hook(lambda module, args, output: _Spoiled.apply(output))
        case "gradient":
            weights[-1].register_hook(lambda grad: grad * float("nan"))
        case "operator":
            layers[-1].register_forward_hook(lambda module, args, output: output / (output - output).detach())
        case "row":
            layers[-1].register_forward_hook(lambda module, args, output: _without_the_largest(output))


def _without_the_largest(output: torch.Tensor) -> torch.Tensor:
    """Divided by zero in the one sample whose mean is the largest."""
    means = output.detach().float().mean((1, 2), keepdim=True)
    return output / (means < means.max()).to(output)


def _told(layout: str, fault: str, rank: int, on_nan: str = "stop") -> str:
    """What is said of a step in which `fault` happens; "" where all are taken."""
    plugin = LAYOUTS[layout]()
    booster = Booster(plugin=plugin, on_nan=on_nan, detect_anomaly="name", check_replicas=None)
    torch.manual_seed(0)
    model: Any = zoo.build(NAME, num_hidden_layers=2)
    table = torch.randn(500, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).double()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert optimizer is not None
    count, place = plugin.data_parallel
    for step in range(3):
        batch = {name: value.chunk(count)[place] for name, value in zoo.inputs(NAME, 8, seed=step).items()}
        if step == BAD:
            _break(fault, model.unwrap(), rank)
        if fault == "batch":
            batch["inputs_embeds"] = table[batch.pop("input_ids")]
            if step == BAD and place == count - 1:
                batch["inputs_embeds"][3, 2, 1] = float("nan")
        try:
            if isinstance(plugin, HybridParallelPlugin):
                booster.execute_pipeline(iter([batch]), model, None, optimizer)
            else:
                booster.backward(model(**batch).loss, optimizer)
            optimizer.step()
        except NonFiniteLoss as error:
            return str(error)
        optimizer.zero_grad()
    return ""


def _all_told(rank: int, world: int, layouts: list[str]) -> dict[str, str]:
    faults = ("batch", "weight", "gradient", "operator", "row")
    return {f"{layout}, {fault}": _told(layout, fault, rank) for layout in layouts for fault in faults}


def _check(told: dict[str, str], layout: str) -> None:
    who = r"rank 1 \([dp 0-9,tsr]*\)"
    of = {fault: told[f"{layout}, {fault}"] for fault in ("batch", "weight", "gradient", "operator", "row")}
    reader = "rank 0" if "2" in layout[:3] and layout[0] in "tp" else "rank 1"
    # rows 2 and 3 of four, or 6 and 7 of eight, are those of microbatches behind the first
    assert re.search(
        rf"inputs_embeds of the batch that {reader} .* was given has nan in 1 of \d+ elements", of["batch"]
    )
    rows = {"zero2": "microbatch 1 reads it, in row 1 of it", "tp2": "microbatch 0 reads it, in row 3 of it"}
    rows |= {name: rows["tp2"] for name in LAYOUTS if name[:3] in ("tp2", "pp2")}
    assert rows.get(layout, "row 3 of it") in of["batch"], of["batch"]
    assert re.search(rf"1\.mlp\.down_proj\.weight on {who} held nan in 1 of \d+ elements", of["weight"]), of["weight"]
    assert re.search(rf"{who} made nan in .* in aten\.mul .*in the backward", of["gradient"]), of["gradient"]
    assert "test_anomaly.py:" in of["gradient"]
    hook = "grad * float" if layout == "fsdp" else "register_hook(lambda grad: grad * float"
    assert hook in of["gradient"]
    assert re.search(rf"{who} made .* in aten\.div in model\.layers\.1 \(LlamaDecoderLayer\)", of["operator"])
    assert re.search(r"at test_anomaly.py:\d+ <lambda>: layers\[-1\]", of["operator"]), of["operator"]
    alone = re.search(
        rf"{who} made .* in aten.div in model\.layers\.1 \(LlamaDecoderLayer\) in the forward of .*, in row (\d) of it",
        of["row"],
    )
    assert alone, of["row"]
    assert re.search(r"at test_anomaly.py:\d+ _without_the_largest: return output / ", of["row"]), of["row"]
    if layout not in ("zero2, own loop", "ddp", "fsdp"):
        assert re.search(r"of microbatch 0, in row \d of it on stage [01]", of["row"]), of["row"]
        assert re.search(r"of microbatch 0.* on stage [01]", of["operator"]), of["operator"]


@pytest.mark.parametrize("layout", ["pp2", "zero2, own loop"])
def test_what_made_it_is_named_on_all_ranks(layout: str) -> None:
    for told in run_ranks(_all_told, 2, [layout], debug="OFF", timeout=200):
        _check(told, layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("pp2", "zero2, own loop")])
def test_what_made_it_is_named_at_every_layout(layout: str) -> None:
    for told in run_ranks(_all_told, 2, [layout], debug="OFF", timeout=200):
        _check(told, layout)


def _told_of_the_first_stage(rank: int, world: int) -> str:
    """What is said where rank 0, the first stage, divides by zero in the last sample, which microbatch 1 reads."""
    booster = Booster(plugin=LAYOUTS["pp2"](), on_nan="stop", detect_anomaly="name")
    torch.manual_seed(0)
    model: Any = zoo.build(NAME, num_hidden_layers=2)
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: output / (args[0] != 7)[..., None].to(output)
    )
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert optimizer is not None
    batch = zoo.inputs(NAME, 8, seed=0)
    batch["input_ids"][batch["input_ids"] == 7] = 8
    batch["input_ids"][7, 0] = 7
    booster.execute_pipeline(iter([batch]), model, None, optimizer)
    with pytest.raises(NonFiniteLoss) as caught:
        optimizer.step()
    return str(caught.value)


def test_what_stands_for_layers_of_other_stages_is_not_named() -> None:
    for told in run_ranks(_told_of_the_first_stage, 2, debug="OFF", timeout=200):
        assert re.search(
            r"rank 0 \([dp 0-9,tsr]*\) made .* in aten\.div .*of microbatch 1, in row 3 of it on stage 0, at test_",
            told,
        ), told


class _Net(nn.Module):
    """Attends with a mask of -inf, and draws random numbers; `fails(x)` makes something of the hidden states."""

    def __init__(self, fails: Any = None) -> None:
        super().__init__()
        self.first, self.last, self.fails = nn.Linear(4, 4), nn.Linear(4, 1), fails

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = torch.full((4, 4), float("-inf")).triu(1)
        scores = (self.first(x) @ self.first(x).mT + mask).softmax(-1)
        unused = torch.where(torch.ones(4) > 0, torch.zeros(4), torch.zeros(4).log())
        hidden = nn.functional.dropout(scores @ x, 0.5, self.training) + unused
        return {"loss": self.last(hidden if self.fails is None else self.fails(hidden)).square().mean()}


def _stepped(net: nn.Module, batches: list[torch.Tensor], **options: Any) -> tuple[Any, Any, Any]:
    booster = Booster(on_nan="stop", detect_anomaly="name", **options)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.01))
    assert optimizer is not None
    for batch in batches:
        booster.backward(model(batch)["loss"], optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return booster, model, optimizer


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (lambda x: x.sub(9).log(), r"made nan in 32 of 32 elements in aten.log in the forward of the batch"),
        (lambda x: (x + 1000).exp() - (x + 1000).exp(), r"made inf in 32 of 32 elements in aten.exp"),
        (lambda x: (x * 0 - torch.inf).softmax(-1), r"made nan in 32 of 32 elements in aten._softmax .*-inf"),
        (lambda x: x + torch.tensor(torch.inf), r"made inf in 32 of 32 elements in aten.add .*from aten.lift_fresh at"),
        (lambda x: x.index_put((torch.tensor(1),), torch.tensor(torch.nan)), r"rank 0 made nan .*from aten.lift_fresh"),
        (lambda x: (x * 0).sqrt(), r"made .* in aten.div in the backward.*at test_anomaly.py:\d+ <lambda>: .*sqrt"),
    ],
)
def test_the_first_operator_is_named(fails: Any, words: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(NonFiniteLoss) as caught:
        _stepped(_Net(fails), [torch.randn(2, 4, 4)])
    assert re.search(words, str(caught.value)), str(caught.value)


def test_what_is_no_fault_is_not_named_and_nothing_is_kept() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(2, 4, 4) for _ in range(3)]
    booster, model, optimizer = _stepped(_Net(), batches)
    witness = optimizer.loss_guard.witness
    assert witness.notes.calls == []
    for _ in range(MOST + 3):  # a script that looks at losses, and drops these batches
        booster.backward(model(torch.full((2, 4, 4), float("nan")))["loss"], optimizer)
    assert len(witness.notes.calls) == MOST
    assert witness.notes.dropped == 3
    optimizer.zero_grad()
    assert witness.notes.calls == []
    booster.backward(model(batches[0])["loss"], optimizer)
    optimizer.step()  # is told nothing of them
    model.eval()
    model(batches[0])
    model.train()
    with torch.no_grad():
        model(batches[0])
    assert witness.notes.calls == []


def test_a_step_that_was_looked_at_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers, buffers and weights are those of a run that never looked, the next steps are the same, and
    messages count them as the script does.
    """
    weights = []
    for name in (None, "name"):
        counting = job.Job(dist.HashStore(), 0, 1)
        monkeypatch.setattr(job, "_job", counting)
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Dropout(0.5))
        booster = Booster(on_nan="skip", detect_anomaly=name)
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert optimizer is not None
        for step in range(4):
            x = torch.randn(8, 4)
            factor = float("inf") if step == 1 else 1.0
            booster.backward((model(x) * factor).sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert counting.backwards == 4
        weights.append([*net.state_dict().values(), torch.rand(1)])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_what_cannot_be_run_again_is_said() -> None:
    net: Any = nn.Linear(4, 1)
    booster = Booster(on_nan="stop", detect_anomaly="name")
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert optimizer is not None
    booster.backward(model(torch.ones(2, 4)).sum() * float("nan"), optimizer)
    with pytest.raises(NonFiniteLoss, match="all that torch's operators made was finite") as e:
        optimizer.step()
    assert "of the step itself is known that gradients of weight, bias are not finite on rank 0" in str(e.value)
    assert "What a script computes of the outputs of a model that it calls itself is not seen" in str(e.value)
    booster.backward(net(torch.ones(2, 4)).sum() * float("nan"), optimizer)
    with pytest.raises(NonFiniteLoss, match="cannot be run again, since no call of the model was seen"):
        optimizer.step()


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="detect_anomaly='all' is not one of 'name'"):
        Booster(on_nan="stop", detect_anomaly="all")
    with pytest.raises(ValueError, match="detect_anomaly='name' with on_nan='warn'"):
        Booster(detect_anomaly="name")


def test_the_first_of_all_ranks() -> None:
    other = Origin("elsewhere", "aten.add", "nan", stage=0, microbatch=0)
    made = Origin("operation", "aten.log", "nan in 1 of 2 elements", stage=1, microbatch=1, order=7)
    late = Origin("operation", "aten.log", "nan", backward=True, microbatch=0)
    assert first_of([other, made, late]) == (1, made, [])
    earlier = replace(made, order=3)
    assert first_of([None, late, made, earlier]) == (3, earlier, [2])
    assert first_of([None, None]) is None
    assert Origin.from_json(made.to_json()) == made
