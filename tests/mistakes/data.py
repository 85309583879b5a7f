"""Mistakes in what is fed to a run: loaders, batches, and ranks that were given different things."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import ChainDataset, DataLoader, DistributedSampler, IterableDataset, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    get_linear_schedule_with_warmup,
)

from shardwright import Booster
from shardwright.logging import get_dist_logger
from shardwright.plugins import HybridParallelPlugin, TorchDDPPlugin, TorchFSDPPlugin

from .table import mistake, refused

VOCABULARY = 40
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def plugin(world: int, **settings: Any) -> HybridParallelPlugin:
    """Tensor parallel over two ranks where there are two, the rest data parallel."""
    return HybridParallelPlugin(**{"precision": "fp32", "num_microbatches": 2, "tp_size": min(world, 2), **settings})


def llama(seed: int = 0, **sizes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 2, **sizes}))


def gpt2(**sizes: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCABULARY,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 12,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **sizes,
    }
    return GPT2LMHeadModel(GPT2Config(**config))


def texts(seed: int = 0, samples: int = 4, length: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def boosted(used: Any, model: nn.Module | None = None, **booster: Any) -> tuple[Booster, nn.Module, Any]:
    model = model if model is not None else llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    facade = Booster(plugin=used, **booster)
    wrapped, optimizer, *_ = facade.boost(model, optimizer)  # type: ignore[assignment]
    return facade, wrapped, optimizer


def own_loss(outputs: Any, inputs: Any) -> torch.Tensor:
    return outputs.loss


def step(facade: Booster, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    return facade.execute_pipeline(iter([batch]), model, own_loss, optimizer)


def everyones(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def samples_of(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


@contextmanager
def said(*parts: str, by: int | None = 0) -> Iterator[None]:
    """The block logs a message with all `parts` on rank `by` (None: on every rank)."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = get_dist_logger().logger
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if by is None or dist.get_rank() == by:
        assert any(all(part in message for part in parts) for message in messages), (
            f"no message with {parts}: {messages}"
        )


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.size).unbind())


# Loaders.


@mistake(
    symptom="`boost(dataloader=DataLoader(dataset, batch_size, shuffle=True))`, a loader written for one process",
    gets="it is dealt out as Accelerate's `prepare` does: each data-parallel rank takes its batches, all equally many; "
    "the log says so",
    fix="nothing to do; `plugin.prepare_dataloader(dataset, batch_size, shuffle=True, seed=...)` makes such a loader "
    "at once",
)
def own_loader(rank: int, world: int) -> None:
    used = TorchDDPPlugin()

    def loader(size: int) -> DataLoader:
        return DataLoader(numbers(13), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(3))

    expected = samples_of(loader(2 * world))
    with said("deals the DataLoader out", f"{world} data-parallel ranks", by=0 if world > 1 else -1):
        *_, mine, _ = Booster(plugin=used).boost(nn.Linear(1, 1), dataloader=loader(2))
    parts = everyones(samples_of(mine))
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) == len(mine) == len(expected)  # type: ignore[arg-type]
    for number, whole in enumerate(expected):
        joined = [sample for part in parts for sample in part[number]]
        assert joined[: len(whole)] == whole


@mistake(
    symptom="the same, with ranks whose random generators differ (`torch.manual_seed(seed + rank)`)",
    gets="the ranks agree on one order in `boost`, so that nothing is seen twice",
    fix="nothing to do",
)
def own_loader_and_other_seeds(rank: int, world: int) -> None:
    torch.manual_seed(100 + rank)
    for generator in (None, torch.Generator().manual_seed(rank)):
        loader = DataLoader(numbers(4 * world), batch_size=2, shuffle=True, generator=generator)
        *_, mine, _ = Booster(plugin=TorchDDPPlugin()).boost(nn.Linear(1, 1), dataloader=loader)
        for _ in range(2):
            seen = [sample for part in everyones(samples_of(mine)) for batch in part for sample in batch]
            assert sorted(seen) == list(range(4 * world))


