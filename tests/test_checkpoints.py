"""Checkpoints of one process: training goes on exactly, and a checkpoint is there only once it is whole."""

import itertools
import json
import os
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

from toys import few_words, length_reward, make_config, make_model, make_tokenizer, string_dataset
from trace_trl import SuccessPredictor, TRACETrainer
from trace_trl.checkpoints import STAGING, load_head, load_state
from trace_trl.pool import PoolSampler


SIZES = dict(generation_batch_size=24, num_generations=6, continuations_per_root=2, generation_kwargs=few_words())
# Two optimizer steps a generation: a checkpoint of step 3 lies inside one
LONG = SIZES | dict(per_device_train_batch_size=4, gradient_accumulation_steps=3)


def make_trainer(folder, dataset=None, eval_dataset=None, **kwargs):
    config = LONG | {"max_steps": 4, "save_strategy": "steps", "save_steps": 1} | kwargs
    return TRACETrainer(
        model=make_model(),
        reward_funcs=length_reward,
        args=make_config(folder, **config),
        train_dataset=string_dataset(20) if dataset is None else dataset,
        eval_dataset=eval_dataset,
        processing_class=make_tokenizer(),
    )


TIMES = ("time", "per_second", "seconds/", "flos")


def logs_of(trainer):
    """Logged numbers of each step, but for those that tell how long something took."""
    return {
        entry["step"]: {key: value for key, value in entry.items() if not any(part in key for part in TIMES)}
        for entry in trainer.state.log_history
        if "loss" in entry
    }


def assert_same(first, second, steps):
    one, other = logs_of(first), logs_of(second)
    for step in steps:
        assert one[step] == pytest.approx(other[step], abs=1e-6, nan_ok=True)
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name
    for name, weight in first.predictor.state_dict().items():
        assert torch.equal(weight, second.predictor.state_dict()[name]), name


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"logging_steps": 2}, {"num_iterations": 2, "max_steps": 6}],
    ids=["", "logging every other step", "two iterations"],
)
def test_case_32_a_stop_anywhere_changes_nothing(tmp_path, stop, kwargs):
    """Also in the middle of a generation batch, and between two logs: the same weights, head and logs."""
    whole = make_trainer(tmp_path, **kwargs)
    whole.train()
    resumed = make_trainer(tmp_path, **kwargs)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    # transformers keeps no sum of losses between two logs
    steps = [step for step in logs_of(whole) if step > stop and (stop % 2 == 0 or "logging_steps" not in kwargs)]
    assert_same(whole, resumed, steps)


