"""Advice in messages can be followed: what it names exists, and doing what it says works."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright
from shardwright import Booster, plugins, shardformer
from shardwright.lazy import LazyInitContext
from shardwright.optim import CPUAdam, FusedAdam, HybridAdam
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin
from shardwright.plugins.hybrid.config_form import _READERS
from shardwright.shardformer import Policy, ShardFormer
from shardwright.testing import run_ranks, zoo
from shardwright.trainer import Recipe

ROOT = Path(shardwright.__file__).parent

# Where the names in advice are arguments. A name that is none of these is advice that nobody can follow.
TAKERS: tuple[Callable[..., Any], ...] = (
    *(getattr(plugins, name) for name in plugins.__all__ if inspect.isclass(getattr(plugins, name))),
    *(
        getattr(shardwright, name)
        for name in ("launch", "launch_from_torch", "launch_from_slurm", "launch_from_openmpi", "Booster")
    ),
    *(method for name, method in vars(Booster).items() if not name.startswith("_") and callable(method)),
    *(HybridParallelPlugin.prepare_dataloader, ShardFormer.optimize, LazyInitContext, HybridAdam, CPUAdam, FusedAdam),
    *(
        shardformer.ShardConfig,
        shardformer.PipelineGradientCheckpointConfig,
        shardformer.SubModuleReplacementDescription,
    ),
    *(nn.Embedding, F.cross_entropy, torch.optim.Optimizer.zero_grad, torch.optim.Optimizer.step),
    *(nn.Module.load_state_dict, torch.utils.data.RandomSampler),
    shardformer.layer.VocabParallelLMHead1D,
)
# Names that are no arguments, and what they are.
ELSEWHERE = {
    "output_router_logits": "a field of a model's config",
    "slow_but_exact": "a field of BLOOM's config",
    "exclude_modules": "of peft's LoraConfig",
    **dict.fromkeys(("shard_param_frac", "offload_optim_frac"), "of the GeminiPlugin of compat.colossalai"),
    **dict.fromkeys(("attn_implementation", "variant"), "of transformers' from_pretrained"),
}


def _texts() -> Iterator[tuple[str, str]]:
    """(place, text) of every message of the package: string constants that are handed to a call or raised,
    docstrings excepted.
    """

    def text_of(node: ast.AST) -> str:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            return "".join(text_of(value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
        return ""

    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inside = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docs | inside:
                text = text_of(node)
                if " " in text and not text.startswith("<"):  # markup
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


ADVICE = re.compile(r"\b(?:use|pass|give|set|call|leave|name|build|add|take)\b([^:;]*)")
NAMED = re.compile(r"(?<![\w.'\[{}])([a-z][a-z_0-9]{2,})=")


def test_arguments_that_advice_names_exist() -> None:
    known = {name for taker in TAKERS for name in inspect.signature(taker).parameters}
    known |= {field.name for field in dataclasses.fields(Recipe)}
    known |= {key for section in _READERS.values() for key in section} | {"size", "fsdp", "mode"}
    unknown = [
        f"{place}: {name}= in {text!r}"
        for place, text in _texts()
        for advice in ADVICE.findall(text)
        for name in NAMED.findall(advice)
        if name not in known and name not in ELSEWHERE
    ]
    assert not unknown, "\n".join(unknown)


def test_calls_that_advice_names_exist() -> None:
    """`booster.x`, `plugin.x`, `optimizer.x` and `shardwright.x` in any message."""
    from shardwright.interface import OptimizerWrapper
    from shardwright.zero.optimizer import ZeroOptimizer

    homes: dict[str, list[Any]] = {
        "booster": [Booster],
        "plugin": [HybridParallelPlugin],
        "optimizer": [OptimizerWrapper, ZeroOptimizer],  # the second for what is said of ZeRO alone
        "shardwright": [shardwright],
    }
    wrong = []
    for place, text in _texts():
        for home, path in re.findall(r"(?<![\w./`-])(booster|plugin|optimizer|shardwright)\.([A-Za-z_.]+)\(", text):
            names = path.split(".")
            if (home, names[0]) == ("booster", "plugin"):  # an attribute of boosters
                home, names = "plugin", names[1:]
            if not any(_reaches(start, names) for start in homes[home]):
                wrong.append(f"{place}: {home}.{path} in {text!r}")
    assert not wrong, "\n".join(wrong)


def _reaches(start: Any, names: list[str]) -> bool:
    for name in names:
        start = getattr(start, name, None)
    return start is not None


# Models that a pipeline knows nothing about.


class Block(nn.Module):
    """It holds no modules, so that nothing tells a list of them from any other list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x @ self.weight).tanh()


