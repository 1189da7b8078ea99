"""Reported calls of models that mark them with tokens of their own, in the form of `reported_calls.py`."""

from __future__ import annotations

from tests.unit.proxy.parsers.reported_calls import TWO, WEATHER, Case

SPECIAL_CASES = [
    # ---- DeepSeek
    Case(
        "deepseek_v3",
        "ai-dynamo/dynamo#10133",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        WEATHER,
    ),
    Case(
        "deepseek_v31",
        "ai-dynamo/dynamo#10133",
        'Hm.<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        WEATHER,
        "Hm.",
    ),
    Case(
        "deepseek_v3",
        "vllm-project/vllm#48367",
        "<｜tool▁calls▁begin｜>I cannot.<｜tool▁calls▁end｜>",
        [],
        "<｜tool▁calls▁begin｜>I cannot.<｜tool▁calls▁end｜>",
    ),
    Case(
        "deepseek_v3",
        "sgl-project/sglang#5224, the marker repeated without end",
        "<｜tool▁calls▁begin｜>" * 5 + "MMMM",
        [],
        "<｜tool▁calls▁begin｜>" * 5 + "MMMM",
    ),
    Case(
        "deepseek_v3",
        "sgl-project/sglang#5224, a line break between two calls",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```'
        '<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Tokyo"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        TWO,
    ),
    Case(
        "deepseek_v31",
        "raullenchai/Rapid-MLX#795, R1-0528 writes as V3 does, with line breaks around each marker",
        "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁calls▁end｜>',
        WEATHER,
    ),
    Case(
        "deepseek_v31",
        "verl-project/verl#7635, one section per call, and a code fence in the arguments",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>Write<｜tool▁sep｜>"
        '{"content": "```json\\n{}\\n```"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        [("Write", {"content": "```json\n{}\n```"}), *WEATHER],
    ),
    # ---- GLM
    Case(
        "glm45",
        "vllm-project/vllm#49248, <arg_value> is missing",
        "<tool_call>search<arg_key>query</arg_key>how many vacation days left</arg_value></tool_call>",
        [("search", {"query": "how many vacation days left"})],
    ),
    Case(
        "glm45",
        "vllm-project/vllm#54971, a tag too many",
        "<tool_call>list-dir<arg_key>path</arg_key></arg_key><arg_value>/tmp/x</arg_value></tool_call>",
        [("list-dir", {"path": "/tmp/x"})],
    ),
    Case(
        "glm45",
        "local-inference-lab/vllm#639, values contain the tags",
        "<tool_call>Write\n<arg_key>content</arg_key>\n<arg_value>a </tool_call> b </arg_value> c <tool_call>"
        "</arg_value>\n</tool_call>",
        [("Write", {"content": "a </tool_call> b </arg_value> c <tool_call>"})],
    ),
    Case(
        "glm45",
        "Blaizzy/mlx-vlm#2207, the zip code stays a string; antirez/ds4#569, other types",
        "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>10001</arg_value>\n<arg_key>tags</arg_key>\n"
        "<arg_value>[]</arg_value>\n<arg_key>safe</arg_key>\n<arg_value>true</arg_value>\n<arg_key>cursor</arg_key>\n"
        "<arg_value>null</arg_value>\n</tool_call>",
        [("search", {"query": "10001", "tags": [], "safe": True, "cursor": None})],
    ),
    Case("glm45", "Blaizzy/mlx-vlm#2207", '<tool_call>get_weather\n{"city": "Paris"}\n</tool_call>', WEATHER),
    Case(
        "glm45",
        "JustVugg/colibri#505, the end is missing",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_cal",
        WEATHER,
    ),
    # ---- Kimi
    Case(
        "kimi_k2",
        "ggml-org/llama.cpp#17376, singular marker",
        "<|tool_call_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_section_end|>',
        WEATHER,
    ),
    Case(
        "kimi_k2",
        "sgl-project/sglang#21377",
        '<|tool_calls_section_begin|><|tool_call_begin|>functionsexec5<|tool_call_argument_begin|>{"command": "ls"}'
        '<|tool_call_end|><|tool_call_begin|>functions.exec6<|tool_call_argument_begin|>{"command": "pwd"}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [("exec", {"command": "ls"}), ("exec", {"command": "pwd"})],
    ),
    Case(
        "kimi_k2",
        "MoonshotAI/Kimi-K2#26, encoded arguments",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.TodoWrite:1<|tool_call_argument_begin|>"
        '"{\\"todos\\": [{\\"id\\": \\"a\\"}]}"<|tool_call_end|><|tool_calls_section_end|>',
        [("TodoWrite", {"todos": [{"id": "a"}]})],
    ),
    # ---- GPT-OSS
    Case(
        "openai",
        "waybarrios/vllm-mlx#562, a call in the channel of the thinking",
        "<|channel|>analysis<|message|>We need to run search.<|end|><|start|>assistant<|channel|>analysis "
        'to=functions.search code<|message|>{"query": "x"}<|call|>',
        [("search", {"query": "x"})],
    ),
    Case(
        "openai",
        "ggml-org/llama.cpp#15181, the recipient follows the role",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"city": "Paris"}',
        WEATHER,
    ),
    Case(
        "openai",
        "lmstudio-ai/lmstudio-bug-tracker#942, no space before <|constrain|>",
        '<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{"city": "Paris"}',
        WEATHER,
    ),
]
