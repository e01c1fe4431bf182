"""The playground in headless Chromium, on a running stack."""

import json
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, Request, expect
from support.gateway import browser
from support.gateway.browser import DESKTOP, LEAST_CONTRAST, PHONE, Tab
from support.processes import ports, stack
from support.processes.stack import Service, Stack

STORY = "Tell me a story about a dog and a river."
LONG_LIST = {"type": "array", "minItems": 600, "items": {"const": True}}  # a thousand tokens and more
HOT = {"type": "object", "properties": {"hot": {"type": "boolean"}}, "required": ["hot"], "additionalProperties": False}
WEATHER = {"name": "get_weather", "parameters": HOT}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ExitStack() as cleanup:
        flags = {"gateway": ("--tool-call-parser", "hermes")}
        yield stack.start_stack(tmp_path_factory.mktemp("playground"), cleanup, extra=flags)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.running() as one:
        yield one


@pytest.fixture
def tab(chromium: Browser, running: Stack) -> Iterator[Tab]:
    with opened(chromium, running, **DESKTOP) as one:
        yield one


@contextmanager
def opened(chromium: Browser, running: Stack, **options: object) -> Iterator[Tab]:
    with browser.open_tab(chromium, running.url, **options) as tab:
        expect(tab["#model"]).to_have_value(stack.MODEL_NAME)
        yield tab


def say(tab: Tab, text: str) -> None:
    tab["#prompt"].fill(text)
    tab["#prompt"].press("Enter")


def finished(tab: Tab) -> None:
    expect(tab["#transcript > :last-child"]).to_have_class("turn answer")
    expect(tab["#transcript > :last-child"]).to_have_attribute("aria-busy", "false")


def ask_for_json(tab: Tab, schema: object) -> None:
    tab["#response_format"].select_option("json_schema")
    tab["#schema"].fill(json.dumps(schema))


def chat_request(request: Request) -> bool:
    return request.url.endswith("/v1/chat/completions")


def figures(tab: Tab) -> dict[str, str]:
    terms = tab[".answer:last-child .figures dt"].all_inner_texts()
    return dict(zip(terms, tab[".answer:last-child .figures dd"].all_inner_texts(), strict=True))


def test_a_message_gets_the_answer_that_the_api_gives_and_its_figures(tab: Tab, running: Stack):
    tab["#system"].fill("You tell stories.")
    tab["#temperature"].fill("0")
    tab["#max_tokens"].fill("40")
    say(tab, STORY)
    finished(tab)
    messages = [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": STORY}]
    status, body = running.post(
        "/v1/chat/completions", {"model": stack.MODEL_NAME, "messages": messages, "temperature": 0, "max_tokens": 40}
    )
    assert status == 200
    assert tab[".answer .prose:not(.thought)"].inner_text().split() == body["choices"][0]["message"]["content"].split()
    shown = figures(tab)
    assert shown["Prompt"].startswith(f"{body['usage']['prompt_tokens']} tokens")
    assert shown["Answer"] == "40 tokens"
    assert shown["First token"].endswith("s")
    assert shown["Speed"].endswith("tokens/s")
    assert shown["End"] == "cut at the token limit"
    expect(tab["#status"]).to_contain_text("The answer is complete, 40 tokens.")


def test_every_control_arrives_in_the_request(tab: Tab):
    numbers = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "max_tokens": 5, "seed": 7,
        "presence_penalty": 0.1, "frequency_penalty": -0.2, "repetition_penalty": 1.1,
    }  # fmt: skip
    for name, number in numbers.items():
        tab[f"#{name}"].fill(str(number))
    tab["#stop_strings"].fill("END\n\\n\\n")
    with tab.page.expect_request(chat_request) as request:
        say(tab, "Hi")
    body = request.value.post_data_json
    assert {name: body[name] for name in numbers} == numbers
    assert body["stop"] == ["END", "\n\n"]
    assert body["model"] == stack.MODEL_NAME
    finished(tab)
    tab.page.reload()
    expect(tab["#temperature"]).to_have_value("0.5")
    expect(tab[".said"]).to_have_text("Hi")


def test_the_answer_is_shown_while_it_grows_and_stop_ends_it_on_the_workers(tab: Tab, running: Stack):
    ask_for_json(tab, LONG_LIST)
    say(tab, "List.")
    expect(tab[".answer[aria-busy=true] pre"]).to_contain_text("true,")
    expect(tab["#send"]).to_be_hidden()
    tab["#stop"].click()
    finished(tab)
    assert figures(tab)["End"] == "stopped by you"
    assert figures(tab)["Answer"].endswith("tokens")
    expect(tab["#send"]).to_be_visible()
    running.wait_all_blocks_back(seconds=20)


