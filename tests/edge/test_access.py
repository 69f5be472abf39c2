"""Hosts and pages that may use the console."""

from __future__ import annotations

import pytest

from services.edge.console.access import check_host, check_page, origin_name
from services.edge.messages.base import HttpError
from services.edge.settings import Settings
from tests.edge.test_console import PUBLIC


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:9",
        "localhost:8080",
        "[::1]:8080",
        "LOCALHOST",
        "mesh.example:443",
        "localhost.",
    ],
)
def test_own_hosts_are_accepted(host: str) -> None:
    check_host({"host": host}, {"mesh.example"})


@pytest.mark.parametrize(
    "host",
    [
        *(
            "",
            "evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "localhost.evil.example:80",
            "[::2]",
            "0x7f.1",
        ),
        *("[::1].evil.com", "[::1]evil.com:80", "127.0.0.1:80:80"),
    ],
)
def test_foreign_hosts_are_refused(host: str) -> None:
    with pytest.raises(HttpError) as caught:
        check_host({"host": host}, {"mesh.example"})
    assert caught.value.status == 421


@pytest.mark.parametrize(
    ("headers", "is_ours"),
    [
        ({"x-shoal-console": "1"}, True),
        (
            {
                "x-shoal-console": "1",
                "origin": "http://127.0.0.1:8080",
                "sec-fetch-site": "same-origin",
            },
            True,
        ),
        ({"x-shoal-console": "1", "origin": "HTTP://127.0.0.1:8080"}, False),
        ({"x-shoal-console": "1", "origin": "http://127.0.0.1:8081"}, False),
        ({"x-shoal-console": "1", "origin": "null"}, False),
        (
            {
                "x-shoal-console": "1",
                "origin": "https://evil.example",
                "sec-fetch-site": "cross-site",
            },
            False,
        ),
        ({"x-shoal-console": "1", "sec-fetch-site": "same-site"}, False),
        ({"origin": "http://127.0.0.1:8080"}, False),
        ({}, False),
    ],
)
def test_requests_of_other_pages_are_recognised_by_their_headers(
    headers: dict[str, str], is_ours: bool
) -> None:
    given = {"host": "127.0.0.1:8080", **headers}
    if is_ours:
        check_page(given)
        return
    with pytest.raises(HttpError) as caught:
        check_page(given)
    assert caught.value.status == 403


@pytest.mark.parametrize(
    ("host", "origin", "site", "is_ours"),
    [
        ("edge:8080", "https://mesh.example", "same-origin", True),
        ("edge:8080", "https://ops.example:8443", "same-origin", True),
        ("edge:8080", None, "same-origin", True),
        ("127.0.0.1:8080", "https://mesh.example", "same-origin", True),
        (
            "127.0.0.1:8080",
            "http://127.0.0.1:8080",
            "same-origin",
            True,
        ),  # a tunnel, past the proxy
        ("edge:8080", "http://mesh.example", "same-origin", False),
        ("edge:8080", "https://mesh.example:443", "same-origin", False),
        ("edge:8080", "https://MESH.example", "same-origin", False),
        ("edge:8080", "https://mesh.example.evil.example", "same-origin", False),
        ("edge:8080", "https://ops.example", "same-origin", False),
        ("edge:8080", "http://edge:8080", "same-origin", False),
        ("mesh.example", "http://mesh.example", "same-origin", False),
        ("edge:8080", "null", "same-origin", False),
        ("edge:8080", "https://mesh.example", "same-site", False),
    ],
)
def test_listed_origins_are_accepted_behind_a_proxy(
    host: str, origin: str | None, site: str, is_ours: bool
) -> None:
    given = {"host": host, "x-shoal-console": "1", "sec-fetch-site": site} | (
        {"origin": origin} if origin else {}
    )
    if is_ours:
        check_page(given, PUBLIC)
        return
    with pytest.raises(HttpError) as caught:
        check_page(given, PUBLIC)
    assert caught.value.status == 403


def test_origins_add_their_names_to_the_hosts() -> None:
    settings = Settings.from_env({"SHOAL_CONSOLE_ORIGINS": ", ".join(PUBLIC) + ","})
    assert settings.console_origins == PUBLIC
    assert [origin_name(origin) for origin in PUBLIC] == ["mesh.example", "ops.example"]
