"""The dashboard as a person sees it: a real headless Chromium, a real server, real run folders."""

import csv
import json
import os
import shutil

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from rlloop.dashboard.live import Dashboard
from rlloop.dashboard.server import make_app
from rlloop.dashboard.training_api import TrainingApi
from rlloop.runs.folder import RunFolder, rollout_files
from rlloop.web.server import BackgroundServer, Listen
from tests.support.dashboard_runs import CONFIG, Writer, write_pictures, write_run, write_talk
from tests.support.waiting import until

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the browser tests need playwright: pip install playwright"
)

expect = sync_api.expect
expect.set_options(timeout=120_000)

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = os.environ.get("RLLOOP_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
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
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=120_000)
        yield browser
        browser.close()


TOKEN = "a-token-of-some-length"


STATUS = {
    "model": "tiny", "futures": {"in_flight": 3, "kept": 40}, "own": {"in_flight": 0, "bytes": 0}, "refused": 2,
    "commits": 9, "service": {"device": "cpu"},
    "sessions": [
        {
            "session_id": "s-1", "client": "alice", "name": "sums", "created": 0, "idle_seconds": 0.5, "samplers": 1,
            "models": [
                {"model_id": "m-1", "updates": 7, "queued": 2, "log_bytes": 5000, "failed": None, "tokens_checked": 900,
                 "tokens_different": 0},
                {"model_id": "m-2", "updates": 1, "queued": 0, "log_bytes": 9, "failed": "no room",
                 "tokens_checked": 90, "tokens_different": 4},
            ],
        },
    ],
}  # fmt: skip


@pytest.fixture
def training_api():
    """An API that answers /status; (its address, the keys that it was asked with)"""
    keys: list[str] = []

    def status(request):
        keys.append(request.headers["x-api-key"])
        return JSONResponse(STATUS)

    server = BackgroundServer(Starlette(routes=[Route("/status", status)]), Listen())
    yield server.url, keys
    server.close()


@pytest.fixture
def visit(browser, tmp_path, request):
    """visit() opens the dashboard of `tmp_path`. Errors of the page, and requests to elsewhere, fail the test."""
    wrong: list[str] = []
    has_api = "training_api" in request.fixturenames
    api = TrainingApi(request.getfixturevalue("training_api")[0], "tml-key") if has_api else None
    dashboard = Dashboard(tmp_path, api=api)
    server = BackgroundServer(make_app(dashboard), Listen(token=TOKEN, browser=True))
    context = browser.new_context(viewport={"width": 1600, "height": 900}, accept_downloads=True)
    context.set_default_timeout(120_000)

    def go(view: str = ""):
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        page.on(
            "request",
            lambda request: request.url.startswith((server.url, "blob:", "data:")) or wrong.append(request.url),
        )
        page.goto(f"{server.url}/?token={TOKEN}{view}")  # one load: nothing is drawn before the view that is asked for
        assert "token" not in page.url
        return page

    yield go
    context.close()
    dashboard.close()
    server.close()
    assert wrong == []


def into_view(found):
    """Scroll there, again where the page was drawn anew meanwhile: Playwright does not retry this by itself."""
    for left in reversed(range(50)):
        try:
            found.scroll_into_view_if_needed()
        except sync_api.Error as error:
            if "not attached" not in str(error) or not left:
                raise
        else:
            return


def card(page, title: str):
    """A panel's card, brought into view: charts are drawn when they are seen."""
    found = page.locator(f'.card[data-panel="{title}"]')
    into_view(found.first)
    return found


def choose(page, title: str, item: str):
    """Pick an item of a card's menu."""
    found = card(page, title)
    found.hover()
    found.get_by_label(f"More on {title}").click()
    found.get_by_role("menuitem", name=item).click()


