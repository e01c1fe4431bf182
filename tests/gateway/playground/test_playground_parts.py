"""The playground's modules in headless Chromium, and the page on answers that a test writes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, expect
from support.gateway import browser
from support.gateway.browser import Tab
from support.gateway.rest_harness import FakeGeneration, rest_side
from support.gateway.threaded import in_thread

from baton.rpc.errors import Unavailable

HOSTILE = """<img src=x onerror="window.broken = 1"> <script>window.broken = 2</script>

![picture](http://elsewhere.example/x.png) [click](javascript:window.broken=3) [site](https://example.com/a)

| a | <b>b</b> |
| - | - |
| **c** | <svg onload="window.broken = 4"> |
"""
RENDER = """async (text) => {
  const { MarkdownView } = await import(new URL("playground/markdown.js", document.baseURI));
  const root = document.createElement("div");
  new MarkdownView(root).update(text);
  const inner = (node, name) => node.querySelector(name).textContent;
  const shape = (node) => node.nodeType === 3 ? node.data
    : node.matches("figure") ? `figure(${inner(node, "span")}|${inner(node, "pre")})`
    : `${node.localName}(${[...node.childNodes].map(shape).join("")})`;
  return [...root.childNodes].map(shape).join(" ");
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.running() as one:
        yield one


@pytest.fixture(scope="module")
def page_url() -> Iterator[str]:
    with in_thread(rest_side()) as url:
        yield url


@pytest.fixture(scope="module")
def tab(chromium: Browser, page_url: str) -> Iterator[Tab]:
    with browser.open_tab(chromium, page_url) as one:
        yield one


@contextmanager
def answered(chromium: Browser, script: Callable[[FakeGeneration], None]) -> Iterator[Tab]:
    with in_thread(rest_side(script)) as url, browser.open_tab(chromium, url) as tab:
        tab["#prompt"].fill("Hi <b>there</b>")
        tab["#prompt"].press("Enter")
        expect(tab[".answer"]).to_have_attribute("aria-busy", "false")
        yield tab


def say(*texts: str) -> Callable[[FakeGeneration], None]:
    def script(generation: FakeGeneration) -> None:
        for text in texts:
            generation.emit(text)
        generation.finish()
        generation.done(len(texts), cached_tokens=1)

    return script


def test_markup_in_messages_and_answers_stays_text(chromium: Browser):
    with answered(chromium, say(*(HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)))) as tab:
        expect(tab[".said"]).to_have_text("Hi <b>there</b>")
        expect(tab[".answer .prose p"].first).to_have_text(HOSTILE.splitlines()[0])
        assert tab["#transcript :is(img, script, svg, b)"].count() == 0
        assert tab[".answer a"].evaluate_all("links => links.map((one) => one.href)") == ["https://example.com/a"]
        assert tab[".answer a"].get_attribute("rel") == "noopener noreferrer nofollow"
        assert tab.page.evaluate("window.broken") is None
        expect(tab[".answer td strong"]).to_have_text("c")


def test_the_policy_stops_code_and_markup_that_would_slip_in(tab: Tab):
    blocked = "() => { try { document.body.innerHTML = '<i>'; } catch (error) { return error.name; } }"
    assert tab.page.evaluate(blocked) == "TypeError"
    tab.forgive("TrustedHTML")


def test_cached_tokens_are_reported(chromium: Browser):
    with answered(chromium, say("One", " two")) as tab:
        expect(tab[".figures dd"].first).to_contain_text(", 1 cached")


def test_an_error_midway_keeps_the_earlier_output(chromium: Browser):
    def script(generation: FakeGeneration) -> None:
        generation.emit("Half of")
        generation.sink.on_error(Unavailable("worker decode-0 has gone"))

    with answered(chromium, script) as tab:
        expect(tab[".answer .prose p"]).to_have_text("Half of")
        expect(tab[".failure"]).to_contain_text("The answer failed")
        expect(tab[".failure"]).to_contain_text("worker decode-0 has gone")
        expect(tab["#send"]).to_be_visible()


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("One\ntwo\n\nthree", "p(One\ntwo) p(three)"),
        ("# A\n### B `c`", "h3(A) h5(B code(c))"),
        ("**b** *i* ~~d~~ `c`", "p(strong(b) em(i) del(d) code(c))"),
        ("**a *b* c**", "p(strong(a em(b) c))"),
        ("snake_case_name 2 * 3 * 4", "p(snake_case_name 2 * 3 * 4)"),
        ("\\*no\\* **open", "p(*no* **open)"),
        ("- a\n- b\n  - c\n\n1. x\n2. y", "ul(li(a)li(p(b)ul(li(c)))) ol(li(x)li(y))"),
        ("3. x", "ol(li(x))"),
        ("> q\n> r", "blockquote(p(q\nr))"),
        ("---", "hr()"),
        ("```python\nx = '<b>'\n", "figure(python|x = '<b>'\n)"),
        ("~~~\n```\n~~~\nafter", "figure(text|```) p(after)"),
        ("a | b", "p(a | b)"),
        ("see https://example.com/x_y_z.", "p(see a(https://example.com/x_y_z).)"),
        ("[x](ftp://a) [y](data:text/html,z)", "p([x](ftp://a) [y](data:text/html,z))"),
        ("![x](https://a.b/c.png)", "p(![x](https://a.b/c.png))"),
        ("&lt;b&gt; <b>", "p(&lt;b&gt; <b>)"),
    ],
)
def test_markdown(tab: Tab, text: str, shape: str):
    assert tab.page.evaluate(RENDER, text) == shape


