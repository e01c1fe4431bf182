import io

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
