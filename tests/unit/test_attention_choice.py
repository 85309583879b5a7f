"""Which attention is chosen, on machines that this one is not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from shardwright.attention.backends import Sdpa
from shardwright.attention.choice import BACKENDS, choose, order, refusal
from shardwright.attention.installed import (
    FLASH_2,
    FLASH_3,
    FLASH_4,
    TRITON,
    VARLEN,
    VARLEN_WINDOWS,
    XFORMERS,
    Installed,
)
from shardwright.attention.needs import ARBITRARY, BLOCK, CAUSAL, PADDING, WINDOW, Needs

FLASH = (FLASH_2, FLASH_3, FLASH_4)
TORCH = (TRITON, VARLEN, VARLEN_WINDOWS)
SM70, SM75, SM80, SM89, SM90, SM100, SM120 = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)


def have(*packages: str) -> Installed:
    return Installed(dict.fromkeys(packages, "9.0"))


def flash_2(version: str) -> Installed:
    return Installed({FLASH_2: version})


ALL = have(*FLASH, XFORMERS, *TORCH)


def gpu(capability: tuple[int, int], **needs: Any) -> Needs:
    return replace(Needs("cuda", capability), **needs)


CAUSAL_PADDED = frozenset({CAUSAL, PADDING})
CHOSEN: list[tuple[str, Needs, Installed]] = [
    # machines, with everything there and with torch alone
    ("flash_attention_4", gpu(SM100), ALL),
    ("cudnn", gpu(SM100), have(*TORCH)),
    ("flash_attention_3", gpu(SM90), ALL),
    ("flash_attention_2", gpu(SM90), have(FLASH_2, FLASH_4)),
    ("flash_attention_4", gpu(SM90), have(FLASH_4)),
    ("sdpa", gpu(SM90), have(*TORCH)),
    ("flash_attention_2", gpu(SM89), ALL),
    ("flash_attention_2", gpu(SM80), ALL),
    ("sdpa", gpu(SM80), have(*TORCH)),
    ("flash_attention_2", gpu(SM120), ALL),
    ("efficient", gpu(SM75, dtype=torch.float16), ALL),
    ("sdpa", gpu(SM75), ALL),
    ("sdpa", Needs("cpu", dtype=torch.float32), ALL),
    ("sdpa", Needs("mps"), ALL),
    ("flash_attention_2", Needs("rocm"), ALL),
    ("sdpa", Needs("rocm", dtype=torch.float32), ALL),
    # numbers
    ("sdpa", gpu(SM90, dtype=torch.float32), ALL),
    ("flash_attention_2", gpu(SM100, head_dim=256), ALL),
    ("sdpa", gpu(SM90, head_dim=512), ALL),
    ("flash_attention_3", gpu(SM90, head_dim=192, value_dim=128), ALL),
    # what models have
    ("flash_attention_2", gpu(SM90, dropout=0.1), ALL),
    ("flash_attention_3", gpu(SM90, dropout=0.1, training=False), ALL),
    ("flash_attention_3", gpu(SM90, soft_cap=True), ALL),
    ("flex", gpu(SM90, soft_cap=True), have(*TORCH)),
    ("eager", gpu(SM80, soft_cap=True, dropout=0.1), ALL),
    ("eager", gpu(SM75, soft_cap=True, dtype=torch.float16), ALL),
    ("eager", Needs("cpu", soft_cap=True, takes=frozenset({"eager", "flex_attention"})), ALL),
    ("sdpa", gpu(SM90, sinks=True), ALL),
    ("sdpa", gpu(SM100, sinks=True), ALL),  # which takes heads of 136
    ("cudnn", gpu(SM100, sinks=True, head_dim=64), ALL),
    ("efficient", gpu(SM100, position_bias=True), ALL),
    ("efficient", gpu(SM90, position_bias=True, dropout=True), Installed()),
    ("sdpa", gpu(SM90, crossed=True), ALL),
    ("cudnn", gpu(SM100, crossed=True), ALL),
    ("sdpa", gpu(SM90, masks=CAUSAL_PADDED | {BLOCK}), ALL),
    ("flex", gpu(SM90, masks=CAUSAL_PADDED | {BLOCK}, soft_cap=True), ALL),
    ("flash_attention_2", gpu(SM90, head_dim=84), ALL),  # the only one that pads heads itself
    ("cudnn", gpu(SM100, dropout=0.125), have(*TORCH)),
    ("sdpa", gpu(SM100, dropout=0.1), have(*TORCH)),
    ("sdpa", gpu(SM89, head_dim=256, dropout=0.1), ALL),
    ("flash_attention_2", gpu(SM80, head_dim=256, dropout=0.1), ALL),
    ("sdpa", gpu(SM80), flash_2("2.3.2")),
    ("eager", gpu(SM80, soft_cap=True), flash_2("2.5.9.post1")),
    ("flash_attention_2", gpu(SM80, soft_cap=True), flash_2("2.6.0+cu128")),
    ("sdpa", gpu(SM90, masks=CAUSAL_PADDED | {ARBITRARY}), ALL),
    ("flash_attention_3", gpu(SM90, masks=CAUSAL_PADDED | {WINDOW}), ALL),
    # packed documents
    ("flash_attention_3", gpu(SM90, packed=True), ALL),
    ("varlen", gpu(SM90, packed=True), have(*TORCH)),
    ("flex", gpu(SM90, packed=True, masks=CAUSAL_PADDED | {WINDOW}), have(VARLEN, TRITON)),
    ("flex", gpu(SM90, packed=True, dtype=torch.float32), have(*TORCH)),
    ("sdpa", gpu(SM90, packed=True, dropout=0.1), have(*TORCH)),
    ("sdpa", Needs("cpu", packed=True), ALL),
    ("varlen", gpu(SM90, packed=True, in_one_row=False), ALL),
    ("sdpa", gpu(SM90, packed=True, in_one_row=False, crossed=True, dropout=0.1), ALL),
    # what a model's class takes
    ("eager", gpu(SM90, takes=frozenset({"eager"})), ALL),
    ("sdpa", gpu(SM90, takes=frozenset({"eager", "sdpa", "own"})), ALL),
]


@pytest.mark.parametrize(("backend", "needs", "installed"), CHOSEN)
def test_the_best_that_can_do_it_is_chosen(backend: str, needs: Needs, installed: Installed) -> None:
    choice = choose(needs, installed)
    assert choice.backend == backend
    better = order(needs)[: order(needs).index(backend)]
    assert all(name in choice.reason for name in better), choice.reason  # each with why not
    assert not choice.asked


def test_nothing_that_a_model_has_is_dropped() -> None:
    """Over all devices and combinations: what is chosen knows every feature, and every other refuses by name."""
    devices = [gpu(capability) for capability in (SM75, SM80, SM89, SM90, SM100)] + [Needs("cpu"), Needs("rocm")]
    features: list[dict[str, Any]] = [{}, {"soft_cap": True}, {"sinks": True}, {"dropout": 0.1}]
    features += [{"soft_cap": True, "dropout": 0.1}, {"sinks": True, "dropout": 0.1}]
    no_caps = {"sdpa", "cudnn", "efficient", "math", "flash", "xformers", "varlen", "flash_attention_4"}
    no_dropout = {"flash_attention_3", "flash_attention_4", "varlen", "flex"}
    for needs in devices:
        for extra in features:
            for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
                chosen = choose(replace(needs, dtype=dtype, **extra), ALL).backend
                assert not (extra.get("soft_cap") and chosen in no_caps)
                assert not (extra.get("dropout") and chosen in no_dropout)
                assert not (extra.get("sinks") and (chosen.startswith("flash_attention") or chosen == "xformers"))
                assert not (dtype.itemsize > 2 and chosen.startswith("flash_attention"))


def cannot(name: str, needs: Needs) -> bool:
    """What the libraries' own checks refuse, in words of theirs."""
    gpu_at = needs.capability if needs.device == "cuda" else None
    half, dim, flash = needs.dtype.itemsize == 2, needs.head_dim, name.startswith("flash_attention")
    if flash or name == "varlen":
        limit = 128 if name == "flash_attention_4" else 256
        too_old = gpu_at is not None and gpu_at < (8, 0)
        odd = dim % 8 != 0 and name != "flash_attention_2"
        apart = needs.crossed or (flash and needs.packed and not needs.in_one_row)
        return too_old or not half or dim > limit or odd or apart or bool(needs.masks & {BLOCK, ARBITRARY})
    if name == "cudnn":
        return not half or dim > 128 or dim % 8 != 0 or needs.dropout * 16 % 1 != 0
    if name in ("efficient", "xformers"):
        before_ampere = gpu_at is not None and gpu_at < (8, 0)
        step = 8 if half else 1 if before_ampere else 4
        return needs.dtype == torch.float64 or dim % step != 0 or (before_ampere and needs.dtype == torch.bfloat16)
    if name == "flex":
        return dim < 16 or dim > 256 or needs.dtype == torch.float64 or needs.dropout > 0
    return False


