"""The dashboard's page in a headless browser: what it shows of what the server says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.chromium import CHROMIUM, Browser
from server.dashboard_page import IDLE, PageServer, document, sample
from server.serving import RunningServer, wait_for

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, a system package")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer() as running:
        yield running


@pytest.fixture
def browser(chromium: Browser, server: PageServer) -> Browser:
    """On a blank page of the server's origin that remembers nothing."""
    blank = server.url.replace("/dashboard", "/blank")
    chromium.open(blank)
    chromium.wait(f"location.href === '{blank}' && document.readyState === 'complete'")
    chromium.evaluate("localStorage.clear(), sessionStorage.clear()")
    chromium.size(1440, 1000)
    chromium.prefer("light")
    chromium.console.clear()
    return chromium


def show(browser: Browser, server: PageServer, state: str = "serving") -> None:
    """Open the page and wait until it says so."""
    browser.open(server.url)
    wait_for_state(browser, state)


def wait_for_state(browser: Browser, state: str) -> None:
    browser.wait(f"document.getElementById('state')?.textContent === '{state}'")


def text(browser: Browser, selector: str) -> str:
    """What is to be read there, with single spaces."""
    found = browser.evaluate(f"document.querySelector('{selector}').innerText")
    return " ".join(str(found).replace("\u2009", " ").split())


def is_shown(browser: Browser, element: str) -> bool:
    return bool(browser.evaluate(f"document.getElementById('{element}').offsetParent !== null"))


def test_panels_show_the_numbers(browser: Browser, server: PageServer) -> None:
    show(browser, server)
    legends = {
        "throughput": "generated 1235 prompt 346",
        "batched": "computed 2048 of the budget 25 % steps 31.4/s",
        "sequences": "running 48 waiting 7",
        "ttft": "p50 61.2 ms p90 183 ms p99 1.27 s",
        "itl": "p50 21.3 ms p90 34.5 ms p99 78.9 ms",
        "queue": "p50 0.40 ms p90 12.3 ms p99 456 ms",
        "kv": "in use 63 % prefix hits 88 % preemptions 0",
        "positions": "1 070 of 1 500 drafts accepted",
        "k": "least to largest 1 to 5 mean k 4 fixed 75 % end of sequence 25 %",
    }
    for panel, words in legends.items():
        items = browser.evaluate(
            f"[...document.querySelectorAll('#{panel} .legend')].map(one => one.innerText)"
        )
        assert " ".join(" ".join(items).replace("\u2009", " ").split()) == words
    assert text(browser, "#minute").startswith("last minute: 65 % of 2000 drafted tokens/s")
    assert "budget 8 192" in text(browser, "#h-batched")
    header = text(browser, "header")
    for words in (
        "up 2 h 3 min",
        "model someone/model",
        "drafter someone/drafter, k up to 5",
        "device cuda, bfloat16",
        "context 32 768 tokens",
        "KV cache 1 234 blocks of 16 tokens",
    ):
        assert words in header
    assert not is_shown(browser, "notice")
    assert not browser.console


def test_bars_and_requests(browser: Browser, server: PageServer) -> None:
    show(browser, server)
    said = browser.evaluate("document.querySelector('#positions svg').ariaLabel")
    assert said.replace("\u2009", " ") == (
        "position 1: 820 of 1 000 accepted, 82 %; position 2: 250 of 500 accepted, 50 %"
    )
    heights = browser.evaluate(
        "[...document.querySelectorAll('#positions rect')].map(one => one.height.baseVal.value)"
    )
    assert heights[1] / heights[0] == pytest.approx(0.5 / 0.82)
    rows = browser.evaluate("[...document.querySelectorAll('#requests tr')].map(r => r.innerText)")
    cells = [row.replace("\u2009", " ").split("\t") for row in rows]
    assert len(cells) == 3
    assert cells[0][1:] == [
        *("stop", "chat", "5 237", "2 608", "393", "1.77 ms", "174 ms"),
        *("14.3 s", "61.6", "51 %", "2.80", "chatcmpl-" + "0" * 32),
    ]
    assert cells[2][3:-1] == ["5 237", "2 608", "0", "–", "–", "14.3 s", "–", "–", "–"]


def test_it_follows_what_changes(browser: Browser, server: PageServer) -> None:
    show(browser, server)
    assert server.data is not None
    server.data = document()
    server.data["samples"][-1] |= {"generation_tokens": 77.0, "preemptions": 3}
    server.data["samples"][-1]["reasons"] = {"free blocks": 30, "a new reason": 10}
    browser.wait("document.getElementById('throughput').innerText.includes('77')")
    assert "preemptions 3" in text(browser, "#kv")
    # Known reasons first, in their order; every colour has its name.
    legend = text(browser, "#k .legend:nth-of-type(2)")
    words = ["fixed 0 %", "free blocks 75 %", "end of sequence 0 %", "a new reason 25 %"]
    assert legend == " ".join(words)
    server.data["requests"] = []
    browser.wait("document.getElementById('none').offsetParent !== null")
    assert not browser.console