class Tower(nn.Module):
    """Its layers are no transformers layers and its inputs no token ids; `hint` reaches a layer only where it is
    given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(3, 8)
        self.storeys = nn.ModuleList([Block() for _ in range(4)])
        self.side = nn.Linear(2, 8)
        self.exit = nn.Linear(8, 1)

    def forward(
        self, points: torch.Tensor, hint: torch.Tensor | None = None, target: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.entry(points)
        for block in self.storeys:
            x = block(x)
        if hint is not None:
            x = x + self.side(hint)
        return self.exit(x)


class TowerPolicy(Policy):
    layer_lists = ["storeys"]


class HoldingPolicy(TowerPolicy):
    def get_held_layers(self) -> list[nn.Module]:
        return []


def error(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return F.mse_loss(outputs, inputs["target"])


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"points": 3, "hint": 2, "target": 1}
    return {name: torch.randn(5, 7, size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}


def follow_the_pipeline(rank: int, world: int) -> dict[str, Any]:
    """From one message to the next until the model trains; then its parameters, and those of one process."""
    torch.manual_seed(0)
    model = Tower().double()
    reference = copy.deepcopy(model)
    settings: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2, "precision": "fp32"}
    batch = _batch()

    def boost(**more: Any) -> tuple[Booster, Any, Any]:
        booster = Booster(plugin=HybridParallelPlugin(**settings, **more))
        built = copy.deepcopy(model)
        boosted, optimizer, *_ = booster.boost(built, torch.optim.SGD(built.parameters(), lr=0.1))
        return booster, boosted, optimizer

    with pytest.raises(ValueError, match="name the lists in layer_lists of a policy: custom_policy="):
        boost()
    with pytest.raises(ValueError, match="pass example_inputs=, a batch like the real ones, to the plugin"):
        boost(custom_policy=TowerPolicy())
    with pytest.raises(ValueError, match=r"HoldingPolicy.get_held_layers with pp_size above 1.*remove it"):
        boost(custom_policy=HoldingPolicy(), example_inputs=batch)
    booster, boosted, optimizer = boost(custom_policy=TowerPolicy(), example_inputs=batch)
    booster.execute_pipeline(iter([batch]), boosted, error, optimizer)
    optimizer.step()
    error(reference(**batch), batch).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    expected = dict(reference.named_parameters())
    held = dict(boosted.unwrap().named_parameters())
    for name, param in held.items():
        torch.testing.assert_close(param, expected[name], rtol=1e-10, atol=1e-10)
    return {"held": set(held), "all": set(expected)}


def test_a_model_that_a_pipeline_knows_nothing_about_trains_when_its_advice_is_followed() -> None:
    first, second = run_ranks(follow_the_pipeline, 2)
    assert first["held"] | second["held"] == first["all"]
    assert "side.weight" in second["held"], "the batch that was given as an example uses it behind the last layer"
    assert "entry.weight" not in second["held"]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Make this process rank 0 of a world without other processes."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    yield lambda size: shardwright.launch(0, size, None, None, backend="fake")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_layer_lists_are_relative_to_the_base_model(world: Callable[[int], None]) -> None:
    """As rules are, so that a policy serves every head of a family, also below LoRA adapters; wrong names are
    answered.
    """

    class Layers(Policy):
        layer_lists = ["layers"]

    world(2)
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2, custom_policy=Layers())
    for name in ("llama-causal-lm", "llama-base", "llama-sequence-classification"):
        layout = plugin.preflight(zoo.build(name, dtype=torch.float32))
        assert [len(stage.layers) for stage in layout.stages] == [2, 2]
    import peft

    adapted = peft.get_peft_model(
        zoo.build("llama-causal-lm", dtype=torch.float32), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    layout = plugin.preflight(
        adapted, torch.optim.SGD([param for param in adapted.parameters() if param.requires_grad])
    )
    assert layout.stages[0].layers[0] == "base_model.model.model.layers.0"
    for wrong, words in (
        (["layer"], r"no ModuleList 'model.layer' to cut along; it has model.layers"),
        ("layers", r"such as \['layers'\]"),
    ):
        Layers.layer_lists = wrong  # type: ignore[assignment]
        with pytest.raises(ValueError, match=words):
            plugin.preflight(zoo.build("llama-causal-lm", dtype=torch.float32))


class Table(nn.Module):
    """Takes one positional tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            rows = block(rows)
        return rows


