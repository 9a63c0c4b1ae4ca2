"""`vllm serve` on a CPU: its command asks for the version of a package `vllm`, which the CPU build does not have."""

import on_cpu
from vllm.entrypoints.launchers.api_server.entry import main


if __name__ == "__main__":
    assert on_cpu
    main()
