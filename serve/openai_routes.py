"""The OpenAI routes: bodies to engine requests, deltas to response bodies, errors in OpenAI's shape.

`http_app(service)` gives a FastAPI app for one loaded model; under Ray Serve and in tests it is the same app.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException

from serve import request_log
from serve.admission import error_body
from serve.engine_requests import (
    ApiError,
    Service,
    check_characters,
    check_choices,
    check_model,
    check_token_ids,
    engine_requests,
)
from serve.generation import Generation
from serve.openapi import ANSWERS, HEALTH, REFUSED
from serve.replica import EngineError
from serve.responses import ChatShape, CompletionShape, usage
from serve.schema import ChatRequest, CompletionRequest


def http_app(service: Service) -> FastAPI:
    """The routes for one loaded model."""
    app = FastAPI(title="Domino on Ray", docs_url=None, redoc_url=None)
    add_error_handlers(app)

    @app.post("/v1/completions", responses=ANSWERS)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        check_model(service, body.model)
        check_choices(service, len(body.prompts), body.n)
        prompts = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                check_characters(service, len(prompt), "prompt")
                prompts.append(service.encode(prompt))
                await asyncio.sleep(0)  # many prompts: others get their tokens in between
            else:
                prompts.append(check_token_ids(service, prompt))
        return await answer(service, body, prompts, CompletionShape(service.vocabulary, body), http)

    @app.post("/v1/chat/completions", responses=ANSWERS)
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        check_model(service, body.model)
        check_choices(service, 1, body.n)
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        check_characters(service, sum(len(message["content"]) for message in messages), "messages")
        try:
            prompt = service.render_chat(messages, body.chat_template_kwargs.enable_thinking)
        except Exception as error:  # the chat template is foreign code; what it refuses is the client's to change
            raise ApiError(400, f"the chat template refused these messages: {error}", "messages") from error
        return await answer(service, body, [prompt], ChatShape(service.vocabulary, body), http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card(service)]}

    @app.get("/v1/models/{model:path}", responses=REFUSED)
    async def model(model: str) -> dict[str, Any]:
        check_model(service, model)
        return model_card(service)

    @app.get("/health", responses=HEALTH)
    async def health() -> Response:
        state = service.health()
        return JSONResponse(state, status_code=200 if state["status"] == "ok" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics_page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/canary")
    async def canary() -> dict[str, Any]:
        return {"replicas": await service.canary_reports()}

    return app


def add_error_handlers(app: FastAPI) -> None:
    """Every error leaves in OpenAI's shape, those of FastAPI and of unknown paths too."""

    def told(
        request: Request, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> Response:
        request_log.refused(request.headers, status, param, code)
        return JSONResponse(error_body(status, message, param, code), status)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return told(request, error.status, error.message, error.param, error.code)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = [part for part in first["loc"] if part != "body"]
        param = first.get("ctx", {}).get("param") or (str(where[0]) if where else None)
        if first["type"] == "json_invalid":
            return told(request, 400, "the request body is not valid JSON")
        message = first["msg"] if first["type"] == "invalid_parameter" else f"{param}: {first['msg']}"
        return told(request, 400, message, param)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        request_log.refused(request.headers, error.status_code, None, None)
        return JSONResponse(error_body(error.status_code, message), error.status_code, headers=error.headers)

    @app.exception_handler(EngineError)
    async def engine_error(request: Request, error: EngineError) -> Response:
        return told(request, 503, f"the engine is down: {error}", code="engine_down")

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        # Ours to repair: the traceback goes to the log, not to the client.
        return told(request, 500, f"internal error ({type(error).__name__})")


def model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.config.served_name,
        "object": "model",
        "created": service.created,
        "owned_by": "domino",
        "max_model_len": service.config.max_length,
    }


async def answer(
    service: Service,
    body: CompletionRequest | ChatRequest,
    prompts: list[list[int]],
    shape: CompletionShape | ChatShape,
    http: Request,
) -> Response:
    """Run the request, streamed or whole. Its rows are freed however this ends, a client that leaves included.

    A retry that sends the X-Request-Id of its first try gets the same drafter version while there are two. Ray Serve
    gives requests such an id, and answers have it in their headers.
    """
    try:  # refused as a parameter would be
        request_id = request_log.request_id(http.headers)
    except ValueError as error:
        raise ApiError(400, str(error), request_log.HEADER) from error
    requests, own_id = engine_requests(service, body, prompts), uuid.uuid4().hex
    generation = service.generation(requests, body.stop, request_id)
    head = {
        "id": f"{shape.id_prefix}-{own_id}",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": service.fingerprint(generation.version),
    }
    prompt_tokens = sum(map(len, prompts))
    shape.begin(requests)
    request_log.started(request_id, answers=len(requests), prompt_tokens=prompt_tokens, stream=body.stream)
    if body.stream:
        return EventStream(generation, stream_events(generation, shape, head, body, prompt_tokens))
    try:
        generation.start()
        async for delta in generation.deltas():
            shape.add(delta)
    finally:
        generation.close()
    return JSONResponse(shape.whole(head) | closing_figures(generation, prompt_tokens))


def closing_figures(generation: Generation, prompt_tokens: int) -> dict[str, Any]:
    return {"usage": usage(prompt_tokens, generation.completion_tokens), "metrics": generation.figures()}


async def stream_events(
    generation: Generation,
    shape: CompletionShape | ChatShape,
    head: dict[str, Any],
    body: CompletionRequest | ChatRequest,
    prompt_tokens: int,
) -> AsyncIterator[bytes]:
    """Server-sent events: opening chunks, a chunk per delta that shows something, usage where asked for, [DONE]."""
    try:
        for chunk in shape.opening(head):
            yield event(chunk)
        async for delta in generation.deltas():
            chunk = shape.chunk(head, delta)
            if chunk is not None:
                yield event(chunk)
    except (EngineError, ValueError) as error:  # the status line is sent; the client reads the error from the stream
        yield event(error_body(503, str(error), code="engine_down"))
        return
    if body.stream_options.include_usage:
        closing = {**head, "object": shape.chunk_object, "choices": []}
        yield event(closing | closing_figures(generation, prompt_tokens))
    yield b"data: [DONE]\n\n"


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """A streamed response that holds its rows while it is sent, and frees them however that ends.

    The requests start here and not before, so that a client which leaves in between cannot leave rows behind.
    """

    def __init__(self, generation: Generation, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._generation = generation

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            self._generation.start()
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()
