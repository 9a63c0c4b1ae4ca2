"""vLLM's interfaces with processes that have unequal numbers of branches: each continues its own context."""

from pathlib import Path

import pytest
from launching import command_of, results, run


pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("echo_worker.py")


@pytest.mark.parametrize("backend", ["server", "rounds", "continuous"])
def test_no_branch_continues_the_context_of_another(backend, tmp_path):
    """200 random forests of a model whose turn names its context; two processes, uneven, idle, with equal prompts."""
    run(command_of("ddp", str(WORKER), str(tmp_path), backend, "7", "200"), timeout=280)
    both = results(tmp_path, "echo")
    assert [result["forests"] for result in both] == [200, 200]
    for result in both:
        assert result["wrong"] == []
        assert result["turns"] > 1000 and result["idle"] > 20 and result["uneven"] > 100 and result["repeated"] > 200
