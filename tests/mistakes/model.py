"""Mistakes around the boosted model, its optimizer, and the names of things."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.shardformer.layer import whole_logits
from shardwright.testing import adamw, zoo

from .table import mistake, refused

TWO = {"num_hidden_layers": 2}
NAME = "llama-causal-lm"


class Job(NamedTuple):
    booster: Booster
    model: Any  # what boost returned
    optimizer: Any
    original: Any  # the optimizer that boost was given
    plain: Any  # a copy of the model before boost

    def batch(self, samples: int = 2) -> dict[str, torch.Tensor]:
        return zoo.inputs(NAME, batch_size=samples, seq_len=7, **TWO)

    @property
    def is_split(self) -> bool:
        return bool(self.booster.plugin.split)  # type: ignore[union-attr]


def job(layout: str = "mixed", world: int | None = None, **changes: Any) -> Job:
    """A fresh one. "mixed" is tp, pp or both, as the number of ranks allows; "tp" and "zero1" and "zero3" are what
    they say.
    """
    world = dist.get_world_size() if world is None else world
    layouts: dict[str, dict[str, Any]] = {
        "mixed": {
            1: {},
            2: {"pp_size": 2, "num_microbatches": 2},
            4: {"tp_size": 2, "pp_size": 2, "num_microbatches": 2},
        }[world],
        "tp": {"tp_size": min(world, 2)},
        "zero1": {"zero_stage": 1},
        "zero3": {"zero_stage": 3},
    }
    plain = zoo.build(NAME, dtype=torch.float32, **TWO)
    model = copy.deepcopy(plain)
    original = adamw(model)
    booster = Booster(plugin=HybridParallelPlugin(**{"precision": "fp32", **layouts[layout], **changes}))
    boosted, optimizer, *_ = booster.boost(model, original)
    return Job(booster, boosted, optimizer, original, plain)


@functools.cache
def shared(layout: str = "mixed") -> Job:
    """One for all rows that leave it as it is."""
    return job(layout)


def directory() -> Path:
    """A new one that all ranks see."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return Path(str(name[0]))


def same_weights(path: Path, plain: nn.Module) -> bool:
    loaded: Any = type(plain)
    again, report = loaded.from_pretrained(path, output_loading_info=True)
    state = again.state_dict()
    return not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")) and all(
        torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items()
    )


# Calls that are meant for a whole model.


@mistake(
    symptom="`model.save_pretrained(path)` after boost, on all ranks",
    gets="the whole model in the directory, whatever the layout, bit for bit what `from_pretrained` reads",
    fix="nothing; `booster.save_model` says more about files",
)
def save_pretrained(rank: int, world: int) -> None:
    path, run = directory(), shared()
    run.model.save_pretrained(path / "wrapped")
    run.model.unwrap().save_pretrained(path / "unwrapped", max_shard_size="20KB")
    dist.barrier()
    assert rank or (same_weights(path / "wrapped", run.plain) and same_weights(path / "unwrapped", run.plain))


@mistake(
    symptom="`if rank == 0: model.save_pretrained(path)` where every rank holds all weights (DDP, ZeRO 1 and 2)",
    gets="the whole model, written by rank 0, as with torch's DDP",
    fix="nothing; a call on all ranks does the same",
)
def save_on_rank_0(rank: int, world: int) -> None:
    path, run = directory(), shared("zero1")
    if rank == 0:
        run.model.save_pretrained(path)
        assert same_weights(path, run.plain)
    dist.barrier()


@mistake(
    symptom="`if rank == 0: model.save_pretrained(path)`, or `booster.save_model` there, under tp, pp or ZeRO-3",
    gets="after 5 s the log names the ranks that it waits for; when the job's timeout has passed, or at once when "
    "another rank calls "
    "something else that takes all of them, an error says so",
    fix="call it on all ranks",
    worlds=(2, 4),
)
def save_on_rank_0_of_parts(rank: int, world: int) -> None:
    path, run = directory(), shared()
    with refused("rank 0 model.save_pretrained to .*, rank 1 booster.save_model to"):
        if rank == 0:
            run.model.save_pretrained(path)
        else:
            run.booster.save_model(run.model, path)


@mistake(
    symptom="`torch.save(model.state_dict(), path)` under tp, pp or ZeRO-3",
    gets="refused: this rank holds a part",
    fix="`booster.save_model(model, path)`; `model.local_state_dict()` is the part",
)
def state_dict(rank: int, world: int) -> None:
    run = shared()
    if run.is_split:
        with refused("holds a part", r"booster\.save_model\(model, path\)", r"model\.local_state_dict\(\)"):
            run.model.state_dict()
    else:
        assert run.model.state_dict().keys() == run.plain.state_dict().keys()
    run.model.load_local_state_dict(run.model.local_state_dict())


