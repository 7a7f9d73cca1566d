"""A headless Chromium, driven through a pipe by its DevTools protocol; nothing else is needed."""

import base64
import fcntl
import json
import os
import pathlib
import select
import shutil
import subprocess
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-pipe", "--hide-scrollbars", "--force-color-profile=srgb"),
)
TIMEOUT_S = 90


def chromium() -> str | None:
    """Returns where Chromium is, if it is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One running browser."""

    def __init__(self, binary: str, profile: pathlib.Path) -> None:
        # The browser reads commands from descriptor 3 and writes to 4.
        command_end, self._write = os.pipe()
        self._read, answer_end = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (command_end, answer_end)]

        def give_ends() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=give_ends,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (command_end, answer_end, *ends):
            os.close(end)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def ask(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(end - time.monotonic(), 0))
            assert ready, f"the browser does not answer within {TIMEOUT_S} s"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer


class Tab:
    """One page in a browser.

    Args:
        browser: where it opens.
        path: the file.
        width: in pixels.
        scheme: which colours the user prefers.
    """

    def __init__(self, browser: Browser, path: pathlib.Path, width: int, scheme: str) -> None:
        self._browser = browser
        target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._target, self._session = target, attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self._size(width, 900)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._ask("Emulation.setEmulatedMedia", features=[feature])
        self._width = width
        self._ask("Page.navigate", url=path.as_uri())
        self.wait_for("document.readyState === 'complete'")

    def close(self) -> None:
        """Closes it."""
        self._browser.ask("Target.closeTarget", targetId=self._target)

    def evaluate(self, code: str) -> Any:
        """Returns the value of an expression."""
        result = self._ask(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, f"{code}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait_for(self, code: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + TIMEOUT_S
        while not self.evaluate(code):
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.05)

    def accessible(self) -> list[dict[str, Any]]:
        """Returns what a screen reader gets: role, name, description and properties, in order.

        ``level`` is a heading's, ``focusable`` says where the keyboard stops.
        """
        found = self._ask("Accessibility.getFullAXTree")["nodes"]
        nodes = {node["nodeId"]: node for node in found}
        waiting, said = [found[0]["nodeId"]], []
        while waiting:
            node = nodes[waiting.pop()]
            waiting += [child for child in reversed(node["childIds"]) if child in nodes]
            said += [] if node["ignored"] else [_said(node)]
        return said

    def press(self, key: str) -> None:
        """Presses a key where the focus is."""
        codes = {"Enter": 13, "Tab": 9}
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self._ask(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **text,
            )

    def picture(self, path: pathlib.Path) -> None:
        """Writes the whole page as a PNG."""
        height = min(int(self.evaluate("document.documentElement.scrollHeight")), 12000)
        self._size(self._width, height)
        self.wait_for(
            "[...document.querySelectorAll('.chart')].every(c => c.querySelector('canvas'))"
        )
        shot = self._ask("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
        self._size(self._width, 900)

    def problems(self) -> list[str]:
        """Returns errors in the console, and everything that was fetched besides the file."""
        self.evaluate("1")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            what, params = event["method"], event["params"]
            if what == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif what == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(str(params["entry"]))
            elif what == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            elif what == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "about:")):
                    found.append(f"fetched {url}")
        return found

    def _size(self, width: int, height: int) -> None:
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **params)


def _said(node: dict[str, Any]) -> dict[str, Any]:
    """One node of the tree of accessibility, in plain values."""
    values = {key: node.get(key, {}).get("value", "") for key in ("role", "name", "description")}
    properties = {one["name"]: one["value"].get("value") for one in node.get("properties", ())}
    return values | {key: properties.get(key) for key in ("level", "focusable", "expanded")}
