import pytest


@pytest.fixture(scope="session")
def worker():
    """The module that the processes of other tests run; with it, vLLM is imported."""
    pytest.importorskip("vllm", reason="needs vLLM: run `make test-vllm`")
    import vllm_worker
    from accelerate import PartialState

    yield vllm_worker
    PartialState().destroy_process_group()
