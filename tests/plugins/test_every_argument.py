"""Every argument of `Booster`, `launch`, `prepare_dataloader` and of boosted optimizers changes something, or is
refused or named.

The tables have what to see for each argument, found with inspect.signature: a new argument without an entry fails here.
The arguments of plugins are walked in test_every_option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import shardwright
from shardwright import Booster
from shardwright.cluster import groups
from shardwright.cluster.launch import DEFAULT_TIMEOUT
from shardwright.plugins import HybridParallelPlugin, TorchDDPPlugin
from shardwright.plugins.base import Plugin
from shardwright.precision.optimizer import MixedPrecisionOptimizer
from shardwright.utils.tensors import local_tensor
from tests.plugins.argument_tables import launch_table, loader_table
from tests.plugins.argument_walk import (
    Changes,
    Refused,
    Run,
    Said,
    See,
    batches,
    check,
    has_gradients,
    mean,
    traced,
    twice,
)


def llama() -> Any:
    from tests.plugins import option_observers

    return option_observers.build()


def _booster(tmp_path: Path) -> dict[str, list[Any]]:
    def trained(**given: Any) -> Any:
        model = nn.Linear(2, 2)
        trained, *_ = Booster(**given).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return (
            type(trained).__name__,
            next(trained.parameters()).device,
            trained(torch.ones(1, 2).to(next(trained.parameters()))).dtype,
        )

    def nan(policy: str) -> Any:
        run = Run(tmp_path, on_nan=policy)
        run.booster.backward(run.loss() * float("nan"), run.optimizer)
        run.optimizer.step()
        return run.weights() == run.weights()

    return {
        "device": [
            Changes(lambda device: trained(device=device), "cpu", "meta"),
            Refused(lambda device: Booster(device=device), "gpu", "device='gpu' is no device"),
            Refused(
                lambda device: Booster(device=device, plugin=TorchDDPPlugin()),
                "cpu",
                "the plugin places the model itself",
            ),
        ],
        "mixed_precision": [Changes(lambda name: trained(mixed_precision=name), None, "bf16")],
        "plugin": [
            Changes(lambda plugin: trained(plugin=plugin), None, TorchDDPPlugin()),
            Refused(lambda plugin: Booster(plugin=plugin), "ddp", "plugin='ddp' is not one of"),
        ],
        "on_nan": [Changes(nan, "warn", "skip")],
        "detect_anomaly": [  # what it finds: tests/plugins/test_anomaly.py
            Changes(
                lambda value: Run(tmp_path, on_nan="stop", detect_anomaly=value).optimizer.loss_guard.witness is None,
                None,
                "name",
            ),
            Refused(lambda value: Booster(on_nan="stop", detect_anomaly=value), "all", "is not one of 'name'"),
            Refused(lambda value: Booster(detect_anomaly=value), "name", "with on_nan='warn'"),
        ],
        "check_replicas": [  # what it finds: tests/plugins/test_replica_check.py
            Changes(lambda value: Run(tmp_path, check_replicas=value).optimizer.loss_guard.each_step is None, 1, None),
            Refused(lambda value: Booster(check_replicas=value), 0, "check_replicas=0 must be a number of steps"),
        ],
    }


def _boost(tmp_path: Path) -> dict[str, list[Any]]:
    def boost(**given: Any) -> Any:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {name: make(optimizer) for name, make in given.items()}
        got = Booster(plugin=TorchDDPPlugin()).boost(**{"model": model, "optimizer": optimizer, **options})
        return [type(part).__name__ for part in got]

    def loader(_: Any) -> DataLoader:
        return DataLoader(TensorDataset(torch.zeros(4, 3)))

    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    return {
        "model": [Refused(lambda value: boost(model=lambda _: value), None, "model=NoneType is not a torch.nn.Module")],
        "optimizer": [
            Changes(lambda make: boost(optimizer=make), lambda optimizer: optimizer, lambda _: None),
            Refused(lambda value: boost(optimizer=lambda _: value), other, "not in model=Linear"),
        ],
        "criterion": [Changes(lambda make: boost(criterion=make), lambda _: None, lambda _: mean)],
        "dataloader": [Changes(lambda make: boost(dataloader=make), lambda _: None, loader)],
        "lr_scheduler": [
            Changes(lambda make: boost(lr_scheduler=make), lambda _: None, lambda optimizer: StepLR(optimizer, 1)),
            Refused(
                lambda value: boost(lr_scheduler=lambda _: value), StepLR(other, 1), "was built on another optimizer"
            ),
        ],
    }


def _steps(tmp_path: Path) -> dict[str, dict[str, list[Any]]]:
    run, other = Run(tmp_path), Run(tmp_path)

    def see(name: str) -> See:
        def ran(value: Any) -> Any:
            run.optimizer.zero_grad()
            got = run.pipeline(**{name: batches(value) if name == "data_iter" else value})
            return got["loss"] is None or float(got["loss"].detach()), got["outputs"] is None, has_gradients(run)

        return ran

    def reduced(context: Callable[[], Any]) -> Any:
        run.optimizer.zero_grad()
        with context():
            return run.optimizer.require_sync

    def plain() -> Any:
        return run.booster.no_sync(run.model, run.optimizer)

    def traced_with(name: str) -> See:
        return lambda value: traced(run, **{name: value})

    return {
        "profile": {
            "directory": [Changes(traced_with("directory"), tmp_path / "one", str(tmp_path / "other"))],
            "steps": [Changes(traced_with("steps"), 1, 2), Refused(traced_with("steps"), 0, "steps=0")],
            "wait": [Changes(traced_with("wait"), 0, 1), Refused(traced_with("wait"), True, "wait=True")],
            "warmup": [Changes(traced_with("warmup"), 0, 1), Refused(traced_with("warmup"), -1, "warmup=-1")],
            "memory": [Changes(traced_with("memory"), False, True)],
        },
        "execute_pipeline": {
            "data_iter": [Changes(see("data_iter"), 1.0, 2.0)],
            "model": [Refused(see("model"), other.model, "another Booster boosted")],
            "criterion": [Changes(see("criterion"), mean, twice)],
            "optimizer": [
                Changes(see("optimizer"), run.optimizer, None),
                Refused(see("optimizer"), run.raw, "not a bare AdamW"),
            ],
            "return_loss": [Changes(see("return_loss"), True, False), Refused(see("return_loss"), "no", "use False")],
            "return_outputs": [Changes(see("return_outputs"), False, True)],
        },
        "backward": {
            "loss": [
                Changes(
                    lambda factor: (
                        run.optimizer.zero_grad(),
                        run.booster.backward(run.loss() * factor, run.optimizer),
                        run.optimizer.get_grad_norm(),
                    ),
                    1.0,
                    2.0,
                )
            ],
            "optimizer": [
                Refused(lambda optimizer: run.booster.backward(run.loss(), optimizer), run.raw, "not a bare AdamW")
            ],
        },
        "no_sync": {
            "model": [
                Refused(lambda model: run.booster.no_sync(model, run.optimizer), nn.Linear(1, 1), "not a bare Linear")
            ],
            "optimizer": [
                Changes(reduced, lambda: torch.no_grad(), plain),
                Refused(
                    lambda optimizer: run.booster.no_sync(run.model, optimizer),
                    other.optimizer,
                    "optimizer of another model",
                ),
            ],
        },
    }


def _files(tmp_path: Path) -> dict[str, dict[str, list[Any]]]:
    run = Run(tmp_path, steps=2)
    next(iter(run.loader))
    booster, model, optimizer, scheduler = run.booster, run.model, run.optimizer, run.scheduler
    everything = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": run.loader}
    booster.save(tmp_path / "all", **everything, step=2, extra={"seen": 1})
    booster.save(tmp_path / "only" / "first", model=model)
    booster.save_model(model, tmp_path / "model")
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    booster.save_lr_scheduler(scheduler, tmp_path / "scheduler")
    (tmp_path / "half").mkdir()
    from safetensors.torch import save_file

    save_file({"0.weight": torch.zeros(4, 3)}, tmp_path / "half" / "model.safetensors")
    count = iter(range(1000))

    def saved(name: str) -> See:
        def see(value: Any) -> Any:
            place = f"saved{next(count)}"
            booster.save(**{"path": tmp_path / place / "x", "step": 1, name: value})
            booster.wait()
            at = tmp_path / place / "x"
            return [
                sorted(path.name for path in at.iterdir()),
                *((at / part).read_text() for part in ("state.json", "rank-00000.json")),
            ]

        return see

    def kept(keep: int | None) -> Any:
        place = f"kept{next(count)}"
        for number in range(3):
            booster.save(tmp_path / place / str(number), step=number, keep_last=keep)
        return sorted(path.name for path in (tmp_path / place).iterdir())

    def unfinished(name: str, *what: Any) -> See:
        """Whether the call returned with its writing still under way."""

        def see(use_async: bool) -> bool:
            getattr(booster, name)(*what, *([tmp_path / f"async{next(count)}"]), use_async=use_async)
            running = booster._checkpoints._background._thread is not None
            booster.wait()
            return running

        return see

    def loaded(name: str) -> See:
        """What a fresh run holds after it has loaded without and with the argument."""

        def see(given: bool) -> Any:
            fresh = Run(tmp_path)
            parts = {
                "model": fresh.model,
                "optimizer": fresh.optimizer,
                "lr_scheduler": fresh.scheduler,
                "dataloader": fresh.loader,
            }
            fresh.booster.load(tmp_path / "all", **{key: part for key, part in parts.items() if given or key != name})
            rates = [group["lr"] for group in fresh.optimizer.param_groups]
            return fresh.weights(), rates, fresh.scheduler.last_epoch, len(fresh.loader)

        return see

    def exported(name: str) -> See:
        def see(value: Any) -> list[str]:
            place = f"export{next(count)}"
            base = {"shard": {"shard": True, "size_per_shard": 1e-5}, "size_per_shard": {"shard": True}}.get(name, {})
            booster.save_model(model, tmp_path / place, **{**base, name: value})  # type: ignore[arg-type]
            return [name.removeprefix(place) for name in run.files(place)]

        return see

    def written_as(masters: bool) -> torch.dtype:
        from safetensors.torch import load_file

        half = Run(tmp_path, HybridParallelPlugin(precision="bf16"))
        half.booster.save_model(half.model, tmp_path / "half_precision", masters=masters)
        return load_file(tmp_path / "half_precision" / "model.safetensors")["0.weight"].dtype

    def states(name: str) -> See:
        def see(value: Any) -> list[str]:
            place = f"states{next(count)}"
            booster.save_optimizer(optimizer, tmp_path / place, **{"shard": True, "size_per_shard": 1e-5, name: value})
            return [name.removeprefix(place) for name in run.files(place)]

        return see

    def damaged(verify: bool) -> Any:
        place = tmp_path / f"damaged{next(count)}"
        booster.save(place, **everything)
        file = place / "rank-00000.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        try:
            return booster.load(place, **everything, verify=verify)["path"] is not None
        except Exception as error:
            return type(error).__name__

    whole = "size_per_shard=3 (shard=False"
    return {
        "save": {
            "path": [Refused(lambda path: booster.save(path, tmp_path), model, "path=HybridModel is no path")],
            "model": [Changes(saved("model"), None, model)],
            "optimizer": [
                Changes(saved("optimizer"), None, optimizer),
                Refused(saved("optimizer"), run.raw, "not a bare AdamW"),
            ],
            "lr_scheduler": [Changes(saved("lr_scheduler"), None, scheduler)],
            "dataloader": [
                Changes(saved("dataloader"), None, run.loader),
                Refused(saved("dataloader"), DataLoader([1]), "cannot tell its position"),  # type: ignore[arg-type]
            ],
            "step": [
                Changes(saved("step"), 1, torch.tensor(2)),
                Refused(saved("step"), 1.5, "step=1.5 must be a whole number"),
            ],
            "extra": [Changes(saved("extra"), None, {"seen": 1})],
            "use_async": [Changes(unfinished("save"), False, True)],
            "keep_last": [Changes(kept, None, 1), Refused(kept, 0, "keep_last=0"), Refused(kept, "2", "use 2 or None")],
        },
        "load": {
            "path_or_run_dir": [Changes(lambda name: booster.load(tmp_path / name)["step"], "all", "only")],
            "model": [Refused(lambda value: booster.load(tmp_path / "all", model=value), model, "pass optimizer= too")],
            "optimizer": [
                Refused(
                    lambda value: booster.load(tmp_path / "all", model=model, optimizer=value),
                    run.raw,
                    "not a bare AdamW",
                )
            ],
            "lr_scheduler": [Changes(loaded("lr_scheduler"), True, False)],
            "dataloader": [Changes(loaded("dataloader"), True, False)],
            "verify": [Changes(damaged, True, False)],
        },
        "save_model": {
            "model": [Refused(lambda path: booster.save_model(path, model), tmp_path, "path=HybridModel is no path")],
            "path": [],
            "shard": [Changes(exported("shard"), False, True), Refused(exported("shard"), "no", "use False")],
            "prefix": [Changes(exported("prefix"), None, "ema")],
            "size_per_shard": [
                Changes(exported("size_per_shard"), 1024, 1e-5),
                Said(lambda size: booster.save_model(model, tmp_path / "whole", size_per_shard=size), 3, whole),
                Refused(exported("size_per_shard"), "1GB", "size_per_shard='1GB' must be a number"),
            ],
            "use_safetensors": [Refused(exported("use_safetensors"), False, "would write pickle files")],
            "use_async": [Changes(unfinished("save_model", model), False, True)],
            "masters": [Changes(written_as, False, True), Refused(written_as, "no", "use False")],
        },
        "load_model": {
            "model": [],
            "path": [],
            "strict": [
                Changes(
                    lambda strict: _outcome(lambda: booster.load_model(model, tmp_path / "half", strict=strict)),
                    True,
                    False,
                )
            ],
        },
        "save_optimizer": {
            "optimizer": [Refused(lambda path: booster.save_optimizer(path, optimizer), tmp_path, "is no optimizer")],
            "path": [],
            "shard": [Changes(states("shard"), True, False)],
            "size_per_shard": [
                Changes(states("size_per_shard"), 1e-5, 1024),
                Said(
                    lambda size: booster.save_optimizer(optimizer, tmp_path / "states", size_per_shard=size),
                    3.0,
                    "size_per_shard=3.0",
                ),
            ],
            "use_async": [Changes(unfinished("save_optimizer", optimizer), False, True)],
        },
        "load_optimizer": {"optimizer": [], "path": []},
        "save_lr_scheduler": {
            "lr_scheduler": [
                Refused(lambda value: booster.save_lr_scheduler(value, tmp_path / "none"), None, "lr_scheduler=None")
            ],
            "path": [],
        },
        "load_lr_scheduler": {"lr_scheduler": [], "path": []},
    }


def _outcome(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except Exception as error:
        return type(error).__name__


def _adapters(tmp_path: Path) -> dict[str, dict[str, list[Any]]]:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32"))
    config = LoraConfig(r=2, target_modules=["q_proj"])
    kept = booster.boost(booster.enable_lora(llama(), lora_config=config))[0]
    booster.save_lora_as_pretrained(kept, tmp_path / "adapters")

    def adapted(**given: Any) -> Any:
        return sum(param.numel() for param in booster.enable_lora(llama(), **given).parameters() if param.requires_grad)

    bigger = LoraConfig(r=4, target_modules=["q_proj"])
    return {
        "enable_lora": {
            "model": [],
            "pretrained_dir": [
                Changes(
                    lambda path: adapted(pretrained_dir=path, lora_config=None if path else bigger),
                    None,
                    str(tmp_path / "adapters"),
                )
            ],
            "lora_config": [
                Changes(lambda config: adapted(lora_config=config), config, bigger),
                Refused(lambda config: adapted(lora_config=config), None, "lora_config=peft.LoraConfig"),
            ],
        },
        "save_lora_as_pretrained": {
            "model": [
                Refused(
                    lambda model: booster.save_lora_as_pretrained(model, tmp_path / "no"), nn.Linear(1, 1), "adapters"
                )
            ],
            "path": [],
        },
    }


def _optimizer(tmp_path: Path) -> dict[str, dict[str, list[Any]]]:
    def after(plugin: Callable[[], Plugin], act: Callable[[Run], Any]) -> Any:
        run = Run(tmp_path, plugin())
        run.backward()
        return act(run)

    kinds: list[Callable[[], Plugin]] = [
        TorchDDPPlugin,  # torch's own gradients
        *(partial(HybridParallelPlugin, precision="fp32", zero_stage=stage) for stage in (0, 1, 3)),
    ]

    def changes(act: Callable[[Run, Any], Any], plain: Any, other: Any) -> list[Any]:
        return [
            Changes(lambda value, kind=kind: after(kind, lambda run: act(run, value)), plain, other) for kind in kinds
        ]

    def clipped(run: Run, **options: Any) -> Any:
        norm = run.optimizer.clip_grad_by_norm(**{"max_norm": 1.0, **options})
        return [round(float(norm), 4), *(round(run.optimizer.get_grad_norm(order), 3) for order in (2.0, 1.0))]

    def second_step(run: Run, set_to_none: bool) -> bool:
        """Parameters without a gradient move by their momentum where their gradient is zero."""
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=set_to_none)
        run.model.unwrap().whole = False
        run.booster.backward(run.loss(), run.optimizer)
        weight = run.model.unwrap()[1].weight
        before = local_tensor(weight.detach()).clone()
        run.optimizer.step()
        return not torch.equal(local_tensor(weight.detach()), before)

    def norm_after(clip: Callable[[Any], Any]) -> Callable[[Run, Any], Any]:
        return lambda run, order: (clip(run.optimizer), round(run.optimizer.get_grad_norm(order), 3))[1]

    def by_value(run: Run, value: float) -> Any:
        run.optimizer.clip_grad_by_value(value)
        return run.optimizer.get_grad_norm()

    infinite = float("inf")
    return {
        "clip_grad_by_norm": {
            "max_norm": changes(lambda run, value: clipped(run, max_norm=value), 1.0, 2.0),
            "norm_type": changes(lambda run, value: clipped(run, norm_type=value), 2.0, infinite),
            "error_if_nonfinite": [],  # tests/plugins/call_sequences.py
        },
        "get_grad_norm": {
            "norm_type": [
                *changes(norm_after(lambda _: None), 2.0, infinite),
                *changes(norm_after(lambda optimizer: optimizer.clip_grad_by_norm(1.0)), 2.0, 1.0),
            ],
        },
        "clip_grad_by_value": {"clip_value": changes(by_value, 0.1, 0.2)},
        "zero_grad": {"set_to_none": changes(second_step, True, False)},
        "step": {"closure": [Refused(Run(tmp_path).optimizer.step, lambda: 1.0, "is not supported")]},
    }


def _tables(tmp_path: Path) -> Iterator[tuple[Any, dict[str, list[Any]]]]:
    yield Booster, _booster(tmp_path)
    yield Booster.boost, _boost(tmp_path)
    for make in (_steps, _files, _adapters):
        yield from ((getattr(Booster, name), table) for name, table in make(tmp_path).items())
    yield from ((getattr(MixedPrecisionOptimizer, name), table) for name, table in _optimizer(tmp_path).items())
    yield shardwright.launch, launch_table()
    yield Plugin.prepare_dataloader, loader_table()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    shardwright.launch(0, 1, None, None, backend="gloo")
    monkeypatch.setattr(groups, "_timeout", DEFAULT_TIMEOUT)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("job")
def test_every_argument_acts_or_is_refused_or_is_named(tmp_path: Path) -> None:
    walked = set()
    for function, table in _tables(tmp_path):
        walked.add(function)
        assert set(inspect.signature(function).parameters) - {"self"} == set(table), function
        for name, entries in table.items():
            for entry in entries:
                try:
                    check(entry)
                except BaseException as error:
                    error.add_note(f"in {entry} for the argument {name!r} of {function.__qualname__}")
                    raise
    public = {value for name, value in vars(Booster).items() if not name.startswith("_") and callable(value)}
    assert public - walked == {Booster.wait}  # which has no arguments


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: Booster().no_sync(optim=None),
            "Booster.no_sync takes no argument optim=None - did you mean 'optimizer'?",
        ),
        (
            lambda: Booster().backward(los=None, optimizer=None),
            "Booster.backward takes no argument los=None - did you mean 'loss'?",
        ),
        (
            lambda: shardwright.launch_from_torch(sed=1),
            "launch_from_torch takes no argument sed=1 - did you mean 'seed'?",
        ),
        (lambda: shardwright.shardformer.ShardConfig(enable_flash=True), "did you mean 'enable_flash_attention'?"),
        (
            lambda: shardwright.shardformer.ShardConfig(enable_flash_attention="no"),
            "enable_flash_attention='no' must be True or False",
        ),
        (lambda: Booster().load_model(None, "x", strict="no"), "strict='no' must be True or False; use False"),
    ],
)
def test_unknown_arguments_and_flags_as_text(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value)
