"""A log is read in either direction, whatever a kill, a full disk or another program left in it."""

import pytest

from linearizer.run import events as journal

NAMES = ["first", "second", "third"]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "events.jsonl"
    for name in NAMES:
        journal.append(path, name, {})
    return path


def names(events):
    return [event["event"] for event in events]


@pytest.mark.parametrize(
    "left",
    [
        b"",
        b'{"time": 1.0, "eve',
        b"\xff\xfe\x00",
        b"null\n",
        b"[1]\n\n",
        b'{"event": 3, "time": 1}\n',
        b'{"event": "x"}\n',
    ],
)
def test_what_is_no_event_is_passed_over(log, left):
    with log.open("ab") as file:
        file.write(left)
    assert names(journal.read(log)[0]) == names(reversed(list(journal.newest_first(log)))) == NAMES
    journal.append(log, "fourth", {"more": 1})
    assert names(journal.read(log)[0]) == names(reversed(list(journal.newest_first(log)))) == [*NAMES, "fourth"]
    assert journal.first(log)["event"] == "first"


def test_a_line_that_is_being_written_is_read_when_it_is_whole(log):
    line = b'{"time": 2.0, "event": "fourth"}\n'
    found, place = journal.read(log)
    for byte in line[:-1]:
        with log.open("ab") as file:
            file.write(bytes([byte]))
        assert journal.read(log, place) == ([], place)
        assert next(journal.newest_first(log)) == found[-1]
    with log.open("ab") as file:
        file.write(line[-1:])
    assert names(journal.read(log, place)[0]) == ["fourth"] == names([next(journal.newest_first(log))])


@pytest.mark.parametrize("size", [10, 5000, 40_000])
def test_both_directions_agree_on_lines_of_every_size(log, size):
    for number in range(30):
        journal.append(log, f"event {number}", {"text": "x" * (size * number // 30)})
    assert journal.read(log)[0] == list(journal.newest_first(log))[::-1]
    assert len(journal.read(log)[0]) == 33


def test_a_log_that_is_not_there_has_no_events(tmp_path):
    path = tmp_path / "events.jsonl"
    assert journal.read(path) == ([], 0) and journal.first(path) is None and not list(journal.newest_first(path))
