"""HuggingFace models through pipelines of rank processes: loss, outputs, every gradient and every updated weight in
float64.
"""

from __future__ import annotations

import pytest
from pipeline_cases import Case, run_cases

from shardwright.pipeline.cut.plan import cut_model
from shardwright.pipeline.settings import PipelineSettings
from shardwright.testing import run_ranks, zoo

pytestmark = pytest.mark.timeout(300)  # twenty seconds on two free cores
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "bert", "t5")


def run(cases: list[Case], ranks: int = 2, dp: int = 1) -> None:
    held = run_ranks(run_cases, ranks, cases, dp, timeout=240)
    for index, case in enumerate(cases):
        names = {name for name, _ in zoo.build(case.name).named_parameters()}
        assert set().union(*(rank[index] for rank in held)) == names, f"{case}: parameters that no rank holds"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_head(family: str) -> None:
    run([Case(name) for name in zoo.names(family=family)])


STYLES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb", 1), ("zbv", 2))


@pytest.mark.parametrize("name", ["llama-tied-causal-lm", "bert-masked-lm", "t5-conditional-generation"])
def test_every_schedule(name: str) -> None:
    """Llama in all of them; of the others one with recomputation where the other has none."""
    cases = [Case(name, style, chunks, checkpointing=ratio) for style, chunks in STYLES for ratio in (None, 0.5)]
    first = {"bert": 0, "t5": 1}.get(name.split("-")[0])
    run([case for at, case in enumerate(cases) if first is None or (at // 2 + at) % 2 == first])


@pytest.mark.parametrize(
    "case",
    [
        Case("llama-tied-causal-lm", layers=(1, 1, 1, 1), microbatch_size=2, num_microbatches=None),
        Case("t5-conditional-generation", layers=(3, 2, 1, 2), num_microbatches=2, checkpointing=1.0),
        Case("gpt2-sequence-classification", num_microbatches=9),
    ],
    ids=lambda case: case.name,
)
def test_four_stages_with_any_layout(case: Case) -> None:
    run([case], ranks=4)


def test_a_head_by_itself_is_a_stage() -> None:
    """The last stage may have no layers: it gets what the last layer returned, also beside the first stage on one
    rank.
    """
    one, two = {"layers": (4, 0)}, {"style": "zbv", "chunks": 2, "layers": (1, 2, 1, 0), "checkpointing": 1.0}
    t5 = {"layers": (8, 0)}
    run(
        [
            Case("llama-causal-lm", **one),  # type: ignore[arg-type]
            Case("llama-tied-causal-lm", **two),  # type: ignore[arg-type]
            Case("bert-masked-lm", **one),  # type: ignore[arg-type]
            Case("gpt2-sequence-classification", **one),  # type: ignore[arg-type]
            Case("t5-conditional-generation", **t5),  # type: ignore[arg-type]
        ]
    )


def test_embeddings_by_themselves_are_a_stage() -> None:
    """The first stage may have no layers: the next one gets what its first layer receives. On two ranks, and beside
    the head on one.
    """
    one, both = {"layers": (0, 4)}, {"layers": (0, 2, 2, 0), "chunks": 2}
    run(
        [
            Case("llama-causal-lm", "gpipe", **one),  # type: ignore[arg-type]
            Case("llama-tied-causal-lm", "zbv", checkpointing=1.0, **both),  # type: ignore[arg-type]
            Case("bert-masked-lm", **one),  # type: ignore[arg-type]
            Case("gpt2-sequence-classification", "zb", **one),  # type: ignore[arg-type]
            Case("t5-conditional-generation", "interleaved", 2, layers=(0, 3, 5, 0)),
            Case("vit-image-classification", "dualpipev", **both),  # type: ignore[arg-type]
        ]
    )


def test_searched_and_eager_schedules() -> None:
    run(
        [
            Case("llama-tied-causal-lm", "auto", checkpointing=0.5),
            Case("gpt2-sequence-classification", "eager_1f1b", num_microbatches=5),
        ]
    )


def test_two_replicas_of_two_stages() -> None:
    """The loss is that of all replicas' samples, and gradients summed over replicas are those of one process."""
    run(
        [
            Case("llama-causal-lm", "zbv", 2, num_microbatches=2),
            Case("bert-pretraining", num_microbatches=3),
            Case("qwen3-question-answering", "interleaved", 2, num_microbatches=2, layers=(1, 1, 1, 1)),
        ],
        ranks=4,
        dp=2,
    )


def refuse_plain_calls(rank: int, world_size: int) -> None:
    model = zoo.build("llama-causal-lm")
    cut_model(model, PipelineSettings(), rank, world_size)
    with pytest.raises(RuntimeError, match=r"booster\.execute_pipeline"):
        model(**zoo.inputs("llama-causal-lm"))
    for settings in (
        PipelineSettings(num_layers_per_stage=[5]),
        PipelineSettings("interleaved", 3),
        PipelineSettings("zbv", 3),
    ):
        with pytest.raises(ValueError, match=r"num_layers_per_stage|stages|chunk"):
            cut_model(zoo.build("llama-causal-lm"), settings, rank, world_size)


def test_plain_calls_and_bad_layouts_are_refused() -> None:
    run_ranks(refuse_plain_calls, 2)