@mistake(
    symptom="`model.load_state_dict(whole_state_dict)` after boost",
    gets="every rank takes its part, and the optimizer's fp32 masters follow",
    fix="nothing; all ranks call it with all weights",
)
def load_state_dict(rank: int, world: int) -> None:
    run, other = job(), zoo.build(NAME, dtype=torch.float32, seed=3, **TWO)
    run.model.load_state_dict(other.state_dict())
    path = directory()
    run.booster.save_model(run.model, path)
    assert rank or same_weights(path, other)
    with refused(
        "does not fit the model" if run.is_split else "Missing key", by=(ValueError if run.is_split else RuntimeError)
    ):
        run.model.load_state_dict({})


@mistake(
    symptom="`model.num_parameters()` after boost",
    gets="the count of the whole model on every rank",
    fix="nothing; `sum(p.numel() for p in model.parameters())` counts what this rank holds",
)
def num_parameters(rank: int, world: int) -> None:
    run = shared()
    for settings in ({}, {"exclude_embeddings": True}, {"only_trainable": True}):
        assert (
            run.model.num_parameters(**settings)
            == run.plain.num_parameters(**settings)
            == run.model.unwrap().num_parameters(**settings)
        )


@mistake(
    symptom="`model.push_to_hub(name)` under tp, pp or ZeRO-3",
    gets="refused: no rank holds the whole model",
    fix="`booster.save_model(model, path)` on all ranks, then `huggingface_hub.HfApi().upload_folder(...)` on one",
    worlds=(2, 4),
)
def push_to_hub(rank: int, world: int) -> None:
    with refused("push_to_hub under pp_size=2|push_to_hub under tp_size=2, pp_size=2", "upload_folder"):
        shared().model.push_to_hub("nobody/nothing")


@mistake(
    symptom="`model.resize_token_embeddings(len(tokenizer))` after boost",
    gets="nothing where the size is right already, else refused",
    fix="call it before `booster.boost`, and build the optimizer after it",
)
def resize(rank: int, world: int) -> None:
    run = shared()
    run.model.resize_token_embeddings(run.plain.config.vocab_size)
    for model in (run.model, run.model.unwrap()):
        with refused("resize_token_embeddings after boost", "before booster.boost"):
            model.resize_token_embeddings(run.plain.config.vocab_size + 3)


@mistake(
    symptom="`model.half()`, `model.to(torch.bfloat16)` or `model.to(other_device)` after boost",
    gets="nothing where nothing would change (`model.to(device)`, `model.float()` in fp32), else refused",
    fix="`precision=` of the plugin, or convert before boost",
)
def convert(rank: int, world: int) -> None:
    run = shared()
    assert run.model.to("cpu").float() is run.model
    for change in (run.model.half, lambda: run.model.to(torch.bfloat16), run.model.unwrap().double):
        with refused("from torch.float32 on cpu", "precision="):
            change()


@mistake(
    symptom="`model.generate(...)` on a boosted model",
    gets="the tokens of one process under tp and ZeRO, also when ranks stop at different lengths; refused with a "
    "pipeline",
    fix="with a pipeline save the model and load it in one process",
)
def generate(rank: int, world: int) -> None:
    run, length = shared("zero3"), 3 + rank
    prompt = torch.tensor([[1, 2, 3 + rank]])
    plain = run.plain.generate(prompt, max_new_tokens=length, do_sample=False)
    assert torch.equal(run.model.generate(prompt, max_new_tokens=length, do_sample=False), plain)
    if world > 1:
        with refused("generate under .*pp_size=2", "booster.save_model", "pp_size=1"):
            shared().model.generate(prompt)


