"""The loss computes only rows that can move the policy, and comes to the same gradient as over all of them."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, Qwen3Config

from test_losses import LOSS_TYPES, Scripted
from trace_trl.sparse_loss import NeededTokens, length_matters, needed_rows_only, rows_may_be_skipped


def random_batch(seed, vocabulary, rows=7, prompt=4, tokens=11, old=False):
    """Rows of all kinds: without an advantage, with one where nothing is trained, trained in part, cut short."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high):
        return torch.randint(high, (rows, tokens), generator=generator)

    lengths = torch.randint(1, tokens - 1, (rows, 1), generator=generator)
    completion_mask = (torch.arange(tokens) < lengths).int()
    advantages = torch.randn(rows, tokens, generator=generator) * draw(2)
    advantages[torch.rand(rows, generator=generator) < 0.4] = 0.0
    prompt_mask = torch.ones(rows, prompt, dtype=torch.int)
    prompt_mask[::2, 0] = 0  # padded on the left
    batch = {
        "prompt_ids": torch.randint(vocabulary, (rows, prompt), generator=generator),
        "prompt_mask": prompt_mask,
        "completion_ids": draw(vocabulary),
        "completion_mask": completion_mask,
        "tool_mask": draw(2),
        "advantages": advantages,
        "num_items_in_batch": completion_mask.sum().float(),
        "importance_sampling_ratio": torch.rand(rows, tokens, generator=generator) + 0.5,
    }
    if old:
        batch["old_per_token_logps"] = -3 - torch.rand(rows, tokens, generator=generator)
    return batch


def run(trainer, batch, skip):
    """Loss, gradients, logged numbers, and the shapes of what the model was given."""
    trainer.args.skip_zero_advantage_rows = skip
    trainer._counts = [3]  # not a GRPO setting
    trainer._metrics["train"].clear()
    shapes = []
    hook = trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    hook.remove()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in trainer.model.parameters()]
    mode = "train" if trainer.model.training else "eval"
    logged = {name: values[-1] for name, values in trainer._metrics[mode].items()}
    return loss.item(), gradients, logged, shapes


@pytest.mark.parametrize("old", [False, True], ids=["fresh", "old"])
@pytest.mark.parametrize("extra", [{}, {"off_policy_mask_threshold": 0.1}, {"vllm": True}], ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_same_loss_and_gradient_from_fewer_rows(tmp_path, loss_type, extra, old):
    trainer = Scripted(tmp_path, loss_type=loss_type, **{k: v for k, v in extra.items() if k != "vllm"}).trainer
    if "vllm" in extra:
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    skipped = 0
    for trainer.importance_sampling_level in ("token", "sequence"):
        for seed in range(4):
            batch = random_batch(seed, len(trainer._tokenizer), old=old)
            loss, gradients, logged, shapes = run(trainer, batch, skip=False)
            assert shapes == [(7, 15)]
            other_loss, other_gradients, other_logged, other_shapes = run(trainer, batch, skip=True)
            ((rows, width),) = other_shapes
            skipped += 7 * 15 - rows * width
            assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
            scale = max(gradient.abs().max().item() for gradient in gradients)
            for one, other in zip(gradients, other_gradients, strict=True):
                assert (one - other).abs().max() <= 1e-5 * scale + 1e-9
            approximate = {"entropy", "vespo/phi_seq_mean"}
            assert logged.keys() == other_logged.keys()
            for name in logged.keys() - approximate:
                assert other_logged[name] == pytest.approx(logged[name], rel=1e-5, abs=1e-6, nan_ok=True), name
    assert skipped > 7 * 15  # a whole batch of eight, at least


@pytest.mark.parametrize("moving", [True, False])
def test_entropy_is_over_the_rows_that_are_computed(tmp_path, moving):
    trainer = Scripted(tmp_path).trainer
    batch = random_batch(0, len(trainer._tokenizer))
    batch["tool_mask"][0] = 0  # the first row is trained elsewhere
    if not moving:
        # Nothing is to be learned: the entropy is that of one row, not 0
        batch["advantages"] = torch.zeros_like(batch["advantages"])
    needed = NeededTokens.of(batch)
    assert not needed.tokens[0].any()
    with torch.no_grad():
        _, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
            11,
            compute_entropy=True,
        )
    assert 0 < needed.tokens.sum() < (batch["completion_mask"] * batch["tool_mask"]).sum()
    assert run(trainer, batch, skip=True)[2]["entropy"] == pytest.approx(entropies[needed.tokens].mean().item())


