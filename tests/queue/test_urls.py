"""Redis' URL, however it is written: it is taken or refused in words, and its password is nowhere
to be read.
"""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from libs.errors import InvalidInput
from libs.queue import connect
from libs.queue.connection.urls import SentinelUrl, without_password
from services.router.settings import Settings as RouterSettings
from services.scheduler.settings import Settings as SchedulerSettings

SECRET = "S3CRET"
ODD = some.sampled_from(
    [
        "",
        "/",
        "?",
        "#",
        "@",
        ":",
        "%",
        "[",
        "]",
        "%00",
        " ",
        "\n",
        "\t",
        "\\",
        "&",
        "=",
        "é",
        "\u212a",
        "//",
        "0",
        "::1",
        "a",
    ]
)
BESIDE = some.lists(ODD, max_size=3).map("".join)
PIECES = some.one_of(
    BESIDE,
    some.sampled_from(
        [
            "redis",
            "rediss",
            "unix",
            "://",
            "user",
            "localhost",
            "6379",
            "/0",
            "?db=",
            "&password=",
            "?host=",
            "?ssl_ca_certs=",
        ]
    ),
    some.sampled_from(["+sentinel", "h:1,h:2", "/mymaster", "&sentinel_username=", ","]),
    some.just("+cluster"),
)
URLS = some.one_of(
    some.builds(
        lambda scheme, user, before, after, host, tail: (
            f"{scheme}://{user}:{before}{SECRET}{after}@{host}{tail}"
        ),
        some.sampled_from(
            [
                *("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "http"),
                *("redis+cluster", "rediss+cluster"),
            ]
        ),
        BESIDE,
        BESIDE,
        BESIDE,
        some.sampled_from(
            [
                "localhost",
                "h:1",
                "[::1]:6379",
                "h:x",
                "",
                "127.0.0.1:99999",
                "[",
                "h:1,h:2",
                "a,[::1]:1,b",
                "h,,h",
                "h:x,h",
            ]
        ),
        some.one_of(
            BESIDE,
            some.sampled_from(
                ["/0", "/x", "?db=1", "?db=x", "?foo=1", "?max_connections=2", "/run/redis.sock"]
            ),
            some.sampled_from(
                [
                    "/mymaster",
                    "/mymaster/0",
                    "/mymaster/x",
                    "/my master",
                    "/m?host=h",
                    "/m?sentinel_username=x",
                ]
            ),
        ),
    ),
    some.builds(
        lambda parts, rest: "".join([*parts, SECRET, *rest]),
        some.lists(PIECES, max_size=6),
        some.lists(PIECES, max_size=6),
    ),
)


def tried(url: str) -> list[str]:
    """Return every text that mentions the URL; empty for one that is accepted silently."""
    reported = []
    for read in (RouterSettings.from_env, SchedulerSettings.from_env):
        try:
            settings = read({"SHOAL_REDIS_URL": url, "SHOAL_ALLOW_INSECURE": "1"})
        except InvalidInput as error:
            reported += [
                str(error),
                repr(error),
                error.message,
                repr(error.__cause__),
                repr(error.__context__ or ""),
            ]
        else:
            reported += [repr(settings), str(settings.describe())]
    try:
        reported.append(repr(connect(url)))
    except InvalidInput as error:
        reported += [str(error), repr(error.__cause__)]
    return reported


@given(URLS)
@example(f"redis://:{SECRET}/x@h")
@example(f"redis://:{SECRET}@[h")
@example(f"redis://h:{SECRET}")
@example(f"redis://:a/{SECRET}@h")
@example(f"redis:{SECRET}@h")
@example(f"unix://:a/{SECRET}@/run/redis.sock")
@example(f"unix:///:{SECRET}@localhost")
@example(f"redis://:{SECRET}#@h")
@example(f"redis://:{SECRET}@h?max_connections=2")
@example(f"redis://:{SECRET}@h/0?db={SECRET}")
@example(f"redis://h?password={SECRET}")
@example(f"redis+sentinel://:{SECRET}@h:1,h:2")
@example(f"redis+sentinel://:{SECRET}/x@h:1,h:2/mymaster")
@example(f"redis+sentinel://:{SECRET}@h:1,[h/mymaster/0")
@example(f"rediss+sentinel://:{SECRET}@h:x/mymaster/0")
@example(f"redis+sentinel://h:1,u:{SECRET}@h:2/mymaster/0")
@example(f"redis+sentinel://h/mymaster?password={SECRET}&sentinel_username={SECRET}")
@example(f"redis+cluster://:{SECRET}@h:1,[h")
@example(f"redis+cluster://:{SECRET}/x@h:1,h:2")
@example(f"rediss+cluster://h:1,u:{SECRET}@h:2")
@example(f"redis+cluster://h,k?password={SECRET}")
def test_url_is_accepted_or_refused_without_leaking_password(url: str) -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage() + str(record.__dict__))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        reported = tried(url)
    finally:
        logging.getLogger().removeHandler(handler)
    place = url.rpartition("@")[2]
    if SECRET in place and "password=" not in place:
        return  # there it is parsed as a host, a path or a database
    assert not [text for text in (*reported, *seen) if SECRET in text]


@given(some.text(some.characters(min_codepoint=0x21, max_codepoint=0x2FF), min_size=1, max_size=30))
def test_password_that_is_escaped_is_the_password(password: str) -> None:
    user = f"user:{quote(password, safe='')}@"
    for url in (
        f"redis://{user}localhost:1/2",
        f"unix://{user}/run/r.sock",
        f"redis+sentinel://{user}localhost:1,[::1]/mymaster/2",
        f"redis+cluster://{user}localhost:1,[::1]",
    ):
        made = connect(url)
        assert made.connection_pool.connection_kwargs["password"] == password
        assert RouterSettings.from_env({"SHOAL_REDIS_URL": url}).redis_url == url


