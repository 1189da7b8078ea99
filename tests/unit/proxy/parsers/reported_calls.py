"""Texts with tool calls as models really write them, from public reports about other servers; with each, the report."""

from __future__ import annotations

from typing import Any, NamedTuple

from tandem.proxy.parsers.tool_families import ToolFamilyName


def schema(**types: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}}


TOOLS: dict[str, dict[str, Any]] = {
    "Bash": schema(command="string", timeout="integer"),
    "Glob": schema(pattern="string"),
    "Write": schema(path="string", content="string"),
    "exec": schema(command="string"),
    "get_weather": schema(city="string", unit="string"),
    "get_user_info": schema(user_id="integer", special="string"),
    "get_current_traffic": schema(location="string"),
    "search": schema(query="string", tags="array", cursor=["string", "null"], safe="boolean"),
    "list-dir": schema(path="string"),
    "TodoWrite": schema(todos="array"),
    "now": schema(),
}
Call = tuple[str, Any]


class Case(NamedTuple):
    """report: repository and number of the issue or pull request. content: text that is no call."""

    family: ToolFamilyName
    report: str
    text: str
    calls: list[Call]
    content: str = ""


WEATHER: list[Call] = [("get_weather", {"city": "Paris"})]
TWO = [*WEATHER, ("get_weather", {"city": "Tokyo"})]
BASH: list[Call] = [("Bash", {"command": "echo hello", "timeout": 12000})]
CASES = [
    # ---- Qwen3-Coder
    Case(
        "qwen3_coder",
        "ollama/ollama#16686",
        "I'll use the Glob tool to list all markdown files in the current directory.\n\n<function=Glob>\n"
        "<parameter=pattern>\n*.md\n</parameter>\n</function>\n</tool_call>",
        [("Glob", {"pattern": "*.md"})],
        "I'll use the Glob tool to list all markdown files in the current directory.",
    ),
    Case(
        "qwen3_coder",
        "waybarrios/vllm-mlx#597",
        "<function=Glob><parameter=pattern>*.md</parameter></function>\n"
        "<function=Glob><parameter=pattern>*.py</parameter></function>",
        [("Glob", {"pattern": "*.md"}), ("Glob", {"pattern": "*.py"})],
    ),
    Case(
        "qwen3_coder",
        "hogeheer499-commits in ollama/ollama#17354",
        "An element is written as <function=Unknown>\n<parameter=a>\n1\n</parameter>\n</function>",
        [],
        "An element is written as <function=Unknown>\n<parameter=a>\n1\n</parameter>\n</function>",
    ),
    Case(
        "qwen3_coder",
        "ollama/ollama#17914, the last </parameter> is missing",
        "<tool_call>\n<function=Bash>\n<parameter=command>\nls -la\n</function>\n</tool_call>",
        [("Bash", {"command": "ls -la"})],
    ),
    Case(
        "qwen3_coder",
        "vllm-project/vllm#23099, a </parameter> is missing",
        "<tool_call>\n<function=Bash>\n<parameter=command>\nls -la\n<parameter=timeout>\n5\n</parameter>\n</function>\n"
        "</tool_call>",
        [("Bash", {"command": "ls -la", "timeout": 5})],
    ),
    Case(
        "qwen3_coder",
        "raullenchai/Rapid-MLX#1515, values contain the tags",
        "<tool_call>\n<function=Write>\n<parameter=content>\nA block ends with </parameter> or </tool_call> here.\n"
        "<parameter=x> too\n</parameter>\n</function>\n</tool_call>",
        [("Write", {"content": "A block ends with </parameter> or </tool_call> here.\n<parameter=x> too"})],
    ),
    Case(
        "qwen3_coder",
        "PrimeIntellect-ai/renderers#47, NVIDIA-NeMo/Nemotron#52, tetherto/qvac#2372",
        "<tool_call>\n<function=search>\n<parameter=safe>\nTrue\n</parameter>\n<parameter=cursor>\nnull\n</parameter>\n"
        "</function>\n</tool_call>",
        [("search", {"safe": True, "cursor": None})],
    ),
    # ---- Llama
    Case(
        "llama3_json",
        "vllm-project/vllm#46863",
        '{"type": "function", "name": "Bash", "parameters": {"command": "echo hello", "timeout": 12000}}',
        BASH,
    ),
    Case(
        "pythonic",
        "vllm-project/vllm#46890, JSON instead of Python, separated by commas",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}, '
        '{"type": "function", "name": "get_weather", "arguments": {"city": "Tokyo"}}',
        TWO,
    ),
    Case(
        "pythonic",
        "vllm-project/vllm#46890, a list",
        '[{"name": "get_weather", "parameters": {"city": "Paris"}}, '
        '{"name": "get_weather", "parameters": {"city": "Tokyo"}}]',
        TWO,
    ),
    Case(
        "llama3_json",
        "vllm-project/vllm#46890, a list",
        '[{"type": "function", "name": "get_weather", "arguments": {"city": "Paris"}}]',
        WEATHER,
    ),
    Case(
        "llama3_json",
        "vllm-project/vllm#11786, OpenAI's form, and one brace is missing",
        '{"type": "function", "function": {"name": "get_current_traffic", "parameters": {"location": "Sydney"}}',
        [("get_current_traffic", {"location": "Sydney"})],
    ),
    Case(
        "llama3_json",
        "vllm-project/vllm#11786, OpenAI's form with encoded arguments",
        '[{"id": "call_1", "type": "function", "function": {"name": "get_weather", '
        '"arguments": "{\\"city\\": \\"Paris\\"}"}}]',
        WEATHER,
    ),
    Case(
        "llama3_json",
        "raullenchai/Rapid-MLX#700",
        '<|python_tag|>{"name": "search", "parameters": {"query": "你好"}}',
        [("search", {"query": "你好"})],
    ),
    Case(
        "llama3_json",
        "raullenchai/Rapid-MLX#703",
        'Let me see.\n<function=get_weather>{"city": "Paris"}</function>',
        WEATHER,
        "Let me see.",
    ),
    Case("llama3_json", "sgl-project/sglang#35562", "{}", [], "{}"),
    Case("llama3_json", "sgl-project/sglang#35562", '{"a": 1} is a dict', [], '{"a": 1} is a dict'),
    Case("llama3_json", "raullenchai/Rapid-MLX#703", '{"name": "Alice"}', [], '{"name": "Alice"}'),
    Case(
        "llama3_json",
        "ollama/ollama#17616, a JSON answer",
        '[{"name": "report", "parameters": {"a": 1}}]',
        [],
        '[{"name": "report", "parameters": {"a": 1}}]',
    ),
    Case(
        "llama3_json",
        "ollama/ollama#17616, a plan in JSON",
        '{"plan": [{"name": "get_weather", "arguments": {}}]}',
        [],
        '{"plan": [{"name": "get_weather", "arguments": {}}]}',
    ),
    Case(
        "pythonic",
        "ggml-org/llama.cpp#18183, JSON in code is no call",
        'Use:\n```\n{"calls": [{"name": "get_weather", "arguments": {}}]}\n```',
        [],
        'Use:\n```\n{"calls": [{"name": "get_weather", "arguments": {}}]}\n```',
    ),
    Case(
        "pythonic",
        "mudler/LocalAI#4671",
        "[get_user_info(user_id=7890, special='black')]",
        [("get_user_info", {"user_id": 7890, "special": "black"})],
    ),
    Case(
        "pythonic",
        "vllm-project/vllm#22917, text comes first",
        'To determine the weather, I ask.\n\n[get_weather(city="Dublin, Ireland", unit="[C]")]',
        [("get_weather", {"city": "Dublin, Ireland", "unit": "[C]"})],
        "To determine the weather, I ask.",
    ),
    Case(
        "pythonic",
        "ml-explore/mlx-lm#1271, Oaklight/argo-proxy#70",
        "<|python_start|>[search(query='a', tags=[\"x\", null], safe=true, cursor=null), "
        "search(safe=False, cursor=None)]<|python_end|>",
        [
            ("search", {"query": "a", "tags": ["x", None], "safe": True, "cursor": None}),
            ("search", {"safe": False, "cursor": None}),
        ],
    ),
    Case("pythonic", "ogx-ai/ogx#1807", "[list-dir(path='/')]", [("list-dir", {"path": "/"})]),
    Case("pythonic", "a list in code", "x = [f(a=1)] is Python.", [], "x = [f(a=1)] is Python."),
    # ---- Hermes, Granite
    Case(
        "hermes",
        "ai-dynamo/dynamo#2915, no line break",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>',
        WEATHER,
    ),
    Case(
        "hermes",
        "ahwurm/localharness#104",
        '<tool_call>{"name": "get_weather", "parameters": {"city": "Paris"}}</tool_call>',
        WEATHER,
    ),
    Case(
        "hermes",
        "NousResearch/hermes-agent#22696",
        '<tool_call>{"name": "Write", "arguments": {"content": "</tool_call>"}}</tool_call>',
        [("Write", {"content": "</tool_call>"})],
    ),
    Case(
        "hermes",
        "ai-dynamo/frontend-crates#63, the end is missing",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
        WEATHER,
    ),
    Case(
        "hermes",
        "ggml-org/llama.cpp#18183",
        'In JSON: {"name": "get_weather", "arguments": {"city": "Paris"}}',
        [],
        'In JSON: {"name": "get_weather", "arguments": {"city": "Paris"}}',
    ),
    Case(
        "granite",
        "vllm-project/vllm#45216, #36827",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}\n</tool_call>',
        WEATHER,
    ),
    Case(
        "granite",
        "vllm-project/vllm#44713",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        WEATHER,
    ),
    Case(
        "granite",
        "ml-explore/mlx-lm#1264, a brace too many",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}}\n</tool_call>',
        WEATHER,
    ),
    Case(
        "granite",
        "vllm-project/vllm#35948, Granite 4 writes like Hermes, after some text",
        'I look.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n'
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Tokyo"}}</tool_call>',
        TWO,
        "I look.",
    ),
    # ---- Mistral
    Case(
        "mistral",
        "ml-explore/mlx-lm#1643",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}, '
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Tokyo\\"}", "id": "abcdefghj"}]',
        TWO,
    ),
    Case(
        "mistral",
        "ml-explore/mlx-lm#1448",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_weather[ARGS]{"city": "Tokyo"}\n\nI look.',
        TWO,
        "I look.",
    ),
    Case(
        "mistral",
        "mistralai/mistral-vibe#594, raullenchai/Rapid-MLX#579",
        '[TOOL_CALLS]Write[ARGS]{ "path": ".../test.txt", "content": "demo"}',
        [("Write", {"path": ".../test.txt", "content": "demo"})],
    ),
    Case(
        "mistral",
        "vllm-project/vllm#20028, #19425, no [ARGS], after some text",
        'I look.[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_weather{"city": "Tokyo"}',
        TWO,
        "I look.",
    ),
    # ---- Phi-4-mini
    Case(
        "phi4_mini",
        "vllm-project/vllm#48795, arrays within",
        'functools[{"name": "search", "arguments": {"tags": ["a", "b"]}}, {"name": "now", "arguments": {}}]',
        [("search", {"tags": ["a", "b"]}), ("now", {})],
    ),
    Case(
        "phi4_mini",
        "ai-dynamo/dynamo, tests of its parser: text before, line breaks, parameters",
        'I look. functools[\n  {"name": "get_weather", "parameters": {"city": "Paris"}},\n'
        '  {"name": "get_weather", "arguments": {"city": "Tokyo"}}\n]',
        TWO,
        "I look.",
    ),
    Case(
        "phi4_mini",
        "ai-dynamo/dynamo, tests of its parser: no brackets",
        'functools{"name": "get_weather","arguments":{"city":"Paris"}}',
        WEATHER,
    ),
    Case(
        "phi4_mini",
        "vllm-project/vllm#14682, the form that the prompt of the report asks for",
        '<|tool_calls|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_calls|>',
        WEATHER,
    ),
    Case(
        "phi4_mini",
        "the form of Phi-4-mini's own chat template",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
        WEATHER,
    ),
]
