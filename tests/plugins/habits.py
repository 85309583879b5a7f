"""How people train: optimizers, criteria, ways of clipping and accumulating, half precision. Drawn beside a layout by
the fuzzer.

Each habit has two sides here, what the boosted model does and what `Reference`, plain torch in one process, does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.testing import loss_of
from shardwright.utils.tensors import local_tensor

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
LORA_TARGETS = {
    "llama": ["q_proj", "k_proj", "o_proj", "down_proj"],
    "qwen2": ["q_proj", "v_proj", "up_proj"],
    "chatglm": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}


@dataclass(frozen=True)
class Habits:
    """
    optimizer     a name of OPTIMIZERS
    clip          "plugin" (max_norm), "norm" and "value" (the wrapper's methods), "outside" (torch's function), or none
    clip_at       norm or value
    bare          accumulate without no_sync
    read_norm     ask for the norm after every backward
    unused        parameters that no forward uses, which decay must not move
    frozen        freeze the embeddings and every third parameter
    captured      look at parameters right after a step, as an average of weights does
    criterion     a name of CRITERIA; "" is the model's own loss
    embeds        float inputs: embeddings instead of token ids
    half          "bf16" or "fp16"
    wire          communication_dtype
    lora          train adapters
    resume        save after the first step and go on with another model that loads it
    """

    optimizer: str = "adamw"
    clip: str = ""
    clip_at: float = 0.05
    bare: bool = False
    read_norm: bool = False
    unused: bool = False
    frozen: bool = False
    captured: bool = False
    criterion: str = ""
    embeds: bool = False
    half: str = ""
    wire: str = ""
    lora: bool = False
    resume: bool = False

    def __str__(self) -> str:
        return ", ".join(
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        )


# Optimizers: torch's own kernels, and subclasses with a `step` of their own.


class OwnAdamW(torch.optim.AdamW):
    """What people write who change one line of AdamW: reads `p.grad`, knows nothing of fused kernels."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(param), torch.zeros_like(param)
                state["mean"].lerp_(param.grad, 0.2)
                state["square"].lerp_(param.grad.square(), 0.1)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.addcdiv_(state["mean"], state["square"].sqrt() + 1e-2, value=-group["lr"])


class OwnAdagrad(torch.optim.Adagrad):
    """A step that follows the size of the gradient: a factor that was forgotten shows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(_trained(model), lr=0.1, momentum=0.8, weight_decay=0.05)


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with rates and decays of their own, the usual split of biases and norms."""
    params = _trained(model)
    matrices, rest = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, eps=1e-3)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(_trained(model), lr=1e-2, eps=1e-3, weight_decay=0.1),
    "sgd": _sgd,
    "groups": _groups,
    "own adamw": lambda model: OwnAdamW(_trained(model), lr=1e-2, weight_decay=0.1),
    "own adagrad": lambda model: OwnAdagrad(_trained(model), lr=0.1),
    "adagrad": lambda model: torch.optim.Adagrad(
        _trained(model), lr=1e-2, initial_accumulator_value=0.01, weight_decay=0.05
    ),
    "rmsprop": lambda model: torch.optim.RMSprop(_trained(model), lr=1e-3, eps=1e-2),
}


# Criteria over the logits of a causal language model, as they are found in scripts.


def _shifted(outputs: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)


def masked_mean(outputs: Any, inputs: Any) -> torch.Tensor:
    logits, labels = _shifted(outputs, inputs)
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    mask = (labels != -100).to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


def indexed_mean(outputs: Any, inputs: Any) -> torch.Tensor:
    logits, labels = _shifted(outputs, inputs)
    keep = labels != -100
    return -torch.log_softmax(logits[keep], -1).gather(1, labels[keep][:, None]).mean()


def selected_mean(outputs: Any, inputs: Any) -> torch.Tensor:
    logits, labels = _shifted(outputs, inputs)
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    return losses.masked_select(labels != -100).mean()


def by_numel(outputs: Any, inputs: Any) -> torch.Tensor:
    logits, labels = _shifted(outputs, inputs)
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    return losses.sum() / losses.numel()


def smoothed(outputs: Any, inputs: Any) -> torch.Tensor:
    return F.cross_entropy(*_shifted(outputs, inputs), label_smoothing=0.1)


def summed(outputs: Any, inputs: Any) -> torch.Tensor:
    return F.cross_entropy(*_shifted(outputs, inputs), reduction="sum")


def with_z_loss(outputs: Any, inputs: Any) -> torch.Tensor:
    logits, labels = _shifted(outputs, inputs)
    return F.cross_entropy(logits, labels) + 1e-2 * torch.logsumexp(logits, -1).square().mean()


CRITERIA: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    f.__name__: f for f in (masked_mean, indexed_mean, selected_mean, by_numel, smoothed, summed, with_z_loss)
}


