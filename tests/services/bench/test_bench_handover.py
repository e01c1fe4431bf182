"""The hand-over benchmark: small prompts, so that it runs in a second; its figures are not looked at."""

from __future__ import annotations

from bench.transfer import bench_handover


def test_every_call_of_both_engines_is_in_the_table(capsys):
    assert bench_handover.main(["--tokens", "256", "512", "--rounds", "1"]) == 0
    _, header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["call", "256", "512"]
    names = {line[:44].strip() for line in lines}
    assert {
        "decode: submit",
        "decode: message started",
        "decode: from the last block to the launch",
        "decode: step",
        "prefill: message submit",
        "prefill: message complete",
        "prefill: step",
        "executor: a row's tokens and blocks",
    } <= names
    assert all(cost == "-" or float(cost) >= 0 for line in lines for cost in line[44:].split())
