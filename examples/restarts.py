"""A run that is started again whenever it ends, in the few lines of `shardwright.elastic.run`.

    torchrun --nproc-per-node 2 examples/restarts.py --tiny --directory run --taken-at 4    # ends with exit code 143
    torchrun --nproc-per-node 4 examples/restarts.py --tiny --directory run --pp 2          # goes on behind that step
    torchrun --nproc-per-node 8 --max-restarts 10 examples/restarts.py --directory /shared/run
    sbatch --requeue --signal=USR1@120 --wrap "srun python examples/restarts.py --directory /shared/run"

SIGTERM and SIGUSR1 let all ranks finish their step, save it and end. A rank that fails ends the job, and so does one
that stands still when a step has taken too long; what is lost are the steps since the last save. `--taken-at` plays the
machine that is taken away. `checkpoints.py` does the same by hand.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence

from _shared import (
    byte_tokenizer,
    count,
    directory,
    hybrid_plugin,
    options,
    sentences,
    text_blocks,
    vocabulary,
    wikitext,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from shardwright import elastic
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.optim import HybridAdam
from shardwright.optim.lr_scheduler import CosineAnnealingWarmupLR


def main(argv: Sequence[str] | None = None) -> None:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--directory", type=directory, default="run", help="directory of the run's checkpoints")
    extra.add_argument("--save-every", type=count, default=50)
    extra.add_argument("--taken-at", type=count, help="get a SIGTERM in this step")
    # --batch-size is that of all ranks here, so that a step is the same step on any number of them
    args = options(__doc__, argv, extra, model="Qwen/Qwen3-0.6B", batch_size=64, tiny={"save_every": 2})

    def train(run: elastic.Run) -> None:
        if args.tiny:
            tokenizer = byte_tokenizer()
            sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
            model = LlamaForCausalLM(LlamaConfig(**sizes, **vocabulary(tokenizer)))
            dataset = text_blocks(tokenizer, sentences(20), args.length)
        else:
            tokenizer = AutoTokenizer.from_pretrained(args.model)
            model = AutoModelForCausalLM.from_pretrained(args.model)
            dataset = text_blocks(tokenizer, wikitext(), args.length)
        plugin = hybrid_plugin(args)  # for as many ranks as there are today
        if args.batch_size % plugin.dp_size:
            raise SystemExit(
                f"--batch-size {args.batch_size} does not divide among {plugin.dp_size} data-parallel ranks"
            )
        optimizer = HybridAdam(model.parameters(), lr=args.lr)
        lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=args.steps, warmup_steps=args.steps // 10)
        dataloader = plugin.prepare_dataloader(
            dataset, batch_size=args.batch_size // plugin.dp_size, shuffle=True, drop_last=True
        )
        booster = Booster(plugin=plugin)
        model, optimizer, _, dataloader, lr_scheduler = booster.boost(
            model, optimizer, dataloader=dataloader, lr_scheduler=lr_scheduler
        )
        coordinator = DistCoordinator()
        run.resume(booster, model, optimizer, lr_scheduler, dataloader)
        coordinator.print_on_master(f"{run.step} steps are done")
        while run.step < args.steps:
            for batch in dataloader:
                result = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                if coordinator.is_last_process():
                    print(f"step {run.step + 1}: loss {result['loss'].item():.4f}", flush=True)
                    if run.step + 1 == args.taken_at:
                        os.kill(os.getpid(), signal.SIGTERM)
                run.completed()
                if run.step == args.steps:
                    break

    elastic.run(train, args.directory, save_every=args.save_every, seed=42)


if __name__ == "__main__":
    main()
