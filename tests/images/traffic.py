"""Request vectors without pause, from a container of the mesh's network.

Requests go by gRPC through every router and by HTTP through every edge. When standard input ends,
the results are printed as JSON. Imports only modules in our images: `shoal` and the standard
library.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import sys
import time

import numpy as np
import shoal

CALLERS = 8


async def main(model: str) -> None:
    counts = {"grpc": 0, "http": 0, "failed": 0, "wrong": 0}
    errors: list[str] = []
    slowest = 0.0
    ends = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ends.set)
    async with shoal.AsyncClient("dns:///router-headless:50051") as client:
        expected = (await client.encode(model, ["a text"])).dense
        print("ready", flush=True)

        async def by_grpc() -> None:
            nonlocal slowest
            while not ends.is_set():
                began = time.monotonic()
                try:
                    found = (await client.encode(model, ["a text"])).dense
                    counts["grpc"] += 1
                    counts["wrong"] += not np.allclose(found, expected, atol=1e-5)
                except shoal.ShoalError as error:
                    counts["failed"] += 1
                    errors.append(repr(error)[:300])
                slowest = max(slowest, time.monotonic() - began)

        async def by_http() -> None:
            while not ends.is_set():
                try:
                    found = await asyncio.to_thread(over_http, model)
                    counts["http"] += 1
                    counts["wrong"] += not np.allclose(found, expected[0], atol=1e-5)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    counts["failed"] += 1
                    errors.append(repr(error)[:300])

        await asyncio.gather(*(by_grpc() for _ in range(CALLERS)), by_http(), by_http())
    print(
        json.dumps({**counts, "slowest_seconds": round(slowest, 2), "errors": errors[:5]}),
        flush=True,
    )


def over_http(model: str) -> list[float]:
    """One connection for each request, as a Service spreads connections.

    A pod that refuses a connection or says that it is stopping is passed over: a Service would not
    have chosen it, but names of this network have the addresses of all pods that run.
    """
    body = json.dumps({"model": model, "input": "a text", "encoding_format": "float"})
    for attempt in range(100):
        if attempt:
            time.sleep(0.1)
        try:
            found = socket.getaddrinfo("edge", 8080, type=socket.SOCK_STREAM)
            connection = http.client.HTTPConnection(
                str(random.choice(found)[4][0]), 8080, timeout=60
            )
            connection.connect()
        except OSError:
            continue
        try:
            connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            reported = answer.read()
            if answer.status == 503 and b"this server is stopping" in reported:
                continue
            if answer.status != 200:
                raise ValueError(f"{answer.status} {reported[:200]!r}")
            return [float(number) for number in json.loads(reported)["data"][0]["embedding"]]
        finally:
            connection.close()
    raise OSError("no edge answered in 10 s")


asyncio.run(main(sys.argv[1]))
