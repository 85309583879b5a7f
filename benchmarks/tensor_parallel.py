"""Step time of tensor parallelism: shardwright, transformers' own TP, torch's DTensor, and a model cut by hand.

    python benchmarks/tensor_parallel.py --tp 2                            # CPU, gloo: starts its own rank processes
    python benchmarks/tensor_parallel.py --tp 2 --host-overhead            # one process, collectives that cost nothing
    torchrun --nproc_per_node 2 benchmarks/tensor_parallel.py --tp 2       # any device; nccl where there is CUDA

One Llama with the same weights four times:

    shardwright    ShardFormer(ShardConfig(tensor_parallel_process_group=...)).optimize(model)
    transformers   from_pretrained(distributed_config=DistributedConfig(tp_size=...))
    dtensor        torch's parallelize_module with the usual colwise/rowwise plan
    by hand        transformers' layers built at this rank's size, with one identity/all-reduce pair written into
                   attention and MLP; what is left to the framework is its overhead per layer

All take turns within one run, so that what else the machine does hits all of them; the medians of their rounds are
compared. A step is forward and backward, and an AdamW step with --optimizer. Collectives are counted on a model of
`--layers` and one of `--layers + 2`: the difference is what a layer costs. Losses are compared first.

With --host-overhead only shardwright and the model cut by hand run, on a fake process group, at `--layers` and
`--layers + 8`: the difference is the CPU time of a layer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from turns import Turns


class CountCollectives(TorchDispatchMode):
    """Counts collectives by op, the functional ones that DTensor uses included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and "wait" not in func._opname:
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def llama_config(options: argparse.Namespace, layers: int, parts: int = 1) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate // parts,
        num_hidden_layers=layers,
        num_attention_heads=options.heads // parts,
        num_key_value_heads=options.kv_heads // parts,
        head_dim=options.hidden // options.heads,
        max_position_embeddings=options.seq,
    )


def with_shardwright(directory: Path, options: argparse.Namespace, device: torch.device) -> nn.Module:
    from shardwright.shardformer.config import ShardConfig
    from shardwright.shardformer.shardformer import ShardFormer

    return ShardFormer(ShardConfig(tensor_parallel_process_group=dist.group.WORLD)).shard_model(
        _plain(directory).to(device)
    )


def with_transformers(directory: Path, options: argparse.Namespace, device: torch.device) -> nn.Module:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    return LlamaForCausalLM.from_pretrained(directory, distributed_config=DistributedConfig(tp_size=options.tp))


def with_dtensor(directory: Path, options: argparse.Namespace, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = _plain(directory).to(device)
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    return parallelize_module(model, init_device_mesh(device.type, (options.tp,)), plan)


def by_hand(directory: Path, options: argparse.Namespace, device: torch.device) -> nn.Module:
    from transformers import LlamaForCausalLM

    full = _plain(directory)
    rank, parts = dist.get_rank(), options.tp
    model = LlamaForCausalLM(llama_config(options, full.config.num_hidden_layers, parts))
    for local, whole in zip(model.parameters(), full.parameters(), strict=True):
        dims = [dim for dim in range(whole.ndim) if whole.shape[dim] != local.shape[dim]]
        local.data.copy_(whole.data.chunk(parts, dims[0])[rank] if dims else whole.data)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda m, args, kwargs: (args, _entered(kwargs)), with_kwargs=True)
        layer.self_attn.register_forward_hook(lambda m, args, out: (_HandReduce.apply(out[0]), *out[1:]))
        layer.mlp.register_forward_pre_hook(lambda m, args: (_HandCopy.apply(args[0]),))
        layer.mlp.register_forward_hook(lambda m, args, out: _HandReduce.apply(out))
    return model.to(device)


def _entered(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "hidden_states": _HandCopy.apply(kwargs["hidden_states"])}


class _HandCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dx = dy.contiguous().clone()
        dist.all_reduce(dx)
        return dx


class _HandReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.contiguous().clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


BUILDERS: dict[str, Callable[[Path, argparse.Namespace, torch.device], nn.Module]] = {
    "shardwright": with_shardwright,
    "by hand": by_hand,
    "transformers": with_transformers,
    "dtensor": with_dtensor,
}


