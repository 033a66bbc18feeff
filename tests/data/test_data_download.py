"""Downloads from a server of our own: resumed where they stopped, verified, refused with directions."""

import errno
import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ea_artifacts.command import UserError
from ea_data import download, prepare, stages
from ea_data.corpora import Part

DATA = bytes(range(256)) * 4000


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked.append(self.headers.get("Range"))
        if self.path == "/missing":
            return self.send_error(404)
        if self.path == "/busy" and len(server.asked) < 3:
            return self.send_error(503)
        start = int(re.findall(r"\d+", self.headers["Range"])[0]) if server.ranges and self.headers["Range"] else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(DATA) - start))
        self.end_headers()
        body = DATA[start:]
        if server.cuts:  # the connection breaks in the middle
            body = body[: server.cuts.pop()]
        self.wfile.write(body)
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.01)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.cuts, server.ranges = [], [], True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("ranges", [True, False], ids=["resumes", "server starts over"])
def test_a_download_that_was_cut_off_is_complete(server, tmp_path, ranges):
    server.ranges, server.cuts = ranges, [300_000, 100_000]
    download.fetch(f"{server.url}/x", tmp_path / "new/x")
    assert (tmp_path / "new/x").read_bytes() == DATA
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x"]
    assert server.asked == [None, "bytes=100000-", "bytes=400000-" if ranges else "bytes=300000-"]


def test_a_killed_download_goes_on_and_a_busy_server_is_asked_again(server, tmp_path, capsys):
    (tmp_path / "x.part").write_bytes(DATA[:1234])
    download.fetch(f"{server.url}/x", tmp_path / "x")
    assert server.asked == ["bytes=1234-"]
    assert (tmp_path / "x").read_bytes() == DATA
    server.asked.clear()
    download.fetch(f"{server.url}/busy", tmp_path / "y")
    assert len(server.asked) == 3
    assert capsys.readouterr().err.count(f"{server.url}/busy") == 2, "a user sees what is waited for"


@pytest.mark.parametrize("url", ["{}/missing", "http://127.0.0.1:9/x"], ids=["missing", "no server"])
def test_what_cannot_be_fetched_is_named_and_not_kept(server, tmp_path, url):
    url = url.format(server.url)
    with pytest.raises(UserError, match=f"(?s)^train.de.gz is missing, .* from {url}.*--raw FOLDER"):
        download.fetch(url, tmp_path / "train.de.gz")
    assert list(tmp_path.iterdir()) == []


def test_an_archive_is_compared_with_its_published_checksum(tmp_path):
    (tmp_path / "a.bin").write_bytes(DATA)
    digest = hashlib.sha256(DATA).hexdigest()
    for part in (Part(""), Part("", sha256=digest)):
        download.verify(tmp_path / "a.bin", part)
    (tmp_path / "a.bin").write_bytes(DATA[:-1])
    with pytest.raises(UserError, match=rf"a.bin: its SHA-256 is .*{digest}"):
        download.verify(tmp_path / "a.bin", Part("", sha256=digest))


def test_preparations_that_share_downloads_take_turns(tmp_path, monkeypatch):
    """Two at once would write one file."""
    monkeypatch.setattr(prepare, "DATA", tmp_path)
    monkeypatch.setattr(stages.time, "sleep", lambda _: None)
    monkeypatch.setattr(download, "fetch", lambda url, path: path.touch())
    args, corpus = prepare.parse("multi30k", ["de-en"])
    folder = tmp_path / "downloads/multi30k"
    with stages.locked(folder), pytest.raises(UserError, match="another run is at work here; wait for its end"):
        prepare.raw_folder(args, corpus)
    assert prepare.raw_folder(args, corpus) == folder
    with stages.locked(folder):
        assert prepare.raw_folder(args, corpus) == folder, "all is there"


def test_a_full_disk_is_not_tried_again(tmp_path, monkeypatch):
    tried = []

    def refused(url, part):
        tried.append(url)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_continue", refused)
    with pytest.raises(OSError, match="No space left"):
        download.fetch("http://x/y", tmp_path / "y")
    assert len(tried) == 1
