"""The dashboard as a person sees it: a real headless Chromium, a real server, real run folders."""

import csv
import json
import os
import shutil

import numpy as np
import pytest
from dashboard_runs import Writer, serving, write_run

from rlloop.records import rollout_files

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the browser tests need playwright: pip install playwright"
)

expect = sync_api.expect
expect.set_options(timeout=120_000)

CHROMIUM = os.environ.get("RLLOOP_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no Chromium here: apt-get install chromium, or name one by the environment's RLLOOP_CHROMIUM",
    ),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    """visit() opens the dashboard of `tmp_path`. Errors of the page, and requests to elsewhere, fail the test."""
    wrong: list[str] = []
    with serving(tmp_path) as (_, address, token):
        context = browser.new_context(viewport={"width": 1400, "height": 900}, accept_downloads=True)
        context.set_default_timeout(120_000)

        def go(view: str = ""):
            page = context.new_page()
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
            page.on(
                "request",
                lambda request: request.url.startswith((address, "blob:", "data:")) or wrong.append(request.url),
            )
            page.goto(f"{address}/?token={token}")
            assert "token" not in page.url
            if view:
                page.goto(f"{address}/{view}")
            return page

        yield go
        context.close()
    assert wrong == []


def card(page, title: str):
    return page.locator(f'.card[data-panel="{title}"]')


def test_a_finished_run(visit, tmp_path):
    write_run(tmp_path / "a", 6)
    page = visit()
    page.wait_for_selector('.card[data-panel="KL, k3"] canvas')
    assert "exactly 0" in page.inner_text(".strip")
    assert page.locator("section.group > h2").all_inner_texts()[:2] == ["Parity", "Ratios and clipping"]
    assert page.locator('.card[data-panel="Bytes on the wire"]').count() == 0  # absent metrics, absent panels

    k3 = card(page, "KL, k3")
    k3.locator(".plot").focus()
    page.keyboard.press("t")
    expect(k3.locator("table.data tbody th")).to_have_text(["1", "2", "3", "4", "5", "6"])
    page.keyboard.press("t")
    k3.locator("canvas").wait_for()
    k3.hover()
    with page.expect_download() as download:
        k3.get_by_text("CSV").click()
    rows = list(csv.DictReader(download.value.path().read_text().splitlines()))
    assert [row["parity/k3"] for row in rows] == ["0.0"] * 6

    k3.locator(".plot").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(k3).to_contain_text("step 3")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Step 3')")
    assert "equal bits, every token" in page.inner_text("main")
    page.wait_for_selector(".tokens .tok")
    assert page.locator(".tok.more, .tok.less").count() == 0
    page.keyboard.press("]")
    page.wait_for_selector("h1:has-text('Step 4')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".strip")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()


def test_drill_down_to_the_worst_token(visit, tmp_path):
    write_run(tmp_path / "a", 3, drift=0.05)
    page = visit("#/step?of=a&step=2")
    page.wait_for_selector("#rollouts tbody tr")
    worst = page.locator("#rollouts tbody tr").first
    assert worst.get_attribute("aria-selected") == "true"
    page.wait_for_selector(".tok.more, .tok.less")
    token = page.locator(".tok.more, .tok.less").first
    token.focus()
    assert "likely than the engine that sampled it" in page.inner_text(".inspector")
    assert "correct" in page.inner_text(".components")
    uid = worst.locator(".mono").first.inner_text()
    page.locator("h1").click()
    page.keyboard.press("j")
    expect(page.locator("#detail h3")).not_to_contain_text(uid)
    page.select_option("select[aria-label=Outcome]", "dropped")
    expect(page.locator("#rollouts tbody tr")).to_have_count(4)
    assert "not compared" in page.inner_text("#rollouts")


def test_a_live_run(visit, tmp_path):
    writer = Writer(tmp_path / "a")
    for _ in range(3):
        writer.write()
    page = visit()
    page.wait_for_selector("#runs .dot.live")
    expect(page.locator(".strip")).to_contain_text("Steps2of 6")
    writer.write(extra={"sync/wire_bytes": 1000, "fresh/metric": 1})
    expect(page.locator(".strip")).to_contain_text("Steps3of 6")
    page.wait_for_selector('.card[data-panel="Bytes on the wire"]', state="attached")  # new metrics, new panels
    page.wait_for_selector('.card[data-panel="fresh/metric"]', state="attached")
    Writer(tmp_path / "young").write()
    page.wait_for_selector("#runs .name:has-text('young')")


def test_runs_over_one_another(visit, tmp_path):
    write_run(tmp_path / "zero", 4)
    write_run(tmp_path / "drift", 4, drift=0.01, config={"seed": 0, "trainer": {"num_steps": 9}})
    page = visit("#/charts?run=zero&run=drift")
    page.wait_for_selector('.card[data-panel="KL, k3"] canvas')
    lines = page.evaluate(
        """() => [...document.querySelectorAll('.card[data-panel="KL, k3"] .chips line')]
             .map((line) => [line.getAttribute('stroke'), line.getAttribute('stroke-dasharray')])"""
    )
    assert len({colour for colour, _ in lines}) == len({dash for _, dash in lines}) == 2
    page.keyboard.press("4")
    page.wait_for_selector("h1:has-text('Configuration')")
    keys = page.locator("table.list tbody td:first-child").all_inner_texts()
    assert "trainer.num_steps" in keys
    assert "seed" not in keys
    page.keyboard.press("3")
    page.wait_for_selector("h1:has-text('Certificate')")
    assert "unbroken" in page.inner_text(".strip")


def test_broken_files(visit, tmp_path):
    write_run(tmp_path / "a", 5)
    metrics = tmp_path / "a" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines[:3], '{"step": 3, \n', *lines[4:]]))
    rollout_files(tmp_path / "a")[1].write_bytes(b"no zstd")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.yaml").write_text("a: [\n")
    (tmp_path / "b" / "metrics.jsonl").write_text("no json\n")
    page = visit("#/charts?run=a&run=b")
    page.wait_for_selector(".problems")
    told = page.inner_text(".problems")
    assert "metrics.jsonl, line 4, is damaged and left out" in told
    assert "config.yaml cannot be read" in told
    page.wait_for_selector('.card[data-panel="KL, k3"] canvas')
    page.goto(page.url.split("#")[0] + "#/step?of=a&step=2")
    page.wait_for_selector("#rollouts .warn")
    assert "is damaged" in page.inner_text("#rollouts")


def test_ten_thousand_steps(visit, tmp_path):
    write_run(tmp_path / "long", 1, finished=False)
    with (tmp_path / "long" / "metrics.jsonl").open("a") as file:
        rng = np.random.default_rng(0)
        for step in range(2, 10_001):
            k3, reward = rng.exponential(1e-5), float(np.tanh(step / 3000) + 0.1 * rng.normal())
            file.write(json.dumps({"step": step, "parity/k3": k3, "reward/mean": reward, "time/step": 1.0}) + "\n")
    page = visit()
    page.wait_for_selector('.card[data-panel="KL, k3"] canvas')
    assert "10,000" in page.inner_text(".strip")
    k3 = card(page, "KL, k3")
    k3.locator(".plot").focus()
    page.keyboard.press("t")
    table = k3.locator("table.data")
    table.wait_for()
    assert table.get_attribute("aria-rowcount") == "10000"
    table.locator("tbody th:text-is('10,000')").wait_for()
    assert table.locator("tbody tr").count() < 100


def test_no_run_yet(visit):
    page = visit()
    page.wait_for_selector("text=No runs yet")
