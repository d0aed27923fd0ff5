"""Pages of other origins: which a browser lets call the API, and what it lets them read."""

from __future__ import annotations

import pytest
from serving.served_app import Response, ServedApp, served_app

from flowrt.errors import UserError
from flowrt.serving.cors import CorsRules, read_list, read_origins

CHAT, PAGE = "/v1/chat/completions", "http://localhost:3000"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
RULES = CorsRules(origins=(PAGE,))


def shown_to(response: Response) -> str | None:
    return response.headers.get("access-control-allow-origin")


async def preflight(served: ServedApp, origin: str = PAGE, method: str = "POST", **headers: str) -> Response:
    return await served.call("OPTIONS", CHAT, origin=origin, access_control_request_method=method, **headers)


async def test_without_rules_no_other_origin_is_served() -> None:
    async with served_app() as served:
        response = await preflight(served)
        assert (response.status, shown_to(response)) == (405, None)
        response = await served.call("GET", "/v1/models", origin=PAGE)
        assert (response.status, shown_to(response), response.headers.get("vary")) == (200, None, None)


@pytest.mark.parametrize("api_key", ["", "secret"])
async def test_preflight_needs_no_key(api_key: str) -> None:
    async with served_app(cors=RULES, api_key=api_key) as served:
        response = await preflight(served, access_control_request_headers="authorization, x-stainless-os")
        assert (response.status, shown_to(response), response.body) == (200, PAGE, b"")
        assert response.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in response.headers
        response = await preflight(served, origin="http://evil.example")
        assert (response.status, shown_to(response), response.headers["vary"]) == (400, None, "Origin")


async def test_responses_streams_and_errors_have_the_headers() -> None:
    async with served_app(cors=RULES, api_key="secret") as served:
        key = {"authorization": "Bearer secret", "origin": PAGE}
        for response, status in (
            (await served.call("GET", "/v1/models", **key), 200),
            (await served.call("GET", "/v1/nothing", **key), 404),
            (await served.call("POST", CHAT, {"messages": []}, **key), 400),
            (await served.call("GET", "/v1/models", origin=PAGE), 401),
        ):
            assert (response.status, shown_to(response)) == (status, PAGE)
            assert response.headers["access-control-expose-headers"] == "x-request-id, retry-after"
        assert shown_to(await served.call("GET", "/v1/models", **key | {"origin": "http://evil.example"})) is None
        assert shown_to(await served.call("GET", "/v1/models", authorization="Bearer secret")) is None
        connection, request = await served.begin(CHAT, HELLO | {"stream": True}, **key)
        assert shown_to(await connection.head()) == PAGE
        served.finish(request)
        await connection.events()


async def test_refusal_by_the_headers_alone_has_them() -> None:
    async with served_app(cors=RULES, max_requests=1) as served:
        connection, request = await served.begin(CHAT, HELLO)
        for _ in range(2):  # the first refusal is the gateway's, the next one the front end's own
            response = await served.call("POST", CHAT + "/", HELLO, origin=PAGE)
            assert (response.status, shown_to(response)) == (429, PAGE)
            assert response.headers["x-request-id"]
        served.finish(request)
        assert (await connection.response()).status == 200


async def test_preflight_names_a_host_of_this_machine() -> None:
    async with served_app(cors=RULES) as served:
        response = await preflight(served, host="evil.example")
        assert response.status == 403, "a name of another machine that leads here"


async def test_any_origin_with_and_without_credentials() -> None:
    async with served_app(cors=CorsRules(origins=("*",))) as served:
        response = await served.call("GET", "/v1/models", origin=PAGE)
        assert (shown_to(response), response.headers.get("vary")) == ("*", None)
    async with served_app(cors=CorsRules(origins=("*",), allows_credentials=True)) as served:
        response = await served.call("GET", "/v1/models", origin=PAGE)
        assert (shown_to(response), response.headers["vary"]) == (PAGE, "Origin"), "a browser takes no * with credentials"
        assert response.headers["access-control-allow-credentials"] == "true"


async def test_methods_and_headers_are_bounded() -> None:
    async with served_app(cors=CorsRules(origins=(PAGE,), methods=("POST",), headers=("Authorization",))) as served:
        response = await preflight(served, access_control_request_headers="Content-Type, AUTHORIZATION")
        assert (response.status, response.headers["access-control-allow-methods"]) == (200, "POST")
        assert "authorization" in response.headers["access-control-allow-headers"]
        assert (await preflight(served, method="GET")).status == 400
        response = await preflight(served, access_control_request_headers="x-other")
        assert (response.status, shown_to(response)) == (400, PAGE)
        assert "--allowed-headers" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["tiny", "org/tiny moe", "a%b"])
async def test_a_model_is_found_by_its_name(name: str) -> None:
    async with served_app(model_name=name) as served:
        (model,) = (await served.call("GET", "/v1/models/")).json()["data"]
        for written in (name.replace("%", "%25").replace(" ", "%20"), name.replace("%", "%25").replace("/", "%2F").replace(" ", "%20")):
            for slash in ("", "/"):
                assert (await served.call("GET", f"/v1/models/{written}{slash}")).json() == model
        assert (await served.call("GET", "/v1/models/other")).error == (404, "model_not_found", "model")


async def test_slash_at_the_end_changes_nothing() -> None:
    async with served_app(api_key="secret") as served:
        for path, status in (("/health/", 200), ("/v1/models/", 401), ("/metrics/", 401), (CHAT + "/", 401), ("/admin/status/", 401)):
            assert (await served.call("GET", path)).status == status, path
        response = await served.call("POST", "/tokenize/", {"prompt": "1"}, authorization="Bearer secret")
        assert response.status == 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('["http://a:1", "https://b"]', ("http://a:1", "https://b")),
        ("http://a:1, https://b/", ("http://a:1", "https://b")),
        ("*", ("*",)),
        ('["*"]', ("*",)),
        ("null", ("null",)),
    ],
)
def test_origins_are_a_json_list_or_have_commas(text: str, expected: tuple[str, ...]) -> None:
    assert read_origins("--allowed-origins", text) == expected


@pytest.mark.parametrize("text", ["", "[]", "[1]", '["http://a"', "a", "http://a/b", "http://", "http://a\nb", "http://ä"])
def test_what_is_no_origin_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^--allowed-origins") as raised:
        read_origins("--allowed-origins", text)
    assert "\n" not in str(raised.value)


def test_headers_are_a_list() -> None:
    assert read_list("--allowed-headers", "Authorization,X-A") == ("Authorization", "X-A")