def test_no_choice_is_one_that_its_library_refuses() -> None:
    devices = [gpu(each) for each in (SM70, SM75, SM80, SM89, SM90, SM100, SM120)] + [Needs("cpu"), Needs("rocm")]
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    features: list[dict[str, Any]] = [{}, {"packed": True}, {"packed": True, "in_one_row": False}, {"crossed": True}]
    features += [{"masks": CAUSAL_PADDED | {mask}} for mask in (WINDOW, BLOCK, ARBITRARY)] + [{"dropout": 0.1}]
    installed = (ALL, have(*TORCH), have(XFORMERS))
    for device, dtype, dim, extra, there in product(
        devices, dtypes, (8, 33, 64, 84, 128, 256, 512), features, installed
    ):
        needs = replace(device, dtype=dtype, head_dim=dim, **extra)
        name = choose(needs, there).backend
        assert not cannot(name, needs), (name, needs)


REFUSED: list[tuple[str, Needs, Installed, str]] = [
    (
        "flash_attention_2",
        gpu(SM90),
        have(),
        "flash-attn is not installed: pip install flash-attn --no-build-isolation",
    ),
    ("flash_attention_4", gpu(SM90), have(), "pip install --pre flash-attn-4"),
    ("xformers", gpu(SM90), have(), "pip install xformers"),
    ("flash_attention_2", gpu(SM75), ALL, "it begins with SM80"),
    ("flash_attention_3", gpu(SM100), ALL, "it knows no GPU from SM100 on"),
    ("flash_attention_3", gpu(SM90, dropout=0.1), ALL, "it has no dropout, and the model's is 0.1"),
    ("flash_attention_2", gpu(SM90, dropout=0.1, soft_cap=True), ALL, "no dropout together with soft caps"),
    ("flash", gpu(SM90, masks=CAUSAL_PADDED | {WINDOW}), ALL, "it takes no window masks"),
    ("cudnn", Needs("cpu"), ALL, "it runs on cuda only"),
    ("flex", Needs("cpu"), ALL, "it runs on cuda only"),
    ("sdpa", gpu(SM90, soft_cap=True), ALL, "it has no soft caps"),
    ("flash", gpu(SM90, sinks=True), ALL, "no sinks, or no gradients of them"),
    ("cudnn", gpu(SM90, dtype=torch.float32), ALL, "it has no fp32"),
    ("flash", Needs("cpu", dropout=0.1), ALL, "it has no dropout"),
    ("flash", Needs("cpu", head_dim=192, value_dim=128), ALL, "as many features as its queries"),
    ("sdpa", gpu(SM90, takes=frozenset({"eager"})), ALL, "the model's class does not take it"),
    ("cudnn", gpu(SM90, head_dim=84), ALL, "the features of its heads come in multiples of 8"),
    ("efficient", gpu(SM80, head_dim=42, dtype=torch.float32), ALL, "the features of its heads come in multiples of 4"),
    ("cudnn", gpu(SM90, dropout=0.1), ALL, "its dropout comes in multiples of 1/16, and the model's is 0.1"),
    ("cudnn", gpu(SM90, sinks=True), ALL, "its heads have at most 128 features, and sinks take a few more"),
    ("flex", gpu(SM90, head_dim=8), ALL, "its heads have at least 16 features"),
    ("flash", gpu(SM90, packed=True), ALL, "packed documents need a mask, and it takes none"),
    ("flash", gpu(SM120, head_dim=208), ALL, "no gradients of heads with 208 features on this GPU"),
    ("xformers", gpu(SM100), ALL, "it knows no GPU from SM100 on"),
    ("flash_attention_2", gpu(SM90, crossed=True), ALL, "it takes the padding of keys for that of queries"),
    ("varlen", gpu(SM90, crossed=True), ALL, "it takes the padding of keys for that of queries"),
    ("flash_attention_2", gpu(SM90, packed=True, in_one_row=False), ALL, "in batches of one row that begin alike only"),
    ("flash_attention_3", gpu(SM90, masks=CAUSAL_PADDED | {BLOCK}), ALL, "it takes no block masks"),
    ("flash_attention_2", gpu(SM90, value_dim=192), ALL, "its values have at most as many features as its queries"),
    ("flash_attention_2", gpu(SM80), flash_2("2.1"), "flash-attn is 2.1, and 2.3.3 is needed: pip install flash-attn"),
    ("flash", Needs("cpu", position_bias=True), ALL, "it has no position bias, or no gradients of it"),
]


