"""One part of the measurements on a GPU, as lines of JSON: `check.py` runs all of them.

    python benchmarks/gpu/measure.py llama                 on the GPU, a line per figure
    python benchmarks/gpu/measure.py llama --tiny          the same code at tiny sizes; on a CPU where there is no GPU
    python benchmarks/gpu/measure.py llama --kernels       and what kernels the time of a step goes into

A figure that cannot be had (no memory, an option that declines) is a line that says why, and the next one follows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from contenders import BEST, EAGER, LEVERS, Timing, clear, ours, synchronize, theirs, timed
from kernels import kernels_of
from sizes import LLAMA_70B, OF_MEMORY, OF_PRODUCTS, SHAPES, Batch, Shape, Work, promised, work_of
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwright
from shardwright import Booster
from shardwright.kernels.gated import gated
from shardwright.kernels.linear_cross_entropy import linear_cross_entropy
from shardwright.kernels.norms import layer_norm, rms_norm
from shardwright.kernels.rotary import FORMS, rotated
from shardwright.lazy import LazyInitContext
from shardwright.plugins import HybridParallelPlugin

T = TypeVar("T")

sys.path.append(str(Path(__file__).parents[1]))  # the benchmarks that run anywhere


class Sheet:
    """Takes figures, and the time that is left for them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.tiny: bool = options.tiny
        self.kernels: bool = options.kernels
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.name = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        self._end = time.monotonic() + options.seconds
        self._out = options.out

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def put(self, name: str, **row: Any) -> None:
        line = json.dumps({"name": name, **row})
        print(line, flush=True)
        if self._out:
            with open(self._out, "a") as file:
                file.write(line + "\n")

    def figure(self, name: str, take: Callable[[], T]) -> T | None:
        """What `take` returns. What goes wrong in it is the figure, and None."""
        if self.left <= 0:
            self.put(name, not_run="there was no time left")
            return None
        try:
            return take()
        except Exception as error:
            end = "".join(traceback.format_exception(error)[-4:])[-1500:]
            self.put(name, error=f"{type(error).__name__}: {str(error)[:300]}", traceback=end)
            return None
        finally:
            clear(self.device)


def numbers(timing: Timing, work: Work, name: str, tokens: int) -> dict[str, Any]:
    """Of a step: time, memory, and both ways to count the share of the peak."""
    rates, predicted, floor = promised(name), work.predicted(name), work.floor(name)
    found = {
        "ms": 1e3 * timing.seconds,
        "predicted_ms": predicted and 1e3 * predicted,
        "floor_ms": floor and 1e3 * floor,
        "spread": timing.spread,
        "first_s": timing.first,
        "tokens_per_s": tokens / timing.seconds,
        "peak_gib": timing.peak / 2**30,
        "loss": timing.loss,
        "host_ms": timing.host and 1e3 * timing.host,
    }
    if timing.kernels is not None:
        found |= {"busy_ms": 1e3 * timing.kernels.seconds, "kernels": timing.kernels.table}
    if rates is not None:
        found |= {
            "mfu_half": work.half / timing.seconds / rates[0],
            "mfu_full": work.full / timing.seconds / rates[0],
            "peak_tflops": rates[0] / 1e12,
        }
    return found


def tokens_of(batch: Batch) -> int:
    return batch["input_ids"].numel() if "input_ids" in batch else len(batch["pixel_values"])


def own(
    sheet: Sheet, shape: Shape, config: Any, batch: Batch, lever: str, seconds: float, name: str, **more: Any
) -> Timing | None:
    """Measure ours with the options of a lever, and `more`."""

    def take() -> Timing:
        if lever.endswith("deterministic"):
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            step = ours(shape, config, batch, sheet.device, {**LEVERS[lever], **more})
            timing = timed(step, sheet.device, seconds, with_kernels=sheet.kernels)
        finally:
            torch.use_deterministic_algorithms(False)
        sheet.put(name, **numbers(timing, work_of(shape, config, batch), sheet.name, tokens_of(batch)))
        return timing

    return sheet.figure(name, take)


