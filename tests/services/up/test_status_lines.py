import io

from baton.services.up.start_log import Progress
from baton.services.up.status_lines import StatusLines


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_elsewhere_than_on_a_terminal_each_change_is_one_line():
    stream = io.StringIO()
    lines = StatusLines(stream)
    for seconds in (0, 1, 2):
        lines.wait(["router", "gateway"], seconds)
    lines.say("router ready")
    lines.wait(["gateway"], 3)
    assert stream.getvalue() == "waiting for router, gateway\nrouter ready\nwaiting for gateway\n"


def test_on_a_terminal_the_live_line_is_redrawn_and_cleared():
    stream = Terminal()
    lines = StatusLines(stream)
    lines.wait(["router"], 0)
    lines.wait(["router"], 1)
    lines.say("router ready")
    clear = "\r\x1b[K"
    assert stream.getvalue() == (f"{clear}waiting for router (0 s){clear}waiting for router (1 s){clear}router ready\n")


def test_on_a_terminal_the_progress_of_a_phase_is_a_bar():
    stream = Terminal()
    StatusLines(stream).wait(["worker both-0", "gateway"], 3, {"worker both-0": Progress("graphs", 0.5, "5 of 10")})
    assert stream.getvalue() == "\r\x1b[Kwaiting for worker both-0: graphs [######......] 5 of 10, gateway (3 s)"


def test_a_live_line_is_no_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    StatusLines(stream).wait([f"worker both-{number}" for number in range(9)], 0)
    assert stream.getvalue() == "\r\x1b[Kwaiting for worker "
