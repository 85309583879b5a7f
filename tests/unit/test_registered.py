"""What is registered by name: what it must be, and what is said of schedules that return something else."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import pytest
from torch import nn

import shardwright
from shardwright.pipeline import schedules
from shardwright.pipeline.schedules.phases import FB, B, F, I, W, times
from shardwright.plugins import HybridParallelPlugin, registry
from shardwright.shardformer import Policy, get_autopolicy
from shardwright.shardformer.policies import auto
from shardwright.testing import zoo


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "STYLES", dict(schedules.STYLES))
    monkeypatch.setattr(auto, "_registered", {})
    monkeypatch.setattr(registry, "_REGISTERED", {})


def raises(placement: Any, rank: int, m: int) -> Any:
    raise KeyError("costs")


RETURNED = [
    (lambda placement, rank, m: None, "its function returned None; it must return a list of phases for the rank"),
    (lambda placement, rank, m: 3, "its function returned 3; it must return a list"),
    (lambda placement, rank, m: "F B", "its function returned 'F B'"),
    (lambda placement, rank, m: times(m, F(), B()), r"returned array\(.*; it must return a list of phases"),
    (lambda placement, rank, m: [], "its function returned no letters"),
    (lambda placement, rank, m: [F(), B()], "0 is no phase; it must return a list of phases"),
    (lambda placement, rank, m: ["F", "B"], "'F' is no phase"),
    (lambda placement, rank, m: [["F", "B"]], r"\['F', 'B'\] is no phase"),
    (lambda placement, rank, m: [np.array([0.0, 2.0])], r"array\(\[0., 2.\]\) is no phase"),
    (lambda placement, rank, m: [[[0], [1, 2]]], r"\[\[0\], \[1, 2\]\] is no phase"),
    (lambda placement, rank, m: [times(m, F(1), B(1))], r"letters of chunk 1, but a rank has 1 chunk\(s\)"),
    (lambda placement, rank, m: [times(m, -3, B())], r"letters of chunk -1"),
    (lambda placement, rank, m: [times(m, F(), I()), times(m, W())], "register it with splits_backward=True"),
    (lambda placement, rank, m: [times(m - 1, F()), [B()], [FB()]], "an FB without a B or I behind it"),
    (lambda placement, rank, m: [times(m, F())], "pp_style='own', which was registered: "),
    (raises, "its function raised KeyError: 'costs'"),
]


@pytest.mark.parametrize(("function", "words"), RETURNED, ids=range(len(RETURNED)))
def test_what_is_no_schedule(function: Any, words: str) -> None:
    shardwright.register_schedule("own", function)
    with pytest.raises(ValueError, match=rf"(?s)^(?=pp_style='own', which was registered).*{words}"):
        schedules.get("own", 2, 4)


def test_schedules_in_other_containers() -> None:
    shardwright.register_schedule("own", lambda placement, rank, m: (list(times(m, F(), B())) for _ in range(1)))
    shardwright.register_schedule("split", lambda p, r, m: [times(m, F(), I()), times(m, W())], splits_backward=True)
    for name, length in (("own", 8), ("split", 12)):
        assert len(schedules.get(name, 2, 4).actions[0]) == length
        schedules.get(name, 2, 4, forward_only=True)


def test_what_cannot_be_registered_as_a_schedule() -> None:
    for function, settings, words in (
        (lambda placement: [], {}, r"must be a function \(placement, rank, num_microbatches\)"),
        (3, {}, r"must be a function \(placement, rank, num_microbatches\)"),
        (raises, {"num_model_chunks": "2"}, "num_model_chunks='2' must be a whole number"),
        (raises, {"splits_backward": "no"}, "splits_backward='no' must be True or False; use False"),
        (raises, {"placement": "w"}, "placement='w' is not one of 'linear', 'round_robin', 'v'"),
        (raises, {"placement": ["v"]}, "is not one of 'linear'"),
    ):
        with pytest.raises(ValueError, match=words):
            shardwright.register_schedule("own", function, **settings)  # type: ignore[arg-type]


class Mine(Policy):
    pass


class Needs(Policy):
    def __init__(self, width: int, depth: int = 1) -> None:
        pass


class Abstract(Policy, abc.ABC):
    @abc.abstractmethod
    def module_policy(self) -> Any: ...


def test_what_cannot_be_registered_as_a_policy() -> None:
    for key, policy, words in (
        ("", Mine, "model_type_or_class='' must be the model_type of a config"),
        (" ", Mine, "must be the model_type of a config"),
        ("LLAMA ", Mine, "has spaces around it, so no model goes by it - did you mean 'llama'"),
        (" my_type", Mine, "did you mean 'my_type'"),
        (None, Mine, "model_type_or_class=None must be"),
        (nn.Module, Mine, "must be the model_type of a config, such as 'llama', or a class of models"),
        (nn.Linear(2, 2), Mine, "use its class, Linear"),
        (Mine, "llama", "the policy comes second"),
        ("mine", Mine(), "pass the class: Mine"),
        ("mine", "Mine", "must be a subclass of shardwright.shardformer.Policy"),
        ("mine", nn.Module, "must be a subclass of shardwright.shardformer.Policy"),
        ("mine", Policy, "policy_class=Policy says nothing about a model"),
        ("mine", Abstract, "policy_class=Abstract says nothing about a model"),
        ("mine", Needs, "is built without arguments, and needs width; give them defaults, or pass an instance"),
    ):
        with pytest.raises(ValueError, match=words):
            shardwright.register_policy(key, policy)  # type: ignore[arg-type]


def test_a_policy_goes_by_the_name_of_a_class_too() -> None:
    model = zoo.build("llama-causal-lm")
    for name in (
        "LlamaForCausalLM",
        "transformers.models.llama.modeling_llama.LlamaForCausalLM",
        "LlamaPreTrainedModel",
    ):
        auto._registered.clear()
        shardwright.register_policy(name, Mine)
        assert type(get_autopolicy(model)) is Mine
    assert type(get_autopolicy(zoo.build("gpt2-causal-lm"))) is not Mine


class Fails(Policy):
    def __init__(self) -> None:
        raise KeyError("rules")


def test_what_a_registered_policy_or_plugin_raises(caplog: pytest.LogCaptureFixture) -> None:
    shardwright.register_policy("llama", Fails)
    with pytest.raises(ValueError, match="policy_class=Fails, which was registered for 'llama', raised KeyError when"):
        get_autopolicy(zoo.build("llama-causal-lm"))
    shardwright.register_policy("XLM_Roberta", Mine)  # a class of the user's own may be called so
    assert "do not go by this name, only a class" in caplog.text
    assert "'xlm-roberta'" in caplog.text
    for function, words in (
        (HybridParallelPlugin, "plugin='own', which was registered: HybridParallelPlugin needs a process group"),
        (lambda: {}["width"], "plugin='own', which was registered: its function raised KeyError: 'width'"),
        (lambda width: None, "plugin='own', which was registered: its function raised TypeError: .*'width'"),
    ):
        shardwright.register_plugin("own", function)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=words):
            registry.make_plugin("own")
    with pytest.raises(ValueError, match="name='own ' of a plugin must be a text without spaces around it"):
        shardwright.register_plugin("own ", HybridParallelPlugin)
