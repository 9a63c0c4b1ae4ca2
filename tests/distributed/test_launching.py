import sys

import pytest
from launching import run


pytestmark = pytest.mark.distributed

BEGIN = "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)"


def test_a_process_that_keeps_its_process_group_fails():
    """Its threads may abort it while Python shuts down: "terminate called without an active exception"."""
    assert "trainer.end()" in run([sys.executable, "-c", BEGIN], ok=False)
    assert "trainer.end()" not in run([sys.executable, "-c", f"{BEGIN}; d.destroy_process_group()"])
