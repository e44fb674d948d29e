"""Many visitors at once may be the first to need the large libraries."""

import subprocess
import sys

FIRST = """
import threading, time
from linearizer.page import calls

def visit(ask, at):
    time.sleep(at)
    ask()
    try:
        from transformers import AutoConfig
    except ImportError as error:
        wrong.append(error)

doors = [lambda: calls.Browser({}).visitor, lambda: calls.identify_visitor("", None, None)]
wrong = []
visitors = [threading.Thread(target=visit, args=[doors[n % 2], n * 0.05]) for n in range(12)]
for one in visitors:
    one.start()
for one in visitors:
    one.join()
print(len(wrong), len(visitors))
"""


def test_all_who_come_first_find_the_libraries_whole():
    result = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0", "12"], result.stderr
