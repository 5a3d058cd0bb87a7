"""Runs pytest in forked children, so that torch, Triton and pytest are imported once for many copies of the package.

``python forks.py`` reads requests, a JSON line each, and answers each with the exit status of its child::

    {"folder": where the copy lies, "arguments": of pytest, "first": modules that the parent imports before forking, "seconds": limit}

What the child prints goes to ``printed.txt`` in the folder. Nothing of the package or its tests is ever imported by the parent.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterable

import pytest

# What the package and its tests import in turn, seconds' worth of modules.
IMPORTED_ONCE = ("torch._dynamo", "torch.utils.checkpoint", "triton.language", "hypothesis", "huggingface_hub")


def child(folder: str, arguments: list[str], seconds: int) -> int:
    """Pytest in the copy, in place of what the parent would do next."""
    signal.alarm(seconds)  # a fault may make a loop endless
    os.chdir(folder)
    sys.path[0] = folder
    printed = os.open("printed.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    return int(pytest.main(arguments))


def import_all(modules: Iterable[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # children need not walk what they did not make


def serve() -> None:
    import_all(IMPORTED_ONCE)
    for line in sys.stdin:
        request = json.loads(line)
        import_all(request.pop("first"))
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                status = child(**request)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
