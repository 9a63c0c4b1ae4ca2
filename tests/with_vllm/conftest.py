import pytest


@pytest.fixture(scope="session")
def worker():
    """The module that the processes of other tests run; with it, vLLM is imported."""
    pytest.importorskip("vllm", reason="needs vLLM: run `make test-vllm`")
    import vllm_worker

    return vllm_worker
