"""Scripts of Colossal-AI's users: a plugin's call in python, or the command line of its examples."""

from __future__ import annotations

import ast
import inspect
import shlex
from collections.abc import Callable, Mapping, Set
from typing import Any

from ...plugins import HybridParallelPlugin
from .found import Found
from .literals import Unknown
from .plugin_arguments import ORDER
from .statements import Called, Statements, parse
from .training_calls import OPTIMIZERS, is_schedule, named, read_optimizer, read_schedule

PLUGINS = tuple(ORDER)
_LEAVE = {
    "scheduler_nodes": 'pp_style="zbv" plans itself',
    "custom_policy": "an object: give it to the plugin in a script",
    "communication_dtype": "an object: give it to the plugin in a script",
    "master_weights": "masters are always kept by HybridParallelPlugin",
    "placement_policy": "memory is not moved as it fills up",
    "extra_dp_size": "zero_group_size of the layout is the number of ranks that shard by themselves: give it",
    "offload_param_frac": "weights stay on the device; cpu_offload keeps masters and optimizer states on the host",
    "cast_inputs": "inputs are always cast to the dtype that the model computes in",
    "verbose": "print(plugin.layout) shows the layout",
}
_STATIC: dict[str, dict[str, Any]] = {
    "GeminiPlugin": {"zero_stage": 3},
    "TorchFSDPPlugin": {"zero_stage": 3},
    "TorchDDPPlugin": {},
}
# Values of arguments that ask for nothing, where that is not None or False.
_DEFAULTS: dict[str, Any] = {
    "master_weights": True,
    "cast_inputs": True,
    "placement_policy": "static",
    "norm_type": 2.0,
    "extra_dp_size": 1,
    "offload_param_frac": 0.0,
    "max_prefetch": 0,
    "warmup_non_model_data_ratio": 0.8,
    "steady_cuda_cap_ratio": 0.9,
    "search_range_m": 32,
    "min_chunk_size_m": 32,
    "gpu_margin_mem_ratio": 0.0,
}
_PARTS = {"shard_param_frac": "zero_stage 3 shards all of them", "offload_optim_frac": "cpu_offload takes all of them"}
_NO_CLIPPING = ("TorchDDPPlugin", "TorchFSDPPlugin")  # scripts clip by themselves, or do not
_NAMES = {
    "stage": "zero_stage",
    "reduce_bucket_size_in_m": "zero_bucket_size_in_m",
    "bucket_cap_mb": "ddp_bucket_cap_mb",
    "enable_async_reduce": "overlap_communication",
    "max_prefetch": "gather_ahead",
    "moe_dp_outside": "dp_outside",
}


def read(text: str, file: str) -> Found:
    """`file` for messages: python is read as a script that builds a plugin, anything else as a command line."""
    return _script(text, file) if file.endswith(".py") else _command(text)


def _script(text: str, file: str) -> Found:
    tree = parse(text, file)
    built = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last(node.func) in PLUGINS]
    if not built:
        raise ValueError(f"{file} builds none of {', '.join(PLUGINS)}, so that there is no layout in it")
    followed = _follow(tree, file)
    calls = [called for called in followed.calls.values() if _last(called.node.func) in PLUGINS]
    found = Found()
    # A plugin may stand where nothing leads to, as far as can be told.
    call = calls[0] if calls else Called(built[0], [("**", Unknown("a branch that is not taken"))])
    name = _last(call.node.func)
    for other in built:
        if (other.lineno, other.col_offset) != (call.node.lineno, call.node.col_offset):
            why = f"the first plugin, of line {call.node.lineno}, is read"
            found.note(ast.unparse(other.func), f"line {other.lineno}", why)
    arguments: dict[str, Any] = {}
    unread = set()
    for argument, value in named(call, ORDER[name]).items():
        if argument in ("*", "**"):
            found.note(argument, getattr(value, "why", value), "arguments that only running the script tells")
            unread |= {"precision", "max_norm"}
        elif isinstance(value, Unknown):
            found.note(argument, value.why, _LEAVE.get(argument, "no constant; the file is read, not run"))
            unread.add(argument)
        else:
            arguments[argument] = value
    _plugin(name, arguments, unread, found)
    if name in _NO_CLIPPING:
        found.note("max_grad_norm", None, "a recipe clips gradients at 1.0; say 0 if the script does not clip them")
        _booster(followed, found)
    _training(followed, found)
    return found


