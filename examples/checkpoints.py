"""A run that goes on wherever it was cut off, on as many ranks as there are then.

    torchrun --nproc-per-node 2 examples/checkpoints.py --tiny --directory run --stop-after 4 --tp 2
    torchrun --nproc-per-node 4 examples/checkpoints.py --tiny --directory run --pp 2        # goes on at step 5
    torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 10 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/checkpoints.py --directory /shared/run

The second line is the same run: weights, optimizer, schedule and the next sample are taken up in another layout, and
losses are those of a run that was never cut off. Under the third torchrun starts the script again on the machines that
are left, whenever one is lost or comes back. A SIGTERM, which schedulers send before they take a machine away, saves
and ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from _shared import (
    byte_tokenizer,
    count,
    directory,
    endless,
    hybrid_plugin,
    options,
    sentences,
    text_blocks,
    vocabulary,
    wikitext,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.booster import Booster
from shardwright.checkpoint.preemption import SaveOnSignal
from shardwright.cluster import DistCoordinator
from shardwright.optim import HybridAdam
from shardwright.optim.lr_scheduler import CosineAnnealingWarmupLR


def main(argv: Sequence[str] | None = None) -> None:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--directory", type=directory, default="run", help="directory of the run's checkpoints")
    extra.add_argument("--save-every", type=count, default=50)
    extra.add_argument("--stop-after", type=count, help="end at this step, as if the machine had gone")
    # --batch-size is that of all ranks here, so that a step is the same step on any number of them
    args = options(__doc__, argv, extra, model="Qwen/Qwen3-0.6B", batch_size=64, tiny={"save_every": 2})
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    if args.tiny:
        tokenizer = byte_tokenizer()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **vocabulary(tokenizer)))
        dataset = text_blocks(tokenizer, sentences(20), args.length)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model)
        dataset = text_blocks(tokenizer, wikitext(), args.length)

    plugin = hybrid_plugin(args)
    if args.batch_size % plugin.dp_size:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide among {plugin.dp_size} data-parallel ranks")
    optimizer = HybridAdam(model.parameters(), lr=args.lr)
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=args.steps, warmup_steps=args.steps // 10)
    dataloader = plugin.prepare_dataloader(
        dataset, batch_size=args.batch_size // plugin.dp_size, shuffle=True, drop_last=True
    )
    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, lr_scheduler = booster.boost(
        model, optimizer, dataloader=dataloader, lr_scheduler=lr_scheduler
    )
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "dataloader": dataloader}

    first = 1
    if any(Path(args.directory).glob("step-*")):
        loaded = booster.load(args.directory, **state)  # the newest that is whole
        first = loaded["step"] + 1
        coordinator.print_on_master(f"going on after {loaded['path']}")

    batches = endless(dataloader)
    with SaveOnSignal() as signalled:
        for step in range(first, args.steps + 1):
            result = booster.execute_pipeline(batches, model, optimizer=optimizer)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            if coordinator.is_last_process():
                print(f"step {step}: loss {result['loss'].item():.4f}")
            stops = signalled.anywhere() or step in (args.stop_after, args.steps)
            if stops or step % args.save_every == 0:
                # Tensors are copied now and written while the next steps run.
                booster.save(f"{args.directory}/step-{step}", **state, step=step, use_async=True, keep_last=2)
            if stops:
                break
    booster.wait()


if __name__ == "__main__":
    main()
