"""A model that two processes shard is saved whole."""

import pytest
import torch
from launching import head, launch, policy, results
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_trl import SuccessPredictor


pytestmark = pytest.mark.distributed


def test_case_35_a_saved_model_holds_all_parameters(tmp_path):
    launch("zero3_cpu", tmp_path, {"task": "train", "name": "run", "max_steps": 2, "save_to": "saved"})
    folder = tmp_path / "saved"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    trained = policy(tmp_path, "run")
    saved = dict(model.named_parameters())
    assert saved.keys() == trained.keys()
    for name, weight in trained.items():
        assert torch.equal(saved[name], weight), name
    assert AutoTokenizer.from_pretrained(folder)("red")["input_ids"]
    predictor = SuccessPredictor.from_pretrained(str(folder)).state_dict()
    for name, weight in head(tmp_path, "run").items():
        assert torch.equal(predictor[name], weight), name
    assert len(results(tmp_path, "run")) == 2