@mistake(
    symptom="`model(**batch).logits.argmax(-1)`, or a loss of one's own on `logits`, with `tp_size` above 1",
    gets="`F.cross_entropy`, `argmax`, `topk`, `softmax`, `log_softmax`, `gather`, `kl_div`, sizes and what goes row "
    "by row or element by element are those of the whole vocabulary, called on all ranks; what else needs all of it "
    "(`cosine_similarity`, `matmul`, `numpy()`) is refused, since a rank holds a part of the logits",
    fix="`shardformer.layer.whole_logits(logits)` on all ranks, or `HybridParallelPlugin(parallel_output=False)`, "
    "which gathers always",
)
def logits_of_a_part(rank: int, world: int) -> None:
    made = job("tp")
    batch = made.batch()
    labels = batch["labels"][:, 1:].flatten()
    logits = made.model(**batch).logits
    loss = F.cross_entropy(2 * logits[:, :-1].flatten(0, 1), labels)
    reference = made.plain(**batch).logits
    expected = F.cross_entropy(2 * reference[:, :-1].flatten(0, 1), labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    made.booster.backward(loss, made.optimizer)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in made.plain.parameters() if param.grad is not None])
    assert abs(made.optimizer.get_grad_norm() - float(norm)) < 1e-5
    uses: list[Callable[[torch.Tensor], Any]] = [
        lambda logits: logits @ torch.ones(logits.shape[-1], 2),
        lambda logits: F.cosine_similarity(logits, logits, -1),
        lambda logits: logits.detach().cpu().numpy(),
        lambda logits: torch.cat([logits, logits], -1),
    ]
    for read in (lambda logits: logits.argmax(-1), lambda logits: logits.float().log_softmax(dim=-1).topk(3).values):
        torch.testing.assert_close(read(logits), read(reference), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole_logits(logits), reference, rtol=1e-5, atol=1e-5)
    for use in uses:
        if world == 1:
            use(logits)
            continue
        with refused("is not possible on logits of which this rank holds", "parallel_output=False"):
            use(logits)
    if world > 1:
        found = made.booster.execute_pipeline(
            iter([batch]), made.model, lambda outputs, inputs: outputs.loss, return_outputs=True
        )
        with refused("corrcoef is not possible on logits of which this rank holds"):
            found["outputs"]["logits"][0].corrcoef()
        assert torch.equal(found["outputs"]["logits"].argmax(-1), reference.argmax(-1))
    whole = job("tp", parallel_output=False).model(**batch).logits
    assert torch.equal(whole.argmax(-1), reference.argmax(-1))


@mistake(
    symptom="`copy.deepcopy(model)`, `AveragedModel(model)` or `torch.save(model, path)` of a boosted model",
    gets="refused: it is bound to its optimizer and process groups",
    fix="copy before boost; for an average of weights clone `model.named_parameters()`, which is this rank's share",
)
def copies(rank: int, world: int) -> None:
    for act in (copy.deepcopy, torch.optim.swa_utils.AveragedModel, lambda model: torch.save(model, tempfile.mktemp())):
        with refused("copying or pickling a boosted model", "before booster.boost"):
            act(shared().model)


@mistake(
    symptom="`model.head = nn.Linear(...)` or `model.add_module(...)` after boost",
    gets="refused: it would be neither laid out nor trained",
    fix="change the model before boost",
)
def new_module(rank: int, world: int) -> None:
    model = shared().model
    for act in (lambda: setattr(model, "head", nn.Linear(2, 2)), lambda: model.add_module("head", nn.Linear(2, 2))):
        with refused(r"model\.head = ... after boost", "before booster.boost"):
            act()


@mistake(
    symptom="`model.generation_config = ...`, `model.config.use_cache = False`, `model.anything = x` on what boost "
    "returned",
    gets="set on the model inside, where its forward and `generate` read it",
    fix="nothing",
)
def attributes(rank: int, world: int) -> None:
    model = shared().model
    model.anything, model.config.use_cache = 5, False
    assert model.unwrap().anything == 5
    assert model.unwrap().config.use_cache is False
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)


@mistake(
    symptom="`model.zero_grad()` in place of `optimizer.zero_grad()`, or the original optimizer's",
    gets="the same as `optimizer.zero_grad()`",
    fix="nothing",
)
def zero_grad(rank: int, world: int) -> None:
    run = job("mixed")
    for clear in (run.model.zero_grad, run.original.zero_grad, run.model.unwrap().zero_grad, run.optimizer.zero_grad):
        run.booster.execute_pipeline(iter([run.batch()]), run.model, None, run.optimizer)
        run.optimizer.step()
        clear()
    run.booster.execute_pipeline(iter([run.batch()]), run.model, None, run.optimizer)


@mistake(
    symptom="a training step without `zero_grad()` after the last one",
    gets="refused on every rank before anything is communicated",
    fix="`optimizer.zero_grad()` after `optimizer.step()`",
)
def no_zero_grad(rank: int, world: int) -> None:
    run = job("mixed")
    run.booster.execute_pipeline(iter([run.batch()]), run.model, None, run.optimizer)
    run.optimizer.step()
    with refused("backward after step without zero_grad", r"call zero_grad\(\) first"):
        run.booster.execute_pipeline(iter([run.batch()]), run.model, None, run.optimizer)