def peer(
    sheet: Sheet, shape: Shape, config: Any, batch: Batch, seconds: float, name: str, experts: str = "", **how: bool
) -> Timing | None:
    def take() -> Timing:
        step = theirs(shape, config, batch, sheet.device, experts=experts, **how)
        timing = timed(step, sheet.device, seconds, with_kernels=sheet.kernels)
        sheet.put(name, **numbers(timing, work_of(shape, config, batch), sheet.name, tokens_of(batch)))
        return timing

    return sheet.figure(name, take)


def ratio(sheet: Sheet, name: str, theirs: Timing | None, mine: Timing | None, target: str) -> None:
    """How many times as long the others take."""
    if theirs is not None and mine is not None:
        sheet.put(name, ratio=theirs.seconds / mine.seconds, target=target)


def memory_ratio(sheet: Sheet, name: str, theirs: Timing | None, mine: Timing | None, target: str) -> None:
    if theirs is not None and mine is not None and theirs.peak:
        sheet.put(f"{name}, memory", ratio=mine.peak / theirs.peak, target=target)


# The parts.


def ceilings(sheet: Sheet) -> None:
    """What the device reaches of what is promised: a product of large matrices, and copies."""

    def product() -> None:
        n = 64 if sheet.tiny else 8192
        a, b = (torch.randn(n, n, device=sheet.device, dtype=torch.bfloat16) for _ in range(2))
        seconds, target = repeated(lambda: a @ b, sheet), f">= {OF_PRODUCTS} of the peak"
        sheet.put("product of matrices", ms=1e3 * seconds, tflops=2 * n**3 / seconds / 1e12, target=target)

    def copy(pinned: bool) -> None:
        size = 2**16 if sheet.tiny else 2**28 if pinned else 2**31
        if pinned:
            x = torch.empty(size, dtype=torch.uint8, pin_memory=sheet.device.type == "cuda")
        else:
            x = torch.empty(size, dtype=torch.uint8, device=sheet.device)
        y = torch.empty_like(x, device=sheet.device)
        seconds = repeated(lambda: y.copy_(x, non_blocking=True), sheet)
        name, target = ("copy from pinned memory", None) if pinned else ("copy", f">= {OF_MEMORY} of the peak")
        moved = size if pinned else 2 * size
        sheet.put(name, ms=1e3 * seconds, gb_per_s=moved / seconds / 1e9, target=target)

    sheet.figure("product of matrices", product)
    sheet.figure("copy", lambda: copy(False))
    sheet.figure("copy from pinned memory", lambda: copy(True))


def repeated(function: Callable[[], object], sheet: Sheet, times: int = 20) -> float:
    """Median of seconds; by events on a GPU, where the host is not to count."""
    for _ in range(3):
        function()
    if sheet.device.type != "cuda":
        found = []
        for _ in range(3):
            begin = time.perf_counter()
            function()
            found.append(time.perf_counter() - begin)
        return median(found)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for begun, ended in events:
        begun.record()
        function()
        ended.record()
    synchronize(sheet.device)
    return median(begun.elapsed_time(ended) for begun, ended in events) / 1e3


def attention_of(sheet: Sheet, config: Any, batch: Batch) -> dict[str, str]:
    """Options that pin cuDNN's attention where it is faster here than what torch's SDPA picks. Ours does not choose it
    by itself before SM100, since it plans anew for every length; here there is one.
    """
    if sheet.device.type != "cuda" or find_spec("flash_attn_interface") is not None:  # flash-attn 3 is the first choice
        return {}
    samples, length = batch["input_ids"].shape
    width = config.hidden_size // config.num_attention_heads

    def make(heads: int) -> torch.Tensor:
        shape = (samples, heads, length, width)
        return torch.randn(shape, device=sheet.device, dtype=torch.bfloat16, requires_grad=True)

    given = make(config.num_attention_heads), *(make(config.num_key_value_heads) for _ in range(2))

    def take(name: str, kernels: Callable[[], Any]) -> float:
        def attend() -> None:
            with kernels():
                out = F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, given, out)

        seconds = repeated(attend, sheet, 10)
        tflops = 7 * samples * length**2 * config.num_attention_heads * width / seconds / 1e12
        sheet.put(name, ms=1e3 * seconds, tflops=tflops)
        return seconds

    name = f"attention, {samples} x {length}"
    picked = sheet.figure(name, lambda: take(f"{name}, SDPA's own choice", nullcontext))
    pinned = sheet.figure(name, lambda: take(f"{name}, cuDNN", lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)))
    is_faster = pinned is not None and (picked is None or pinned < picked)
    return {"attention_backend": "cudnn"} if is_faster else {}


