"""A model that two processes shard is saved whole."""

import pytest
import torch
from launching import head, launch, policy, results
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_trl import SuccessPredictor


pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("launcher", ["zero3_cpu", "fsdp2"])
def test_case_35_a_saved_model_holds_all_parameters(launcher, tmp_path):
    launch(launcher, tmp_path, {"task": "train", "name": "run", "max_steps": 2, "save_to": "saved"})
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


def test_nodes_with_disks_of_their_own_keep_their_part_and_share_the_head(tmp_path):
    launch("ddp", tmp_path, {"task": "own_disks", "name": "run"})
    first, second = results(tmp_path, "run")
    head_files = {"value_head.safetensors", "value_head_config.json"}
    assert first["shared"] == second["shared"]
    assert head_files | {"trace_state_0.pt", "trace_state_1.pt"} <= set(first["shared"])
    assert head_files | {"trace_state_0.pt"} <= set(first["own"]) and "trace_state_1.pt" not in first["own"]
    assert "trace_state_1.pt" in second["own"] and not (head_files | {"trace_state_0.pt"}) & set(second["own"])
    assert first["heads"][0] == first["heads"][1] == second["heads"][0] == second["heads"][1]
