"""
Checkpoints that continue exactly, and that are there only once they are whole.

transformers writes a checkpoint file by file into `checkpoint-N`, so a run that is killed meanwhile leaves a folder
that looks like a checkpoint and is none. Here all processes write into `_saving/checkpoint-N`, and the folder is moved
to its place when the last of them is done.

What transformers does not keep, every process writes beside it: its place in the generation batch, the rows that are
still to be trained, metrics that were not logged yet, and the predictor's optimizer and anchors.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, send_to_device
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from .predictor import HEAD_CONFIG, SuccessPredictor


logger = logging.getLogger(__name__)

STAGING = "_saving"  # what begins with an underscore is not pushed to the Hub


def state_file(process_index: int) -> str:
    return f"trace_state_{process_index}.pt"


@contextmanager
def staged(trainer: Any, run_dir: str) -> Iterator[tuple[str, str]]:
    """While this is open, `checkpoint-N` is written; then it is moved to where it belongs. Called by all processes.

    Args:
        trainer (`TRACETrainer`): gives the step, the processes and the limit of checkpoints.
        run_dir (`str`): folder that holds the checkpoints.

    Yields:
        The folder to write checkpoints into, and the one of this checkpoint in it.
    """
    accelerator, args, state = trainer.accelerator, trainer.args, trainer.state
    name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    staging = os.path.join(run_dir, STAGING)
    path, final = os.path.join(staging, name), os.path.join(run_dir, name)
    if accelerator.is_local_main_process:
        shutil.rmtree(staging, ignore_errors=True)  # what a killed run left
    accelerator.wait_for_everyone()
    yield staging, path
    if state.best_model_checkpoint == path:
        _set_best(state, final, path if args.should_save else None)
    # Where nodes share the folder, the first process moves it for all of them
    is_shared = _sees_first_process(accelerator, staging)
    accelerator.wait_for_everyone()
    is_mover = accelerator.is_main_process or (accelerator.is_local_main_process and not is_shared)
    if is_mover and os.path.isdir(path):
        _move(path, final, aside=os.path.join(staging, f"replaced-{name}"))
    accelerator.wait_for_everyone()
    if args.should_save:
        rotate_checkpoints(
            output_dir=run_dir,
            save_total_limit=args.save_total_limit,
            best_model_checkpoint=state.best_model_checkpoint,
            use_mtime=True,
        )


def _sees_first_process(accelerator: Accelerator, folder: str) -> bool:
    """Whether a file that the first process writes into its `folder` is in this process's. Called by all processes.

    Whether the folder itself is there tells less: a network file system may say so for seconds after it was moved.
    """
    (name,) = broadcast_object_list([uuid.uuid4().hex])
    path = os.path.join(folder, name)
    if accelerator.is_main_process:
        Path(path).touch()
    accelerator.wait_for_everyone()
    return os.path.exists(path)


def _set_best(state: TrainerState, final: str, written: str | None) -> None:
    state.best_model_checkpoint = final
    if written is not None:
        state.save_to_json(os.path.join(written, TRAINER_STATE_NAME))


def _move(path: str, final: str, aside: str) -> None:
    if os.path.isdir(final):  # a run that goes on from an earlier checkpoint comes to the same step again
        os.rename(final, aside)
    os.rename(path, final)
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)


def save_state(trainer: Any, checkpoint: str) -> None:
    """Writes what this process needs to go on exactly. Called by every process."""
    args, predictor_trainer = trainer.args, trainer.predictor_trainer
    generate_every = args.steps_per_generation * trainer.num_iterations
    # Where the next step generates, the old rows are not needed
    is_trained = trainer._step % generate_every == 0
    state = {
        "processes": args.world_size,
        "sizes": _sizes(args),
        "step": trainer._step,
        "rows": None if is_trained else send_to_device(trainer._buffered_inputs, "cpu"),
        "metrics": {
            mode: {key: [float(value) for value in values] for key, values in metrics.items()}
            for mode, metrics in trainer._metrics.items()
        },
        "predictor": None if predictor_trainer is None else predictor_trainer.state_dict(),
        "generations_of_one_outcome": trainer._outcomes.generations,
    }
    os.makedirs(checkpoint, exist_ok=True)
    torch.save(state, os.path.join(checkpoint, state_file(args.process_index)))


def _sizes(args: Any) -> dict[str, int]:
    """What rows are cut into micro-batches by, and how often each is trained: rows that are left fit no other."""
    names = ("per_device_train_batch_size", "steps_per_generation", "gradient_accumulation_steps", "num_iterations")
    return {name: getattr(args, name) for name in names}


def load_head(predictor: SuccessPredictor, checkpoint: str) -> bool:
    """Loads the value head of a checkpoint, if it has one: whether it does. Called by all processes, of which only the
    first need see the file.

    Raises:
        ValueError: on every process, if it is of another size.
    """
    found = os.path.exists(os.path.join(checkpoint, HEAD_CONFIG))
    saved = SuccessPredictor.from_pretrained(checkpoint) if found else None
    (sizes,) = broadcast_object_list([None if saved is None else (saved.input_size, saved.hidden_size)])
    if sizes is None:
        return False
    input_size, hidden_size = sizes
    if input_size != predictor.input_size:
        raise ValueError(
            f"The value head in {checkpoint} reads hidden states that are {input_size} wide, and this run's model "
            f"gives {predictor.input_size}: go on with the model that the checkpoint is of."
        )
    if hidden_size != predictor.hidden_size:
        raise ValueError(
            f"The value head in {checkpoint} was trained with `predictor_hidden_size={hidden_size}`, which in this "
            f"run is {predictor.hidden_size}: set it to {hidden_size}."
        )
    if saved is not None:
        predictor.load_state_dict(saved.state_dict())
    for parameter in predictor.parameters():
        broadcast(parameter.data)
    return True


def load_state(trainer: Any, checkpoint: str) -> None:
    """Brings a process to where [`save_state`] found it. Called by all processes together.

    A checkpoint of plain GRPO has no such state, and training goes on from it as in TRL. One of another number of
    processes gives the value head and its optimizer; the generation batch starts anew, as it does where rows are cut
    into other micro-batches.

    Raises:
        FileNotFoundError: on every process, if the state of some of them is missing, or the value head that it is of.
        ValueError: on every process, if the value head is of another size.
    """
    process, processes = trainer.args.process_index, trainer.args.world_size
    predictor_trainer, most = trainer.predictor_trainer, trainer._sync.most
    has_head = predictor_trainer is not None and load_head(trainer.predictor, checkpoint)
    paths = [os.path.join(checkpoint, state_file(index)) for index in (process, 0)]
    path = next((path for path in paths if os.path.exists(path)), None)
    state = None if path is None else torch.load(path, map_location="cpu", weights_only=True)
    # What follows is decided by all alike: one that generates while others train would wait for ever
    saved_by = most(0 if state is None else state["processes"])
    is_short = most(int(path != paths[0]))
    if not saved_by:
        logger.warning(
            f"{checkpoint} holds no {state_file(0)}: it was not saved by TRACETrainer, or without its optimizer. The "
            "predictor's training and the generation batch start anew."
        )
        return
    if saved_by == processes and is_short:
        raise FileNotFoundError(
            f"{checkpoint} was saved by {processes} processes, but not all of {state_file(0)} to "
            f"{state_file(processes - 1)} are there: copy those of every node into it, or delete them all to start "
            "the predictor's training and the generation batch anew."
        )
    has_moments = most(int(state is not None and state["predictor"] is not None))
    if predictor_trainer is not None and has_moments and not has_head:
        raise FileNotFoundError(
            f"{checkpoint} holds what the value head's training needs, but not the head: copy {HEAD_CONFIG} and the "
            f"weights beside it from where the first process wrote them, or delete all of {state_file(0)} to "
            f"{state_file(saved_by - 1)} to start the head anew."
        )
    if saved_by != processes:
        logger.warning(
            f"{checkpoint} was saved by {saved_by} processes and is continued by {processes}: the "
            "generation batch and the predictor's anchors start anew."
        )
    if predictor_trainer is not None and state is not None and state["predictor"] is not None:
        predictor_trainer.load_state_dict(state["predictor"], with_anchors=saved_by == processes)
    if state is not None:
        trainer._outcomes.generations = state["generations_of_one_outcome"]
    if state is not None and saved_by == processes:
        saved, sizes = state.get("sizes", {}), _sizes(trainer.args)
        if saved == sizes:
            trainer._step = state["step"]
            trainer._buffered_inputs = send_to_device(state["rows"], trainer.accelerator.device)
        elif state["rows"] is not None:
            changed = [
                f"`{name}={saved.get(name)}` (now {size})" for name, size in sizes.items() if saved.get(name) != size
            ]
            logger.warning(
                f"{checkpoint} was saved inside a generation, with {', '.join(changed)}: the rows that were left are "
                "not trained, and the generation batch starts anew."
            )
        for mode, metrics in state["metrics"].items():
            trainer._metrics[mode].clear()
            trainer._metrics[mode].update(metrics)
