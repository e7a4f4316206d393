"""Fetch many small things from one server, without waiting for each: the example of the how-to."""

from __future__ import annotations

import sys
from typing import Any

import treq.client
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import react

from pipegrid.http11 import PipelinedAgent


async def fetch_all(reactor: Any, urls: list[str]) -> list[bytes]:
    """Return the bodies, in the order of the URLs."""
    agent = PipelinedAgent(reactor)
    client = treq.client.HTTPClient(agent)

    async def fetch(url: str) -> bytes:
        response = await client.get(url, reactor=reactor)
        body: bytes = await response.content()
        return body

    try:
        return await gatherResults([Deferred.fromCoroutine(fetch(url)) for url in urls])
    finally:
        await agent.close()


async def main(reactor: Any) -> None:
    """Print the size of everything named on the command line."""
    urls = sys.argv[1:]
    for url, body in zip(urls, await fetch_all(reactor, urls), strict=True):
        print(f"{len(body):10d} {url}")


if __name__ == "__main__":
    react(lambda reactor: Deferred.fromCoroutine(main(reactor)))