def test_a_finished_run(visit, tmp_path):
    write_run(tmp_path / "a", 6)
    page = visit()
    card(page, "Reward").locator("canvas").wait_for()
    expect(page.locator(".strip")).to_contain_text("exactly 0")
    assert page.locator("section.group > h2").first.inner_text() == "Learning"
    line = page.locator(".parity-line")
    expect(line).to_contain_text("Parity: exactly 0")
    expect(line).to_have_attribute("aria-expanded", "false")
    assert not page.locator('.card[data-panel="KL, k3"]').is_visible()
    line.click()
    assert page.locator('.card[data-panel="Bytes on the wire"]').count() == 0  # absent metrics, absent panels
    expect(card(page, "Step, by phase")).to_contain_text("waiting0.25")
    expect(card(page, "Log-ratio histogram")).to_contain_text("100 % within 1e−6, ESS 100 %")

    k3 = card(page, "KL, k3")
    k3.locator(".plot").focus()
    page.keyboard.press("t")
    expect(k3.locator("table.data tbody th")).to_have_text(["1", "2", "3", "4", "5", "6"])
    page.keyboard.press("t")
    k3.locator("canvas").wait_for()
    with page.expect_download() as download:
        choose(page, "KL, k3", "CSV")
    assert download.value.suggested_filename == "a_kl-k3.csv"
    rows = list(csv.DictReader(download.value.path().read_text().splitlines()))
    assert [row["parity/k3"] for row in rows] == ["0.0"] * 6

    k3.locator(".plot").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(k3).to_contain_text("step 3")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Step 3')")
    expect(page.locator("main")).to_contain_text("equal bits, every token")
    page.wait_for_selector(".tokens .tok")
    assert page.locator(".tok.more, .tok.less").count() == 0
    page.keyboard.press("]")
    page.wait_for_selector("h1:has-text('Step 4')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".strip")
    page.keyboard.press("d")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()


def test_drill_down_to_the_worst_token(visit, tmp_path):
    write_run(tmp_path / "a", 3, drift=0.05)
    page = visit("#/step?of=a&step=2")
    page.wait_for_selector("#rollouts tbody tr")
    worst = page.locator("#rollouts tbody tr").first
    expect(worst).to_have_attribute("aria-selected", "true")
    page.wait_for_selector(".tok.more, .tok.less")
    token = page.locator(".tok.more, .tok.less").first
    token.focus()
    expect(page.locator(".inspector")).to_contain_text("likely than the engine that sampled it")
    expect(page.locator(".components")).to_contain_text("correct")
    uid = worst.locator(".mono").first.inner_text()
    page.locator("h1").click()
    page.keyboard.press("j")
    expect(page.locator("#detail h3")).not_to_contain_text(uid)
    page.select_option("select[aria-label=Outcome]", "dropped")
    expect(page.locator("#rollouts tbody tr")).to_have_count(4)
    expect(page.locator("#rollouts")).to_contain_text("not compared")


def test_a_live_run(visit, tmp_path):
    writer = Writer(tmp_path / "a")
    for _ in range(3):
        writer.write()
    page = visit()
    page.wait_for_selector("#runs .dot.live")
    expect(page.locator(".strip")).to_contain_text("Steps2of 6")
    page.locator(".parity-line").click()
    writer.write(extra={"sync/wire_bytes": 1000, "fresh/metric": 1})
    expect(page.locator(".strip")).to_contain_text("Steps3of 6")
    page.wait_for_selector('.card[data-panel="Bytes on the wire"]', state="attached")  # new metrics, new panels
    page.wait_for_selector('.card[data-panel="fresh/metric"]', state="attached")
    Writer(tmp_path / "young").write()
    page.wait_for_selector("#runs .name:has-text('young')")


def test_who_chose_a_completion_is_left_at_it(visit, tmp_path):
    writer = Writer(tmp_path / "a", drift=0.05)
    for _ in range(3):
        writer.write()
    page = visit("#/rollouts?run=a")
    expect(page.locator("#index")).to_contain_text("of 2 steps")
    rows = page.locator("#rollouts tbody tr")
    expect(rows.first).to_have_attribute("aria-selected", "true")
    held = []
    page.route("**/api/rollouts?*", lambda route: route.continue_() if held else held.append(route))
    with page.expect_request("**/api/rollouts?*"):
        writer.write()  # while the page asks for what is new, a person moves on
    page.keyboard.press("j")
    expect(rows.nth(1)).to_have_attribute("aria-selected", "true")
    held[0].continue_()
    expect(page.locator("#index")).to_contain_text("of 3 steps")
    expect(rows.nth(1)).to_have_attribute("aria-selected", "true")


def test_a_view_that_was_left_before_it_came_is_not_drawn(visit, tmp_path):
    write_run(tmp_path / "a", 2)
    page = visit()
    page.wait_for_selector("section.group")
    held = []
    page.route("**/api/certificate?*", lambda route: held.append(route))
    with page.expect_request("**/api/certificate?*"):
        page.keyboard.press("3")
    page.keyboard.press("2")
    expect(page.locator("h1")).to_have_text("Rollouts")
    with page.expect_response("**/api/certificate?*"):
        held[0].continue_()
    page.wait_for_timeout(300)
    expect(page.locator("h1")).to_have_text("Rollouts")


def test_durations(visit):
    said = visit().evaluate(
        "async () => { const { duration } = await import('/static/dom.js');"
        " return [0.25, 59.94, 59.97, 119.7, 3599.7, 7300].map(duration); }"
    )
    assert said == ["250 ms", "59.9 s", "1 min 0 s", "2 min 0 s", "1 h 0 min", "2 h 1 min"]


def test_runs_over_one_another(visit, tmp_path):
    write_run(tmp_path / "zero", 4)
    write_run(tmp_path / "drift", 4, drift=0.01, config={"seed": 0, "trainer": {"num_steps": 9}})
    page = visit("#/charts?run=zero&run=drift")
    expect(card(page, "KL, k3").locator(".chips line")).to_have_count(2)
    lines = page.evaluate(
        """() => [...document.querySelectorAll('.card[data-panel="KL, k3"] .chips line')]
             .map((line) => [line.getAttribute('stroke'), line.getAttribute('stroke-dasharray')])"""
    )
    assert len({colour for colour, _ in lines}) == len({dash for _, dash in lines}) == 2
    page.keyboard.press("4")
    page.wait_for_selector("h1:has-text('Configuration')")
    expect(page.locator("table.list tbody")).to_contain_text("trainer.num_steps")
    assert "seed" not in page.locator("table.list tbody td:first-child").all_inner_texts()
    page.keyboard.press("3")
    page.wait_for_selector("h1:has-text('Certificate')")
    expect(page.locator(".strip")).to_contain_text("unbroken")


def test_choosing_runs(visit, tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"arm=a,seed={seed}", 3)
    page = visit()
    expect(page.locator(".strip .row")).to_have_count(3)
    expect(card(page, "Step, by phase")).to_have_count(3)  # a timeline is of one run
    expect(card(page, "Reward").locator(".who")).to_have_count(0)  # the training batch's names are left out
    page.locator(".parity-line").click()
    expect(card(page, "KL, k3").locator(".chips .who")).to_have_text(["seed=0", "seed=1", "seed=2"])
    page.locator("#runs li").nth(1).hover()
    page.get_by_label("Show arm=a,seed=1 alone").click()
    expect(page.locator(".strip .row")).to_have_count(1)
    expect(page.locator(".strip")).to_contain_text("arm=a,seed=1")
    page.fill("#filter", "seed=2")
    page.click("#choose-all")
    expect(page.locator(".strip .row")).to_have_count(2)
    page.click("#choose-none")
    expect(page.locator(".strip .row")).to_have_count(1)
    page.fill("#filter", "")
    page.click("#choose-none")
    page.wait_for_selector("text=No run is chosen")


def test_runs_in_no_folder_stand_before_the_folders(visit, tmp_path):
    for name in ("a", "more/b", "z"):
        write_run(tmp_path / name, 1)
    page = visit()
    expect(page.locator("#runs .name, #runs .folder")).to_have_text(["a", "z", "more", "b"])


def test_regions_experts_and_a_number_that_is_not_finite(visit, tmp_path):
    writer = Writer(tmp_path / "a")
    for step in range(4):
        regions = {
            f"fleet/{region}/{name}": value
            for region in ("eu", "us")
            for name, value in {"k3": 0.0, "sync_fetched_bytes": 1000, "sync_seconds": 0.5, "engines": 2}.items()
        }
        own = {"sync/ratio": 30 + step, "experts/load_max": 1.5, "loss/grad_norm": None if step == 2 else 1.0}
        writer.write(extra=regions | own)
    page = visit()
    page.locator(".parity-line").click()
    for title in ("KL, k3, by region", "Sync, by region"):
        expect(card(page, title).locator(".chips .who")).to_have_text(["eu", "us"])
    page.fill("#find", "experts")
    expect(page.locator(".card:visible h3")).to_have_text(["Busiest expert"])
    page.fill("#find", "grad")
    norm = card(page, "Gradient norm")
    norm.locator("canvas").wait_for()
    norm.hover()
    norm.get_by_text("Table").click()
    expect(norm.locator("table.data tbody td")).to_have_text(["1", "not finite", "1"])


# Charts follow the window a moment later.
WIDEST = "Math.max(...[document.documentElement, document.querySelector('#main')].map((each) => each.scrollWidth))"

# Whether the number of completions is whole beside the link to the first of them.
HEADING_OF_MANY = """() => {
  const [count, link] = ["count", "rollouts-csv"].map((id) => document.getElementById(id));
  [count.textContent, link.textContent] = ["30,720", "CSV of the first 10,000"];
  const [number, first] = [count, link.parentElement].map((element) => element.getBoundingClientRect());
  return count.scrollWidth <= count.clientWidth && (number.right <= first.left || number.bottom <= first.top);
}"""


@pytest.mark.parametrize("width", [900, 400])
def test_a_narrow_window(visit, tmp_path, width):
    write_run(tmp_path / "a-run-with-a-name-that-is-rather-long,trainer.lr=0.0005,seed=0", 3, drift=0.01)
    write_talk(tmp_path / "talk")
    page = visit("#/charts?run=a-run-with-a-name-that-is-rather-long,trainer.lr=0.0005,seed=0")
    page.set_viewport_size({"width": width, "height": 800})
    card(page, "KL, k3").locator("canvas").wait_for()  # unfolded, since tokens differ
    for view in ("charts", "step?step=2", "rollouts?of=talk", "certificate", "config"):
        page.goto(page.url.split("#")[0] + f"#/{view}")
        page.locator(".beside" if view.startswith(("step", "rollouts")) else "main .card").first.wait_for()
        until(lambda: page.evaluate(WIDEST) <= width)
        if view.startswith("rollouts"):
            until(lambda: page.evaluate(HEADING_OF_MANY))
    if width == 400:
        assert not page.locator("#filter").is_visible()
        page.click("#runs-toggle")
        assert page.locator("#filter").is_visible()


def test_broken_files(visit, tmp_path):
    write_run(tmp_path / "a", 5)
    metrics = tmp_path / "a" / "metrics.jsonl"
    certificate = tmp_path / "a" / "parity.jsonl"
    certificate.write_text(certificate.read_text().replace('"tokens":40', '"tokens":41', 1))
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines[:3], '{"step": 3, \n', *lines[4:]]))
    rollout_files(tmp_path / "a")[1].write_bytes(b"no zstd")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.yaml").write_text("a: [\n")
    (tmp_path / "b" / "metrics.jsonl").write_text("no json\n")
    page = visit("#/charts?run=a&run=b")
    page.wait_for_selector(".problems")
    expect(page.locator(".problems").first).to_contain_text("metrics.jsonl, line 4, is damaged and left out")
    expect(page.locator(".problems").first).to_contain_text("config.yaml cannot be read")
    page.goto(page.url.split("#")[0] + "#/step?of=a&step=2")
    expect(page.locator("#rollouts .warn")).to_contain_text("is damaged")
    page.goto(page.url.split("#")[0] + "#/certificate?run=a")
    expect(page.locator(".strip")).to_contain_text("broken at 1 place")


def test_ten_thousand_steps(visit, tmp_path):
    write_run(tmp_path / "long", 1, finished=False)
    with (tmp_path / "long" / "metrics.jsonl").open("a") as file:
        rng = np.random.default_rng(0)
        for step in range(2, 10_001):
            k3, reward = rng.exponential(1e-5), float(np.tanh(step / 3000) + 0.1 * rng.normal())
            file.write(json.dumps({"step": step, "parity/k3": k3, "reward/mean": reward, "time/step": 1.0}) + "\n")
    page = visit()
    reward = card(page, "Reward")
    reward.locator("canvas").wait_for()
    expect(page.locator(".strip")).to_contain_text("10,000")
    reward.locator(".plot").focus()
    page.keyboard.press("t")
    table = reward.locator("table.data")
    expect(table).to_have_attribute("aria-rowcount", "10000")
    table.locator("tbody th:text-is('10,000')").wait_for()
    assert table.locator("tbody tr").count() < 100


def test_no_run_yet(visit):
    page = visit()
    page.wait_for_selector("text=No runs yet")


def test_a_run_without_a_step_yet(visit, tmp_path):
    Writer(tmp_path / "a")
    page = visit()
    page.wait_for_selector("text=No step is recorded yet")
    expect(page.locator(".strip .value").first).to_have_text("–")


def test_held_out_pairs_of_a_reward_model_are_named_as_on_the_terminal(visit, tmp_path):
    task = {"_target_": "rlloop.recipes.offline.task.Given", "kind": "verdicts"}
    writer = write_run(tmp_path / "judge", 1, config={**CONFIG, "task": task})
    writer.write(extra={"eval/reward": 1.7, "eval/solved": 0.4, "loss/total": 0.5})
    page = visit()
    expect(page.locator(".strip .label")).to_have_text(
        ["Held-out preference accuracy", "Held-out margin", "Training loss", "Length", "Entropy", "Parity", "Steps"]
    )


def test_panels_are_arranged_in_the_link(visit, tmp_path):
    write_run(tmp_path / "a", 6)
    page = visit("#/charts?run=a&smooth=0.5&zoom=2~5")
    titles = page.locator("section.group .card:visible h3")
    expect(titles.first).to_have_text("Held-out pass@1")
    choose(page, "Sampled and accepted", "Pin to the top")
    expect(page.locator("section.group > h2").first).to_have_text("Pinned")
    card(page, "Step").locator(".plot").focus()
    page.keyboard.press("p")
    expect(titles.nth(1)).to_have_text("Step")
    page.keyboard.press("<")  # it keeps the focus
    expect(titles.nth(0)).to_have_text("Step")
    card(page, "Held-out pass@1").locator(".plot").focus()
    page.keyboard.press("h")
    expect(page.locator('.card[data-panel="Held-out pass@1"]')).to_have_count(0)
    choose(page, "Reward", "Logarithmic scale")
    page.select_option("[aria-label='Horizontal axis']", "time")
    expect(card(page, "Reward").locator("canvas")).to_have_count(1)
    page.locator(".parity-line").click()

    page.reload()  # as somebody who was sent the link
    expect(titles.nth(0)).to_have_text("Step")
    expect(titles.nth(1)).to_have_text("Sampled and accepted")
    expect(page.locator('.card[data-panel="Held-out pass@1"]')).to_have_count(0)
    expect(page.locator('.card[data-panel="KL, k3"] canvas')).to_have_count(1)
    expect(page.locator("[aria-label='Horizontal axis']")).to_have_value("time")
    expect(page.locator("[aria-label='Smoothing']")).to_have_value("0.5")
    assert "log=reward" in page.url
    assert "zoom" not in page.url  # another axis: the old one's numbers mean nothing on it
    page.click("[aria-label='Hidden panels']")
    page.get_by_role("menuitem", name="Held-out pass@1").click()
    expect(page.locator('.card[data-panel="Held-out pass@1"]')).to_have_count(1)


def test_a_chart_as_a_picture(visit, tmp_path):
    write_run(tmp_path / "a", 6)
    page = visit()
    card(page, "Step, by phase").locator("canvas").wait_for()
    for title in ("Reward", "Step, by phase"):
        with page.expect_download() as download:
            choose(page, title, "SVG")
        picture = download.value.path().read_text()
        assert title in picture
        assert picture.count("<path") >= 2
        assert "NaN" not in picture
    assert download.value.suggested_filename == "a_step-by-phase.svg"
    with page.expect_download() as download:
        choose(page, "Reward", "PNG")
    assert download.value.path().read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_notes_and_tags(visit, tmp_path):
    write_run(tmp_path / "a", 2)
    write_run(tmp_path / "b", 2)
    page = visit()
    page.get_by_label("Note and tags of a").click()
    page.fill("[aria-label=Note]", "lr was too high")
    page.fill("[aria-label=Tags]", "paper, tried")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".strip .tag")).to_have_text(["paper", "tried"])
    assert json.loads((tmp_path / "a" / "notes.json").read_text()) == {
        "note": "lr was too high", "tags": ["paper", "tried"],
    }  # fmt: skip
    expect(page.locator("#runs .tag")).to_have_text(["paper", "tried"])
    page.fill("#filter", "too high")
    expect(page.locator("#runs .name")).to_have_text(["a"])


