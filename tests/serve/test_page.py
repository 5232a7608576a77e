"""The dashboard in a real browser, before a real server."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from cafe_tta.serve.http import dashboard as page
from cafe_tta.simulate.client import Client

from .browser import browser, require_browser, resize, shown, text, texts, until
from .http_server import Files, Server, digits, make_files

TOKEN = "sesame-open-wide"
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
EVENTS = "return performance.getEntriesByType('resource').map((r) => r.name)"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("model"))


def serve(files: Files, *more: str) -> Server:
    steps = ("--step-images", "32", "--validation-images", "16", "--buffer-images", "64", "--no-gate", "--no-judge")
    return Server("--model", files.model, "--stats", files.stats, *steps, *more)


def send(server: Server, camera: str, images: np.ndarray) -> None:
    client = Client(server.url)
    for part in np.split(images, max(1, len(images) // 32)):
        client.classify("small", part, camera)
    client.close()


def click(driver, selector: str) -> None:
    button = driver.find_element("css selector", selector)
    until(driver, button.is_enabled, f"{selector} can be clicked")
    button.click()


def opened(driver, name: str) -> bool:
    return driver.execute_script("return document.getElementById(arguments[0]).open", name)


def errors(driver) -> list[str]:
    """What the browser complains of. That no token is refused, and a save without a folder, is what the test is for."""
    expected = r"/api/pause .* status of 401|/api/save .* status of 409"
    return [entry["message"] for entry in driver.get_log("browser") if not re.search(expected, entry["message"])]


def test_the_page_shows_a_server_while_it_works_and_its_buttons_work(files):
    require_browser()
    options = ("--method", "cafe", "--token", TOKEN)
    with serve(files, *options) as server, browser() as driver, server.until_ready().client() as client:
        driver.get(server.url)
        until(driver, lambda: text(driver, "#state") == "Adapting", "the first status")
        check_empty(driver)
        send(server, "gate-1", digits(64))
        send(server, EVIL, 255 - digits(128)[64:])
        send(server, "x" * 60, digits(32))
        check_numbers(driver, client)
        check_that_names_are_no_markup(driver)
        check_widths(driver)
        check_control(driver, client)
        assert errors(driver) == []
        assert {url.removeprefix(server.url) for url in driver.execute_script(EVENTS)} <= {
            *("/api/events", "/favicon.ico"),
            *(f"/api/{action}" for action in ("pause", "resume", "rollback", "reset", "save")),
        }


def test_the_first_page_of_a_server_with_several_models_lists_them(files, tmp_path):
    require_browser()
    tables = (f'[models.{name}]\nmodel = "{files.model}"\nsource = ["{files.stats}"]\n' for name in ("gate", "lane"))
    config = tmp_path / "serve.toml"
    config.write_text("\n".join(tables))
    with Server("--config", config) as server, browser() as driver, server.until_ready().client() as client:
        driver.get(server.url)
        until(driver, lambda: texts(driver, ".model h2 a") == ["gate", "lane"], "the list")
        assert texts(driver, ".model .pill") == ["Adapting", "Adapting"]
        driver.find_element("link text", "lane").click()
        until(driver, lambda: text(driver, "#name") == "lane" and text(driver, "#state") == "Adapting", "its page")
        click(driver, "#pause")
        until(driver, lambda: text(driver, "#state") == "Paused", "the pause")
        states = {model["name"]: model["state"] for model in client.get("/api/models").json()}
        assert states == {"gate": "adapting", "lane": "paused"}
        driver.find_element("link text", "all models").click()
        until(driver, lambda: texts(driver, ".model .pill") == ["Adapting", "Paused"], "the list again")
        # A list of one model is no list: what is left has the first page.
        config.write_text(config.read_text().partition("[models.lane]")[0])
        assert client.post("/api/reload").json()["ok"]
        until(driver, lambda: shown(driver, "#name") and text(driver, "#name") == "gate", "the page of what is left")
        assert errors(driver) == []


def check_empty(driver) -> None:
    assert re.fullmatch(r"The next step waits for about \d+ more images\.", text(driver, "#waiting"))
    assert "no images yet" in text(driver, "#drift-more")
    assert shown(driver, "#cameras-empty")
    assert shown(driver, "#drift-plot .empty")
    assert not shown(driver, "#clusters-card") and not shown(driver, "#cameras-clusters")  # nothing is unmixed
    assert not driver.find_element("id", "rollback").is_enabled()


def check_numbers(driver, client) -> None:
    until(driver, lambda: text(driver, "#images") == "160", "all images counted")
    until(driver, lambda: len(texts(driver, "#cameras tbody tr")) == 3, "all cameras")
    until(driver, lambda: client.get("/api/status").json()["steps"]["accepted"] > 0, "an accepted step")
    until(driver, lambda: int(text(driver, "#steps")) == client.get("/api/status").json()["steps"]["accepted"], "steps")
    until(driver, lambda: len(texts(driver, "#steps-plot circle.accepted")) > 1, "a mark beside the lane's own")
    until(driver, lambda: driver.find_elements("css selector", "#rate-plot .line"), "throughput")
    until(driver, lambda: driver.find_elements("css selector", "#latency-plot .line"), "latency")
    until(driver, lambda: re.fullmatch(r"[\d.]+", text(driver, "#drift")), "drift")
    assert len(texts(driver, "#groups li")) == len(client.get("/api/status").json()["groups"]) > 0
    shares = [float(value.split()[0]) for value in texts(driver, "#classes .value")]
    assert len(shares) == len(client.get("/api/status").json()["classes"]) > 0
    assert sum(shares) == pytest.approx(100, abs=1)
    assert any("accepted" in line for line in texts(driver, "#events li"))
    adapted = client.get("/api/status").json()["adapted_images"]
    assert text(driver, "#images-more") == f"{adapted} taken for adapting"
    images = dict(
        zip(texts(driver, "#cameras td:nth-child(1)"), texts(driver, "#cameras td:nth-child(4)"), strict=True)
    )
    assert images == {"gate-1": "64", EVIL: "64", "x" * 60: "32"}
    click(driver, "th button[data-sort=camera]")
    assert texts(driver, "#cameras td:nth-child(1)") == sorted(images)


def check_that_names_are_no_markup(driver) -> None:
    assert driver.execute_script("return window.hacked") is None
    assert driver.find_elements("css selector", "main img, main script") == []


def check_widths(driver) -> None:
    for width, height in ((390, 844), (320, 640), (820, 1180), (1280, 800)):
        resize(driver, width, height)
        wide = "return document.documentElement.scrollWidth"
        until(driver, lambda: driver.execute_script("return innerWidth") == width, "the new width")  # noqa: B023
        until(driver, lambda: driver.execute_script(wide) <= width, f"no sideways scrolling at {width}")  # noqa: B023


def check_control(driver, client) -> None:
    def state() -> str:
        return client.get("/api/status").json()["state"]

    # A token is asked for, a wrong one is refused, the right one is remembered.
    click(driver, "#pause")
    until(driver, lambda: opened(driver, "token-dialog"), "the question for the token")
    driver.find_element("id", "token").send_keys("a-wrong-token")
    click(driver, "#token-use")
    until(driver, lambda: "not accepted" in text(driver, "#token-why"), "a wrong token is told")
    assert state() == "adapting"
    until(driver, lambda: opened(driver, "token-dialog"), "the question for another token")
    driver.find_element("id", "token").send_keys(TOKEN + "\n")
    until(driver, lambda: text(driver, "#state") == "Paused", "paused")
    assert state() == "paused"
    assert not driver.find_element("id", "pause").is_enabled()
    click(driver, "#resume")
    until(driver, lambda: text(driver, "#state") == "Adapting", "adapting again")
    assert not opened(driver, "token-dialog")

    # Rolling back and resetting are confirmed first.
    click(driver, "#rollback")
    until(driver, lambda: opened(driver, "rollback-dialog"), "the question which version")
    assert driver.find_elements("css selector", "#rollback-version option")
    click(driver, "#rollback-dialog button[value='']")
    assert "rolled_back" not in kinds(client)
    click(driver, "#rollback")
    until(driver, lambda: opened(driver, "rollback-dialog"), "the question again")
    click(driver, "#rollback-dialog button[value=yes]")
    until(driver, lambda: "Rolled back to" in text(driver, "#message"), "the answer")
    assert "rolled_back" in kinds(client)
    click(driver, "#reset")
    until(driver, lambda: opened(driver, "reset-dialog"), "the question whether to reset")
    click(driver, "#reset-dialog button[value=yes]")
    until(driver, lambda: "Reset" in text(driver, "#message"), "the answer")
    assert "reset" in kinds(client)
    until(driver, lambda: any("reset" in line for line in texts(driver, "#events li")), "the event")
    click(driver, "#save")  # there is no folder to save to: the server's own words are shown
    until(driver, lambda: "Not done: " in text(driver, "#message"), "why it cannot be saved")


def kinds(client) -> set[str]:
    return {event["kind"] for event in client.get("/api/status").json()["events"]}


def test_clusters_and_the_cameras_that_fall_into_them_are_shown_also_after_a_restart(files, tmp_path):
    require_browser()
    # The margin: no camera of this model, which nobody trained, looks like the source.
    options = ("--method", "unmix", "--state", str(tmp_path), "--gate-margin", "1e-6")
    grey = (100 + digits(128) // 16).astype(np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (128, 32, 32, 3)).astype(np.uint8)
    with browser() as driver:
        with serve(files, *options) as server, server.until_ready().client() as client:
            driver.get(server.url)
            until(driver, lambda: shown(driver, "#clusters-empty"), "a place for clusters")
            for part in range(0, 128, 32):
                send(server, "grey", grey[part : part + 32])
                send(server, "noise", noise[part : part + 32])
            until(driver, lambda: client.get("/api/status").json()["steps"]["accepted"] >= 2, "accepted steps")
            for action in ("pause", "save"):  # which waits for a running step
                assert client.post(f"/api/{action}").json()["ok"]
            for camera, images in (("grey", grey), ("noise", noise)):  # answered with the clusters of that version
                send(server, camera, images[64:])
            check_clusters(driver, client)
            check_widths(driver)
            gauge = re.search(r'^cafe_tta_clusters\{model="small"\} (\S+)$', client.get("/metrics").text, re.M)
            before = client.get("/api/status").json()["clusters"]
            assert gauge is not None and float(gauge[1]) >= 2 and server.stop() == 0
        with serve(files, *options) as server, server.until_ready().client() as client:
            send(server, "noise", noise[:32])  # what the restored state is judged on
            assert client.get("/api/status").json()["clusters"] == before
            driver.get(server.url)
            sizes = [f"{cluster['images']:,}" for cluster in before[:12]]
            until(driver, lambda: texts(driver, "#clusters .value") == sizes, "the clusters of before")


def check_clusters(driver, client) -> None:
    def numbers() -> dict[str, str]:
        names, cells = texts(driver, "#cameras td:nth-child(1)"), texts(driver, "#cameras td:nth-child(6)")
        return dict(zip(names, cells, strict=True))

    until(driver, lambda: len(texts(driver, "#clusters li")) >= 2, "at least two clusters")
    until(driver, lambda: numbers() and all(re.search(r"\d", cell) for cell in numbers().values()), "their numbers")
    shown_numbers = {name: set(cell.split(", ")) for name, cell in numbers().items()}
    assert shown_numbers.keys() == {"grey", "noise"} and not shown_numbers["grey"] & shown_numbers["noise"]
    title = driver.find_element("css selector", "#cameras td:nth-child(6)").get_attribute("title")
    assert re.match(r"cluster \d+: \d+ %", title)
    assert not errors(driver)


def test_adapting_that_comes_to_nothing_is_shown(files):
    require_browser()
    with browser() as driver, serve(files) as server, server.until_ready().client() as client:
        driver.get(server.url)
        until(driver, lambda: texts(driver, "#name") == ["small"], "the page")
        assert not shown(driver, "#stalled")
        assert client.post("/api/cameras/gate", json={"adapt": False}).json()["ok"]
        noise = np.random.default_rng(0).integers(0, 256, (512, 32, 32, 3)).astype(np.uint8)
        send(server, "gate", noise)
        until(driver, lambda: shown(driver, "#stalled"), "the red line")
        (text,) = texts(driver, "#stalled")
        assert text.startswith("Adapting comes to nothing: no step was taken for 512 images")
        assert not errors(driver)


def test_a_lost_connection_is_shown_and_found_again(files):
    require_browser()
    with browser(390, 844, dark=True) as driver:
        with serve(files) as server:
            port = server.url.rpartition(":")[2]
            driver.get(server.until_ready().url)
            until(driver, lambda: text(driver, "#state") == "Adapting", "the first status")
            assert not driver.find_element("id", "lost").is_displayed()
            ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert max(map(int, re.findall(r"\d+", ground)[:3])) < 64  # dark, as asked
        until(driver, lambda: driver.find_element("id", "lost").is_displayed(), "the connection is lost")
        assert text(driver, "#state") == "Connection lost"
        assert not driver.find_element("id", "pause").is_enabled()
        with serve(files, "--port", port):
            until(driver, lambda: not driver.find_element("id", "lost").is_displayed(), "the connection is back")
            until(driver, lambda: text(driver, "#state") == "Adapting", "the state")
            assert driver.find_element("id", "pause").is_enabled()


class Addresses(HTMLParser):
    """Everything that a page would fetch, and every handler in its markup."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href") and tag != "a":
                self.fetched.append(str(value))
            if name.startswith("on") or name == "style":
                self.handlers.append(f"{tag} {name}")


def test_the_page_needs_nothing_but_its_server():
    found = Addresses()
    found.feed(page.html())
    assert found.fetched == ["favicon.ico"]
    assert found.handlers == []
    assert re.findall(r"https?://[^\"' ]+", page.html()) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|@import|url\(", page.html())


def test_the_policy_allows_this_script_and_style_alone():
    policy = dict(rule.split(" ", 1) for rule in page.csp().split("; "))
    assert policy["default-src"] == "'none'"
    assert "unsafe" not in page.csp()
    for rule, tag in (("script-src", "script"), ("style-src", "style")):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", page.html(), re.DOTALL)
        assert len(inside) == 1
        assert policy[rule] == page._hash(inside[0])
