"""The comparison finds every kind of difference, and only differences."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardwright.spec import ParamSpec, Piece, even_pieces, set_spec
from shardwright.testing import MismatchError, adamw, check_complete, compare_models, keep_float64, train_steps


class Tiny(nn.Module):
    """Two layers around an embedding that the head shares; `unused` never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.hidden(self.embed(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def trained_pair(dtype: torch.dtype = torch.float64) -> tuple[Tiny, Tiny, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    reference = Tiny().to(dtype)
    model = copy.deepcopy(reference)
    batches = [{"input_ids": torch.randint(7, (3, 5)), "labels": torch.randint(7, (3, 5))} for _ in range(2)]
    return (
        reference,
        model,
        train_steps(reference, adamw(reference), batches),
        train_steps(model, adamw(model), batches),
    )


def failures(reference: nn.Module, model: nn.Module, **options: object) -> list[tuple[str, str]]:
    report = compare_models(reference, model, check=False, **options)  # type: ignore[arg-type]
    return [(difference.kind, difference.name) for difference in report.failures]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_models_agree(dtype: torch.dtype) -> None:
    reference, model, *losses = trained_pair(dtype)
    report = compare_models(reference, model, losses=tuple(losses))
    check_complete(reference, [report.held])
    assert {"embed.weight", "head.weight"} <= report.held
    assert len(report.differences) == 1 + 2 * 6  # the tied weight counts once
    assert "agree" in str(report)


def test_a_wrong_gradient_is_named() -> None:
    reference, model, *_ = trained_pair()
    model.hidden.weight.grad.view(-1)[5] += 1e-8
    with pytest.raises(MismatchError, match=r"1 of .*\n  gradient hidden.weight: max error 1\.0"):
        compare_models(reference, model)


def test_a_gradient_far_below_one_is_measured_by_its_own_scale() -> None:
    reference, model, *_ = trained_pair(torch.float32)
    for side in (reference, model):
        for parameter in side.parameters():
            if parameter.grad is not None:
                parameter.grad *= 1e-4
    model.hidden.weight.grad *= 1.001
    assert failures(reference, model) == [("gradient", "hidden.weight")]


def test_missing_gradients() -> None:
    reference, model, *_ = trained_pair()
    model.hidden.bias.grad = None
    assert failures(reference, model) == [("gradient", "hidden.bias")]
    reference.hidden.bias.grad.zero_()  # type: ignore[union-attr]
    assert failures(reference, model) == []
    model.unused.weight.grad = torch.zeros(3, 3, dtype=torch.float64)
    assert failures(reference, model) == []
    model.unused.weight.grad = torch.full((3, 3), 1e-3, dtype=torch.float64)
    assert failures(reference, model) == [("gradient", "unused.weight")]


def test_not_a_number_fails() -> None:
    reference, model, *losses = trained_pair()
    model.hidden.bias.grad.fill_(float("nan"))  # type: ignore[union-attr]
    assert failures(reference, model) == [("gradient", "hidden.bias")]
    assert failures(reference, model, gradients=False, losses=(losses[0], losses[1] * float("nan"))) == [
        ("loss", "loss")
    ]


def test_a_wrong_weight_or_loss() -> None:
    reference, model, first, second = trained_pair()
    with torch.no_grad():
        model.head.bias[3] += 1e-9
    assert failures(reference, model, losses=(first, second + 1e-9)) == [("weight", "head.bias"), ("loss", "loss")]
    assert failures(reference, model, losses=(first, second[:1]), weights=False) == [("loss", "loss")]
    assert failures(reference, model, losses=(first.tolist(), second), weights=False) == []


def test_a_renamed_parameter_is_unknown_and_missing() -> None:
    reference, model, *_ = trained_pair()
    model.other = model.hidden
    del model.hidden
    report = compare_models(reference, model, check=False)
    assert {difference.name for difference in report.failures} == {"other.weight", "other.bias"}
    with pytest.raises(MismatchError, match=r"no rank holds 2 parameters: hidden\.bias, hidden\.weight"):
        check_complete(reference, [report.held])


def test_a_stage_is_compared_by_what_it_holds() -> None:
    reference, model, *_ = trained_pair()
    stages = [copy.deepcopy(model), copy.deepcopy(model)]
    for stage, source in zip(stages, (model, model), strict=True):
        for copied, original in zip(stage.parameters(), source.parameters(), strict=True):
            copied.grad = None if original.grad is None else original.grad.clone()
    stages[0].hidden.to("meta")
    stages[0].head = nn.Identity()
    stages[1].embed = nn.Embedding(0, 6)
    stages[1].hidden.weight.data = torch.empty(0, dtype=torch.float64)
    held = [compare_models(reference, stage).held for stage in stages]
    assert "hidden.weight" not in held[0]
    assert "hidden.weight" not in held[1]
    assert "embed.weight" in held[1], "the head of stage 1 is the same parameter"
    with pytest.raises(MismatchError, match=r"no rank holds 1 parameter: hidden\.weight"):
        check_complete(reference, held)


def test_wrappers_do_not_change_names() -> None:
    reference, model, *_ = trained_pair()
    holder = nn.Module()
    holder.module = model
    layer = nn.Module()
    layer._checkpoint_wrapped_module = model.hidden
    model.hidden = layer
    assert failures(reference, holder) == []


def shard(model: Tiny, coordinate: int, ranks: int = 4) -> None:
    """Cut the hidden layer's rows (6 over 4 ranks: 2, 2, 2 and only padding)."""
    for name, parameter in model.hidden.named_parameters():
        spec = ParamSpec(f"hidden.{name}", tuple(parameter.shape), 0, even_pieces(6, ranks))
        local = nn.Parameter(spec.shard(parameter.detach(), coordinate))
        local.grad = spec.shard(parameter.grad, coordinate)
        set_spec(local, spec)
        setattr(model.hidden, name, local)


@pytest.mark.parametrize("coordinate", range(4))
def test_shards_are_compared_with_their_part(coordinate: int) -> None:
    reference, model, *_ = trained_pair()
    shard(model, coordinate)
    model.hidden.weight.data[even_rows(coordinate) :] = 9.0  # padding may hold anything
    compare_models(reference, model, coordinate={"tp": coordinate})
    compare_models(reference, model, coordinate=lambda axis: coordinate)
    if coordinate < 3:
        assert failures(reference, model, coordinate=(coordinate + 1) % 3) != []
        model.hidden.weight.grad[1, 2] *= 1 + 1e-6  # type: ignore[index]
        assert failures(reference, model, coordinate=coordinate) == [("gradient", "hidden.weight")]


def even_rows(coordinate: int) -> int:
    return 2 if coordinate < 3 else 0


def test_a_spec_that_does_not_fit() -> None:
    reference, model, *_ = trained_pair()
    set_spec(model.hidden.bias, ParamSpec("hidden.bias", (6,), 0, ((Piece(0, 3),), (Piece(4, 2),))))
    set_spec(model.head.bias, ParamSpec("head.bias", (8,)))
    set_spec(model.hidden.weight, ParamSpec("hidden.weight", (6, 6), 0, even_pieces(6, 2)))
    notes = {difference.name: difference.note for difference in compare_models(reference, model, check=False).failures}
    assert notes["hidden.bias"] == "1 indices of dim 0 are in no rank's pieces, the first is 3"
    assert "full_shape=(8,)" in notes["head.bias"]
    assert "shard of shape (6, 6) instead of (3, 6)" in notes["hidden.weight"]


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(MismatchError, match="nothing was compared"):
        compare_models(Tiny(), nn.Identity())


def test_the_functions_that_keep_float64_stay_the_same() -> None:
    """Dynamo compiles what it knew the first time."""
    functions = []
    for _ in range(2):
        with keep_float64():
            functions.append((torch.zeros_like, torch.tensor, torch.bmm))
    assert functions[0] == functions[1]


def test_keep_float64() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with keep_float64():
        casts = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), torch.softmax(x, -1, dtype=torch.float32)]
        casts.append(nn.functional.softmax(x, dim=-1, dtype=torch.float32))
        assert [cast.dtype for cast in casts] == [torch.float64] * 5
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float32
    assert x.float().dtype == torch.float32


def test_train_steps_needs_a_batch() -> None:
    model = Tiny()
    with pytest.raises(ValueError, match="batches is empty"):
        train_steps(model, adamw(model), [])