@pytest.mark.parametrize(
    ("url", "reported"),
    [
        ("redis://u:p@h:1/2", "redis://h/2"),
        ("unix://u:p@/run/r.sock", "unix:///run/r.sock"),
        ("redis://[::1]:6379", "redis://::1"),
        (
            "rediss+sentinel://u:p@h:1,[::1],k/mymaster/2",
            "rediss+sentinel://h:1,[::1]:26379,k:26379/mymaster/2",
        ),
        ("redis+sentinel://h/m?password=p", "redis+sentinel://h:26379/m"),
        ("rediss+cluster://u:p@h:1,[::1],k", "rediss+cluster://h:1,[::1]:6379,k:6379"),
        ("redis+cluster://h/?password=p", "redis+cluster://h:6379"),
    ],
)
def test_logged_url_has_no_password(url: str, reported: str) -> None:
    assert without_password(url) == reported


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://localhost",
        "redis+sentinel://localhost/",
        "redis+sentinel:///mymaster",
        "redis+sentinel://localhost,/mymaster",
        "redis+sentinel://localhost:/mymaster",
        "redis+sentinel://localhost:70000/mymaster",
        "redis+sentinel://localhost/mymaster/x",
        "redis+sentinel://localhost/mymaster/0/1",
        "redis+sentinel://localhost/mymaster?host=other",
        "redis+sentinel://localhost/mymaster?service_name=other",
        "redis+sentinel://localhost/my%20master",
        f"redis+sentinel://{','.join(['localhost'] * 17)}/mymaster",
        "unix+sentinel:///run/mymaster",
        "redis+sentinel:localhost/mymaster",
    ],
)
def test_invalid_sentinel_url_is_refused_with_message(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"SHOAL_REDIS_URL must be redis.*\+sentinel://"):
        RouterSettings.from_env({"SHOAL_REDIS_URL": url})


@pytest.mark.parametrize(
    "url",
    [
        "redis+cluster://",
        "redis+cluster:///",
        "redis+cluster://localhost/0",
        "redis+cluster://localhost/mymaster",
        "redis+cluster://localhost?db=0",
        "redis+cluster://localhost?host=other",
        "redis+cluster://localhost,",
        "redis+cluster://localhost:",
        "redis+cluster://localhost:70000",
        f"redis+cluster://{','.join(['localhost'] * 17)}",
        "redis+cluster:///run/redis.sock",
    ],
)
def test_invalid_cluster_url_is_refused_with_message(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"redis\+cluster://.* has only database 0"):
        RouterSettings.from_env({"SHOAL_REDIS_URL": url})


@pytest.mark.parametrize("url", ["redis+cluster://127.0.0.1:1,redis.example", "redis+cluster://h"])
def test_remote_cluster_nodes_require_tls_or_explicit_permission(url: str) -> None:
    with pytest.raises(InvalidInput, match="SHOAL_ALLOW_INSECURE=1"):
        RouterSettings.from_env({"SHOAL_REDIS_URL": url})
    for variables in (
        {"SHOAL_REDIS_URL": url, "SHOAL_ALLOW_INSECURE": "1"},
        {"SHOAL_REDIS_URL": url.replace("redis+", "rediss+")},
    ):
        assert RouterSettings.from_env(variables).redis_url == variables["SHOAL_REDIS_URL"]


@pytest.mark.parametrize("slots", ["0", "1025", "x"])
def test_invalid_number_of_slots_is_refused(slots: str) -> None:
    for read in (RouterSettings.from_env, SchedulerSettings.from_env):
        with pytest.raises(InvalidInput, match=r"SHOAL_QUEUE_SLOTS must be .*1\.\.1024"):
            read({"SHOAL_QUEUE_SLOTS": slots})
        assert read({"SHOAL_QUEUE_SLOTS": "64"}).queue_slots == 64


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://127.0.0.1:1,sentinel.example/m",
        "redis+sentinel://h/m",
        "redis+sentinel://u@h,localhost/m/1",
    ],
)
def test_remote_sentinels_require_tls_or_explicit_permission(url: str) -> None:
    for read in (RouterSettings.from_env, SchedulerSettings.from_env):
        with pytest.raises(
            InvalidInput, match=r"SHOAL_REDIS_URL must be rediss:// .* SHOAL_ALLOW_INSECURE=1"
        ):
            read({"SHOAL_REDIS_URL": url})
        for variables in (
            {"SHOAL_REDIS_URL": url, "SHOAL_ALLOW_INSECURE": "1"},
            {"SHOAL_REDIS_URL": url.replace("redis+", "rediss+")},
        ):
            assert read(variables).redis_url == variables["SHOAL_REDIS_URL"]


def test_sentinels_of_this_machine_need_no_tls() -> None:
    url = "redis+sentinel://localhost:1,127.0.0.1,[::1]:3/mymaster/2"
    assert RouterSettings.from_env({"SHOAL_REDIS_URL": url}).redis_url == url
    made: Any = connect(url).connection_pool
    assert made.connection_kwargs["db"] == 2
    assert made.service_name == "mymaster"
    assert SentinelUrl.parse(url) is not None
    asked = [client.connection_pool.connection_kwargs for client in made.sentinel_manager.sentinels]
    assert [(one["host"], one["port"]) for one in asked] == [
        ("localhost", 1),
        ("127.0.0.1", 26379),
        ("::1", 3),
    ]
