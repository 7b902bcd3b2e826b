"""POST /v1/chat/completions: the way in. Its answers are formatted by chat_format."""

from starlette.requests import Request

from kilat.cluster.gateway.answer import EventStream, WholeAnswer
from kilat.cluster.gateway.chat_format import ChatStream, ChatWhole, Choice, Frame
from kilat.cluster.gateway.generation import check_prompts
from kilat.cluster.gateway.limits import read_json_body
from kilat.cluster.gateway.params import chat_params, forces_call, offered_tools
from kilat.cluster.gateway.prompt import ChatPrompt, Dialogue, PromptBuilder
from kilat.cluster.gateway.protocol import ChatRequest, parse
from kilat.cluster.gateway.serving import gateway_of
from kilat.text.message import MessageParser

# The grammar of a forced call gives {"name": ..., "parameters": ...}, which is how Llama writes calls.
FORCED_CALL_STYLE = "llama"


async def chat_completions(request: Request) -> EventStream | WholeAnswer:
    """Handler of the route."""
    gateway = gateway_of(request)
    hello, builder = gateway.admit()
    body = await read_json_body(request)
    ask = parse(body, ChatRequest)
    gateway.check_model(ask.model)
    params = chat_params(ask, vocab_size=hello.vocab_size)
    tools = offered_tools(ask)
    talk = Dialogue(
        messages=ask.messages,
        tools=tools,
        add_generation_prompt=ask.add_generation_prompt is not False,
        add_special=ask.add_special_tokens is True,
        arguments=ask.chat_template_kwargs or {},
    )
    prompt = await builder.chat(talk, size_bytes=len(body))
    check_prompts(
        [prompt.ids], max_model_len=hello.max_model_len, vocab_size=hello.vocab_size, param="messages"
    )
    generation = gateway.start(request, [prompt.ids], params, ask, prefix="chatcmpl")
    n = len(generation.samples)
    choices = [
        Choice(_parser(ask, bool(tools), builder, prompt, f"{generation.request_id}:{k}")) for k in range(n)
    ]
    frame = Frame(gateway.config.served_model_name, gateway.fingerprint, generation, builder.tokenizer)
    if ask.stream:
        include_usage = ask.stream_options is not None and bool(ask.stream_options.include_usage)
        return EventStream(gateway, generation, ChatStream(frame, choices, include_usage=include_usage))
    return WholeAnswer(
        gateway, generation, ChatWhole(frame, choices, prompt_logprobs=ask.prompt_logprobs is not None)
    )


def _parser(
    ask: ChatRequest, tools: bool, builder: PromptBuilder, prompt: ChatPrompt, seed: str
) -> MessageParser | None:
    """What finds thoughts and calls in the text of one sample; None where there cannot be any."""
    if forces_call(ask):
        return MessageParser(FORCED_CALL_STYLE, tools=True, seed=seed)
    if not builder.thinks and not (tools and builder.style):
        return None
    return MessageParser(builder.style, tools=tools, thinking=prompt.thinking, seed=seed)