@pytest.mark.parametrize(("backend", "needs", "installed", "words"), REFUSED)
def test_a_request_that_cannot_be_honoured_says_why(
    backend: str, needs: Needs, installed: Installed, words: str
) -> None:
    with pytest.raises(ValueError) as caught:
        choose(needs, installed, backend)
    text = str(caught.value)
    assert all(each in text for each in (words, f"attention_backend={backend!r}", needs.where)), text
    works = text.partition("attention_backend=")[2].partition("attention_backend='")[2].partition("'")[0]
    assert refusal(works, needs, installed) is None  # what it proposes works


def test_a_request_is_honoured() -> None:
    choice = choose(gpu(SM90), ALL, "efficient")
    assert (choice.backend, choice.asked) == ("efficient", True)


def test_a_broken_package_is_not_chosen() -> None:
    broken = Installed({}, {FLASH_2: "import flash_attn fails with ImportError: undefined symbol"})
    choice = choose(gpu(SM80), broken)
    assert choice.backend == "sdpa"
    assert "undefined symbol" in choice.reason


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(
        ValueError, match=r"attention_backend='flash_atention_2' is not one of .*did you mean 'flash_att"
    ):
        choose(gpu(SM90), ALL, "flash_atention_2")


def test_every_backend_is_somewhere_the_choice_or_a_request() -> None:
    assert set(BACKENDS) == {backend for backend, *_ in [*CHOSEN, *REFUSED]} | {"math"}
    choose(Needs("cpu"), Installed(), "math")


def test_biases_reach_the_kernels_as_these_take_them() -> None:
    """T5 hands over a table [S, T, H] turned round: with a last stride of H torch has no fused kernel, and computes in
    fp32 what is half as wide.
    """
    given: list[torch.Tensor] = []

    def native(module: Any, *args: Any, position_bias: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        given.append(position_bias)
        return args[0], None

    query, table = torch.randn(2, 4, 6, 8), torch.randn(6, 6, 4, requires_grad=True)
    bias = table.permute(2, 0, 1).unsqueeze(0)
    Sdpa(native, "efficient", only=False)(torch.nn.Module(), query, query, query, None, position_bias=bias)
    assert given[0].stride(-1) == 1
    assert torch.equal(given[0], bias)
    assert torch.autograd.grad(given[0].sum(), table)[0].eq(1).all()
