"""The files under accelerate_configs/ are what `accelerate launch --config_file` accepts."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType


CONFIGS = Path(__file__).parent.parent / "accelerate_configs"
DISTRIBUTED_TYPES = {
    "single_cpu": DistributedType.NO,
    "single_gpu": DistributedType.NO,
    "multi_gpu": DistributedType.MULTI_GPU,
    "zero2": DistributedType.DEEPSPEED,
    "zero3": DistributedType.DEEPSPEED,
}
FILES = sorted(CONFIGS.glob("*.yaml"))


def test_named_configs_exist():
    assert set(DISTRIBUTED_TYPES) <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_loads(file):
    config = load_config_from_file(str(file))
    assert config.num_machines == 1
    assert config.distributed_type == DISTRIBUTED_TYPES.get(file.stem, config.distributed_type)
    if config.distributed_type == DistributedType.NO:
        assert config.num_processes == 1
    # Without an answer here, `accelerate launch` falls back on what `accelerate config` once wrote on the machine.
    assert config.mixed_precision == ("no" if config.use_cpu else "bf16")


@pytest.mark.parametrize(("name", "stage"), [("zero2", 2), ("zero3", 3)])
def test_zero_stage(name, stage):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.deepspeed_config["zero_stage"] == stage
    # Sharded weights are gathered into one loadable file when the model is saved.
    assert config.deepspeed_config.get("zero3_save_16bit_model", False) == (stage == 3)


def test_single_cpu_uses_no_accelerator():
    config = load_config_from_file(str(CONFIGS / "single_cpu.yaml"))
    assert config.use_cpu
