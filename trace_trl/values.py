"""
Predicted values of anchors, and what the predictor learns from them.

Each anchor's hidden state is read once per generation: a prompt's before roots are allocated, a prefix's when its
prompt is about to expand, the rest (prefixes of continuations) at the end. One pass over a rollout gives all its
anchors. `model.generate` reads a history before it samples the next turn: what it had is noted, and not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .pool import Candidate
from .predictor import HiddenStates, PredictorTrainer, SuccessPredictor
from .tree import RolloutTree, Turn


class AnchorValues:
    """
    Args:
        hidden_states (`HiddenStates`): reads the policy.
        predictor_trainer (`PredictorTrainer`): the value head and its training.
    """

    def __init__(self, hidden_states: HiddenStates, predictor_trainer: PredictorTrainer):
        self.hidden_states = hidden_states
        self.predictor_trainer = predictor_trainer
        self._features: dict[Turn, torch.Tensor] = {}
        self._root_features: list[torch.Tensor] = []

    def predict_roots(self, candidates: Sequence[Candidate]) -> None:
        """Writes `value` into every candidate. Called by all processes together."""
        sequences = [candidate.prompt_ids for candidate in candidates]
        read = self.hidden_states.read(sequences, [[len(ids) - 1] for ids in sequences])
        self._root_features = [states[0] for states in read]
        for candidate, belief in zip(candidates, self._beliefs(self._root_features), strict=True):
            candidate.value, candidate.certainty = belief

    def plant(self, trees: Sequence[RolloutTree], offset: int) -> None:
        """Hands the hidden states of this process's candidates on to the trees grown from them.

        Args:
            trees: trees of this process.
            offset: number of this process's first candidate in the pool.
        """
        for tree in trees:
            if 0 <= tree.index - offset < len(self._root_features):
                self._features[tree.root] = self._root_features[tree.index - offset]
        self._root_features = []

    def note(self, anchor: Turn, state: torch.Tensor) -> None:
        """Keeps the hidden state, of shape `(hidden,)`, that an anchor's next turn was sampled behind."""
        self._features.setdefault(anchor, state)

    def predict_prefixes(self, leaves: Sequence[Turn]) -> None:
        """Writes `value` into every anchor above `leaves` that has none yet. Called by all processes together."""
        seen = set(self._features)
        paths, noted = [], dict[Turn, torch.Tensor]()
        for leaf in leaves:
            anchors = anchors_above(leaf)
            noted |= {node: self._features[node] for node in anchors if node in self._features and node.value is None}
            nodes = [node for node in anchors if node not in seen]
            seen.update(nodes)
            if nodes:
                paths.append(nodes)
        # Up to the deepest anchor: nothing behind it is needed
        sequences = [nodes[-1].history_ids() for nodes in paths]
        read = self.hidden_states.read(sequences, [[node.history_length - 1 for node in nodes] for nodes in paths])
        features = {
            node: state
            for nodes, states in zip(paths, read, strict=True)
            for node, state in zip(nodes, states, strict=True)
        } | noted
        for node, belief in zip(features, self._beliefs(list(features.values())), strict=True):
            # A root was given its value before it was allocated, perhaps on another process
            if node.value is None:
                node.value, node.certainty = belief
        self._features.update(features)

    def learn(self, trees: Sequence[RolloutTree]) -> None:
        """Shows the predictor every visited anchor that has a target. Called by all processes together."""
        self.predict_prefixes([leaf for tree in trees for leaf in tree.leaves()])
        anchors = [anchor for tree in trees for anchor in tree.anchors() if anchor.target is not None]
        if anchors:
            features = torch.stack([self._features[anchor] for anchor in anchors])
            targets = [anchor.target for anchor in anchors if anchor.target is not None]
            self.predictor_trainer.observe(features, targets, [anchor.target_variance for anchor in anchors])

    def forget(self) -> None:
        """Drops the hidden states of the last generation."""
        self._features = {}
        self._root_features = []

    def _beliefs(self, features: list[torch.Tensor]) -> list[tuple[float, float | None]]:
        if not features:
            return []
        predictor: Any = self.predictor_trainer.predictor
        device = next(predictor.parameters()).device
        states = torch.stack(features).to(device)
        with torch.no_grad():
            if not self.predictor_trainer.certainty:
                return [(value, None) for value in predictor(states).tolist()]
            values, certainties = predictor.beliefs(states)
        return list(zip(values.tolist(), certainties.tolist(), strict=True))


def anchors_above(leaf: Turn) -> list[Turn]:
    """The anchors above a leaf, the first one first: the root, unless the rollout was shown another prompt than the
    root holds."""
    nodes = []
    node = leaf
    while node.parent is not None and node.start is None:
        node = node.parent
        nodes.append(node)
    return nodes[::-1]


def make_values(trainer: Any, most: Callable[[int], int]) -> AnchorValues | None:
    """The values that the options of a trainer ask for, with a fresh head; `None` if none are needed.

    Args:
        trainer (`TRACETrainer`): gives the policy and the options.
        most (`Callable`): the largest of a number over all processes.
    """
    args, accelerator = trainer.args, trainer.accelerator
    if not (args.needs_predictor or args.train_predictor):
        return None
    # Not the configuration's width: a decoder may project its last state. TRL multiplies it by this layer's weights
    size = trainer.model.get_output_embeddings().in_features
    predictor = SuccessPredictor(size, args.predictor_hidden_size, seed=args.seed).to(accelerator.device)
    several = accelerator.num_processes > 1
    predictor_trainer = PredictorTrainer(
        predictor,
        learning_rate=args.predictor_learning_rate,
        weight_decay=args.predictor_weight_decay,
        passes=args.predictor_passes,
        # Of all processes together, as the rollout budget is
        batch_size=-(-args.predictor_batch_size // accelerator.num_processes),
        buffer_size=-(-args.predictor_buffer_size // accelerator.num_processes),
        seed=args.seed + accelerator.process_index,
        reduce=(lambda gradient: accelerator.reduce(gradient, "mean")) if several else None,
        certainty=args.predictor_certainty,
        most=most,
    )
    hidden_states = HiddenStates(
        get_model=lambda: trainer.model,
        pad_token_id=trainer._tokenizer.pad_token_id,
        batch_size=args.per_device_train_batch_size,  # what fits into memory with gradients fits without
        context=accelerator.autocast,
        most=most,
        tokens=args.value_pass_tokens,
    )
    return AnchorValues(hidden_states, predictor_trainer)
