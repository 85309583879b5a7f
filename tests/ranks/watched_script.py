"""Trains a tiny model in a watched job, and prints what the watching threads and the notes of calls cost, as JSON."""

from __future__ import annotations

import json
import threading
import time
import timeit

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import job
from shardwright.cluster.heart import heart
from shardwright.plugins import HybridParallelPlugin

STEPS, SECONDS = 20, 4.0


def processor_seconds() -> float:
    """Of both watching threads."""
    found = [each.ident for each in threading.enumerate() if each.name.startswith("shardwright-watch")]
    found += [each.ident for each in threading.enumerate() if type(each).__name__ == "Watch"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in set(found) if ident is not None)


def looks() -> int:
    me = job.current()
    assert me is not None
    return int((me.ask(f"beat/{me.rank}") or "0").split()[0])


def main() -> None:
    shardwright.launch_from_torch(seed=1, step_timeout=600)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, **sizes)
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=4, precision="fp32")
    booster, model = Booster(plugin=plugin), LlamaForCausalLM(config)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert optimizer is not None
    ids = torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(0))
    for step in range(STEPS + 2):
        if step == 2:  # the first ones make what the others use
            began, calls = time.thread_time(), heart.number
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), boosted, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    step_time = (time.thread_time() - began) / STEPS
    calls_of_step = (heart.number - calls) / STEPS
    spent, seen = processor_seconds(), looks()
    time.sleep(SECONDS)
    look = (processor_seconds() - spent) / max(1, looks() - seen)
    noted = job.heeds_failures(lambda: None)
    call = min(timeit.repeat(noted, number=2000, repeat=5)) / 2000
    print(json.dumps({"step": step_time, "calls": calls_of_step, "call": call, "look": look, "poll": job.POLL}))


if __name__ == "__main__":
    main()
