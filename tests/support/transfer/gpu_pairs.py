"""Two processes that move KV to each other, each with a GPU of its own, or both with the only one."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import torch

_HAS_TWO = torch.cuda.device_count() > 1
_END_SECONDS = 30.0


def environ_of(end: int) -> dict[str, str]:
    """What makes a process the pair's end 0 or 1.

    NCCL takes two ranks on one GPU only where each says that it is on another host (NCCL_HOSTID, in NCCL's user guide);
    they talk over sockets then.
    """
    if _HAS_TWO:
        return {"CUDA_VISIBLE_DEVICES": str(end)}
    return {"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": f"end-{end}"}


class OtherEnd:
    """A process that is the end 1 and runs a module, told what to do line by line."""

    def __init__(self, module: ModuleType, *arguments: str) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)} | environ_of(1)
        command = [sys.executable, "-m", module.__name__, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.answer()

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the other end has ended"
        return line

    def close(self) -> None:
        """Waits until it ended well by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(_END_SECONDS) == 0
        self._close_pipes()

    def kill(self) -> None:
        """Idempotent, also after `close`."""
        self.process.kill()
        self.process.wait(_END_SECONDS)
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
