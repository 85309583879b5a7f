"""Mixers of tokens other than attention, dealt to ranks by heads or channels, against plain transformers in one
process: loss, every gradient, files, lazy building, generated tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from shardwright.lazy import LazyInitContext
from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.shardformer import ModelSharder, ShardConfig, ShardFormer
from shardwright.shardformer.heads import HeadGeometry
from shardwright.shardformer.layer.parallel_module import ParallelGroup
from shardwright.shardformer.mixer_styles import ByHeads, HalfOfHeads
from shardwright.shardformer.patterns import patterns_of
from shardwright.shardformer.plan import Plan
from shardwright.shardformer.sequence import AlongTensor
from shardwright.spec import PADDING, get_spec
from shardwright.testing import compare_models, keep_float64, run_ranks
from tests.models import tiny_causal_lm as tiny

# What keeps one mixer of every kind, beside attention in the same model where the family has both. Three heads for two
# ranks, where sizes are free.
KINDS: dict[str, dict[str, Any]] = {
    "minimax": {"num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2, "hidden_size": 48},
    "recurrent_gemma": {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "num_hidden_layers": 3},
    "xlstm": {"num_heads": 3, "hidden_size": 192, "qk_dim_factor": 1.0, "num_hidden_layers": 2},
    "rwkv": {"hidden_size": 45, "attention_hidden_size": 45, "num_hidden_layers": 2, "rescale_every": 1},
    "olmo_hybrid": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "hidden_size": 48,
        "linear_num_value_heads": 6,
        "num_hidden_layers": 4,
    },
    "qwen3_next": {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    "qwen3_5_text": {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    "kimi_linear": {"linear_num_heads": 3},
    "bailing_hybrid": {"linear_num_heads": 3},
    "lfm2": {},
    "lfm2_moe": {},
    "lfm3": {"hidden_size": 66, "head_dim": 16},
    "zaya": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "deepseek_v4": {},
}
GENERATED = 5
SHARDED_AT_LEAST = {"zaya": 0.85, "kimi_linear": 0.85, "deepseek_v4": 0.85}  # their routers and low ranks are whole


def proven(rank: int, world: int, names: list[str], folder: str, sequence: AlongTensor | None = None) -> list[str]:
    """What differs, by name."""
    return [f"{name}: {problem}" for name in names for problem in _problems(rank, name, Path(folder) / name, sequence)]


def _problems(rank: int, name: str, folder: Path, sequence: AlongTensor | None) -> list[str]:
    found = []
    with keep_float64():
        reference, model = (tiny.build(name, KINDS[name]) for _ in range(2))
        batch = tiny.inputs(reference)
        config = ShardConfig(make_vocab_size_divisible_by=8)
        if sequence is None:
            model = ShardFormer(config).shard_model(model)
        else:
            sharder = ModelSharder(model, None, config, sequence)
            sharder.shard()
            model = sharder.model
        specs = [spec for param in model.parameters() if (spec := get_spec(param)) is not None]
        shared = sum(torch.Size(spec.full_shape).numel() for spec in specs if spec.is_sharded)
        share = shared / sum(param.numel() for param in reference.parameters())
        if share < SHARDED_AT_LEAST.get(name, 0.9):
            found.append(f"only {share:.0%} is sharded")
        losses = []
        for one in (reference, model):
            loss = one(**batch).loss
            loss.backward()
            losses.append(loss.detach())
        if sequence is not None:
            sync_shared_gradients(model.parameters(), dist.group.WORLD)
        report = compare_models(reference, model, coordinate=rank, losses=tuple(losses), check=False)
        try:
            report.check()
        except AssertionError as error:
            found.append(str(error))
        if sequence is not None:
            return found
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for key, value in reference.state_dict().items():
            if not torch.equal(loaded.state_dict()[key].to(value), value):
                found.append(f"the file has another {key}")
        prompt = batch["input_ids"][:2, :7]
        asked: dict[str, Any] = {"max_new_tokens": GENERATED, "do_sample": False, "eos_token_id": None}
        want = reference.eval().generate(prompt, **asked)
        if not torch.equal(model.eval().generate(prompt, **asked), want):
            found.append("other tokens")
    return found


@pytest.mark.parametrize("names", [["minimax", "recurrent_gemma", "rwkv"]])
def test_mixers_are_dealt(names: list[str], tmp_path: Path) -> None:
    results = run_ranks(proven, 2, names, str(tmp_path))
    assert results == [[], []]


@pytest.mark.sweep
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_mixer(name: str, tmp_path: Path) -> None:
    assert run_ranks(proven, 2, [name], str(tmp_path)) == [[], []]


# DeepSeek V4's layers take streams of residuals and ids of tokens beside them.
@pytest.mark.sweep
@pytest.mark.parametrize("name", KINDS)
def test_split_sequences(name: str, tmp_path: Path) -> None:
    assert run_ranks(proven, 2, [name], str(tmp_path), AlongTensor()) == [[], []]


def lazily(rank: int, world: int, names: list[str]) -> None:
    """Shards of a model that is built without numbers are those of the whole one."""
    for name in names:
        config = tiny.config(name, KINDS[name])
        with LazyInitContext(seed=3):
            whole = AutoModelForCausalLM.from_config(config)
        LazyInitContext.materialize(whole)
        with LazyInitContext(seed=3):
            model = AutoModelForCausalLM.from_config(config)
        model = ShardFormer(ShardConfig()).shard_model(model)
        full = dict(whole.named_parameters())
        for key, param in model.named_parameters():
            spec = get_spec(param)
            part = full[key].detach()
            assert torch.equal(param, part if spec is None else spec.shard(part, rank)), (name, key)
        ids = torch.randint(5, 99, (2, 8), generator=torch.Generator().manual_seed(1))
        want = whole.eval()(input_ids=ids, labels=ids, use_cache=False).loss
        got = model.eval()(input_ids=ids, labels=ids, use_cache=False).loss
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# The others begin with weights that are computed from one another, which is refused whatever the layout.
@pytest.mark.sweep
@pytest.mark.parametrize("name", ["minimax", "zaya", "deepseek_v4", "lfm2", "lfm2_moe", "lfm3"])
def test_lazy(name: str) -> None:
    run_ranks(lazily, 2, [name])


def test_heads_of_parts_that_lie_one_after_the_other() -> None:
    layer = nn.Module()
    layer.heads, layer.keys, layer.values = 3, 6, 12
    pieces = ByHeads("heads", ("keys", "keys", "values")).pieces(24, 2, layer)
    assert [[tuple(piece) for piece in rank] for rank in pieces] == [
        [(0, 4), (6, 4), (12, 8)],
        [(4, 2), (10, 2), (20, 4)],
    ]
    assert ByHeads("heads").pieces(6, 4, layer)[3][0] == (PADDING, 2)
    with pytest.raises(ValueError, match="not 3 heads"):
        ByHeads("heads").pieces(8, 2, layer)
    with pytest.raises(ValueError, match="others is None"):
        ByHeads("others").pieces(6, 2, layer)


def test_values_of_two_tokens_go_to_the_heads_they_are_of() -> None:
    """Three heads of four features: the first half ends in the middle of the second head."""
    layer = nn.Module()
    layer.head_dim = 4
    assert HalfOfHeads(second=False).pieces(6, 2, layer) == (((0, 6),), ((6, 0),))
    assert HalfOfHeads(second=True).pieces(6, 2, layer) == (((0, 2),), ((2, 4),))


def test_queries_and_keys_one_after_the_other() -> None:
    geometry = HeadGeometry(4, 2)
    assert list(geometry.local("qk", 1, 2)) == [(2, 2), (5, 1)]
    assert geometry.rows("qk") == 6


class _Left(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class _Right(_Left):
    pass


def test_a_pattern_with_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(_Left(), _Right(), _Left())
    assert patterns_of(model, "1.up") == {"*.up", "*[_Right].up", "*.up[Linear]"}
    monkeypatch.setattr(ParallelGroup, "size", property(lambda self: 2))
    rules = {"*[_Left].up": "colwise", "*[_Left].down": "rowwise"}
    decided = Plan(rules).decide(model, ParallelGroup(None))  # type: ignore[arg-type]
    assert [decision.site.name for decision in decided] == ["0.up", "0.down", "2.up", "2.down"]
    with pytest.raises(ValueError, match="matches no module"):
        Plan({"*[_Middle].up": "colwise"}).decide(model, ParallelGroup(None))  # type: ignore[arg-type]
