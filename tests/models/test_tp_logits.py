"""Logits in the hands of a script that uses ShardFormer alone: an evaluation loop, a loss of its own, generation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.trainer_pt_utils import LabelSmoother

from shardwright.shardformer.layer import whole_logits
from shardwright.testing import run_ranks, zoo
from tests.models.tp_ranks import overrides, shard


def script(rank: int, world_size: int) -> None:
    arguments = overrides("llama-causal-lm")
    reference, model = (
        zoo.build("llama-causal-lm", **arguments).eval(),
        zoo.build("llama-causal-lm", **arguments).eval(),
    )
    model = shard(model)
    batch = zoo.inputs(reference)
    labels = batch.pop("labels")
    expected, logits = reference(**batch).logits, model(**batch).logits
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(logits[:, -1].topk(3).indices, expected[:, -1].topk(3).indices)
    torch.testing.assert_close(whole_logits(logits), expected)
    # Preferences: chosen and rejected answers in one batch, and the probabilities of their tokens.
    ids = labels.clamp_min(0).unsqueeze(-1)

    def margin(logits: torch.Tensor) -> torch.Tensor:
        chosen, rejected = logits.float().log_softmax(-1).gather(-1, ids).squeeze(-1).sum(-1).chunk(2)
        return -F.logsigmoid(chosen.sum() - rejected.sum())

    for model_of, logits_of in ((reference, expected), (model, logits)):
        margin(logits_of).backward()
        assert model_of.model.norm.weight.grad is not None
    torch.testing.assert_close(margin(logits), margin(expected))
    torch.testing.assert_close(model.model.norm.weight.grad + 0, reference.model.norm.weight.grad, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"matmul is not possible on logits .*whole_logits\(logits\)"):
        logits @ torch.ones(logits.shape[-1], 2)
    # The loss that transformers' Trainer takes for label_smoothing_factor, which divides by logits.shape[-1].
    smoothed = []
    for each in (reference, model):
        each.zero_grad()
        loss = LabelSmoother(0.1)(each(**batch), labels, shift_labels=True)
        loss.backward()
        smoothed.append((loss, each.model.norm.weight.grad + 0, each.model.layers[0].input_layernorm.weight.grad + 0))
    torch.testing.assert_close(*smoothed, rtol=1e-5, atol=1e-5)
    # Gradients of logits, of the loss of the model itself.
    seen: list[torch.Tensor] = []
    for each in (reference, model):
        outputs = each(**batch, labels=labels)
        outputs.logits.register_hook(seen.append)
        outputs.logits.retain_grad()
        outputs.loss.backward()
        assert torch.equal(whole_logits(outputs.logits.grad), whole_logits(outputs.logits.grad + 0))
        seen.append(whole_logits(outputs.logits.grad))
    torch.testing.assert_close(seen[3], seen[1])
    assert torch.equal(seen[0], seen[1])
    prompt = batch["input_ids"][:, :4]
    tokens = [each.generate(prompt, max_new_tokens=5, do_sample=False) for each in (reference, model)]
    assert torch.equal(*tokens)


def test_logits_of_shardformer_alone():
    run_ranks(script, 2)
