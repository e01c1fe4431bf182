"""Tool calls as models are documented to write them, with the answers and calls that they are."""

from __future__ import annotations

CALL = "get_weather"
FENCE = "```"


def deepseek(name, arguments):
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{FENCE}json\n{arguments}\n{FENCE}<｜tool▁call▁end｜>"


def kimi(name, index, arguments):
    return f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def glm(name, **arguments):
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def qwen(name, **arguments):
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def step3(name, **arguments):
    pairs = "".join(f'<steptml:parameter name="{key}">{value}</steptml:parameter>' for key, value in arguments.items())
    invoked = f'<steptml:invoke name="{name}">{pairs}</steptml:invoke>'
    return f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoked}<｜tool_call_end｜>"


def harmony(name, arguments):
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


def solar(name, **arguments):
    lines = "".join(f"<|tool_arg:start|>{k}<|tool_arg:value|>{v}<|tool_arg:end|>\n" for k, v in arguments.items())
    return f"<|tool_call:start|>{name}\n{lines}<|tool_call:end|>"


def m3(text):
    """The tags of a text, each with the mark."""
    return text.replace("<", "]<]minimax[>[<")


def kimi_3(name, index, *arguments):
    listed = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in arguments
    )
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{listed}<|close|>call<|sep|>'


# What the model writes, the text of the answer, the calls as (name, arguments).
SAMPLES = {
    "hermes one": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
        "",
        [(CALL, {"city": "Paris", "days": 2})],
    ),
    "hermes two with text": (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        "Let me look.",
        [(CALL, {"city": "Rom"}), ("get_time", {})],
    ),
    "hermes arguments first": (
        "hermes",
        '<tool_call>{"arguments": {"city": "a \\"b\\" }{ é"}, "name": "get_weather"}</tool_call>',
        "",
        [(CALL, {"city": 'a "b" }{ é'})],
    ),
    "hermes markup in a string": (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
        "",
        [(CALL, {"city": "</tool_call>"})],
    ),
    "hermes arguments as text": (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"\\ud83d\\ude00\\"}"}</tool_call>',
        "",
        [(CALL, {"city": "😀"})],
    ),
    "hermes a line break in a string": (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb\tc"}}</tool_call>',
        "",
        [(CALL, {"city": "a\nb\tc"})],
    ),
    "hermes no arguments": ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', "", [("get_time", {})]),
    "hermes null arguments": (
        "hermes",
        '<tool_call>{"name": "get_time", "arguments": null}</tool_call>',
        "",
        [("get_time", {})],
    ),
    "llama one": (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "llama typed, tagged, two": (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_time", "parameters": {}}',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "llama 4": (
        "llama3_json",
        '<|python_start|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|python_end|>',
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "llama an answer in JSON": (
        "llama3_json",
        '{"name": "Alice", "parameters": {"age": 3}}',
        '{"name": "Alice", "parameters": {"age": 3}}',
        [],
    ),
    "llama another answer in JSON": ("llama3_json", '{"result": [1, 2]}', '{"result": [1, 2]}', []),
    "mistral array": (
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "mistral v11": (
        "mistral",
        'Sure.[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{}',
        "Sure.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "mistral v13": (
        "mistral",
        '[TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]{"city": "[ARGS]"}',
        "",
        [(CALL, {"city": "[ARGS]"})],
    ),
    "qwen one": (
        "qwen3_coder",
        qwen("get_weather", city="Paris", days=3, exact="true", at='{"lat": 1.5}', note="null"),
        "",
        [(CALL, {"city": "Paris", "days": 3, "exact": True, "at": {"lat": 1.5}, "note": None})],
    ),
    "qwen lines in a value": (
        "qwen3_xml",
        "I check.\n\n" + qwen("get_weather", city='def f():\n    return "<b>"\n', note="5"),
        "I check.",
        [(CALL, {"city": 'def f():\n    return "<b>"\n', "note": "5"})],
    ),
    "qwen forgot tags": (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n1\n</function>",
        "",
        [(CALL, {"city": "Paris", "days": 1})],
    ),
    "qwen Python's words": (
        "qwen3_coder",
        qwen("get_weather", city="x", exact="True") + "\n" + qwen("get_time"),
        "",
        [(CALL, {"city": "x", "exact": True}), ("get_time", {})],
    ),
    "deepseek v3": (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>" + deepseek("get_weather", '{"city": "Paris"}') + "\n"
        + deepseek("get_time", "{}") + "<｜tool▁calls▁end｜>",
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "deepseek v3.1": (
        "deepseek_v3",
        'Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Ok.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "kimi": (
        "kimi_k2",
        "Ok.<|tool_calls_section_begin|>" + kimi("get_weather", 0, '{"city": "Paris"}')
        + kimi("get_time", 1, "{}") + "<|tool_calls_section_end|>",
        "Ok.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "glm": (
        "glm45",
        "Ok.\n" + glm("get_weather", city="Paris\n", days=3, note="5") + "\n" + glm("get_time"),
        "Ok.",
        [(CALL, {"city": "Paris\n", "days": 3, "note": "5"}), ("get_time", {})],
    ),
    "glm on one line": (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a <b></arg_value></tool_call>",
        "",
        [(CALL, {"city": "a <b>"})],
    ),
    "harmony": (
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + harmony("get_weather", '{"city": "Paris"}'),
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "harmony preamble, recipient first, two": (
        "gpt-oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary"
        ' json<|message|>{"city": "Paris"}<|call|><|start|>assistant' + harmony("get_time", "{}"),
        "I look.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "harmony answer": ("gpt-oss", "<|channel|>final<|message|>Hello.", "Hello.", []),
    "pythonic": (
        "pythonic",
        "[get_weather(city=\"Paris 'x'\", days=3, exact=True, at={'lat': 1.5, 'l': [1, None]}), get_time()]",
        "",
        [(CALL, {"city": "Paris 'x'", "days": 3, "exact": True, "at": {"lat": 1.5, "l": [1, None]}}), ("get_time", {})],
    ),
    "pythonic escapes": (
        "pythonic",
        "<|python_start|>[get_weather(city='a\\'b\\n\\u00e9\\d]')]<|python_end|>",
        "",
        [(CALL, {"city": "a'b\né\\d]"})],
    ),
    "granite": (
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "granite 3.1": (
        "granite",
        '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_call>',
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "phi": (
        "phi4_mini_json",
        'Ok. functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "Ok.",
        [(CALL, {"city": "Paris"})],
    ),
    "xlam": (
        "xlam",
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "xlam behind a mark": (
        "xlam",
        'Ok.[TOOL_CALLS][{"name": "get_time", "arguments": {}}]',
        "Ok.",
        [("get_time", {})],
    ),
    "xlam an answer in JSON": ("xlam", '[{"name": "Al"}]', '[{"name": "Al"}]', []),
    "minimax": (
        "minimax_m2",
        'Ok.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Pa\nris</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="note">null</parameter>\n</invoke>\n'
        '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        "Ok.",
        [(CALL, {"city": "Pa\nris", "days": 3, "note": None}), ("get_time", {})],
    ),
    "deepseek v3.2": (
        "deepseek_v32",
        'Ok.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">5</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Ok.",
        [(CALL, {"city": "5", "days": 3})],
    ),
    "seed": (
        "seed_oss",
        "Ok.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nPa\nris\n</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        "Ok.",
        [(CALL, {"city": "\nPa\nris\n", "days": 3})],
    ),
    "functiongemma": (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Pa{,}ris<escape>,days:3,exact:true,"
        "at:{lat:1.5,l:[1,<escape>a<escape>]}}<end_function_call><start_function_call>call:get_time{}<end_function_call>",
        "",
        [(CALL, {"city": "Pa{,}ris", "days": 3, "exact": True, "at": {"lat": 1.5, "l": [1, "a"]}}), ("get_time", {})],
    ),
    "gemma 4": (
        "gemma4",
        'Ok.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:get_time{}<tool_call|>',
        "Ok.",
        [(CALL, {"city": "Paris", "days": 3}), ("get_time", {})],
    ),
    "glm 4.7": (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "command a": (
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "command a+": (
        "cohere_command4",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}\n]'
        "<|END_ACTION|>",
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "solar": (
        "solar_open2",
        "Ok.\n" + solar("get_weather", city="Pa\nris", days=3, note="null") + "\n" + solar("get_time"),
        "Ok.",
        [(CALL, {"city": "Pa\nris", "days": 3, "note": None}), ("get_time", {})],
    ),
    "solar without an end": (
        "solar_open2",
        solar("get_weather", city="a <b>").removesuffix("<|tool_call:end|>") + solar("get_time"),
        "",
        [(CALL, {"city": "a <b>"}), ("get_time", {})],
    ),
    "minimax m3": (
        "minimax_m3",
        "Ok.\n"
        + m3(
            '<tool_call>\n<invoke name="get_weather">\n<city>Pa\nris</city>\n<days>3</days>\n<at>\n<lat>1.5</lat>'
            "\n<l>1</l><l>a</l>\n</at>\n<note>null</note>\n</invoke>\n<invoke name=get_time>\n</invoke>\n</tool_call>"
        ),
        "Ok.",
        [(CALL, {"city": "Pa\nris", "days": 3, "at": {"lat": 1.5, "l": [1, "a"]}, "note": None}), ("get_time", {})],
    ),
    "kimi 3": (
        "kimi_k3",
        "Ok.<|close|>response<|sep|><|open|>tools<|sep|>"
        + kimi_3("get_weather", 1, ("city", "string", 'Pa\n"ris"'), ("days", "number", "3"), ("at", "object", "{}"))
        + kimi_3("get_time", 2)
        + "<|close|>tools<|sep|><|close|>message<|sep|>",
        "Ok.",
        [(CALL, {"city": 'Pa\n"ris"', "days": 3, "at": {}}), ("get_time", {})],
    ),
    "kimi 3 with all arguments in one element": (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
        '{"city": "Paris"}<|close|>json<|sep|><|close|>call<|sep|>' + kimi_3("get_time", 2) + "<|close|>tools<|sep|>",
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "inkling": (
        "inkling",
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Ok.<|end_message|><|message_model|>get_weather"
        '<|content_invoke_tool_json|>{"name":"get_weather","args":{"city":"Paris"}}<|end_message|><|message_model|>get_time'
        '<|content_invoke_tool_json|>{"name":"get_time","args":{}}<|end_message|><|content_model_end_sampling|>',
        "Ok.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "apertus": (
        "apertus",
        'Ok. <|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"get_time": {}}]<|tools_suffix|>',
        "Ok.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "hunyuan 3": (
        "hy_v3",
        "Ok.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time<tool_sep>\n</tool_call>\n"
        "</tool_calls>",
        "Ok.",
        [(CALL, {"city": "Paris", "days": 3}), ("get_time", {})],
    ),
    "minicpm 5": (
        "minicpm5",
        'Ok.\n<function name="get_weather"><param name="city"><![CDATA[<b> & </param>]]></param>'
        '<param name="days">3</param></function>\n<function name="get_time"></function>',
        "Ok.",
        [(CALL, {"city": "<b> & </param>", "days": 3}), ("get_time", {})],
    ),
    "gigachat 3": (
        "gigachat3",
        'Ok.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
        "Ok.",
        [(CALL, {"city": "Paris"})],
    ),
    "gigachat 3.1": (
        "gigachat3",
        '<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}',
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "mimo": (
        "mimo",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "laguna": (
        "poolside_v1",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "deepseek v4": (
        "deepseek_v4",
        'Ok.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "Ok.",
        [(CALL, {"city": "Paris"})],
    ),
    "step 3": (
        "step3",
        "Ok.<｜tool_calls_begin｜>" + step3("get_weather", city="Pa\nris", days=3) + "\n" + step3("get_time")
        + "<｜tool_calls_end｜>",
        "Ok.",
        [(CALL, {"city": "Pa\nris", "days": 3}), ("get_time", {})],
    ),
    "longcat": (
        "longcat",
        'Ok.\n<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</longcat_tool_call>\n'
        '<longcat_tool_call>\n{"name": "get_time"}\n</longcat_tool_call>',
        "Ok.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "granite 20b": (
        "granite-20b-fc",
        '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}\n<function_call> '
        '{"name": "get_time", "arguments": {}}',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "internlm": (
        "internlm",
        'Ok.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>\n',
        "Ok.",
        [(CALL, {"city": "Paris"})],
    ),
    "minimax m1": (
        "minimax",
        'Ok.\n<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '{"name": "get_time", "arguments": {}}\n</tool_calls>',
        "Ok.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "jamba": (
        "jamba",
        ' <tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Paris"}},\n'
        '    {"name": "get_time", "arguments": {}}\n]</tool_calls>',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "hunyuan": (
        "hunyuan_a13b",
        '助手：Ok.<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "at": {"a": {"b": {}}}}}]'
        "</tool_calls>",
        "Ok.",
        [(CALL, {"city": "Paris", "at": {"a": {"b": {}}}})],
    ),
    "lfm2": (
        "lfm2",
        "Ok.<|tool_call_start|>[get_weather(city='Pa\"ris', days=3), get_time()]<|tool_call_end|>",
        "Ok.",
        [(CALL, {"city": 'Pa"ris', "days": 3}), ("get_time", {})],
    ),
    "olmo 3": (
        "olmo3",
        "Ok.\n<function_calls>get_weather(city=\"Paris\", exact=true, note=null)\nget_time()</function_calls>",
        "Ok.",
        [(CALL, {"city": "Paris", "exact": True, "note": None}), ("get_time", {})],
    ),
    "pythonic a list": ("pythonic", "[1] Paris, [2] Rome (city=1)", "[1] Paris, [2] Rome (city=1)", []),
}  # fmt: skip
