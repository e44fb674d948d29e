"""What a visitor does on the page in a browser, step by step."""

import re

from tests.support.page_server import LONG

STEADY = """button => new Promise(done => {
    let before = 0, frames = 0
    const look = () => {
        const part = button.nextElementSibling, now = part?.querySelector('.block') && part.querySelectorAll('*').length
        frames = now && now === before ? frames + 1 : 0
        before = now
        frames < 3 ? requestAnimationFrame(look) : done()
    }
    look()
})"""


def choose_demo(page):
    """Choose the demo model, and go on to its budget."""
    page.click("#demo")
    page.wait_for_selector("#model-card .lz-good", timeout=LONG)  # the first time, libraries are loaded
    page.click("#to-budget")


def unfold(page, name):
    """Open a part of the page, and wait until its fields are there: Gradio sets their values once more a frame after
    they appear, and loses what was typed before."""
    button = page.get_by_role("button", name=name)
    button.click()
    button.evaluate(STEADY)


def choose_way(page, way, recipe=None):
    """Choose a way, and a recipe of the list where the way has one."""
    page.locator(f"#way input[value={way}]").check()
    if recipe:
        page.locator(f"#recipe input[value={recipe}]").check()


def field(page, option):
    """Find the field of an option under Advanced."""
    return page.locator(f"#option-{option}").get_by_role("textbox")


def upload(page, button, content, name="plan.json", kind="application/json"):
    """Choose a file with some content."""
    with page.expect_file_chooser() as chooser:
        page.click(button)
    chooser.value.set_files({"name": name, "mimeType": kind, "buffer": content})


def start(page, steps, *way):
    choose_demo(page)
    page.get_by_role("spinbutton", name=re.compile("Tokens of cache")).fill("256")
    unfold(page, "Change how")
    page.get_by_label("Try it").check()
    choose_way(page, *way or ["features"])
    unfold(page, "Advanced")
    for option, amount in {"texts": 2, "length": 64, "steps": steps}.items():
        field(page, option).fill(str(amount))
        field(page, option).press("Tab")
    page.click("#start")
    page.wait_for_url("**/?run=*")
    return re.search(r"run=([\w.-]+)", page.url)[1]


def number_at(page, selector, name):
    return page.locator(f'{selector} div:has(> dt:text-is("{name}")) dd').inner_text()