@mistake(
    symptom="`DataLoader(sampler=DistributedSampler(dataset))` with `tp_size` or `pp_size` above 1",
    gets="refused: the sampler deals to all processes, but ranks of one model replica need the same samples",
    fix="`num_replicas, rank = plugin.data_parallel` for the sampler, or a plain `DataLoader`",
    worlds=(2, 4),
)
def sampler_over_all_ranks(rank: int, world: int) -> None:
    used = plugin(world)
    data = numbers(24)
    loader = DataLoader(data, sampler=DistributedSampler(data))
    with refused(
        f"DistributedSampler deals samples to {world} ranks",
        f"{world // 2} data-parallel ranks",
        r"plugin\.data_parallel",
    ):
        Booster(plugin=used).boost(llama(), dataloader=loader)
    replicas, mine = used.data_parallel
    right = DataLoader(data, sampler=DistributedSampler(data, num_replicas=replicas, rank=mine))
    assert Booster(plugin=used).boost(llama(), dataloader=right)[3] is right


@mistake(
    symptom="`boost(dataloader=...)` with a list of batches, or a loader that iterates in a way of its own",
    gets="refused where there is more than one data-parallel rank: nobody can know how to deal it out",
    fix="`plugin.prepare_dataloader`, or leave it out of `boost` if it gives every rank its own samples by itself",
)
def no_loader_at_all(rank: int, world: int) -> None:
    batches = [torch.zeros(1, 1)]
    if world == 1:
        assert Booster(plugin=TorchDDPPlugin()).boost(nn.Linear(1, 1), dataloader=batches)[3] is batches  # type: ignore[arg-type]
        return
    with refused("dataloader=list cannot be dealt out", "prepare_dataloader"):
        Booster(plugin=TorchDDPPlugin()).boost(nn.Linear(1, 1), dataloader=batches)  # type: ignore[arg-type]


@mistake(
    symptom="an empty dataset",
    gets="refused by `prepare_dataloader` and `boost`",
    fix="look at how the dataset is made; a filter may have dropped everything",
)
def empty_dataset(rank: int, world: int) -> None:
    used = TorchDDPPlugin()
    with refused("has no samples"):
        used.prepare_dataloader(numbers(0), batch_size=2)
    with refused("has no samples"):
        Booster(plugin=used).boost(nn.Linear(1, 1), dataloader=DataLoader(numbers(0), batch_size=2))


@mistake(
    symptom="`drop_last=True` and fewer samples than the ranks take in one step",
    gets="refused: it would drop all of them",
    fix="`drop_last=False`, which repeats samples, or a smaller `batch_size`",
)
def everything_dropped(rank: int, world: int) -> None:
    used = TorchDDPPlugin()
    with refused("drop_last=True drops all of them", f"at least {3 * world}"):
        used.prepare_dataloader(numbers(2), batch_size=3, drop_last=True)
    with refused("no batch to each of", "smaller batch_size or drop_last=False"):
        Booster(plugin=used).boost(nn.Linear(1, 1), dataloader=DataLoader(numbers(2), batch_size=3, drop_last=True))


@mistake(
    symptom="fewer samples than data-parallel ranks",
    gets="samples are repeated until every rank has equally many, so that no rank waits for another",
    fix="nothing to do; more samples or fewer ranks waste less",
)
def fewer_samples_than_ranks(rank: int, world: int) -> None:
    used = TorchDDPPlugin()
    built = used.prepare_dataloader(numbers(1), batch_size=2)
    *_, dealt, _ = Booster(plugin=used).boost(nn.Linear(1, 1), dataloader=DataLoader(numbers(1), batch_size=2))
    for loader in (built, dealt):
        assert len({len(part) for part in everyones(samples_of(loader))}) == 1
        assert len(samples_of(loader)) == len(loader) == 1  # type: ignore[arg-type]


@mistake(
    symptom="a streaming dataset (`IterableDataset`, `load_dataset(..., streaming=True)`) in `prepare_dataloader`",
    gets="every rank reads the stream and keeps its share; all end after equally many batches, and the position can be "
    "saved",
    fix="`for batch in dataloader`, or `range(steps)` with a number of your own: a stream has no `len`, and asking for "
    "it says so",
)
def streaming(rank: int, world: int) -> None:
    loader = TorchDDPPlugin().prepare_dataloader(Stream(4 * world + 1), batch_size=2)
    with refused("has no length: write `for batch in dataloader`", by=TypeError):
        len(loader)
    chained = DataLoader(ChainDataset([Stream(4 * world + 1)]), batch_size=2)  # has a __len__ that does not know
    *_, dealt, _ = Booster(plugin=TorchDDPPlugin()).boost(nn.Linear(1, 1), dataloader=chained)
    for each in (loader, dealt):
        parts = everyones([batch.tolist() for batch in each])  # type: ignore[union-attr]
        assert [len(part) for part in parts] == [3] * world
        seen = [sample for part in parts for batch in part for sample in batch]
        assert set(seen) == set(range(4 * world + 1))


