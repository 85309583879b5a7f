"""ShardFormer alone in a plain torch loop: optimizers, accumulation and clipping of torch, as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.shardformer.layer.parallel_module import full_tensor
from shardwright.spec import get_spec
from shardwright.testing import run_ranks, zoo
from shardwright.testing.compare import check_complete, compare_models
from shardwright.testing.exact import keep_float64
from tests.models.tp_ranks import overrides, shard

STEPS, MICROBATCHES, MAX_NORM = 2, 2, 0.7

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "norms of heads": ("qwen3-causal-lm", {}),
    "one key head": ("llama-causal-lm", {"num_key_value_heads": 1}),
    "tied embeddings": ("gpt2-causal-lm", {}),
}
OPTIMIZERS: dict[str, Any] = {
    "norms of heads": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "one key head": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9, foreach=True),
    "tied embeddings": lambda params: torch.optim.NAdam(params, lr=1e-2),
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], synced: bool
) -> tuple[list[float], list[float]]:
    """Losses, and norms before clipping. `synced` is the call that was necessary once, and changes nothing."""
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in batches[step * MICROBATCHES : (step + 1) * MICROBATCHES]:
            loss = model(**batch).loss
            (loss / MICROBATCHES).backward()
            losses.append(float(loss))
        if synced:
            sync_shared_gradients(model.parameters(), dist.group.WORLD)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return losses, norms


def plain_loop(rank: int, world_size: int, case: str) -> None:
    name, settings = MODELS[case]
    arguments = overrides(name, **settings)
    reference, model = zoo.build(name, **arguments), zoo.build(name, **arguments)
    batches = [zoo.inputs(reference, seed=seed) for seed in range(STEPS * MICROBATCHES)]
    model = shard(model)
    with keep_float64():
        expected = train(reference, OPTIMIZERS[case](reference.parameters()), batches, False)
        actual = train(model, OPTIMIZERS[case](model.parameters()), batches, case == "one key head")
    assert min(expected[1]) > MAX_NORM, "nothing was clipped"
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    report = compare_models(reference, model, coordinate=rank, losses=(expected[0], actual[0]), check=False)
    report.check()
    check_complete(reference, [report.held])
    for param in model.parameters():
        if param.shape == full_tensor(param, dist.group.WORLD).shape:  # what every rank holds is equal to the last bit
            held = [torch.empty_like(param) for _ in range(world_size)]
            dist.all_gather(held, param.detach())
            assert all(torch.equal(held[0], one) for one in held)


def norms_and_refusals(rank: int, world_size: int) -> None:
    arguments = overrides("qwen3-causal-lm")
    reference, model = zoo.build("qwen3-causal-lm", **arguments), zoo.build("qwen3-causal-lm", **arguments)
    model = shard(model)
    batch = zoo.inputs(reference)
    for each in (reference, model):
        each(**batch).loss.backward()
    whole = dict(reference.named_parameters())
    for order in (1.0, 2.0, 3.0, float("inf")):
        expected = torch.nn.utils.get_total_norm([param.grad for param in reference.parameters()], order)
        for foreach in (None, True, False):
            grads = [param.grad for param in model.parameters()]
            torch.testing.assert_close(torch.nn.utils.get_total_norm(grads, order, foreach=foreach), expected)
    # By hand, as scripts do.
    total = torch.norm(torch.stack([param.grad.detach().norm(2) for param in model.parameters()]), 2)
    torch.testing.assert_close(total, torch.nn.utils.get_total_norm([param.grad for param in reference.parameters()]))
    for name, param in model.named_parameters():
        norm = torch.linalg.vector_norm(param.grad)
        torch.testing.assert_close(norm + 0, whole[name].grad.norm(), msg=name)

    # A gradient that overflows on one rank overflows on all.
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.zero_grad()
    scaler.scale(model(**batch).loss.float()).backward()
    if rank == 1:
        model.model.layers[0].mlp.up_proj.weight.grad[0, 0] = torch.inf
    before = model.model.norm.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert torch.equal(before, model.model.norm.weight)

    refused = torch.optim.Adafactor([nn.Parameter(torch.ones(2))])
    refused.step()
    refused.add_param_group({"params": list(model.parameters())})
    for again in (refused, refused, torch.optim.Adafactor(model.parameters())):
        with pytest.raises(
            ValueError,
            match=r"Adafactor looks at whole parameters, but this rank holds a part of .* LowLevelZeroPlugin",
        ):
            again.step()
    with pytest.raises(ValueError, match=r"AdamW or SGD; if it does work"):  # no plugin trains with it
        torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)


def replaced_gradients(rank: int, world_size: int) -> None:
    """Gradients that a script computes are followed; those that cannot be are not clipped by a part of the norm."""
    arguments = overrides("llama-causal-lm")
    reference, model = zoo.build("llama-causal-lm", **arguments), zoo.build("llama-causal-lm", **arguments)
    model = shard(model)
    batch = zoo.inputs(reference)
    norms: dict[nn.Module, list[torch.Tensor]] = {}
    for each in (reference, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, foreach=False)
        norms[each] = []
        for change in (
            lambda grad: grad / 2,
            lambda grad: 3 * copy.deepcopy(grad.detach()),
            lambda grad: torch.zeros_like(grad).add(grad),
        ):
            each(**batch).loss.backward()
            for param in each.parameters():
                param.grad = change(param.grad)
            norms[each].append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        assert all(type(state["momentum_buffer"]) is torch.Tensor for state in optimizer.state.values())
    torch.testing.assert_close(norms[model], norms[reference], rtol=1e-10, atol=1e-10)

    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(model(**batch).loss, params), strict=True):
        param.grad = grad
    optimizer.step()  # no norm was taken
    torch.nn.utils.clip_grad_norm_(params, 0.1)
    with pytest.raises(
        ValueError, match=r"the gradient of model\.\S+ was replaced by a plain tensor and then changed in place"
    ):
        optimizer.step()


def copies(rank: int, world_size: int, directory: str) -> None:
    """A copy trains as the model does, by the norm of the whole, and is saved whole."""
    arguments = overrides("qwen3-causal-lm", num_key_value_heads=1)
    reference, model = zoo.build("qwen3-causal-lm", **arguments), zoo.build("qwen3-causal-lm", **arguments)
    model = shard(model)
    batches = [zoo.inputs(reference, seed=seed) for seed in range(STEPS * MICROBATCHES)]
    before = [param.detach().clone() for param in model.parameters()]
    twins = copy.deepcopy(reference), copy.deepcopy({"ema": model})["ema"]
    expected, actual = (train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), batches, False) for twin in twins)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    compare_models(*twins, coordinate=rank, losses=(expected[0], actual[0]), check=False).check()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    parts = copy.deepcopy(reference.model), copy.deepcopy([model.model])[0]  # without its root
    norms = []
    for part in parts:
        part(**{key: value for key, value in batches[0].items() if key != "labels"})[0].pow(3).mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(part.parameters(), 1e-3))
        torch.optim.SGD(part.parameters(), lr=0.1).step()
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-10, atol=1e-10)
    for expected_param, param in zip(*(part.parameters() for part in parts), strict=True):
        want = get_spec(param).shard(expected_param.data, rank)
        torch.testing.assert_close(param.data, want, rtol=1e-10, atol=1e-10)
    twins[1].save_pretrained(directory)
    for key, tensor in type(reference).from_pretrained(directory, dtype=torch.float64).state_dict().items():
        torch.testing.assert_close(tensor, twins[0].state_dict()[key], rtol=1e-10, atol=1e-10)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"load_state_dict\(assign=True\) of a sharded model"):
        model.load_state_dict(state, assign=True)
    twins[1].load_state_dict(state)
    assert all(torch.equal(*pair) for pair in zip(before, twins[1].parameters(), strict=True))
    with pytest.raises(ValueError, match="this Qwen3ForCausalLM is already sharded"):
        shard(model)


def files_and_seeds(rank: int, world_size: int, directory: str) -> None:
    for name in ("llama-causal-lm", "gpt2-causal-lm"):  # with and without a head of its own
        reference = zoo.build(name, **overrides(name))
        model = shard(zoo.build(name, **overrides(name)))
        path = f"{directory}/{name}"
        model.save_pretrained(path)
        loaded = type(reference).from_pretrained(path, dtype=torch.float64)
        for key, tensor in reference.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], tensor), key
        with pytest.raises(ValueError, match=r"resize_token_embeddings\(120\) of a sharded model"):
            model.resize_token_embeddings(120)
    torch.manual_seed(rank)
    different = type(reference)(reference.config)
    with pytest.raises(
        ValueError, match=r"ranks that share one model have different weights: transformer\.wte\.weight is "
    ):
        shard(different)


def everything(rank: int, world_size: int, directory: str) -> None:
    for case in MODELS:
        plain_loop(rank, world_size, case)
    norms_and_refusals(rank, world_size)
    with keep_float64():
        replaced_gradients(rank, world_size)
        copies(rank, world_size, f"{directory}/copy")
    files_and_seeds(rank, world_size, directory)


def test_a_plain_loop_is_that_of_one_process(tmp_path):
    run_ranks(everything, 2, directory=str(tmp_path))
