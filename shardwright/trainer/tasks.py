"""What a recipe can train: which head a model has, which columns a sample is made of. torch is not imported here."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import RecipeError
from .recipe import Data, Recipe, Source


@dataclass(frozen=True)
class Task:
    """
    auto      class of transformers that gives a model the head
    kinds     columns that make a sample; any of these sets
    adapters  what peft calls the task; None: nothing of its own
    optional  columns that a sample may have besides
    head      whether the head is a new one, which peft trains a copy of
    labelled  whether samples have labels of a list of names, the share of which that is met is the accuracy
    """

    auto: str
    kinds: tuple[tuple[str, ...], ...]
    adapters: str | None = None
    optional: tuple[str, ...] = ()
    labelled: bool = False

    @property
    def head(self) -> bool:
        return self.adapters in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")


TASKS = {
    "causal-lm": Task("AutoModelForCausalLM", (("text",), ("messages",), ("prompt", "completion")), "CAUSAL_LM"),
    "masked-lm": Task("AutoModelForMaskedLM", (("text",),)),
    "seq2seq-lm": Task("AutoModelForSeq2SeqLM", (("prompt", "completion"),), "SEQ_2_SEQ_LM"),
    "sequence-classification": Task(
        "AutoModelForSequenceClassification", (("text", "label"),), "SEQ_CLS", ("text_pair",), labelled=True
    ),
    "token-classification": Task("AutoModelForTokenClassification", (("words", "tags"),), "TOKEN_CLS", labelled=True),
    "sequence-regression": Task("AutoModelForSequenceClassification", (("text", "label"),), "SEQ_CLS", ("text_pair",)),
    "question-answering": Task("AutoModelForQuestionAnswering", (("question", "context", "answers"),), "QUESTION_ANS"),
}
COLUMNS = (
    *("text", "messages", "prompt", "completion", "text_pair", "label", "words", "tags"),
    *("question", "context", "answers"),
)


def check_task(recipe: Recipe) -> None:
    """RecipeError for keys that the recipe's task does not read."""
    task = TASKS[recipe.task]
    if recipe.labels is not None and not task.labelled:
        raise RecipeError(f"labels, and a {recipe.task} has none; leave them out, or say task: sequence-classification")
    if recipe.labels is not None and len(set(recipe.labels)) < max(2, len(recipe.labels)):
        raise RecipeError(f"labels={recipe.labels}: two different names are needed at least, each once")
    if recipe.mlm_probability is not None and recipe.task != "masked-lm":
        raise RecipeError(f"mlm_probability, and the task is {recipe.task}; say task: masked-lm, or leave it out")
    if recipe.chat_template is not None and recipe.task != "causal-lm":
        raise RecipeError(f"chat_template, and a {recipe.task} has no conversations; leave it out")
    for key in ("data", "eval_data"):
        data: Data | None = getattr(recipe, key)
        if data is None:
            continue
        if data.packing and recipe.task != "causal-lm":
            raise RecipeError(f"{key}.packing: true is for causal-lm, and the task is {recipe.task}; leave it out")
        if data.stride is not None and recipe.task != "question-answering":
            raise RecipeError(
                f"{key}.stride, and the task is {recipe.task}; say task: question-answering, or leave it out"
            )
        sources: dict[str, Source] = {key: data}
        if data.mix is not None:
            sources = {f"{key}.mix[{at}]": one for at, one in enumerate(data.mix)}
        for name, source in sources.items():
            _check_source(name, source, recipe.task)


def _check_source(name: str, source: Source, task_name: str) -> None:
    task = TASKS[task_name]
    read = {*task.optional, *(part for kind in task.kinds for part in kind)}
    given = [part for part in COLUMNS if getattr(source, part) is not None]
    for part in given:
        if part not in read:
            raise RecipeError(
                f"{name}.{part} is nothing that a {task_name} is made of; it has {_words(task)}"
                + (f", or say task: {_task_of(part)}" if task_name == "causal-lm" else "")
            )


def _words(task: Task) -> str:
    return ", or ".join(" and ".join(kind) for kind in task.kinds)


def _task_of(part: str) -> str:
    return next(
        name for name, task in TASKS.items() if part in task.optional or any(part in kind for kind in task.kinds)
    )