def _last(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _follow(tree: ast.Module, file: str) -> Statements:
    """The script, its top level first, then what its functions do when they are called with anything."""
    followed = Statements(
        file, lambda name: name in PLUGINS or name in OPTIMIZERS or is_schedule(name) or name == "Booster"
    )
    followed.names["__name__"] = "__main__"
    followed.run(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            followed.run_function(node)
    return followed


def _training(followed: Statements, found: Found) -> None:
    """The optimizer and the schedule of a script."""
    calls = [(_last(called.node.func), called) for called in followed.calls.values()]
    optimizers = [(name, called) for name, called in calls if name in OPTIMIZERS]
    schedules = [(name, called) for name, called in calls if is_schedule(name)]
    for kind, made, read_one in (
        ("optimizer", optimizers, read_optimizer),
        ("schedule", schedules, read_schedule),
    ):
        for name, called in made[:1]:
            read_one(name, called, found)
        for name, called in made[1:]:
            found.note(
                name, f"line {called.node.lineno}", f"the first {kind}, of line {made[0][1].node.lineno}, is read"
            )
    if optimizers and not schedules:
        found.recipe["lr_scheduler_type"] = "constant"
    for key, text in dict.fromkeys(followed.untold):
        if key == "lr":
            found.note("learning_rate", text, "the script sets it by itself; say lr_scheduler_type")
        else:
            found.note(key, text, "not followed: what it changes is not told here")


def _booster(followed: Statements, found: Found) -> None:
    """`Booster(mixed_precision=...)`, which says the precision of plugins that do not."""
    for called in followed.calls.values():
        if _last(called.node.func) == "Booster":
            value = named(called, ("device", "mixed_precision", "plugin")).get("mixed_precision")
            if value in ("fp16", "bf16"):
                found.recipe[value] = True
            elif value is not None:
                shown = value.why if isinstance(value, Unknown) else value
                found.note("Booster.mixed_precision", shown, "say bf16: true or fp16: true")


def _plugin(name: str, arguments: Mapping[str, Any], unread: Set[str], found: Found) -> None:
    """Arguments of any plugin as those of HybridParallelPlugin; `unread` are given, but not known."""
    found.layout.update(_STATIC.get(name, {"zero_stage": 1} if name == "LowLevelZeroPlugin" else {}))
    known = _arguments_here()
    precision = arguments.get("precision", "fp16" if name not in ("TorchDDPPlugin", "TorchFSDPPlugin") else "fp32")
    if precision in ("bf16", "fp16") and "precision" not in unread:
        found.recipe[precision] = True
    if name not in _NO_CLIPPING and not {"max_norm"} & {*arguments, *unread}:
        found.recipe["max_grad_norm"] = 0.0  # their default, which is not that of recipes
    for argument, value in arguments.items():
        ours = _NAMES.get(argument, argument)
        if argument in _PARTS and 0 < value < 1:
            found.note(f"{name}.{argument}", value, f"a part of them is not offered: {_PARTS[argument]}")
        if argument == "precision" or (argument in _DEFAULTS and value == _DEFAULTS[argument]):
            continue
        if argument == "max_norm":
            found.recipe["max_grad_norm"] = value
        elif argument == "shard_param_frac":
            found.layout["zero_stage"] = 3 if value else 2
        elif argument == "offload_optim_frac":
            found.layout["cpu_offload"] = value > 0
        elif ours in known and argument not in _LEAVE:
            if value is not None:
                found.layout[ours] = value
        elif value not in (None, False) or argument in _DEFAULTS:
            found.note(f"{name}.{argument}", value, _LEAVE.get(argument, "no argument of HybridParallelPlugin here"))

    if found.layout.get("sequence_parallelism_mode") in ("split_gather", "ring"):
        found.layout.pop("sp_size", None)  # which is that of tensor parallelism there


def _arguments_here() -> set[str]:
    return set(inspect.signature(HybridParallelPlugin).parameters)


_PLUGIN_WORDS: dict[str, dict[str, Any]] = {
    "3d": {},
    "hybrid_parallel": {},
    "zero": {"zero_stage": 1},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero2_cpu": {"zero_stage": 2, "cpu_offload": True},
    "3d_cpu": {"cpu_offload": True},
    "low_level_zero": {"zero_stage": 1},
    "gemini": {"zero_stage": 3},
    "fsdp": {"zero_stage": 3},
    "fsdp_cpu": {"zero_stage": 3, "cpu_offload": True},
    "ddp": {},
    "torch_ddp": {},
    "torch_fsdp": {"zero_stage": 3},
}
# Of the examples' argument parsers, without dashes: where it goes, and what reads the text.
_OPTIONS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "tp": ("layout", "tp_size", int),
    "pp": ("layout", "pp_size", int),
    "sp": ("layout", "sp_size", int),
    "ep": ("layout", "ep_size", int),
    "zero": ("layout", "zero_stage", int),
    "zero_stage": ("layout", "zero_stage", int),
    "mbs": ("layout", "microbatch_size", int),
    "microbatch_size": ("layout", "microbatch_size", int),
    "num_microbatches": ("layout", "num_microbatches", int),
    "pp_style": ("layout", "pp_style", str),
    "n_chunks": ("layout", "num_model_chunks", int),
    "num_model_chunks": ("layout", "num_model_chunks", int),
    "sp_mode": ("layout", "sequence_parallelism_mode", str),
    "batch_size": ("recipe", "per_device_train_batch_size", int),
    "accumulation_steps": ("recipe", "gradient_accumulation_steps", int),
    "lr": ("recipe", "learning_rate", float),
    "weight_decay": ("recipe", "weight_decay", float),
    "weigth_decay": ("recipe", "weight_decay", float),
    "warmup_steps": ("recipe", "warmup_steps", float),
    "num_epochs": ("recipe", "num_train_epochs", float),
    "num_epoch": ("recipe", "num_train_epochs", float),
    "num_steps": ("recipe", "max_steps", int),
    "grad_clip": ("recipe", "max_grad_norm", float),
    "seed": ("recipe", "seed", int),
    "save_interval": ("recipe", "save_steps", int),
    "save_dir": ("recipe", "output_dir", str),
    "pretrained": ("recipe", "model", str),
    "model_name_or_path": ("recipe", "model", str),
    "model": ("recipe", "model", str),
}
_FLAGS: dict[str, tuple[str, str]] = {
    "grad_checkpoint": ("recipe", "activation_checkpointing"),
    "use_grad_checkpoint": ("recipe", "activation_checkpointing"),
    "xformers": ("layout", "enable_flash_attention"),
    "use_flash_attn": ("layout", "enable_flash_attention"),
    "use_fp8": ("layout", "use_fp8"),
    "use_fp8_comm": ("layout", "fp8_communication"),
    "overlap_allgather": ("layout", "overlap_allgather"),
}


def _command(text: str) -> Found:
    """`colossalai run ... train.py --plugin 3d --tp 2`, over several lines as shell scripts have it."""
    found = Found()
    joined = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    lines = [line for line in joined if ".py" in line and not line.startswith("#")]
    words = shlex.split(lines[0] if lines else " ".join(joined))
    for other in lines[1:]:
        found.note("command", other, "the first command of the file is read")
    start = next((at for at, word in enumerate(words) if word.endswith(".py")), -1)
    ranks = _options(words[: max(start, 0)]).get("nproc_per_node")
    if ranks is not None and ranks.isdigit():
        found.recipe["nproc"] = int(ranks)
    elif ranks is not None:
        found.note("--nproc_per_node", ranks, "no constant; the command is read, not run")
    _several_machines(_options(words[: max(start, 0)]), found)
    options = _options(words[start + 1 :])
    for name, value in options.items():
        _option(name, value, found)
    if found.layout.get("sp_size", 1) > 1:
        found.layout["enable_sequence_parallelism"] = True
        if found.layout.get("sequence_parallelism_mode") in ("split_gather", "ring"):
            found.layout.pop("sp_size")  # which is that of tensor parallelism there
    else:
        found.layout.pop("sequence_parallelism_mode", None)
    if options and not {"bf16", "fp16"} & set(found.recipe):
        found.note(
            "--mixed_precision", None, "the script's default, which the command does not say: bf16 or fp16: true"
        )
    if not options:
        raise ValueError(
            "no options such as --plugin 3d --tp 2 were found: give a script, or the command that starts it"
        )
    return found


def _several_machines(launcher: Mapping[str, str | None], found: Found) -> None:
    for name in ("nnodes", "num_nodes", "hostfile", "host"):
        value = launcher.get(name)
        if value not in (None, "1"):
            found.note(f"--{name}", value, "torchrun or srun start the ranks of several machines; nproc is for one")
            if name in ("nnodes", "num_nodes"):
                found.recipe.pop("nproc", None)


def _options(words: list[str]) -> dict[str, str | None]:
    options: dict[str, str | None] = {}
    for at, word in enumerate(words):
        if word.startswith("-") and not word.lstrip("-").replace(".", "").isdigit():
            name, equals, value = word.lstrip("-").partition("=")
            following = words[at + 1] if at + 1 < len(words) else "-"
            number = following.lstrip("-").replace(".", "").isdigit()
            follows = following if number or not following.startswith("-") else None
            options[name.replace("-", "_")] = value if equals else follows
    return options


def _option(name: str, value: str | None, found: Found) -> None:
    if name in ("plugin", "p") and value in _PLUGIN_WORDS:
        for key, each in _PLUGIN_WORDS[value].items():
            found.layout.setdefault(key, each)
    elif name in ("mixed_precision", "precision"):
        if value in ("bf16", "fp16"):
            found.recipe[value] = True
    elif name == "max_length" and value is not None:
        found.recipe["data"] = {"max_length": int(value)}
    elif name in _FLAGS:
        home, key = _FLAGS[name]
        getattr(found, home)[key] = True
    elif name in _OPTIONS and value is not None:
        home, key, kind = _OPTIONS[name]
        try:
            getattr(found, home)[key] = kind(value)
        except ValueError:
            found.note(f"--{name}", value, "no constant; the command is read, not run")
    else:
        dashes = "-" if len(name) == 1 else "--"
        found.note(f"{dashes}{name}", value, "no option of recipes")
