"""
`vllm serve` on a CPU: its command asks for the version of a package `vllm`, which the CPU build does not have.

With `--port 0` the system chooses the port: the server binds it, and writes its number into the file that PORT_FILE
names.
"""

import os
from pathlib import Path

import on_cpu
from vllm.entrypoints.launchers.api_server import entry


bind = entry.setup_server


def bind_and_tell(args, **options):
    address, socket = bind(args, **options)
    args.port = socket.getsockname()[1]
    file = Path(os.environ["PORT_FILE"])
    part = file.with_suffix(".part")
    part.write_text(str(args.port))
    part.rename(file)
    return address, socket


if __name__ == "__main__":
    assert on_cpu
    entry.setup_server = bind_and_tell
    entry.main()
