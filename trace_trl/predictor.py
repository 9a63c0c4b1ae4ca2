"""
The success predictor: a value head on the policy's own last hidden state.

    v(H_t) = sigmoid(head(h))        h: hidden state at the last token of H_t, after which the next turn is sampled

It is trained beside the policy by mean squared error to the backed-up success rates of the visited anchors (arXiv
2606.11119, predictor). Hidden states are detached: no gradient reaches the policy, and values never enter an
advantage.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule


HEAD_WEIGHTS = "value_head.safetensors"
HEAD_CONFIG = "value_head_config.json"
# A head that learns few anchors by heart is sure of itself, and what it is sure of is not rolled out again
MOST_DRAWS = 32


class SuccessPredictor(nn.Module):
    """
    Maps hidden states to success probabilities, and to how exactly it knows them (`allocation.py`: certainties).
    Untrained, it says exactly 0.5 everywhere.

    Args:
        input_size (`int`): size of the policy's hidden states.
        hidden_size (`int`): width of the hidden layer; 0 for a linear head.
        seed (`int`, *optional*): seed of the first weights. The global random state is neither read nor changed.
    """

    def __init__(self, input_size: int, hidden_size: int = 256, seed: int = 0):
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        with torch.random.fork_rng(devices=[]):
            # Not `torch.manual_seed`, which would reseed accelerators as well
            torch.default_generator.manual_seed(seed)
            # Scales of hidden states differ by orders of magnitude between models
            self.norm = nn.LayerNorm(input_size, device="cpu")
            self.hidden = nn.Linear(input_size, hidden_size, device="cpu") if hidden_size else nn.Identity()
            # The logits of value and certainty
            self.output = nn.Linear(hidden_size or input_size, 2, device="cpu")
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Success probabilities of shape `(...)` for hidden states of shape `(..., input_size)`, in float32."""
        return self.beliefs(hidden_states)[0]

    def beliefs(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Success probabilities `v` and certainties `c`, each of shape `(...)` and in [0, 1], such that `c v (1 - v)`
        is the expected `V (1 - V)`."""
        x = self.norm(hidden_states.float())
        if self.hidden_size:
            x = nn.functional.gelu(self.hidden(x))
        values, certainties = torch.sigmoid(self.output(x)).unbind(-1)
        return values, certainties

    def save_pretrained(self, directory: str) -> None:
        """Writes `value_head.safetensors` and `value_head_config.json`."""
        os.makedirs(directory, exist_ok=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(weights, os.path.join(directory, HEAD_WEIGHTS))
        with open(os.path.join(directory, HEAD_CONFIG), "w") as file:
            json.dump({"input_size": self.input_size, "hidden_size": self.hidden_size}, file)

    @classmethod
    def from_pretrained(
        cls,
        repo_or_path: str | os.PathLike,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        subfolder: str = "",
    ) -> SuccessPredictor:
        """
        Loads a head from a folder written by [`~SuccessPredictor.save_pretrained`], a checkpoint for example, or from
        a model repo of the Hub that `TRACETrainer` pushed.

        Args:
            repo_or_path (`str` or `os.PathLike`):
                A folder, or, where there is no such folder, the id of a model repo.
            revision (`str`, *optional*):
                Branch, tag or commit of the repo.
            token (`str` or `bool`, *optional*):
                Token for a private repo. Defaults to that of `hf auth login`.
            cache_dir (`str` or `os.PathLike`, *optional*):
                Where downloads are kept.
            subfolder (`str`, *optional*, defaults to `""`):
                Folder within the repo or the path, `"last-checkpoint"` for example.

        Returns:
            `SuccessPredictor`: the head, in float32 on the CPU.

        Raises:
            FileNotFoundError: if there is no such folder or repo, or if it holds no value head.
        """
        name = os.fspath(repo_or_path)
        place = " ".join([name, *([f"(subfolder {subfolder})"] if subfolder else [])])
        if os.path.isdir(name):
            paths = [os.path.join(name, subfolder, file) for file in (HEAD_CONFIG, HEAD_WEIGHTS)]
            missing = [os.path.basename(path) for path in paths if not os.path.isfile(path)]
            if missing:
                raise FileNotFoundError(
                    f"The folder {place} holds no {missing[0]}: pass a folder that TRACETrainer saved, in a run whose "
                    "allocations use a predictor."
                )
        else:
            options = dict(revision=revision, token=token, cache_dir=cache_dir, subfolder=subfolder or None)
            try:
                paths = [hf_hub_download(name, file, **options) for file in (HEAD_CONFIG, HEAD_WEIGHTS)]
            except LocalEntryNotFoundError as error:
                raise FileNotFoundError(
                    f"There is no folder {place}, and the Hub could not be asked for a repo of this name: correct the "
                    f"path, or go online once so that the head is in the cache. {error}"
                ) from error
            except EntryNotFoundError as error:
                raise FileNotFoundError(
                    f"The repo {place} holds no {HEAD_CONFIG} with {HEAD_WEIGHTS}: pass a repo, or its `revision` or "
                    "`subfolder`, that TRACETrainer pushed in a run whose allocations use a predictor."
                ) from error
            except (HFValidationError, RepositoryNotFoundError) as error:
                raise FileNotFoundError(
                    f"There is no folder {place}, and no repo of this name on the Hub that can be read: correct the "
                    "name, or pass the `token` of a private repo."
                ) from error
        with open(paths[0], encoding="utf-8") as file:
            head = cls(**json.load(file))
        head.load_state_dict(load_file(paths[1]))
        return head


class AnchorBuffer:
    """Hidden states and targets of visited anchors: those of the last generation, then the latest earlier ones."""

    def __init__(self, size: int):
        self.size = size
        self.features = torch.empty(0)
        self.targets = torch.empty(0)

    def __len__(self) -> int:
        return len(self.targets)

    def extend(self, features: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds anchors; `features` of shape `(n, hidden)`, `targets` of shape `(n, 2)`. The oldest fall out."""
        if len(self.targets):
            features = torch.cat([self.features, features])
            targets = torch.cat([self.targets, targets])
        # A generation larger than the buffer is kept whole until the next one comes
        keep = max(self.size, len(targets) - len(self.targets))
        # Copied: a view would keep what fell out, and bring it into every checkpoint
        self.features, self.targets = features[-keep:].clone(), targets[-keep:].clone()


class PredictorTrainer:
    """
    Trains a [`SuccessPredictor`] on the anchors it is shown.

    Args:
        predictor (`SuccessPredictor`): the head; moved nowhere.
        learning_rate (`float`), weight_decay (`float`): of its own AdamW.
        passes (`int`): mini-batches per call of `update`; fewer while there are few anchors: `passes * batch_size` is
            kept to `MOST_DRAWS` times their number.
        batch_size (`int`): anchors per mini-batch.
        buffer_size (`int`): anchors kept.
        seed (`int`): seed of the mini-batches' own random generator.
        reduce (`Callable`, *optional*): averages a gradient over processes.
        certainty (`bool`): whether certainties are trained as well.
        most (`Callable`, *optional*): the largest of a number over processes, which take equally many passes.
    """

    def __init__(
        self,
        predictor: SuccessPredictor,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        passes: int = 32,
        batch_size: int = 256,
        buffer_size: int = 4096,
        seed: int = 0,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        certainty: bool = False,
        most: Callable[[int], int] = lambda count: count,
    ):
        self.predictor = predictor
        self.certainty = certainty
        self.optimizer = torch.optim.AdamW(predictor.parameters(), lr=learning_rate, weight_decay=weight_decay)
        self.passes = passes
        self.batch_size = batch_size
        self.buffer = AnchorBuffer(buffer_size)
        self.random = torch.Generator().manual_seed(seed)
        self.reduce = reduce
        self.most = most

    def observe(
        self, features: torch.Tensor, targets: Sequence[float], variances: Sequence[float | None] | None = None
    ) -> None:
        """Adds anchors.

        Args:
            features (`torch.Tensor` of shape `(n, hidden)`): their hidden states.
            targets (`Sequence[float]`): their backed-up success rates.
            variances (`Sequence[float | None]`, *optional*): estimates of their `V (1 - V)`, where there is one.
        """
        if len(targets):
            known = [math.nan if variance is None else variance for variance in variances or [None] * len(targets)]
            pairs = torch.tensor([list(targets), known], dtype=torch.float32).T
            self.buffer.extend(features.float().cpu(), pairs)

    def update(self) -> float | None:
        """A few steps on random mini-batches of the buffer. Returns the mean loss of all processes, `None` without
        anchors."""
        passes = self.most(min(self.passes, -(-MOST_DRAWS * len(self.buffer) // self.batch_size)))
        if not passes:
            return None
        device = next(self.predictor.parameters()).device
        features, targets = self.buffer.features.to(device), self.buffer.targets.to(device)
        # Its entries: sum of losses, number of losses. Read once, since every reading waits for the device
        told = torch.zeros(2, device=device)
        for _ in range(passes):
            loss = self._loss(features, targets)
            self.optimizer.zero_grad()
            loss.backward()
            if self.reduce is not None:
                self._average_gradients()
            nn.utils.clip_grad_norm_(self.predictor.parameters(), 1.0)
            self.optimizer.step()
            if len(self.buffer):
                told += torch.stack([loss.detach(), torch.ones_like(told[0])])
        total, count = (told if self.reduce is None else self.reduce(told)).tolist()
        return total / count if count else None

    def _average_gradients(self) -> None:
        """In one reduction: the head is small, and many small ones take as long as many large ones."""
        assert self.reduce is not None
        gradients = [parameter.grad for parameter in self.predictor.parameters() if parameter.grad is not None]
        averaged = self.reduce(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = averaged.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _loss(self, features: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        if not len(self.buffer):  # another process has anchors: take part in the averaging with a gradient of zero
            return sum(parameter.sum() * 0.0 for parameter in self.predictor.parameters())  # type: ignore[return-value]
        count = min(self.batch_size, len(self.buffer))
        chosen = torch.randperm(len(self.buffer), generator=self.random)[:count].to(features.device)
        states = features[chosen]
        targets, variances = pairs[chosen].unbind(-1)
        if not self.certainty:
            return nn.functional.mse_loss(self.predictor(states), targets)
        values, certainties = self.predictor.beliefs(states)
        loss = nn.functional.mse_loss(values, targets)
        known = ~variances.isnan()
        if known.any():
            # Values learn from success rates only
            fixed = values.detach()[known]
            loss = loss + nn.functional.mse_loss(certainties[known] * fixed * (1 - fixed), variances[known])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Everything `update` depends on, beside the head's own weights."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "features": self.buffer.features,
            "targets": self.buffer.targets,
            "random": self.random.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any], with_anchors: bool = True) -> None:
        """
        Args:
            state: what `state_dict` gave.
            with_anchors: whether it was this process's own; if not, only the optimizer is taken from it.
        """
        self.optimizer.load_state_dict(state["optimizer"])
        if not with_anchors:
            return
        self.buffer.features, self.buffer.targets = state["features"], state["targets"]
        self.random.set_state(state["random"])


class HiddenStates:
    """
    Reads a policy's last hidden states, after its final norm, by a hook that is there only while they are read.

    Args:
        get_model (`Callable`): gives the model to call, which training may wrap anew; its forward must take
            `input_ids`, `attention_mask`, `logits_to_keep`.
        pad_token_id (`int`): id to pad with.
        batch_size (`int`): sequences that a forward pass takes, however long they are.
        tokens (`int`): tokens, padding included, up to which it takes more of them.
        context (`Callable`): gives a context manager for the passes (autocast).
        most (`Callable[[int], int]`): the largest of a number over all processes: every process must run as many
            passes, since a sharded model gathers its weights in each.
    """

    def __init__(
        self,
        get_model: Callable[[], nn.Module],
        pad_token_id: int,
        batch_size: int,
        context: Callable[[], Any],
        most: Callable[[int], int] = lambda count: count,
        tokens: int = 0,
    ):
        self.get_model = get_model
        self.pad_token_id = pad_token_id
        self.batch_size = batch_size
        self.tokens = tokens
        self.context = context
        self.most = most

    @torch.no_grad()
    def read(self, sequences: Sequence[list[int]], positions: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """
        Args:
            sequences: token ids.
            positions: for each sequence, the indices of the tokens whose hidden states are wanted.

        Returns:
            For each sequence, a float32 tensor of shape `(len(positions), hidden)` on the CPU.
        """
        model = self.get_model()
        batches = self._batches(list(map(len, sequences)))
        batches += [[]] * (self.most(len(batches)) - len(batches))
        features: dict[int, torch.Tensor] = {}
        with _evaluation(model), _resharded(model), _last_hidden_state(model) as hidden, self.context():
            for batch in batches:
                width = self._forward(model, [sequences[index] for index in batch] or [[self.pad_token_id]])
                counts = [len(positions[index]) for index in batch]
                rows = [row for row, count in enumerate(counts) for _ in range(count)]
                wanted = [position for index in batch for position in positions[index]]
                where = torch.tensor([rows, wanted], dtype=torch.long, device=hidden[0].device)
                # Prompt tuning puts virtual tokens before the first
                own = hidden[0][:, hidden[0].size(1) - width :]
                # Copied from the device once, not once per sequence
                states = own[where[0], where[1]].float().cpu()
                features.update(zip(batch, states.split(counts), strict=True))
                hidden.clear()
        return [features[index] for index in range(len(sequences))]

    def _batches(self, lengths: list[int]) -> list[list[int]]:
        """Indices of the sequences of each pass, the longest ones first: those of a pass are of about one length."""
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        batches, start = [], 0
        while start < len(order):
            count = max(self.batch_size, self.tokens // max(1, lengths[order[start]]))
            batches.append(order[start : start + count])
            start += count
        return batches

    def _forward(self, model: nn.Module, sequences: list[list[int]]) -> int:
        """Returns the number of tokens they are padded to."""
        device = next(model.parameters()).device
        width = max(map(len, sequences))
        # Padded on the right: a token's hidden state depends on nothing behind it
        input_ids = torch.full((len(sequences), width), self.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(sequences):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            attention_mask[row, : len(ids)] = 1
        # Logits are not needed: one position of them is the least a causal model computes
        model(
            input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), logits_to_keep=1, use_cache=False
        )
        return width


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    # Dropout would draw from the random state that sampling depends on, and blur the values
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _resharded(model: nn.Module) -> Iterator[None]:
    # FSDP2 keeps some parameters whole for a backward pass, which does not come: they would lie there while rollouts
    # are sampled, and can't be pushed to vLLM
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@contextmanager
def _last_hidden_state(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """A list that holds the decoder's output, of shape `(rows, tokens, hidden)`, after each forward pass."""
    outputs: list[torch.Tensor] = []
    handle = decoder_of(model).register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    try:
        yield outputs
    finally:
        handle.remove()


def decoder_of(model: nn.Module) -> nn.Module:
    """The module whose first output is the last hidden state, under whatever wraps the model (DDP, PEFT)."""
    while hasattr(model, "module"):
        model = model.module
    # Not accelerate's `is_peft_model`: it searches the installed packages each time, longer than a small model's pass
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]
    return model.get_decoder()
