"""The live page: it follows the run, and serves nothing else to nobody else."""

from __future__ import annotations

import http.client
import json
import threading

import pytest

from torchrl_mt.view import RunLog
from torchrl_mt.view.live import RunServer


@pytest.fixture
def run(tmp_path):
    with RunLog(tmp_path / "run", loggers=()) as run:
        run.log(0, reward=0.5)
        yield run


@pytest.fixture
def server(run):
    with RunServer(run.folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server, path, host="127.0.0.1"):
    connection = http.client.HTTPConnection(*server.server_address)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_follows_the_run(server, run):
    status, page = get(server, "/")
    assert status == 200
    assert '"live": true' in page
    for step in (1, 2):
        run.log(step, reward=float(step))
        status, text = get(server, "/metrics")
        points = json.loads(text)["charts"][0]["curves"][0]["points"]
        assert status == 200
        assert points[-1] == [step, step]


def test_only_pages_of_episodes_are_served(server, run, tmp_path):
    pages = run.folder / "episodes"
    pages.mkdir()
    (pages / "10.html").write_text("ten")
    (pages / "10.txt").write_text("text")
    (pages / "folder.html").mkdir()
    (tmp_path / "secret.html").write_text("secret")
    (pages / "link.html").symlink_to(tmp_path / "secret.html")
    assert get(server, "/episodes/10.html") == (200, "ten")
    assert json.loads(get(server, "/metrics")[1])["runs"][0]["episodes"][0]["step"] == 10
    wrong = (
        "10.txt 11.html folder.html link.html ../../secret.html ..%2f..%2fsecret.html %00.html"
        f" {tmp_path}/secret.html"
    )
    paths = [f"/episodes/{name}" for name in wrong.split(" ")]
    for path in ("/run.json", "/metrics.jsonl", "/episodes/", "//[/x", *paths):
        status, text = get(server, path)
        assert status == 404, path
        assert "secret" not in text


HOSTS = dict.fromkeys(("localhost", "localhost:8000", "127.0.0.1", "[::1]:80"), 200)
HOSTS |= dict.fromkeys(("evil.example", "localhost.evil.example", "10.0.0.1", ""), 403)


@pytest.mark.parametrize("host", HOSTS)
def test_other_names_of_the_host_are_refused(server, host):
    assert get(server, "/metrics", host)[0] == HOSTS[host]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"host": "0.0.0.0"}, "host must be"), ({"host": "x.org"}, "ssh -L"), ({"port": -1}, "port")],
)
def test_bad_arguments_are_named(run, options, said):
    with pytest.raises(ValueError, match=said):
        RunServer(run.folder, **options)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder must be"):
        RunServer(tmp_path)