def test_everything_can_be_done_with_the_keyboard(tab: Tab):
    ask_for_json(tab, LONG_LIST)
    tab.page.reload()
    expect(tab["#model"]).to_be_enabled()
    keyboard = tab.page.keyboard
    expect(tab["#prompt"]).to_be_focused()
    keyboard.type("One")
    keyboard.press("Shift+Enter")
    keyboard.type("Two")
    expect(tab["#prompt"]).to_have_value("One\nTwo")
    keyboard.press("Enter")
    expect(tab[".answer[aria-busy=true] pre"]).to_contain_text("true,")
    keyboard.press("Escape")
    finished(tab)
    expect(tab["#prompt"]).to_be_focused()
    tab[".skip"].focus()
    reached = []
    for _ in range(60):
        keyboard.press("Tab")
        found = tab.page.evaluate(
            "(() => { const node = document.activeElement; const style = getComputedStyle(node);"
            " const box = node.closest('.composer-box');"
            " const seen = style.outlineStyle !== 'none' || (box && getComputedStyle(box).boxShadow !== 'none');"
            " return [node.id || node.textContent.trim(), Boolean(seen)]; })()"
        )
        reached.append(found[0])
        assert found[1], f"no visible focus on {found[0]}"
        if found[0] == "API reference":
            break
    order = ["model", "new-chat", "show-curl", "theme", "show-settings", "Copy", "Edit", "Regenerate", "prompt",
             "system", "temperature", "stop_strings", "response_format", "schema", "API reference"]  # fmt: skip
    places = [reached.index(name) for name in order]
    assert places == sorted(places), reached


def test_every_control_has_a_name(tab: Tab):
    unnamed = tab.page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea, summary, [role=region], dialog, aside')]"
        ".filter((n) => !(n.labels?.length || n.getAttribute('aria-label') || n.getAttribute('aria-labelledby')"
        " || n.textContent.trim())).map((n) => n.outerHTML)"
    )
    assert unnamed == []


def test_an_answer_follows_the_schema_and_a_broken_schema_is_named_with_its_line(tab: Tab):
    tab["#response_format"].select_option("json_schema")
    tab["#schema"].fill('{\n  "type": "object"\n  "properties": {}\n}')
    say(tab, "Hi")
    expect(tab["#schema-problem"]).to_have_text('Line 3, column 3: "," or "}" is expected, not """.')
    expect(tab["#schema"]).to_be_focused()
    expect(tab["#prompt"]).to_have_value("Hi")
    expect(tab[".turn"]).to_have_count(0)
    ask_for_json(tab, {"type": "object", "properties": {"sad": {"type": "boolean"}}, "required": ["sad"],
                       "additionalProperties": False})  # fmt: skip
    expect(tab["#schema-problem"]).to_have_count(0)
    tab["#prompt"].press("Enter")
    finished(tab)
    assert set(json.loads(tab[".answer pre"].inner_text())) == {"sad"}


def test_a_refusal_is_shown_in_the_chat_and_at_its_field_and_can_be_tried_again(tab: Tab):
    ask_for_json(tab, {"type": "nonsense"})
    say(tab, "Hi")
    expect(tab[".failure"]).to_contain_text("Refused (400)")
    expect(tab[".failure code"]).to_have_text("response_format.json_schema.schema")
    expect(tab["#schema-problem"]).to_contain_text("Invalid type: nonsense")
    tab.forgive("400 (Bad Request)")
    tab["#prompt"].focus()
    tab[".failure"].get_by_role("button", name="Show the setting").click()
    expect(tab["#schema"]).to_be_focused()
    tab["#schema"].fill('{"const": "fine"}')
    tab[".answer"].get_by_role("button", name="Try again").click()
    expect(tab[".answer pre"]).to_have_text('"fine"')
    expect(tab[".turn"]).to_have_count(2)


def test_a_too_long_prompt_is_reported_and_dropped_from_the_conversation(tab: Tab):
    say(tab, "word " * 70_000)
    expect(tab[".failure"]).to_contain_text("maximum context length is 65536 tokens")
    expect(tab[".failure code"]).to_have_text("messages")
    tab.forgive("400 (Bad Request)")
    tab["#max_tokens"].fill("5")
    with tab.page.expect_request(chat_request) as request:
        say(tab, "Hi")
    assert request.value.post_data_json["messages"] == [{"role": "user", "content": "Hi"}]
    finished(tab)


