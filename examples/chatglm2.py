"""Fine-tune ChatGLM2 or 3, which transformers does not have.

    python examples/chatglm2.py --tiny
    torchrun --nproc-per-node 4 examples/chatglm2.py --tiny --tp 2 --pp 2
    torchrun --nproc-per-node 8 examples/chatglm2.py --model zai-org/chatglm3-6b --tp 2 --zero 2 --output trained

The model's code is part of shardwright. Importing it makes transformers' auto classes know it, and what is saved has
the names of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

from _shared import byte_tokenizer, endless, hybrid_plugin, options, sentences, text_blocks, vocabulary, wikitext
from transformers import AutoTokenizer

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.lazy import LazyInitContext
from shardwright.optim import HybridAdam
from shardwright.shardformer.modeling.chatglm2_6b.configuration_chatglm import ChatGLMConfig
from shardwright.shardformer.modeling.chatglm2_6b.modeling_chatglm import ChatGLMForConditionalGeneration


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv, model="zai-org/chatglm3-6b", lr=2e-5)
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    if args.tiny:
        tokenizer = byte_tokenizer()
        words = vocabulary(tokenizer)
        attention = {"num_attention_heads": 4, "multi_query_attention": True, "multi_query_group_num": 2}
        sizes = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "kv_channels": 16, "add_qkv_bias": True}
        model = ChatGLMForConditionalGeneration(
            ChatGLMConfig(padded_vocab_size=words.pop("vocab_size"), **sizes, **attention, **words)
        )
        dataset = text_blocks(tokenizer, sentences(100), args.length)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=True)
        with LazyInitContext():  # weights are read when the model is boosted, by each rank its own
            model = ChatGLMForConditionalGeneration.from_pretrained(args.model)
        dataset = text_blocks(tokenizer, wikitext(), args.length)

    optimizer = HybridAdam(model.parameters(), lr=args.lr)
    plugin = hybrid_plugin(args)
    dataloader = plugin.prepare_dataloader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, _ = booster.boost(model, optimizer, dataloader=dataloader)

    batches = endless(dataloader)
    for step in range(1, args.steps + 1):
        result = booster.execute_pipeline(batches, model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if coordinator.is_last_process():
            print(f"step {step}: loss {result['loss'].item():.4f}")

    if args.output:
        booster.save_model(model, args.output, shard=True)


if __name__ == "__main__":
    main()
