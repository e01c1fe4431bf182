"""Random requests, hand-overs and aborts: every token is the one the request gets alone, and no block is lost."""

from __future__ import annotations

from hypothesis import settings
from support.engine.rigs.machine import EngineMachine

EngineMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestEngineUnderRandomTraffic = EngineMachine.TestCase