def test_why_a_run_failed(visit, tmp_path):
    writer = write_run(tmp_path / "a", 2, finished=False)
    with RunFolder(writer.path) as folder:
        folder.log("stopped: every one of 64 samples was rejected,\nfirst: no such file")
        folder.write_json("summary.json", {"status": "failed", "step": 2})
    with RunFolder(tmp_path / "refused") as folder:
        folder.adopt(CONFIG)
        folder.log("stopped: no")
        folder.write_json("summary.json", {"status": "failed", "step": 0})
    page = visit()
    expect(page.locator(".failed")).to_contain_text("a failed after step 2")
    expect(page.locator(".failed pre")).to_have_text("every one of 64 samples was rejected,\nfirst: no such file")
    expect(page.locator("#runs input:checked")).to_have_count(1)  # not the one that never began
    page.get_by_label("Show refused alone").click()
    expect(page.locator(".failed")).to_contain_text("refused failed before its first step")
    expect(page.locator("main")).not_to_contain_text("appears here by itself")


def test_a_run_that_parity_stopped_is_not_green(visit, tmp_path):
    writer = write_run(tmp_path / "a", 2, finished=False)
    with RunFolder(writer.path) as folder:  # the step that differed has no record
        folder.log("stopped: step 3: 1 of 24 trained tokens")
        folder.write_json("summary.json", {"status": "parity broken", "step": 2})
    page = visit()
    expect(page.locator(".failed")).to_contain_text("engine and trainer differ after step 2")
    expect(page.locator(".strip .warn")).to_have_text("differs")
    expect(page.locator(".parity-line")).to_contain_text("none of the 80 tokens compared before")
    expect(page.locator(".parity-line")).to_have_attribute("aria-expanded", "true")
    expect(page.locator(".good")).to_have_count(0)


