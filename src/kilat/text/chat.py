"""Messages and tools of a chat request, checked, in the form that chat templates are written for.

Accepted is what OpenAI's API accepts of text: roles system, developer, user, assistant and tool; content as a string or a list of
text parts; tool calls and their results. Fields without a meaning here are left out.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from kilat.base.errors import LimitError, RequestError

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH: Final = 64


def check_messages(messages: object, *, keep_developer: bool = False) -> list[dict[str, Any]]:
    """Copy of ``messages`` for a template. Text parts are joined by newlines; arguments of tool calls become objects; a ``developer``
    message is a ``system`` message unless ``keep_developer``. Raises RequestError naming the message at fault."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(
            f"messages is {_kind(messages)}, wanted a list of at least one message", param="messages"
        )
    return [_message(message, f"messages[{n}]", keep_developer) for n, message in enumerate(messages)]


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """Copy of ``tools``: None, or a list of function tools as OpenAI's API has them. Raises RequestError."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise RequestError(f"tools is {_kind(tools)}, wanted a list of functions", param="tools")
    for n, tool in enumerate(tools):
        where = f"tools[{n}]"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise RequestError(
                f'{where} is not {{"type": "function", ...}}, which is all that is supported', param="tools"
            )
        function = tool.get("function")
        if not isinstance(function, dict):
            raise RequestError(f"{where}.function is {_kind(function)}, wanted an object", param="tools")
        name = _string(function.get("name"), f"{where}.function.name")
        parameters = function.get("parameters")
        if not name or not (parameters is None or isinstance(parameters, dict)):
            raise RequestError(
                f"{where}.function needs a name, and parameters that are a JSON schema", param="tools"
            )
    return [plain(tool, f"tools[{n}]") for n, tool in enumerate(tools)]


def plain(value: object, where: str, depth: int = 0) -> Any:
    """Copy of ``value`` made of plain JSON types only. Raises RequestError for any other type, LimitError when it is nested too deep."""
    if depth > MAX_DEPTH:
        raise LimitError(f"{where} is nested more than {MAX_DEPTH} levels deep", param=_param(where))
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, dict):
        return {_string(k, f"a key of {where}"): plain(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where, depth + 1) for item in value]
    raise RequestError(f"{where} holds {_kind(value)}, wanted JSON", param=_param(where))


def _message(message: object, where: str, keep_developer: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{where} is {_kind(message)}, wanted an object", param="messages")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role is {role!r:.50}, allowed are {', '.join(ROLES)}", param="messages")
    made: dict[str, Any] = {"role": "system" if role == "developer" and not keep_developer else role}
    if message.get("content") is not None:
        made["content"] = _content(message["content"], f"{where}.content")
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    for name, value in (
        ("reasoning_content", reasoning),
        ("name", message.get("name")),
        ("tool_call_id", message.get("tool_call_id")),
    ):
        if value is not None:
            made[name] = _string(value, f"{where}.{name}")
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise RequestError(f"{where} has tool_calls, which only an assistant's message has", param="messages")
    if calls:
        made["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if "content" not in made and not calls:
        needs = "content or tool_calls" if role == "assistant" else "content"
        raise RequestError(f"{where} has no {needs}", param="messages")
    return made


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} is {_kind(content)}, wanted a string or a list of text parts", param="messages"
        )
    texts = []
    for n, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            got = f"of type {kind!r:.50}" if isinstance(part, dict) else _kind(part)
            raise RequestError(f"{where}[{n}] is {got}: only text parts are supported", param="messages")
        texts.append(_string(part.get("text"), f"{where}[{n}].text"))
    return "\n".join(texts)


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} is {_kind(calls)}, wanted a list", param="messages")
    made = []
    for n, call in enumerate(calls):
        here = f"{where}[{n}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RequestError(f"{here}.function is {_kind(function)}, wanted an object", param="messages")
        name = _string(function.get("name"), f"{here}.function.name")
        arguments = _arguments(function.get("arguments"), f"{here}.function.arguments")
        made.append({"type": "function", "function": {"name": name, "arguments": arguments}})
        if call.get("id") is not None:
            made[-1] = {"id": _string(call["id"], f"{here}.id"), **made[-1]}
    return made


def _arguments(arguments: object, where: str) -> dict[str, Any]:
    """The object that the arguments are; OpenAI's API has them as JSON text, templates want the object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as e:
            raise RequestError(f"{where} is not JSON: {e}", param="messages") from e
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} is {_kind(arguments)}, wanted a JSON object", param="messages")
    made: dict[str, Any] = plain(arguments, where)
    return made


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} is {_kind(value)}, wanted a string", param=_param(where))
    return str(value)


def _param(where: str) -> str:
    return where.removeprefix("a key of ").partition("[")[0].partition(".")[0]


def _kind(value: object) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
