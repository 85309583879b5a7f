"""What a training run is asked to do: the one list of keys, from which YAML, JSON, flags and the schema are made.

Keys at the top level have the names of HuggingFace's TrainingArguments where it has them. torch is not imported here,
so that a mistake in a recipe is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Key:
    """What a key means.

    choices   the words that it may be
    least     the smallest number that it may be
    most      the largest
    """

    doc: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None


@dataclass(kw_only=True)
class Source:
    """Where samples come from: `path` or `dataset`, and which columns make a sample."""

    path: Annotated[
        str | list[str] | None,
        Key("files (.jsonl, .json, .txt, or these as .gz; .parquet, .csv), patterns (data/*.jsonl), or a directory"),
    ] = None
    dataset: Annotated[str | None, Key("name of a dataset on the hub, or a directory that `datasets` saved")] = None
    name: Annotated[str | None, Key("configuration of the dataset")] = None
    split: Annotated[str, Key("split of the dataset")] = "train"
    streaming: Annotated[bool, Key("read the samples as they are needed, and never count them")] = False
    text: Annotated[str | None, Key("column with plain text: every token is learned")] = None
    messages: Annotated[
        str | None, Key("column with a list of {role, content}: the assistant's answers are learned")
    ] = None
    prompt: Annotated[str | None, Key("column with a prompt; `completion` names the column that is learned")] = None
    completion: Annotated[str | None, Key("column with the answer to `prompt`")] = None
    text_pair: Annotated[str | None, Key("column with a second text beside `text`")] = None
    label: Annotated[
        str | None, Key("column with the label of `text`: a name or a number; of a regression the number")
    ] = None
    words: Annotated[str | None, Key("column with a list of words; `tags` names the column with a label for each")] = (
        None
    )
    tags: Annotated[str | None, Key("column with the labels of `words`")] = None
    question: Annotated[
        str | None, Key("column with a question; `context` names the column with the text that has its answer")
    ] = None
    context: Annotated[str | None, Key("column with the text that answers `question`")] = None
    answers: Annotated[
        str | None, Key("column with {text: [...], answer_start: [...]}, as SQuAD has it; empty where there is none")
    ] = None
    weight: Annotated[
        float | None, Key("share among the sources of a mixture; left out: its number of samples", least=0)
    ] = None


@dataclass(kw_only=True)
class Data(Source):
    """One source, or a mixture of several, and how its samples become batches."""

    mix: Annotated[list[Source] | None, Key("several sources, each with the keys of one, and a `weight`")] = None
    max_length: Annotated[
        int | None, Key("tokens of a sample at most; left out: what the model takes, 2048 at most", least=2)
    ] = None
    stride: Annotated[
        int | None,
        Key("tokens that windows over a long context share; left out: 128, a quarter of max_length at most", least=0),
    ] = None
    packing: Annotated[bool, Key("several samples in one sequence of max_length, which do not see each other")] = False


@dataclass(kw_only=True)
class Lora:
    """Adapters of peft.LoraConfig; the model's own weights are frozen."""

    r: Annotated[int, Key("rank of the adapters", least=1)] = 8
    lora_alpha: Annotated[float, Key("scale of the adapters, divided by r")] = 16
    lora_dropout: Annotated[float, Key("dropout before the adapters", least=0)] = 0.0
    target_modules: Annotated[
        str | list[str] | None, Key("modules that get adapters; left out: peft's for the model")
    ] = None
    modules_to_save: Annotated[list[str] | None, Key("modules that are trained whole")] = None


