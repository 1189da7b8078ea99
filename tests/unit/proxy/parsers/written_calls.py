"""What models of each family write for two calls, with text before them where the format allows it."""

from __future__ import annotations

import json

from tandem.proxy.parsers.tool_families import ToolFamilyName

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    },
    "now": {"type": "object", "properties": {}},
}
A = {"city": 'São "Paulo"\n\\', "days": 3, "exact": True}
A_JSON = json.dumps(A, ensure_ascii=False)
KIMI_IDS = ["functions.get_weather:0", "functions.now:1"]
# Calls of get_weather(**A) and now().
WRITTEN: dict[str, tuple[ToolFamilyName, str]] = {
    "hermes": (
        "hermes",
        f'Hm.\n<tool_call>\n{{"name": "get_weather", "arguments": {A_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "qwen3_coder",
        f"Hm.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n{A['city']}\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "glm45": (
        "glm45",
        f"Hm.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{A['city']}</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    "llama3_json": (
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {A_JSON}}}; {{"name": "now", "parameters": {{}}}}',
    ),
    "llama4_pythonic": (
        "pythonic",
        "<|python_start|>[get_weather(city='São \"Paulo\"\\n\\\\', days=3, exact=True), now()]",
    ),
    "mistral_list": (
        "mistral",
        f'Hm.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {A_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    "mistral": ("mistral", f"Hm.[TOOL_CALLS]get_weather[ARGS]{A_JSON}[TOOL_CALLS]now[ARGS]{{}}"),
    "deepseek_v3": (
        "deepseek_v3",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{A_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "deepseek_v31",
        f"Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{A_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "kimi_k2",
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{A_JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    "granite": (
        "granite",
        f'Hm.<|tool_call|>[{{"name": "get_weather", "arguments": {A_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    "granite4": (
        "granite",
        f'Hm.\n<tool_call>\n{{"name": "get_weather", "arguments": {A_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "openai": (
        "openai",
        "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{A_JSON}<|call|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}",
    ),
    "openai_recipient_first": (
        "openai",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{A_JSON}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
    ),
    "hermes_arguments_first": (
        "hermes",
        f'Hm.\n<tool_call>\n{{"arguments": {A_JSON}, "name": "get_weather"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
    ),
    "deepseek_v32": (
        "deepseek_v32",
        'Hm.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{A["city"]}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    "deepseek_v4": (
        "deepseek_v4",
        'Hm.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{A["city"]}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    ),
    "step3": (
        "step3",
        "Hm.\n<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        f'<steptml:invoke name="get_weather">\n<steptml:parameter name="city">{A["city"]}</steptml:parameter>\n'
        '<steptml:parameter name="days">3</steptml:parameter>\n'
        '<steptml:parameter name="exact">true</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">\n</steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>",
    ),
    "step3_separated": (
        "step3",
        'Hm.<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="get_weather">'
        f'<steptml:parameter name="city">{A["city"]}</steptml:parameter><steptml:parameter name="days">3'
        '</steptml:parameter><steptml:parameter name="exact">true</steptml:parameter></steptml:invoke>'
        '<｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜><steptml:invoke name="now"></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>",
    ),
    "minimax_m2": (
        "minimax_m2",
        'Hm.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        f'<parameter name="city">{A["city"]}</parameter>\n<parameter name="days">3</parameter>\n'
        '<parameter name="exact">true</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    "dots": (
        "dots",
        'Hm.\n<dots_function_call>\n<invoke name="get_weather">\n'
        f'<parameter name="city">{A["city"]}</parameter>\n<parameter name="days">3</parameter>\n'
        '<parameter name="exact">true</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</dots_function_call>",
    ),
    "seed_oss": (
        "seed_oss",
        f"Hm.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>{A['city']}</parameter>\n"
        "<parameter=days>3</parameter>\n<parameter=exact>true</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    ),
    "hunyuan_v3": (
        "glm45",
        f"Hm.\n<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>{A['city']}"
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true"
        "</arg_value>\n</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>",
    ),
    "glm4": ("glm4", f"\nget_weather\n{A_JSON}<|assistant|>now\n{{}}"),
    "gemma4": (
        "gemma4",
        f'Hm.<|tool_call>call:get_weather{{city:<|"|>{A["city"]}<|"|>,days:3,exact:true}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
    ),
    "functiongemma": (
        "functiongemma",
        f"Hm.<start_function_call>call:get_weather{{city:<escape>{A['city']}<escape>,days:3,exact:<escape>true<escape>}}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
    ),
    "cohere": (
        "cohere",
        f'Hm.<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {A_JSON}}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    ),
    "cohere_plus": (
        "cohere",
        'Hm.\nAction: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": '
        f"{A_JSON}\n    }},\n"
        '    {\n        "tool_name": "now",\n        "parameters": {}\n    }\n]```',
    ),
    "apertus": (
        "apertus",
        f'Hm.<|tools_prefix|>[{{"get_weather": {A_JSON}}}, {{"now": {{}}}}]<|tools_suffix|>',
    ),
    "internlm": (
        "internlm",
        f'Hm.<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {A_JSON}}}<|action_end|>\n'
        '<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}<|action_end|>',
    ),
    "gigachat3": (
        "gigachat3",
        f'Hm.<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "get_weather", "arguments": {A_JSON}}}'
        '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "now", "arguments": {}}<|message_sep|>\n\n',
    ),
    "gigachat3_token": (
        "gigachat3",
        f'Hm.<|function_call|>{{"name": "get_weather", "arguments": {A_JSON}}}<|message_sep|>\n\n'
        '<|function_call|>{"name": "now", "arguments": {}}',
    ),
    "nemotron_nano_v2": (
        "nemotron_nano_v2",
        f'Hm.\n\n<TOOLCALL>[{{"name": "get_weather", "arguments": {A_JSON}}}, {{"name": "now", "arguments": {{}}}}]'
        "</TOOLCALL>",
    ),
    "longcat": (
        "longcat",
        f'Hm.\n<longcat_tool_call>\n{{"name": "get_weather", "arguments": {A_JSON}}}\n</longcat_tool_call>\n'
        '<longcat_tool_call>\n{"name": "now", "arguments": {}}\n</longcat_tool_call>',
    ),
    "minimax_m1": (
        "minimax_m1",
        f'Hm.\n<tool_calls>\n{{"name": "get_weather", "arguments": {A_JSON}}}\n{{"name": "now", "arguments": {{}}}}\n'
        "</tool_calls>",
    ),
    "hunyuan_a13b": (
        "hunyuan_a13b",
        f'Hm.<tool_calls>[{{"name": "get_weather", "arguments": {A_JSON}}},{{"name": "now", "arguments": {{}}}}]'
        "</tool_calls>",
    ),
    "jamba": (
        "jamba",
        f'Hm.<tool_calls>[\n    {{"name": "get_weather", "arguments": {A_JSON}}},\n'
        '    {"name": "now", "arguments": {}}\n]</tool_calls>',
    ),
    "lfm2": (
        "lfm2",
        "Hm.<|tool_call_start|>[get_weather(city='São \"Paulo\"\\n\\\\', days=3, exact=True), now()]<|tool_call_end|>",
    ),
    "lfm2_json": (
        "lfm2",
        f'Hm.<|tool_call_start|>[{{"name": "get_weather", "arguments": {A_JSON}}}, '
        '{"name": "now", "arguments": {}}]<|tool_call_end|>',
    ),
    "minicpm3": (
        "lfm2",
        'Hm.\n<|tool_call_start|>\n```python\nget_weather(city="São \\"Paulo\\"\\n\\\\",days=3,exact=true)\n'
        "now()\n```\n<|tool_call_end|>",
    ),
    "olmo3": (
        "olmo3",
        "Hm.\n<function_calls>\nget_weather(city='São \"Paulo\"\\n\\\\', days=3, exact=true)\nnow()\n</function_calls>",
    ),
    "granite_20b_fc": (
        "granite_20b_fc",
        f'Hm.\n<function_call> {{"name": "get_weather", "arguments": {A_JSON}}}\n'
        '<function_call> {"name": "now", "arguments": {}}',
    ),
    "phi4_mini": (
        "phi4_mini",
        f'Hm. functools[{{"name": "get_weather", "arguments": {A_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    "phi4_mini_tags": (
        "phi4_mini",
        f'Hm.<|tool_call|>{{"name": "get_weather", "arguments": {A_JSON}}}<|/tool_call|>'
        '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>',
    ),
    "xlam": (
        "xlam",
        f'[{{"name": "get_weather", "arguments": {A_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    "xlam_fence": (
        "xlam",
        f'Hm.\n```json\n[{{"name": "get_weather", "arguments": {A_JSON}}}, {{"name": "now", "arguments": {{}}}}]\n```',
    ),
    "openai_bare_names": (
        "openai",
        f"<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=get_weather "
        f"<|constrain|>json<|message|>{A_JSON}<|call|><|start|>assistant to=now<|channel|>commentary<|message|>{{}}",
    ),
    "openai_bare_name_first": (
        "openai",
        f" to=get_weather<|channel|>commentary json<|message|>{A_JSON}<|call|>"
        "<|start|>assistant to=now<|channel|>commentary json<|message|>{}",
    ),
}


# Tokens that some tokenisers have for parts of a format.
ADDED: dict[ToolFamilyName, tuple[str, ...]] = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "openai": ("<|channel|>", "<|message|>", "<|constrain|>"),
    "granite": ("<|tool_call|>",),
    "deepseek_v32": ("｜DSML｜",),
    "deepseek_v4": ("｜DSML｜",),
    "step3": (
        "<｜tool_calls_begin｜>",
        "<｜tool_call_begin｜>",
        "<｜tool_sep｜>",
        "<｜tool_call_end｜>",
        "<｜tool_calls_end｜>",
    ),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "internlm": ("<|action_start|>", "<|action_end|>", "<|plugin|>"),
    "gigachat3": ("<|function_call|>", "<|message_sep|>"),
    "nemotron_nano_v2": ("<TOOLCALL>", "</TOOLCALL>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
}


# Arguments that are not written as JSON.
ARGUMENTS: dict[ToolFamilyName, str] = {
    "qwen3_coder": "<parameter=days>\n3\n</parameter>\n",
    "glm45": "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n",
    "pythonic": "days=3",
    "lfm2": "days=3",
    "olmo3": "days=3",
    "gemma4": "days:3}",
    "functiongemma": "days:3}",
    "seed_oss": "<parameter=days>3</parameter>\n",
    "minimax_m2": '<parameter name="days">3</parameter>\n',
    "dots": '<parameter name="days">3</parameter>\n',
    "step3": '<steptml:parameter name="days">3</steptml:parameter>\n',
    "deepseek_v32": '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n',
    "deepseek_v4": '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n',
}