@mistake(
    symptom="`prepare_dataloader(stream, shuffle=True)`",
    gets="refused: samples that are not there yet cannot be drawn",
    fix="shuffle the stream itself, `dataset.shuffle(seed=..., buffer_size=...)` with `datasets`",
)
def shuffled_stream(rank: int, world: int) -> None:
    with refused("shuffle=True with a stream", "buffer_size"):
        TorchDDPPlugin().prepare_dataloader(Stream(8), batch_size=2, shuffle=True)


@mistake(
    symptom="a generator as a dataset",
    gets="refused: its second epoch would be empty",
    fix="an object whose `__iter__` starts anew, such as a torch `IterableDataset`",
)
def generator_as_dataset(rank: int, world: int) -> None:
    with refused("can be read only once"):
        TorchDDPPlugin().prepare_dataloader((number for number in range(8)), batch_size=2)  # type: ignore[arg-type]


@mistake(
    symptom="`for step in range(len(dataloader))` after `booster.load` in the middle of an epoch",
    gets="`len` is what is left of the epoch, and the whole epoch again once that is used up",
    fix="nothing to do",
)
def resumed_in_the_middle(rank: int, world: int) -> None:
    facade, model, optimizer = boosted(plugin(world))
    rows = [{key: value[0] for key, value in texts(seed, samples=1).items()} for seed in range(4 * world)]
    loader: Any = facade.plugin.prepare_dataloader(rows, batch_size=2, shuffle=True)  # type: ignore[union-attr, arg-type]
    whole = len(loader)
    batches = iter(loader)
    step(facade, model, optimizer, next(batches))
    optimizer.zero_grad()
    resumed: Any = facade.plugin.prepare_dataloader(rows, batch_size=2, shuffle=True)  # type: ignore[union-attr, arg-type]
    resumed.load_state_dict(loader.state_dict())
    for expected in (whole - 1, whole):
        total = len(resumed)
        batches, taken = iter(resumed), 0
        for _ in range(len(resumed)):
            facade.execute_pipeline(batches, model, own_loss, optimizer)
            optimizer.zero_grad()
            taken += 1
        assert taken == total == expected


@mistake(
    symptom="`execute_pipeline(batches, ...)` when the epoch is over",
    gets="refused with the number of batches that there were, instead of a bare StopIteration",
    fix="`batches = iter(dataloader)` at the start of every epoch",
)
def exhausted_iterator(rank: int, world: int) -> None:
    facade, model, optimizer = boosted(plugin(world))
    rows = [{key: value[0] for key, value in texts(seed, samples=1).items()} for seed in range(4)]
    batches = iter(facade.plugin.prepare_dataloader(rows, batch_size=4))  # type: ignore[union-attr, arg-type]
    facade.execute_pipeline(batches, model, own_loss, optimizer)
    with refused("data_iter has given all 1 batches", r"batches = iter\(dataloader\)"):
        facade.execute_pipeline(batches, model, own_loss, optimizer)
    with refused("data_iter has given all of its batches"):
        facade.execute_pipeline(iter([]), model, own_loss, optimizer)


@mistake(
    symptom="`execute_pipeline(dataloader, ...)`",
    gets="refused: a loader is no iterator, and a new one per step would give the first batch every time",
    fix="`batches = iter(dataloader)` once per epoch, and `execute_pipeline(batches, ...)`",
)
def loader_instead_of_iterator(rank: int, world: int) -> None:
    facade, model, optimizer = boosted(plugin(world))
    for given in (DataLoader(numbers(4)), [texts()], texts()):
        with refused("data_iter must be an iterator", r"iter\(dataloader\)"):
            facade.execute_pipeline(given, model, own_loss, optimizer)  # type: ignore[arg-type]


# Numbers outside of what the model knows.


@mistake(
    symptom="token ids beyond the vocabulary: `IndexError: index out of range in self`, or a device-side assert",
    gets="refused before the forward, with the entry, its value and the limit",
    fix="`model.resize_token_embeddings(len(tokenizer))` before the optimizer is built, or the tokenizer of this model",
)
def token_outside(rank: int, world: int) -> None:
    facade, model, optimizer = boosted(plugin(world))
    for wrong in (VOCABULARY, -1):
        batch = texts()
        batch["input_ids"][2, 3] = wrong
        with refused(
            rf"input_ids\[2, 3\]={wrong} is outside of the vocabulary of LlamaForCausalLM", rf"0\.\.{VOCABULARY - 1}"
        ):
            step(facade, model, optimizer, batch)
        with refused(rf"input_ids\[2, 3\]={wrong}"):
            model(**batch)
        with refused(rf"input_ids\[2, 3\]={wrong}"):
            model(batch["input_ids"])


