"""What ranks do in the tests of this folder."""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from hybrid_ranks import Layout, run_layout
from place import DEVICE
from torch import Tensor, nn
from torch._dynamo.utils import counters

from shardwright import Booster
from shardwright.ops import layer_graphs
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.testing import RankError, adamw, run_ranks, zoo

NAME = "llama-causal-lm"
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": LowLevelZeroPlugin,
    "hybrid": HybridParallelPlugin,
}


def run_alone(rank: int, world: int, layouts: Sequence[Layout]) -> list[str]:
    """Every layout of one rank, one after the other; what went wrong with each."""
    found = []
    for layout in layouts:
        try:
            run_layout(rank, world, layout)
        except Exception:
            found.append(f"{layout}\n{traceback.format_exc(limit=-6)}")
    return found


def run_in_turn(rank: int, world: int, layouts: Sequence[Layout], end: float, checked: bool = False) -> int:
    """Layouts in the same processes until one fails or the time (time.time()) is over; returns how many."""
    if checked and DEVICE == "cuda":
        # Importing it is enough for a record, with its stack, of every allocation that this process makes.
        from torch.cuda._sanitizer import enable_cuda_sanitizer

        enable_cuda_sanitizer()  # checks streams of what this process launches from now on
    for number, layout in enumerate(layouts):
        late = torch.tensor(float(time.time() > end))
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if late:
            return number
        try:
            run_layout(rank, world, layout)
        except Exception as error:
            raise RuntimeError(f"{layout}\n{traceback.format_exc(limit=-8)}") from error
    return len(layouts)


def failures(layouts: Sequence[Layout], seconds: float, backend: str, checked: bool = False) -> tuple[list[str], int]:
    """What went wrong with layouts of one number of ranks within `seconds`, and how many were run. After a failure
    new ranks go on with the next layout.
    """
    end, found, done = time.time() + seconds, list[str](), 0
    while done < len(layouts) and time.time() < end:
        rest, world = list(layouts[done:]), layouts[done].world
        left = max(30.0, end - time.time() + 60)
        try:
            return found, done + min(
                run_ranks(run_in_turn, world, rest, end, checked, backend=backend, timeout=left, debug="OFF")
            )
        except RankError as error:
            text = str(error)
            found.append(text)
            at = next((number for number, layout in enumerate(rest) if f"{layout}\n" in text), None)
            done += len(rest) if at is None else at + 1
    return found, done


def batch_of(name: str, step: int, dtype: torch.dtype, device: str = DEVICE) -> dict[str, Tensor]:
    return {key: value.to(device) for key, value in zoo.inputs(name, batch_size=4, seed=step, dtype=dtype).items()}


def ordinary(**settings: Any) -> Any:
    """With weights as models have them, which 16 bits round little; those of the zoo are large."""
    native: Any = zoo.build(NAME, initializer_range=0.02, **settings)
    torch.manual_seed(0)
    return type(native)(native.config).float()


def trained(
    rank: int, world: int, plugin: str, settings: dict[str, Any], precision: str | None, steps: int = 3
) -> tuple[list[float], list[float], float]:
    """Losses of a plugin and of plain torch on the same device in fp32, and how far apart the weights are, over how
    far they have moved.
    """
    plain = ordinary().to(DEVICE)
    model: Any = copy.deepcopy(plain)
    before = {name: param.detach().cpu().clone() for name, param in plain.named_parameters()}
    reference = adamw(plain)
    booster = Booster(plugin=PLUGINS[plugin](**settings), mixed_precision=precision)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    mine, theirs = list[float](), list[float]()
    for step in range(steps):
        batch = batch_of(NAME, step, torch.float32)
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        mine.append(float(loss.detach()))
        expected = plain(**batch).loss
        expected.backward()
        reference.step()
        reference.zero_grad()
        theirs.append(float(expected.detach()))
    weights = {name: whole(param) for name, param in model.unwrap().named_parameters()}
    right = {name: param.detach().cpu() for name, param in plain.named_parameters()}
    moved, apart = (
        torch.stack([(right[name] - other[name]).norm() for name in right]).norm() for other in (before, weights)
    )
    return mine, theirs, float(apart / moved)


def whole(param: Any) -> Tensor:
    return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().float().cpu()


