"""What is served here, and its tokenizer: /v1/models, /tokenize, /detokenize."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kilat.base.errors import RequestError
from kilat.cluster.gateway.errors import json_response
from kilat.cluster.gateway.limits import read_json_body
from kilat.cluster.gateway.prompt import Dialogue
from kilat.cluster.gateway.protocol import DetokenizeRequest, TokenizeRequest, parse
from kilat.cluster.gateway.serving import Gateway, gateway_of


def _card(gateway: Gateway) -> dict[str, Any]:
    hello = gateway.fleet.hello
    return {
        "id": gateway.config.served_model_name,
        "object": "model",
        "created": gateway.started_s,
        "owned_by": "kilat",
        "max_model_len": hello.max_model_len if hello is not None else None,
    }


async def list_models(request: Request) -> Response:
    """The one model of this server."""
    return json_response({"object": "list", "data": [_card(gateway_of(request))]})


async def get_model(request: Request) -> Response:
    """One model by name."""
    gateway = gateway_of(request)
    gateway.check_model(request.path_params["model_id"])
    return json_response(_card(gateway))


async def tokenize(request: Request) -> Response:
    """Token ids of a text or of a rendered conversation, in vLLM's shape."""
    gateway = gateway_of(request)
    hello, builder = gateway.admit()
    body = await read_json_body(request)
    ask = parse(body, TokenizeRequest)
    gateway.check_model(ask.model)
    if (ask.prompt is None) == (ask.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if ask.prompt is not None:
        ids = (await builder.texts([ask.prompt], add_special=ask.add_special_tokens is not False))[0]
    else:
        talk = Dialogue(
            messages=ask.messages or [],
            tools=ask.tools or [],
            add_generation_prompt=ask.add_generation_prompt is not False,
            add_special=ask.add_special_tokens is True,
            arguments=ask.chat_template_kwargs or {},
        )
        ids = (await builder.chat(talk, size_bytes=len(body))).ids
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": hello.max_model_len, "tokens": ids}
    if ask.return_token_strs:
        answer["token_strs"] = [builder.tokenizer.token_str(i) for i in ids]
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included, in vLLM's shape."""
    gateway = gateway_of(request)
    hello, builder = gateway.admit()
    ask = parse(await read_json_body(request), DetokenizeRequest)
    gateway.check_model(ask.model)
    bad = next((i for i in ask.tokens if not 0 <= i < hello.vocab_size), None)
    if bad is not None:
        raise RequestError(f"tokens has the id {bad}, allowed 0 to {hello.vocab_size - 1}", param="tokens")
    text = await builder.run(
        len(ask.tokens), lambda: builder.tokenizer.decode(ask.tokens, skip_special=False)
    )
    return json_response({"prompt": text})
