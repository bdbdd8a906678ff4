"""What a process of ours answers at /metrics and /readyz: the one reader of every test.

A sample that is not there is a KeyError, so that no test takes a misspelt name for 0.
"""

import urllib.error
import urllib.request


def scrape(port: int, host: str = "127.0.0.1") -> str:
    """The text of /metrics."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[str, float]:
    """Every sample of such a text by its name with labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {sample: float(value) for sample, _, value in lines}


def readyz(port: int) -> tuple[int, str]:
    """HTTP status of /readyz, and what it says."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()