ASKED = "performance.getEntriesByType('resource').filter((each) => each.name.includes('/api/rollout?')).length"


def test_a_conversation(visit, tmp_path):
    write_talk(tmp_path / "a")
    page = visit("#/rollouts?run=a")
    expect(page.locator("#rollouts .text")).to_have_text("answer 7")
    expect(page.locator("#rollouts .asked")).to_have_text("what is 3 + 4")
    bubbles = page.locator(".bubble")
    expect(bubbles.locator(".role b")).to_have_text(
        ["System", "User", "Assistant, turn 1", "Tool · add", "Assistant, turn 2"]
    )
    expect(bubbles.nth(2)).to_contain_text("trained5 tokens")
    expect(bubbles.nth(2)).to_contain_text("reward 0.25")
    expect(bubbles.nth(3)).to_contain_text("masked")
    assert bubbles.nth(3).locator(".tok").count() == 0
    page.select_option("[aria-label='Colour tokens by']", "advantage")
    expect(page.locator(".scale")).to_contain_text("made less likely")
    assert "213 94 0" not in bubbles.nth(2).locator(".tok").first.get_attribute("style")
    last = bubbles.nth(4).locator(".tok").first
    last.focus()
    expect(page.locator(".inspector")).to_contain_text("advantage −0.25")
    assert page.evaluate(ASKED) == 1  # for its tokens, though the list was told of twice
    page.fill("#find", "nowhere")
    expect(page.locator("#rollouts")).to_contain_text("No completion contains this text.")
    expect(page.locator("#detail")).to_have_text("Nothing is chosen.")
    page.fill("#find", "ANSWER")
    expect(page.locator("#rollouts tbody tr")).to_have_count(1)
    expect(bubbles.nth(4)).to_contain_text("answer")