@mistake(
    symptom="labels outside of the vocabulary, padding marked by -1: `Target -1 is out of bounds`",
    gets="refused before the forward, with the entry, its value and the limit",
    fix="mark padding by -100, which the loss ignores",
)
def label_outside(rank: int, world: int) -> None:
    facade, model, optimizer = boosted(plugin(world))
    batch = texts()
    batch["labels"][0, :3] = -100
    step(facade, model, optimizer, batch)
    optimizer.zero_grad()
    for wrong in (90, -1):
        batch["labels"][1, 4] = wrong
        with refused(rf"labels\[1, 4\]={wrong} is outside", "or be -100"):
            step(facade, model, optimizer, batch)


@mistake(
    symptom="class labels beyond `num_labels`",
    gets="refused before the forward, with the entry, its value and the limit",
    fix="build the model with the `num_labels` that the data has",
)
def class_outside(rank: int, world: int) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_attention_heads": 2, "num_labels": 3, "max_position_embeddings": 16}
    facade, model, optimizer = boosted(plugin(world), BertForSequenceClassification(BertConfig(**sizes)))
    batch = {"input_ids": texts()["input_ids"], "labels": torch.tensor([0, 1, 2, 3])}
    with refused(r"labels\[3\]=3 is outside of the classes", r"num_labels=\.\.\."):
        step(facade, model, optimizer, batch)
    types = {**batch, "labels": torch.tensor([0, 1, 2, 0]), "token_type_ids": torch.full((4, 6), 2)}
    with refused(r"token_type_ids\[0, 0\]=2 is outside of the token types"):
        step(facade, model, optimizer, types)


@mistake(
    symptom="texts longer than a model with learned positions has room for: `IndexError: index out of range in self`",
    gets="refused before the forward, with both lengths",
    fix="`tokenizer(..., truncation=True, max_length=...)`",
)
def too_long(rank: int, world: int) -> None:
    facade, model, optimizer = boosted(plugin(world), gpt2())
    with refused("input_ids has 13 tokens per sample", "learned positions for 12", "max_length=12"):
        step(facade, model, optimizer, texts(length=13))
    batch = {**texts(), "position_ids": torch.arange(7, 13).repeat(4, 1)}
    with refused(r"position_ids\[0, 5\]=12 is outside of the positions", r"0\.\.11"):
        step(facade, model, optimizer, batch)


# Ranks that were given different things.


@mistake(
    symptom="ranks of one tensor-parallel group are fed different batches: the loss looks healthy",
    gets="refused in the first step, with the entry and the two ranks",
    fix="one loader for all ranks of a replica: `plugin.prepare_dataloader`, or the loader given to `boost`",
    worlds=(2, 4),
)
def different_batches_in_a_replica(rank: int, world: int) -> None:
    facade, model, optimizer = boosted(plugin(world))
    with refused(
        "different batches in the first step", r"batch\['input_ids'\] is int64 \(4, 6\)", r"rank 1 \(dp 0, pp 0, tp 1\)"
    ):
        step(facade, model, optimizer, texts(seed=rank))
    facade, model, optimizer = boosted(plugin(world))
    batch = texts() if rank % 2 == 0 else {**texts(), "attention_mask": torch.ones(4, 6, dtype=torch.int64)}
    with refused("different batches in the first step", r"batch\['attention_mask'\] is not there on rank 0"):
        loss = model(**batch).loss
        facade.backward(loss, optimizer)


@mistake(
    symptom="all data-parallel ranks are fed the same batch, every rank having made the same loader",
    gets="a warning in the first step that names the ranks; training goes on, since small data may repeat itself",
    fix="`plugin.prepare_dataloader`, or the loader given to `boost`",
    worlds=(2, 4),
)
def same_batch_everywhere(rank: int, world: int) -> None:
    facade, model, optimizer = boosted(plugin(world, tp_size=1))
    with said("data-parallel ranks 0 and 1", "the same batch"):
        step(facade, model, optimizer, texts())


