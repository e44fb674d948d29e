"""What a visitor does on the page in a browser, step by step."""

import re

from tests.support.page_server import LONG


def choose_demo(page):
    """Choose the demo model, and go on to its budget."""
    page.click("#demo")
    page.wait_for_selector("#model-card .lz-good", timeout=LONG)  # the first time, libraries are loaded
    page.click("#to-budget")


def change_how(page):
    """Open what is chosen for a visitor who opens nothing."""
    page.get_by_role("button", name="Change how").click()


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
    change_how(page)
    page.get_by_label("Try it").check()
    choose_way(page, *way or ["features"])
    page.get_by_role("button", name="Advanced").click()
    for option, amount in {"texts": 2, "length": 64, "steps": steps}.items():
        field(page, option).fill(str(amount))
        field(page, option).press("Tab")
    page.click("#start")
    page.wait_for_url("**/?run=*")
    return re.search(r"run=([\w.-]+)", page.url)[1]


def number_at(page, selector, name):
    return page.locator(f'{selector} div:has(> dt:text-is("{name}")) dd').inner_text()