COLOUR = """(image) => {
  const context = document.createElement("canvas").getContext("2d");
  context.drawImage(image, 0, 0);
  return [image.naturalWidth, image.naturalHeight, ...context.getImageData(5, 5, 1, 1).data.slice(0, 3)];
}"""


def test_pictures_stand_beside_the_completion_and_in_the_reply_that_showed_them(visit, tmp_path):
    write_pictures(tmp_path / "a", prompt=(200, 30, 30), reply=(30, 60, 210))
    page = visit("#/rollouts?run=a&order=order")
    detail = page.locator("#detail")
    expect(detail.locator(".pictures img")).to_have_count(2)
    asked, shown = page.get_by_alt_text("Image 1 of the prompt"), page.get_by_alt_text("Image 1 of the reply")
    for image, colour in ((asked, [200, 30, 30]), (shown, [30, 60, 210])):
        into_view(image)
        image.evaluate("(image) => image.decode()")
        assert image.evaluate(COLOUR) == [32, 24, *colour]
    bubbles = detail.locator(".bubble")
    expect(bubbles.filter(has=shown)).to_contain_text("and this")
    expect(bubbles.filter(has=asked)).to_have_count(0)  # above the conversation
    expect(bubbles.nth(1)).to_contain_text("1 token")
    expect(bubbles.nth(1)).not_to_contain_text("1 tokens")
    expect(detail.locator(".pictures figcaption").first).to_contain_text("tokens 1 to 4")
    page.keyboard.press("j")
    expect(detail.locator("h3").first).to_contain_text("1/0/1")
    expect(detail.locator(".pictures img")).to_have_count(0)


def test_a_training_api(visit, tmp_path, training_api):
    page = visit()  # without runs it opens on its page
    expect(page.locator("h1")).to_have_text("Training API")
    expect(page.locator(".strip")).to_contain_text("Futures in flight340 kept")
    expect(page.locator(".strip")).to_contain_text("4 differof 990 tokens")
    rows = page.locator(".sessions tbody tr")
    expect(rows.nth(0)).to_contain_text("exactly 0: 900 tokens equal")
    expect(rows.nth(1)).to_contain_text("4 of 90 tokens differ")
    expect(page.locator(".failed")).to_contain_text("m-2 failed. no room")
    assert set(training_api[1]) == {"tml-key"}
    page.set_viewport_size({"width": 400, "height": 800})
    until(lambda: page.evaluate(WIDEST) <= 400)