def criterion_of(habits: Habits, divide_by: int) -> Callable[[Any, Any], torch.Tensor]:
    chosen = CRITERIA.get(habits.criterion, lambda outputs, inputs: loss_of(outputs))
    if divide_by == 1:
        return chosen
    return lambda outputs, inputs: chosen(outputs, inputs) / divide_by


# Models and batches.


def prepare(model: nn.Module, family: str, habits: Habits) -> nn.Module:
    """The model as the user hands it to boost, the same on every rank."""
    if habits.unused:
        spare = nn.Linear(5, 3).to(next(model.parameters()).dtype)
        nn.init.constant_(spare.weight, 1.0)
        model.add_module("spare", spare)
    if habits.frozen:
        for number, param in enumerate(model.parameters()):
            param.requires_grad_(number % 3 != 0)
    if habits.lora:
        import peft

        task = "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None
        config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=LORA_TARGETS[family], task_type=task)
        model = peft.get_peft_model(model, config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in _trained(model):
                param.copy_(0.2 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return model


def as_embeds(batch: dict[str, torch.Tensor], width: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The batch with made-up embeddings in place of its token ids."""
    ids = batch["input_ids"]
    waves = torch.arange(1, width + 1, dtype=torch.float64) * (ids[..., None].double() + 1) * 0.37
    return {name: value for name, value in batch.items() if name != "input_ids"} | {
        "inputs_embeds": waves.sin().to(dtype)
    }


class Reference:
    """One process, plain torch. In half precision: a working copy in it, gradients added up and stepped in fp32.

    The working copy is what transformers loads in that precision: buffers that no checkpoint has, such as rotary
    frequencies, stay in fp32. A copy of it in fp32 tells how much the working copy rounds.
    """

    def __init__(self, model: nn.Module, habits: Habits) -> None:
        self.masters = model
        self.habits = habits
        self.optimizer = OPTIMIZERS[habits.optimizer](model)
        self.model = model
        if habits.half:
            self.model = copy.deepcopy(model).to(HALF[habits.half])
            for exact, module in zip(model.modules(), self.model.modules(), strict=True):
                for name in module._non_persistent_buffers_set:
                    module._buffers[name] = copy.deepcopy(exact._buffers[name])
            self.exact = copy.deepcopy(self.model).float()

    def backward(self, batch: dict[str, torch.Tensor], criterion: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
        if self.habits.half:
            batch = {
                name: value.to(HALF[self.habits.half]) if value.is_floating_point() else value
                for name, value in batch.items()
            }
        inputs = (
            batch if not self.habits.criterion else {name: value for name, value in batch.items() if name != "labels"}
        )
        loss = criterion(self.model(**inputs), batch)
        loss.backward()
        if self.habits.half:
            triples = list(
                zip(self.masters.parameters(), self.model.parameters(), self.exact.parameters(), strict=True)
            )
            for master, working, exact in triples:
                exact.data.copy_(working)
                exact.grad = exact.grad if master.grad is not None else None
            wide = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
            criterion(self.exact(**wide), batch).backward()
            for master, working, _ in triples:
                if working.grad is not None:
                    master.grad = working.grad.float() if master.grad is None else master.grad + working.grad.float()
                    working.grad = None
        return loss.detach()

    def rounding_allowed(self) -> float:
        """What gradients of another layout may differ by, of the largest: three times what these are off from those in
        fp32 at the same rounded weights. Theirs may be off by as much the other way, at the worst of many elements
        by twice as much."""
        pairs = [
            (master.grad, exact.grad)
            for master, exact in zip(self.masters.parameters(), self.exact.parameters(), strict=True)
            if master.grad is not None and exact.grad is not None
        ]
        return (
            3
            * max(float((one - other).abs().max()) for one, other in pairs)
            / max(float(exact.abs().max()) for _, exact in pairs)
            if pairs
            else 0.0  # before the first backward
        )

    def clip(self) -> float:
        """Clip as the habit says; returns the norm before."""
        params, habits = list(self.masters.parameters()), self.habits
        norm = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        if habits.clip in ("norm", "plugin", "outside"):
            torch.nn.utils.clip_grad_norm_(params, habits.clip_at)
        elif habits.clip == "value":
            torch.nn.utils.clip_grad_value_(params, habits.clip_at)
        return float(norm)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.habits.half:
            with torch.no_grad():
                for master, working in zip(self.masters.parameters(), self.model.parameters(), strict=True):
                    working.copy_(master)


def values(params: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copies of what parameters show at this moment, as an average of weights reads them; of sharded ones this
    rank's part.
    """
    return {name: local_tensor(param.detach()).clone() for name, param in params}


def accumulating(booster: Any, model: nn.Module, optimizer: Any, last: bool, habits: Habits) -> Any:
    return nullcontext() if last or habits.bare else booster.no_sync(model, optimizer)