def test_example_inputs_come_in_every_form_of_a_batch(world: Callable[[int], None]) -> None:
    from collections import UserDict

    class Layers(Policy):
        layer_lists = ["layers"]

    world(2)
    rows = torch.zeros(2, 3, 8)
    for example in (rows, [rows], (rows,), {"rows": rows}, UserDict(rows=rows)):
        plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2, custom_policy=Layers(), example_inputs=example)
        assert len(plugin.preflight(Table()).stages) == 2


FOLLOWED: list[tuple[str, Callable[[], Any]]] = [
    ("num_microbatches={2 * pp_size} is a good start", lambda: HybridParallelPlugin(pp_size=2, num_microbatches=4)),
    (
        "leave zero_group_size out",
        lambda: (HybridParallelPlugin(zero_stage=0), HybridParallelPlugin(zero_stage=1, zero_group_size=2)),
    ),
    (
        "use zero_stage=0, 1 or 2, where ranks may differ",
        lambda: [HybridParallelPlugin(zero_stage=s, find_unused_parameters=True) for s in range(3)],
    ),
    ("states move to the host when they are sharded; ", lambda: HybridParallelPlugin(zero_stage=1, cpu_offload=True)),
    ("=1 or 2, or overlap_allgather=False", lambda: HybridParallelPlugin(zero_stage=2, overlap_allgather=True)),
    (
        "in which ranks can sum, such as torch.bfloat16",
        lambda: HybridParallelPlugin(communication_dtype=torch.bfloat16),
    ),
    (
        "use 0.0 and None, and the plugin's cpu_offload=True",
        lambda: (HybridAdam(nn.Linear(2, 2).parameters()), LowLevelZeroPlugin(cpu_offload=True)),
    ),
    (
        "use parallel.zero1=dict(size=..., fsdp=True)",
        lambda: HybridParallelPlugin.from_config({"parallel": {"zero1": {"size": 2, "fsdp": True}}}),
    ),
    (
        "layers are sharded in one dimension here; use mode='1d'",
        lambda: HybridParallelPlugin.from_config({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}),
    ),
    ("use {name}=1 or 2, or overlap_allgather=False", lambda: LowLevelZeroPlugin(stage=2, overlap_allgather=True)),
    ("pass precision= to the plugin instead", lambda: Booster(plugin=HybridParallelPlugin(precision="fp16"))),
    (
        "use Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=1))",
        lambda: Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=1)),
    ),
    ("build it inside shardwright.lazy.LazyInitContext()", lambda: _lazy()),
]


def _lazy() -> Any:
    with LazyInitContext():
        model = zoo.build("llama-causal-lm")
    return HybridParallelPlugin().preflight(model)


@pytest.mark.parametrize(("fragment", "follow"), FOLLOWED, ids=[fragment for fragment, _ in FOLLOWED])
def test_advice_is_reachable(fragment: str, follow: Callable[[], Any], world: Callable[[int], None]) -> None:
    """The message is still there, and what it says to do works on this rank."""
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in ROOT.rglob("*.py")))
    assert fragment in source, "the message changed: does its advice still work?"
    world(2)
    follow()