@mistake(
    symptom="the model is built after `torch.manual_seed(seed + rank)`, with tensor or pipeline parallelism",
    gets="refused in `boost`, with a parameter and the two ranks: each would keep its part of another model",
    fix="the same seed on all ranks while the model is built (`launch_from_torch(seed=...)`), other seeds only for the "
    "data",
    worlds=(2, 4),
)
def different_models(rank: int, world: int) -> None:
    for sizes in ({"tp_size": 2}, {"tp_size": 1, "pp_size": 2}):
        used = plugin(world, **sizes)
        with refused(
            "have different weights",
            r"model\.embed_tokens\.weight is \[.*\] \(digest",
            "on rank 1",
            "seed all ranks alike",
        ):
            boosted(used, llama(seed=rank))


@mistake(
    symptom="the same with data parallelism alone",
    gets="all ranks take rank 0's weights, under every plugin",
    fix="nothing to do",
    worlds=(2, 4),
)
def different_models_over_data(rank: int, world: int) -> None:
    expected = llama(seed=0).lm_head.weight.detach()
    for used in (TorchDDPPlugin(), TorchFSDPPlugin(), plugin(world, tp_size=1)):
        _, model, _ = boosted(used, llama(seed=rank))
        weight = model.unwrap().lm_head.weight.detach()  # type: ignore[operator, union-attr]
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        assert torch.equal(whole, expected), type(used).__name__


@mistake(
    symptom="a learning rate, a model size or another argument that depends on the rank",
    gets="refused in `boost`, with the name, both values and both ranks",
    fix="the same script and arguments on every rank",
    worlds=(2, 4),
)
def different_arguments(rank: int, world: int) -> None:
    model = nn.Linear(2, 2)
    with refused(r"optimizer\.param_groups\[0\]\.lr is 0\.1 on rank 0 \(dp 0\) and 0\.2 on rank 1 \(dp 1\)"):
        Booster(plugin=TorchDDPPlugin()).boost(model, torch.optim.SGD(model.parameters(), lr=0.1 * min(rank + 1, 2)))
    with refused(r"parameter weight is \(2, 2\) float32 trained on rank 0", r"\(2, 3\) float32 trained on rank 1"):
        Booster(plugin=TorchDDPPlugin()).boost(nn.Linear(min(rank, 1) + 2, 2))
    with refused(r"len\(dataloader\.dataset\) is 8 on rank 0", "9 on rank 1"):
        Booster(plugin=TorchDDPPlugin()).boost(nn.Linear(1, 1), dataloader=DataLoader(numbers(8 + min(rank, 1))))
    for kind, name in ((StepLR, "step_size"), (get_linear_schedule_with_warmup, r"lr_lambdas\[0\]\.num_warmup_steps")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = kind(optimizer, 1 + min(rank, 1), 9)
        with refused(rf"lr_scheduler\.{name} is 1 on rank 0", "2 on rank 1"):
            Booster(plugin=TorchDDPPlugin()).boost(model, optimizer, lr_scheduler=scheduler)


@mistake(
    symptom="`HybridParallelPlugin` with other arguments on some ranks",
    gets="refused when it is built, where other sizes would wait for each other for ever",
    fix="the same arguments on every rank",
    worlds=(2, 4),
)
def different_layouts(rank: int, world: int) -> None:
    with refused("different arguments on different ranks", "tp_size is 1 on rank 0", "2 on rank 1"):
        HybridParallelPlugin(tp_size=1 + min(rank, 1))
    with refused("different arguments on different ranks", r"max_norm is 0\.0 on rank 0", r"1\.0 on rank 1"):
        HybridParallelPlugin(max_norm=float(min(rank, 1)))


@mistake(
    symptom="`torch.manual_seed(seed + rank)` after `boost`, with tensor parallelism and dropout",
    gets="refused in the first step: ranks of a tensor-parallel group must draw the same masks",
    fix="`torch.manual_seed(seed + plugin.data_parallel[1])`, or no seed after `boost`, which sets the ranks alike",
    worlds=(2, 4),
)
def seeds_after_boost(rank: int, world: int) -> None:
    for seeds_differ in (True, False):
        facade, model, optimizer = boosted(plugin(world), gpt2(resid_pdrop=0.1).train())
        torch.manual_seed(rank if seeds_differ else rank // 2)
        batch = texts(seed=rank // 2)
        if seeds_differ:
            with refused("random state differs", r"plugin\.data_parallel\[1\]"):
                step(facade, model, optimizer, batch)
        else:
            step(facade, model, optimizer, batch)
