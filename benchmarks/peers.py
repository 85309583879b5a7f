"""Training steps of other libraries on the Llama of `run.py`: forward, backward, clipping by norm, AdamW.

Every step returns the loss of the global batch, or None on ranks that do not know it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_parallel import with_dtensor, with_transformers
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], Tensor | None]
RATE = 1e-3
MAX_NORM = 1.0


class Job(NamedTuple):
    """
    model         made once, the same on all ranks; contenders copy it
    ids           of the global batch [samples, length]
    microbatches  of a pipeline
    directory     where the model is saved
    """

    model: Any
    ids: Tensor
    microbatches: int
    directory: Path

    def share(self) -> Tensor:
        """This rank's part of the batch where all ranks are data-parallel."""
        return self.ids.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": part} for part in _kinds(params)], lr=RATE, fused=True)


def clip(params: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """By the norm of all gradients, of which ranks of `group` have parts of their own."""
    grads = [param.grad for param in params if param.grad is not None]
    norms = [nn.utils.get_total_norm(part) for part in _kinds(grads)]
    squares = [(norm.full_tensor() if isinstance(norm, DTensor) else norm).square() for norm in norms]
    total = torch.stack(squares).sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    factor = min(1.0, MAX_NORM / (float(total.sqrt()) + 1e-6))
    for part in _kinds(grads):
        torch._foreach_mul_(part, factor)


def _kinds(tensors: Iterable[Any]) -> list[list[Any]]:
    """DTensors and others, which no operator takes together."""
    tensors = list(tensors)
    parts = [[tensor for tensor in tensors if isinstance(tensor, DTensor) is kind] for kind in (True, False)]
    return [part for part in parts if part]


def mean(loss: Tensor) -> Tensor:
    dist.all_reduce(loss := loss.detach().clone())
    return loss / dist.get_world_size()


def plain(model: Any, ids: Tensor, optimizer: Any, params: Iterable[nn.Parameter]) -> Step:
    params = list(params)

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        clip(params)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def averaged(step: Step) -> Step:
    return lambda: mean(step())  # type: ignore[arg-type]


def ddp(job: Job) -> Step:
    model = DistributedDataParallel(copy.deepcopy(job.model), gradient_as_bucket_view=True)
    return averaged(plain(model, job.share(), adamw(model.parameters()), model.parameters()))


def zero_redundancy(job: Job) -> Step:
    model = DistributedDataParallel(copy.deepcopy(job.model), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE, fused=True)
    return averaged(plain(model, job.share(), optimizer, model.parameters()))


def fsdp2(job: Job, reshard: bool = True) -> Step:
    model = copy.deepcopy(job.model)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return averaged(plain(model, job.share(), adamw(model.parameters()), model.parameters()))


def fsdp2_kept(job: Job) -> Step:
    """Whose weights stay gathered until backward has ended, as ZeRO-2 keeps them."""
    return fsdp2(job, reshard=False)


def deepspeed(stage: int) -> Callable[[Job], Step]:
    def build(job: Job) -> Step:
        import deepspeed

        size = dist.get_world_size()
        config = {
            "train_batch_size": len(job.ids),
            "train_micro_batch_size_per_gpu": len(job.ids) // size,
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "gradient_clipping": MAX_NORM,
            "zero_allow_untested_optimizer": True,
        }
        model = copy.deepcopy(job.model)
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        ids = job.share()

        def step() -> Tensor:
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            return mean(loss)

        return step

    return build


def _tensor_parallel(cut: Callable[..., nn.Module]) -> Callable[[Job], Step]:
    def build(job: Job) -> Step:
        options: Any = SimpleNamespace(tp=dist.get_world_size())
        model = cut(job.directory, options, torch.device("cpu")).train()
        return plain(model, job.ids, adamw(model.parameters()), model.parameters())

    return build


dtensor, transformers_tp = _tensor_parallel(with_dtensor), _tensor_parallel(with_transformers)


class Part(nn.Module):
    """Some layers of a Llama, as people cut it for torch's pipelines."""

    def __init__(self, whole: Any, first: int, last: int) -> None:
        super().__init__()
        count = whole.config.num_hidden_layers
        self.embed = whole.model.embed_tokens if first == 0 else None
        self.layers = whole.model.layers[first:last]
        self.rotary = whole.model.rotary_emb
        self.norm, self.head = (whole.model.norm, whole.lm_head) if last == count else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        angles = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=angles)
        return x if self.head is None else self.head(self.norm(x))  # type: ignore[misc]


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def torch_pipeline(schedule: str, chunks: int, tp: int = 1) -> Callable[[Job], Step]:
    def build(job: Job) -> Step:
        mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("pp", "tp"))
        group, stages_per = mesh.get_group("pp"), dist.get_world_size() // tp * chunks
        rank, size = mesh.get_local_rank("pp"), mesh.size(0)
        indices = [rank + chunk * size for chunk in range(chunks)]
        if schedule == "ScheduleZBVZeroBubble":
            indices = [rank, 2 * size - 1 - rank]
        whole = copy.deepcopy(job.model)
        length = whole.config.num_hidden_layers // stages_per
        parts = [Part(whole, index * length, (index + 1) * length) for index in indices]
        if tp > 1:
            parts = [_dealt(part, mesh["tp"]) for part in parts]
        stages = [
            pipelining.PipelineStage(part, index, stages_per, torch.device("cpu"), group=group)
            for part, index in zip(parts, indices, strict=True)
        ]
        made = getattr(pipelining, schedule)(stages[0] if chunks == 1 else stages, job.microbatches, loss_fn=loss_of)
        params = [param for part in parts for param in part.parameters()]
        optimizer = adamw(params)

        def step() -> Tensor | None:
            losses: list[Tensor] = []
            given = (job.ids,) if 0 in indices else ()
            if stages_per - 1 in indices:
                made.step(*given, target=job.ids, losses=losses)
            else:
                made.step(*given)
            clip(params, group)
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).mean().detach() if losses else None

        return step

    return build


def _dealt(part: Part, mesh: DeviceMesh) -> Part:
    plan: dict[str, Any] = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"layers.*.{name}"] = RowwiseParallel()
    return parallelize_module(part, mesh, plan)  # type: ignore[return-value]


def has_deepspeed() -> bool:
    return find_spec("deepspeed") is not None
