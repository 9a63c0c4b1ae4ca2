"""The self-test that users run on their cluster, and the ways of sharding it is run with."""

import pytest
from launching import command_of, launch, results, run


pytestmark = pytest.mark.distributed

LAUNCHERS = ["ddp", "zero2", "zero3_cpu", "fsdp2"]


@pytest.mark.parametrize("launcher", ["one", *LAUNCHERS])
def test_self_test_passes(launcher):
    output = run(command_of(launcher, "-m", "trace_trl.selftest", "--schedule_seed", "3"))
    verdict = output[output.index("process(es)") - 2 :]
    assert verdict.startswith("1 " if launcher == "one" else "2 ")
    assert verdict.count("  ok  ") == 7 and "FAIL" not in verdict
    assert "PASSED in" in verdict


def test_self_test_notices_processes_that_disagree(tmp_path):
    launch("ddp", tmp_path, {"task": "disagree", "name": "run"})
    for result in results(tmp_path, "run"):
        failed = [text.split(":")[0] for text in result["failed"]]
        assert failed == [
            "the value head is the same on all processes",
            "every process filled its leaves",
            "all processes played the same rounds",
        ]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_adapters_checkpointing_and_half_precision(launcher, tmp_path):
    jobs = {
        "lora and checkpointing": {"lora": True, "gradient_checkpointing": True},
        "checkpointing": {"gradient_checkpointing": True},
        "bf16": {"bf16": True},
    }
    launch(launcher, tmp_path, *[{"task": "train", "name": name, "max_steps": 2, **job} for name, job in jobs.items()])
    for name in jobs:
        both = results(tmp_path, name)
        assert [result["failed"] for result in both] == [[], []], name


def test_continuous_batching_in_half_precision_leaves_gradients_to_be_averaged(tmp_path):
    """The policies go apart where the hooks by which DDP averages gradients are lost."""
    small = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 128}
    batching = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": small}
    launch("ddp", tmp_path, {"task": "train", "name": "run", "max_steps": 2, "bf16": True, **batching})
    assert [result["failed"] for result in results(tmp_path, "run")] == [[], []]
