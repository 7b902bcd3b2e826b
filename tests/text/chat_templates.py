"""Chat templates in the manner of well-known models, written for these tests."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA3 = """{{- bos_token }}
{%- set ns = namespace(n=0) %}
{%- for message in messages %}
    {%- if not (message.role in ['system', 'user', 'tool'] or message.role == 'assistant') %}
        {{- raise_exception('role ' ~ message.role) }}
    {%- endif %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
    {%- if 'tool_calls' in message %}
        {%- for tool_call in message.tool_calls %}
            {{- '{"name": "' + tool_call.function.name + '", "parameters": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}' ~ ('; ' if not loop.last else '') }}
        {%- endfor %}
    {%- elif message.content is string %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
    {%- set ns.n = ns.n + 1 %}
    {%- if tools and ns.n == 1 %}
        {%- for tool in tools %}
            {{- tool | tojson(indent=4) ~ '\n\n' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\n' ~ (messages[0].content if messages[0].role == 'system' else 'You are helpful.') }}
    {{- '\n\n# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages if not (tools and loop is defined and message.role == 'system') %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content %}
        {{- '\n' + message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function if call.function is defined else call %}
        {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' ~ (call.arguments | tojson) ~ '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

THINKING = """{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == 'user' %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- if loop.index0 > ns.last %}
            {%- set content = '<think>\n' ~ thoughts ~ '\n</think>\n\n' ~ content %}
        {%- endif %}
    {%- endif %}
    {{- '[' ~ message.role | upper ~ ']' ~ content }}
    {%- generation %}{{ eos_token }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[ASSISTANT]<think>\n' }}{% endif %}"""

DATED = "Today is {{ strftime_now('%d %b %Y') }}.\n{{ messages[0].content }}"

ALL = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN, "thinking": THINKING}
