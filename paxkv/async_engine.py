"""An engine for asyncio."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from paxkv.engine import Engine
from paxkv.engine_checks import check_max_steps
from paxkv.request import FinishReason
from paxkv.request_state import Request


class AsyncEngine:
    """Serves the requests of one event loop: steps run in a thread while there is work.

        server = AsyncEngine(engine)
        async for tokens in server.stream(Request(prompt=[1, 2, 3], params=params)):
            print(tokens)

    Args:
        engine: Others may use it meanwhile.
        max_steps: Decode steps between two looks: how many tokens come at a time.
    """

    def __init__(self, engine: Engine, *, max_steps: int = 4) -> None:
        check_max_steps(max_steps)
        self.engine = engine
        self._max_steps = max_steps
        self._has_news: set[asyncio.Event] = set()  # of each request that is awaited
        self._driver: asyncio.Task[None] | None = None

    async def stream(self, request: Request) -> AsyncGenerator[list[int]]:
        """Adds a request, and yields its new tokens as they come.

        Leaving the loop early, or cancelling the task that runs it, aborts the request.

        Raises:
            ValueError: It can never be served, or it asks for several samples.
            RequestError: It was not served to its end, or as many requests wait as may.
        """
        if request.params.num_samples > 1:
            raise ValueError(
                f"a stream gives one sample, and {request.params.num_samples} are asked for: await "
                "serve(request)"
            )
        num_read = 0
        async with contextlib.aclosing(self._follow(request)) as news:
            async for _ in news:
                if new := request.output[num_read:]:
                    num_read += len(new)
                    yield new
        if new := request.output[num_read:]:  # another thread's steps brought the last ones
            yield new
        if request.error:
            raise request.error

    async def serve(self, request: Request) -> Request:
        """Adds a request, and returns it when it, or each of its samples, has ended.

        Cancelling aborts it.

        Raises:
            ValueError: It can never be served.
            QueueFull: As many requests wait as may.
        """
        async with contextlib.aclosing(self._follow(request)) as news:
            async for _ in news:
                pass
        return request

    async def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """Ends a request now; see `Engine.abort`. Who awaits it is told."""
        await asyncio.to_thread(self.engine.abort, request_id, reason)
        self._wake()

    async def _follow(self, request: Request) -> AsyncGenerator[None]:
        """Adds a request; yields whenever there is news of it, for the last time at its end."""
        news = asyncio.Event()
        await self._add(request)
        try:
            self._has_news.add(news)
            while request.finish_reason is None:
                self._drive()
                await news.wait()
                news.clear()
                assert self._driver is not None
                if self._driver.done() and request.finish_reason is None:
                    self._driver.result()  # raises what a step raised
                yield
        finally:
            self._has_news.discard(news)
            if request.finish_reason is None:
                await asyncio.shield(asyncio.to_thread(self.engine.abort, request.id))

    async def _add(self, request: Request) -> None:
        adding = asyncio.create_task(asyncio.to_thread(self.engine.add, request))
        try:
            await asyncio.shield(adding)
        except asyncio.CancelledError:
            await asyncio.shield(self._drop(adding, request))
            raise

    async def _drop(self, adding: asyncio.Task[int], request: Request) -> None:
        """Aborts what is still being added: the thread that does it cannot be cancelled."""
        await asyncio.wait([adding])
        if adding.exception() is None:
            await asyncio.to_thread(self.engine.abort, request.id)

    def _drive(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._steps())

    async def _steps(self) -> None:
        try:
            while self.engine.has_work:
                await asyncio.to_thread(self.engine.step, self._max_steps)
                self._wake()
        finally:
            self._wake()

    def _wake(self) -> None:
        """Has all look for news: other threads' steps bring some too, of any request."""
        for has_news in self._has_news:
            has_news.set()