@pytest.mark.parametrize("status", ["dead", "hanging", "starting", "stopped"])
def test_an_engine_that_does_not_serve(browser: Browser, server: PageServer, status: str) -> None:
    show(browser, server)
    idle = [sample(one["t"], **IDLE) for one in document()["samples"]]
    server.data = document(status=status, alive=False, samples=idle)
    wait_for_state(browser, f"engine {status}")
    assert browser.evaluate("document.getElementById('state').className") == "bad"
    assert "503" in text(browser, "#notice")
    server.data = document()
    wait_for_state(browser, "serving")
    assert not is_shown(browser, "notice")


def test_a_server_that_is_quiet(browser: Browser, server: PageServer) -> None:
    server.data = document(samples=[], positions=[], requests=[], uptime_s=0.4)
    show(browser, server, "no data yet")
    assert text(browser, "#itl").count("no data yet") == 1
    assert text(browser, "#positions").startswith("nothing drafted yet")
    unknown = sample(document()["now"], **IDLE, ttft=None, itl=None, queue=None)
    server.data = document(samples=[unknown], positions=[], requests=[])
    wait_for_state(browser, "idle")
    assert "none in the last minute" in text(browser, "#ttft")
    assert "p50 – p90 – p99 –" in text(browser, "#ttft")
    assert "no rounds" not in text(browser, "#throughput")
    server.data = document(status="shutting down")
    wait_for_state(browser, "engine shutting down")
    assert "new ones are refused" in text(browser, "#notice")
    assert not browser.console


def test_without_a_drafter(browser: Browser, server: PageServer) -> None:
    engine = document()["engine"] | {"drafter": None, "num_speculative_tokens": None}
    rounds = [
        sample(one["t"], k={"0": 9}, reasons={"no drafter": 9}, drafted=0.0, accepted=0.0)
        for one in document()["samples"]
    ]
    server.data = document(engine=engine, samples=rounds, positions=[])
    show(browser, server)
    for panel in ("k", "positions"):
        assert not is_shown(browser, panel)
        assert text(browser, f"#no-{panel}") == "No drafter: nothing is drafted."
    assert "drafter none" in text(browser, "#engine")
    assert not browser.console


def test_a_server_that_does_not_answer(browser: Browser, server: PageServer) -> None:
    show(browser, server)
    server.data, server.status = None, 502
    wait_for_state(browser, "no data")
    assert "status 502" in text(browser, "#notice")
    server.data = document()
    wait_for_state(browser, "serving")
    assert text(browser, "#age") == ""
    server.__exit__()
    wait_for_state(browser, "no connection")
    browser.wait("/^last data [2-9] s ago$/.test(document.getElementById('age').textContent)")
    assert "The server does not answer. What is shown is of " in text(browser, "#notice")
    assert browser.evaluate("document.getElementById('panels').className") == "old"
    assert "generated 1235" in text(browser, "#throughput")


@pytest.fixture
def locked(server: PageServer) -> PageServer:
    server.key = "the-key"
    return server


def enter(browser: Browser, key: str) -> None:
    browser.evaluate(
        f"document.getElementById('key').value = '{key}',"
        "document.querySelector('#login button').click()"
    )


def test_a_key_is_asked_for(browser: Browser, locked: PageServer) -> None:
    show(browser, locked, "key needed")
    assert not is_shown(browser, "panels")
    assert browser.evaluate("document.activeElement.id") == "key"
    before = locked.asked
    enter(browser, "wrong")
    wait_for_state(browser, "key not accepted")
    assert locked.asked == before + 1  # it does not try a key again and again
    enter(browser, "ключ")
    browser.wait("document.getElementById('notice').textContent.includes('ASCII')")
    enter(browser, " the-key ")
    wait_for_state(browser, "serving")
    assert is_shown(browser, "panels")
    assert not is_shown(browser, "login")
    assert not is_shown(browser, "notice")
    assert "generated 1235" in text(browser, "#throughput")
    assert browser.evaluate("Object.values(sessionStorage)") == ["the-key"]
    assert browser.evaluate("Object.keys(localStorage).length") == 0
    wait_for(lambda: locked.asked > before + 3)
    browser.open(locked.url)  # the tab still has it
    browser.wait("document.getElementById('state').textContent === 'serving'")
    refusals = [line for line in browser.console if "401" not in line]
    assert not refusals


def test_names_are_text_and_no_markup(browser: Browser, server: PageServer) -> None:
    name = "<img src=x onerror=alert(1)>" + "long" * 100
    data = document(engine=document()["engine"] | {"model": name, "drafter": "<b>d</b>"})
    data["requests"][0]["id"] = "<i>id</i>"
    data["samples"][-1]["reasons"] = {"<u>why</u>": 1}
    server.data = data
    browser.size(360, 800)
    show(browser, server)
    assert browser.evaluate("document.querySelectorAll('img, main b b, dd b, td i, u').length") == 0
    assert name in text(browser, "#engine")
    assert "<i>id</i>" in text(browser, "#requests")
    assert "<u>why</u>" in text(browser, "#k")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
    assert not browser.console


