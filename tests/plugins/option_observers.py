"""What an option of a plugin changes, measured on one rank of a job whose other ranks do not exist.

On torch's fake backend every collective returns at once and changes nothing, so a step of rank 0 can be watched without
other processes: what it would send, in which dtype, when it waits, how often layers run. Numbers that need other ranks
are wrong, and nothing here looks at them. An observer is a function (plugin class, settings) -> something that can be
compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright import Booster
from shardwright.kernels import linear_cross_entropy
from shardwright.testing import zoo
from tests.ranks.counting import CountBytes

MODEL = "llama-causal-lm"
OPS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "isend", "irecv", "recv")

Event = tuple[Any, ...]


def build(**config: Any) -> nn.Module:
    return zoo.build(MODEL, dtype=torch.float32, **{"num_hidden_layers": 2, **config})


def batch() -> dict[str, torch.Tensor]:
    return zoo.inputs(MODEL, batch_size=4, seq_len=8)


def boosted(plugin: Any, model: nn.Module | None = None) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=plugin)
    model = build() if model is None else model
    trained, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return booster, trained, optimizer


class _Work:
    def __init__(self, work: Any, events: list[Event], name: str) -> None:
        self._work, self._events, self._name = work, events, name

    def wait(self, *args: Any) -> Any:
        self._events.append(("wait", self._name))
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def recorded() -> Iterator[list[Event]]:
    """(operation, dtype, elements, ranks of its group) of everything sent inside, and when it was waited for."""
    events: list[Event] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in OPS:
            plain = getattr(dist, name)

            def record(*args: Any, name: str = name, plain: Any = plain, **kwargs: Any) -> Any:
                tensor = args[1] if name == "reduce_scatter_tensor" else args[0]
                events.append((name, tensor.dtype, tensor.numel(), dist.get_world_size(kwargs.get("group"))))
                work = plain(*args, **kwargs)
                return None if work is None else _Work(work, events, name)

            patch.setattr(dist, name, record)
        yield events


def logits(plugin: type, settings: dict[str, Any]) -> str:
    """What a forward with labels returns for them, where there are many."""
    _, model, _ = boosted(plugin(**settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(linear_cross_entropy.CHUNK_BYTES, "cpu", 1024)
        return type(model(**batch()).logits).__name__


def traffic(plugin: type, settings: dict[str, Any]) -> list[Event]:
    """What two steps send and when they wait."""
    booster, model, optimizer = boosted(plugin(**settings))
    with recorded() as events:
        for _ in range(2):
            events.append(("forward",))
            loss = model(**batch()).loss
            events.append(("backward",))
            booster.backward(loss, optimizer)
            events.append(("step",))
            optimizer.step()
            optimizer.zero_grad()
    return events


def buffers(plugin: type, settings: dict[str, Any]) -> list[Event]:
    """What the forward of a model with running statistics sends."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    _, trained, _ = boosted(plugin(**settings), model)
    with recorded() as events:
        trained(torch.ones(2, 3))
    return events


def report(plugin: type, settings: dict[str, Any]) -> list[str]:
    """The layout report, without what it says about options that have no effect."""
    model = build(num_hidden_layers=8)
    text = str(plugin(**settings).preflight(model, torch.optim.AdamW(model.parameters()), 4, 8))  # type: ignore[attr-defined]
    return [line for line in text.splitlines() if not line.startswith("without effect")]