@pytest.mark.parametrize(
    ("id_", "text", "problem"),
    [
        ("temperature", "2.5", "“2.5” is not allowed: give a number from 0 to 2."),
        ("top_p", "0", "“0” is not allowed: give a number above 0 to 1."),
        ("max_tokens", "1.5", "“1.5” is not allowed: give a whole number from 1 to 2147483647."),
        ("seed", "many", "“many” is not allowed"),
        ("tools", "[{}]", 'Function 1 of the list has no "name".'),
        ("tools", "[", "Line 1, column 2: a value is expected, not the end."),
    ],
)
def test_a_wrong_setting_is_reported_at_its_field(tab: Tab, id_: str, text: str, problem: str):
    tab["#tools-section > summary"].click()
    tab[f"#{id_}"].fill(text)
    say(tab, "Hi")
    expect(tab[f"#{id_}-problem"]).to_contain_text(problem)
    expect(tab[f"#{id_}"]).to_have_attribute("aria-invalid", "true")
    expect(tab[f"#{id_}"]).to_be_focused()
    expect(tab[".turn"]).to_have_count(0)


def test_a_call_is_shown_and_its_result_goes_back_to_the_model(tab: Tab):
    tab["#tools-section > summary"].click()
    tab["#tools"].fill(json.dumps([WEATHER]))
    tab["#tool_choice"].select_option("function:get_weather")
    tab["#parallel_tool_calls"].uncheck()
    say(tab, "Is it hot?")
    finished(tab)
    expect(tab[".call-name"]).to_have_text("Calls get_weather")
    arguments = tab[".call pre"].inner_text()
    assert isinstance(json.loads(arguments), dict)
    tab["#tool_choice"].select_option("none")
    tab["#max_tokens"].fill("8")
    tab["label:has-text('Result of call 1, get_weather') + textarea"].fill('{"hot": true}')
    with tab.page.expect_request(chat_request) as request:
        tab.page.get_by_role("button", name="Send the result").click()
    asked, called, result = request.value.post_data_json["messages"]
    assert asked["content"] == "Is it hot?"
    assert called["tool_calls"][0]["function"]["name"] == "get_weather"
    assert result == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": '{"hot": true}'}
    finished(tab)
    expect(tab[".results"]).to_have_count(0)
    expect(tab[".result"]).to_contain_text('{"hot": true}')


def test_a_message_can_be_edited_and_an_answer_made_again(tab: Tab):
    tab["#max_tokens"].fill("5")
    for text in ("First", "Second"):
        say(tab, text)
        finished(tab)
    tab.page.get_by_role("button", name="Regenerate the answer").last.click()
    finished(tab)
    expect(tab[".turn"]).to_have_count(4)
    tab.page.get_by_role("button", name="Edit the message").first.click()
    expect(tab[".edit textarea"]).to_be_focused()
    tab[".edit textarea"].press("Escape")
    expect(tab[".said"]).to_have_text(["First", "Second"])
    tab.page.get_by_role("button", name="Edit the message").first.click()
    tab[".edit textarea"].fill("Other")
    tab[".edit textarea"].press("Enter")
    expect(tab[".said"]).to_have_text(["Other"])
    finished(tab)
    tab["#new-chat"].click()
    expect(tab[".turn"]).to_have_count(0)
    expect(tab["#welcome"]).to_be_visible()


def test_an_answer_is_copied(chromium: Browser, running: Stack):
    with opened(chromium, running, permissions=["clipboard-read", "clipboard-write"]) as tab:
        tab["#max_tokens"].fill("8")
        say(tab, STORY)
        finished(tab)
        tab.page.get_by_role("button", name="Copy the answer").click()
        expect(tab[".answer .actions button"].first).to_have_text("Copied")
        copied = tab.page.evaluate("navigator.clipboard.readText()")
        assert copied.split() == tab[".answer .prose:not(.thought)"].inner_text().split()


