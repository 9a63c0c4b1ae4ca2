"""The files under accelerate_configs/ are what `accelerate launch --config_file` accepts."""

import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType


ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "accelerate_configs"
DISTRIBUTED_TYPES = {
    "single_cpu": DistributedType.NO,
    "single_gpu": DistributedType.NO,
    "multi_gpu": DistributedType.MULTI_GPU,
    "zero2": DistributedType.DEEPSPEED,
    "zero3": DistributedType.DEEPSPEED,
    "zero3_offload": DistributedType.DEEPSPEED,
    "zero3_cpu": DistributedType.DEEPSPEED,
    "fsdp2": DistributedType.FSDP,
}
FILES = sorted(CONFIGS.glob("*.yaml"))


def test_named_configs_exist():
    assert set(DISTRIBUTED_TYPES) == {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_loads(file):
    config = load_config_from_file(str(file))
    assert config.num_machines == 1
    assert config.distributed_type == DISTRIBUTED_TYPES[file.stem]
    if config.distributed_type == DistributedType.NO:
        assert config.num_processes == 1
    if "deepspeed_config_file" in (getattr(config, "deepspeed_config", None) or {}):
        # accelerate refuses what DeepSpeed's own file says as well
        assert json.loads((ROOT / config.deepspeed_config["deepspeed_config_file"]).read_text())
    else:
        # Without an answer here, `accelerate launch` falls back on what `accelerate config` once wrote on the machine.
        assert config.mixed_precision == ("no" if config.use_cpu else "bf16")


@pytest.mark.parametrize(
    ("name", "stage", "offload"), [("zero2", 2, "none"), ("zero3", 3, "none"), ("zero3_offload", 3, "cpu")]
)
def test_zero_stage(name, stage, offload):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml")).deepspeed_config
    assert config["zero_stage"] == stage
    # Sharded weights are gathered into one loadable file when the model is saved.
    assert config.get("zero3_save_16bit_model", False) == (stage == 3)
    assert config["offload_optimizer_device"] == config["offload_param_device"] == offload


def test_zero3_on_the_cpu_shards_every_parameter():
    config = json.loads((CONFIGS / "zero3_cpu.json").read_text())["zero_optimization"]
    assert config["stage"] == 3
    # DeepSpeed keeps small parameters whole, and all of a tiny model's are small
    assert config["stage3_param_persistence_threshold"] == 0
    assert config["stage3_gather_16bit_weights_on_model_save"]


def test_fsdp_is_version_2():
    config = load_config_from_file(str(CONFIGS / "fsdp2.yaml")).fsdp_config
    assert config["fsdp_version"] == 2 and config["fsdp_reshard_after_forward"] is True


def test_single_cpu_uses_no_accelerator():
    config = load_config_from_file(str(CONFIGS / "single_cpu.yaml"))
    assert config.use_cpu