def modules(plugin: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Classes of modules, shapes and dtypes of parameters, and what users see of the model."""
    _, model, _ = boosted(plugin(**settings))
    inner = model.unwrap()
    found: dict[str, Any] = {
        name: [cls.__qualname__ for cls in type(module).__mro__] for name, module in inner.named_modules()
    }
    for name, param in inner.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        found[f"{name}: parameter"] = (tuple(param.shape), tuple(local.shape), param.dtype, isinstance(param, DTensor))
    found["attention"] = inner.config._attn_implementation
    found["marked"] = [name for name, module in inner.named_modules() if getattr(module, "marked", False)]
    return found


def outputs(plugin: type, settings: dict[str, Any]) -> tuple[Any, ...]:
    _, model, _ = boosted(plugin(**settings))
    logits = model(input_ids=batch()["input_ids"]).logits
    return tuple(logits.shape), logits.nbytes, logits.dtype


def layer_calls(plugin: type, settings: dict[str, Any]) -> int:
    """How often the first layer runs in one step, recomputation included."""
    booster, model, optimizer = boosted(plugin(**settings))
    layer = model.unwrap().model.layers[0].mlp
    calls: list[int] = []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    if hasattr(model, "executor"):
        booster.execute_pipeline(iter([batch()]), model, None, optimizer)  # type: ignore[arg-type]
    else:
        booster.backward(model(**batch()).loss, optimizer)
    return len(calls)


def actions(plugin: type, settings: dict[str, Any]) -> str:
    """What the first rank of a pipeline does in a step."""
    _, model, _ = boosted(plugin(**settings), build(num_hidden_layers=8))
    return str(model.executor._lowered(4, True).actions[0])


def loss_scales(plugin: type, settings: dict[str, Any]) -> list[float]:
    """The loss scale over overflows and clean steps, as the boosted optimizer's scaler moves it."""
    _, _, optimizer = boosted(plugin(**settings))
    scales = [float(optimizer.scaler.scale)]
    for found in [1] * 4 + [0] * 18:
        optimizer.scaler.update(torch.tensor(float(found)))
        scales.append(float(optimizer.scaler.scale))
    return scales


def step_size(plugin: type, settings: dict[str, Any]) -> float:
    """How far SGD moves the weights: proportional to the gradients that it steps on."""
    model = build()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    booster = Booster(plugin=plugin(**settings))
    trained, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert optimizer is not None
    booster.backward(100 * trained(**batch()).loss, optimizer)
    optimizer.step()
    after = dict(trained.unwrap().named_parameters())
    return sum(
        float((after[name].detach().float() - value).abs().sum())
        for name, value in before.items()
        if after[name].shape == value.shape
    )


def gradients_kept(plugin: type, settings: dict[str, Any]) -> list[Any]:
    """Elements of gradients that live between backward and step."""
    booster, model, optimizer = boosted(plugin(**settings))
    booster.backward(model(**batch()).loss, optimizer)
    return [bucket.grads is not None for bucket in optimizer.buckets]


def masters(plugin: type, settings: dict[str, Any]) -> list[Any]:
    """Dtypes of what the optimizer steps, and whether it is memory of its own."""
    _, _, optimizer = boosted(plugin(**settings))
    return [
        (bucket.master.dtype, bucket.flat.dtype, _shares_memory(bucket.master, bucket.flat))
        for bucket in optimizer.buckets
    ]


def _shares_memory(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def printed(plugin: type, settings: dict[str, Any]) -> str:
    out = StringIO()
    with redirect_stdout(out):
        boosted(plugin(**settings))
    return out.getvalue()


def places(plugin: type, settings: dict[str, Any]) -> Any:
    """Which global ranks share a pipeline, and which the data."""
    mesh = plugin(**settings).mesh  # type: ignore[attr-defined]
    return mesh.ranks("pp"), mesh.ranks("dp"), mesh.ranks("zero")


def experts(plugin: type, settings: dict[str, Any]) -> Any:
    """Which global ranks share the experts of a layer, and how many of these this rank holds."""
    made: Any = plugin(**settings)
    _, model, _ = boosted(made, zoo.build("qwen3-moe-causal-lm", dtype=torch.float32))
    return made.mesh.ranks("ep"), model.unwrap().model.layers[0].mlp.experts.down_proj.shape[0]


def input_dtype(plugin: type, settings: dict[str, Any]) -> Any:
    """In which dtype floating-point inputs arrive; a failure for want of a cast counts as an answer."""
    model = nn.Sequential(nn.Linear(3, 3))
    _, trained, _ = boosted(plugin(**settings), model)
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    try:
        trained(torch.ones(2, 3))
    except RuntimeError as error:
        seen.append(type(error).__name__)
    return seen


def cuts_a_tower(plugin: type, settings: dict[str, Any]) -> Any:
    """Whether a model whose inputs cannot be guessed is cut."""
    from tests.plugins.test_advice import Tower

    try:
        return len(plugin(**settings).preflight(Tower().double()).stages)  # type: ignore[attr-defined]
    except ValueError as error:
        return str(error)


def ddp_settings(plugin: type, settings: dict[str, Any]) -> dict[str, Any]:
    """What torch's reducer recorded about itself over a step; it needs a backend that hands results back, so a world
    of one.
    """
    booster, model, optimizer = boosted(plugin(**settings))
    booster.backward(model(**batch()).loss, optimizer)
    data = model.module._get_ddp_logging_data()
    wanted = (
        "bucket_cap_bytes",
        "broadcast_buffers",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "bucket_sizes",
        "static_graph",
        "comm_hook",
    )
    found = {key: data[key] for key in wanted if key in data}
    param = next(param for param in model.parameters() if param.grad is not None)
    return {**found, "view": param.grad._is_view(), "static": model.module.static_graph}


def bytes_sent(plugin: type, settings: dict[str, Any]) -> dict[torch.dtype, float]:
    """In one step, by dtype, whoever sends."""
    booster, model, optimizer = boosted(plugin(**settings))
    with CountBytes() as sent:
        booster.backward(model(**batch()).loss, optimizer)
    return dict(sent.by_dtype)


def fp8_is_refused(plugin: type, settings: dict[str, Any]) -> bool:
    """Whether boosting says that this device has no products in 8 bits."""
    try:
        boosted(plugin(**settings))
    except ValueError as error:
        return "products in 8 bits need" in str(error)
    return False


def products(plugin: type, settings: dict[str, Any]) -> list[float]:
    """Losses of steps between which all weights grow and shrink."""
    booster, model, optimizer = boosted(plugin(**settings), build(hidden_size=64, intermediate_size=128))
    found = []
    for scale in (1.0, 2.0**-6, 2.0**6):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(scale)
        loss = model(**batch()).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def fsdp_state(plugin: type, settings: dict[str, Any]) -> list[Any]:
    """Of every FSDP module: its name, dtypes, whether it gave its parameters back after forward, where they are
    kept.
    """
    _, model, _ = boosted(plugin(**settings))
    module = model.unwrap()
    logits = model(input_ids=batch()["input_ids"]).logits
    found: list[Any] = [logits.dtype]
    for name, part in module.named_modules():
        if hasattr(part, "unshard"):
            state = part._get_fsdp_state()
            group = state._fsdp_param_group
            found.append(
                (
                    name,
                    state._mp_policy,
                    isinstance(next(part.parameters()), DTensor),
                    group is not None and group.offload_policy,
                )
            )
    return found