def test_needed_are_all_trained_tokens_of_rows_with_an_advantage():
    batch = {
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1]]),
        "advantages": torch.tensor([[0.0, 5.0, 0.2, 0.0], [0.0, 0.0, 1.0, 1.0], [3.0, 0.0, 0.0, 0.0]]),
    }
    assert NeededTokens.of(batch).tokens.int().tolist() == [[1, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    # As TRL's own batches: an advantage per row, and no observations
    batch = {"completion_mask": batch["completion_mask"], "advantages": torch.tensor([0.0, 2.0, 0.0])}
    needed = NeededTokens.of(batch)
    assert needed.tokens.int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert needed.width == 2
    assert NeededTokens.of(batch, multiple=3).width == 3
    assert NeededTokens.of(batch, multiple=8).width == NeededTokens.of(batch, cut=False).width == 4


def test_nothing_is_trained_at_all():
    batch = {"completion_mask": torch.zeros(3, 4), "advantages": torch.ones(3)}
    needed = NeededTokens.of(batch)
    assert not needed.tokens.any() and needed.width == 1


def test_what_stands_in_for_skipped_rows_can_not_overflow(tmp_path):
    # The ratio to old log-probs of -200 is infinite, and infinity times an advantage of 0 is no number
    trainer = Scripted(tmp_path).trainer
    batch = random_batch(3, len(trainer._tokenizer), old=True)
    idle = ~NeededTokens.of(batch).tokens.any(1)
    assert idle.any() and not idle.all()
    batch["old_per_token_logps"][idle] = -200.0
    loss, gradients, _, _ = run(trainer, batch, skip=True)
    assert math.isfinite(loss) and all(gradient.isfinite().all() for gradient in gradients)


def small(kind, **kwargs):
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=40)
    return kind(**sizes, num_key_value_heads=2, pad_token_id=0, bos_token_id=0, eos_token_id=0, **kwargs)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 1e4}
LENGTHS = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "config, matters",
    [
        (small(Phi3Config, rope_parameters=LONGROPE, **LENGTHS), True),
        (small(LlamaConfig, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), True),
        (small(LlamaConfig, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), False),
        (small(Qwen3Config), False),
    ],
    ids=["longrope", "dynamic", "linear", "default"],
)
def test_models_whose_frequencies_depend_on_the_length_are_not_cut(tmp_path, config, matters):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert length_matters(model) == matters
    if "longrope" in str(config.rope_parameters):
        # Why: four tokens of padding beyond the original length change what comes before them
        ids = torch.arange(20).unsqueeze(0)
        assert (model(ids).logits[:, :14] - model(ids[:, :14]).logits).abs().max() > 1e-3
    trainer = Scripted(tmp_path).trainer
    trainer.model.config.rope_parameters = config.rope_parameters
    batch = random_batch(2, len(trainer._tokenizer))
    ((_, width),) = run(trainer, batch, skip=True)[3]
    assert (width == 15) == matters


def test_a_routers_loss_needs_every_row():
    trainer = SimpleNamespace(beta=0.0, top_entropy_quantile=1.0, _entropy_bonus_enabled=False, aux_loss_enabled=False)
    assert rows_may_be_skipped(trainer)
    trainer.aux_loss_enabled = True
    assert not rows_may_be_skipped(trainer)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_trainer_is_as_before_when_the_loss_fails(tmp_path, wrapped):
    trainer = Scripted(tmp_path).trainer
    if wrapped:  # as a profiler does
        trainer._get_per_token_logps_and_entropies = original = trainer._get_per_token_logps_and_entropies
    batch = random_batch(2, len(trainer._tokenizer))
    with pytest.raises(KeyError), needed_rows_only(trainer, batch):
        raise KeyError
    assert trainer.__dict__.get("_get_per_token_logps_and_entropies") is (original if wrapped else None)


def test_evaluation_computes_all_rows(tmp_path):
    trainer = Scripted(tmp_path).trainer
    batch = random_batch(2, len(trainer._tokenizer))
    trainer.model.eval()
    assert run(trainer, batch, skip=True)[3] == [(7, 15)]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_that_moves_nothing_still_takes_a_pass(tmp_path, loss_type):
    # A sharded model gathers its weights in it, forwards and backwards
    trainer = Scripted(tmp_path, loss_type=loss_type).trainer
    batch = random_batch(1, len(trainer._tokenizer), old=True)
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    loss, gradients, _, shapes = run(trainer, batch, skip=True)
    ((rows, width),) = shapes
    assert rows == 1 and width < 15
    assert loss == 0.0
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(
    "extra",
    [{"beta": 0.1}, {"entropy_coef": 0.1}, {"use_adaptive_entropy": True}, {"top_entropy_quantile": 0.5}],
    ids=str,
)
def test_where_every_row_counts_all_are_computed(tmp_path, extra):
    trainer = Scripted(tmp_path, **extra).trainer
    batch = random_batch(2, len(trainer._tokenizer)) | {"ref_per_token_logps": torch.full((7, 11), -3.0)}
    assert run(trainer, batch, skip=True)[3] == [(7, 15)]


def test_grpo_setting_computes_what_trl_computes(tmp_path):
    trainer = Scripted(
        tmp_path, root_allocation="uniform", continuations_per_root=0, per_device_train_batch_size=6
    ).trainer
    batch = random_batch(2, len(trainer._tokenizer))
    assert run(trainer, batch, skip=True)[3] != [(7, 15)]
    trainer._counts = [2, 2, 2]
    shapes = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    trainer._compute_loss(trainer.model, batch)
    assert shapes == [(7, 15)]
