"""Kinds of GPU: what their makers publish, by precision and form, found by the names that drivers print."""

from __future__ import annotations

import pytest
import torch

from shardwright.planner.gpus import GPUS, PRECISIONS, gpu, like_device
from shardwright.planner.machines import machine

# as torch.cuda.get_device_name prints them, with the GiB that a driver tells
NAMES = {
    ("NVIDIA H100 80GB HBM3", 79.1): "h100",
    ("NVIDIA H100 PCIe", 79.1): "h100-pcie",
    ("NVIDIA H100 NVL", 93.1): "h100-nvl",
    ("NVIDIA H200", 139.8): "h200",
    ("NVIDIA H200 NVL", 139.8): "h200-nvl",
    ("NVIDIA A100-SXM4-40GB", 39.4): "a100-40",
    ("NVIDIA A100-SXM4-80GB", 79.1): "a100-80",
    ("NVIDIA A100-PCIE-40GB", 39.4): "a100-pcie-40",
    ("NVIDIA A100 80GB PCIe", 79.1): "a100-pcie-80",
    ("Tesla V100-SXM2-16GB", 15.7): "v100-16",
    ("Tesla V100-SXM2-32GB", 31.7): "v100",
    ("Tesla V100-PCIE-32GB", 31.7): "v100-pcie",
    ("NVIDIA B200", 178.4): "b200",
    ("NVIDIA L4", 22.0): "l4",
    ("NVIDIA L40S", 44.4): "l40s",
    ("NVIDIA A10G", 22.1): "a10g",
    ("NVIDIA GeForce RTX 4090", 23.6): "rtx4090",
    ("Tesla T4", 14.6): "t4",
    ("AMD Instinct MI300X", 191.7): "mi300x",
}


@pytest.mark.parametrize(("device", "name"), NAMES.items())
def test_names_that_drivers_print(device: tuple[str, float], name: str) -> None:
    assert like_device(device) == (name, device[1])
    assert gpu(device[0]).name == name
    assert machine(device[0], precision="fp16") == machine(name, precision="fp16")


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H20",
        "NVIDIA L40",
        "NVIDIA A100X",
        "NVIDIA GH200 480GB",
    ],
)
def test_others_are_not_taken_for_them(name: str) -> None:
    with pytest.raises(ValueError, match="nothing is known of"):
        like_device((name, 10.0))
    with pytest.raises(ValueError, match="is not one of"):
        gpu(name)


def test_products_are_as_fast_as_their_precision() -> None:
    assert [machine("h100", precision=each).flops / 1e12 for each in PRECISIONS] == [67, 494.5, 989, 989, 1979]
    assert machine("a100-pcie-80").bandwidth == 1.935e12 < machine("a100-80").bandwidth
    assert machine("h100-pcie").flops == 756e12
    assert machine("h100-pcie").inside == 64e9
    for row in GPUS.values():
        able = [getattr(row, each) for each in ("fp32", "tf32", "fp16", "fp8") if getattr(row, each)]
        assert able == sorted(able), row
        assert row.bf16 in (0, row.fp16), row
    with pytest.raises(ValueError, match="a v100 has no units for it; it computes fp32, fp16"):
        machine("v100", precision="bf16")
    with pytest.raises(ValueError, match="has no units"):
        machine("a100-80", precision="fp8")
    with pytest.raises(ValueError, match=r"precision='int4' is not one of"):
        machine("h100", precision="int4")


def test_fp32_is_tf32_where_torch_says_so() -> None:
    assert machine("h100", precision="fp32").flops == 67e12
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert machine("h100", precision="fp32").flops == 494.5e12
        assert machine("v100", precision="fp32").flops == 15.7e12
    finally:
        torch.set_float32_matmul_precision(before)


def test_rings_go_through_the_links_of_all_ranks_of_a_node() -> None:
    device = machine("h100")
    share = device.sending
    alone = device.sent(1e9, ranks=16, reach=128)  # one of a node's eight is in the group
    assert alone == pytest.approx(1e9 / (50e9 * share) + device.latency)
    assert device.sent(1e9, ranks=32, reach=128) == pytest.approx(1e9 / (100e9 * share) + device.latency)
    assert device.sent(1e9, ranks=128, reach=128) == pytest.approx(1e9 / (400e9 * share) + device.latency)
    assert device.sent(1e9, ranks=8, reach=8) == pytest.approx(1e9 / (450e9 * share) + device.latency)
    assert device.message(1e9, reach=16) == pytest.approx(1e9 / (50e9 * share) + device.latency)