@pytest.mark.parametrize("stop", [2, 3, 4, 5])
def test_case_32_prompts_of_later_epochs_come_in_their_order(tmp_path, stop):
    """8 rows and a pool of 8: every generation is an epoch of its own, in an order of its own."""
    whole = make_trainer(tmp_path, string_dataset(8), max_steps=6)
    whole.train()
    resumed = make_trainer(tmp_path, string_dataset(8), max_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert_same(whole, resumed, range(stop + 1, 7))


def test_pools_come_in_trls_order():
    """Epoch by epoch, and when a run begins with a later one."""
    rows, kwargs = range(10), dict(mini_repeat_count=1, batch_size=4, repeat_count=2, seed=3)
    trls = RepeatSampler(rows, **kwargs)
    epochs = [list(trls) for _ in range(4)]
    counter = itertools.count()
    ours = PoolSampler(rows, epoch=lambda: next(counter), **kwargs)
    assert [list(ours) for _ in range(4)] == epochs
    assert list(PoolSampler(rows, epoch=lambda: 2, **kwargs)) == epochs[2]
    assert list(PoolSampler(rows, epoch=lambda: 2, shuffle=False, **kwargs)) == [*range(4)] * 2 + [*range(4, 8)] * 2


# Staging


def test_a_checkpoint_is_in_its_place_only_when_it_is_whole(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, max_steps=1)
    seen = []
    save = torch.save

    def watched(state, path, *args, **kwargs):
        seen.append(os.path.relpath(path, tmp_path))
        assert get_last_checkpoint(str(tmp_path)) is None
        save(state, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", watched)
    trainer.train()
    written = {name for name in seen if "checkpoint" in name}
    assert {os.path.join(STAGING, "checkpoint-1", "optimizer.pt")} <= written
    assert all(name.startswith(STAGING) for name in written)
    names = set(os.listdir(tmp_path / "checkpoint-1"))
    assert {"model.safetensors", "value_head.safetensors", "trace_state_0.pt", "trainer_state.json"} <= names
    assert not (tmp_path / STAGING).exists()


def test_what_a_killed_save_left_is_removed(tmp_path):
    (tmp_path / STAGING / "checkpoint-1").mkdir(parents=True)
    (tmp_path / STAGING / "checkpoint-1" / "half").write_text("")
    make_trainer(tmp_path, max_steps=1).train()
    assert "half" not in os.listdir(tmp_path / "checkpoint-1")


def test_a_save_that_fails_leaves_the_checkpoints_there_were(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, max_steps=2, save_total_limit=1)

    def full(self, output_dir):
        if self.state.global_step == 2:
            raise OSError("no space left")

    monkeypatch.setattr(TRACETrainer, "_save_rng_state", full)
    with pytest.raises(OSError, match="no space left"):
        trainer.train()
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-1")


def test_limit_best_and_repeated_checkpoints(tmp_path):
    """The limit counts whole checkpoints, the best one's path is its last place, and a step may be saved again."""
    kwargs = dict(
        max_steps=4,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="reward",
        greater_is_better=False,
        num_generations_eval=1,
        per_device_eval_batch_size=2,
    )
    trainer = make_trainer(tmp_path, eval_dataset=string_dataset(2), **kwargs)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert os.path.dirname(best) == str(tmp_path) and os.path.isdir(best)
    kept = [name for name in os.listdir(tmp_path) if name.startswith("checkpoint-")]
    assert len(kept) == 2 and "checkpoint-4" in kept
    for name in kept:
        state = json.loads((tmp_path / name / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] is None or STAGING not in state["best_model_checkpoint"]
    again = make_trainer(tmp_path, **kwargs | {"load_best_model_at_end": False, "eval_strategy": "no"})
    earlier = min(kept, key=lambda name: int(name.split("-")[1]))
    again.train(resume_from_checkpoint=str(tmp_path / earlier))
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-4")


# Checkpoints of others


def test_a_checkpoint_of_plain_grpo_is_gone_on_from(tmp_path, caplog):
    """With its weights and its optimizer; the predictor begins."""
    grpo = GRPOTrainer(
        model=make_model(),
        reward_funcs=length_reward,
        args=make_config(
            tmp_path,
            GRPOConfig,
            max_steps=1,
            save_strategy="steps",
            save_steps=1,
            generation_kwargs=few_words(),
            generation_batch_size=24,
            num_generations=6,
            gradient_accumulation_steps=3,
        ),
        train_dataset=string_dataset(20),
        processing_class=make_tokenizer(),
    )
    grpo.train()
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "holds no trace_state_0.pt" in caplog.text
    assert trainer.state.global_step == 2 and trainer._step > 0


def test_a_checkpoint_of_another_number_of_processes(tmp_path, caplog):
    """The head and its optimizer go on, the rest starts anew, with a warning."""
    first = make_trainer(tmp_path, max_steps=3)
    first.train()
    path = tmp_path / "checkpoint-3" / "trace_state_0.pt"
    state = torch.load(path, weights_only=True)
    assert state["rows"] is not None and len(state["predictor"]["targets"])
    torch.save(state | {"processes": 2}, path)
    second = make_trainer(tmp_path, max_steps=4)
    second.create_optimizer_and_scheduler(4)
    second._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-3"))
    assert "was saved by 2 processes and is continued by 1" in caplog.text
    assert not len(second.predictor_trainer.buffer)
    assert second._step == 0 and second._buffered_inputs is None
    saved = second.predictor_trainer.optimizer.state_dict()["state"]
    assert saved[0]["step"] == state["predictor"]["optimizer"]["state"][0]["step"] > 0
    for name, weight in first.predictor.state_dict().items():
        assert torch.equal(weight, second.predictor.state_dict()[name])


WIDE, NARROW = (
    dict(per_device_train_batch_size=rows, gradient_accumulation_steps=accumulated)
    for rows, accumulated in [(12, 1), (6, 2)]
)


@pytest.mark.parametrize("sizes", [(WIDE, NARROW), (NARROW, WIDE)], ids=["narrower", "wider"])
def test_case_43_rows_cut_for_other_batches_are_not_trained(tmp_path, caplog, sizes):
    """Saved after one of a generation's two optimizer steps, resumed with another batch per device: the generation
    starts anew, with a warning; every optimizer step trains the 12 rows that the new sizes say."""
    first, second = sizes
    saved = make_trainer(tmp_path, max_steps=1, **first)
    saved.train()
    resumed = make_trainer(tmp_path, max_steps=3, **second)
    trained, compute_loss = [], resumed._compute_loss

    def watched(model, inputs):
        trained.append((resumed.state.global_step, len(inputs["completion_ids"])))
        return compute_loss(model, inputs)

    resumed._compute_loss = watched
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "per_device_train_batch_size" in caplog.text and "starts anew" in caplog.text
    rows, accumulated = second["per_device_train_batch_size"], second["gradient_accumulation_steps"]
    assert trained == [(step, rows) for step in (1, 2) for _ in range(accumulated)]
    assert logs_of(resumed)[2]["reward"] != logs_of(saved)[1]["reward"]
    # The anchors are those of the policy, however its rows were cut
    saved_state = torch.load(tmp_path / "checkpoint-1" / "trace_state_0.pt", weights_only=True)
    anchors = saved_state["predictor"]["features"]
    assert torch.equal(resumed.predictor_trainer.buffer.features[: len(anchors)], anchors)


@pytest.mark.parametrize("changed", [{"num_iterations": 2}, {"generation_batch_size": 48}], ids=str)
def test_case_43_another_number_of_steps_per_generation(tmp_path, caplog, changed):
    """Other settings by which a generation is cut into steps: the generation starts anew."""
    make_trainer(tmp_path, max_steps=1, **WIDE).train()
    resumed = make_trainer(tmp_path, max_steps=3, **WIDE | changed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "starts anew" in caplog.text and resumed.state.global_step == 3
    assert resumed._step == 2


def test_case_43_between_generations_nothing_is_lost(tmp_path, caplog):
    """Saved where a generation ended: other sizes need no warning."""
    make_trainer(tmp_path, max_steps=2, **WIDE).train()
    resumed = make_trainer(tmp_path, max_steps=4, **NARROW)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "anew" not in caplog.text and resumed._step == 4


def test_case_59_a_head_of_another_width_is_told_by_its_option(tmp_path):
    """`predictor_hidden_size` changed before a resume: one sentence with the option, the old and the new value."""
    make_trainer(tmp_path, max_steps=1, predictor_hidden_size=16).train()
    resumed = make_trainer(tmp_path, max_steps=2, predictor_hidden_size=8)
    with pytest.raises(ValueError, match="`predictor_hidden_size=16`.* run is 8: set it to 16"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_case_59_a_head_for_another_model_is_told(tmp_path):
    """The saved head reads hidden states of another width: no option of the predictor mends that."""
    SuccessPredictor(48, 16).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="48 wide, and this run's model gives 32"):
        load_head(SuccessPredictor(32, 16), str(tmp_path))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_checkpoint_that_lost_a_process_is_refused(tmp_path, lost):
    """Not with another process's rows in place of one's own."""
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    state = torch.load(checkpoint / "trace_state_0.pt", weights_only=True) | {"processes": 2}
    (checkpoint / "trace_state_0.pt").unlink()
    torch.save(state, checkpoint / f"trace_state_{1 - lost}.pt")
    # What process 0 tells: how many saved the file it read, and whether its own was missing
    told = [0, 1] if lost == 0 else [2, 0]

    class One:
        args = SimpleNamespace(process_index=1, world_size=2)
        predictor_trainer = None
        _sync = SimpleNamespace(most=lambda number: max(number, told.pop(0)))

    message = "saved by 2 processes, but not all of trace_state_0.pt to trace_state_1.pt"
    with pytest.raises(FileNotFoundError, match=message):
        load_state(One, str(checkpoint))


def test_a_head_that_was_lost_is_not_replaced_by_a_new_one(tmp_path):
    make_trainer(tmp_path, max_steps=1).train()
    (tmp_path / "checkpoint-1" / "value_head_config.json").unlink()
    trainer = make_trainer(tmp_path, max_steps=2)
    with pytest.raises(FileNotFoundError, match="what the value head's training needs, but not the head"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_process_that_is_not_to_save_writes_no_head(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path / "run")
    monkeypatch.setattr(type(trainer.args), "should_save", property(lambda args: False))
    trainer.save_model(str(tmp_path / "model"))
    assert not (tmp_path / "model").exists() or not os.listdir(tmp_path / "model")


def test_the_best_model_comes_with_its_head(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.train()
    last = trainer.predictor.state_dict()["output.bias"].clone()
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    trainer._load_best_model()
    best = SuccessPredictor.from_pretrained(str(tmp_path / "checkpoint-1")).state_dict()
    assert all(torch.equal(weight, best[name]) for name, weight in trainer.predictor.state_dict().items())
    assert not torch.equal(last, best["output.bias"])


def test_a_checkpoint_holds_no_more_anchors_than_are_kept(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=4, predictor_buffer_size=1)
    trainer.train()
    buffer = trainer.predictor_trainer.buffer
    assert buffer.features.untyped_storage().nbytes() == buffer.features.nbytes


def test_weights_only_checkpoints_are_possible(tmp_path):
    make_trainer(tmp_path, max_steps=1, save_only_model=True).train()
    names = set(os.listdir(tmp_path / "checkpoint-1"))
    assert "value_head.safetensors" in names and not {"trace_state_0.pt", "optimizer.pt"} & names


# Data sets that don't fit


@pytest.mark.parametrize("rows", [3, 7, 9])
def test_case_31_rows_that_fill_no_pool(tmp_path, rows):
    """Fewer rows than a pool, and a last pool that is not full: every generation has its leaves."""
    trainer = make_trainer(tmp_path, string_dataset(rows), max_steps=5, save_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 5
    assert len(logs_of(trainer)) == 5


@pytest.mark.parametrize("rows", [3, 20])
def test_case_31_a_stream(tmp_path, rows):
    def stream():
        yield from string_dataset(rows)

    trainer = make_trainer(tmp_path, IterableDataset.from_generator(stream), max_steps=3, save_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 3


def test_case_31_no_row(tmp_path):
    with pytest.raises(ValueError, match="row"):
        make_trainer(tmp_path, Dataset.from_dict({"prompt": []})).train()