def test_the_curl_command_is_the_pages_request_without_a_key(tab: Tab, running: Stack):
    tab["details:has(#api_key) > summary"].click()
    tab["#api_key"].fill("sk-secret")
    tab["#temperature"].fill("0")
    tab["#max_tokens"].fill("5")
    with tab.page.expect_request(chat_request) as request:
        say(tab, "It's a dog's \"day\" \\ $HOME")
    assert request.value.headers["authorization"] == "Bearer sk-secret"
    finished(tab)
    tab["#prompt"].fill("And?")
    tab["#show-curl"].click()
    command = tab["#curl-text"].inner_text()
    assert "sk-secret" not in command
    words = shlex.split(command)
    assert words[:3] == ["curl", "-N", f"{running.url}/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][0]["content"] == "It's a dog's \"day\" \\ $HOME"
    assert len(list(running.stream("/v1/chat/completions", body))) > 1
    tab.page.keyboard.press("Escape")
    expect(tab["#curl"]).to_be_hidden()
    kept = tab.page.evaluate("[JSON.stringify(localStorage), document.cookie, sessionStorage['baton.api_key']]")
    assert kept == ["{}", "", '"sk-secret"']


def test_a_phone_shows_everything_without_scrolling_sideways(chromium: Browser, running: Stack):
    with opened(chromium, running, **PHONE) as tab:
        wide = "document.documentElement.scrollWidth - innerWidth"
        assert tab.page.evaluate(wide) <= 0
        expect(tab["#settings"]).to_be_hidden()
        tab["#show-settings"].click()
        expect(tab["#hide-settings"]).to_be_focused()
        assert tab.page.evaluate("document.querySelector('#chat').inert")
        tab["#max_tokens"].fill("20")
        tab.page.keyboard.press("Escape")
        expect(tab["#settings"]).to_be_hidden()
        expect(tab["#show-settings"]).to_be_focused()
        say(tab, "A" * 300)
        finished(tab)
        assert tab.page.evaluate(wide) <= 0
        for id_ in ("send", "new-chat", "show-curl", "theme", "show-settings", "model"):
            box = tab[f"#{id_}"].bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
            assert box["height"] >= 36


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_are_readable_and_the_toggle_lasts(chromium: Browser, running: Stack, scheme: str):
    luminance = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    with opened(chromium, running, color_scheme=scheme, **DESKTOP) as tab:
        tab["#max_tokens"].fill("5")
        tab["#top_p"].fill("7")
        say(tab, "Hi")
        tab["#top_p"].fill("")
        tab["#prompt"].press("Enter")
        finished(tab)
        tab["#seed"].fill("x")
        tab["#seed"].blur()
        expect(tab["#seed-problem"]).to_be_visible()
        for _ in range(2):
            is_dark = tab.page.evaluate(luminance) < 128
            assert is_dark == (tab.page.evaluate("document.documentElement.dataset.theme") or scheme).startswith("dark")
            contrast, text = tab.page.evaluate(LEAST_CONTRAST)
            assert contrast >= 4.5, text
            tab["#theme"].click()
            tab.page.reload()
            assert (tab.page.evaluate(luminance) < 128) != is_dark


def test_reasoning_is_folded_and_counted(chromium: Browser, running: Stack):
    plan = running["gateway"].plan
    rest, grpc = (f"127.0.0.1:{port}" for port in ports.free_ports(2))
    flags = (*plan.flags, "--rest-listen", rest, "--grpc-listen", grpc, "--reasoning-parser", "deepseek_r1")
    log_path = running["gateway"].log_path.with_name("thinking-gateway.log")
    gateway = Service(replace(plan, flags=flags, address=grpc, metrics=rest, probe_address=rest), log_path)
    try:
        gateway.start()
        with browser.open_tab(chromium, f"http://{rest}", **DESKTOP) as tab:
            tab["#max_tokens"].fill("12")
            say(tab, STORY)
            finished(tab)
            expect(tab[".reasoning summary"]).to_have_text("Reasoning 12 tokens")
            expect(tab[".thought"]).to_be_hidden()
            tab[".reasoning summary"].click()
            expect(tab[".thought"]).not_to_be_empty()
            assert figures(tab)["Answer"] == "12 tokens, 12 reasoning"
    finally:
        gateway.stop_by_force()


def test_a_lost_gateway_is_reported_and_retried(tab: Tab, running: Stack):
    tab["#max_tokens"].fill("5")
    running["gateway"].kill()
    try:
        say(tab, "Hi")
        host = running.rest
        expect(tab[".failure"]).to_contain_text(f"The gateway at {host} cannot be reached. Is it running?")
        tab.forgive("ERR_CONNECTION_REFUSED")
    finally:
        running["gateway"].start()
    tab.page.get_by_role("button", name="Try again").last.click()
    finished(tab)
    expect(tab[".failure"]).to_have_count(0)


def test_a_gateway_that_dies_during_an_answer_leaves_the_received_text(tab: Tab, running: Stack):
    ask_for_json(tab, LONG_LIST)
    say(tab, "List.")
    expect(tab[".answer[aria-busy=true] pre"]).to_contain_text("true,")
    running["gateway"].kill()
    try:
        expect(tab[".failure"]).to_contain_text("was lost")
        expect(tab[".answer pre"]).to_contain_text("true,")
        tab.forgive("ERR_")
    finally:
        running["gateway"].start()
