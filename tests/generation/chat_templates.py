"""Chat templates in the style of published ones. Each differs in roles, whitespace, thoughts or
instructions.
"""

# The templates are data.
# ruff: noqa: E501

from __future__ import annotations

QWEN3 = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n'
                    + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""Takes thoughts out of answers before the user's last message, which it looks for."""

LLAMA3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""Strip messages and add a default system message."""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
"""Puts the instruction before the first message without stripping it, strips messages; roles
alternate.
"""

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Only user and assistant roles are supported, and must alternate') }}{% "
    "endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
"""Has no system message; roles alternate."""

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == "
    "0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') "
    "}}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% "
    "endif %}{% endfor %}"
)
"""Strips the instruction and the first message as one text, so that either loses the space of one
side.
"""

R1 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ "
    "message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}"
    "{% else %}{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<|Assistant|>' + content + "
    "'<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)
"""Takes thoughts out, and leaves the space after them; nothing stands between two messages of the
user.
"""

NEMOTRON = """
{%- set ns = namespace(thinks=true) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'user' or message['role'] == 'system' -%}
    {%- if '/think' in message['content'] -%}
      {%- set ns.thinks = true -%}
    {%- elif '/no_think' in message['content'] -%}
      {%- set ns.thinks = false -%}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages %}
  {%- set content = message['content'] %}
  {%- if message['role'] == 'assistant' -%}
    {%- if content and '</think>' in content -%}
      {%- set content = (content.split('</think>')[1] | default('', true)).strip() %}
    {%- endif -%}
    {{- '<SPECIAL_11>Assistant\n' + (content | default('', true)).strip() + '\n<SPECIAL_12>\n\n' }}
  {%- else -%}
    {{- '<SPECIAL_11>' + message['role'] | title + '\n'
        + (content | default('', true)).replace('/think', '').replace('/no_think', '').strip() + '\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<SPECIAL_11>Assistant\n' + ('<think>\n\n' if ns.thinks else '<think></think>') -}}
{%- endif -%}
"""
"""Takes what follows the first thoughts, and looks for switches in all messages of the user."""

GLM4 = """[gMASK]<sop>
{%- macro visible_text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{% set said = visible_text(m.content) -%}
{{ said }}
{{- '' if said.endswith("/nothink") else '/nothink' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set content %}{{ visible_text(m.content) }}{% endset %}
{%- if '</think>' in content %}
    {%- set content = (content.split('</think>') | last).lstrip('\n') -%}
{%- endif %}
{{ '\n<think></think>' }}
{%- if content.strip() -%}
{{ '\n' + content.strip() }}
{%- endif -%}
{%- else -%}
<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>
{%- endif -%}
"""
"""Reads messages by a macro and a block."""

SMOLLM3 = """
{%- set mode = "/think" -%}
{%- set told = "" -%}
{%- if messages[0].role == "system" -%}
    {%- if "/no_think" in messages[0].content -%}
        {%- set mode = "/no_think" -%}
    {%- elif "/think" in messages[0].content -%}
        {%- set mode = "/think" -%}
    {%- endif -%}
    {%- set told = messages[0].content.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\\nReasoning Mode: " + mode + "\\n\\n" + told + "<|im_end|>\\n" -}}
{%- for message in messages -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>user\\n" + message.content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {{ "<|im_start|>assistant\\n" + message.content.lstrip("\\n") + "<|im_end|>\\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\\n" }}
{%- endif -%}
"""
"""Reads switches in the instruction, and takes them out."""

HERMES_TOOLS = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "for each call: <tool_call>name and arguments</tool_call>{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson "
    "}}\n</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
"""A template in the form of Qwen's and Hermes'."""
LLAMA_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    "its value}.{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson '
    "}}}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
"""A template in the form of Llama 3's."""