def llama(sheet: Sheet) -> None:
    """Blocks of Llama 8B: the headline with 8 layers, beside transformers where the device has room for it, and with 4,
    for which all contenders have room.
    """
    shape = SHAPES["llama"]
    config = shape.config(sheet.tiny, num_hidden_layers=2 if sheet.tiny else 8)
    for length, target in ((8192, "half >= 0.55, full >= 0.615"), (4096, "half >= 0.56")):
        for tokens in (16384, 8192):  # the optimizer takes as long for either: half of them where there is no memory
            batch = shape.batch_of(config, sheet.tiny, length, tokens // length)
            name = f"8 layers, {tokens // length} x {length}"
            attention = attention_of(sheet, config, batch)
            mine = own(sheet, shape, config, batch, BEST, 9, name, **attention)
            if mine is not None:
                sheet.put(f"target of {name}", target=f"MFU {target}")
                break
        if length == 8192:
            beside_transformers(sheet, shape, config, batch, mine, name)
    config = shape.config(sheet.tiny, num_hidden_layers=2 if sheet.tiny else 4)
    batch = shape.batch_of(config, sheet.tiny, 4096, 2)
    mine = own(sheet, shape, config, batch, BEST, 7, f"4 layers, ours: {BEST}", **attention_of(sheet, config, batch))
    beside_transformers(sheet, shape, config, batch, mine, "4 layers")


def beside_transformers(
    sheet: Sheet, shape: Shape, config: Any, batch: Batch, mine: Timing | None, name: str, compiled: bool = False
) -> None:
    """With SDPA, as its Trainer computes and with everything in bf16."""
    kind, target = ("transformers compiled", ">= 1.15") if compiled else ("transformers", ">= 1.35")
    for masters, what in ((True, "masters and autocast"), (False, "all in bf16")):
        found = peer(sheet, shape, config, batch, 6, f"{name}, {kind}, {what}", masters=masters, compiled=compiled)
        ratio(sheet, f"{name}, over {kind}, {what}", found, mine, target)
        memory_ratio(sheet, f"{name}, over {kind}, {what}", found, mine, "<= 0.6")


def llama_compiled(sheet: Sheet) -> None:
    """The same 4 layers under torch.compile, which takes its time."""
    shape = SHAPES["llama"]
    config = shape.config(sheet.tiny, num_hidden_layers=2 if sheet.tiny else 4)
    batch = shape.batch_of(config, sheet.tiny, 4096, 2)
    mine = own(sheet, shape, config, batch, BEST, 6, f"4 layers, ours: {BEST}", **attention_of(sheet, config, batch))
    beside_transformers(sheet, shape, config, batch, mine, "4 layers", compiled=True)


def levers(sheet: Sheet) -> None:
    """Each option alone, and together; 3 layers of Llama 8B at 4096."""
    shape = SHAPES["llama"]
    config = shape.config(sheet.tiny, num_hidden_layers=2 if sheet.tiny else 3)
    batch = shape.batch_of(config, sheet.tiny, 4096, 2)
    base = all_on = None
    for lever in LEVERS:
        found = own(sheet, shape, config, batch, lever, 4, lever)
        if lever == "nothing":
            base = found
        elif lever == "all, deterministic":
            ratio(sheet, "deterministic over all", found, all_on, "<= 1.03")
        else:
            ratio(sheet, f"nothing over {lever}", base, found, ">= 1")
        all_on = found if lever == "all (enable_all_optimization)" else all_on


def moe(sheet: Sheet) -> None:
    shape = SHAPES["moe"]
    config = shape.config(sheet.tiny)
    batch = shape.batch_of(config, sheet.tiny)
    mine = own(sheet, shape, config, batch, EAGER, 8, "MoE, ours")
    for experts in ("grouped_mm", "eager"):
        name = f"MoE, transformers, experts {experts}, masters and autocast"
        found = peer(sheet, shape, config, batch, 8, name, experts, masters=True, compiled=False)
        ratio(sheet, f"over transformers, experts {experts}", found, mine, ">= 2 (eager)")


def encoders(sheet: Sheet) -> None:
    for family in ("bert", "vit", "t5"):
        shape = SHAPES[family]
        config = shape.config(sheet.tiny)
        batch = shape.batch_of(config, sheet.tiny)
        mine = own(sheet, shape, config, batch, EAGER, 4, f"{family}, ours")
        best = (
            own(sheet, shape, config, batch, BEST, 4, f"{family}, ours, compiled layers") if sheet.left > 20 else None
        )
        name = f"{family}, transformers, masters and autocast"
        found = peer(sheet, shape, config, batch, 4, name, masters=True, compiled=False)
        fastest = min(filter(None, (mine, best)), key=lambda timing: timing.seconds, default=None)
        ratio(sheet, f"{family} over transformers", found, fastest, ">= 1.2")


def optimizer(sheet: Sheet) -> None:
    """Norm, clip and step of flat buffers beside one fused AdamW."""
    from zero import optimizer_steps

    millions = 1 if sheet.tiny else 1000
    # bytes per parameter: fp32 alone has no bf16 weights, and AdamW alone measures no norm either
    moved = {"fused AdamW": 28, "ZeRO fp32": 32, "ZeRO bf16": 34}

    def take(name: str, build: Callable[[], Callable[[], object]]) -> float:
        seconds, rates = repeated(build(), sheet), promised(sheet.name)
        bytes_moved = 1e6 * millions * moved[name.partition(",")[0]]
        floor = rates and 1e3 * bytes_moved / rates[1]
        sheet.put(
            name,
            ms=1e3 * seconds,
            gb_per_s=bytes_moved / seconds / 1e9,
            floor_ms=floor,
            predicted_ms=floor and floor / OF_MEMORY,
        )
        return seconds

    found = {name: sheet.figure(name, partial(take, name, build)) for name, build in optimizer_steps(millions).items()}
    base = found["fused AdamW"]
    for name, seconds in found.items():
        if base is not None and seconds is not None and name != "fused AdamW":
            sheet.put(f"{name} over fused AdamW alone", ratio=seconds / base, target="<= 1.2")


def shard(sheet: Sheet) -> None:
    """What one GPU of 32 computes of Llama 70B by tp 8 and pp 4: 20 layers of 80, an eighth of each. Messages and
    collectives take no time, so this is what is left for them to hide behind.
    """
    dist.destroy_process_group()
    shardwright.launch(0, 8, None, None, backend="fake")
    shape = SHAPES["llama"]
    fields = {"num_attention_heads": 8, "num_key_value_heads": 8} if sheet.tiny else LLAMA_70B
    config = shape.config(sheet.tiny, **{**fields, "num_hidden_layers": 2 if sheet.tiny else 20, "vocab_size": 1024})
    batch = shape.batch_of(config, sheet.tiny, 4096, 4)
    whole = work_of(shape, config, batch)
    work = Work(whole.full / 8, whole.attention / 8, whole.half / 8, 0.0)

    def take(name: str, options: dict[str, Any]) -> None:
        settings = {"tp_size": 8, "precision": "bf16", "num_microbatches": 2 if sheet.tiny else 4}
        booster = Booster(plugin=HybridParallelPlugin(**settings, enable_all_optimization=True, **options))
        with LazyInitContext():
            model: Any = transformers.LlamaForCausalLM(config)
        optim: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optim, *_ = booster.boost(model, optim)

        def step() -> object:
            booster.execute_pipeline(iter([batch]), model, lambda o, _: o.loss, optim)
            optim.zero_grad()
            return 0.0

        timing = timed(step, sheet.device, 10, with_kernels=sheet.kernels)
        sheet.put(name, **numbers(timing, work, sheet.name, tokens_of(batch)))

    split = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
    for name, options in (("tp 8, a stage of 20 layers", {}), ("the same, split_gather", split)):
        sheet.figure(name, partial(take, name, options))


class Operator(NamedTuple):
    """
    ours, torch  functions of `given`
    elements     of 2 bytes that forward and backward must move; 0 where products are what takes time
    """

    ours: Callable[..., Any]
    torch: Callable[..., Any]
    given: tuple[Any, ...]
    elements: float


def operators(sheet: Sheet) -> None:
    """Kernels of ours beside torch's operators, forward and backward, with the bytes that must be moved."""
    rows, width, inner, words = (32, 64, 96, 211) if sheet.tiny else (8192, 4096, 14336, 128256)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=sheet.device, dtype=torch.bfloat16, requires_grad=True)

    x, w, b, gate, up = make(rows, width), make(width), make(width), make(rows, inner), make(rows, inner)
    q = make(1, rows, 32, max(width // 32, 2))
    cos, sin = (make(1, rows, q.shape[-1]).detach() for _ in range(2))
    head, target = make(words, width), torch.randint(0, words, (rows,), device=sheet.device)

    def half_turned(q: Any) -> Any:
        one, other = q.chunk(2, -1)
        return q * cos.unsqueeze(2) + torch.cat([-other, one], -1) * sin.unsqueeze(2)

    cases = {
        "RMS norm": Operator(
            lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (width,), w, 1e-6), (x, w), 5 * x.numel()
        ),
        "layer norm": Operator(
            lambda *a: layer_norm(*a, 1e-5), lambda x, w, b: F.layer_norm(x, (width,), w, b), (x, w, b), 5 * x.numel()
        ),
        "SwiGLU": Operator(lambda g, u: gated(g, u, "silu"), lambda g, u: F.silu(g) * u, (gate, up), 8 * gate.numel()),
        "rotary": Operator(lambda q: rotated(q, cos, sin, FORMS[0], 2), half_turned, (q,), 4 * q.numel()),
        "head and loss": Operator(
            lambda x, w: linear_cross_entropy(x, w, target),
            lambda x, w: F.cross_entropy((x @ w.t()).float(), target),
            (x, head),
            0.0,
        ),
    }
    rates = promised(sheet.name)

    def take(name: str, case: Operator, function: Callable[..., Any]) -> float:
        dy = torch.ones_like(function(*case.given))

        def both() -> object:
            return torch.autograd.grad(function(*case.given), case.given, dy)

        seconds = repeated(both, sheet, 10)
        if sheet.device.type == "cuda":  # of the kernels: within a step the host is ahead of operators this small
            seconds = kernels_of(both, 10).seconds
        floor = None
        if rates is not None:
            floor = 2e3 * case.elements / rates[1] if case.elements else 6e3 * rows * width * words / rates[0]
        reached = OF_MEMORY if case.elements else OF_PRODUCTS
        sheet.put(name, ms=1e3 * seconds, floor_ms=floor, predicted_ms=floor and floor / reached)
        return seconds

    for name, case in cases.items():
        found = {
            who: sheet.figure(f"{name}, {who}", partial(take, f"{name}, {who}", case, function))
            for who, function in (("ours", case.ours), ("torch", case.torch))
        }
        if found["torch"] is not None and found["ours"] is not None:
            sheet.put(f"{name}: torch over ours", ratio=found["torch"] / found["ours"], target=">= 1")


PARTS: dict[str, Callable[[Sheet], None]] = {
    part.__name__: part
    for part in (ceilings, operators, optimizer, llama, llama_compiled, levers, moe, encoders, shard)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="sizes of a rehearsal")
    parser.add_argument("--seconds", type=float, default=600, help="no figure begins later")
    parser.add_argument("--kernels", action="store_true", help="what the device is busy with in two more steps")
    parser.add_argument("--out", help="file that lines are appended to, too")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error(f"measurements need a CUDA device, and torch {torch.__version__} sees none; --tiny rehearses them")
    transformers.utils.logging.set_verbosity_error()
    shardwright.launch(0, 1, None, None)
    PARTS[options.part](Sheet(options))


if __name__ == "__main__":
    main()