@dataclass(kw_only=True)
class Recipe:
    """A training run."""

    model: Annotated[
        str | dict[str, Any], Key("name on the hub, directory, or {config: {model_type: ...}} for a new one")
    ] = ""
    task: Annotated[
        str,
        Key(
            "what the model learns, and so its head",
            choices=(
                *("causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification", "token-classification"),
                *("sequence-regression", "question-answering"),
            ),
        ),
    ] = "causal-lm"
    labels: Annotated[
        list[str] | None, Key("names of the labels of a classification, in their order; left out: the model's")
    ] = None
    mlm_probability: Annotated[
        float | None, Key("share of tokens that a masked-lm has to tell; left out: 0.15", least=0.01)
    ] = None
    tokenizer: Annotated[
        str | None, Key("name or directory, or `bytes`, which needs no files; left out: the model's")
    ] = None
    data: Annotated[Data | None, Key("what is learned")] = None
    eval_data: Annotated[Data | None, Key("what the model is tried on")] = None
    layout: Annotated[str | dict[str, Any], Key("arguments of HybridParallelPlugin, or auto")] = "auto"
    lora: Annotated[Lora | None, Key("train adapters instead of the weights")] = None
    chat_template: Annotated[str | None, Key("a Jinja template in place of the tokenizer's, or a file with one")] = None

    output_dir: Annotated[str, Key("directory for metrics, checkpoints and the model")] = "out"
    seed: Annotated[int, Key("fixes new weights, the order of samples and dropout", least=0, most=2**32 - 1)] = 42
    bf16: Annotated[bool, Key("compute in bfloat16, with fp32 masters")] = False
    fp16: Annotated[bool, Key("compute in float16, with fp32 masters and a loss scale")] = False
    activation_checkpointing: Annotated[bool, Key("compute activations of layers again in the backward pass")] = False

    per_device_train_batch_size: Annotated[int, Key("samples of one data-parallel rank at a time", least=1)] = 8
    per_device_eval_batch_size: Annotated[
        int | None, Key("the same for evaluation; left out: that of training", least=1)
    ] = None
    gradient_accumulation_steps: Annotated[int, Key("such batches that make one optimizer step", least=1)] = 1
    num_train_epochs: Annotated[float, Key("passes over the data, unless max_steps says otherwise", least=0)] = 3.0
    max_steps: Annotated[int, Key("optimizer steps; -1: num_train_epochs decides", least=-1)] = -1
    learning_rate: Annotated[float, Key("the highest of the schedule", least=0)] = 5e-5
    lr_scheduler_type: Annotated[
        str,
        Key(
            "how the learning rate falls",
            choices=("linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"),
        ),
    ] = "linear"
    warmup_steps: Annotated[
        float, Key("steps in which the learning rate rises; below 1: the share of all steps", least=0)
    ] = 0
    optim: Annotated[
        str, Key("optimizer", choices=("adamw_torch", "adamw_torch_fused", "hybrid_adam", "sgd", "adafactor"))
    ] = "adamw_torch"
    weight_decay: Annotated[float, Key("of weights with two dimensions or more", least=0)] = 0.0
    adam_beta1: Annotated[float, Key("of AdamW", least=0)] = 0.9
    adam_beta2: Annotated[float, Key("of AdamW", least=0)] = 0.999
    adam_epsilon: Annotated[float, Key("of AdamW", least=0)] = 1e-8
    max_grad_norm: Annotated[float, Key("gradients are scaled down to this norm; 0: they are not", least=0)] = 1.0
    on_nan: Annotated[
        str,
        Key("what a loss that is nan or inf does: a warning, no step, or the end", choices=("warn", "skip", "stop")),
    ] = "warn"
    spike_factor: Annotated[
        float | None, Key("a loss ends the run that is so many times the median of the last 50", least=1)
    ] = None
    rollbacks: Annotated[
        int,
        Key(
            "how often spike_factor and on_nan: stop go back to the last checkpoint, and on without the data since",
            least=0,
        ),
    ] = 0

    dataloader_num_workers: Annotated[int, Key("processes that prepare samples for one rank", least=0)] = 0
    logging_steps: Annotated[
        float,
        Key("steps between lines of the log; below 1: the share of all steps; metrics.jsonl has every step", least=0),
    ] = 1
    timeline_steps: Annotated[
        int, Key("steps of a pipeline whose timeline is recorded, for shardwright report", least=0)
    ] = 0
    profile_steps: Annotated[
        int, Key("steps that torch's profiler records, behind the first ones; traces come to profile/", least=0)
    ] = 0
    report_to: Annotated[str | list[str], Key("trackers: tensorboard, wandb, trackio, mlflow")] = "none"
    run_name: Annotated[str | None, Key("what trackers and reports call the run; left out: output_dir")] = None
    eval_strategy: Annotated[str, Key("when the model is tried on eval_data", choices=("no", "steps", "epoch"))] = "no"
    eval_steps: Annotated[
        float | None,
        Key("steps between evaluations; below 1: the share of all steps; left out: logging_steps", least=0),
    ] = None
    early_stopping_patience: Annotated[
        int | None, Key("evaluations without a lower loss after which training ends", least=1)
    ] = None
    load_best_model_at_end: Annotated[
        bool | None,
        Key("keep the checkpoint of the best evaluation, and export its model; left out: with early_stopping_patience"),
    ] = None
    metric_for_best_model: Annotated[str, Key("what is best when it is lowest", choices=("loss", "eval_loss"))] = "loss"
    greater_is_better: Annotated[bool, Key("false: a loss is best when it is lowest")] = False
    save_strategy: Annotated[str, Key("when a checkpoint is written", choices=("no", "steps", "epoch"))] = "steps"
    save_steps: Annotated[float, Key("steps between checkpoints; below 1: the share of all steps", least=0)] = 500
    save_total_limit: Annotated[int | None, Key("checkpoints that are kept; left out: all", least=1)] = None
    on_save_error: Annotated[
        str, Key("what a full or vanished disk does: cost that checkpoint, or end the run", choices=("warn", "raise"))
    ] = "warn"
    resume: Annotated[
        bool | str, Key("true: go on from the newest checkpoint of output_dir; a path: from that one")
    ] = False
    nproc: Annotated[
        int | None, Key("ranks to start; left out: one per GPU, or what the layout needs on a CPU", least=1)
    ] = None

    @property
    def keeps_best(self) -> bool:
        """What `load_best_model_at_end` comes to."""
        if self.load_best_model_at_end is None:
            return self.early_stopping_patience is not None
        return self.load_best_model_at_end


# Other names for keys, from HuggingFace's older and newer versions and from its neighbours.
ALIASES = {
    "gradient_checkpointing": "activation_checkpointing",
    "resume_from_checkpoint": "resume",
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
    "model_name_or_path": "model",
    "nproc_per_node": "nproc",
    "num_epochs": "num_train_epochs",
    "train_data": "data",
}
