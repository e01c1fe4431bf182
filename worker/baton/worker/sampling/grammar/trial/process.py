"""The trial process: forks a child for each constraint, and kills it if the engine cancels.

`python -m baton.worker.sampling.grammar.trial.process FD` with the settings as one frame on the socket FD. The process
has one thread, no device and no request; it ends when the engine's side of the socket is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from baton.worker.core import ModelSpec
from baton.worker.sampling.grammar.limits import GrammarLimits
from baton.worker.sampling.grammar.trial.attempt import attempt
from baton.worker.sampling.grammar.trial.framing import receive_sized
from baton.worker.sampling.grammar.trial.verdict import Verdict
from baton.worker.sampling.grammar.vocabulary import Vocabulary, load_vocabulary


@dataclass(slots=True)
class _Child:
    pid: int
    sock: socket.socket  # to the engine, which closes its end to cancel
    end: int  # a pipe that only the child holds open


def main(argv: list[str]) -> int:
    """Serves trials until the engine closes its socket. Returns an exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(argv[0]))
    settings = json.loads(receive_sized(control))
    model = ModelSpec(bytes(16), settings["vocab_size"], 1, tuple(settings["eos_token_ids"]))
    vocabulary = load_vocabulary(Path(settings["folder"]), model)
    control.sendall(b"r")
    _Server(control, vocabulary, GrammarLimits(**settings["limits"])).run()
    return 0


class _Server:
    def __init__(self, control: socket.socket, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        self._control = control
        self._vocabulary = vocabulary
        self._limits = limits
        self._children: dict[int, _Child] = {}  # by both polled descriptors
        self._poll = select.poll()

    def run(self) -> None:
        self._poll.register(self._control, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._control.fileno():
                    if not self._accept():
                        self._kill_all()
                        return
                elif (child := self._children.get(descriptor)) is not None:
                    # The pipe's end means that the child ended, the socket's hang-up that the engine cancelled.
                    if descriptor == child.sock.fileno():
                        os.kill(child.pid, signal.SIGKILL)
                    self._reap(child)

    def _accept(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        for descriptor in descriptors:
            self._start(socket.socket(fileno=descriptor))
        return bool(data)

    def _start(self, sock: socket.socket) -> None:
        end, held = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._be_child(sock, held)
        os.close(held)
        child = _Child(pid, sock, end)
        self._children[end] = self._children[sock.fileno()] = child
        self._poll.register(end, select.POLLIN)
        self._poll.register(sock, 0)  # hang-ups only: the child reads the constraint

    def _be_child(self, sock: socket.socket, held: int) -> None:
        """Runs the trial and exits. `held` stays open until then."""
        try:
            self._control.close()
            for child in self._children.values():
                child.sock.close()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)  # hides messages of failed allocations
            attempt(sock, self._vocabulary, self._limits)
        finally:
            os.close(held)
            os._exit(0)

    def _reap(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._poll.unregister(child.end)
        self._poll.unregister(child.sock)
        del self._children[child.end], self._children[child.sock.fileno()]
        os.close(child.end)
        if os.WIFSIGNALED(status):
            with contextlib.suppress(OSError):
                child.sock.sendall(Verdict(signal=os.WTERMSIG(status)).encode())
        child.sock.close()

    def _kill_all(self) -> None:
        for child in self._children.values():
            with contextlib.suppress(OSError):
                os.kill(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