def resumed(rank: int, world: int, folder: str, settings: dict[str, Any], in_background: bool) -> list[float]:
    """Losses of a run, and behind them those of one that goes on from what it saved after two steps."""

    def begin(seed: int) -> tuple[Booster, Any, Any]:
        booster = Booster(plugin=HybridParallelPlugin(**settings))
        model: Any = zoo.build(NAME, seed=seed, dtype=torch.float32)
        model, optimizer, *_ = booster.boost(model, adamw(model))
        return booster, model, optimizer

    def take(booster: Booster, model: Any, optimizer: Any, steps: Sequence[int]) -> list[float]:
        losses = []
        for step in steps:
            batch = batch_of(NAME, step, torch.float32, "cpu")
            result = booster.execute_pipeline(iter([batch]), model, lambda o, _: o.loss, optimizer, return_loss=True)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(result["loss"]))
        return losses

    booster, model, optimizer = begin(0)
    take(booster, model, optimizer, (0, 1))
    booster.save(folder, model=model, optimizer=optimizer, use_async=in_background)
    straight = take(booster, model, optimizer, (2, 3))  # while it is written
    booster.wait()
    booster, model, optimizer = begin(1)
    booster.load(folder, model=model, optimizer=optimizer)
    return [*straight, *take(booster, model, optimizer, (2, 3))]


def unwaited(rank: int, world: int, settings: dict[str, Any], calls: bool) -> float:
    """Loss of some steps behind the first ones, in which torch raises where the host waits for the device."""
    booster = Booster(plugin=HybridParallelPlugin(max_norm=1.0, **settings))
    model: Any = zoo.build(NAME, dtype=torch.float32)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    batches = [batch_of(NAME, step, torch.float32, "cpu") for step in range(7)]
    losses = []
    for step, batch in enumerate(batches):
        if step >= 4 and DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            if calls:
                loss = model(**batch).loss
                booster.backward(loss, optimizer)
                losses.append(loss.detach())
            else:
                result = booster.execute_pipeline(
                    iter([batch]), model, lambda o, _: o.loss, optimizer, return_loss=True
                )
                losses.append(result["loss"])
            optimizer.step()
            optimizer.zero_grad()
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return float(losses[-1])


def generated(rank: int, world: int, name: str, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tokens that a boosted model writes, and those of the plain one."""
    plain: Any = zoo.build(name, dtype=torch.float32).eval().to(DEVICE)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **settings))
    boosted: Any = zoo.build(name, dtype=torch.float32)
    boosted, *_ = booster.boost(boosted, adamw(boosted))
    prompt = batch_of(name, 0, torch.float32)["input_ids"][:2, :7]
    asked: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = boosted.unwrap().eval().generate(prompt, **asked)
    return written.cpu(), plain.generate(prompt, **asked).cpu()


def compiled(rank: int, world: int, name: str, settings: dict[str, Any], backend: str) -> dict[str, Any]:
    """Losses of compiled layers and of plain ones, and what the compiler counted before and after the first steps."""
    layer_graphs.backend = backend
    losses: dict[bool, list[float]] = {}
    seen = []
    for on in (False, True):
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32", enable_jit_fused=on, **settings))
        model: Any = zoo.build(name, dtype=torch.float32)
        model, optimizer, *_ = booster.boost(model, adamw(model))
        counters.clear()
        losses[on] = []
        for step in range(5):
            batch = batch_of(name, step, torch.float32, "cpu")
            result = booster.execute_pipeline(iter([batch]), model, lambda o, _: o.loss, optimizer, return_loss=True)
            optimizer.step()
            optimizer.zero_grad()
            losses[on].append(float(result["loss"]))
            seen.append(int(counters["stats"]["unique_graphs"]))
    return {
        "plain": losses[False],
        "compiled": losses[True],
        "graphs": seen[5:],
        "breaks": dict(counters["graph_break"]),
    }


def attended(rank: int, world: int, backend: str, batch_kind: str) -> tuple[str, float]:
    """Why an attention backend declines, or how far its gradients are from eager attention in fp64."""
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    batch = zoo.inputs(NAME, batch_size=3, seq_len=48, **sizes)
    if batch_kind == "whole":
        batch.pop("attention_mask")
    if batch_kind == "packed":
        batch.pop("attention_mask")
        batch = {key: value[:1] for key, value in batch.items()}
        batch["position_ids"] = torch.tensor([[*range(20), *range(28)]])
        batch["use_cache"] = False  # type: ignore[assignment]
    right = ordinary(attn_implementation="eager", **sizes).double()
    model: Any = copy.deepcopy(right).float()
    right(**batch).loss.backward()
    try:
        plugin = HybridParallelPlugin(precision="bf16", attention_backend=backend, example_inputs=batch)
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, adamw(model))
        booster.backward(model(**batch).loss, optimizer)
    except ValueError as error:
        return str(error), 0.0
    found = optimizer.gradients()
    mine, theirs = [], []
    for name, param in right.named_parameters():
        assert param.grad is not None
        mine.append(found[name].detach().double().cpu().flatten())
        theirs.append(param.grad.flatten())
    return "", float((torch.cat(mine) - torch.cat(theirs)).norm() / torch.cat(theirs).norm())


def moved_to_the_device(model: nn.Module) -> None:
    assert {param.device.type for param in model.parameters()} == {DEVICE}
