import re
import subprocess
import sys

import pytest
from launching import LIMIT, command_of, kill, run, start


pytestmark = pytest.mark.distributed

BEGIN = "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)"


def test_a_process_that_keeps_its_process_group_fails():
    """Its threads may abort it while Python shuts down: "terminate called without an active exception"."""
    assert "trainer.end()" in run([sys.executable, "-c", BEGIN], ok=False)
    assert "trainer.end()" not in run([sys.executable, "-c", f"{BEGIN}; d.destroy_process_group()"])


MEET = """
import os
import torch.distributed as d
d.init_process_group("gloo")
d.barrier()
print("met at", os.environ["MASTER_PORT"], flush=True)
d.destroy_process_group()
"""


def test_launches_at_the_same_time_meet_at_ports_of_their_own(tmp_path):
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    processes = [start(command_of(name, str(script)), subprocess.PIPE) for name in ("ddp", "ddp", "zero3_cpu")]
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                kill(process)
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    ports = [set(re.findall(r"met at (\d+)", output)) for output in outputs]
    assert [len(port) for port in ports] == [1, 1, 1], outputs
    assert len(set.union(*ports)) == 3
