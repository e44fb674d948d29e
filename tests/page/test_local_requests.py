"""A page on this machine serves its own visitor only: requests by another site's name or from its pages are refused."""

import urllib.error
import urllib.request

import pytest


def status_of(url, **headers):
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60).status
    except urllib.error.HTTPError as error:
        assert error.code != 403 or b"--host" in error.read()
        return error.code


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 200),
        ({"Host": "localhost:1234"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Origin": "http://127.0.0.1:7860"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_only_names_of_this_machine_are_served(local, headers, status):
    assert status_of(local.url, **headers) == status
    assert status_of(local.url + "gradio_api/info", **headers) == status