@pytest.mark.parametrize(("width", "columns"), [(360, 1), (800, 2), (1440, 3), (3840, 3)])
def test_it_fits(browser: Browser, server: PageServer, width: int, columns: int) -> None:
    browser.size(width, 900)
    show(browser, server)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    grid = browser.evaluate("getComputedStyle(document.querySelector('main')).gridTemplateColumns")
    assert len(grid.split()) == columns
    # Words at the axes neither leave their picture nor lie on one another.
    overlaps = browser.evaluate(_OVERLAPS)
    assert overlaps == []
    browser.size(700, 900)  # drawn anew, as wide as there is room
    browser.wait("document.querySelector('#kv svg:last-of-type').viewBox.baseVal.width < 700")


# Pairs of words in one picture whose boxes share more than a pixel, and words outside theirs.
_OVERLAPS = """(() => {
  const found = [];
  for (const svg of document.querySelectorAll(".chart > svg")) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")];
    const words = texts.map((one) => [one, one.getBoundingClientRect()]);
    words.forEach(([a, one], i) => {
      if (one.left < frame.left - 1 || one.right > frame.right + 1) found.push(a.textContent);
      for (const [b, two] of words.slice(i + 1)) {
        const x = Math.min(one.right, two.right) - Math.max(one.left, two.left);
        const y = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
        if (x > 1 && y > 5) found.push(`${a.textContent} | ${b.textContent}`);
      }
    });
  }
  return found;
})()"""


def test_the_pointer_and_the_keys_read_earlier_seconds(
    browser: Browser, server: PageServer
) -> None:
    assert server.data is not None
    samples = server.data["samples"]
    samples[-2]["running"] = 11
    samples[-1]["running"] = 12
    show(browser, server)
    says = "document.getElementById('sequences').ariaValueText"
    assert browser.evaluate(says) == "now, running 12, waiting 7"
    browser.evaluate("document.getElementById('sequences').focus()")
    _press(browser, "ArrowLeft")
    assert "running 11" in browser.evaluate(says)
    assert text(browser, "#sequences").startswith("running 11")
    assert browser.evaluate("document.querySelectorAll('.cursor line').length") == 11  # strips
    _press(browser, "Home")
    assert "running 48" in browser.evaluate(says)
    _press(browser, "Escape")
    assert browser.evaluate(says) == "now, running 12, waiting 7"
    assert browser.evaluate("document.querySelectorAll('.cursor line').length") == 0
    where = browser.evaluate(
        "(({right, top, width}) => [right - 0.3 * width, top + 20])"
        "(document.querySelector('#kv > svg').getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=where[0], y=where[1])
    browser.wait("document.querySelectorAll('.cursor line').length === 11")
    shown = browser.evaluate("document.querySelector('#itl .cursor text').textContent")
    assert shown in browser.evaluate("document.getElementById('kv').ariaValueText")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    browser.wait("document.querySelectorAll('.cursor line').length === 0")
    assert not browser.console


def _press(browser: Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key)


def test_light_and_dark(browser: Browser, server: PageServer) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    show(browser, server)
    light = browser.evaluate(ground)
    browser.prefer("dark")
    dark = browser.evaluate(ground)
    assert light != dark
    choose = "(id, value) => { const one = document.getElementById(id); one.value = value;"
    choose += "one.dispatchEvent(new Event('change')); }"
    browser.evaluate(f"({choose})('theme', 'light'), ({choose})('span', '60')")
    assert browser.evaluate(ground) == light
    assert "−45 s" in text(browser, "#kv")
    show(browser, server)  # choices are kept
    assert browser.evaluate(ground) == light
    assert browser.evaluate("document.getElementById('span').value") == "60"


def test_a_fault_of_the_page_is_said(browser: Browser, server: PageServer) -> None:
    show(browser, server)
    server.data = {"status": "ok"}
    wait_for_state(browser, "fault of this page")
    assert "TypeError" in text(browser, "#notice")
    server.data = document()
    wait_for_state(browser, "serving")


def test_with_a_real_server(browser: Browser) -> None:
    with RunningServer() as server:
        server.post("/v1/completions", prompt="def f(x):\n", max_tokens=20, ignore_eos=True)
        wait_for(server.is_idle)
        browser.console.clear()
        browser.open(server.url + "/dashboard")
        wait_for_state(browser, "idle")
        browser.wait("document.querySelectorAll('#requests tr').length === 1")
        assert "paceline/demo" in text(browser, "#engine")
        assert "length completion" in text(browser, "#requests")
        assert text(browser, "#k .legend:nth-of-type(2)").startswith("fixed")
        assert "none in the last minute" in text(browser, "#itl")  # nothing was streamed
        assert not browser.console
