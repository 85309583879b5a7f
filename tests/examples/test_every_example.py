"""Every example on 1, 2 and 4 ranks: the losses fall, and those of all layouts are those of one process.

Most of it is behind the sweep marker; see docs/testing.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.examples.test_examples import run, run_by_torchrun
from tests.forked_scripts import ROOT, run_forked

EXAMPLES = ROOT / "examples"
STEP = re.compile(r"step +(\d+)\D.*?loss (\d+\.\d+)")


@dataclass(frozen=True)
class Example:
    """A script, the options that it is run with on 1, 2 and 4 ranks beside --tiny, and which of these layouts take the
    same samples in a step as one rank does.
    """

    script: str
    options: tuple[str, str, str]
    same: tuple[int, ...] = (2, 4)
    learns: bool = True

    def options_on(self, ranks: int) -> list[str]:
        return ["--tiny", *self.options[(1, 2, 4).index(ranks)].split()]


TP_PP = ("", "--tp 2", "--tp 2 --pp 2")
PP_FIRST = ("", "--pp 2", "--tp 2 --pp 2")
_WHOLE_BATCH = "--plugin torch_ddp hybrid_parallel --tp {tp} --pp {pp} --precision fp32 --epochs 2 --batch-size {batch}"
EVERY = [
    Example(
        "bert/finetune.py",
        (
            _WHOLE_BATCH.format(tp=1, pp=1, batch=8),
            _WHOLE_BATCH.format(tp=2, pp=1, batch=4),
            _WHOLE_BATCH.format(tp=2, pp=2, batch=2),
        ),
        learns=False,  # prints no losses: its scores are compared by the script
    ),
    Example("chatglm2.py", PP_FIRST),
    Example("checkpoints.py", ("--directory run1", "--directory run2", "--directory run4 --pp 2")),
    Example("custom_mlp.py", ("", "", "")),
    Example("custom_transformer.py", ("", "--tp 2 --policy auto", "--tp 2 --pp 2")),
    Example("dpo.py", PP_FIRST),
    Example("gpt2_finetune.py", TP_PP),
    Example("llama/benchmark.py", ("", "--plugin zero --zero 2", "--tp 2 --pp 2 --zero 1"), (), learns=False),
    Example("llama/finetune.py", PP_FIRST),
    Example("llama/pretrain.py", ("", "--tp 2", "--tp 2 --pp 2 --pp_style zbv --n_chunks 2"), (2,)),
    Example("long_context.py", ("", "", "--mode all_to_all --sp 2 --pp 2")),
    Example("lora.py", ("--output one", "--tp 2 --output two", "--tp 2 --pp 2 --output four")),
    Example("mixture_of_experts.py", ("", "--ep 2", "--model qwen3_moe --ep 2 --pp 2"), ()),
    Example("one_step.py", ("", "--tp 2", "--tp 2 --pp 2"), learns=False),
    Example("one_step.py", ("--microbatches 2", "", "--pp 2"), (), learns=False),  # data parallel, its own loss
    Example("one_step.py", ("--family sam", "--family sam --tp 2", "--family sam --pp 2"), (2,), learns=False),
    Example("opt_finetune.py", ("", "--plugin torch_fsdp", "--plugin hybrid_parallel --tp 2"), ()),
    Example("restarts.py", ("--directory again1", "--directory again2 --tp 2", "--directory again4 --pp 2")),
    Example("t5_summarise.py", TP_PP),
    Example("vit_classify.py", PP_FIRST),
    Example("whisper_transcribe.py", TP_PP),
]


def losses(printed: str) -> dict[int, float]:
    """By step."""
    return {int(step): float(loss) for step, loss in STEP.findall(printed)}


def assert_same(found: dict[int, float], expected: dict[int, float]) -> None:
    """Losses are printed with four digits, and float32 sums in another order drift apart over the steps."""
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, abs=2e-3)


@pytest.mark.sweep
@pytest.mark.parametrize("example", EVERY, ids=lambda example: f"{example.script} {example.options[0]}".strip())
def test_on_1_2_and_4_ranks(example: Example, tmp_path: Path) -> None:
    found = {ranks: losses(run(ranks, example.script, *example.options_on(ranks), cwd=tmp_path)) for ranks in (1, 2, 4)}
    for ranks in example.same:
        assert_same(found[ranks], found[1])
    if example.learns:
        for of_steps in found.values():
            assert of_steps[max(of_steps)] < of_steps[1]


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", EVERY, ids=lambda example: f"{example.script} {example.options[0]}".strip())
def test_under_torchrun(example: Example, tmp_path: Path) -> None:
    run_by_torchrun(2, example.script, *example.options_on(2), cwd=tmp_path)


def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    options = ("checkpoints.py", "--tiny", "--directory", "run")
    (tmp_path / "whole").mkdir()
    whole = losses(run(1, *options, cwd=tmp_path / "whole"))
    first = losses(run(2, *options, "--tp", "2", "--stop-after", "4", cwd=tmp_path))
    printed = run(4, *options, "--pp", "2", cwd=tmp_path)
    assert re.search(r"going on after .*step-4\n", printed)
    assert_same({**first, **losses(printed)}, whole)


def test_a_run_that_is_taken_away_goes_on(tmp_path: Path) -> None:
    options = ("--tiny", "--directory", "run")
    codes, printed = run_forked(2, EXAMPLES / "restarts.py", *options, "--taken-at", "3", cwd=tmp_path)
    assert codes == [143, 143], printed
    done = len(losses(printed))
    assert done in range(3, 8), printed  # the step that ranks agree on after the signal
    assert list(losses(printed)) == list(range(1, done + 1))
    again = run(1, "restarts.py", *options, cwd=tmp_path)
    assert f"{done} steps are done\n" in again
    assert list(losses(again)) == list(range(done + 1, 9))


def test_preferences_are_learned_from_where_the_reference_is(tmp_path: Path) -> None:
    found = losses(run(2, "dpo.py", "--tiny", "--pp", "2", cwd=tmp_path))
    assert found[1] == pytest.approx(0.6931, abs=1e-4)  # log 2: nothing has moved away from the reference
    assert found[8] < 0.5


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("lora.py", ["--output", "/proc/nowhere"], "'/proc/nowhere' cannot be made"),
        ("t5_summarise.py", ["--steps", "0"], "'0' is no whole number above 0"),
        ("long_context.py", ["--tp", "0"], "'0' is no whole number above 0"),
        ("checkpoints.py", ["--directory", "run", "--save-every", "0"], "'0' is no whole number above 0"),
        ("dpo.py", ["--length", "4"], "--length 4 ends before the answers begin"),
        ("dpo.py", ["--microbatches", "3"], "--microbatches 3 does not divide --batch-size 4"),
        ("bert/finetune.py", ["--task", "mrcp"], "invalid choice: 'mrcp'"),
        ("bert/finetune.py", ["--epochs", "0"], "'0' is no whole number above 0"),
        ("bert/finetune.py", ["--target-f1", "86"], "'86' is no share; give a number from 0 to 1"),
        ("bert/finetune.py", ["--plugin", "hybrid_parallel", "--tp", "2", "--pp", "1"], "or use tp_size=1"),
        ("llama/benchmark.py", ["--mbs", "0"], "'0' is no whole number above 0"),
        ("llama/benchmark.py", ["--ignore-steps", "-1"], "'-1' is no whole number of at least 0"),
        ("llama/benchmark.py", ["--config", "7b"], "--config 7b: --tiny is the config tiny"),
        ("llama/benchmark.py", ["--plugin", "ddp", "--n_chunks", "2"], "--n-chunks is an option of --plugin 3d"),
        ("llama/finetune.py", ["--num_layers_per_stage", "3"], "sum to the model's 4 layers"),
        ("llama/pretrain.py", ["--lr", "-1"], "'-1' is no number above 0"),
        ("llama/pretrain.py", ["--zero", "7"], "invalid choice: 7"),
        ("llama/pretrain.py", ["--output", "/proc/nowhere"], "'/proc/nowhere' cannot be made"),
        ("llama/pretrain.py", ["--length", "1"], "--length 1: the first token is not predicted"),
        ("gpt2_finetune.py", ["--length", "1"], "give at least 2"),
        ("bert/finetune.py", ["--batch-size", "200"], "use a smaller batch_size"),
        ("gpt2_finetune.py", ["--tp", "3"], "Start 3 ranks, or use tp_size=1"),
        ("gpt2_finetune.py", ["--model", "gpt2"], "--model gpt2: --tiny makes a small model of its own"),
        ("opt_finetune.py", ["--pp", "2"], "--pp 2: this loop has no pipeline"),
        ("opt_finetune.py", ["--tp", "2"], "--tp 2 is an option of --plugin hybrid_parallel"),
    ],
)
def test_what_would_be_in_vain_is_refused_before_training(
    script: str, options: list[str], said: str, tmp_path: Path
) -> None:
    codes, printed = run_forked(1, EXAMPLES / script, "--tiny", *options, cwd=tmp_path)
    assert codes != [0]
    assert "step 1" not in printed
    assert "Traceback" not in printed
    if codes == [2]:  # argparse has printed it; what a script gives SystemExit, the interpreter would print
        assert said in printed


def test_every_script_is_listed_and_tried() -> None:
    scripts = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    scripts -= {"_shared.py", "llama/common.py", "bert/data.py"}
    assert scripts == {example.script for example in EVERY}
    listed = re.findall(r"^\| `([\w/]+\.py)`", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert scripts == set(listed)
    for script in scripts:
        text = (EXAMPLES / script).read_text()
        assert f"examples/{script} --" in text, f"the docstring of {script} says no command"
