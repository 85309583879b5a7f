"""Fine-tune a model with experts, whose experts are spread over data-parallel ranks.

    python examples/mixture_of_experts.py --tiny
    torchrun --nproc-per-node 2 examples/mixture_of_experts.py --tiny --ep 2
    torchrun --nproc-per-node 4 examples/mixture_of_experts.py --tiny --model qwen3_moe --ep 2 --pp 2
    torchrun --nproc-per-node 8 examples/mixture_of_experts.py --model Qwen/Qwen3-30B-A3B --ep 8 --zero 1
    torchrun --nproc-per-node 8 examples/mixture_of_experts.py --model mistralai/Mixtral-8x7B-v0.1 --ep 4 --tp 2

Each rank holds some of the experts whole; tokens travel to the experts that their router chose, and back. Everything
else is data parallel. No token is dropped, so the numbers are those of one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from _shared import byte_tokenizer, count, endless, hybrid_plugin, options, sentences, text_blocks, vocabulary, wikitext
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.lazy import LazyInitContext
from shardwright.optim import HybridAdam

TINY_EXPERTS = {
    "mixtral": {"intermediate_size": 96, "num_local_experts": 8},
    "qwen3_moe": {"intermediate_size": 96, "moe_intermediate_size": 96, "num_experts": 8, "head_dim": 16},
}


def main(argv: Sequence[str] | None = None) -> None:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--ep", type=count, default=1, help="data-parallel ranks that the experts are spread over")
    args = options(__doc__, argv, extra, model="Qwen/Qwen3-30B-A3B", lr=1e-5, tiny={"model": "mixtral"})
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    if args.tiny:
        if args.model not in TINY_EXPERTS:
            raise SystemExit(f"--model {args.model}: with --tiny it is one of {', '.join(TINY_EXPERTS)}")
        tokenizer = byte_tokenizer()
        sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_key_value_heads": 2}
        experts = {"num_attention_heads": 4, "num_experts_per_tok": 2, **TINY_EXPERTS[args.model]}
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(args.model, **sizes, **experts, **vocabulary(tokenizer))
        )
        dataset = text_blocks(tokenizer, sentences(200), args.length)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        with LazyInitContext():  # weights are read when the model is boosted, by each rank its own
            model = AutoModelForCausalLM.from_pretrained(args.model)
        dataset = text_blocks(tokenizer, wikitext(), args.length)
    model.config.output_router_logits = True  # the loss has a term that spreads tokens over experts

    optimizer = HybridAdam(model.parameters(), lr=args.lr)
    plugin = hybrid_plugin(args, ep_size=args.ep)
    dataloader = plugin.prepare_dataloader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, _ = booster.boost(model, optimizer, dataloader=dataloader)
    held = sum(parameter.numel() for parameter in model.parameters())
    print(f"rank {coordinator.rank} holds {held / 1e6:.2f} of {model.num_parameters() / 1e6:.2f} million parameters")

    batches = endless(dataloader)
    for step in range(1, args.steps + 1):
        result = booster.execute_pipeline(batches, model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if coordinator.is_last_process():
            print(f"step {step}: loss {result['loss'].item():.4f}")

    if args.output:
        booster.save_model(model, args.output, shard=True)
        if coordinator.is_master():
            tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
