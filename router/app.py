"""The router process: its parts put together, its HTTP routes, its start and its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.routing import Route

from router.admin import Admin
from router.admission import Gate
from router.auth import RouterAuth
from router.calls import CallTable
from router.chat_template import ChatTemplate
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.openai.endpoints import GenerationEndpoint, Services, load_json
from router.openai.models import Models
from router.openai.rendering import Renderer, sampling_defaults
from router.openai.schemas import ChatRequest, CompletionRequest
from router.placement import Placement
from router.registry import Registry
from router.settings import RouterSettings
from router.tokenizer import Tokenizer
from transport import serve
from transport.errors import ConfigurationError, InvalidRequest
from transport.generation import new_generation
from transport.http import BodyLimit, add_probes, install_error_handlers, json_response
from transport.logging import setup_logging
from transport.messages import Sampling
from transport.model import model_info

log = logging.getLogger(__name__)


class Router:
    """All parts of one router. Raises ConfigurationError where the model directory is not usable."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        model = model_info(settings.model, settings.model_name)
        self.tokenizer = Tokenizer.of_model(settings.model)
        self.metrics = RouterMetrics()
        self.calls = CallTable(self.metrics)
        self.registry = Registry(settings, model, new_generation(), self.calls, self._changed)
        self.placement = Placement(self.registry, settings.prefills_per_worker)
        self.gate = Gate(settings.max_concurrent, settings.max_queued, settings.queue_timeout_s)
        self.services = Services(
            model_name=settings.model_name,
            max_choices=settings.max_choices,
            tokenizer=self.tokenizer,
            renderer=Renderer(
                self.tokenizer,
                ChatTemplate.of_model(settings.model),
                model.vocab_size,
                self.registry.limits,
                _defaults(settings),
            ),
            gate=self.gate,
            dispatcher=Dispatcher(settings, self.registry, self.placement, self.calls, self.metrics),
            metrics=self.metrics,
        )
        self.metrics.watch(
            workers=lambda: self.registry.workers,
            in_flight=lambda: self.gate.inside,
            queued=lambda: {"admission": self.gate.queued, "workers": self.placement.queued},
            calls=lambda: len(self.calls),
        )

    def _changed(self) -> None:
        self.placement.kick()

    def start(self) -> None:
        """Connect to the configured workers."""
        for url in self.settings.prefill:
            self.registry.add("prefill", url)
        for url in self.settings.decode:
            self.registry.add("decode", url)

    async def drain(self) -> None:
        """Not ready any more; returns when the last request has ended."""
        self.registry.draining = True
        while self.gate.inside or self.gate.queued:
            await asyncio.sleep(0.05)


def _defaults(settings: RouterSettings) -> dict[str, float]:
    defaults = sampling_defaults(settings.model)
    try:
        Sampling(max_tokens=1, **defaults)
    except ValidationError as error:
        raise ConfigurationError(f"{settings.model}/generation_config.json: {error.errors()[0]['msg']}") from None
    return defaults


def router_app(settings: RouterSettings) -> FastAPI:
    """The ASGI app; its `Router` is at `app.state.router`. Sessions run while its lifespan does."""
    router = Router(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        router.start()
        yield
        await router.registry.close()

    app = FastAPI(title="hawk router", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.router = router
    install_error_handlers(app)
    add_probes(app, router.registry.not_ready, router.metrics.registry)
    _openai_routes(app, router)
    _admin_routes(app, router)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
    app.add_middleware(
        RouterAuth,
        token=settings.secret,
        api_keys=[key.get_secret_value() for key in settings.api_keys],
        metrics_public=settings.metrics_public,
    )
    return app


def _openai_routes(app: FastAPI, router: Router) -> None:
    models = Models(router.settings.model_name, int(time.time()))
    for path, kind in (("/v1/chat/completions", ChatRequest), ("/v1/completions", CompletionRequest)):
        app.router.routes.append(Route(path, GenerationEndpoint(router.services, kind), methods=["POST"]))

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response(200, models.list(router.registry.limits().context))

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return json_response(200, models.get(name, router.registry.limits().context))


def _admin_routes(app: FastAPI, router: Router) -> None:
    admin = Admin(router.registry)

    @app.get("/workers")
    async def list_workers() -> Response:
        return json_response(200, admin.list())

    @app.post("/workers")
    async def add_worker(request: Request) -> Response:
        return json_response(*admin.add(load_json(await request.body())))

    @app.delete("/workers")
    async def remove_worker(request: Request) -> Response:
        url = request.query_params.get("url")
        if url is None:
            body = load_json(await request.body())
            url = body.get("url") if isinstance(body, dict) else None
        if not isinstance(url, str):
            raise InvalidRequest("url: say which worker, as ?url=… or as JSON", param="url")
        return json_response(200, admin.remove(url))


def run(settings: RouterSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigurationError when it cannot start."""
    keys = [key.get_secret_value() for key in settings.api_keys]
    setup_logging("router", settings.log_level, as_json=settings.log_json, secrets=[settings.secret, *keys])
    serve.run(_main(settings))


async def _main(settings: RouterSettings) -> None:
    listener = serve.bind(settings.host, settings.port)
    app = router_app(settings)
    await serve.serve(
        app,
        settings.host,
        settings.port,
        sock=listener,
        drain=app.state.router.drain,
        grace_s=settings.grace_s,
        max_frame_bytes=settings.max_frame_bytes,
        on_started=lambda port: log.info("%s listens on http://%s:%d", settings.name, settings.host, port),
    )
