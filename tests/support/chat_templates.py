"""Chat templates with the demands of well-known families, shortened."""

from __future__ import annotations

_TURN = "<{{ m.role }}>{{ m.content }}</{{ m.role }}>"
_ALL = "{% for m in messages %}" + _TURN + "{% endfor %}"
_OPTIONAL_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
)
_ALTERNATION = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate "
    "user/assistant/user/assistant/...') }}{% endif %}"
)
_SHOWN_CALLS = (
    "{% for c in m.tool_calls %}{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception('Tool call IDs "
    "should be alphanumeric strings with length 9!') }}{% endif %}[CALL]{{ c.function.name }}#{{ c.id }}{% endfor %}"
)
_SHOWN_RESULT = (
    "{% if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}{{ raise_exception('Tool call IDs should be "
    "alphanumeric strings with length 9!') }}{% endif %}[RESULT]{{ m.content }}#{{ m.tool_call_id }}"
)

CHATML = _ALL
QWEN_3_5 = (
    "{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% elif m.role not in ['user', 'assistant', 'tool'] %}{{ raise_exception('Unexpected message role.') }}{% endif %}"
    + _TURN
    + "{% endfor %}{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}"
)
LLAMA_2 = _OPTIONAL_SYSTEM + (
    "{% for m in rest %}" + _ALTERNATION + "{% if m.role == 'user' %}[INST] {% if loop.first and system %}<<SYS>>"
    "{{ system }}<</SYS>>{% endif %}{{ m.content }} [/INST]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
GEMMA_2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}" + _ALTERNATION + _TURN + "{% endfor %}"
)
MISTRAL_SMALL = _OPTIONAL_SYSTEM + (
    "[SYSTEM]{{ system }}[/SYSTEM]{% set ns = namespace(index=0) %}{% for m in rest %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('After the optional system message, "
    "conversation roles must alternate user and assistant roles except for tool calls and results.') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}"
    + _SHOWN_CALLS
    + "{% elif m.role == 'assistant' %}{% if not m.content %}{{ raise_exception('Assistant message must have a string "
    "or a list of chunks in content or a list of tool calls.') }}{% endif %}{{ m.content }}</s>"
    "{% elif m.role == 'tool' %}"
    + _SHOWN_RESULT
    + "{% else %}{{ raise_exception('Only user and assistant roles are supported, with the exception of an initial "
    "optional system message!') }}{% endif %}{% endfor %}"
)
MISTRAL_OF_LONG_IDS = MISTRAL_SMALL.replace("|length != 9", "|length < 9").replace("length 9!", "length >= 9!")
"""vLLM's template for Mistral: it shows the last nine characters of longer ids."""
LLAMA_3_TOOLS = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls|length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<call>{{ m.content }}{{ m.tool_calls[0].id }}</call>{% else %}" + _TURN + "{% endif %}{% endfor %}"
)
GPT_OSS = (
    "{% if messages[0].role in ['developer', 'system'] %}<developer>{{ messages[0].content }}</developer>"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role in ['user', 'assistant', 'tool'] %}" + _TURN + "{% endif %}{% endfor %}"
)
"""Leaves out system turns that are not first."""
LEADING_SYSTEMS = (
    "{% set ns = namespace(is_leading=true) %}{% for m in messages %}{% if m.role != 'system' %}"
    "{% set ns.is_leading = false %}{% endif %}{% if m.role != 'system' or ns.is_leading %}"
    + _TURN
    + "{% endif %}{% endfor %}"
)
"""Shows several system turns at the beginning, and leaves out later ones."""
DEEPSEEK_V3_1 = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = ns.system + m.content + '\n\n' %}{% endif %}{% endfor %}{{ ns.system }}"
    "{% if thinking is not defined %}{% set thinking = enable_thinking if enable_thinking is defined else false %}"
    "{% endif %}{% for m in messages %}{% if m.role != 'system' %}"
    + _TURN
    + "{% endif %}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
    "{{ '<think>' if thinking else '</think>' }}"
)
"""Collects all system turns. It takes arguments of calls as text only, and does not think by default."""
WITHOUT_SYSTEM = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}" + _TURN + "{% endif %}{% endfor %}"
PARTS_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "<{{ m.role }}>{% for p in m.content if p.type is defined %}{{ p.text }}{% endfor %}</{{ m.role }}>{% endfor %}"
)

_THOUGHTS = "{% for m in messages %}" + _TURN + "{% endfor %}"
QWEN_3 = _THOUGHTS + "{{ '<think></think>' if enable_thinking is defined and enable_thinking is false else '<think>' }}"
GRANITE_3_3 = _THOUGHTS + "{{ '<think>' if thinking else '' }}"
MISTRAL_MEDIUM_3_5 = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}"
    "{{ raise_exception('reasoning_effort must be none or high') }}{% endif %}" + _THOUGHTS + "{{ reasoning_effort }}"
)
"""Takes two efforts of thinking only."""
GEMMA_3 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest if m.role != 'system' %}<{{ m.role }}>{% if loop.first %}{{ system }}{% endif %}{{ m.content }}"
    "</{{ m.role }}>{% endfor %}"
)
"""Shows the system with the first turn behind it."""
GEMMA_4 = (
    "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{% set ns = namespace(go=true) %}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name }}</call>{% endfor %}"
    "{% for t in messages[loop.index:] %}{% if t.role != 'tool' %}{% set ns.go = false %}{% elif ns.go %}"
    "{% set ns.name = t.name %}{% for c in m.tool_calls %}{% if c.id == t.tool_call_id %}"
    "{% set ns.name = c.function.name %}{% endif %}{% endfor %}"
    "{{ '<tool>' + ns.name + ':' + t.content + '</tool>' }}{% endif %}{% endfor %}{% endif %}"
    "</{{ m.role }}>{% endif %}{% endfor %}"
)
"""Shows results only directly behind their calls, and fails where it finds no name for one."""
HARMONY_CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both "
    "content and thinking in an assistant message with tool calls!') }}{% endif %}"
    "{% if m.content or m.thinking %}<analysis>{{ m.content or m.thinking }}</analysis>{% endif %}"
    "<call>{{ m.tool_calls[0].function.name }}"
    "{{ m.tool_calls[0].id }}</call>{% elif m.role in ['user', 'assistant', 'tool'] %}"
    + _TURN
    + "{% endif %}{% endfor %}"
)
"""Shows the first call of a turn, after its text or its thinking. transformers copies `reasoning` to `thinking`."""
LLAMA_3_1 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}<system>{{ system }}</system>"
    "{% if tools %}{% if not rest %}{{ raise_exception('Cannot put tools in the first user message when there is no "
    "first user message!') }}{% endif %}<tools>{{ tools[0].function.name }}</tools>{% endif %}"
    "{% for m in rest %}" + _TURN + "{% endfor %}"
)
