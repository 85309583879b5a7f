"""Products in 8 bits in the plugins that have them: what they cannot be combined with, and bringing them to a model."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from ..cluster.mesh import ParallelMesh
from ..interface import OptimizerWrapper
from ..ops.fp8 import Fp8Products
from ..precision.amax_history import AmaxHistory
from ..precision.fp8 import require_device
from ..precision.policy import PRECISIONS
from ..shardformer.fp8 import compute_in_fp8, fp8_linears_of, require_fp8_linears
from ..utils.device import get_current_device, plans_gpus
from .settings import HybridSettings, PrecisionSettings

_LOGGER = logging.getLogger(__name__)


def check_fp8(settings: HybridSettings) -> None:
    """ValueError for what products in 8 bits cannot be combined with."""
    if settings.precision.fp8 is None:
        return
    option, sharding = settings.precision.fp8_words, settings.sharding
    if sharding.enable_jit_fused:
        raise ValueError(
            f"enable_jit_fused=True with {option}: products in 8 bits are no operators that a compiled layer can hold; "
            "leave one of them out"
        )
    if settings.sequence_mode == "ring":
        raise ValueError(
            f"sequence_parallelism_mode='ring' with {option}: a product in 8 bits needs the scale of all positions "
            "before it begins, so that none can run while others are on their way; use 'split_gather'"
        )
    if sharding.enable_sequence_overlap:
        raise ValueError(
            f"enable_sequence_overlap=True with {option}: linears in fp8 keep the gathered sequence for backward; "
            "leave enable_sequence_overlap out"
        )


def check_fp8_model(settings: PrecisionSettings, model: nn.Module) -> None:
    """The same for a model, on the machine that trains, or for GPUs that are planned on another."""
    if settings.fp8 is None:
        return
    if not plans_gpus():
        require_device(settings.fp8_words, settings.fp8, get_current_device())
    require_fp8_linears(model, settings.fp8_words)
    stays = settings.working == "fp32" and any(param.dtype == torch.float64 for param in model.parameters())
    if stays and not settings.fp8.emulate:
        raise ValueError(
            f"{settings.fp8_words} with parameters in float64, which products in 8 bits have no sums for; use "
            "model.float(), or Fp8Options(emulate=True)"
        )
    if not settings.fp8.emulate and not plans_gpus():
        _try_products(settings)


def _try_products(settings: PrecisionSettings) -> None:
    """ValueError where torch was built without them for this device."""
    assert settings.fp8 is not None
    products = Fp8Products(settings.fp8.is_rowwise)
    dtype = PRECISIONS[settings.working]
    x, weight = (torch.ones(16, 16, dtype=dtype, device=get_current_device(), requires_grad=True) for _ in range(2))
    try:
        products.linear(x, weight, None, weight).sum().backward()
    except RuntimeError as error:
        raise ValueError(
            f"{settings.fp8_words} with fp8_options.granularity={settings.fp8.granularity!r}: this device or torch "
            f"{torch.__version__} cannot multiply so ({error}); use the other granularity, or precision='bf16'"
        ) from error


def fp8_said(settings: PrecisionSettings) -> str:
    """For the layout report."""
    return "" if settings.fp8 is None else f"linears of the layers in fp8: {settings.fp8}"


def convert_where_wanted(model: nn.Module, settings: PrecisionSettings) -> None:
    """Linears of the layers compute in 8 bits from now on."""
    options = settings.fp8
    if options is None:
        return
    converted = compute_in_fp8(model, settings.fp8_words, options.is_rowwise, options.emulate)
    if dist.get_rank() == 0:
        _LOGGER.info("linears in fp8 (%s): %s", options, converted)


def follow_history(
    model: nn.Module, settings: PrecisionSettings, optimizer: OptimizerWrapper | None, mesh: ParallelMesh, *axes: str
) -> None:
    """Delayed scaling: what the linears of this rank see is kept from step to step, and with the optimizer's states.

    axes    of the ranks that compute with the same linears, or parts of them; gradients are averaged over all but tp's
    """
    options = settings.fp8
    if options is None or not options.is_delayed:
        return
    if optimizer is None:
        if dist.get_rank() == 0:
            _LOGGER.warning("fp8_options.scaling='delayed' without an optimizer: no step ends, so scales are current")
        return
    linears = fp8_linears_of(model)
    replicas = mesh.size(*(axis for axis in axes if axis != "tp"))
    history = AmaxHistory(list(linears), options.history, get_current_device(), mesh.group(*axes), replicas)
    for number, products in enumerate(linears.values()):
        products.history, products.number = history, number
    optimizer.amax_history = history
    optimizer.optim.register_step_post_hook(history.roll)