@mistake(
    symptom="`model.merge_and_unload()` of LoRA adapters under tp, pp or ZeRO-3; `model.save_pretrained(path)`",
    gets="merging is refused where a rank holds a part; the adapters are saved whole, as peft reads them",
    fix="`booster.save_lora_as_pretrained(model, path)`, then merge in one process",
)
def lora(rank: int, world: int) -> None:
    import peft

    plain = zoo.build(NAME, dtype=torch.float32, **TWO)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", tp_size=min(world, 2)))
    model = booster.enable_lora(
        plain, lora_config=peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    counts = model.get_nb_trainable_parameters()
    boosted, *_ = booster.boost(model, adamw(model))
    assert boosted.get_nb_trainable_parameters() == counts
    path = directory()
    boosted.save_pretrained(path)
    dist.barrier()
    peft.PeftModel.from_pretrained(zoo.build(NAME, dtype=torch.float32, **TWO), path)
    if world > 1:
        with refused("merge_and_unload under tp_size=2", "save_lora_as_pretrained"):
            boosted.merge_and_unload()
    with refused("delete_adapter after boost"):
        boosted.delete_adapter("default")


@mistake(
    symptom="`model(**batch)` with `pp_size` above 1",
    gets="refused: no rank has the whole model",
    fix="`booster.execute_pipeline(iter([batch]), model, criterion)`, also to evaluate",
    worlds=(2, 4),
)
def plain_call(rank: int, world: int) -> None:
    run = shared()
    with refused("execute_pipeline", by=RuntimeError):
        run.model(**run.batch())
    assert (run.booster.execute_pipeline(iter([run.batch()]), run.model, None)["loss"] is None) == (
        not run.booster.plugin.stage_manager.is_last_stage()  # type: ignore[union-attr]
    )


# Boosting.


@mistake(
    symptom="`booster.boost(model, ...)` twice, of the plain model or of what the first call returned",
    gets="refused",
    fix="boost once, with everything; several learning rates are param groups of one optimizer",
)
def boost_twice(rank: int, world: int) -> None:
    run = shared()
    for model in (run.model, run.model.unwrap()):
        with refused("LlamaForCausalLM was boosted before", "use what the first call returned"):
            run.booster.boost(model, adamw(model))
    with refused("AdamW was boosted before"):
        run.booster.boost(run.plain, run.original)


@mistake(
    symptom="`booster.boost(torch.compile(model), ...)`",
    gets="refused: the names of its modules are hidden",
    fix="boost the model itself",
)
def compiled(rank: int, world: int) -> None:
    with refused(r"torch\.compile", "Boost the model itself"):
        shared().booster.boost(torch.compile(shared().plain))


@mistake(
    symptom="a criterion with parameters of its own in `booster.boost(model, optimizer, criterion)`",
    gets="refused: nobody would reduce their gradients over ranks",
    fix="make them part of the model, or freeze them",
)
def trained_criterion(rank: int, world: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    model = nn.Linear(2, 2)
    with refused("criterion=Scaled has parameters", "scale", "part of the model"):
        Booster(plugin=TorchDDPPlugin()).boost(model, adamw(model), Scaled())


# Optimizers.


@mistake(
    symptom="`optimizer.step()` of the optimizer that boost was given, not of the one that it returned",
    gets="refused; its `zero_grad` and lr schedulers on it work",
    fix="`model, optimizer, *_ = booster.boost(model, optimizer)`",
)
def original_stepped(rank: int, world: int) -> None:
    run = shared()
    with refused("AdamW was given to booster.boost", "Step what boost returned"):
        run.original.step()
    with refused("load_state_dict of a AdamW that was given to booster.boost", r"booster\.load"):
        run.original.load_state_dict({"state": {}, "param_groups": []})
    with refused("add_param_group after boost"):
        run.original.add_param_group({"params": []})
    scheduler = torch.optim.lr_scheduler.StepLR(run.original, 1)
    run.optimizer.step()  # nothing to step on, and nothing happens, as with torch
    scheduler.step()
    assert run.optimizer.param_groups[0]["lr"] == run.original.param_groups[0]["lr"]
    run.optimizer.zero_grad()


@mistake(
    symptom="an optimizer built on `model.parameters()` after boost, and stepped",
    gets="refused at its first step: it would step with the gradients of this rank alone",
    fix="build it before boost",
)
def built_after(rank: int, world: int) -> None:
    run = shared()
    late = adamw(run.model)
    with refused("AdamW was built on the parameters of a boosted model", "before booster.boost"):
        late.step()
    with refused("execute_pipeline needs the optimizer that boost returned, not a bare AdamW"):
        run.booster.execute_pipeline(iter([run.batch()]), run.model, None, late)
    with refused("backward needs the optimizer that boost returned"):
        run.booster.backward(torch.zeros((), requires_grad=True), late)


@mistake(
    symptom="`booster.execute_pipeline(..., model, criterion, optimizer)` with the original optimizer, another "
    "model's, or a plain model",
    gets="refused",
    fix="pass what one `booster.boost` returned together",
)
def strangers(rank: int, world: int) -> None:
    run, other = shared(), shared("zero1")
    with refused("not a bare AdamW"):
        run.booster.execute_pipeline(iter([run.batch()]), run.model, None, run.original)
    with refused("optimizer of another model"):
        run.booster.execute_pipeline(iter([run.batch()]), run.model, None, other.optimizer)
    with refused("not a bare LlamaForCausalLM"):
        run.booster.execute_pipeline(iter([run.batch()]), run.plain, None)
    with refused("another Booster boosted"):
        run.booster.execute_pipeline(iter([run.batch()]), other.model, None)


@mistake(
    symptom="`with torch.no_grad(): booster.execute_pipeline(..., optimizer)`",
    gets="refused: there would be no gradients",
    fix="leave the optimizer out to evaluate",
)
def no_grad(rank: int, world: int) -> None:
    run = shared()
    with torch.no_grad(), refused(r"under torch\.no_grad\(\)", "Leave the optimizer out"):
        run.booster.execute_pipeline(iter([run.batch()]), run.model, None, run.optimizer)


@mistake(
    symptom="`optimizer.step()` without a backward before it",
    gets="nothing: no gradients, no change, as with torch",
    fix="nothing",
)
def no_backward(rank: int, world: int) -> None:
    run = job()
    before = [param.detach().clone() for param in run.model.parameters()]
    run.optimizer.step()
    run.optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(before, run.model.parameters(), strict=True))


@mistake(
    symptom="`torch.amp.GradScaler` around a boosted optimizer",
    gets="refused at `scaler.step(optimizer)`; with `enabled=False` it works",
    fix='`precision="fp16"` of the plugin, which scales by itself',
)
def grad_scaler(rank: int, world: int) -> None:
    run = job("tp")
    scaler = torch.amp.GradScaler("cpu")
    run.booster.backward(scaler.scale(run.model(**run.batch()).loss), run.optimizer)
    with refused("GradScaler", 'precision="fp16"'):
        scaler.step(run.optimizer)
    run.optimizer.zero_grad()
    off = torch.amp.GradScaler("cpu", enabled=False)
    run.booster.backward(off.scale(run.model(**run.batch()).loss), run.optimizer)
    off.step(run.optimizer)


@mistake(
    symptom="`param.requires_grad_(True)` after boost, for a parameter that was frozen",
    gets="refused at the next step; freezing is fine",
    fix="unfreeze before boost, with `lr=0` in a param group of its own until it is to move",
)
def unfrozen(rank: int, world: int) -> None:
    for plugin in (
        LowLevelZeroPlugin(stage=3, precision="fp32"),
        TorchDDPPlugin() if world == 1 else HybridParallelPlugin(),
    ):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        booster = Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(model, adamw(model))
        boosted.requires_grad_(True)
        booster.backward(boosted(torch.ones(2, 4)).float().sum(), optimizer)
        with refused("frozen when the .* was boosted", "unfreeze"):
            optimizer.step()


# Names.


class TiedByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight.data = self.embed.weight.data

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.embed(ids))


@mistake(
    symptom="`model.head.weight.data = model.embed.weight.data`, to tie two weights",
    gets="refused at boost wherever weights move: two parameters in one memory would train apart",
    fix="`model.head.weight = model.embed.weight`, before the optimizer is built",
)
def tied_by_data(rank: int, world: int) -> None:
    plugins: list[Any] = [LowLevelZeroPlugin(stage=stage, precision="fp32") for stage in (1, 3)]
    for plugin in (*plugins, HybridParallelPlugin(precision="fp32"), TorchFSDPPlugin()):
        model = TiedByData()
        with refused(
            "embed.weight and head.weight are two parameters in the same memory",
            r"model\.head\.weight = model\.embed\.weight",
        ):
            Booster(plugin=plugin).boost(model, adamw(model))
    model = TiedByData()
    model.head.weight = model.embed.weight
    Booster(plugin=plugins[0]).boost(model, adamw(model))
    frozen = TiedByData().requires_grad_(False)
    frozen.extra = nn.Linear(2, 2)
    Booster(plugin=plugins[0]).boost(frozen, adamw(frozen))  # nothing moves apart
