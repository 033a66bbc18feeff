"""A headless Chromium for tests, driven through chromedriver's W3C WebDriver protocol: plain HTTP and JSON."""

import contextlib
import json
import re
import shutil
import subprocess
import urllib.request

#: what Chromium needs to run as root, in a container, without looking for anything on the network
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --force-device-scale-factor=1"
).split()
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference to an element
KEYS = {"ArrowLeft": "\ue012", "ArrowUp": "\ue013", "ArrowRight": "\ue014", "ArrowDown": "\ue015"}


def missing():
    """The programs that are not installed, or None."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    return None if chromium and shutil.which("chromedriver") else "Chromium and chromedriver"


class Browser:
    """One page of one browser."""

    def __init__(self, address, capabilities):
        self._address = address
        self._session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})["sessionId"]

    def _ask(self, method, path, body=None):
        request = urllib.request.Request(
            self._address + path, None if body is None else json.dumps(body).encode(), method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def _post(self, path, **body):
        return self._ask("POST", f"/session/{self._session}{path}", body)

    def open(self, path):
        self.visit(path.resolve().as_uri())

    def visit(self, address):
        self._post("/url", url=address)

    def run(self, script, *arguments):
        """The value of a piece of JavaScript."""
        return self._post("/execute/sync", script=script, args=list(arguments))

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def click(self, selector):
        self._post(f"/element/{self._find(selector)}/click")

    def type(self, selector, text):
        """Press the keys of a text in an element, after its present text."""
        self._post(f"/element/{self._find(selector)}/value", text=text)

    def hover(self, selector, x, y):
        """Move the pointer to (x, y) from the upper left corner of an element that is scrolled into view."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        box = "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [b.x, b.y]"
        left, top = self.run(box, selector)
        move = {"type": "pointerMove", "duration": 0, "x": round(left + x), "y": round(top + y), "origin": "viewport"}
        self._post("/actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def press(self, key):
        keys = [{"type": kind, "value": KEYS.get(key, key)} for kind in ("keyDown", "keyUp")]
        self._post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": keys}])

    def complaints(self):
        """The lines of the console, errors included."""
        return self._post("/se/log", type="browser")

    def quit(self):
        self._ask("DELETE", f"/session/{self._session}")

    def _find(self, selector):
        return self._post("/element", using="css selector", value=selector)[ELEMENT]


@contextlib.contextmanager
def browser(folder, *flags):
    """A headless Chromium with a fresh profile in `folder`."""
    command = ["chromedriver", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            port = next(match[1] for line in driver.stdout if (match := re.search(r"on port (\d+)\.", line)))
            options = {"args": [*FLAGS, f"--user-data-dir={folder}", *flags]}
            page = Browser(
                f"http://127.0.0.1:{port}",
                {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}},
            )
            try:
                yield page
            finally:
                page.quit()
        finally:
            driver.terminate()