def _plain(directory: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(directory)


def _saved(options: argparse.Namespace, layers: int, shared: Path) -> Path:
    from transformers import LlamaForCausalLM

    directory = shared / str(layers)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(llama_config(options, layers)).save_pretrained(directory)
    dist.barrier()
    return directory


def _run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that one rank does; the returned table is rank 0's."""
    rank = dist.get_rank()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    )
    place = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(place, src=0)
    shared = Path(str(place[0]))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, options.vocab, (options.batch, options.seq), generator=generator).to(device)

    models: dict[str, nn.Module] = {}
    table: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name in options.only or BUILDERS:
        counts = []
        for layers in (options.layers + 2, options.layers):
            try:
                model = BUILDERS[name](_saved(options, layers, shared), options, device).train()
                with CountCollectives() as counted:
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                    loss.backward()
            except Exception as error:  # a competitor that does not run on this backend is a result, too
                skipped[name] = f"{type(error).__name__}: {error}"[:200]
                break
            counts.append(counted.calls)
        else:
            models[name] = model
            per_layer = {op: (counts[0][op] - counts[1][op]) / 2 for op in counts[0]}
            table[name] = {
                "loss": loss.item(),
                "collectives per layer": {op: number for op, number in per_layer.items() if number},
            }
        dist.barrier()

    optimizers = (
        {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()}
        if options.optimizer
        else {}
    )

    def train(name: str) -> None:
        model = models[name]
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if optimizers:
            optimizers[name].step()

    loops = {name: lambda turn, name=name: train(name) for name in models}
    turns = Turns.take(loops, options.rounds, warm_up=options.warmup)
    for name, times in turns.summary(next(iter(models))).items():
        table[name] |= {**times, "CPU ms per layer": times["CPU ms"] / options.layers}
    return {"results": table, "skipped": skipped}


def _host_overhead(options: argparse.Namespace) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.tp)
    ids = torch.randint(0, options.vocab, (options.batch, options.seq))
    names, depths = ("shardwright", "by hand"), (options.layers, options.layers + 8)
    with tempfile.TemporaryDirectory() as shared:
        directories = {layers: _saved(options, layers, Path(shared)) for layers in depths}
        models = {
            (name, layers): BUILDERS[name](directories[layers], options, torch.device("cpu")).train()
            for name in names
            for layers in depths
        }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in models}
    for number in range(options.warmup + options.rounds):
        for key, model in models.items():
            model.zero_grad(set_to_none=True)
            spent = time.process_time()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            if number >= options.warmup:
                times[key].append(time.process_time() - spent)
    for measure in (statistics.median, min):
        layer = {name: 1000 * (measure(times[name, depths[1]]) - measure(times[name, depths[0]])) / 8 for name in names}
        surplus = 100 * (layer["shardwright"] / layer["by hand"] - 1)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in layer.items())
        print(f"CPU ms per layer ({measure.__name__}): {shown}: {surplus:+.1f} %")


def _rank(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    return _run(options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "tp": 2,
        "hidden": 256,
        "intermediate": 704,
        "heads": 8,
        "kv_heads": 4,
        "vocab": 1024,
        "layers": 4,
        "batch": 2,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--optimizer", action="store_true", help="include an AdamW step")
    parser.add_argument(
        "--only", nargs="*", choices=list(BUILDERS), help="some of the contestants; ratios are to the first"
    )
    parser.add_argument("--json", type=Path, help="write the table here as well")
    parser.add_argument(
        "--host-overhead", action="store_true", help="CPU time per layer against a model cut by hand, no communication"
    )
    options = parser.parse_args()
    if options.host_overhead:
        _host_overhead(options)
        return
    if "RANK" in os.environ:
        from shardwright.cluster.launch import launch_from_torch

        launch_from_torch()
        report, rank = _run(options), dist.get_rank()
    else:
        from shardwright.testing import run_ranks

        report, rank = run_ranks(_rank, options.tp, options, timeout=900)[0], 0
    if rank == 0:
        _print(report, options)
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


def _print(report: dict[str, Any], options: argparse.Namespace) -> None:
    shape = f"hidden {options.hidden}, {options.layers} layers, batch {options.batch} x {options.seq}"
    print(f"Llama, {shape}, tp {options.tp}; medians of {options.rounds} rounds, ratios to the first row")
    print(
        f"{'':14}{'wall ms':>10}{'x':>7}{'cpu ms':>10}{'x':>7}{'loss':>10}  collectives per layer, forward and backward"
    )
    for name, row in report["results"].items():
        calls = ", ".join(f"{number:g} {op.rstrip('_')}" for op, number in row["collectives per layer"].items())
        times = f"{row['wall ms']:10.1f}{row['wall ratio']:7.2f}{row['CPU ms']:10.1f}{row['CPU ratio']:7.2f}"
        print(f"{name:14}{times}{row['loss']:10.5f}  {calls}")
    for name, why in report["skipped"].items():
        print(f"{name:14}did not run: {why}")


if __name__ == "__main__":
    main()