@pytest.mark.parametrize(
    "text",
    ["**" * 50_000, "*a " * 50_000, "[" * 100_000, "`" * 100_000, "`a``" * 30_000, "> " * 50_000, "- " * 50_000,
     "#" + " " * 100_000 + "x", "|" + "-|" * 50_000, "_a" * 50_000, "\\" * 100_000, "http://" * 15_000,
     "-" + " " * 100_000 + "x", "a|b\n" * 20_000],
    ids=lambda text: text[:6],
)  # fmt: skip
def test_text_made_of_marks_is_read_in_reasonable_time(tab: Tab, text: str):
    tab.page.evaluate(RENDER, text)


def test_a_growing_text_keeps_the_nodes_of_its_finished_blocks(tab: Tab):
    kept = tab.page.evaluate(
        """async () => {
          const { MarkdownView } = await import(new URL("playground/markdown.js", document.baseURI));
          const root = document.createElement("div");
          const view = new MarkdownView(root);
          view.update("One\\n\\nTw");
          const [first, second] = root.childNodes;
          view.update("One\\n\\nTwo\\n\\nThree");
          return [root.childNodes[0] === first, root.childNodes[1] === second, root.textContent];
        }"""
    )
    assert kept == [True, False, "OneTwoThree"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Line 1, column 1: a value is expected, not the end."),
        ("[1,\n 2,\n]", 'Line 3, column 1: no "," may come before "]".'),
        ("{'a': 1}", 'Line 1, column 2: a name in double quotes is expected, not "\'".'),
        ('{"a" 1}', 'Line 1, column 6: ":" is expected, not "1".'),
        ('{"a": 01}', 'Line 1, column 8: "," or "}" is expected, not "1".'),
        ('{"a": tru}', 'Line 1, column 7: a value is expected, not "t".'),
        ('"a\nb"', "Line 1, column 3: a line break or control character in a text has to be escaped."),
        ('"a', "Line 1, column 1: the text is never closed."),
        ('"\\x"', "Line 1, column 2: an unknown escape."),
        ("[[1]", "Line 1, column 1: [ is never closed."),
        ("1 2", 'Line 1, column 3: nothing may follow the value, but "2" does.'),
        ("[" * 100_000, "Line 1, column 202: more than 200 levels deep."),
    ],
)
def test_wrong_json_is_named_with_its_place(tab: Tab, text: str, message: str):
    told = tab.page.evaluate(
        """async (text) => {
          const { parseJson } = await import(new URL("playground/json_text.js", document.baseURI));
          try { parseJson(text); } catch (error) { return error.message; }
        }""",
        text,
    )
    assert told == message


def test_events_are_found_wherever_the_stream_is_split(tab: Tab):
    found = tab.page.evaluate(
        """async () => {
          const { eventData } = await import(new URL("playground/sse.js", document.baseURI));
          const text = 'data: {"a":"é😀"}\\n\\n: ping\\n\\nevent: x\\r\\ndata:b\\r\\ndata: c\\r\\n\\r\\ndata: cut';
          const bytes = new TextEncoder().encode(text);
          const all = [];
          for (let size = 1; size <= bytes.length; size++) {
            const body = new ReadableStream({ start(stream) {
              for (let at = 0; at < bytes.length; at += size) stream.enqueue(bytes.slice(at, at + size));
              stream.close();
            } });
            const events = [];
            for await (const data of eventData(body)) events.push(data);
            all.push(JSON.stringify(events));
          }
          return [...new Set(all)];
        }"""
    )
    assert found == ['["{\\"a\\":\\"é😀\\"}","b\\nc"]']
