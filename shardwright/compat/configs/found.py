"""What a configuration comes to here, and the rules by which its keys are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Note(NamedTuple):
    """A key that has no counterpart, and what to know about it."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        shown = repr(self.value)
        return f"{self.key} = {shown if len(shown) <= 60 else '...'}: {self.why}"


@dataclass
class Found:
    """layout: arguments of HybridParallelPlugin; recipe: other keys of a recipe; notes: what is in neither."""

    layout: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def note(self, key: str, value: Any, why: str) -> None:
        self.notes.append(Note(key, value, why))

    @property
    def precision(self) -> str:
        given: str | None = self.layout.get("precision")
        return given or ("bf16" if self.recipe.get("bf16") else "fp16" if self.recipe.get("fp16") else "fp32")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the plugin alone, for a script."""
        found = {**self.layout, "precision": self.precision}
        if "max_grad_norm" in self.recipe:
            found["max_norm"] = self.recipe["max_grad_norm"]
        if self.recipe.get("activation_checkpointing"):
            found["gradient_checkpoint_config"] = {"gradient_checkpointing_ratio": 1.0}
        if not {"num_microbatches", "microbatch_size"} & set(found) and "gradient_accumulation_steps" in self.recipe:
            found["num_microbatches"] = self.recipe["gradient_accumulation_steps"]
        return found


Rule = Callable[[Found, str, Any], None]
Rules = Mapping[str, Rule]
QUIET: tuple[Any, ...] = (
    None,
    False,
    0,
    0.0,
    "none",
    "no",
    "false",
    "auto",
    "",
    [],
    {},
)  # values that ask for nothing, or leave the choice
UNKNOWN = "no key that is known here"


def asks(value: Any) -> bool:
    """Whether a flag is set. Arguments of HuggingFace's write it as text, too: "true", "False"."""
    return (
        value.strip().lower() not in ("", "0", "no", "none", "false", "auto") if isinstance(value, str) else bool(value)
    )


def to_layout(name: str) -> Rule:
    def read(found: Found, key: str, value: Any) -> None:
        if value not in ("auto", None):
            found.layout[name] = value

    return read


def to_recipe(name: str) -> Rule:
    def read(found: Found, key: str, value: Any) -> None:
        if value not in ("auto", None):
            found.recipe[name] = value

    return read


def says(why: str, quiet: tuple[Any, ...] = QUIET) -> Rule:
    """Nothing but a note, unless the value asks for nothing."""

    def read(found: Found, key: str, value: Any) -> None:
        if not any(value is each or (type(value) is type(each) and value == each) for each in quiet):
            found.note(key, value, why)

    return read


CUDNN: Rules = {
    "cudnn_benchmark": says("torch.backends.cudnn.benchmark is for a script"),
    "cudnn_deterministic": says("launch(deterministic=True) is for a script"),
}  # at the top level of files of Colossal-AI and InternLM


def one_of(name: str, values: Mapping[Any, Any], otherwise: str, to: str = "recipe") -> Rule:
    """A word, translated; None stands for words that ask for nothing."""

    def read(found: Found, key: str, value: Any) -> None:
        if value == "auto":
            return
        if value not in values:
            found.note(key, value, otherwise)
        elif values[value] is not None:
            getattr(found, to)[name] = values[value]

    return read


def apply(rules: Rules, given: Mapping[str, Any], found: Found, prefix: str = "") -> None:
    """Read every key of nested mappings by the rule of its dotted name; those without one are noted."""
    for key, value in given.items():
        name = f"{prefix}{key}"
        if name in rules:
            try:
                rules[name](found, name, value)
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"{name} = {value!r} is no value that this key takes") from None
        elif isinstance(value, Mapping) and any(rule.startswith(f"{name}.") for rule in rules):
            apply(rules, value, found, f"{name}.")
        else:
            found.note(name, value, UNKNOWN)


def nothing(found: Found, key: str, value: Any) -> None:
    """For keys that other keys look at, and for those that say what is so anyway."""


def dotted(given: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """The value of a dotted name."""
    value: Any = given
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def each_leaf(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from each_leaf(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
