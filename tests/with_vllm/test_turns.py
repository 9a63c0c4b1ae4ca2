"""Single turns of real vLLM: where they end, and whose context they continue."""

import pytest
import torch

from trace_trl.generation import Request


pytestmark = pytest.mark.vllm


def logprobs_of(trainer, context, sampled):
    """The trainer's own log-probs of sampled tokens."""
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.tensor([context + sampled])).logits[0, len(context) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sampled)[:, None]).squeeze(1).tolist()


@pytest.mark.parametrize("mode", ["continuous", "lockstep"])
def test_stop_strings_end_a_turn_and_stay_part_of_it(worker, tmp_path, mode):
    trainer = worker.make_trainer(tmp_path, "run", vllm_rollout_mode=mode, turn_stop_strings=["a1"])
    tokenizer = trainer.processing_class
    rows = [dict(row) for row in trainer.train_dataset.select(range(24))]
    trees = trainer.rollout(rows)
    stopped = 0
    for tree in trees:
        for turn in tree.turns():
            words = tokenizer.convert_ids_to_tokens(turn.token_ids)
            # All that was sampled before the last token holds neither a stop string nor the end of a turn
            assert not [word for word in words[:-1] if "a1" in word or word == tokenizer.eos_token]
            stopped += "a1" in words[-1]
            context = turn.parent.history_ids()
            assert turn.logprobs == pytest.approx(logprobs_of(trainer, context, turn.token_ids), abs=1e-4)
    assert stopped > 10


def test_contexts_end_at_the_length_that_vllm_is_given(worker, tmp_path):
    trainer = worker.make_trainer(tmp_path, "run", vllm_max_model_length=14, max_turn_length=None)
    rows = [dict(row) for row in trainer.train_dataset.select(range(40)) if len(row["prompt"].split()) < 10]
    trees = trainer.rollout(rows)
    lengths = [leaf.history_length for tree in trees for leaf in tree.leaves()]
    reasons = [leaf.leaf.reason for tree in trees for leaf in tree.leaves()]
    assert max(lengths) <= 14 and {"length", "overflow"} & set(reasons)
    long = next(dict(row) for row in trainer.train_dataset if len(row["prompt"].split()) == 9)
    long["prompt"] = " ".join([long["prompt"]] * 2)
    with pytest.raises(ValueError, match="the model takes 14"):
        trainer.rollout([long])


def test_every_request_is_sampled_behind_its_own_context_also_from_the_cache(worker, tmp_path):
    """Equal and nested contexts, longer than a block of the cache, in one call: log-probs tell whose they are."""
    trainer = worker.make_trainer(tmp_path, "run")
    backend, encode = trainer._backend, trainer.processing_class
    ids = [encode(row["prompt"])["input_ids"] for row in trainer.train_dataset.select(range(12))]
    shared = sum(ids[:9], [])[:70]
    contexts = [shared + context for context in ids] + [shared, shared, shared[:40], *ids]
    for repeat in range(2):
        with backend.session():
            samples = backend([Request(context, 3) for context in contexts])
        for context, sample in zip(contexts, samples, strict=True):
            assert sample.logprobs == pytest.approx(logprobs_of(trainer, context, sample.token_ids), abs=1e-4)
        cached = sum(sample.cached_tokens for sample in samples)
        assert cached >= (14 * 64 if repeat else 10 * 64)
    # New weights: nothing of the old ones is used
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.02)
    trainer.state.global_step += 1
    with backend.session():
        samples = backend([Request(context, 3) for context in contexts])
    for context, sample in zip(contexts, samples, strict=True):
        assert sample.logprobs == pytest.approx(logprobs_of(trainer, context, sample.token_ids), abs=1e-4)
