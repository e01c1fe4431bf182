"""One trial, in its forked process: compiles a constraint within limits that the kernel enforces."""

from __future__ import annotations

import math
import resource
import signal
import socket
import time

from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2
from baton.worker.sampling.grammar.compilation.compile import compile_grammar, grammar_of_checked
from baton.worker.sampling.grammar.limits import GrammarLimits
from baton.worker.sampling.grammar.messages import constraint_of
from baton.worker.sampling.grammar.process_memory import address_space_bytes, allocated_bytes
from baton.worker.sampling.grammar.trial.framing import receive_sized
from baton.worker.sampling.grammar.trial.verdict import Verdict
from baton.worker.sampling.grammar.vocabulary import Vocabulary


def attempt(sock: socket.socket, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
    """Reads a constraint and writes the verdict. At a limit, a signal ends the process."""
    _limit(limits)
    constraint = constraint_of(types_pb2.Constraint.FromString(receive_sized(sock)))
    before = allocated_bytes()
    try:
        grammar = grammar_of_checked(constraint)
        matcher = compile_grammar(vocabulary, constraint, grammar, limits)
        verdict = Verdict(
            grammar=grammar, num_bytes=max(0, allocated_bytes() - before), cpu_seconds=time.process_time()
        )
        del matcher
    except InvalidRequest as error:
        verdict = Verdict(problem=error.message, cpu_seconds=time.process_time())
    except MemoryError:
        verdict = Verdict(signal=signal.SIGABRT)
    except Exception as error:
        verdict = Verdict(failure=f"{type(error).__name__}: {error}")
    signal.setitimer(signal.ITIMER_PROF, 0)
    sock.sendall(verdict.encode())


def _limit(limits: GrammarLimits) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = math.ceil(limits.max_compile_cpu_seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    space = address_space_bytes()
    if space:
        most = space + limits.max_compile_peak_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.max_compile_cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.max_compile_seconds)
